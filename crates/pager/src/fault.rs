//! The fault path: from a userfaultfd event to a mapped page.
//!
//! One handler thread serves all faults, on the core where they occur. At intervals it checks on
//! which core the faulting thread last ran, and moves there (`CpuAffinity`). A wake-up on the
//! same core costs a fraction of a wake-up on another core, above all in a virtual machine. For the
//! same reason there is only one handler: each fault would wake all handlers.
//!
//! Steps for a missing fault: take room; set the page BUSY; depending on its state map zeros, copy
//! the page's frame, or read the slot into one of the handler's frames and copy that; store the
//! entry. A page that faulted on a read is mapped write-protected and keeps its slot, so that it
//! can be evicted without a write unless the program writes it first.
//!
//! Read-ahead: [`crate::streams`] records for each thread the page at which each of its runs of
//! consecutive faults would continue. A run that continues is served in growing batches, up to
//! `READ_FRAMES` pages.

use std::io;
use std::sync::atomic::Ordering;

use crate::evict::Evictor;
use crate::fork;
use crate::page_table::{Entry, PageId, State};
use crate::pager::{Pager, READ_FRAMES};
use crate::slots::SlotId;
use crate::staging::{FrameId, LeavingSlot};
use crate::stats::Counter;
use crate::sys::{self, PAGE_BYTES};
use crate::transport::Lane;
use crate::uffd::{Event, Fault};

/// Pages of a long batch that are mapped together while the NIC reads the following ones.
const PART_PAGES: usize = 16;

/// Result of serving a batch.
enum BatchResult {
    /// Number of pages that were mapped, from the first on.
    Mapped(u32),
    /// No page can be mapped now; the faulting thread must retry.
    Retry,
}

struct Handler<'a> {
    pager: &'a Pager,
    /// First of the handler's frames.
    frames: FrameId,
    evictor: Evictor,
    batch: Vec<(PageId, Entry)>,
    pairs: Vec<(SlotId, FrameId)>,
}

impl Pager {
    /// Runs the handler's event loop.
    pub(crate) fn handler(self: &std::sync::Arc<Self>) {
        self.note_thread();
        let mut affinity = CpuAffinity::default();
        let mut handler = Handler {
            pager: self,
            frames: FrameId(0),
            evictor: Evictor::default(),
            batch: Vec::with_capacity(READ_FRAMES as usize),
            pairs: Vec::with_capacity(READ_FRAMES as usize),
        };
        let mut events = Vec::with_capacity(32);
        let mut faults = Vec::with_capacity(32);
        loop {
            if let Err(error) = self.uffd.read(&mut events) {
                if error.kind() == io::ErrorKind::Interrupted {
                    continue;
                }
                self.fatal("read page faults", &error);
            }
            // Forks first: until the snapshot for the child is taken, the forking thread waits.
            for event in events.drain(..) {
                match event {
                    Event::Fork(child) => fork::follow(self, child),
                    Event::Fault(fault) => faults.push(fault),
                    Event::Other(number) => {
                        let error = io::Error::other(format!("event {number:#x}"));
                        self.fatal("handle a userfaultfd event", &error);
                    }
                }
            }
            for fault in faults.drain(..) {
                affinity.follow(fault.thread);
                let start = sys::now_ns();
                if fault.write_protected {
                    self.stats.add(Counter::WriteFaults, 1);
                    handler.write_protected(fault);
                } else {
                    self.stats.add(Counter::Faults, 1);
                    handler.missing(fault);
                }
                self.stats.record_fault(sys::now_ns() - start);
            }
            self.wake_evictor(false);
        }
    }

    /// Takes room for 1 to `wanted` pages. Without room, evicts pages or waits for the evictor.
    /// Returns 0 if the fault must be retried later.
    fn wait_for_room(&self, wanted: u32, evictor: &mut Evictor) -> u32 {
        let mut stalled = false;
        let (mut evicted, write_backs) = (0, evictor.write_backs);
        let room = loop {
            let seen = self.room.load(Ordering::Acquire);
            let room = self.take_room(wanted);
            if room > 0 || self.fork_waits.load(Ordering::Acquire) {
                break room;
            }
            if !self.evicts_inline {
                if !stalled {
                    self.stats.add(Counter::FaultsStalled, 1);
                    stalled = true;
                }
                self.wake_evictor(true);
            }
            if let Some(evict_lock) = self.try_evict_lock() {
                let start = sys::now_ns();
                let pages = evictor.make_room(self, evict_lock);
                self.stats.add(Counter::FaultEvictNs, sys::now_ns() - start);
                if pages > 0 {
                    evicted += u64::from(pages);
                    if self.evicts_inline {
                        self.update_gauges();
                    }
                    continue;
                }
            }
            // The holder of `evict_lock`, or the thread that keeps the pages busy, finishes soon.
            // Not every holder wakes this futex, so the wait has a timeout.
            sys::futex_wait(&self.room, seen, Some(if self.evicts_inline { 1 } else { 100 }));
        };
        if evicted > 0 {
            self.stats.add(Counter::FaultsEvicting, 1);
            self.stats.add(Counter::PagesEvictedInFaults, evicted);
            self.stats.add(Counter::FaultsWriting, u64::from(evictor.write_backs > write_backs));
        }
        room
    }
}

