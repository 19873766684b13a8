//! Small embedded pools, and when all of one is free again.
#![allow(dead_code, reason = "no test uses all of it")]

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

/// The same on a NIC whose functions have so few windows that chunks are in three of them, and larger blocks in others.
pub fn over_functions(settings: Settings) -> Settings {
    // As many keys as a block has at a time; and each compute node has a window over the metadata.
    let each = if settings.scheme.releases() { 1 } else { 2 };
    let share = settings.chunks().div_ceil(3) as u32;
    Settings { nic_windows: Some(share * each + settings.clients_max), ..settings }
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
