//! A store of this process under a workload: threads share the store, and each thread is a lane
//! with one operation in flight.

use std::borrow::Cow;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use ::kv::blocks::Blocks;
use ::kv::environment::System;
use ::kv::pooled::PoolMemory;
use ::kv::{Expiry, Form, Operation, SetOptions, Store, Update};
use pool::{Options, Pool, Scheme, Settings};
use verbs::executor::block_on;

use super::workload::{Kind, Lane, Plan, key_bytes};
use super::{CacheReads, Memory, Outcome, Target, payload_bytes};
use crate::Error;

/// Bytes of a chunk.
pub const CHUNK_BYTES: u64 = 64 << 10;
/// Operations of a thread between two calls of the store's background work.
const TEND_EVERY: u64 = 64;
/// Calls of the background work without effect after which no chunk goes back any more: freed
/// blocks wait for two epochs.
const IDLE_TENDS: u32 = 4;
/// Bytes of the memory node beyond the keys and values.
const SPARE_BYTES: u64 = 64 << 20;
/// Bytes of a key beside key and value: header, slot, and the rest of its size class.
const OVERHEAD_BYTES: u64 = 128;

type PoolStore = Store<PoolMemory, PoolMemory, System>;

/// The form of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Which verbs are posted together.
    pub form: Form,
    /// True: the process keeps a copy of the index.
    pub mirror: bool,
    /// Bytes of the value cache; 0: none. Only a store with a copy of the index has one.
    pub cache_bytes: u64,
}

impl Shape {
    /// Name of the form in records.
    pub fn form_name(&self) -> &'static str {
        match self.form {
            Form::Published => "published",
            Form::Fused => "fused",
        }
    }

    /// Place of the index that operations read, in records.
    pub fn index_name(&self) -> &'static str {
        if self.mirror { "mirrored" } else { "remote" }
    }
}

/// Settings of a memory node for at most `keys` keys with values of `value_bytes`.
pub fn settings(scheme: Scheme, chunk_bytes: u64, keys: u64, value_bytes: u64) -> Settings {
    // An update allocates before it frees, and freed blocks wait in limbo.
    let used = 2 * keys * (value_bytes + OVERHEAD_BYTES) + SPARE_BYTES;
    let donate_bytes = used.next_multiple_of(chunk_bytes.max(1 << 20));
    Settings { donate_bytes, chunk_bytes, scheme, ..Settings::default() }
}

/// QP groups of a store with this number of threads.
fn groups(threads: u32) -> u16 {
    threads.next_power_of_two().min(64) as u16
}

/// Connection options of a compute node with this number of threads.
pub fn options(threads: u32) -> Options {
    Options { groups: Some(groups(threads)), ..Options::default() }
}

/// A store over a pool, and the threads that use it.
pub struct StoreTarget {
    store: PoolStore,
    threads: u32,
}

impl StoreTarget {
    /// Creates a store without keys in `pool`.
    ///
    /// # Errors
    /// [`Error::Heap`] for a scheme whose chunks are accessed by whole pages; errors of the store.
    pub fn new(pool: Pool, shape: Shape, threads: u32) -> Result<Self, Error> {
        let memory = PoolMemory::new(pool, 0, heap::Settings::default())?;
        let settings = ::kv::Settings {
            form: shape.form,
            mirror: shape.mirror,
            cache_bytes: shape.cache_bytes,
            stripe_bits: groups(threads).ilog2() as u8,
            ..::kv::Settings::default()
        };
        let store = Store::create_blocking(memory.clone(), memory, System, settings)?;
        Ok(Self { store, threads })
    }

    /// Waits for remote memory so far.
    fn waits(&self) -> u64 {
        let kinds = [Operation::Get, Operation::Set, Operation::Delete, Operation::Update];
        kinds.into_iter().map(|kind| self.store.trips(kind).waits).sum()
    }

    /// Reads of values so far; `None` without a value cache.
    fn cache_reads(&self) -> Option<CacheReads> {
        let cache = self.store.stats().cache;
        (cache.limit > 0).then_some(CacheReads { hits: cache.hits, misses: cache.misses })
    }

