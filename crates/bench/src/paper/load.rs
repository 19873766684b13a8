//! What one measurement runs: so many threads of compute nodes that do the same, each in a loop.
//!
//! The loop is the same code under virtual time and on a clock: what differs is a [`Thread`].

use std::future::Future;

use fabric::Nic;
use pool::scheme::GroupId;
use pool::{Options, Pool, SchemeKind, Settings};

use super::churn::{self, Churn};
use super::meeting::Member;
use super::traces::{self, Replay};
use crate::histogram::Latencies;

/// Bytes of an access: a page, as in the papers.
pub const ACCESS_BYTES: u64 = 4096;

/// Access QPs' send queues, in building blocks: a thread has one request in flight.
const SEND_BLOCKS: u32 = 16;

/// Requests that a connection may have in flight, at least: the default of a memory node.
const CREDITS: u32 = 16;

/// What every thread does, over and over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    /// Allocates a chunk and reads a page of it; nothing is freed meanwhile.
    AllocateAccess,
    /// Reads a page of a chunk that it has had before, and pauses for `pause_us` on average.
    Access {
        /// Microseconds between two accesses: between 0 and twice this, evenly.
        pause_us: f64,
    },
    /// Allocates a chunk and frees it.
    AllocateFree,
    /// READs a word of a chunk that it has had before, and CASes it.
    Words,
    /// FineMem's microbenchmark.
    Churn(Churn),
    /// Requests of a trace.
    Replay(Replay),
}

/// One measurement.
#[derive(Clone, Debug)]
pub struct Load {
    /// The scheme.
    pub scheme: SchemeKind,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Cores of the memory node's CPU.
    pub cores: u32,
    /// Compute nodes.
    pub compute_nodes: u16,
    /// Memory nodes: each thread is connected to all of them. [`Work::Churn`] takes them in turn; all else uses the
    /// first.
    pub memory_nodes: u16,
    /// Threads, spread over the compute nodes.
    pub threads: u32,
    /// All threads of a compute node share a connection, in which each has a QP group of its own; if not,
    /// each thread has a connection, and so management QPs, of its own.
    pub shared: bool,
    /// See [`Settings::separation`].
    pub separation: bool,
    /// See [`Settings::contention_control`].
    pub contention_control: bool,
    /// Connections besides, which do nothing.
    pub idle: u32,
    /// What the threads do.
    pub work: Work,
    /// Measured rounds of each thread.
    pub rounds: u32,
}

impl Load {
    /// One thread of one compute node with 4 KiB chunks.
    pub fn new(scheme: SchemeKind, work: Work, rounds: u32) -> Self {
        Self {
            scheme,
            chunk_bytes: ACCESS_BYTES,
            cores: 1,
            compute_nodes: 1,
            memory_nodes: 1,
            threads: 1,
            shared: false,
            separation: true,
            contention_control: true,
            idle: 0,
            work,
            rounds,
        }
    }

    /// Rounds before the measured ones.
    pub fn warm_up(&self) -> u32 {
        (self.rounds / 10).clamp(2, 64)
    }

    /// Connections to each memory node.
    pub fn connections(&self) -> u32 {
        if self.shared { self.compute_nodes.into() } else { self.threads }
    }

    /// Threads of each connection.
    pub fn threads_each(&self) -> u32 {
        self.threads.div_ceil(self.connections())
    }

    /// Each memory node's settings.
    pub fn settings(&self) -> Settings {
        let each = match self.work {
            Work::AllocateAccess => self.rounds + self.warm_up(),
            Work::Churn(_) | Work::Replay(_) => 0,
            Work::Access { .. } | Work::AllocateFree | Work::Words => 1,
        };
        // Some are registered ahead, or on their way back.
        let chunks = u64::from(self.threads * each + 4 * (self.connections() + self.idle) + 8);
        let donate_bytes = match self.work {
            Work::Churn(churn) => churn.donated(self.threads, self.memory_nodes),
            Work::Replay(replay) => replay.donated(self.threads),
            _ => chunks * self.chunk_bytes,
        };
        Settings {
            donate_bytes,
            chunk_bytes: self.chunk_bytes,
            // One lane: each thread works on memory of its own.
            group_size: 2,
            // A chain that has served so many requests starts over, which costs it a few steps more.
            credits: self.threads_each().next_power_of_two().clamp(CREDITS, Settings::CREDITS_MAX),
            groups_max: self.threads_each(),
            clients_max: self.connections() + self.idle,
            scheme: self.scheme,
            cores: self.cores.min(self.connections()),
            separation: self.separation,
            contention_control: self.contention_control,
            ..Settings::default()
        }
    }

    /// How each connection is made.
    pub fn options(&self) -> Options {
        Options { groups: Some(self.threads_each() as u16), send_blocks: SEND_BLOCKS }
    }
}

/// What the threads measured.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Latencies of allocations.
    pub allocate: Latencies,
    /// Latencies of accesses.
    pub access: Latencies,
    /// Latencies of CASes.
    pub atomic: Latencies,
    /// Latencies of frees.
    pub free: Latencies,
    /// Rounds a second of all threads together.
    pub rate_per_s: f64,
    /// Replayed traces: how much later than in the trace the last request of each thread was done.
    pub late: Latencies,
    /// CASes of allocations that failed, where the scheme counts them: see [`Retries`].
    pub retries: Retries,
}

/// CASes that failed and were tried again.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Retries {
    /// Allocations.
    pub allocations: u64,
    /// Failed CASes of all of them.
    pub all: u64,
    /// Failed CASes of the allocation that had most.
    pub most: u64,
}

