//! The loop of a thread that uses a key-value store.
//!
//! ```text
//! all threads create a store ─┬─> all insert, or insert and read ─┬─> all delete 90 % of the keys
//!                             barrier                             barrier
//! ```
//!
//! Each thread has a store and a connection of its own, as the paper divides the index between
//! owners (OneSidedMW §7), and as a request of one Alloc QP waits for the one before. The store has
//! the form and the round trips of the paper. It keeps no reserve of chunks, so that an insert
//! waits for the allocation of its chunk.

use std::sync::atomic::{AtomicU64, Ordering};

use ::kv::blocks::Blocks;
use ::kv::environment::Environment;
use ::kv::layout::block;
use ::kv::pooled::PoolMemory;
use ::kv::{Form, SetOptions, Settings, Store};
use heap::SLAB_BYTES_MAX;

use crate::Error;
use crate::kv::workload::{KEY_BYTES, Kind, Plan, Workload, key_bytes};
use crate::paper::measure::{Outcome, StoreOutcome, Thread};
use units::Random;

/// Calls of the background work without effect after which no chunk goes back any more: freed
/// blocks wait for two epochs.
const IDLE_TENDS: u32 = 4;
/// Most size classes of a store beside that of its blocks.
const CLASSES: u64 = 16;
/// Keys of the mix before the measurement.
const LOADED: u64 = 16;

/// Parameters of the loop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StoreWork {
    /// [`Workload::FillSync`] or [`Workload::Mixed`].
    pub workload: Workload,
    /// Bytes of a block: header, key and value.
    pub block_bytes: u64,
    /// Time of the compute node's CPU for each request.
    pub cpu: Cpu,
    /// True: deletes 90 % of the keys after the measurement.
    pub deletes: bool,
}

/// Time of a compute node's CPU for a request, in nanoseconds, beside its verbs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cpu {
    /// For an insert.
    pub insert_ns: u64,
    /// For a read.
    pub read_ns: u64,
    /// Each time differs from its mean by at most this share, evenly distributed.
    pub spread_percent: u64,
}

impl StoreWork {
    /// Chunks that a memory node needs for each thread with this number of operations.
    pub fn chunks(&self, operations: u64, chunk_bytes: u64) -> u64 {
        let each = (chunk_bytes / self.block_bytes).max(1);
        let values = (operations + LOADED).div_ceil(each);
        // Subtables of at most 16 KiB hold over 1,000 keys, and a split needs two of them at once.
        let index_bytes = 5 * (16 << 10) * operations.div_ceil(1000);
        // Root, journal, directory and subtables have size classes, and so slabs, of their own.
        let slabs = (chunk_bytes / SLAB_BYTES_MAX).max(1);
        values + index_bytes.div_ceil(chunk_bytes) + CLASSES.div_ceil(slabs)
    }
}

/// Random numbers of a seed, and a time at which nothing expires.
struct Seeded(AtomicU64);

impl Environment for Seeded {
    fn now(&self) -> u64 {
        1
    }

    fn random(&self) -> u64 {
        Random::new(self.0.fetch_add(1, Ordering::Relaxed)).bits()
    }
}

impl Cpu {
    /// Returns a time around `ns`. Threads with the same time would run in lockstep, and meet at
    /// the same resource.
    fn varied(&self, random: &mut Random, ns: u64) -> u64 {
        let most = ns * self.spread_percent / 100;
        ns - most + random.below(2 * most + 1)
    }
}

/// Runs the loop on one thread.
///
/// # Errors
/// Errors of the pool and of the store.
pub fn run<T: Thread>(
    thread: &T,
    operations: u32,
    work: &StoreWork,
    mut random: Random,
) -> Result<Outcome, Error> {
    let memory = PoolMemory::<T::Nic>::new(thread.pool().clone(), 0, heap::Settings::NO_RESERVE)?;
    let settings = Settings { form: Form::Published, mirror: false, ..Settings::default() };
    let seed = random.bits();
    let environment = Seeded(AtomicU64::new(seed));
    // A sequence of its own, so that the keys do not depend on the number of times.
    let mut times = Random::stream(seed, 1);
    let store = thread.wait(Store::create(memory.clone(), memory, environment, settings))?;
    let value_bytes = (work.block_bytes as usize).saturating_sub(block::HEADER_BYTES + KEY_BYTES);
    let value = vec![0x5a; value_bytes];
    let set = |key: u64| {
        thread.wait(store.set(0, &key_bytes(key), &value, SetOptions::default())).map(drop)
    };
    let operations = u64::from(operations);
    let (keys, loaded) = match work.workload {
        Workload::Mixed => (LOADED, LOADED),
        // The first key makes the directory.
        _ => (operations, 1),
    };
    let plan = Plan::new(work.workload, keys, operations, value_bytes, random.bits());
    let mut lane = plan.lane(0, 1);
    match work.workload {
        Workload::Mixed => (0..loaded).try_for_each(set)?,
        _ => lane.next().map_or(Ok(()), |first| set(first.key))?,
    }
    let node_cpu_ns = || match thread.index() {
        0 => Ok::<_, Error>(thread.pool().node_status()?.control_cpu_ns),
        _ => Ok(0),
    };
    // The other threads' connections and stores are complete behind the barrier: their regions are
    // no work of the measurement.
    thread.wait(thread.barrier().wait());
    let cpu_before = node_cpu_ns()?;
    thread.wait(thread.barrier().wait());
    // A random delay, so that the threads do not run in lockstep.
    thread.pause_ns(random.below(20_000));
    let mut outcome = StoreOutcome::default();
    let (begin, mut done, mut inserted) = (thread.now_ns(), 0, loaded);
    for request in lane {
        let start = thread.now_ns();
        match request.kind {
            Kind::Read => {
                thread.pause_ns(work.cpu.varied(&mut times, work.cpu.read_ns));
                let found = thread.wait(store.get(0, &key_bytes(request.key)))?;
                assert!(found.is_some(), "a key that was inserted is there");
                outcome.read.record_ns(thread.now_ns() - start);
            }
            _ => {
                thread.pause_ns(work.cpu.varied(&mut times, work.cpu.insert_ns));
                set(request.key)?;
                inserted += 1;
                outcome.insert.record_ns(thread.now_ns() - start);
            }
        }
        done += 1;
    }
    let elapsed_ns = (thread.now_ns() - begin).max(1);
    thread.wait(thread.barrier().wait());
    outcome.node_cpu_share = (node_cpu_ns()? - cpu_before) as f64 / elapsed_ns as f64;
    if work.deletes {
        let stats = store.stats();
        let index_bytes = stats.index_bytes.next_multiple_of(thread.pool().chunk_bytes());
        outcome.held_bytes = stats.usage.held.saturating_sub(index_bytes);
        let plan = Plan::new(Workload::DeleteRandom, inserted, 0, value_bytes, random.bits());
        for request in plan.lane(0, 1) {
            thread.wait(store.delete(0, &key_bytes(request.key)))?;
        }
        let (mut held, mut idle) = (stats.usage.held, 0);
        while idle < IDLE_TENDS {
            thread.wait(store.blocks().tend()).map_err(::kv::Error::from)?;
            let now = store.stats().usage.held;
            idle = if now < held { 0 } else { idle + 1 };
            held = now;
        }
        outcome.returned_bytes = stats.usage.held.saturating_sub(held);
    }
    let rate_per_s = f64::from(done) * 1e9 / elapsed_ns as f64;
    thread.wait(thread.barrier().wait());
    Ok(Outcome { store: outcome, rate_per_s, ..Outcome::default() })
}
