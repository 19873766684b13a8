//! Interface between a measurement's loop and the thread that runs it, and the measured values.

use std::future::Future;

use pool::Pool;
use scheme::GroupId;
use verbs::Nic;

use super::barrier::BarrierMember;
use super::patronus::IndexOutcome;
use super::patronus::outcome::LeaseOutcome;
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
    /// Measurements of clients that use leases.
    pub lease: LeaseOutcome,
    /// Measurements of clients of an index in objects with leases.
    pub index: IndexOutcome,
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
        self.lease.join(&other.lease);
        self.index.join(&other.index);
    }
}

/// Measurements of the stores of a thread, or of all threads together.
#[derive(Clone, Debug, Default)]
pub struct StoreOutcome {
    /// Latencies of inserts.
    pub insert: Latencies,
    /// Latencies of reads.
    pub read: Latencies,
    /// Bytes of chunks without the index, before the deletions.
    pub held_bytes: u64,
    /// Bytes of chunks given back after the deletions.
    pub returned_bytes: u64,
    /// Share of a core of the memory node's CPU during the measurement.
    pub node_cpu_share: f64,
}

impl StoreOutcome {
    /// Adds the measurements of a concurrent thread.
    pub fn join(&mut self, other: &Self) {
        self.insert.merge(&other.insert);
        self.read.merge(&other.read);
        self.held_bytes += other.held_bytes;
        self.returned_bytes += other.returned_bytes;
        self.node_cpu_share = self.node_cpu_share.max(other.node_cpu_share);
    }

    /// The 99th percentile of all requests in microseconds.
    pub fn p99_us(&self) -> f64 {
        let mut all = self.insert.clone();
        all.merge(&self.read);
        all.quantile_us(0.99)
    }

    /// Bytes given back over bytes held.
    pub fn returned_ratio(&self) -> f64 {
        self.returned_bytes as f64 / self.held_bytes.max(1) as f64
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
