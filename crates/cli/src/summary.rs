//! Paging statistics that `granary run` reports at the end: as text with `--stats`, as one JSON
//! object with `--stats-json`.

use std::fmt;

use pager::runs::Bound;
use pager::stats::{Counter, FaultParts, Summary};
use pool::protocol::Status;
use serde::{Deserialize, Serialize};
use units::Size;
use units::number::thousands;
use units::scheduling::Scheduling;

use crate::assist::AssistProcess;
use crate::child;
use crate::node::{CpuTimes, nic_scheduling};

/// Statistics of one run. The suffix of a field's name is its unit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunSummary {
    /// The limit at the end of the run: of the run with `--local`, of each process with
    /// `--local-each`.
    pub local_limit_bytes: u64,
    /// Peak of the local memory that all processes of the run had at one time; `None` with
    /// `--local-each`.
    pub local_given_peak_bytes: Option<u64>,
    /// Peak resident memory of the largest process (`VmHWM`).
    pub local_peak_bytes: u64,
    /// Paged processes: the program and its descendants.
    pub processes: u64,
    /// Processes that ran without the pool, such as static programs. Set by `granary run`.
    pub processes_without_pool: u64,
    /// Page faults that the pager resolved.
    pub faults: u64,
    /// Mean time of a fault; `None` without faults.
    pub fault_mean_us: Option<f64>,
    /// 99th percentile of the time of a fault; `None` without faults.
    pub fault_p99_us: Option<f64>,
    /// Of the faults, those on write-protected pages.
    pub faults_write_protected: u64,
    /// Faults that waited for the evictor thread.
    pub faults_stalled: u64,
    /// Faults that evicted pages themselves.
    pub faults_evicting: u64,
    /// Pages that these faults evicted.
    pub pages_evicted_in_faults: u64,
    /// Of these faults, those that waited for a WRITE to the pool.
    pub faults_writing: u64,
    /// Of the mean time of a fault, the wait for READs.
    pub fault_read_us: f64,
    /// Of the mean time of a fault, lookups and mapping.
    pub fault_map_us: f64,
    /// Of the mean time of a fault, eviction.
    pub fault_evict_us: f64,
    /// Pages read from the pool.
    pub pages_in: u64,
    /// Pages that were read ahead.
    pub prefetch_issued: u64,
    /// Of these pages, those that the program needed.
    pub prefetch_used: u64,
    /// Of these pages, those that were reclaimed before the program needed them.
    pub prefetch_wasted: u64,
    /// Faults that waited for a page that was being read ahead.
    pub prefetch_late: u64,
    /// Faults on pages in the pool that were not read ahead.
    pub prefetch_demand: u64,
    /// used / (used + wasted); `None` if both are 0.
    pub prefetch_accuracy: Option<f64>,
    /// used / (used + demand); `None` if both are 0.
    pub prefetch_coverage: Option<f64>,
    /// late / used; `None` without used pages.
    pub prefetch_late_share: Option<f64>,
    /// Pages written to the pool.
    pub pages_out: u64,
    /// Pages taken out of the program's memory.
    pub pages_evicted: u64,
    /// Of these pages, those that were equal to their slot.
    pub pages_evicted_clean: u64,
    /// Of these pages, those that were all zero.
    pub pages_evicted_zero: u64,
    /// Of these pages, those of one repeated word.
    pub pages_evicted_word: u64,
    /// How pages leave the program's memory and come back: `move`, `copy`, or both.
    pub pages_way: String,
    /// Reason why pages are copied; `None` if no process copies.
    pub pages_copied_because: Option<String>,
    /// Peak number of chunks held.
    pub chunks_peak: u64,
    /// Peak number of bytes in the pool.
    pub remote_peak_bytes: u64,
    /// Bytes of the pages in chunks, divided by the bytes of the chunks, at the last sample of each
    /// process; `None` without chunks.
    pub utilization: Option<f64>,
    /// Pages that compaction moved to another chunk.
    pub pages_compacted: u64,
    /// Peak number of bytes in the overflow file, which takes pages when the pool is full.
    pub overflow_peak_bytes: u64,
    /// Peak resident memory that the pager does not page, summed over all processes.
    pub unpaged_peak_bytes: u64,
    /// The same memory at the last sample of each process.
    pub unpaged_end_bytes: u64,
    /// Chunks that the memory node's NIC allocated.
    pub allocations_by_nic: u64,
    /// Chunks that the memory node's CPU allocated; none in scheme onesidedmw.
    pub allocations_by_cpu: u64,
    /// How pages reach the private memory node: `direct` or `nic`; `None` with `--pool`.
    pub private_node: Option<String>,
    /// Of the processes, those that moved their pages without a NIC.
    pub processes_direct: u64,
    /// Of the processes, those whose fault handler CPU-bound threads do not delay (SCHED_RR).
    pub handlers_real_time: u64,
    /// Scheduling of the handlers of other processes, with the reason.
    pub handler_scheduling: String,
    /// Scheduling of the memory node's NIC thread, with the reason why it is not a better one.
    pub nic_scheduling: String,
    /// CPU time of the memory node's NIC thread while the program ran.
    pub nic_cpu_s: f64,
    /// Times that the NIC thread went to sleep while the program ran, and had to be woken.
    pub nic_sleeps: u64,
    /// CPU time of the memory node's control threads while the program ran, including the set-up
    /// of connections.
    pub control_cpu_s: f64,
    /// CPU time of the assist; `None` without an assist.
    pub assist_cpu_s: Option<f64>,
    /// Of the processes, those that have or had a session with the assist.
    pub assist_processes: u64,
    /// Pages that the assist moved.
    pub assist_pages: u64,
    /// Of these processes, those whose session has ended before them.
    pub assist_sessions_lost: u64,
    /// The assist has ended before the program.
    pub assist_gone: bool,
    /// Cipher of the pages in the pool; `None` if they are plain.
    pub sealed_by: Option<String>,
    /// Pages that were encrypted, those of the overflow file included.
    pub pages_sealed: u64,
    /// Pages that were authenticated and decrypted.
    pub pages_opened: u64,
    /// Peak of the bytes of the page tables and the tables of slots, summed over all processes.
    pub tables_peak_bytes: u64,
}

