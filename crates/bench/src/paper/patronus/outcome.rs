//! Measurements of clients that use leases.

use pool::protocol::Status;

use bench_report::histogram::Latencies;

/// Measurements of the clients of a thread, or of all threads together.
#[derive(Clone, Debug, Default)]
pub struct LeaseOutcome {
    /// Latencies of acquisitions.
    pub acquire: Latencies,
    /// Latencies of accesses.
    pub access: Latencies,
    /// Latencies of extensions.
    pub extend: Latencies,
    /// Latencies of whole cycles.
    pub cycle: Latencies,
    /// Cycles that did not count, because a lease ended in them.
    pub expired: u64,
    /// Requests and window operations of the memory node.
    pub counts: Counts,
    /// Times of refused accesses, of loops that have such.
    pub fault: Option<FaultTimes>,
}

/// Times around an access that the memory node's NIC refuses.
#[derive(Clone, Debug, Default)]
pub struct FaultTimes {
    /// From the access to its error, with the handling of the error.
    pub error: Latencies,
    /// From the access to the end of the next one that succeeds.
    pub next: Latencies,
    /// Latencies of accesses of the same QP that were posted directly behind the refused one.
    pub neighbour: Latencies,
    /// Latencies of accesses without a fault.
    pub access: Latencies,
    /// Round trips of a request on the control connection.
    pub notify: Latencies,
}

/// Requests and window operations that a memory node has executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Permissions granted.
    pub permissions: u64,
    /// Requests: acquisitions, renewals, extensions by RPC, and revocations that ended a
    /// permission.
    pub requests: u64,
    /// Binds of windows; registrations, if regions open permissions.
    pub binds: u64,
    /// Unbinds of windows; deregistrations.
    pub unbinds: u64,
    /// Rebinds that ended one permission and began another.
    pub handovers: u64,
}

impl Counts {
    /// The counts so far.
    pub fn of(status: &Status) -> Self {
        let lease = status.node.lease.clone().unwrap_or_default();
        let revoked = lease.revocations + lease.renewals;
        Self {
            permissions: lease.grants,
            requests: lease.grants + revoked + lease.extensions_rpc + lease.busy,
            binds: lease.binds,
            unbinds: lease.unbinds,
            handovers: lease.handovers,
        }
    }

    /// The counts since `before`.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            permissions: self.permissions.saturating_sub(before.permissions),
            requests: self.requests.saturating_sub(before.requests),
            binds: self.binds.saturating_sub(before.binds),
            unbinds: self.unbinds.saturating_sub(before.unbinds),
            handovers: self.handovers.saturating_sub(before.handovers),
        }
    }

    /// Requests for each permission.
    pub fn requests_each(&self) -> f64 {
        self.requests as f64 / self.permissions.max(1) as f64
    }

    /// Window operations for each permission. A handover is one.
    pub fn windows_each(&self) -> f64 {
        (self.binds + self.unbinds + self.handovers) as f64 / self.permissions.max(1) as f64
    }

    fn join(&mut self, other: &Self) {
        self.permissions += other.permissions;
        self.requests += other.requests;
        self.binds += other.binds;
        self.unbinds += other.unbinds;
        self.handovers += other.handovers;
    }
}

impl LeaseOutcome {
    /// Adds the measurements of a concurrent client or thread.
    pub fn join(&mut self, other: &Self) {
        self.acquire.merge(&other.acquire);
        self.access.merge(&other.access);
        self.extend.merge(&other.extend);
        self.cycle.merge(&other.cycle);
        self.expired += other.expired;
        self.counts.join(&other.counts);
        if let Some(other) = &other.fault {
            self.fault.get_or_insert_default().join(other);
        }
    }
}

impl FaultTimes {
    fn join(&mut self, other: &Self) {
        self.error.merge(&other.error);
        self.next.merge(&other.next);
        self.neighbour.merge(&other.neighbour);
        self.access.merge(&other.access);
        self.notify.merge(&other.notify);
    }
}
