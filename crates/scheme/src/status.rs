//! State and counters of a scheme.

use metrics::{Unit, counter, declare, gauge};
use serde::{Deserialize, Serialize};

/// State of a memory node's scheme.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Name of the scheme.
    pub scheme: String,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Functions of the memory node's NIC that contain windows; 0 in a scheme that supports only
    /// one.
    #[serde(default)]
    pub functions: u32,
    /// Number of chunks.
    pub chunks: u64,
    /// Chunks that are free.
    pub free: u64,
    /// Compute nodes that are connected.
    pub clients: u64,
    /// Departed compute nodes whose chunks are still being reclaimed.
    #[serde(default)]
    pub leaving: u64,
    /// Allocations that the NIC executed.
    pub allocations_nic: u64,
    /// Allocations that the memory node's CPU executed.
    pub allocations_cpu: u64,
    /// Frees that the NIC executed.
    pub frees_nic: u64,
    /// Frees that the memory node's CPU executed.
    pub frees_cpu: u64,
    /// Refused requests.
    pub refused: u64,
    /// Budgets, if any are set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<BudgetStatus>,
    /// Leases, in a scheme that has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<LeaseStatus>,
}

/// The state of budgets, for `status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetStatus {
    /// Requests per second that a compute node may make.
    pub requests_per_s: Option<u64>,
    /// Chunks that a compute node may hold.
    pub chunks: Option<u64>,
    /// Interval in milliseconds at which the counters are read.
    pub interval_ms: u64,
    /// Management connections closed so far.
    pub ended: u64,
    /// Compute nodes whose management connection is closed now.
    pub suspended: u64,
    /// Usage of the compute nodes with the highest use, at most [`BudgetStatus::MOST`].
    pub most: Vec<Use>,
}

impl BudgetStatus {
    /// Maximum length of [`BudgetStatus::most`].
    pub const MOST: usize = 16;
}

/// Usage of one compute node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Use {
    /// The compute node.
    pub client: u32,
    /// Requests per second, as of the last reading.
    pub requests_per_s: u64,
    /// Upper bound of the chunks that it holds.
    pub chunks: u64,
    /// True if its management connection is closed.
    pub suspended: bool,
}

/// A named value that a client counts.
pub type Counter = (&'static str, u64);

/// Cost of the allocations of a compute node that allocates by CAS. All zero in other schemes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CasStats {
    /// Blocks allocated.
    pub allocations: u64,
    /// Round trips of all allocation attempts. Verbs that are posted together count as one round
    /// trip.
    pub round_trips: u64,
    /// CASes attempted as part of an allocation: to take a block, to write the log, and to return a
    /// partial block.
    pub cas: u64,
    /// Failed CASes: the word did not hold the expected value.
    pub cas_retries: u64,
    /// Maximum number of failed CASes in one allocation attempt.
    pub cas_retries_max: u64,
}

impl CasStats {
    /// The values as named counters.
    pub fn counters(&self) -> Vec<Counter> {
        vec![
            ("allocations", self.allocations),
            ("round_trips", self.round_trips),
            ("cas", self.cas),
            ("cas_retries", self.cas_retries),
            ("cas_retries_max", self.cas_retries_max),
        ]
    }
}

impl From<&[Counter]> for CasStats {
    /// The values of the counters of these names; 0 for a name that is not listed.
    fn from(counters: &[Counter]) -> Self {
        let get = |name| counters.iter().find(|(n, _)| *n == name).map_or(0, |(_, value)| *value);
        Self {
            allocations: get("allocations"),
            round_trips: get("round_trips"),
            cas: get("cas"),
            cas_retries: get("cas_retries"),
            cas_retries_max: get("cas_retries_max"),
        }
    }
}

declare! {
    NodeStatus {
        chunk_bytes: gauge("pool_chunk", "Length of a chunk.").in_unit(Unit::Bytes),
        functions: gauge(
            "pool_functions",
            "Functions of the NIC that contain windows; 0 in a scheme that supports only one."
        ),
        chunks: gauge("pool_chunks", "Chunks of the pool."),
        free: gauge("pool_chunks_free", "Chunks that are free."),
        clients: gauge("pool_clients", "Clients that are connected."),
        leaving: gauge("pool_clients_leaving", "Departed clients under reclamation."),
        allocations_nic: counter("pool_allocations_nic", "Allocations that the NIC executed."),
        allocations_cpu: counter(
            "pool_allocations_cpu",
            "Allocations that the memory node's CPU executed."
        ),
        frees_nic: counter("pool_frees_nic", "Frees that the NIC executed."),
        frees_cpu: counter("pool_frees_cpu", "Frees that the memory node's CPU executed."),
        refused: counter("pool_refused", "Refused requests on management QPs."),
    } except { scheme, budget, lease }
}

