//! Metrics of the pager: the declarations of the counters in [`crate::stats`].

use metrics::{Histogram, Metric, Samples, Unit, Value, counter, gauge, histogram};

use crate::stats::{Counter, Summary};

/// Bucket bounds of fault times in reports: powers of two from 1 us to 1 s, in nanoseconds.
const BOUNDS: std::ops::RangeInclusive<u32> = 10..=30;

/// Processes whose counters are added up.
const PROCESSES: &[Metric] = &[gauge("pager_processes", "Paged processes, ended ones included.")];

macro_rules! rows {
    ($($counter:ident: $metric:expr,)*) => {
        const COUNTERS: &[Counter] = &[$(Counter::$counter),*];
        const METRICS: &[Metric] = &[$($metric),*];

        /// Does not compile if a counter has no row.
        const _: fn(Counter) = |counter| match counter { $(Counter::$counter => {})* };
    };
}

const fn bytes(metric: Metric) -> Metric {
    metric.in_unit(Unit::Bytes)
}

rows! {
    Faults: counter("pager_faults_missing", "Faults on missing pages."),
    WriteFaults: counter("pager_faults_write", "Faults on write-protected pages."),
    PagesZeroed: counter("pager_pages_zeroed", "Pages filled with zeros at first touch."),
    PagesIn: counter("pager_pages_in", "Pages read from slots."),
    PagesReadAhead: counter("pager_pages_read_ahead", "Of the pages read, those read ahead."),
    PagesRestored: counter("pager_pages_restored", "Pages mapped back from the shelf."),
    PagesOut: counter("pager_pages_out", "Pages written to slots."),
    PagesEvicted: counter("pager_pages_evicted", "Pages evicted."),
    PagesCleanEvicted: counter("pager_pages_evicted_clean", "Pages evicted without a write."),
    PagesZeroEvicted: counter("pager_pages_evicted_zero", "Zero pages evicted, without a slot."),
    FaultsStalled: counter("pager_faults_stalled", "Faults that waited for the worker."),
    PoolChunks: gauge("pager_pool_chunks", "Chunks held in the pool."),
    PoolChunksPeak: gauge("pager_pool_chunks_peak", "Peak of the chunks held in the pool."),
    OverflowChunks: gauge("pager_overflow_chunks", "Chunks held in the overflow file."),
    OverflowChunksPeak: gauge("pager_overflow_chunks_peak", "Peak of the chunks in that file."),
    ResidentPages: gauge("pager_resident_pages", "Paged pages that are resident."),
    ResidentPagesPeak: gauge("pager_resident_pages_peak", "Peak of the resident pages."),
    ChunkBytes: bytes(gauge("pager_chunk", "Length of a chunk.")),
    AllocationsByNic: counter("pager_allocations_nic", "Chunks that the NIC allocated."),
    AllocationsByCpu: counter("pager_allocations_cpu", "Chunks that a memory node's CPU \
                                                        allocated."),
    FaultNs: histogram("pager_fault_time", "Time to serve a fault, in the handler.")
        .in_unit(Unit::Nanoseconds),
    PagesToChildren: counter("pager_pages_to_children", "Pages served to forked children."),
    UnpagedBytes: bytes(gauge("pager_unpaged", "Resident memory that is not paged.")),
    UnpagedBytesPeak: bytes(gauge("pager_unpaged_peak", "Peak of the memory that is not paged.")),
    UnpagedMapped: bytes(gauge("pager_unpaged_mapped", "At the peak: mappings by system calls.")),
    UnpagedHeap: bytes(gauge("pager_unpaged_heap", "At the peak: the brk heap.")),
    UnpagedFiles: bytes(gauge("pager_unpaged_files", "At the peak: private mappings of files.")),
    UnpagedStacks: bytes(gauge("pager_unpaged_stacks", "At the peak: stacks.")),
    UnpagedShared: bytes(gauge("pager_unpaged_shared", "At the peak: shared memory.")),
    UnpagedHuge: bytes(gauge("pager_unpaged_huge", "At the peak: huge pages.")),
    FaultsEvicting: counter("pager_faults_evicting", "Faults that evicted pages themselves."),
    PagesEvictedInFaults: counter("pager_pages_evicted_in_faults", "Pages that these evicted."),
    FaultsWriting: counter("pager_faults_writing", "Of these faults, those that waited for a \
                                                    WRITE."),
    FaultReadNs: counter("pager_fault_read_time", "Time in which faults waited for READs.")
        .in_unit(Unit::Nanoseconds),
    FaultEvictNs: counter("pager_fault_evict_time", "Time in which faults evicted pages.")
        .in_unit(Unit::Nanoseconds),
    Extents: gauge("pager_extents", "Paged mappings outside of the region."),
    MappingsUnpaged: counter("pager_mappings_unpaged", "Mappings that had to stay unpaged."),
    MappingsUnpagedBytes: bytes(counter("pager_mappings_unpaged", "Length of these mappings.")),
    DirectProcesses: gauge("pager_processes_direct", "Paged processes that move pages without a \
                                                      NIC."),
    HandlersRealTime: gauge("pager_handlers_real_time", "Fault handlers with SCHED_RR."),
    PagesWordEvicted: counter("pager_pages_evicted_word", "Pages of one repeated word evicted, \
                                                           without a slot."),
    PagesWordMapped: counter("pager_pages_word_mapped", "Pages mapped from a repeated word."),
    PrefetchUsed: counter("pager_pages_read_ahead_used", "Pages read ahead that were needed."),
    PrefetchWasted: counter("pager_pages_read_ahead_wasted", "Pages read ahead that were not \
                                                              needed."),
    PrefetchLate: counter("pager_faults_late", "Faults that waited for a page being read ahead."),
    PrefetchDemand: counter("pager_faults_demand", "Faults on pages in the pool that were not \
                                                    read ahead."),
    ProcessesMoving: gauge("pager_processes_moving", "Paged processes whose pages are moved."),
    ProcessesCopyingAsSet: gauge("pager_processes_copying_set", "Processes whose pages are copied \
                                                                 because of GRANARY_PAGES=copy."),
    ProcessesCopyingWithoutMove: gauge("pager_processes_copying_no_move", "Processes whose pages \
                                                                           are copied on a kernel \
                                                                           without UFFDIO_MOVE."),
    ProcessesCopyingAfterTest: gauge("pager_processes_copying_test", "Processes whose pages are \
                                                                      copied because the \
                                                                      self-test failed."),
    LiveBytes: bytes(gauge("pager_live", "Length of the pages that have a slot.")),
    HeldBytes: bytes(gauge("pager_held", "Length of the chunks held, also in the overflow file.")),
    PagesCompacted: counter("pager_pages_compacted", "Pages that compaction moved to another \
                                                      chunk."),
    AssistPages: counter("pager_pages_by_assist", "Pages that the assist moved."),
    AssistedProcesses: gauge("pager_processes_assisted", "Paged processes with an assist."),
    AssistsLost: gauge("pager_assists_lost", "Paged processes whose assist has ended before them."),
    PagesSealed: counter("pager_pages_sealed", "Pages encrypted before they left the process."),
    PagesOpened: counter("pager_pages_opened", "Pages authenticated and decrypted."),
    ProcessesSealing: gauge("pager_processes_sealing", "Paged processes with encrypted pages in \
                                                        the pool."),
    TableBytesPeak: bytes(gauge("pager_tables_peak", "Peak of the page table and the tables of \
                                                      slots.")),
}

