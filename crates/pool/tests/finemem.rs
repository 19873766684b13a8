//! What only scheme `finemem` has: blocks of several sizes, and the quarantine of what was freed.

use std::time::{Duration, Instant};

use pool::{Error, Grant, GroupId, Pool, SchemeKind, Settings};

const CHUNK: u64 = 4096;

fn settings(chunks: u64) -> Settings {
    Settings {
        donate_bytes: chunks * CHUNK,
        chunk_bytes: CHUNK,
        scheme: SchemeKind::FineMem,
        clients_max: 4,
        ..Settings::default()
    }
}

fn check_whole(pool: &Pool, chunks: u64) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while pool.node_status().unwrap().node.free < chunks {
        assert!(Instant::now() < deadline, "{:?}", pool.node_status());
        std::thread::sleep(Duration::from_millis(1));
    }
    pool.audit().unwrap();
}

#[test]
fn every_size_up_to_a_section() {
    let pool = Pool::embedded(settings(1024)).unwrap();
    for order in 0..10 {
        let bytes = CHUNK << order;
        let grant = pool.allocate_bytes_blocking(bytes).unwrap();
        assert_eq!(grant.len, bytes);
        let mut all = vec![1; bytes as usize];
        pool.read_blocking(&grant, 0, &mut all).unwrap();
        assert!(all.iter().all(|b| *b == 0));
        pool.write_blocking(&grant, bytes - 8, b"the last").unwrap();
        let beyond = Grant::new(grant.addr + 8, bytes, grant.entry, grant.group, grant.keys());
        assert!(pool.write_blocking(&beyond, bytes - 8, b"too far.").is_err());
        pool.free_blocking(grant).unwrap();
    }
    assert_eq!(pool.allocate_bytes_blocking(CHUNK + 1).unwrap().len, 2 * CHUNK);
    let too_large = pool.allocate_bytes_blocking((CHUNK << 9) + 1).unwrap_err();
    assert!(too_large.to_string().contains("2097152"), "{too_large}");
}

/// Small blocks and whole spans take from each other what is free, in both directions.
#[test]
fn sizes_share_the_memory() {
    let chunks = 512;
    let pool = Pool::embedded(settings(chunks)).unwrap();
    let mut seed = 1u64;
    for _ in 0..3 {
        let mut held = Vec::new();
        let mut taken = 0;
        while taken < chunks / 2 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
            let order = (seed >> 33) % 7;
            let grant = pool.allocate_bytes_blocking(CHUNK << order).unwrap();
            taken += 1 << order;
            pool.write_blocking(&grant, 0, &[held.len() as u8 + 1; 64]).unwrap();
            held.push(grant);
        }
        pool.audit().unwrap();
        for (i, grant) in held.into_iter().enumerate() {
            let mut mark = [0; 64];
            pool.read_blocking(&grant, 0, &mut mark).unwrap();
            assert_eq!(mark, [i as u8 + 1; 64]);
            pool.free_blocking(grant).unwrap();
        }
        let all = pool.allocate_bytes_blocking(chunks * CHUNK).unwrap();
        let mut bytes = vec![1; all.len as usize];
        pool.read_blocking(&all, 0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|b| *b == 0), "what was freed is still there");
        pool.free_blocking(all).unwrap();
    }
    check_whole(&pool, chunks);
}

/// A freed block is its last owner's no more, and nobody else's before its key is dead and it is clear.
#[test]
fn an_old_key_is_dead_when_the_block_has_a_new_owner() {
    let pool = Pool::embedded(settings(1)).unwrap();
    for _ in 0..20 {
        let old = pool.allocate_in_blocking(GroupId(0)).unwrap();
        pool.write_blocking(&old, 0, b"secret").unwrap();
        pool.free_blocking(old).unwrap();
        assert!(matches!(pool.free_blocking(old), Err(Error::NotYours { .. })));
        // There is one block: this waits for the end of its quarantine.
        let new = pool.allocate_in_blocking(GroupId(0)).unwrap();
        assert_eq!(new.addr, old.addr);
        let mut bytes = [1; 6];
        assert!(pool.write_blocking(&old, 0, b"stale").is_err());
        assert!(pool.read_blocking(&old, 0, &mut bytes).is_err());
        pool.read_blocking(&new, 0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 6]);
        pool.free_blocking(new).unwrap();
    }
    check_whole(&pool, 1);
}

#[test]
fn other_schemes_have_one_size() {
    let pool = Pool::embedded(Settings { scheme: SchemeKind::OneSidedMw, ..settings(8) }).unwrap();
    let grant = pool.allocate_bytes_blocking(100).unwrap();
    assert_eq!(grant.len, CHUNK);
    pool.free_blocking(grant).unwrap();
    let e = pool.allocate_bytes_blocking(CHUNK + 1).unwrap_err().to_string();
    assert!(e.contains("finemem"), "{e}");
    check_whole(&pool, 8);
}
