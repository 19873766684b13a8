//! Counters in a chunk that several threads increment with one-sided atomics.
//!
//! Fetch-and-add increments in one round trip. Compare-and-swap needs a loop, and can compute any
//! new value. Neither uses a lock, and the memory node's CPU takes no part.
//!
//! ```sh
//! cargo run --example cas_counter
//! ```

use std::error::Error;
use std::thread;

use pool::{Grant, Pool, Settings};

const THREADS: u64 = 4;
const INCREMENTS: u64 = 500;
/// Offsets of the two counters: multiples of 8.
const ADDED: u64 = 0;
const SWAPPED: u64 = 8;

/// Increments a counter with compare-and-swap, from the value that it is expected to have. Returns
/// the new value and the number of failed attempts.
fn increment(pool: &Pool, grant: &Grant, mut expected: u64) -> Result<(u64, u64), pool::Error> {
    let mut failed = 0;
    loop {
        let found = pool.compare_and_swap_blocking(grant, SWAPPED, expected, expected + 1)?;
        if found == expected {
            return Ok((expected + 1, failed));
        }
        // Another thread was faster. The reply has the present value.
        expected = found;
        failed += 1;
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let pool = Pool::embedded(Settings { donate_bytes: 16 << 20, ..Settings::default() })?;
    let grant = pool.allocate_blocking()?;

    // Any number of threads can use a pool and a grant.
    let failed = thread::scope(|scope| {
        let work = || {
            let (mut value, mut total) = (0, 0);
            for _ in 0..INCREMENTS {
                pool.fetch_and_add_blocking(&grant, ADDED, 1)?;
                let failed;
                (value, failed) = increment(&pool, &grant, value)?;
                total += failed;
            }
            Ok::<_, pool::Error>(total)
        };
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        let results = threads.into_iter().map(|thread| thread.join().expect("no thread panics"));
        results.sum::<Result<u64, _>>()
    })?;

    // Atomics work on big-endian words, so a plain READ returns the bytes in that order.
    let mut words = [[0; 8]; 2];
    pool.read_blocking(&grant, 0, words.as_flattened_mut())?;
    let [added, swapped] = words.map(u64::from_be_bytes);
    println!("fetch-and-add: {added}");
    println!("compare-and-swap: {swapped}, after {failed} failed attempts");
    assert_eq!((added, swapped), (THREADS * INCREMENTS, THREADS * INCREMENTS));

    pool.free_blocking(grant)?;
    Ok(())
}
