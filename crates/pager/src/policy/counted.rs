//! A policy that counts its calls, for tests.

use super::{AnyPolicy, Policy, Run};

/// Pages that the calls named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    pub arrived: u64,
    pub refetched: u64,
    /// Pages of `refetched` that had been taken out a short time before.
    pub recent: u64,
    pub restored: u64,
    pub returned: u64,
    pub left_behind: u64,
    pub unneeded: u64,
    pub removed: u64,
}

impl Calls {
    pub fn add(&mut self, other: &Self) {
        self.arrived += other.arrived;
        self.refetched += other.refetched;
        self.recent += other.recent;
        self.restored += other.restored;
        self.returned += other.returned;
        self.left_behind += other.left_behind;
        self.unneeded += other.unneeded;
        self.removed += other.removed;
    }
}

/// Another policy, and the calls so far.
#[derive(Debug)]
pub struct Counted {
    policy: AnyPolicy,
    pub calls: Calls,
}

impl Counted {
    /// Counts the calls of a policy.
    pub fn new(policy: AnyPolicy) -> Self {
        Self { policy, calls: Calls::default() }
    }

    pub fn capacity(&self) -> usize {
        self.policy.capacity()
    }
}

impl Policy for Counted {
    fn arrived(&mut self, run: Run) {
        self.calls.arrived += u64::from(run.pages);
        self.policy.arrived(run);
    }

    fn refetched(&mut self, run: Run, recent: bool) {
        self.calls.refetched += u64::from(run.pages);
        self.calls.recent += if recent { u64::from(run.pages) } else { 0 };
        self.policy.refetched(run, recent);
    }

    fn restored(&mut self, run: Run) {
        self.calls.restored += u64::from(run.pages);
        self.policy.restored(run);
    }

    fn returned(&mut self, run: Run) {
        self.calls.returned += u64::from(run.pages);
        self.policy.returned(run);
    }

    fn left_behind(&mut self, run: Run) {
        self.calls.left_behind += u64::from(run.pages);
        self.policy.left_behind(run);
    }

    fn unneeded(&mut self, run: Run) {
        self.calls.unneeded += u64::from(run.pages);
        self.policy.unneeded(run);
    }

    fn removed(&mut self, run: Run) {
        self.calls.removed += u64::from(run.pages);
        self.policy.removed(run);
    }

    fn victim_run(&mut self, max: u32) -> Option<Run> {
        self.policy.victim_run(max)
    }

    fn pages(&self) -> u32 {
        self.policy.pages()
    }

    fn holds(&self, page: u32) -> bool {
        self.policy.holds(page)
    }
}