impl RunSummary {
    /// Combines the pager's counters with the pool's status before and after the run.
    ///
    /// Must be called when the program has ended and before another child ends, because the peak
    /// memory is that of all reaped children.
    pub fn new(local: Size, paged: &Summary, before: &Status, after: &Status) -> Self {
        let CpuTimes { nic, control } = CpuTimes::between(before, after);
        let counted = |counter| paged.get(counter);
        let FaultParts { read, evict, map } = paged.fault_parts_us();
        let ahead = paged.prefetch();
        let if_faulted = |us: f64| (paged.faults() > 0).then_some(us);
        Self {
            local_limit_bytes: local.bytes(),
            local_given_peak_bytes: None,
            local_peak_bytes: child::peak_bytes_of_ended(),
            processes: paged.processes(),
            processes_without_pool: 0,
            faults: paged.faults(),
            fault_mean_us: if_faulted(paged.fault_us_mean()),
            fault_p99_us: if_faulted(paged.fault_us(0.99)),
            faults_write_protected: counted(Counter::WriteFaults),
            faults_stalled: counted(Counter::FaultsStalled),
            faults_evicting: counted(Counter::FaultsEvicting),
            pages_evicted_in_faults: counted(Counter::PagesEvictedInFaults),
            faults_writing: counted(Counter::FaultsWriting),
            fault_read_us: read,
            fault_map_us: map,
            fault_evict_us: evict,
            pages_in: counted(Counter::PagesIn),
            prefetch_issued: ahead.issued,
            prefetch_used: ahead.used,
            prefetch_wasted: ahead.wasted,
            prefetch_late: ahead.late,
            prefetch_demand: ahead.demand,
            prefetch_accuracy: ahead.accuracy(),
            prefetch_coverage: ahead.coverage(),
            prefetch_late_share: ahead.late_share(),
            pages_out: counted(Counter::PagesOut),
            pages_evicted: counted(Counter::PagesEvicted),
            pages_evicted_clean: counted(Counter::PagesCleanEvicted),
            pages_evicted_zero: counted(Counter::PagesZeroEvicted),
            pages_evicted_word: counted(Counter::PagesWordEvicted),
            pages_way: paged.way().into(),
            pages_copied_because: paged.why_copying().map(Into::into),
            chunks_peak: counted(Counter::PoolChunksPeak),
            remote_peak_bytes: paged.remote_bytes_peak(),
            utilization: paged.utilization(),
            pages_compacted: counted(Counter::PagesCompacted),
            overflow_peak_bytes: counted(Counter::OverflowChunksPeak)
                * counted(Counter::ChunkBytes),
            unpaged_peak_bytes: counted(Counter::UnpagedBytesPeak),
            unpaged_end_bytes: counted(Counter::UnpagedBytes),
            allocations_by_nic: counted(Counter::AllocationsByNic),
            allocations_by_cpu: counted(Counter::AllocationsByCpu),
            private_node: None,
            processes_direct: counted(Counter::DirectProcesses),
            handlers_real_time: counted(Counter::HandlersRealTime),
            handler_scheduling: granted_here(),
            nic_scheduling: nic_scheduling(after).into(),
            nic_cpu_s: nic.as_secs_f64(),
            nic_sleeps: after.nic_wakeups.saturating_sub(before.nic_wakeups),
            control_cpu_s: control.as_secs_f64(),
            assist_cpu_s: None,
            assist_processes: counted(Counter::AssistedProcesses),
            assist_pages: counted(Counter::AssistPages),
            assist_sessions_lost: counted(Counter::AssistsLost),
            assist_gone: false,
            sealed_by: None,
            pages_sealed: counted(Counter::PagesSealed),
            pages_opened: counted(Counter::PagesOpened),
            tables_peak_bytes: counted(Counter::TableBytesPeak),
        }
    }
}