impl Handler<'_> {
    fn missing(&mut self, fault: Fault) {
        let pager = self.pager;
        let page = pager.region.page(fault.address);
        if pager.is_own_thread(fault.thread) && pager.table.load(page).is_busy() {
            // The program dropped the page by a raw system call while the evictor was copying it.
            // SAFETY: a page of the region that the kernel has just reported missing.
            let _ = unsafe { pager.uffd.zero(fault.address, PAGE_BYTES) };
            return;
        }
        let max = match &pager.trace {
            Some(trace) => {
                trace.record(page, fault.thread, fault.write);
                // A page that is read ahead would not be in the trace.
                1
            }
            None => READ_FRAMES.min(pager.limit / 16).max(1),
        };
        let forks = pager.forks.is_forking_thread(fault.thread);
        let window = if forks { 1 } else { pager.streams().0.window(fault.thread, page, max) };
        let room = match forks {
            true => pager.take_room_over_limit(),
            false => pager.wait_for_room(window, &mut self.evictor),
        };
        if room == 0 {
            pager.wake(page, 1);
            return;
        }
        let Some(first) = pager.table.lock_or_wait(page) else {
            pager.give_room(room);
            return;
        };
        self.batch.clear();
        self.batch.push((page, first));
        let outcome = match first.state() {
            State::Resident => self.spurious(page, first),
            State::Staged => self.restore(page, first, fault.write),
            State::Absent | State::Remote => {
                self.gather(room, first.state());
                match first.state() {
                    State::Absent => self.fill_zeros(fault.write),
                    _ => self.fetch(fault.write),
                }
            }
        };
        let mapped = match outcome {
            BatchResult::Mapped(pages) => pages,
            BatchResult::Retry => {
                pager.wake(page, 1);
                0
            }
        };
        if mapped != window && !forks {
            pager.streams().0.served(fault.thread, page, window, mapped);
        }
        pager.give_room(room - mapped);
    }

    /// Extends the batch by the following pages that are in the same state, up to `room` pages.
    fn gather(&mut self, room: u32, state: State) {
        let table = &self.pager.table;
        let (first, _) = self.batch[0];
        for next in 1..room {
            let page = PageId(first.0 + next);
            if page.0 as usize >= table.len() {
                return;
            }
            match table.try_lock(page, |entry| entry.state() == state) {
                Some(entry) => self.batch.push((page, entry)),
                None => return,
            }
        }
    }

    /// Serves a fault on a page that the table has as resident. Either another fault has mapped it
    /// meanwhile, or the program dropped it by a raw system call, and its content is zeros now.
    fn spurious(&mut self, page: PageId, entry: Entry) -> BatchResult {
        let address = self.pager.region.address(page);
        // SAFETY: a page of the region; a page that is mapped stays unchanged.
        let dropped = unsafe { self.pager.uffd.zero(address, PAGE_BYTES) }.is_ok();
        let entry = if dropped { Entry::dirty(entry.slot()) } else { entry };
        self.pager.settle(page, entry);
        self.pager.wake(page, 1);
        BatchResult::Mapped(0)
    }

    fn fill_zeros(&mut self, write: bool) -> BatchResult {
        let pager = self.pager;
        let start = pager.region.address(self.batch[0].0);
        let done = map_run(self.batch.len(), |len| {
            // SAFETY: absent pages of the region, BUSY by this thread; `zeros` is as long as a
            // batch.
            unsafe {
                if write {
                    pager.uffd.copy(start, pager.zeros, len, false)
                } else {
                    pager.uffd.zero(start, len)
                }
            }
        });
        let outcome = self.conclude(done, |_| Entry::dirty(None));
        if let BatchResult::Mapped(pages) = outcome {
            pager.stats.add(Counter::PagesZeroed, u64::from(pages));
        }
        outcome
    }

    fn fetch(&mut self, write: bool) -> BatchResult {
        let pager = self.pager;
        self.pairs.clear();
        for (index, (_, entry)) in self.batch.iter().enumerate() {
            let slot = SlotId(entry.slot().expect("a remote page has a slot"));
            self.pairs.push((slot, FrameId(self.frames.0 + index as u32)));
        }
        let done = if self.batch.len() < 2 * PART_PAGES {
            let lane = if self.batch.len() == 1 { Lane::Sync } else { Lane::Async };
            let asked = sys::now_ns();
            pager.transfer(lane, false, &self.pairs);
            pager.stats.add(Counter::FaultReadNs, sys::now_ns() - asked);
            let start = pager.region.address(self.batch[0].0);
            let source = pager.staging.address(self.frames) as usize;
            map_run(self.batch.len(), |len| {
                // SAFETY: remote pages of the region, BUSY by this thread; the handler's frames are
                // as long as a batch and no other thread uses them.
                unsafe { pager.uffd.copy(start, source, len, !write) }
            })
        } else {
            self.fetch_parts(write)
        };
        let outcome = self.conclude(done, |entry| {
            let slot = entry.slot().expect("a remote page has a slot");
            if write { Entry::dirty(Some(slot)) } else { Entry::clean(slot) }
        });
        if let BatchResult::Mapped(pages) = outcome {
            pager.stats.add(Counter::PagesIn, u64::from(pages));
            pager.stats.add(Counter::PagesReadAhead, u64::from(pages.saturating_sub(1)));
        }
        outcome
    }

    /// Reads a long batch and maps each part while the NIC reads the following ones. Returns the
    /// number of pages that are mapped, from the first on.
    fn fetch_parts(&self, write: bool) -> io::Result<usize> {
        let pager = self.pager;
        let start = pager.region.address(self.batch[0].0);
        let source = pager.staging.address(self.frames) as usize;
        let mut done = Ok(0);
        let (asked, mut mapping_ns) = (sys::now_ns(), 0);
        pager.read_parts(&self.pairs, PART_PAGES, &mut |part| {
            let before = part * PART_PAGES;
            if !matches!(done, Ok(pages) if pages == before) {
                return;
            }
            let at = before * PAGE_BYTES;
            let arrived = sys::now_ns();
            let mapped = map_run(PART_PAGES.min(self.pairs.len() - before), |len| {
                // SAFETY: as in `fetch`. The thread that waits for the first page is woken after
                // the whole batch; woken earlier, it would fault on the next part and wait again.
                unsafe { pager.uffd.copy_without_wake(start + at, source + at, len, !write) }
            });
            match mapped {
                Ok(pages) => done = Ok(before + pages),
                Err(error) if before == 0 => done = Err(error),
                Err(_) => {}
            }
            mapping_ns += sys::now_ns() - arrived;
        });
        pager.stats.add(Counter::FaultReadNs, sys::now_ns() - asked - mapping_ns);
        if let Ok(pages) = &done {
            pager.wake(self.batch[0].0, *pages as u32);
        }
        done
    }

    /// Stores the entries of a batch of which `done` pages are mapped.
    fn conclude(
        &mut self,
        done: io::Result<usize>,
        mapped: impl Fn(Entry) -> Entry,
    ) -> BatchResult {
        let pager = self.pager;
        let count = match &done {
            Ok(count) => *count,
            Err(_) => 0,
        };
        for (index, &(page, entry)) in self.batch.iter().enumerate() {
            pager.settle(page, if index < count { mapped(entry) } else { entry });
        }
        if let Err(error) = &done {
            match error.raw_os_error() {
                // A fork is in progress, or the mapping has changed since the fault.
                Some(libc::EAGAIN | libc::ENOENT | libc::ESRCH | libc::EEXIST) => {}
                _ => pager.fatal("map a page", error),
            }
            return BatchResult::Retry;
        }
        pager.residency().push(&pager.table, self.batch[0].0, count as u32);
        BatchResult::Mapped(count as u32)
    }

    /// Maps a staged page back, without I/O.
    fn restore(&mut self, page: PageId, entry: Entry, write: bool) -> BatchResult {
        let pager = self.pager;
        let frame = FrameId(entry.frame().expect("a staged page has a frame"));
        let stored = pager.staging.state(frame) == crate::staging::FrameState::Clean;
        let protect = stored && !write;
        let address = pager.region.address(page);
        let source = pager.staging.address(frame) as usize;
        // SAFETY: the page is BUSY by this thread, so its frame keeps its content.
        let done = unsafe { pager.uffd.copy(address, source, PAGE_BYTES, protect) };
        if done.is_err() {
            return self.conclude(done, |_| entry);
        }
        let entry = match pager.staging.leave(frame) {
            LeavingSlot::Stored(slot) if protect => Entry::clean(slot.0),
            LeavingSlot::Stored(slot) => Entry::dirty(Some(slot.0)),
            LeavingSlot::Unstored(slot) => {
                assert!(!protect, "a clean frame stays clean");
                Entry::dirty(slot.map(|slot| slot.0))
            }
        };
        pager.settle(page, entry);
        pager.residency().push(&pager.table, page, 1);
        pager.stats.add(Counter::PagesRestored, 1);
        BatchResult::Mapped(1)
    }

    /// Serves a write to a write-protected page: the page becomes dirty. The following clean pages
    /// become dirty too if the thread's earlier write faults were consecutive up to here.
    fn write_protected(&mut self, fault: Fault) {
        let pager = self.pager;
        let page = pager.region.page(fault.address);
        let window = pager.streams().1.window(fault.thread, page, READ_FRAMES);
        let Some(first) = pager.table.lock_or_wait(page) else { return };
        if first.state() != State::Resident {
            pager.settle(page, first);
            pager.wake(page, 1);
            return;
        }
        self.batch.clear();
        self.batch.push((page, first));
        for next in 1..window {
            let next = PageId(page.0 + next);
            if next.0 as usize >= pager.table.len() {
                break;
            }
            let clean = |entry: Entry| entry.state() == State::Resident && !entry.is_dirty();
            match pager.table.try_lock(next, clean) {
                Some(entry) => self.batch.push((next, entry)),
                None => break,
            }
        }
        let done = map_run(self.batch.len(), |len| {
            // SAFETY: resident pages of the region, BUSY by this thread.
            unsafe { pager.uffd.unprotect(fault.address, len, true) }.map(|()| len)
        });
        let count = *done.as_ref().unwrap_or(&0);
        for (index, &(page, entry)) in self.batch.iter().enumerate() {
            let dirty = Entry::dirty(entry.slot());
            pager.settle(page, if index < count { dirty } else { entry });
        }
        if count as u32 != window {
            pager.streams().1.served(fault.thread, page, window, count as u32);
        }
        if let Err(error) = done {
            match error.raw_os_error() {
                Some(libc::EAGAIN | libc::ENOENT | libc::ESRCH) => pager.wake(page, 1),
                _ => pager.fatal("remove the write protection of a page", &error),
            }
        }
    }
}