    fn tend(&self) -> Result<(), Error> {
        block_on(self.store.blocks().tend()).map_err(|error| Error::Kv(error.into()))
    }

    /// Does background work until no more chunk goes back. Returns the bytes held.
    fn settled(&self) -> Result<u64, Error> {
        let (mut held, mut idle) = (u64::MAX, 0);
        while idle < IDLE_TENDS {
            self.tend()?;
            let now = self.store.stats().usage.held;
            idle = if now < held { 0 } else { idle + 1 };
            held = held.min(now);
        }
        Ok(self.store.stats().usage.held)
    }

    /// The loop of one thread.
    fn serve(&self, lane: Lane, value: &[u8]) -> Result<Outcome, Error> {
        let mut outcome = Outcome::default();
        let began = Instant::now();
        let mut since = began;
        for (at, request) in lane.enumerate() {
            let key = &key_bytes(request.key);
            let found = match request.kind {
                Kind::Read => self.store.get_pinned_blocking(0, key)?.is_some(),
                Kind::Insert | Kind::Update => {
                    self.store.set_blocking(0, key, value, SetOptions::default())?;
                    true
                }
                Kind::Modify => {
                    let put = |_: Option<&[u8]>, _| Update::Put(Cow::Borrowed(value), Expiry::Keep);
                    self.store.update_blocking(0, key, put)?;
                    true
                }
                Kind::Delete => self.store.delete_blocking(0, key)?,
            };
            let now = Instant::now();
            outcome.record(request.kind, now - since);
            outcome.misses += u64::from(!found);
            since = now;
            if at as u64 % TEND_EVERY == TEND_EVERY - 1 {
                self.tend()?;
                since = Instant::now();
            }
        }
        outcome.elapsed = began.elapsed();
        Ok(outcome)
    }
}

impl Target for StoreTarget {
    fn run(&mut self, plan: &Plan) -> Result<Outcome, Error> {
        let held_before = self.settled()?;
        let (before, reads_before) = (self.waits(), self.cache_reads().unwrap_or_default());
        let value: Vec<u8> = (0..plan.value_bytes).map(|at| at as u8).collect();
        let barrier = Barrier::new(self.threads as usize);
        let (this, barrier, value) = (&*self, &barrier, &value);
        let outcomes = thread::scope(|scope| {
            let start = |lane| {
                scope.spawn(move || {
                    let lane = plan.lane(lane, this.threads);
                    barrier.wait();
                    this.serve(lane, value)
                })
            };
            let threads: Vec<_> = (0..this.threads).map(start).collect();
            let ended = threads.into_iter().map(|t| t.join().expect("a lane does not panic"));
            ended.collect::<Result<Vec<Outcome>, Error>>()
        })?;
        let mut all = Outcome::default();
        outcomes.iter().for_each(|lane| all.join(lane));
        all.round_trips = Some(self.waits() - before);
        all.cache = self.cache_reads().map(|reads| CacheReads {
            hits: reads.hits - reads_before.hits,
            misses: reads.misses - reads_before.misses,
        });
        let held_after = self.settled()?;
        let payload = payload_bytes(self.store.len(0), plan.value_bytes);
        all.memory = Some(Memory { held_before, held_after, payload });
        Ok(all)
    }