impl Retries {
    /// Failed CASes of an allocation, on average.
    pub fn mean(&self) -> f64 {
        self.all as f64 / self.allocations.max(1) as f64
    }

    /// Those of a thread's connections.
    pub fn of<N: Nic>(pools: &[Pool<N>]) -> Self {
        let mut retries = Self::default();
        for effort in pools.iter().map(Pool::effort) {
            retries.join(&Self {
                allocations: effort.allocations,
                all: effort.cas_retries,
                most: effort.cas_retries_max,
            });
        }
        retries
    }

    /// Those since `before`; the most of one allocation is that of all of them, `before` included.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            allocations: self.allocations - before.allocations,
            all: self.all - before.all,
            most: self.most,
        }
    }

    /// Adds those of another connection.
    pub fn join(&mut self, other: &Self) {
        self.allocations += other.allocations;
        self.all += other.all;
        self.most = self.most.max(other.most);
    }
}

impl Outcome {
    /// Adds what another thread measured at the same time.
    pub fn join(&mut self, other: &Self) {
        self.allocate.merge(&other.allocate);
        self.access.merge(&other.access);
        self.atomic.merge(&other.atomic);
        self.free.merge(&other.free);
        self.late.merge(&other.late);
        self.rate_per_s += other.rate_per_s;
        self.retries.join(&other.retries);
    }
}

/// A thread of a compute node.
pub trait Thread {
    /// Its NIC.
    type Nic: Nic;
    /// Its connections, one to each memory node.
    fn pools(&self) -> &[Pool<Self::Nic>];
    /// The one to the first memory node.
    fn pool(&self) -> &Pool<Self::Nic> {
        &self.pools()[0]
    }
    /// Its QP group.
    fn group(&self) -> GroupId;
    /// Where it waits for the others.
    fn member(&self) -> &Member;
    /// The time in nanoseconds.
    fn now_ns(&self) -> u64;
    /// Runs a request to its end.
    fn wait<F: Future>(&self, request: F) -> F::Output;
    /// Does nothing for so long.
    fn pause_ns(&self, ns: u64);
}

/// A row of numbers for the pauses: the same seed gives the same row on every machine.
pub struct Dice(u64);

impl Dice {
    /// The row of a thread.
    pub fn new(seed: u64, thread: u32) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (u64::from(thread) << 32))
    }

    /// A number below `end`, which is not 0 (SplitMix64).
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(x ^ (x >> 31)) * u128::from(end)) >> 64) as u64
    }
}

/// One thread's part.
///
/// # Errors
/// As the pool's operations.
pub fn run<T: Thread>(thread: &T, load: &Load, mut dice: Dice) -> Result<Outcome, pool::Error> {
    match &load.work {
        Work::Churn(churn) => return churn::run(thread, load, churn, &mut dice),
        Work::Replay(replay) => return traces::run(thread, replay, &mut dice),
        _ => {}
    }
    let pool = thread.pool();
    let mut page = vec![0; ACCESS_BYTES as usize];
    let mut outcome = Outcome::default();
    let blank = vec![0; ACCESS_BYTES as usize];
    let allocate = || {
        let grant = thread.wait(pool.allocate_in(thread.group()))?;
        if load.scheme == SchemeKind::Odrp {
            // Its first write allocates the page: the paper's AllocWrite.
            thread.wait(pool.write(&grant, 0, &blank))?;
        }
        Ok::<_, pool::Error>(grant)
    };
    let held = match load.work {
        Work::Access { .. } | Work::Words => Some(allocate()?),
        _ => None,
    };
    // Threads do not begin in step.
    thread.pause_ns(dice.below(20_000));
    let warm_up = load.warm_up();
    let mut begin = thread.now_ns();
    for round in 0..warm_up + load.rounds {
        if round == warm_up {
            outcome = Outcome::default();
            begin = thread.now_ns();
        }
        let start = thread.now_ns();
        match load.work {
            Work::AllocateAccess => {
                let grant = allocate()?;
                let granted = thread.now_ns();
                thread.wait(pool.read(&grant, 0, &mut page))?;
                outcome.allocate.record_ns(granted - start);
                outcome.access.record_ns(thread.now_ns() - granted);
            }
            Work::Access { pause_us } => {
                let held = held.as_ref().expect("it was allocated before");
                thread.wait(pool.read(held, 0, &mut page))?;
                outcome.access.record_ns(thread.now_ns() - start);
                let longest = (pause_us * 2e3) as u64;
                if longest > 0 {
                    thread.pause_ns(dice.below(longest));
                }
            }
            Work::Words => {
                let held = held.as_ref().expect("it was allocated before");
                thread.wait(pool.read(held, 0, &mut page[..8]))?;
                let read = thread.now_ns();
                thread.wait(pool.compare_and_swap(held, 0, 0, 0))?;
                outcome.access.record_ns(read - start);
                outcome.atomic.record_ns(thread.now_ns() - read);
            }
            Work::AllocateFree => {
                let grant = allocate()?;
                let granted = thread.now_ns();
                thread.wait(pool.free(grant))?;
                outcome.allocate.record_ns(granted - start);
                outcome.free.record_ns(thread.now_ns() - granted);
            }
            Work::Churn(_) | Work::Replay(_) => unreachable!("they have loops of their own"),
        }
    }
    let elapsed_ns = (thread.now_ns() - begin).max(1);
    outcome.rate_per_s = f64::from(load.rounds) * 1e9 / elapsed_ns as f64;
    Ok(outcome)
}
