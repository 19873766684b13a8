//! Counters of a paged process, in the memory of its run, which outlives the process.
//!
//! Each process counts in a slot of [`crate::run_memory`] with relaxed atomics. `granary run` reads
//! the slots when the program has ended, including those of processes that were killed.
//!
//! ```text
//!  u64[0]       magic and version
//!  u64[1..62]   counters, by the number of `Counter`
//!  u64[62..64]  name of the program, 16 bytes
//!  u64[64..]    histogram of the time to serve a fault, in nanoseconds
//! ```
//!
//! The histogram is log-linear: 8 buckets for each power of two, so a value is known within 12.5 %.
//! The time is the handler's, from the event that it read to the mapped page. The kernel's part
//! before and after is not included (`granary bench fault` measures the whole).

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::ledger::Owner;
use crate::memory::linux::WhyCopying;
use crate::run_memory::RunMemory;
use crate::stream;
use crate::sys;
use crate::unpaged::UnpagedUsage;

mod report;

const MAGIC: u64 = u64::from_le_bytes(*b"granary\x02");
/// Words before the histogram.
const COUNTERS: usize = 64;
/// The words that hold the program's name.
const NAME: std::ops::Range<usize> = 62..64;
const BUCKETS: usize = 62 * 8;
const WORDS: usize = COUNTERS + BUCKETS;
/// Greatest value that is read from a process, so that no sum of damaged words overflows.
const WORD_MAX: u64 = 1 << 55;

/// Index of a counter. A gauge holds a current value; the other counters only increase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Counter {
    /// Faults on missing pages.
    Faults = 1,
    /// Faults on write-protected pages.
    WriteFaults,
    /// Pages filled with zeros at first touch.
    PagesZeroed,
    /// Pages read from slots.
    PagesIn,
    /// Of `PagesIn`, pages that were read ahead.
    PagesReadAhead,
    /// Pages mapped back from the shelf that had been taken out.
    PagesRestored,
    /// Pages written to slots.
    PagesOut,
    /// Pages evicted.
    PagesEvicted,
    /// Pages that were evicted clean, without a write.
    PagesCleanEvicted,
    /// Pages that were evicted all zero, without a slot.
    PagesZeroEvicted,
    /// Faults that waited for the worker.
    FaultsStalled,
    /// Gauge: chunks held in the pool.
    PoolChunks,
    /// Peak of `PoolChunks`.
    PoolChunksPeak,
    /// Gauge: chunks held in the overflow file.
    OverflowChunks,
    /// Peak of `OverflowChunks`.
    OverflowChunksPeak,
    /// Gauge: pages resident in the region.
    ResidentPages,
    /// Peak of `ResidentPages`.
    ResidentPagesPeak,
    /// Bytes of a chunk.
    ChunkBytes,
    /// Chunks that the NIC allocated.
    AllocationsByNic,
    /// Chunks that the memory node's CPU allocated.
    AllocationsByCpu,
    /// Sum of the times to serve faults, in nanoseconds.
    FaultNs,
    /// Pages served to forked children.
    PagesToChildren,
    /// Gauge: resident bytes of the program that are not paged, at the last measurement.
    UnpagedBytes,
    /// Peak of `UnpagedBytes`.
    UnpagedBytesPeak,
    /// At the peak measurement, by kind: [`UnpagedUsage::mapped`].
    UnpagedMapped,
    /// [`UnpagedUsage::heap`].
    UnpagedHeap,
    /// [`UnpagedUsage::files`].
    UnpagedFiles,
    /// [`UnpagedUsage::stacks`].
    UnpagedStacks,
    /// [`UnpagedUsage::shared`].
    UnpagedShared,
    /// [`UnpagedUsage::huge`].
    UnpagedHuge,
    /// Faults that evicted pages themselves.
    FaultsEvicting,
    /// Pages that these faults evicted.
    PagesEvictedInFaults,
    /// Of `FaultsEvicting`, faults that waited for a WRITE to the pool.
    FaultsWriting,
    /// Of `FaultNs`, time in which faults waited for READs.
    FaultReadNs,
    /// Of `FaultNs`, time in which faults evicted pages.
    FaultEvictNs,
    /// Gauge: extents, paged memory outside of the region.
    Extents,
    /// Mappings that are not paged because there is no room for another extent.
    MappingsUnpaged,
    /// Bytes of address space of these mappings.
    MappingsUnpagedBytes,
    /// 1 in a process whose threads move pages to and from the chunks without a NIC.
    DirectProcesses,
    /// 1 in a process whose handler CPU-bound threads do not delay: it has SCHED_RR.
    HandlersRealTime,
    /// Pages that were evicted as one repeated word, without a slot.
    PagesWordEvicted,
    /// Pages mapped from a repeated word.
    PagesWordMapped,
    /// Pages read ahead that the program needed.
    PrefetchUsed,
    /// Pages read ahead that were reclaimed before the program needed them.
    PrefetchWasted,
    /// Faults that waited for a page that was being read ahead.
    PrefetchLate,
    /// Faults on pages in the pool that were not read ahead.
    PrefetchDemand,
    /// 1 in a process whose pages the kernel moves.
    ProcessesMoving,
    /// 1 in a process whose pages are copied, because `GRANARY_PAGES=copy` is set.
    ProcessesCopyingAsSet,
    /// 1 in a process whose pages are copied, because the kernel has no UFFDIO_MOVE.
    ProcessesCopyingWithoutMove,
    /// 1 in a process whose pages are copied, because the self-test of UFFDIO_MOVE failed.
    ProcessesCopyingAfterTest,
    /// Gauge: bytes of the pages that have a slot.
    LiveBytes,
    /// Gauge: bytes of the chunks held, in the pool and in the overflow file.
    HeldBytes,
    /// Pages that compaction moved to another chunk.
    PagesCompacted,
    /// Pages that the assist moved.
    AssistPages,
    /// 1 in a process that has a session with the assist, or had one.
    AssistedProcesses,
    /// 1 in a process whose assist has ended before the process.
    AssistsLost,
    /// Pages that were encrypted before a WRITE.
    PagesSealed,
    /// Pages that were authenticated and decrypted after a READ.
    PagesOpened,
    /// 1 in a process whose pages in the pool are encrypted.
    ProcessesSealing,
    /// Peak of the bytes of the page table and of the tables of slots.
    TableBytesPeak,
}

