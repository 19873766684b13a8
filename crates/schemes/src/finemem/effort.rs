//! Verbs that allocations cost, counted where they are posted.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use scheme::CasStats;

/// Verbs of one attempt so far.
#[derive(Default)]
pub(super) struct AttemptCost {
    round_trips: AtomicU32,
    cas: AtomicU32,
    retries: AtomicU32,
}

impl AttemptCost {
    /// Counts verbs that are posted together and waited for.
    pub fn round_trip(&self) {
        self.round_trips.fetch_add(1, Relaxed);
    }

    /// Counts a CAS.
    pub fn cas(&self, succeeded: bool) {
        self.cas.fetch_add(1, Relaxed);
        self.retries.fetch_add(!succeeded as u32, Relaxed);
    }
}

/// Sums over all allocations.
#[derive(Default)]
pub(super) struct EffortCounts {
    allocations: AtomicU64,
    round_trips: AtomicU64,
    cas: AtomicU64,
    retries: AtomicU64,
    retries_max: AtomicU64,
}

impl EffortCounts {
    /// Adds an attempt; `granted` tells whether it got a block.
    pub fn add(&self, spent: &AttemptCost, granted: bool) {
        let retries = spent.retries.load(Relaxed) as u64;
        self.allocations.fetch_add(granted as u64, Relaxed);
        self.round_trips.fetch_add(spent.round_trips.load(Relaxed) as u64, Relaxed);
        self.cas.fetch_add(spent.cas.load(Relaxed) as u64, Relaxed);
        self.retries.fetch_add(retries, Relaxed);
        self.retries_max.fetch_max(retries, Relaxed);
    }

    pub fn get(&self) -> CasStats {
        CasStats {
            allocations: self.allocations.load(Relaxed),
            round_trips: self.round_trips.load(Relaxed),
            cas: self.cas.load(Relaxed),
            cas_retries: self.retries.load(Relaxed),
            cas_retries_max: self.retries_max.load(Relaxed),
        }
    }
}
