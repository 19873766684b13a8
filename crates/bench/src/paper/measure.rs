//! Interface between a measurement's loop and the thread that runs it, and the measured values.

use std::future::Future;

use pool::Pool;
use scheme::GroupId;
use verbs::Nic;

use super::barrier::BarrierMember;
use super::store::StoreOutcome;
use bench_report::histogram::Latencies;

/// Measurements of one thread, or of all threads together.
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
    /// Rounds per second of all threads together.
    pub rate_per_s: f64,
    /// For replayed traces: by how much each thread finished later than its trace.
    pub late: Latencies,
    /// Failed CASes of allocations, in schemes that count them.
    pub retries: Retries,
    /// Measurements of key-value stores.
    pub store: StoreOutcome,
}

/// Failed CASes of allocations.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Retries {
    /// Number of allocations.
    pub allocations: u64,
    /// Failed CASes of all allocations.
    pub total: u64,
    /// Failed CASes of the single allocation with the most.
    pub max: u64,
}

impl Retries {
    /// Mean number of failed CASes per allocation.
    pub fn mean(&self) -> f64 {
        self.total as f64 / self.allocations.max(1) as f64
    }

    /// The counts of a thread's connections.
    pub fn of<N: Nic>(pools: &[Pool<N>]) -> Self {
        let mut retries = Self::default();
        for effort in pools.iter().map(Pool::cas_stats) {
            retries.join(&Self {
                allocations: effort.allocations,
                total: effort.cas_retries,
                max: effort.cas_retries_max,
            });
        }
        retries
    }

    /// The counts since `before`. The maximum covers all allocations, including those before.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            allocations: self.allocations - before.allocations,
            total: self.total - before.total,
            max: self.max,
        }
    }

    /// Adds the counts of another connection.
    pub fn join(&mut self, other: &Self) {
        self.allocations += other.allocations;
        self.total += other.total;
        self.max = self.max.max(other.max);
    }
}

impl Outcome {
    /// Adds the measurements of a concurrent thread.
    pub fn join(&mut self, other: &Self) {
        self.allocate.merge(&other.allocate);
        self.access.merge(&other.access);
        self.atomic.merge(&other.atomic);
        self.free.merge(&other.free);
        self.late.merge(&other.late);
        self.rate_per_s += other.rate_per_s;
        self.retries.join(&other.retries);
        self.store.join(&other.store);
    }
}

/// A thread of a compute node, under virtual time or on a clock.
pub trait Thread {
    /// The thread's NIC.
    type Nic: Nic;
    /// The thread's connections, one to each memory node.
    fn pools(&self) -> &[Pool<Self::Nic>];
    /// The connection to the first memory node.
    fn pool(&self) -> &Pool<Self::Nic> {
        &self.pools()[0]
    }
    /// The thread's number, from 0.
    fn index(&self) -> u32;
    /// The thread's QP group.
    fn group(&self) -> GroupId;
    /// The barrier of all threads of the measurement.
    fn barrier(&self) -> &BarrierMember;
    /// The time in nanoseconds.
    fn now_ns(&self) -> u64;
    /// Runs a request to completion.
    fn wait<F: Future>(&self, request: F) -> F::Output;
    /// Pauses for `ns` nanoseconds.
    fn pause_ns(&self, ns: u64);
}
