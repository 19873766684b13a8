//! Eviction: moves pages from the program's memory to the staging area, and writes staged pages
//! back to their slots.
//!
//! One thread evicts. It is woken when room falls below the low-water mark, and makes room up to
//! the high-water mark, off the fault path. When there is no room at all, the handler evicts a
//! batch itself.
//!
//! Steps of a batch, with `evict_lock` held: set the pages BUSY; write-protect the dirty ones; copy
//! these to frames; `MADV_DONTNEED` all; store the entries. A clean page needs no copy. A page of
//! zeros needs neither frame nor slot. Dirty frames are written back in batches, the oldest first.
//! Clean frames stay as a cache until they are needed.

use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

use crate::page_table::{Entry, PageId, State};
use crate::pager::Pager;
use crate::region::RangeSet;
use crate::slots::SlotId;
use crate::staging::{FrameId, LeavingSlot};
use crate::stats::Counter;
use crate::sys::{self, PAGE_BYTES};
use crate::transport::Lane;
use crate::unpaged;

/// Pages per eviction batch, and frames per write-back batch.
const BATCH: u32 = 64;

/// Buffers that are reused between batches.
#[derive(Default)]
pub(crate) struct Evictor {
    taken: Vec<(PageId, Entry)>,
    after: Vec<Option<Entry>>,
    frames: Vec<FrameId>,
    pairs: Vec<(SlotId, FrameId)>,
    memory: Option<std::fs::File>,
    /// Ranges to be dropped from the program's memory.
    to_drop: Vec<libc::iovec>,
    /// Batches of WRITEs that were waited for.
    pub(crate) write_backs: u64,
}

impl Pager {
    /// Runs the evictor's loop.
    pub(crate) fn evictor(self: &std::sync::Arc<Self>) {
        self.note_thread();
        let mut evictor = Evictor::default();
        let mut pause_ms = unpaged::SAMPLE_MS_MIN;
        loop {
            let evictor_wakes = self.evictor_wakes.load(Ordering::Acquire);
            self.free_emptied_chunks();
            self.take_out_advised(&mut evictor);
            self.help_fork();
            let mut idle_rounds = 0;
            while self.limit - self.resident().min(self.limit) < self.high_water() {
                if evictor.make_room(self, self.evict_lock()) > 0 {
                    if self.forks.is_asked() {
                        break;
                    }
                    idle_rounds = 0;
                    continue;
                }
                // All resident pages are busy: let the threads that use them run.
                idle_rounds += 1;
                if idle_rounds > 100 || self.residency().is_empty() {
                    break;
                }
                std::thread::yield_now();
            }
            self.update_gauges();
            self.evictor_sleeps.store(true, Ordering::SeqCst);
            while self.evictor_wakes.load(Ordering::SeqCst) == evictor_wakes {
                sys::futex_wait(&self.evictor_wakes, evictor_wakes, Some(pause_ms));
                if self.evictor_wakes.load(Ordering::SeqCst) == evictor_wakes {
                    pause_ms = self.sample_unpaged(pause_ms);
                }
            }
            self.evictor_sleeps.store(false, Ordering::SeqCst);
        }
    }

    /// Measures unpaged memory if it seems to have changed. Returns the time until the next call,
    /// in milliseconds.
    pub(crate) fn sample_unpaged(&self, pause_ms: u64) -> u64 {
        match self.measure_unpaged(false) {
            true => unpaged::SAMPLE_MS_MIN,
            false => (2 * pause_ms).min(unpaged::SAMPLE_MS_MAX),
        }
    }

    fn free_emptied_chunks(&self) {
        let emptied = std::mem::take(
            &mut *self.emptied.lock().expect("no thread panics while it holds this lock"),
        );
        for location in emptied {
            self.free_location(location);
        }
    }

    /// Writes back every dirty frame, with `evict_lock` held.
    pub(crate) fn flush_staging(&self, _evict_lock: &RangeSet) {
        let mut evictor = Evictor::default();
        while self.staging.dirty() > 0 {
            evictor.write_back(self);
        }
    }
}

