//! What it costs the memory node's CPU to look for what was freed: `cargo bench -p granary-pool --bench scan`.
//!
//! A pool in which nothing is freed, whose scans come every 100 ms at last: time for each entry of the capability table,
//! and what share of a core a pool of 100 GB would take (FineMem §6.2: 25 million chunks of 4 KB, 15 ms, 15 %).

use std::time::{Duration, Instant};

use fabric::soft::SoftNic;
use pool::finemem::Node;
use pool::scheme::NodeScheme;
use pool::{SchemeKind, Settings};

const CHUNK: u64 = 4096;
/// Chunks of the paper's 100 GB.
const PAPER: f64 = 25e6;

fn main() {
    // Cargo runs benches as tests too, without `--bench`: then only that it runs matters.
    let measures = std::env::args().any(|a| a == "--bench");
    let chunks: u64 = if measures { 1 << 20 } else { 1 << 10 };
    let scans: u64 = if measures { 40 } else { 2 };
    for scheme in [SchemeKind::FineMem, SchemeKind::FineMemPaper] {
        let donate_bytes = chunks * CHUNK;
        let settings = Settings { donate_bytes, chunk_bytes: CHUNK, scheme, ..Settings::default() };
        let began = Instant::now();
        let mut node = Node::new(&SoftNic::inline(), &settings).expect("a memory node");
        let made = began.elapsed();
        let began = Instant::now();
        let mut entries = 0;
        while entries < scans * chunks {
            node.turn().expect("a turn");
            entries = node.release_times().entries;
            assert!(began.elapsed() < Duration::from_secs(60), "{entries} entries in a minute");
        }
        let times = node.release_times();
        let each_ns = times.looking.as_nanos() as f64 / times.entries as f64;
        // Nearly two entries for each chunk: one for each aligned block.
        let scan_ms = each_ns * 2.0 * PAPER / 1e6;
        println!(
            "{scheme}: {chunks} chunks, set up in {:.2} s; {entries} entries at {each_ns:.2} ns; a scan of 25 million \
             chunks {scan_ms:.0} ms, every 100 ms {scan_ms:.0} % of a core (paper: 15 ms, 15 %)",
            made.as_secs_f64()
        );
    }
}
