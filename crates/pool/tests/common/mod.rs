//! Helpers: small embedded pools, and a check that all chunks are free again.
#![allow(dead_code, reason = "each test uses a part")]

use std::time::{Duration, Instant};

use pool::{Pool, Scheme, Settings};

/// Size of a chunk in bytes.
pub const CHUNK: u64 = 4096;

/// Settings of a pool of `chunks` chunks.
pub fn settings(scheme: Scheme, chunks: u64) -> Settings {
    Settings {
        donate_bytes: chunks * CHUNK,
        chunk_bytes: CHUNK,
        scheme,
        clients_max: 4,
        ..Settings::default()
    }
}

/// Limits the windows per function of the NIC, so that the chunks are in three functions and larger
/// blocks in others.
pub fn over_functions(settings: Settings) -> Settings {
    // Keys per block at a time. Each compute node has a window over the metadata in addition.
    let each = if settings.scheme.clears() { 1 } else { 2 };
    let share = settings.chunks().div_ceil(3) as u32;
    Settings { nic_windows: Some(share * each + settings.clients_max), ..settings }
}

/// Waits until `chunks` chunks are free, and audits the pool.
pub fn check_whole<N: verbs::Nic>(pool: &Pool<N>, chunks: u64) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while pool.node_status().unwrap().node.free < chunks {
        assert!(Instant::now() < deadline, "{:?}", pool.node_status());
        std::thread::sleep(Duration::from_millis(1));
    }
    pool.audit().unwrap();
}
