//! `cargo run --release -p granary-bench --example scan [CHUNKS]`: CPU time of the memory node's
//! scan for freed chunks when there are none; see [`bench::recovery::scan_ns_per_entry`].
//!
//! Also prints the share of a core that a pool of 100 GB needs for a scan every 100 ms (FineMem
//! §6.2: 25 million chunks of 4 KB, 15 ms, 15 %).

use pool::schemes::{FINEMEM, FINEMEM_PAPER};

/// Chunks of the paper's 100 GB.
const PAPER: f64 = 25e6;

fn main() -> Result<(), pool::Error> {
    let chunks = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(1 << 20);
    for scheme in [FINEMEM, FINEMEM_PAPER] {
        for (taken, state) in [(true, "all taken"), (false, "none taken")] {
            let each_ns = bench::recovery::scan_ns_per_entry(scheme, chunks, 40, taken)?;
            // The table has one entry per aligned block: nearly two per chunk.
            let scan_ms = each_ns * 2.0 * PAPER / 1e6;
            println!(
                "{scheme}: {chunks} chunks, {state}: {each_ns:.2} ns per entry; a scan of 25 \
                 million chunks takes {scan_ms:.1} ms, every 100 ms {scan_ms:.1} % of a core \
                 (paper: 15 ms, 15 %)"
            );
        }
    }
    Ok(())
}
