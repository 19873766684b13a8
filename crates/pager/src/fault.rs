//! Faults: from an event to a page that is mapped.
//!
//! One handler answers all faults, on the core where they happen: it looks now and then where the
//! faulting thread last ran, and moves there ([`Home`]). A wake-up on the same core costs a
//! fraction of one that has to reach another core, above all in a virtual machine; for the same
//! reason there are not several handlers, which would all be woken by every fault.
//!
//! Steps of a missing fault: take room; set the page BUSY; by its state map zeros, copy the frame, or
//! read the slot into a frame of the handler's and copy that; settle the entry. The page of a read is
//! mapped write-protected and keeps its slot, so that it can be evicted without a write unless it is
//! written first.
//!
//! Read-ahead: [`Streams`] notes for each thread where its runs of consecutive faults would go on.
//! A run that does go on is served in growing batches, up to [`READ_FRAMES`] pages.

use std::io;
use std::sync::atomic::Ordering;

use crate::evict::Evictor;
use crate::fork;
use crate::page_table::{Entry, PageId, State};
use crate::pager::{Pager, READ_FRAMES};
use crate::slots::SlotId;
use crate::staging::{FrameId, Left};
use crate::stats::Counter;
use crate::sys::{self, PAGE_BYTES};
use crate::transport::Lane;
use crate::uffd::{Event, Fault};

/// Runs of consecutive faults, by thread.
#[derive(Debug, Default)]
pub struct Streams {
    streams: Vec<Stream>,
    clock: u64,
}

#[derive(Clone, Copy, Debug)]
struct Stream {
    thread: u32,
    next: u32,
    pages: u32,
    used: u64,
}

/// Streams that are remembered.
const STREAMS: usize = 32;

impl Streams {
    /// How many pages to serve for a fault of `thread` at `page`: 1 for a new stream, and four times
    /// as many as before for one that goes on, up to `most`.
    pub fn window(&mut self, thread: u32, page: PageId, most: u32) -> u32 {
        self.clock += 1;
        let clock = self.clock;
        // One pass: random faults come here, find nothing and take the place of the oldest.
        let (mut oldest, mut used) = (0, u64::MAX);
        for (index, stream) in self.streams.iter_mut().enumerate() {
            if stream.thread == thread && stream.next == page.0 {
                stream.pages = (stream.pages * 4).min(most).max(1);
                stream.used = clock;
                stream.next = page.0 + stream.pages;
                return stream.pages;
            }
            if stream.used < used {
                (oldest, used) = (index, stream.used);
            }
        }
        let stream = Stream { thread, next: page.0 + 1, pages: 1, used: clock };
        if self.streams.len() < STREAMS {
            self.streams.push(stream);
        } else {
            self.streams[oldest] = stream;
        }
        1
    }

    /// The batch at `page` was cut to `served` pages: the stream goes on there.
    pub fn served(&mut self, thread: u32, page: PageId, window: u32, served: u32) {
        let next = page.0 + window;
        if let Some(s) = self.streams.iter_mut().find(|s| s.thread == thread && s.next == next) {
            s.next = page.0 + served.max(1);
        }
    }
}

/// Pages of a long batch that are mapped while the NIC brings the next ones.
const PART_PAGES: usize = 16;

/// What a batch came to.
enum Outcome {
    /// This many pages were mapped, from the first on.
    Mapped(u32),
    /// Nothing can be mapped now: the thread tries again.
    Retry,
}

struct Handler<'a> {
    pager: &'a Pager,
    /// First of the frames that it reads into.
    frames: FrameId,
    evictor: Evictor,
    batch: Vec<(PageId, Entry)>,
    pairs: Vec<(SlotId, FrameId)>,
}