declare! {
    BudgetStatus {
        requests_per_s: gauge(
            "budget_requests",
            "Requests per second that a client may make, if limited."
        ),
        chunks: gauge("budget_chunks", "Chunks that a client may hold, if limited."),
        ended: counter("budget_suspensions", "Suspensions of clients over a budget."),
        suspended: gauge("budget_suspended", "Clients that are suspended now."),
    } except { interval_ms, most }
}

/// State of a scheme with leases.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseStatus {
    /// Objects that exist.
    pub objects: u64,
    /// Bytes of these objects.
    pub object_bytes: u64,
    /// Permissions that are open or being opened or closed.
    pub permissions: u64,
    /// Requests that wait for permissions to end.
    pub waiting: u64,
    /// Domains with members.
    pub domains: u64,
    /// Permissions granted so far, with those of allocations.
    pub grants: u64,
    /// Permissions whose lease was found extended at its end, and went on.
    pub extensions: u64,
    /// Extensions by RPC, for comparison with those by CAS, which the memory node does not count.
    #[serde(default)]
    pub extensions_rpc: u64,
    /// Leases renewed by RPC.
    pub renewals: u64,
    /// Permissions revoked by their holders.
    pub revocations: u64,
    /// Leases that the memory node ended.
    pub expiries: u64,
    /// Permissions marked as not extendable, for a waiting request or for a free.
    pub notices: u64,
    /// Requests that waited in vain.
    pub busy: u64,
    /// Binds of windows.
    pub binds: u64,
    /// Unbinds of windows.
    pub unbinds: u64,
    /// Rebinds that closed one permission and opened another.
    pub handovers: u64,
    /// Windows of all compute nodes, bound or not.
    pub windows: u64,
    /// Spare QPs of all compute nodes.
    pub spares: u64,
    /// Access QPs that were re-established after an error.
    pub qp_resets: u64,
    /// Heartbeats of QP polling.
    #[serde(default)]
    pub heartbeats: u64,
    /// Compute nodes that were taken for dead because their QP did not answer a heartbeat.
    #[serde(default)]
    pub dead_qps: u64,
}

declare! {
    LeaseStatus {
        objects: gauge("lease_objects", "Objects that exist."),
        object_bytes: gauge("lease_object", "Bytes of the objects.").in_unit(Unit::Bytes),
        permissions: gauge("lease_permissions", "Permissions that are open, or change."),
        waiting: gauge("lease_waiting", "Requests that wait for permissions to end."),
        domains: gauge("lease_domains", "Domains with members."),
        grants: counter("lease_grants", "Permissions granted."),
        extensions: counter(
            "lease_extensions",
            "Permissions whose lease was found extended at its end."
        ),
        extensions_rpc: counter("lease_extensions_rpc", "Extensions by RPC instead of CAS."),
        renewals: counter("lease_renewals", "Leases renewed by RPC."),
        revocations: counter("lease_revocations", "Permissions revoked by their holders."),
        expiries: counter("lease_expiries", "Leases that the memory node ended."),
        notices: counter(
            "lease_notices",
            "Permissions marked as not extendable, for a waiting request or for a free."
        ),
        busy: counter("lease_busy", "Requests that waited in vain for permissions to end."),
        binds: counter("lease_binds", "Binds of windows."),
        unbinds: counter("lease_unbinds", "Unbinds of windows."),
        handovers: counter(
            "lease_handovers",
            "Rebinds that closed one permission and opened another."
        ),
        windows: gauge("lease_windows", "Windows of all clients, bound or not."),
        spares: gauge("lease_spare_qps", "Spare QPs of all clients."),
        qp_resets: counter("lease_qp_resets", "Access QPs re-established after an error."),
        heartbeats: counter("lease_heartbeats", "Heartbeats of QP polling."),
        dead_qps: counter("lease_dead_qps", "Clients whose QP did not answer a heartbeat."),
    } except { }
}
