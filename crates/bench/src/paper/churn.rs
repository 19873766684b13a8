//! FineMem's microbenchmark (§6.2): threads fill memory, free a random part and allocate it again.
//!
//! ```text
//! all threads fill ─┬─> all free a part ─> pause ─> all allocate as much ─┐
//!                   └─────────────────── next epoch ──────────────────────┘
//! ```
//!
//! Barriers separate the phases, so that all threads allocate at the same time, in fragmented
//! memory. The pause is long enough for quarantines and the regeneration of keys.

use super::measure::{Outcome, Retries, Thread};
use bench_report::record::Setting;
use units::Random;

/// Parameters of the microbenchmark.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Churn {
    /// Bytes of a block.
    pub bytes: u64,
    /// Blocks that each thread holds after an allocation phase.
    pub held: u32,
    /// Blocks that each thread frees in an epoch.
    pub freed: u32,
    /// Pause between frees and allocations in milliseconds.
    pub pause_ms: u64,
    /// Delays outside the memory node; `None` without any.
    pub delays: Option<Delays>,
}

/// Time of a thread that is not spent on requests to the memory node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delays {
    /// Round trip of an allocation through the compute node's allocation service, in nanoseconds:
    /// uniform between these two values.
    pub service_ns: (u64, u64),
    /// Mean think time between two allocations in nanoseconds: uniform from 0 to twice this value.
    pub think_ns: u64,
}

impl Delays {
    /// The delays of FineMem's benchmark (§6.2).
    ///
    /// The service adds 2 to 10 us. The paper does not state the think time of its benchmark, which
    /// is derived from a key-value store's; it is fitted to the array's row of table 2. The think
    /// time decides how often two threads try to take the same entry of the array: a thread that is
    /// delayed falls behind the others in the array and then sees fewer conflicts.
    pub const FINEMEM: Self = Self { service_ns: (2_000, 10_000), think_ns: 9_000 };

    fn service(&self, rng: &mut Random) -> u64 {
        let (min, max) = self.service_ns;
        min + rng.below(max - min + 1)
    }

    fn think(&self, rng: &mut Random) -> u64 {
        rng.below(2 * self.think_ns + 1)
    }
}

/// Share of the memory that is allocated when all threads hold their blocks: 140 GB of 200 GB
/// (§6.1, §6.2).
pub const FILL: f64 = 0.7;
/// Donated memory is a multiple of this: a section of a FineMem tree with chunks of 4 KiB.
const SECTION_BYTES: u64 = 2 << 20;

impl Churn {
    /// Bytes that each memory node donates for `threads` threads on `memory_nodes` memory nodes.
    pub fn donated(&self, threads: u32, memory_nodes: u16) -> u64 {
        let held = u64::from(threads) * u64::from(self.held) * self.bytes;
        donated(held.div_ceil(memory_nodes.into()))
    }

    /// Adds the parameters to the setting of a record.
    pub fn setting(&self, setting: Setting) -> Setting {
        setting.size(self.bytes).with("held", u64::from(self.held))
    }
}

/// Bytes that a memory node donates if clients hold `held_bytes`.
pub fn donated(held_bytes: u64) -> u64 {
    let bytes = (held_bytes as f64 / FILL).ceil() as u64;
    bytes.div_ceil(SECTION_BYTES).max(1) * SECTION_BYTES
}

/// Runs the benchmark on one thread, for `epochs` epochs.
///
/// # Errors
/// Errors of the pool.
pub(super) fn run<T: Thread>(
    thread: &T,
    epochs: u32,
    churn: &Churn,
    rng: &mut Random,
) -> Result<Outcome, pool::Error> {
    let (pools, mut outcome) = (thread.pools(), Outcome::default());
    // Round-robin over the memory nodes, as in the paper (§6.2), from a random first one.
    let first = if pools.len() > 1 { rng.below(pools.len() as u64) } else { 0 };
    let mut pool_order = (0..pools.len()).cycle().skip(first as usize);
    let mut delays = churn.delays.map(|delays| (delays, Random::stream(rng.below(u64::MAX), 0)));
    // Returns the block and the latency of its allocation.
    let mut allocate = || {
        let pool = &pools[pool_order.next().expect("the iterator cycles")];
        let start = thread.now_ns();
        let one_way_ns = delays.as_mut().map(|(delays, rng)| delays.service(rng) / 2);
        let through_service = || one_way_ns.into_iter().for_each(|ns| thread.pause_ns(ns));
        through_service();
        let grant = thread.wait(pool.allocate_bytes_in(thread.group(), churn.bytes))?;
        through_service();
        let spent_ns = thread.now_ns() - start;
        if let Some((delays, rng)) = &mut delays {
            thread.pause_ns(delays.think(rng));
        }
        Ok::<_, pool::Error>(((pool, grant), spent_ns))
    };
    let mut held = Vec::with_capacity(churn.held as usize);
    for _ in 0..churn.held {
        held.push(allocate()?.0);
    }
    let (mut spent_ns, filled) = (0, Retries::of(pools));
    for _ in 0..epochs {
        thread.wait(thread.barrier().wait());
        for _ in 0..churn.freed {
            let (pool, grant) = held.swap_remove(rng.below(held.len() as u64) as usize);
            let start = thread.now_ns();
            thread.wait(pool.free(grant))?;
            outcome.free.record_ns(thread.now_ns() - start);
        }
        thread.wait(thread.barrier().wait());
        thread.pause_ns(churn.pause_ms * 1_000_000);
        thread.wait(thread.barrier().wait());
        let begin = thread.now_ns();
        for _ in 0..churn.freed {
            let (block, ns) = allocate()?;
            held.push(block);
            outcome.allocate.record_ns(ns);
        }
        spent_ns += thread.now_ns() - begin;
    }
    outcome.retries = Retries::of(pools).since(&filled);
    outcome.rate_per_s = f64::from(epochs * churn.freed) * 1e9 / spent_ns.max(1) as f64;
    thread.wait(thread.barrier().wait());
    for (pool, grant) in held {
        thread.wait(pool.free(grant))?;
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_have_the_stated_range_and_mean() {
        let (delays, mut rng) = (Delays::FINEMEM, Random::stream(1, 2));
        let mean = |all: &[u64]| all.iter().sum::<u64>() as f64 / all.len() as f64;
        let services: Vec<u64> = (0..10_000).map(|_| delays.service(&mut rng)).collect();
        assert!(services.iter().all(|ns| (2_000..=10_000).contains(ns)));
        assert!((5_800.0..6_200.0).contains(&mean(&services)), "{}", mean(&services));
        let thinks: Vec<u64> = (0..10_000).map(|_| delays.think(&mut rng)).collect();
        assert!(thinks.iter().all(|ns| *ns <= 18_000));
        assert!((8_700.0..9_300.0).contains(&mean(&thinks)), "{}", mean(&thinks));
    }
}