/// The live counters of this process.
#[derive(Debug)]
pub struct Stats {
    words: *const AtomicU64,
    /// The words are a mapping of this value's own.
    is_private: bool,
}

// SAFETY: the words are atomics in a mapping that lives as long as the value.
unsafe impl Send for Stats {}
// SAFETY: as above.
unsafe impl Sync for Stats {}

impl Drop for Stats {
    fn drop(&mut self) {
        if !self.is_private {
            return;
        }
        // SAFETY: no reference to the words outlives the value.
        let _ = unsafe { sys::unmap_anonymous(self.words as usize, WORDS * 8) };
    }
}

impl Stats {
    /// Creates counters in private memory.
    pub fn private() -> io::Result<Self> {
        let base = sys::map_anonymous(WORDS * 8)?;
        Ok(Self::at(base as *const AtomicU64, true))
    }

    /// Creates counters in the memory of the run. `None` if the run has too many processes.
    pub fn shared(memory: RunMemory) -> Option<Self> {
        let retire = |pid, slot: &[AtomicU64]| retire(memory, pid, slot);
        let slot = memory.claim(Owner::current(), Owner::is_alive, retire)?;
        Some(Self::at(slot.as_ptr(), false))
    }

    fn at(words: *const AtomicU64, is_private: bool) -> Self {
        let stats = Self { words, is_private };
        stats.word(0).store(MAGIC, Ordering::Relaxed);
        stats
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < WORDS);
        // SAFETY: in bounds of a mapping that lives as long as the value.
        unsafe { &*self.words.add(index) }
    }

    /// Adds `count` to a counter.
    pub fn add(&self, counter: Counter, count: u64) {
        self.word(counter as usize).fetch_add(count, Ordering::Relaxed);
    }

    /// Sets a gauge.
    pub fn set(&self, gauge: Counter, value: u64) {
        self.word(gauge as usize).store(value, Ordering::Relaxed);
    }

    /// Raises a peak to `value` if it is lower.
    pub fn raise(&self, peak: Counter, value: u64) {
        self.word(peak as usize).fetch_max(value, Ordering::Relaxed);
    }

    /// Returns a counter's value.
    pub fn get(&self, counter: Counter) -> u64 {
        self.word(counter as usize).load(Ordering::Relaxed)
    }

    /// Records a measurement of unpaged memory. A process that shares another's counters
    /// (`is_whole` is false) only updates the peak.
    pub(crate) fn record_unpaged(&self, usage: &UnpagedUsage, is_whole: bool) {
        use Counter::*;
        let bytes = usage.bytes();
        if is_whole {
            self.set(UnpagedBytes, bytes);
        }
        if bytes <= self.get(UnpagedBytesPeak) {
            return;
        }
        self.set(UnpagedBytesPeak, bytes);
        let UnpagedUsage { mapped, heap, files, stacks, shared, huge } = *usage;
        for (kind, bytes) in [
            (UnpagedMapped, mapped),
            (UnpagedHeap, heap),
            (UnpagedFiles, files),
            (UnpagedStacks, stacks),
            (UnpagedShared, shared),
            (UnpagedHuge, huge),
        ] {
            self.set(kind, bytes);
        }
        let name = sys::program_name();
        for (index, word) in NAME.zip(name.as_chunks::<8>().0) {
            self.word(index).store(u64::from_le_bytes(*word), Ordering::Relaxed);
        }
    }

    /// Records the totals of the prefetcher.
    pub(crate) fn record_prefetch(&self, totals: &stream::Counters) {
        use Counter::*;
        let stream::Counters { used, wasted, late, demand, .. } = *totals;
        let counts = [used, wasted, late, demand];
        for (counter, count) in
            [PrefetchUsed, PrefetchWasted, PrefetchLate, PrefetchDemand].into_iter().zip(counts)
        {
            self.set(counter, count);
        }
    }

    /// Records whether pages are moved, or why they are copied.
    pub(crate) fn record_way(&self, why_copying: Option<&WhyCopying>) {
        let gauge = match why_copying {
            None => Counter::ProcessesMoving,
            Some(WhyCopying::Setting) => Counter::ProcessesCopyingAsSet,
            Some(WhyCopying::NoMove) => Counter::ProcessesCopyingWithoutMove,
            Some(WhyCopying::FailedTest(_)) => Counter::ProcessesCopyingAfterTest,
        };
        self.set(gauge, 1);
    }

    /// Records the time to serve a fault.
    pub fn record_fault(&self, ns: u64) {
        self.add(Counter::FaultNs, ns);
        self.word(COUNTERS + bucket(ns)).fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the current values.
    pub fn snapshot(&self) -> Summary {
        let words = (0..WORDS).map(|index| self.word(index).load(Ordering::Relaxed)).collect();
        Summary { words, processes: 1, unpaged: None }
    }
}