impl RunSummary {
    /// Adds the bound that the processes shared.
    pub fn with_bound(self, bound: Option<Bound>) -> Self {
        let Some(bound) = bound else { return self };
        let local_limit_bytes = bound.total_bytes.unwrap_or(self.local_limit_bytes);
        let local_given_peak_bytes = Some(bound.given_peak_bytes);
        Self { local_limit_bytes, local_given_peak_bytes, ..self }
    }

    /// Adds the assist of the run.
    pub fn with_assist(self, assist: Option<&AssistProcess>) -> Self {
        let Some(assist) = assist else { return self };
        let assist_cpu_s = Some(assist.cpu_time().as_secs_f64());
        Self { assist_cpu_s, assist_gone: assist.is_gone(), ..self }
    }
}

/// The scheduling that the system grants to a thread of this command, and so to those of the
/// program unless they have other rights.
fn granted_here() -> String {
    let ask = || Scheduling::ask().granted().to_string();
    std::thread::spawn(ask).join().unwrap_or_default()
}

impl fmt::Display for RunSummary {
    /// Lines that continue the pager's own summary.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit = Size(self.local_limit_bytes).rounded();
        match self.local_given_peak_bytes {
            Some(given) => writeln!(
                f,
                "  bound         {limit:>12}   of the run; at most {} were given to its processes \
                 at one time",
                Size(given).rounded()
            )?,
            None => writeln!(f, "  bound         {limit:>12}   of each process")?,
        }
        let peak = Size(self.local_peak_bytes).rounded();
        writeln!(f, "  resident      {peak:>12}   peak of the largest process")?;
        if let Some(private) = &self.private_node {
            let direct = self.processes_direct;
            writeln!(
                f,
                "  private node  {private:>12}   {} process(es) copy their pages; the NIC moves \
                 those of {}",
                thousands(direct),
                thousands(self.processes.saturating_sub(direct))
            )?;
        }
        writeln!(
            f,
            "  scheduling    {:>12}   handler(s) of {} with SCHED_RR, here {}; NIC thread: {}",
            thousands(self.handlers_real_time),
            thousands(self.processes),
            self.handler_scheduling,
            self.nic_scheduling
        )?;
        let ms = |seconds: f64| thousands((seconds * 1e3).round() as u64);
        if let Some(cpu_s) = self.assist_cpu_s {
            let gone = if self.assist_gone { "; the assist is gone" } else { "" };
            writeln!(
                f,
                "  assist        {:>12}   pages moved for {} of {} process(es), with {} ms of \
                 CPU{gone}",
                thousands(self.assist_pages),
                thousands(self.assist_processes),
                thousands(self.processes),
                ms(cpu_s)
            )?;
        }
        write!(
            f,
            "  memory node   {:>9} ms   of control CPU, {} ms of the NIC thread, which slept {} \
             times",
            ms(self.control_cpu_s),
            ms(self.nic_cpu_s),
            thousands(self.nic_sleeps)
        )
    }
}