impl Pager {
    /// The handler's loop.
    pub(crate) fn handler(self: &std::sync::Arc<Self>) {
        self.note_thread();
        let mut home = Home::default();
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
                self.broken("read page faults", &error);
            }
            // A fork first: its child's picture is to be taken soon.
            for event in events.drain(..) {
                match event {
                    Event::Fork(child) => fork::follow(self, child),
                    Event::Fault(fault) => faults.push(fault),
                    Event::Other(number) => {
                        let error = io::Error::other(format!("event {number:#x}"));
                        self.broken("understand userfaultfd", &error);
                    }
                }
            }
            for fault in faults.drain(..) {
                home.follow(fault.thread);
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
            self.call_evictor(false);
        }
    }

    /// Takes room for 1 to `wanted` pages; where there is none, makes some or waits for who does. 0 if the fault
    /// must be tried again later.
    fn wait_for_room(&self, wanted: u32, evictor: &mut Evictor) -> u32 {
        let mut stalled = false;
        loop {
            let seen = self.room.load(Ordering::Acquire);
            let room = self.take_room(wanted);
            if room > 0 || self.fork_waits.load(Ordering::Acquire) {
                return room;
            }
            if !self.evicts_inline {
                if !stalled {
                    self.stats.add(Counter::FaultsStalled, 1);
                    stalled = true;
                }
                self.call_evictor(true);
            }
            if let Some(gate) = self.try_gate()
                && evictor.make_room(self, gate) > 0
            {
                if self.evicts_inline {
                    self.update_gauges();
                }
                continue;
            }
            // Who has the gate, or the pages that are in use, is done soon; not all of them say so.
            sys::futex_wait(&self.room, seen, Some(if self.evicts_inline { 1 } else { 100 }));
        }
    }
}

