//! Metrics of a memory node: the declarations of the numbers in [`Status`] and [`Trouble`].
//!
//! The declarations of the scheme's numbers lie beside its part of the status.
//!
//! The fields have names of their own in JSON. The counters of the NIC travel by their full names
//! in [`Status::nic_counters`], so that a counter that the NIC declares needs no field here.

use crate::edge::NIC_METRICS;
use crate::protocol::{Status, Trouble};
use metrics::{Declared, Metric, Samples, Unit, counter, declare, gauge};
use scheme::{BudgetStatus, LeaseStatus, NodeStatus};

declare! {
    Status {
        donated_bytes: gauge("pool_donated", "Memory donated to the pool.").in_unit(Unit::Bytes),
        held_bytes: gauge("pool_held", "Memory of chunks that are not free.").in_unit(Unit::Bytes),
        kept_bytes: gauge("pool_kept", "Upper limit of free memory that stays resident.")
            .in_unit(Unit::Bytes),
        resident_bytes: gauge(
            "node_resident",
            "Resident memory of the memory node's process, without memory shared by clients."
        )
        .in_unit(Unit::Bytes),
        uptime_ms: gauge("node_uptime", "Time since the start.").in_unit(Unit::Milliseconds),
        control_cpu_ns: counter("node_control_cpu", "CPU time of the control threads.")
            .in_unit(Unit::Nanoseconds),
        control_wakeups: counter("node_control_wakeups", "Wake-ups of the control threads."),
        nic_cpu_ns: counter("nic_cpu", "CPU time of the NIC thread, which plays the hardware.")
            .in_unit(Unit::Nanoseconds),
        nic_wakeups: counter("nic_sleeps", "Times that the NIC thread went to sleep."),
        nic_ordinary: gauge("nic_ordinary", "1 if CPU-bound threads can delay the NIC thread."),
    } except { node, nic_wqes, nic, nic_scheduling, trouble, dropped, nic_counters }
}

declare! {
    Trouble {
        connections: counter(
            "node_connections_failed",
            "Connections closed because a system call for them failed."
        ),
        accepts: counter("node_accepts_failed", "Failed attempts to accept a connection."),
        unretired: gauge(
            "pool_clients_unretired",
            "Departed clients whose keys the NIC did not revoke yet."
        ),
    } except { last }
}

impl Status {
    /// The values of all metrics of a memory node.
    pub fn samples(&self) -> Samples {
        let mut samples = Samples::default();
        self.sample(&mut samples);
        self.node.sample(&mut samples);
        if let Some(budget) = &self.node.budget {
            budget.sample(&mut samples);
        }
        if let Some(lease) = &self.node.lease {
            lease.sample(&mut samples);
        }
        self.trouble.sample(&mut samples);
        for declared in NIC_METRICS {
            samples.add_numbers(declared, &self.nic_counters);
        }
        samples
    }
}

/// The declarations of all metrics of a memory node.
pub fn declared() -> impl Iterator<Item = &'static Metric> {
    let own = [
        Status::METRICS,
        NodeStatus::METRICS,
        BudgetStatus::METRICS,
        LeaseStatus::METRICS,
        Trouble::METRICS,
    ];
    own.into_iter().chain(NIC_METRICS).flatten()
}
