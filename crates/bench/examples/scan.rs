//! `cargo run --release -p granary-bench --example scan [CHUNKS]`: what it costs the memory node's CPU to look for what
//! was freed, where nothing was; see [`bench::recovery::look_ns`]. And what share of a core a pool of 100 GB would take,
//! were it looked through every 100 ms (FineMem §6.2: 25 million chunks of 4 KB, 15 ms, 15 %).

use pool::SchemeKind::{FineMem, FineMemPaper};

/// Chunks of the paper's 100 GB.
const PAPER: f64 = 25e6;

fn main() -> Result<(), pool::Error> {
    let chunks = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(1 << 20);
    for scheme in [FineMem, FineMemPaper] {
        for (taken, state) in [(true, "all taken"), (false, "none taken")] {
            let each_ns = bench::recovery::look_ns(scheme, chunks, 40, taken)?;
            // Nearly two entries for each chunk: one for each aligned block.
            let scan_ms = each_ns * 2.0 * PAPER / 1e6;
            println!(
                "{scheme}: {chunks} chunks, {state}: {each_ns:.2} ns for an entry; a scan of 25 million chunks \
                 {scan_ms:.1} ms, every 100 ms {scan_ms:.1} % of a core (paper: 15 ms, 15 %)"
            );
        }
    }
    Ok(())
}
