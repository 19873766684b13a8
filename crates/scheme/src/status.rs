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
    } except { scheme, budget }
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
