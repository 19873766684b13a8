//! Small embedded pools, and when all of one is free again.

use std::time::{Duration, Instant};

use pool::{Pool, SchemeKind, Settings};

/// Bytes of a chunk.
pub const CHUNK: u64 = 4096;

/// A pool of so many chunks.
pub fn settings(scheme: SchemeKind, chunks: u64) -> Settings {
    Settings {
        donate_bytes: chunks * CHUNK,
        chunk_bytes: CHUNK,
        scheme,
        clients_max: 4,
        ..Settings::default()
    }
}

/// Waits until so many chunks are free, and checks the books.
pub fn check_whole(pool: &Pool, chunks: u64) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while pool.node_status().unwrap().node.free < chunks {
        assert!(Instant::now() < deadline, "{:?}", pool.node_status());
        std::thread::sleep(Duration::from_millis(1));
    }
    pool.audit().unwrap();
}