/// Adds the counters of an ended process to those of slot 0.
fn retire(memory: RunMemory, pid: u32, slot: &[AtomicU64]) {
    let Some(one) = Summary::of(pid, slot) else { return };
    let (ended, largest) = memory.ended();
    let before = Summary::of(largest.load(Ordering::Relaxed) as u32, memory.slot(0));
    let count = ended.load(Ordering::Relaxed);
    let mut sum = before.unwrap_or_default();
    sum.add(&one);
    let unpaged = sum.unpaged.as_ref();
    largest.store(unpaged.map_or(0, |unpaged| unpaged.process.into()), Ordering::Relaxed);
    if unpaged.is_some_and(|unpaged| unpaged.process == pid) {
        one.kinds().for_each(|index| sum.words[index] = one.words[index]);
    } else {
        let kept: Vec<_> = one
            .kinds()
            .map(|index| (index, memory.slot(0)[index].load(Ordering::Relaxed)))
            .collect();
        kept.into_iter().for_each(|(index, word)| sum.words[index] = word);
    }
    sum.words[0] = MAGIC;
    for (word, value) in memory.slot(0).iter().zip(&sum.words) {
        word.store(*value, Ordering::Relaxed);
    }
    ended.store(count.saturating_add(1), Ordering::Relaxed);
}

/// Returns the bucket of a value.
fn bucket(value: u64) -> usize {
    if value < 8 {
        return value as usize;
    }
    let exponent = 63 - value.leading_zeros();
    let sub = (value >> (exponent - 3)) & 7;
    ((exponent as usize - 2) * 8 + sub as usize).min(BUCKETS - 1)
}

