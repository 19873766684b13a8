//! What `granary run` says at the end: for people with `--stats`, as one JSON object with
//! `--stats-json`.

use std::fmt;

use bench::size::Size;
use bench::table::thousands;
use pager::stats::{Counter, Summary};
use pool::protocol::Status;
use serde::{Deserialize, Serialize};

use crate::child;
use crate::node::CpuTimes;

/// The summary of a run. Bytes are bytes, times are in the unit that ends the name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunSummary {
    /// The bound of `--local`, for each process.
    pub local_limit_bytes: u64,
    /// The most that the program had resident (`VmHWM`).
    pub local_peak_bytes: u64,
    /// Processes that were paged: the program and what it started.
    pub processes: u64,
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
    /// The most that was resident and is not paged; of several processes, the sum.
    pub unpaged_peak_bytes: u64,
    /// The same, when each process was looked at last.
    pub unpaged_end_bytes: u64,
    /// Chunks that the memory node's NIC allocated.
    pub allocations_by_nic: u64,
    /// Chunks that the memory node's CPU allocated: none, in scheme onesidedmw.
    pub allocations_by_cpu: u64,
    /// Time of the thread that plays the memory node's NIC, while the program ran.
    pub nic_cpu_s: f64,
    /// Time of the memory node's control CPU, while the program ran: connections included.
    pub control_cpu_s: f64,
}

impl RunSummary {
    /// What the pager counted, and the memory node's states before and after. To be made as
    /// soon as the program has ended and before any other child has.
    pub fn new(local: Size, paged: &Summary, before: &Status, after: &Status) -> Self {
        let CpuTimes { nic, control } = CpuTimes::between(before, after);
        let counted = |counter| paged.get(counter);
        let some = |us: f64| (paged.faults() > 0).then_some(us);
        Self {
            local_limit_bytes: local.bytes(),
            local_peak_bytes: child::peak_bytes_of_ended(),
            processes: paged.processes(),
            faults: paged.faults(),
            fault_mean_us: some(paged.fault_us_mean()),
            fault_p99_us: some(paged.fault_us(0.99)),
            pages_in: counted(Counter::PagesIn),
            pages_out: counted(Counter::PagesOut),
            chunks_peak: counted(Counter::PoolChunksPeak),
            remote_peak_bytes: paged.remote_bytes_peak(),
            overflow_peak_bytes: counted(Counter::OverflowChunksPeak)
                * counted(Counter::ChunkBytes),
            unpaged_peak_bytes: counted(Counter::UnpagedBytesPeak),
            unpaged_end_bytes: counted(Counter::UnpagedBytes),
            allocations_by_nic: counted(Counter::AllocationsByNic),
            allocations_by_cpu: counted(Counter::AllocationsByCpu),
            nic_cpu_s: nic.as_secs_f64(),
            control_cpu_s: control.as_secs_f64(),
        }
    }
}

impl fmt::Display for RunSummary {
    /// What the pager's own summary does not have: two lines more of it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let peak = Size(self.local_peak_bytes).rounded();
        writeln!(f, "  resident      {peak:>12}   at most, of the largest process")?;
        let ms = |seconds: f64| thousands((seconds * 1e3).round() as u64);
        write!(
            f,
            "  memory node   {:>9} ms   of control CPU; {} ms of the thread that plays its NIC",
            ms(self.control_cpu_s),
            ms(self.nic_cpu_s)
        )
    }
}