/// Keeps the handler thread on the core of the faulting thread.
struct CpuAffinity {
    core: Option<usize>,
    /// Core of the faulting thread at the last check, if it differed from `core`.
    candidate: Option<usize>,
    /// Faults until the next check.
    until_check: u32,
    /// Faults between two checks.
    check_interval: u32,
}

/// Bounds of the interval between checks, in faults. A check costs about as much as a fault, so the
/// interval doubles as long as the core does not change.
const CHECK_INTERVAL_MIN: u32 = 32;
const CHECK_INTERVAL_MAX: u32 = 512;

impl Default for CpuAffinity {
    fn default() -> Self {
        Self { core: None, candidate: None, until_check: 0, check_interval: CHECK_INTERVAL_MIN }
    }
}

impl CpuAffinity {
    /// Moves the handler to the core of `thread`, which has just faulted, if two consecutive checks
    /// found the thread on that core.
    fn follow(&mut self, thread: u32) {
        if self.until_check > 0 {
            self.until_check -= 1;
            return;
        }
        let core = core_of(thread);
        if core.is_some() && core != self.core {
            if self.core.is_none() || self.candidate == core {
                self.core = core;
                core.into_iter().for_each(pin);
            }
            self.candidate = core;
            self.check_interval = CHECK_INTERVAL_MIN;
        } else {
            self.candidate = None;
            self.check_interval = (2 * self.check_interval).min(CHECK_INTERVAL_MAX);
        }
        self.until_check = self.check_interval;
    }
}

/// Returns the core on which a thread of this process last ran.
fn core_of(thread: u32) -> Option<usize> {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).ok()?;
    // Field 39 of proc_pid_stat(5). The text after the name, which is in parentheses, starts with
    // field 3.
    stat.rsplit_once(") ")?.1.split(' ').nth(36)?.parse().ok()
}

/// Binds the calling thread to a core. An error is ignored: the thread is only slower then.
fn pin(core: usize) {
    // SAFETY: a zero set is valid; affects the calling thread only.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    }
}

/// Runs `map` for `pages` pages. If the pages are not in one mapping, runs it for the first page
/// alone. Returns the number of pages done.
fn map_run(pages: usize, map: impl Fn(usize) -> io::Result<usize>) -> io::Result<usize> {
    let done = match map(pages * PAGE_BYTES) {
        Err(error) if pages > 1 && error.raw_os_error() == Some(libc::ENOENT) => map(PAGE_BYTES),
        other => other,
    };
    done.map(|bytes| bytes / PAGE_BYTES)
}