    fn clear(&mut self, _keys: u64, _plan: &Plan) -> Result<(), Error> {
        self.store.flush_blocking(0)?;
        self.settled()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bench_report::record::{Setting, Statistic};
    use pool::{EmbeddedNode, schemes};

    use super::super::run_all;
    use super::super::workload::{Keys, Workload};
    use super::*;

    const KEYS: u64 = 4000;

    const PUBLISHED: Shape = Shape { form: Form::Published, mirror: false, cache_bytes: 0 };
    const REMOTE: Shape = Shape { form: Form::Fused, ..PUBLISHED };
    const MIRRORED: Shape = Shape { mirror: true, ..REMOTE };
    /// Room for all values.
    const CACHED: Shape = Shape { cache_bytes: 16 << 20, ..MIRRORED };

    fn target(chunk_bytes: u64, shape: Shape, threads: u32) -> StoreTarget {
        let settings = settings(schemes::ONESIDEDMW, chunk_bytes, 2 * KEYS, 976);
        let node = Arc::new(EmbeddedNode::start(&settings).unwrap());
        let pool = Pool::embedded_in(&node, options(threads)).unwrap();
        StoreTarget::new(pool, shape, threads).unwrap()
    }

    #[test]
    fn every_workload_runs_in_every_form() {
        for shape in [PUBLISHED, REMOTE, MIRRORED, CACHED] {
            let mut target = target(CHUNK_BYTES, shape, 2);
            let plan = |workload| Plan::new(workload, KEYS, 500, 100, 1);
            let plans: Vec<Plan> = Workload::ALL.into_iter().map(plan).collect();
            let mut ran = 0;
            run_all(&mut target, &plans, Keys::None, |at, outcome| {
                let plan = &plans[at];
                let expected = plan.workload.operations(KEYS, 500);
                assert_eq!(outcome.operations, expected, "{:?}", plan.workload);
                assert_eq!(outcome.misses, 0, "{:?}", plan.workload);
                ran += 1;
            })
            .unwrap();
            assert_eq!(ran, Workload::ALL.len());
            assert_eq!(target.store.len(0), KEYS / 10);
        }
    }

    #[test]
    fn round_trips_are_those_of_the_form() {
        for (shape, reads) in [(PUBLISHED, 2.0), (REMOTE, 2.0), (MIRRORED, 1.0)] {
            let mut target = target(CHUNK_BYTES, shape, 1);
            let plans = [Plan::new(Workload::ReadRandom, 200, 1000, 100, 1)];
            run_all(&mut target, &plans, Keys::None, |_, outcome| {
                let records = outcome.records(Workload::ReadRandom, &Setting::new());
                let trips = records.iter().find(|r| r.metric == "round_trips").unwrap();
                assert_eq!((trips.value, trips.statistic), (reads, Statistic::Mean), "{shape:?}");
                assert_eq!(outcome.cache, None, "{shape:?}");
            })
            .unwrap();
        }
    }

    #[test]
    fn hit_rate_depends_on_the_size_of_the_value_cache() {
        let small = Shape { cache_bytes: 64 << 10, ..MIRRORED };
        let ratios = [CACHED, small].map(|shape| {
            let mut target = target(CHUNK_BYTES, shape, 1);
            let plan = |workload| Plan::new(workload, 1000, 20_000, 976, 1);
            let plans = [Workload::FillSync, Workload::ReadRandom].map(plan);
            let mut ratio = None;
            run_all(&mut target, &plans, Keys::None, |at, outcome| {
                let records = outcome.records(plans[at].workload, &Setting::new());
                let of = |metric| records.iter().find(|r| r.metric == metric).map(|r| r.value);
                if plans[at].workload == Workload::ReadRandom {
                    let hits = of("cache_hit_ratio").unwrap();
                    assert!((of("round_trips").unwrap() - (1.0 - hits)).abs() < 1e-9);
                    ratio = Some(hits);
                }
            })
            .unwrap();
            ratio.unwrap()
        });
        assert!(ratios[0] > 0.9 && ratios[1] < 0.2, "{ratios:?}");
    }

    /// With four blocks in a chunk, 0.9 to the power of 4 of the chunks lose all their blocks.
    #[test]
    fn share_of_returned_chunks_follows_from_the_blocks_in_a_chunk() {
        let mut target = target(4096, MIRRORED, 1);
        let plans = [Plan::new(Workload::DeleteRandom, KEYS, 0, 976, 1)];
        run_all(&mut target, &plans, Keys::None, |_, outcome| {
            let memory = outcome.memory.unwrap();
            let payload_chunks = KEYS * 1024;
            let returned = (memory.held_before - memory.held_after) as f64 / payload_chunks as f64;
            assert!((returned - 0.656).abs() < 0.05, "{returned}: {memory:?}");
        })
        .unwrap();
    }
}
