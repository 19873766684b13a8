//! Times of calls, printed.

mod common;

use std::time::Instant;

use common::{G, Ram, now};
use heap::{Heap, Settings};

/// Prints the time of an allocation and a free, of a guard, and of a look-up.
#[test]
#[ignore = "prints times and asserts nothing; make test-full runs it"]
fn cost_of_a_block() {
    const LIVE: usize = 100_000;
    const ROUNDS: usize = 4_000_000;
    for (chunk_bytes, bytes) in [(65536, 1024), (4096, 1024), (1 << 20, 100)] {
        let settings = Settings { reserve_chunks: 8, reserve_chunks_max: 64 };
        let heap = Heap::new(Ram::new(chunk_bytes, 1 << 20, 1), settings).unwrap();
        let mut live: Vec<_> = (0..LIVE).map(|_| now(heap.allocate(G, bytes)).unwrap()).collect();
        let mut random = units::Random::new(1);
        let start = Instant::now();
        for _ in 0..ROUNDS {
            let victim = random.below(LIVE as u64) as usize;
            let guard = heap.pin(G);
            let new = match heap.try_allocate(G, bytes).unwrap() {
                Some(block) => block,
                None => now(heap.allocate(G, bytes)).unwrap(),
            };
            let last = std::mem::replace(&mut live[victim], new);
            heap.free(last.place).unwrap();
            drop(guard);
        }
        let each = |start: Instant| start.elapsed().as_nanos() / ROUNDS as u128;
        println!(
            "{bytes} B in chunks of {chunk_bytes}: {} ns a guard, an allocation and a free",
            each(start)
        );
        let start = Instant::now();
        for _ in 0..ROUNDS {
            drop(std::hint::black_box(heap.pin(G)));
        }
        println!("{bytes} B in chunks of {chunk_bytes}: {} ns a guard", each(start));
        let start = Instant::now();
        for _ in 0..ROUNDS {
            let place = live[random.below(LIVE as u64) as usize].place;
            std::hint::black_box(heap.locate(place));
        }
        println!("{bytes} B in chunks of {chunk_bytes}: {} ns a look-up", each(start));
        let stats = heap.stats();
        let share = stats.held_bytes() as f64 / stats.live_bytes() as f64;
        println!("{bytes} B in chunks of {chunk_bytes}: {share:.3} bytes held for a live byte");
    }
}