impl Evictor {
    /// Evicts a batch and returns the number of pages. The handler calls this too, when there is no
    /// room at all and the evictor does not hold `evict_lock`.
    pub(crate) fn make_room(
        &mut self,
        pager: &Pager,
        unreadable: std::sync::MutexGuard<'_, RangeSet>,
    ) -> u32 {
        self.begin(pager);
        let limit = pager.limit as usize * 2;
        {
            let mut residency = pager.residency();
            residency.compact(&pager.table, limit);
            for _ in 0..BATCH {
                let wanted = BATCH - self.taken.len() as u32;
                if wanted == 0 {
                    break;
                }
                let Some((start, pages)) = residency.pop(&pager.table, wanted) else { break };
                for page in (start.0..start.0 + pages).map(PageId) {
                    let admit = |e: Entry| e.state() == State::Resident && !e.is_pinned();
                    if let Some(entry) = pager.table.try_lock(page, admit) {
                        self.taken.push((page, entry));
                    } else if pager.table.load(page).state() == State::Resident
                        || pager.table.load(page).is_busy()
                    {
                        residency.push(&pager.table, page, 1);
                    }
                }
            }
        }
        self.evict_taken(pager, unreadable)
    }

    /// Evicts the pages of a range that are resident.
    pub(crate) fn take_out(&mut self, pager: &Pager, pages: std::ops::Range<u32>) {
        let mut pages = pages.map(PageId).peekable();
        while pages.peek().is_some() {
            let unreadable = pager.evict_lock();
            self.begin(pager);
            let admit = |e: Entry| e.state() == State::Resident && !e.is_pinned();
            let resident = |page| Some((page, pager.table.try_lock(page, admit)?));
            self.taken.extend(pages.by_ref().filter_map(resident).take(BATCH as usize));
            self.evict_taken(pager, unreadable);
        }
    }

    /// Begins a batch without pages, and makes sure that there are frames for one.
    fn begin(&mut self, pager: &Pager) {
        while pager.staging.dirty() + 2 * BATCH > pager.staging.len() {
            self.write_back(pager);
        }
        self.taken.clear();
    }

    /// Evicts the BUSY pages in `taken` and returns how many are no longer resident.
    fn evict_taken(
        &mut self,
        pager: &Pager,
        unreadable: std::sync::MutexGuard<'_, RangeSet>,
    ) -> u32 {
        self.taken.sort_unstable_by_key(|(page, _)| page.0);
        self.after.clear();
        self.after.resize(self.taken.len(), None);
        let runs = runs(&self.taken);
        self.to_drop.clear();
        for run in &runs {
            self.empty(pager, &unreadable, run.clone());
        }
        self.drop_evicted(pager);
        if pager.forks.is_forking() {
            // Staged pages must reach their slots before their BUSY bits are cleared, because the
            // child's snapshot names slots.
            pager.flush_staging(&unreadable);
        }
        let mut room = 0;
        for (&(page, entry), after) in self.taken.iter().zip(&self.after) {
            match after {
                Some(after) => {
                    room += 1;
                    pager.settle(page, *after);
                }
                None => {
                    pager.settle(page, entry);
                    pager.residency().push(&pager.table, page, 1);
                }
            }
        }
        drop(unreadable);
        pager.stats.add(Counter::PagesEvicted, u64::from(room));
        pager.give_room(room);
        room
    }

