//! Counts of round trips by kind of operation.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A read of a value.
    Get,
    /// A write of a whole value.
    Set,
    /// A deletion.
    Delete,
    /// A change that needs the old value.
    Update,
    /// A change of an expiry.
    Expire,
    /// A question that needs no value.
    Exists,
    /// A step of a scan.
    Scan,
    /// A change of several keys.
    Atomically,
    /// A split of a subtable, without the doubling of the directory.
    Split,
    /// A doubling of a directory.
    Double,
    /// A merge of two subtables.
    Merge,
    /// A move of a block.
    Compact,
    /// A deletion to make room.
    Evict,
    /// A deletion of an expired key.
    Sweep,
    /// Creation, opening and flushing.
    Maintain,
}

/// Number of kinds.
const KINDS: usize = Operation::Maintain as usize + 1;

/// Counters of one kind of operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trips {
    /// Operations.
    pub operations: u64,
    /// Round trips of all of them.
    pub waits: u64,
}

/// Counters of all kinds.
#[derive(Debug, Default)]
pub(crate) struct Counters([(AtomicU64, AtomicU64); KINDS]);

impl Counters {
    pub fn of(&self, kind: Operation) -> Trips {
        let (operations, waits) = &self.0[kind as usize];
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Trips { operations: load(operations), waits: load(waits) }
    }

    /// Begins an operation.
    pub fn begin(&self, kind: Operation) -> Trip<'_> {
        Trip { counters: self, kind, waits: AtomicU32::new(0) }
    }
}

/// An operation that runs. Counted when the value is dropped.
#[derive(Debug)]
pub(crate) struct Trip<'a> {
    counters: &'a Counters,
    kind: Operation,
    waits: AtomicU32,
}

impl Trip<'_> {
    pub fn count(&self) {
        // One task runs the operation, so nothing is added in between.
        self.waits.store(self.waits.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
}

impl Drop for Trip<'_> {
    fn drop(&mut self) {
        let (operations, waits) = &self.counters.0[self.kind as usize];
        operations.fetch_add(1, Ordering::Relaxed);
        waits.fetch_add(self.waits.load(Ordering::Relaxed).into(), Ordering::Relaxed);
    }
}
