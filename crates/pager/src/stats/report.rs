//! The counters as text, for `granary run --stats` and for warnings.

use std::fmt;

use super::{Counter, FaultParts, Summary, Unpaged};
use crate::sys;

const MIB: f64 = 1048576.0;

/// Formats a share; `-` if there is none.
fn percent(share: Option<f64>) -> String {
    share.map_or("-".into(), |share| format!("{:.0} %", 100.0 * share))
}

impl fmt::Display for Unpaged {
    /// Writes one line: the program, the total, and the kinds of memory, the largest first.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { process, program, usage } = self;
        write!(
            f,
            "{program} (process {process}) had {:.1} MiB resident that is not paged",
            usage.bytes() as f64 / MIB
        )?;
        let mut kinds = [
            (usage.mapped, "in mappings by raw system calls or with execute access"),
            (usage.heap, "in the brk heap"),
            (usage.files, "in .data, .bss and other private mappings of files"),
            (usage.stacks, "in stacks"),
            (usage.shared, "in shared memory"),
            (usage.huge, "in huge pages"),
        ];
        kinds.sort_by_key(|&(bytes, _)| std::cmp::Reverse(bytes));
        // Kinds below one percent are omitted.
        let worth = kinds.iter().filter(|(bytes, _)| bytes * 100 >= usage.bytes().max(1));
        for (number, (bytes, kind)) in worth.enumerate() {
            let before = if number == 0 { ": " } else { ", " };
            write!(f, "{before}{:.1} MiB {kind}", *bytes as f64 / MIB)?;
        }
        Ok(())
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use Counter::*;
        let mib = |bytes: u64| bytes as f64 / MIB;
        let chunk = self.get(ChunkBytes);
        writeln!(f, "granary: {} paged process(es)", self.processes)?;
        let way = self.way();
        match self.why_copying() {
            None => writeln!(f, "  way           {way:>12}   of pages out of memory and back")?,
            Some(why) => {
                writeln!(f, "  way           {way:>12}   of pages out of memory and back: {why}")?
            }
        }
        writeln!(
            f,
            "  faults        {:>12}   {} missing, {} ({:.0} %) on write-protected pages, {} waited \
             for evictions",
            self.faults(),
            self.get(Faults),
            self.get(WriteFaults),
            100.0 * self.per_fault(WriteFaults),
            self.get(FaultsStalled)
        )?;
        writeln!(
            f,
            "  fault time    {:>9.1} us   mean; P99 {:.1} us (in the handler)",
            self.fault_us_mean(),
            self.fault_us(0.99)
        )?;
        let FaultParts { read, evict, map } = self.fault_parts_us();
        writeln!(
            f,
            "    of it       {read:>9.1} us   waiting for READs, {map:.1} us mapping, {evict:.1} \
             us evicting"
        )?;
        writeln!(
            f,
            "  evicting      {:>12}   faults that evicted {} pages; {} of them waited for WRITEs",
            self.get(FaultsEvicting),
            self.get(PagesEvictedInFaults),
            self.get(FaultsWriting)
        )?;
        writeln!(
            f,
            "  pages in      {:>12}   {} of them read ahead; {} more mapped back from the shelf",
            self.get(PagesIn),
            self.get(PagesReadAhead),
            self.get(PagesRestored)
        )?;
        let ahead = self.prefetch();
        writeln!(
            f,
            "  read ahead    {:>12}   {} used, {} wasted; accuracy {}, coverage {}, late {}",
            ahead.issued,
            ahead.used,
            ahead.wasted,
            percent(ahead.accuracy()),
            percent(ahead.coverage()),
            percent(ahead.late_share())
        )?;
        writeln!(
            f,
            "  pages out     {:>12}   of {} evicted ({} clean, {} zero, {} of one repeated word)",
            self.get(PagesOut),
            self.get(PagesEvicted),
            self.get(PagesCleanEvicted),
            self.get(PagesZeroEvicted),
            self.get(PagesWordEvicted)
        )?;
        // The peaks of several processes need not have been at one time.
        let peaks = if self.processes > 1 { ", the processes' peaks added up" } else { "" };
        writeln!(
            f,
            "  bytes local   {:>8.1} MiB   at most, of paged memory{peaks}",
            mib(self.get(ResidentPagesPeak) * sys::PAGE_BYTES as u64)
        )?;
        writeln!(
            f,
            "  not paged     {:>8.1} MiB   at most, beside paged memory{peaks}; {:.1} MiB at the \
             end",
            mib(self.get(UnpagedBytesPeak)),
            mib(self.get(UnpagedBytes))
        )?;
        writeln!(
            f,
            "  bytes remote  {:>8.1} MiB   at most: {} chunks of {} KiB; {} held at the end",
            mib(self.remote_bytes_peak()),
            self.get(PoolChunksPeak),
            chunk / 1024,
            self.get(PoolChunks)
        )?;
        if let Some(utilization) = self.utilization() {
            writeln!(
                f,
                "  utilization   {:>10.0} %   of the chunks' memory has pages, at the end; \
                 compaction moved {} pages",
                100.0 * utilization,
                self.get(PagesCompacted)
            )?;
        }
        writeln!(
            f,
            "  tables        {:>8.1} MiB   at most: pages, slots, fingerprints{}",
            mib(self.get(TableBytesPeak)),
            if self.get(PagesSealed) > 0 { ", seals" } else { "" }
        )?;
        if self.get(ProcessesSealing) > 0 || self.get(PagesSealed) > 0 {
            writeln!(
                f,
                "  sealed        {:>12}   pages encrypted, {} authenticated and decrypted",
                self.get(PagesSealed),
                self.get(PagesOpened)
            )?;
        }
        if self.get(MappingsUnpaged) > 0 {
            writeln!(
                f,
                "  no extent     {:>12}   mappings, of {:.1} MiB, are not paged: each process has \
                 at most {} paged mappings outside of its region",
                self.get(MappingsUnpaged),
                mib(self.get(MappingsUnpagedBytes)),
                crate::extent::EXTENTS_MAX
            )?;
        }
        if self.get(OverflowChunksPeak) > 0 {
            writeln!(
                f,
                "  overflow      {:>8.1} MiB   at most, in a local file: the pool was full",
                mib(self.get(OverflowChunksPeak) * chunk)
            )?;
        }
        write!(
            f,
            "  allocations   {:>12}   by the NIC, {} by the memory node's CPU",
            self.get(AllocationsByNic),
            self.get(AllocationsByCpu)
        )
    }
}
