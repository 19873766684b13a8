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
