//! FineMem's microbenchmark (§6.2): threads fill memory, free a part of it at random, allocate as much anew.
//!
//! ```text
//! all allocate what they hold ─┬─> all free a part ─> a rest ─> all allocate as much ─┐
//!                              └──────────────── so many epochs ──────────────────────┘
//! ```
//!
//! Threads wait for each other between the parts, so that all of them allocate at the same time, in memory
//! that is in pieces. The rest is as long as quarantines and the memory node's regeneration of keys take.

use super::load::{Dice, Load, Outcome, Retries, Thread};
use crate::record::Setting;

/// What each thread does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Churn {
    /// Bytes of a block.
    pub bytes: u64,
    /// Blocks that a thread holds when it has allocated.
    pub held: u32,
    /// How many of them it frees in each epoch.
    pub freed: u32,
    /// Milliseconds between frees and allocations.
    pub rest_ms: u64,
    /// What else takes a thread's time, if anything does.
    pub pace: Option<Pace>,
}

/// What a thread's time goes into besides what its memory node is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// What an allocation goes through the compute node's service for, there and back, in nanoseconds: between the two,
    /// evenly.
    pub service_ns: (u64, u64),
    /// What the thread does itself between two allocations, in nanoseconds: between 0 and twice this, evenly.
    pub between_ns: u64,
}

impl Pace {
    /// FineMem's (§6.2). Its service adds 2 to 10 us. What its benchmark, which is made of a key-value store's, does between
    /// two allocations is not told: that is fitted to what table 2 has of the array. Who goes through an array beside
    /// others and is held up falls behind them, so that this decides how often he finds free what others want too.
    pub const FINEMEM: Self = Self { service_ns: (2_000, 10_000), between_ns: 9_000 };

    fn service(&self, dice: &mut Dice) -> u64 {
        let (least, most) = self.service_ns;
        least + dice.below(most - least + 1)
    }

    fn between(&self, dice: &mut Dice) -> u64 {
        dice.below(2 * self.between_ns + 1)
    }
}

/// The part of the memory that is taken when all hold what they hold: 140 GB of 200 (§6.1, §6.2).
pub const FILL: f64 = 0.7;
/// Memory is donated by sections of a FineMem tree with chunks of 4 KiB.
const SECTION_BYTES: u64 = 2 << 20;

impl Churn {
    /// Bytes that each of so many memory nodes donates for so many threads.
    pub fn donated(&self, threads: u32, memory_nodes: u16) -> u64 {
        let held = u64::from(threads) * u64::from(self.held) * self.bytes;
        donated(held.div_ceil(memory_nodes.into()))
    }

    /// Its part of a record's setting.
    pub fn setting(&self, setting: Setting) -> Setting {
        setting.size(self.bytes).with("held", u64::from(self.held))
    }
}

/// Bytes that a memory node donates for so many that are held.
pub fn donated(held_bytes: u64) -> u64 {
    let bytes = (held_bytes as f64 / FILL).ceil() as u64;
    bytes.div_ceil(SECTION_BYTES).max(1) * SECTION_BYTES
}

/// One thread's part.
///
/// # Errors
/// As the pool's operations.
pub(super) fn run<T: Thread>(
    thread: &T,
    load: &Load,
    churn: &Churn,
    dice: &mut Dice,
) -> Result<Outcome, pool::Error> {
    let (pools, mut outcome) = (thread.pools(), Outcome::default());
    // In turn over all memory nodes, as the paper's (§6.2): each thread begins with another one.
    let first = if pools.len() > 1 { dice.below(pools.len() as u64) } else { 0 };
    let mut turns = (0..pools.len()).cycle().skip(first as usize);
    let mut pace = churn.pace.map(|pace| (pace, Dice::new(dice.below(u64::MAX), 0)));
    // What is held, and how long it took to come by.
    let mut allocate = || {
        let pool = &pools[turns.next().expect("it goes around")];
        let start = thread.now_ns();
        let one_way_ns = pace.as_mut().map(|(pace, dice)| pace.service(dice) / 2);
        let through_service = || one_way_ns.into_iter().for_each(|ns| thread.pause_ns(ns));
        through_service();
        let grant = thread.wait(pool.allocate_bytes_in(thread.group(), churn.bytes))?;
        through_service();
        let spent_ns = thread.now_ns() - start;
        if let Some((pace, dice)) = &mut pace {
            thread.pause_ns(pace.between(dice));
        }
        Ok::<_, pool::Error>(((pool, grant), spent_ns))
    };
    let mut held = Vec::with_capacity(churn.held as usize);
    for _ in 0..churn.held {
        held.push(allocate()?.0);
    }
    let (mut spent_ns, filled) = (0, Retries::of(pools));
    for _ in 0..load.rounds {
        thread.wait(thread.member().meet());
        for _ in 0..churn.freed {
            let (pool, grant) = held.swap_remove(dice.below(held.len() as u64) as usize);
            let start = thread.now_ns();
            thread.wait(pool.free(grant))?;
            outcome.free.record_ns(thread.now_ns() - start);
        }
        thread.wait(thread.member().meet());
        thread.pause_ns(churn.rest_ms * 1_000_000);
        thread.wait(thread.member().meet());
        let begin = thread.now_ns();
        for _ in 0..churn.freed {
            let (block, ns) = allocate()?;
            held.push(block);
            outcome.allocate.record_ns(ns);
        }
        spent_ns += thread.now_ns() - begin;
    }
    outcome.retries = Retries::of(pools).since(&filled);
    outcome.rate_per_s = f64::from(load.rounds * churn.freed) * 1e9 / spent_ns.max(1) as f64;
    thread.wait(thread.member().meet());
    for (pool, grant) in held {
        thread.wait(pool.free(grant))?;
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_keeps_to_what_it_says() {
        let (pace, mut dice) = (Pace::FINEMEM, Dice::new(1, 2));
        let mean = |all: &[u64]| all.iter().sum::<u64>() as f64 / all.len() as f64;
        let services: Vec<u64> = (0..10_000).map(|_| pace.service(&mut dice)).collect();
        assert!(services.iter().all(|ns| (2_000..=10_000).contains(ns)));
        assert!((5_800.0..6_200.0).contains(&mean(&services)), "{}", mean(&services));
        let between: Vec<u64> = (0..10_000).map(|_| pace.between(&mut dice)).collect();
        assert!(between.iter().all(|ns| *ns <= 18_000));
        assert!((8_700.0..9_300.0).contains(&mean(&between)), "{}", mean(&between));
    }
}
