//! What `granary run` says at the end: for people with `--stats`, as one JSON object with
//! `--stats-json`.

use serde::{Deserialize, Serialize};

/// The summary of a run. Bytes are bytes, times are in the unit that ends the name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunSummary {
    /// The bound of `--local`, for each process.
    pub local_limit_bytes: u64,
    /// The most that the program had resident (`VmHWM`).
    pub local_peak_bytes: u64,
    /// Page faults that the pager resolved.
    pub faults: u64,
    /// Their mean time; none without a fault.
    pub fault_mean_us: Option<f64>,
    /// The 99th percentile of their time.
    pub fault_p99_us: Option<f64>,
    /// Pages read from the pool.
    pub pages_in: u64,
    /// Pages written to the pool.
    pub pages_out: u64,
    /// The most chunks held at once.
    pub chunks_peak: u64,
    /// The most bytes in the pool at once.
    pub remote_peak_bytes: u64,
    /// The most bytes in the overflow file, used when the pool is full.
    pub overflow_peak_bytes: u64,
    /// Chunks that the memory node's NIC allocated.
    pub allocations_by_nic: u64,
    /// Chunks that the memory node's CPU allocated: none, in scheme onesidedmw.
    pub allocations_by_cpu: u64,
    /// Mean time of an allocation; none without one.
    pub alloc_mean_us: Option<f64>,
    /// Time of the thread that plays the memory node's NIC.
    pub nic_cpu_s: f64,
    /// Time of the memory node's control CPU, from its first client to the end.
    pub control_cpu_s: f64,
}