impl Handler<'_> {
    fn missing(&mut self, fault: Fault) {
        let pager = self.pager;
        let page = pager.region.page(fault.address);
        if pager.is_own_thread(fault.thread) && pager.table.load(page).is_busy() {
            // The program dropped a page by a raw system call while the evictor copied it.
            // SAFETY: a page of the region that the kernel has just reported missing.
            let _ = unsafe { pager.uffd.zero(fault.address, PAGE_BYTES) };
            return;
        }
        let most = READ_FRAMES.min(pager.limit / 16).max(1);
        let forks = pager.forks.is_forking_thread(fault.thread);
        let window = if forks { 1 } else { pager.streams().0.window(fault.thread, page, most) };
        let room = match forks {
            true => pager.take_room_beyond(),
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
            Outcome::Mapped(pages) => pages,
            Outcome::Retry => {
                pager.wake(page, 1);
                0
            }
        };
        if mapped != window && !forks {
            pager.streams().0.served(fault.thread, page, window, mapped);
        }
        pager.give_room(room - mapped);
    }

    /// Adds the pages that follow the first, in the same state, up to `room` pages in all.
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

    /// A fault on a page that is resident: it was mapped since, or the program dropped it behind our
    /// back, which leaves zeros.
    fn spurious(&mut self, page: PageId, entry: Entry) -> Outcome {
        let address = self.pager.region.address(page);
        // SAFETY: a page of the region; what is there already stays.
        let dropped = unsafe { self.pager.uffd.zero(address, PAGE_BYTES) }.is_ok();
        let entry = if dropped { Entry::dirty(entry.slot()) } else { entry };
        self.pager.settle(page, entry);
        self.pager.wake(page, 1);
        Outcome::Mapped(0)
    }

    fn fill_zeros(&mut self, write: bool) -> Outcome {
        let pager = self.pager;
        let start = pager.region.address(self.batch[0].0);
        let done = map_run(self.batch.len(), |len| {
            // SAFETY: absent pages of the region, BUSY by us; `zeros` is as long as a batch.
            unsafe {
                if write {
                    pager.uffd.copy(start, pager.zeros, len, false)
                } else {
                    pager.uffd.zero(start, len)
                }
            }
        });
        let outcome = self.conclude(done, |_| Entry::dirty(None));
        if let Outcome::Mapped(pages) = outcome {
            pager.stats.add(Counter::PagesZeroed, u64::from(pages));
        }
        outcome
    }

    fn fetch(&mut self, write: bool) -> Outcome {
        let pager = self.pager;
        self.pairs.clear();
        for (index, (_, entry)) in self.batch.iter().enumerate() {
            let slot = SlotId(entry.slot().expect("a remote page has a slot"));
            self.pairs.push((slot, FrameId(self.frames.0 + index as u32)));
        }
        let done = if self.batch.len() < 2 * PART_PAGES {
            let lane = if self.batch.len() == 1 { Lane::Sync } else { Lane::Async };
            pager.transfer(lane, false, &self.pairs);
            let start = pager.region.address(self.batch[0].0);
            let source = pager.staging.address(self.frames) as usize;
            map_run(self.batch.len(), |len| {
                // SAFETY: remote pages of the region, BUSY by us; the handler's frames are as long
                // as a batch and nobody else's.
                unsafe { pager.uffd.copy(start, source, len, !write) }
            })
        } else {
            self.fetch_parts(write)
        };
        let outcome = self.conclude(done, |entry| {
            let slot = entry.slot().expect("a remote page has a slot");
            if write { Entry::dirty(Some(slot)) } else { Entry::clean(slot) }
        });
        if let Outcome::Mapped(pages) = outcome {
            pager.stats.add(Counter::PagesIn, u64::from(pages));
            pager.stats.add(Counter::PagesReadAhead, u64::from(pages.saturating_sub(1)));
        }
        outcome
    }

    /// Reads a long batch and maps it part by part: one part is mapped while the NIC brings the next.
    /// Gives the pages that are mapped, from the first on.
    fn fetch_parts(&self, write: bool) -> io::Result<usize> {
        let pager = self.pager;
        let start = pager.region.address(self.batch[0].0);
        let source = pager.staging.address(self.frames) as usize;
        let mut done = Ok(0);
        pager.read_parts(&self.pairs, PART_PAGES, &mut |part| {
            let before = part * PART_PAGES;
            if !matches!(done, Ok(pages) if pages == before) {
                return;
            }
            let at = before * PAGE_BYTES;
            let mapped = map_run(PART_PAGES.min(self.pairs.len() - before), |len| {
                // SAFETY: as in `fetch`. Who waits for the first page waits for the whole batch:
                // woken earlier it would fault on the next part and wait again.
                unsafe { pager.uffd.copy_without_wake(start + at, source + at, len, !write) }
            });
            match mapped {
                Ok(pages) => done = Ok(before + pages),
                Err(error) if before == 0 => done = Err(error),
                Err(_) => {}
            }
        });
        if let Ok(pages) = &done {
            pager.wake(self.batch[0].0, *pages as u32);
        }
        done
    }

    /// Settles a batch of which `done` pages are mapped.
    fn conclude(&mut self, done: io::Result<usize>, mapped: impl Fn(Entry) -> Entry) -> Outcome {
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
                // A fork waits, or the mapping is no longer what it was.
                Some(libc::EAGAIN | libc::ENOENT | libc::ESRCH | libc::EEXIST) => {}
                _ => pager.broken("map a page", error),
            }
            return Outcome::Retry;
        }
        pager.residency().push(&pager.table, self.batch[0].0, count as u32);
        Outcome::Mapped(count as u32)
    }

    /// Maps a staged page back, with no I/O.
    fn restore(&mut self, page: PageId, entry: Entry, write: bool) -> Outcome {
        let pager = self.pager;
        let frame = FrameId(entry.frame().expect("a staged page has a frame"));
        let stored = pager.staging.state(frame) == crate::staging::FrameState::Clean;
        let protect = stored && !write;
        let address = pager.region.address(page);
        let source = pager.staging.address(frame) as usize;
        // SAFETY: the page is BUSY by us, so its frame keeps its content.
        let done = unsafe { pager.uffd.copy(address, source, PAGE_BYTES, protect) };
        if done.is_err() {
            return self.conclude(done, |_| entry);
        }
        let entry = match pager.staging.leave(frame) {
            Left::Stored(slot) if protect => Entry::clean(slot.0),
            Left::Stored(slot) => Entry::dirty(Some(slot.0)),
            Left::Unstored(slot) => {
                assert!(!protect, "a frame that was stored stays stored");
                Entry::dirty(slot.map(|slot| slot.0))
            }
        };
        pager.settle(page, entry);
        pager.residency().push(&pager.table, page, 1);
        pager.stats.add(Counter::PagesRestored, 1);
        Outcome::Mapped(1)
    }

    /// A write to a page that is mapped write-protected: it becomes dirty, and so do the clean pages
    /// after it if the thread has been writing its way towards them.
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
            // SAFETY: resident pages of the region, BUSY by us.
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
                _ => pager.broken("lift the write protection of a page", &error),
            }
        }
    }
}