    /// Evicts one contiguous run of BUSY pages and stores each page's new entry in `after`.
    fn empty(&mut self, pager: &Pager, unreadable: &RangeSet, run: std::ops::Range<usize>) {
        let (first, _) = self.taken[run.start];
        let start = pager.region.address(first);
        let len = run.len() * PAGE_BYTES;
        if self.taken[run.clone()].iter().any(|(_, entry)| entry.is_dirty()) {
            // SAFETY: resident pages of the region, BUSY by this thread.
            match unsafe { pager.uffd.protect(start, len) } {
                Ok(()) => pager.fork_waits.store(false, Ordering::Release),
                Err(error) => {
                    match error.raw_os_error() {
                        Some(libc::EAGAIN) => {
                            // A fork waits for the handler to read its event: wake the handler, so
                            // that it returns to its event loop.
                            pager.fork_waits.store(true, Ordering::Release);
                            pager.room.fetch_add(1, Ordering::AcqRel);
                            sys::futex_wake(&pager.room);
                        }
                        Some(libc::ENOENT | libc::ESRCH) => {}
                        _ => pager.fatal("write-protect pages", &error),
                    }
                    return;
                }
            }
        }
        for index in run.clone() {
            let (page, entry) = self.taken[index];
            if !entry.is_dirty() {
                let slot = entry.slot().expect("a clean page has a slot");
                self.after[index] = Some(Entry::remote(slot));
                pager.stats.add(Counter::PagesCleanEvicted, 1);
                continue;
            }
            self.after[index] = self.stage(pager, unreadable, page, entry);
        }
        // Pages that could not be staged stay mapped; the others are dropped, run by run.
        let mut at = run.start;
        while at < run.end {
            let end = (at..run.end).find(|&i| self.after[i].is_none()).unwrap_or(run.end);
            if at < end {
                self.to_drop.push(libc::iovec {
                    iov_base: pager.region.address(self.taken[at].0) as *mut libc::c_void,
                    iov_len: (end - at) * PAGE_BYTES,
                });
            }
            at = end + 1;
        }
    }

    /// Drops evicted pages from the program's memory. Uses one system call, with one TLB shootdown,
    /// where the kernel supports it (`process_madvise` with MADV_DONTNEED, Linux 6.15), and one
    /// call per range otherwise.
    fn drop_evicted(&mut self, pager: &Pager) {
        let mut done = 0;
        if self.to_drop.len() > 1
            && let Some(own) = pager.own_pidfd()
        {
            // SAFETY: the content of these BUSY pages is in frames or slots, or is zeros.
            let bytes = unsafe {
                libc::syscall(
                    libc::SYS_process_madvise,
                    own,
                    self.to_drop.as_ptr(),
                    self.to_drop.len(),
                    libc::MADV_DONTNEED,
                    0,
                )
            };
            done = count_covered(&self.to_drop, bytes.max(0) as usize);
        }
        for range in &self.to_drop[done..] {
            // SAFETY: as above. Dropping a range twice is harmless, because its pages are BUSY.
            let dropped = unsafe {
                sys::madvise(range.iov_base as usize, range.iov_len, libc::MADV_DONTNEED)
            };
            if let Err(error) = dropped {
                pager.fatal("drop evicted pages from memory", &error);
            }
        }
    }

    /// Copies a write-protected page to a frame. Returns `None` if no frame is available.
    fn stage(
        &mut self,
        pager: &Pager,
        unreadable: &RangeSet,
        page: PageId,
        entry: Entry,
    ) -> Option<Entry> {
        let reclaim = |frame: FrameId| {
            let page = pager.staging.page(frame);
            let staged = |e: Entry| e.frame() == Some(frame.0);
            if pager.table.try_lock(page, staged).is_none() {
                return false;
            }
            let slot = pager.staging.slot(frame).expect("a clean frame has a slot");
            pager.settle(page, Entry::remote(slot.0));
            true
        };
        let frame = pager.staging.allocate(reclaim)?;
        let target = pager.staging.address(frame);
        let source = pager.region.address(page);
        let zero = if unreadable.contains(page.0) {
            self.copy_unreadable(pager, source, target)
        } else {
            // SAFETY: the page is resident, readable and BUSY by this thread; the frame is free.
            unsafe { copy_page(source as *const u64, target.cast()) }
        };
        if zero {
            if let Some(slot) = entry.slot() {
                pager.free_slot(SlotId(slot));
            }
            pager.stats.add(Counter::PagesZeroEvicted, 1);
            return Some(Entry::ABSENT);
        }
        pager.staging.fill(frame, page, entry.slot().map(SlotId));
        Some(Entry::staged(frame.0))
    }