/// Returns the largest value of a bucket.
fn bucket_top(index: usize) -> u64 {
    if index < 8 {
        return index as u64;
    }
    let exponent = index / 8 + 2;
    let sub = (index % 8) as u64;
    // In this order the sum of the last bucket does not overflow.
    (1u64 << exponent) - 1 + ((sub + 1) << (exponent - 3))
}

/// Sums of the counters of one or more processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    words: Vec<u64>,
    processes: u64,
    unpaged: Option<Unpaged>,
}

/// Parts of the mean time to serve a fault, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FaultParts {
    /// Waiting for READs.
    pub read: f64,
    /// Eviction of other pages, with the WRITEs that it waits for.
    pub evict: f64,
    /// The rest: table lookups, and the mapping of pages.
    pub map: f64,
}

/// The process with the most unpaged memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unpaged {
    /// Process id.
    pub process: u32,
    /// Name of the program.
    pub program: String,
    /// Unpaged resident memory at its peak.
    pub usage: UnpagedUsage,
}

impl Unpaged {
    fn of(process: u32, words: &[u64]) -> Option<Self> {
        let name: Vec<u8> = words[NAME].iter().flat_map(|word| word.to_le_bytes()).collect();
        let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
        let get = |counter: Counter| words[counter as usize];
        let usage = UnpagedUsage {
            mapped: get(Counter::UnpagedMapped),
            heap: get(Counter::UnpagedHeap),
            files: get(Counter::UnpagedFiles),
            stacks: get(Counter::UnpagedStacks),
            shared: get(Counter::UnpagedShared),
            huge: get(Counter::UnpagedHuge),
        };
        let program = String::from_utf8_lossy(name).into_owned();
        (usage.bytes() > 0).then_some(Self { process, program, usage })
    }

    /// Returns the peak of unpaged resident memory, in bytes.
    pub fn bytes(&self) -> u64 {
        self.usage.bytes()
    }
}

impl Default for Summary {
    fn default() -> Self {
        Self { words: vec![0; WORDS], processes: 0, unpaged: None }
    }
}

impl Summary {
    /// Adds up the counters of the processes of a run.
    pub fn read(memory: RunMemory) -> Self {
        let mut sum = Self::default();
        let (ended, largest) = memory.ended();
        if let Some(retired) = Self::of(largest.load(Ordering::Relaxed) as u32, memory.slot(0)) {
            let processes = ended.load(Ordering::Relaxed).min(WORD_MAX);
            sum.add(&Self { processes, ..retired });
        }
        memory
            .processes()
            .filter_map(|(id, slot)| Self::of(id, slot))
            .for_each(|one| sum.add(&one));
        sum
    }

    /// Returns the counters of a process. `None` if it has written none.
    fn of(pid: u32, slot: &[AtomicU64]) -> Option<Self> {
        let words: Vec<u64> =
            slot[..WORDS].iter().map(|word| word.load(Ordering::Relaxed)).collect();
        if words[0] != MAGIC {
            return None;
        }
        let bounded = |(index, word): (usize, u64)| match NAME.contains(&index) {
            true => word,
            false => word.min(WORD_MAX),
        };
        let words: Vec<u64> = words.into_iter().enumerate().map(bounded).collect();
        Some(Self { unpaged: Unpaged::of(pid, &words), words, processes: 1 })
    }

    /// The words that describe the process with the most unpaged memory.
    fn kinds(&self) -> impl Iterator<Item = usize> + use<> {
        (Counter::UnpagedMapped as usize..=Counter::UnpagedHuge as usize).chain(NAME)
    }

    fn add(&mut self, other: &Self) {
        let bytes = |one: &Self| one.unpaged.as_ref().map_or(0, Unpaged::bytes);
        if bytes(other) > bytes(self) {
            self.unpaged.clone_from(&other.unpaged);
        }
        // The first word is the format's.
        for (index, (mine, theirs)) in self.words.iter_mut().zip(&other.words).enumerate().skip(1) {
            if index == Counter::ChunkBytes as usize {
                *mine = (*mine).max(*theirs);
            } else if !NAME.contains(&index) {
                *mine = mine.saturating_add(*theirs).min(WORD_MAX);
            }
        }
        self.processes = self.processes.saturating_add(other.processes);
    }

    /// Returns the number of processes.
    pub fn processes(&self) -> u64 {
        self.processes
    }

    /// Returns the process with the most unpaged memory, if any was measured.
    pub fn largest_unpaged(&self) -> Option<&Unpaged> {
        self.unpaged.as_ref()
    }

