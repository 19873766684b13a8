//! Several transfers with one doorbell.
//!
//! A batch moves data between registered memory and pieces of chunks, without copies in between.
//! The NIC is notified once per QP, and the caller waits once for all transfers.
//!
//! ```sh
//! cargo run --example batch
//! ```

use std::error::Error;

use pool::{Lane, Pool, Settings, Transfer};

const PAGE: usize = 4096;
const PAGES: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let settings = Settings { donate_bytes: 16 << 20, chunk_bytes: 1 << 20, ..Settings::default() };
    let pool = Pool::embedded(settings)?;
    let chunks = [pool.allocate_blocking()?, pool.allocate_blocking()?];

    // Memory that the NIC can reach. Because the NIC may access it at any time, the program copies
    // into and out of it and never has a reference to its bytes.
    let buffer = pool.buffer(PAGES * PAGE)?;
    for page in 0..PAGES {
        buffer.memory().write(page * PAGE, &[page as u8 + 1; PAGE]);
    }

    // Page i of the buffer goes to chunk i % 2.
    let transfers: Vec<Transfer> = (0..PAGES)
        .map(|page| Transfer {
            grant: &chunks[page % 2],
            offset: (page / 2 * PAGE) as u64,
            buffer_offset: page * PAGE,
            len: PAGE as u32,
        })
        .collect();
    pool.write_batch_blocking(&transfers, &buffer, Lane(0))?;
    println!("wrote {PAGES} pages to {} chunks", chunks.len());

    // A started batch leaves the thread free for other work until it waits.
    let copy = pool.buffer(PAGES * PAGE)?;
    let batch = pool.start_read_batch(&transfers, &copy, Lane(0))?;
    let expected: u32 = (1..=PAGES as u32).sum::<u32>() * PAGE as u32;
    batch.wait()?;

    let mut bytes = vec![0; PAGES * PAGE];
    copy.memory().read(0, &mut bytes);
    let sum: u32 = bytes.iter().map(|byte| u32::from(*byte)).sum();
    assert_eq!(sum, expected);
    println!("read them back: their bytes add up to {sum}");

    for chunk in chunks {
        pool.free_blocking(chunk)?;
    }
    let stats = pool.stats();
    assert_eq!((stats.reads, stats.writes), (PAGES as u64, PAGES as u64));
    Ok(())
}