/// How many cores the process may run on.
pub(crate) fn cores() -> usize {
    // SAFETY: a zero set is valid for the write.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of_val(&set), &mut set) != 0 {
            return 1;
        }
        libc::CPU_COUNT(&set) as usize
    }
}

/// The core that the handler keeps itself on.
struct Home {
    core: Option<usize>,
    /// Where the last look found the faulting thread, if it was not at home.
    elsewhere: Option<usize>,
    /// Faults until the next look at where they come from.
    until_look: u32,
    /// Faults between two looks.
    look_every: u32,
}

/// A look costs about as much as a fault. Looks become rarer as long as they find nothing new.
const LOOK_EVERY_MIN: u32 = 32;
const LOOK_EVERY_MAX: u32 = 512;

impl Default for Home {
    fn default() -> Self {
        Self { core: None, elsewhere: None, until_look: 0, look_every: LOOK_EVERY_MIN }
    }
}

impl Home {
    /// Moves to the core of `thread`, which has just faulted, if it was found there twice in a row.
    fn follow(&mut self, thread: u32) {
        if self.until_look > 0 {
            self.until_look -= 1;
            return;
        }
        let core = core_of(thread);
        if core.is_some() && core != self.core {
            if self.core.is_none() || self.elsewhere == core {
                self.core = core;
                core.into_iter().for_each(pin);
            }
            self.elsewhere = core;
            self.look_every = LOOK_EVERY_MIN;
        } else {
            self.elsewhere = None;
            self.look_every = (2 * self.look_every).min(LOOK_EVERY_MAX);
        }
        self.until_look = self.look_every;
    }
}

/// The core on which a thread of this process last ran.
fn core_of(thread: u32) -> Option<usize> {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).ok()?;
    // Field 39 (proc_pid_stat(5)); what follows the name, in parentheses, starts with field 3.
    stat.rsplit_once(") ")?.1.split(' ').nth(36)?.parse().ok()
}

/// Keeps the calling thread on a core. Where that is refused it is only slower.
fn pin(core: usize) {
    // SAFETY: a zero set is valid; the calling thread only.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    }
}

/// Runs `map` for `pages` pages; where that fails because they are not one mapping, for the first
/// alone. Returns the pages done.
fn map_run(pages: usize, map: impl Fn(usize) -> io::Result<usize>) -> io::Result<usize> {
    let done = match map(pages * PAGE_BYTES) {
        Err(error) if pages > 1 && error.raw_os_error() == Some(libc::ENOENT) => map(PAGE_BYTES),
        other => other,
    };
    done.map(|bytes| bytes / PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_grows_and_another_thread_does_not_disturb_it() {
        let mut streams = Streams::default();
        assert_eq!(streams.window(1, PageId(100), 64), 1);
        assert_eq!(streams.window(2, PageId(101), 64), 1);
        assert_eq!(streams.window(1, PageId(101), 64), 4);
        assert_eq!(streams.window(1, PageId(105), 64), 16);
        assert_eq!(streams.window(1, PageId(121), 64), 64);
        assert_eq!(streams.window(1, PageId(185), 64), 64);
        streams.served(1, PageId(185), 64, 10);
        assert_eq!(streams.window(1, PageId(195), 64), 64);
        assert_eq!(streams.window(1, PageId(5000), 64), 1);
    }

    #[test]
    fn random_faults_never_read_ahead() {
        let mut streams = Streams::default();
        for at in 0..1000u32 {
            assert_eq!(streams.window(1, PageId(at.wrapping_mul(7919) % 100_003 * 2), 64), 1);
        }
    }
}