/// The declarations of all metrics of paged processes.
pub fn declared() -> impl Iterator<Item = &'static Metric> {
    PROCESSES.iter().chain(METRICS)
}

impl Summary {
    /// The values of all metrics, summed over the processes. A peak is the sum of their peaks.
    pub fn samples(&self) -> Samples {
        let mut samples = Samples::default();
        samples.push(&PROCESSES[0], &self.processes());
        for (counter, metric) in COUNTERS.iter().zip(METRICS) {
            match counter {
                Counter::FaultNs => {
                    samples.add(metric, None, Value::Histogram(self.fault_times()));
                }
                counter => samples.push(metric, &self.get(*counter)),
            }
        }
        samples
    }

    fn fault_times(&self) -> Histogram {
        let mut buckets: Vec<(u64, u64)> = BOUNDS.map(|bits| (1 << bits, 0)).collect();
        let mut beyond = 0;
        for (top, hits) in self.fault_buckets() {
            match buckets.iter_mut().find(|(bound, _)| top <= *bound) {
                Some((_, count)) => *count += hits,
                None => beyond += hits,
            }
        }
        Histogram { sum: self.get(Counter::FaultNs), buckets, beyond }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Stats;

    #[test]
    fn samples_have_all_counters_and_fault_times() {
        let stats = Stats::private().unwrap();
        stats.add(Counter::PagesOut, 7);
        [500, 1_500, 1_600, 2_000_000_000].into_iter().for_each(|ns| stats.record_fault(ns));
        let samples = stats.snapshot().samples();
        assert_eq!(samples.iter().count(), declared().count());
        let text = samples.lines().join("\n");
        assert!(text.contains("granary_pager_pages_out_total 7"), "{text}");
        assert!(text.contains("granary_pager_fault_time_seconds_count 4"), "{text}");
        let page = metrics::page(samples).unwrap();
        for bucket in ["0.000001024\"} 1", "0.000002048\"} 3", "1.073741824\"} 3", "+Inf\"} 4"] {
            assert!(page.contains(bucket), "{bucket} is not in {page}");
        }
    }
}