    /// Returns a counter's sum. A peak's sum is the sum of the processes' peaks.
    pub fn get(&self, counter: Counter) -> u64 {
        self.words[counter as usize]
    }

    /// Returns the number of faults of both kinds.
    pub fn faults(&self) -> u64 {
        self.get(Counter::Faults) + self.get(Counter::WriteFaults)
    }

    /// Returns the totals of the prefetchers.
    pub fn prefetch(&self) -> stream::Counters {
        stream::Counters {
            issued: self.get(Counter::PagesReadAhead),
            used: self.get(Counter::PrefetchUsed),
            late: self.get(Counter::PrefetchLate),
            wasted: self.get(Counter::PrefetchWasted),
            demand: self.get(Counter::PrefetchDemand),
        }
    }

    /// Returns the number of processes whose pages are copied, by reason.
    fn copying(&self) -> [(u64, &'static str); 3] {
        use Counter::*;
        [
            (ProcessesCopyingAsSet, WhyCopying::SETTING),
            (ProcessesCopyingWithoutMove, WhyCopying::NO_MOVE),
            (ProcessesCopyingAfterTest, WhyCopying::FAILED_TEST),
        ]
        .map(|(counter, why)| (self.get(counter), why))
    }

    /// Returns `move` if the kernel moves the pages of all processes, `copy` if pages are copied in
    /// all, else both; `-` without a process.
    pub fn way(&self) -> &'static str {
        let copying: u64 = self.copying().iter().map(|(processes, _)| processes).sum();
        match (self.get(Counter::ProcessesMoving), copying) {
            (0, 0) => "-",
            (_, 0) => "move",
            (0, _) => "copy",
            _ => "move, copy",
        }
    }

    /// Returns the reason why pages are copied, or the first one of several; `None` if no
    /// process copies.
    pub fn why_copying(&self) -> Option<&'static str> {
        self.copying().into_iter().find_map(|(processes, why)| (processes > 0).then_some(why))
    }

    /// Returns the mean time to serve a fault, in microseconds.
    pub fn fault_us_mean(&self) -> f64 {
        let count: u64 = self.words[COUNTERS..].iter().sum();
        self.get(Counter::FaultNs) as f64 / 1000.0 / count.max(1) as f64
    }

    /// Returns a counter divided by the number of faults.
    fn per_fault(&self, counter: Counter) -> f64 {
        self.get(counter) as f64 / self.faults().max(1) as f64
    }

    /// Returns the mean parts of the time to serve a fault, in microseconds.
    pub fn fault_parts_us(&self) -> FaultParts {
        let us = |counter| self.per_fault(counter) / 1000.0;
        let (read, evict) = (us(Counter::FaultReadNs), us(Counter::FaultEvictNs));
        FaultParts { read, evict, map: (self.fault_us_mean() - read - evict).max(0.0) }
    }

    /// Returns a quantile (0 to 1) of the time to serve a fault, in microseconds.
    pub fn fault_us(&self, quantile: f64) -> f64 {
        let buckets = &self.words[COUNTERS..];
        let count: u64 = buckets.iter().sum();
        let wanted = ((count as f64 * quantile).ceil() as u64).max(1);
        let mut seen = 0;
        for (index, &hits) in buckets.iter().enumerate() {
            seen += hits;
            if hits > 0 && seen >= wanted {
                return bucket_top(index) as f64 / 1000.0;
            }
        }
        0.0
    }

    /// Returns the largest value, in nanoseconds, and the count of each bucket of fault times.
    pub(crate) fn fault_buckets(&self) -> impl Iterator<Item = (u64, u64)> {
        let hits = self.words[COUNTERS..].iter().enumerate();
        hits.map(|(index, hits)| (bucket_top(index), *hits))
    }

    /// Returns the bytes of the pages that have a slot, divided by those of the chunks held
    /// (OneSidedMW, figure 8). `None` if no chunk is held.
    pub fn utilization(&self) -> Option<f64> {
        let held = self.get(Counter::HeldBytes);
        (held > 0).then(|| self.get(Counter::LiveBytes) as f64 / held as f64)
    }

    /// Returns the peak of bytes held in the pool, as whole chunks.
    pub fn remote_bytes_peak(&self) -> u64 {
        self.get(Counter::PoolChunksPeak) * self.get(Counter::ChunkBytes)
    }
}

