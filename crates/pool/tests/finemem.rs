//! What only scheme `finemem` has: the quarantine of what was freed.

use std::time::{Duration, Instant};

use pool::{Error, GroupId, Pool, SchemeKind, Settings};

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

/// A block of several sections that a compute node leaves behind comes back, and so does all else.
#[test]
fn sections_of_who_has_gone_come_back() {
    let embedded = std::sync::Arc::new(pool::Embedded::start(&settings(2048)).unwrap());
    let staying = Pool::embedded_in(&embedded, Default::default()).unwrap();
    for _ in 0..2 {
        let leaving = Pool::embedded_in(&embedded, Default::default()).unwrap();
        let large = leaving.allocate_bytes_blocking(CHUNK << 10).unwrap();
        leaving.write_blocking(&large, large.len - 8, b"the last").unwrap();
        leaving.allocate_bytes_blocking(CHUNK << 9).unwrap();
        leaving.allocate_bytes_blocking(CHUNK).unwrap();
        assert!(staying.allocate_bytes_blocking(CHUNK << 11).is_err());
        staying.audit().unwrap();
        drop(leaving);
        check_whole(&staying, 2048);
        let all = staying.allocate_bytes_blocking(CHUNK << 11).unwrap();
        let mut bytes = vec![1; all.len as usize];
        staying.read_blocking(&all, 0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|b| *b == 0), "what was left behind is still there");
        staying.free_blocking(all).unwrap();
    }
    check_whole(&staying, 2048);
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