    /// Copies a page that is mapped without PROT_READ, through `/proc/self/mem`. Returns true if it
    /// is all zeros.
    fn copy_unreadable(&mut self, pager: &Pager, source: usize, target: *mut u8) -> bool {
        let file = self.memory.get_or_insert_with(|| match sys::open_own(c"/proc/self/mem") {
            Ok(file) => file,
            Err(error) => pager.fatal("open /proc/self/mem", &error),
        });
        let mut page = [0u8; PAGE_BYTES];
        if let Err(error) = file.read_exact_at(&mut page, source as u64) {
            pager.fatal("read a page that is mapped without access", &error);
        }
        // SAFETY: the frame is free and used by this thread only; the source is a local array.
        unsafe { std::ptr::copy_nonoverlapping(page.as_ptr(), target, PAGE_BYTES) };
        page.iter().all(|&byte| byte == 0)
    }

    /// Writes a batch of dirty frames to their slots, with `evict_lock` held.
    fn write_back(&mut self, pager: &Pager) {
        self.frames.clear();
        pager.staging.start_writing(BATCH, &mut self.frames);
        self.pairs.clear();
        let mut emptied = Vec::new();
        {
            let mut slots = pager.slots();
            for &frame in &self.frames {
                let old = pager.staging.slot(frame);
                let slot = match old {
                    Some(slot) if !slots.is_frozen(slot) => slot,
                    _ => {
                        emptied.extend(old.and_then(|old| slots.free(old)));
                        match slots.allocate(&*pager.transport) {
                            Ok(slot) => slot,
                            Err(error) => pager.pool_lost(&error),
                        }
                    }
                };
                pager.staging.set_slot(frame, slot);
                self.pairs.push((slot, frame));
            }
        }
        pager.note_emptied(emptied);
        self.pairs.sort_unstable();
        pager.transfer(Lane::Async, true, &self.pairs);
        self.write_backs += 1;
        pager.stats.add(Counter::PagesOut, self.pairs.len() as u64);
        for &frame in &self.frames {
            if let Some(orphan) = pager.staging.written(frame) {
                pager.free_slot(orphan);
            }
        }
    }
}

/// Returns how many of the leading ranges `bytes` covers completely.
fn count_covered(ranges: &[libc::iovec], bytes: usize) -> usize {
    let ends = ranges.iter().scan(0, |end, range| {
        *end += range.iov_len;
        Some(*end)
    });
    ends.take_while(|end| *end <= bytes).count()
}

/// Returns the slot to be freed when a page is dropped from its frame.
pub(crate) fn slot_to_free(left: LeavingSlot) -> Option<SlotId> {
    match left {
        LeavingSlot::Stored(slot) => Some(slot),
        LeavingSlot::Unstored(slot) => slot,
    }
}

/// Returns the maximal runs of consecutive pages, as ranges of indices.
fn runs(taken: &[(PageId, Entry)]) -> Vec<std::ops::Range<usize>> {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for (index, (page, _)) in taken.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if taken[run.end - 1].0.0 + 1 == page.0 => run.end = index + 1,
            _ => runs.push(index..index + 1),
        }
    }
    runs
}

/// Copies a page and returns true if it is all zeros.
///
/// # Safety
/// Both pointers are page-aligned and valid for a page, and no other thread writes either page
/// during the call.
unsafe fn copy_page(source: *const u64, target: *mut u64) -> bool {
    // SAFETY: by the caller.
    unsafe {
        std::ptr::copy_nonoverlapping(source, target, PAGE_BYTES / 8);
        let words = std::slice::from_raw_parts(target, PAGE_BYTES / 8);
        words.chunks_exact(8).all(|part| part.iter().fold(0, |all, word| all | word) == 0)
    }
}

#[cfg(test)]
#[path = "evict_tests.rs"]
mod tests;