#[cfg(test)]
mod tests {
    use crate::run_memory::OwnedRunMemory;

    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_bucket_holds_its_values_within_an_eighth(value in 0u64..1 << 60) {
            let index = bucket(value);
            let top = bucket_top(index);
            prop_assert!(value <= top, "{value} > {top}");
            prop_assert!(top - value <= value / 8, "{top} is far above {value}");
            prop_assert!(index == 0 || bucket_top(index - 1) < value);
        }
    }

    #[test]
    fn parts_of_a_fault_add_up_to_its_mean() {
        let stats = Stats::private().unwrap();
        stats.add(Counter::Faults, 3);
        stats.add(Counter::WriteFaults, 1);
        [4_000, 4_000, 20_000, 4_000].into_iter().for_each(|ns| stats.record_fault(ns));
        stats.add(Counter::FaultReadNs, 4_000);
        stats.add(Counter::FaultEvictNs, 16_000);
        let sum = stats.snapshot();
        assert_eq!(sum.fault_parts_us(), FaultParts { read: 1.0, evict: 4.0, map: 3.0 });
        let text = sum.to_string();
        assert!(text.contains("1 (25 %) on write-protected pages"), "{text}");
        assert!(text.contains("1.0 us   waiting for READs, 3.0 us mapping, 4.0 us ev"), "{text}");
    }

    #[test]
    fn counters_of_processes_add_up() {
        let run = OwnedRunMemory::create("granary-run-test").unwrap();
        let memory = run.memory();
        let stats = Stats::shared(memory).unwrap();
        stats.add(Counter::Faults, 3);
        stats.set(Counter::ChunkBytes, 1 << 20);
        stats.set(Counter::LiveBytes, 3 << 20);
        stats.set(Counter::HeldBytes, 4 << 20);
        for us in [1, 2, 100] {
            stats.record_fault(us * 1000);
        }
        let kinds = UnpagedUsage { mapped: 7 << 20, files: 1 << 20, ..UnpagedUsage::default() };
        stats.record_unpaged(&kinds, true);
        stats.record_unpaged(&UnpagedUsage { files: 2 << 20, ..UnpagedUsage::default() }, true);
        stats.record_unpaged(&UnpagedUsage { files: 3 << 20, ..UnpagedUsage::default() }, false);
        // One more process, which has ended, and one that has written nothing.
        let own = memory.processes().next().unwrap().1;
        retire(memory, 1, own);
        memory.claim(Owner::new(2, 0), |_| true, |_, _| ()).unwrap();
        let sum = Summary::read(memory);
        assert_eq!((sum.processes(), sum.faults()), (2, 6));
        let mut many = Summary::default();
        (0..1000).for_each(|_| many.add(&sum));
        assert_eq!((many.processes(), many.faults()), (2000, 6000));
        assert_eq!(sum.get(Counter::ChunkBytes), 1 << 20);
        assert!((sum.fault_us_mean() - 103.0 / 3.0).abs() < 0.01);
        assert!((2.0..2.3).contains(&sum.fault_us(0.5)), "{}", sum.fault_us(0.5));
        assert!((100.0..113.0).contains(&sum.fault_us(0.99)));
        let text = sum.to_string();
        assert!(text.contains("by the memory node's CPU"), "{text}");
        assert!(text.contains("75 %   of the chunks' memory has pages"), "{text}");
        assert_eq!(Stats::private().unwrap().snapshot().utilization(), None, "no chunk");
        assert!(text.contains("of paged memory, the processes' peaks added up"), "{text}");
        assert!(!stats.snapshot().to_string().contains("added up"));
        assert_eq!(sum.get(Counter::UnpagedBytesPeak), 16 << 20, "the sum of both processes");
        assert_eq!(sum.get(Counter::UnpagedBytes), 4 << 20);
        let largest = sum.largest_unpaged().unwrap();
        assert_eq!(largest.usage, kinds, "the kinds at the peak");
        let text = largest.to_string();
        assert!(text.contains("8.0 MiB resident that is not paged: 7.0 MiB in mappings"), "{text}");
        assert!(text.ends_with("1.0 MiB in .data, .bss and other private mappings of files"));
        assert!(text.starts_with(&largest.program) && !largest.program.is_empty(), "{text}");
    }
}
