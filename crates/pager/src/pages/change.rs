//! Changes of pages by the program's `munmap`, `madvise` and `mremap`, and the entry of pages into
//! a new page table.

use std::ops::Range;

use crate::memory::{Memory, Position};
use crate::page_table::{Entry, PageId, State as PageState};
use crate::pages::flight::Late;
use crate::pages::sizes::INHERIT_FRAMES;
use crate::pages::{Hand, Pages, State};
use crate::patience::Patience;
use crate::shelf::Use;
use crate::slots::SlotId;
use crate::transport::{Direction, FrameId};

impl<M: Memory> Pages<M> {
    /// Drops the content of pages, which read as zeros afterwards. A thread of the pager frees
    /// chunks that become empty.
    pub fn drop_range(&self, range: Range<u32>) {
        self.table.touched(range, |part| {
            let mut at = part.start;
            let mut run = Vec::new();
            while at < part.end {
                run.clear();
                // A run of pages that are not absent.
                while at < part.end {
                    let now = self.table.load(PageId(at));
                    if now.state() == PageState::Absent && !now.is_busy() {
                        break;
                    }
                    let entry = self.table.lock_with(PageId(at), || self.memory.pause());
                    run.push((PageId(at), entry));
                    at += 1;
                }
                self.drop_run(&run);
                at += 1;
            }
        });
        self.wake_late();
        self.note_room();
    }

    /// Drops a contiguous run of BUSY pages.
    fn drop_run(&self, run: &[(PageId, Entry)]) {
        let Some(&(first, _)) = run.first() else { return };
        if run.iter().any(|(_, entry)| entry.state() == PageState::Resident) {
            self.memory.drop_pages(first, run.len() as u32);
        }
        self.forget_run(run);
    }

    /// Frees the positions and slots of pages that the kernel has unmapped. The caller has locked
    /// the protections, so no page is taken out.
    pub fn release_range(&self, range: Range<u32>) {
        self.table.touched(range, |part| {
            for page in part.map(PageId) {
                let now = self.table.load(page);
                if now.state() != PageState::Absent || now.is_busy() {
                    let entry = self.table.lock_with(page, || self.memory.pause());
                    self.forget_run(&[(page, entry)]);
                }
            }
        });
        self.wake_late();
        self.note_room();
    }

    /// Makes BUSY pages absent whose memory in the program is already freed.
    fn forget_run(&self, run: &[(PageId, Entry)]) {
        let mut guard = self.state();
        let state = &mut *guard;
        for &(page, entry) in run {
            match entry.state() {
                PageState::Absent => {}
                PageState::Resident => {
                    state.resident -= 1;
                    state.note_removed(page);
                    entry.slot().into_iter().for_each(|slot| self.free_slot(SlotId(slot)));
                }
                PageState::Remote => {
                    entry.slot().into_iter().for_each(|slot| self.free_slot(SlotId(slot)));
                }
                PageState::Shelved => {
                    let position = entry.position().expect("a shelved page has a position");
                    self.drop_shelved(state, Position(position));
                }
            }
            self.table.set_pinned(page, false);
            if self.table.unlock(page, Entry::ABSENT) {
                state.late_wakes.push(page);
            }
        }
        self.note_present(state.present());
    }

    /// Drops the page of a position. A position in flight becomes blank at the end of its flight.
    fn drop_shelved(&self, state: &mut State, position: Position) {
        let record = *state.shelf.record(position);
        let used = state.shelf.used(position);
        match used {
            Use::Fetching(flight, entry) | Use::Writing(flight, entry) => {
                if state.flights.note_dropped(flight, entry) {
                    // The end of the flight does not wake the threads that wait for a dropped page.
                    state.late_wakes.push(record.page);
                }
            }
            Use::Clean | Use::Dirty => {
                state.shelf.set(position, Use::Blank);
                record.slot.into_iter().for_each(|slot| self.free_slot(slot));
            }
            Use::Empty | Use::Blank | Use::Reserved { .. } => {
                unreachable!("the position of a shelved page holds it")
            }
        }
        // The end of a READ counts the page itself: the window has no pages before.
        if let (Some(window), false) = (record.window, matches!(used, Use::Fetching(..))) {
            state.streams.reclaimed(window, 1);
        }
    }

    /// Moves the content of page `from` to page `to`, which is dropped first. Both pages have the
    /// same protection.
    pub fn move_page(&self, hand: &mut Hand, from: PageId, to: PageId) {
        loop {
            if self.table.load(from) == Entry::ABSENT {
                return;
            }
            let entry = self.table.lock_with(from, || self.memory.pause());
            if let Some(late) = self.in_flight(entry) {
                self.settle(from, entry);
                match late {
                    Late::Take(flight) => self.wait_flight(hand, flight),
                    Late::Waits => self.memory.pause(),
                }
                continue;
            }
            self.lock_absent(to);
            if entry.state() == PageState::Resident && !self.relocate(hand, from, to) {
                // The program had dropped the page by a raw system call.
                let mut state = self.state();
                state.resident -= 1;
                state.note_removed(from);
                drop(state);
                entry.slot().into_iter().for_each(|slot| self.free_slot(SlotId(slot)));
                self.settle(to, Entry::ABSENT);
                self.settle(from, Entry::ABSENT);
                return;
            }
            {
                let mut state = self.state();
                if let Some(position) = entry.position() {
                    state.shelf.record_mut(Position(position)).page = to;
                }
                if entry.state() == PageState::Resident {
                    state.note_removed(from);
                    state.note_arrived(to, 1);
                }
            }
            self.settle(to, entry);
            self.settle(from, Entry::ABSENT);
            return;
        }
    }

    /// Moves a resident page within the program's memory. Returns true if it was mapped.
    fn relocate(&self, hand: &mut Hand, from: PageId, to: PageId) -> bool {
        hand.patience = Patience::default();
        loop {
            if let Some(is_mapped) = self.memory.relocate(from, to) {
                return is_mapped;
            }
            self.wait_for_others(hand, "the kernel has refused to move a page for mremap");
        }
    }

    /// Returns how the caller waits for a page in flight, or `None` for any other page.
    fn in_flight(&self, entry: Entry) -> Option<Late> {
        let position = Position(entry.position()?);
        let mut state = self.state();
        match state.shelf.used(position) {
            Use::Fetching(flight, _) | Use::Writing(flight, _) => Some(state.flights.need(flight)),
            _ => None,
        }
    }

    /// Sets a page of a move's target BUSY, and drops the page if it is not absent.
    ///
    /// After the drop of the target, a first touch of the mapping below may have filled the page
    /// with zeros: the kernel merges neighbouring mappings, and the handler checks only the page
    /// table.
    fn lock_absent(&self, page: PageId) {
        loop {
            let entry = self.table.lock_with(page, || self.memory.pause());
            if entry.state() == PageState::Absent {
                return;
            }
            self.drop_run(&[(page, entry)]);
            self.wake_late();
        }
    }

    /// Enters an existing page of the program's memory as resident, unless the handler has mapped
    /// it meanwhile. The number of present pages may exceed the limit afterwards.
    pub fn adopt(&self, page: PageId) {
        let entry = self.table.lock_with(page, || self.memory.pause());
        if entry.state() != PageState::Absent {
            return self.settle(page, entry);
        }
        {
            let mut state = self.state();
            state.resident += 1;
            state.note_arrived(page, 1);
        }
        self.settle(page, Entry::resident(None));
    }

    /// Enters a page into a new table, which no other thread uses yet. The number of present pages
    /// may exceed the limit afterwards: [`Pages::work`] brings the number back.
    pub fn enter(&self, page: PageId, entry: Entry) {
        let before = self.table.lock_with(page, || unreachable!("no other thread uses the table"));
        assert_eq!(before.state(), PageState::Absent, "each page is entered only once");
        let waits = self.table.unlock(page, entry);
        assert!(!waits, "no other thread uses the new table yet");
        if entry.state() == PageState::Resident {
            let mut state = self.state();
            state.resident += 1;
            state.note_arrived(page, 1);
        }
    }

    /// Calls `visit` with the slot of each page that has a slot, resident pages included. Calls
    /// `part_begins` with the first page of each part of the table in which pages exist. The
    /// snapshot of a fork uses this while no page on the shelf is dirty and no page is taken out.
    pub fn visit_slots(
        &self,
        pages: Range<u32>,
        mut part_begins: impl FnMut(u32),
        mut visit: impl FnMut(PageId, SlotId),
    ) {
        self.table.touched(pages, |part| {
            part_begins(part.start);
            for page in part.map(PageId) {
                // Without the lock of the state, the page could leave its position between the two
                // reads.
                let state = self.state();
                let entry = self.table.load(page);
                let slot = match entry.position() {
                    Some(position) => state.shelf.record(Position(position)).slot,
                    None => entry.slot().map(SlotId),
                };
                slot.into_iter().for_each(|slot| visit(page, slot));
            }
        });
    }

    /// Moves inherited pages, whose content another process holds, to slots of this pager. One call
    /// makes one pass over all pages. The caller repeats the call, because pages that other threads
    /// change meanwhile may remain inherited.
    pub fn move_inherited(&self, hand: &mut Hand) {
        let inherited = |slot: SlotId| slot.inherited_page().is_some();
        let mut remote: Vec<(PageId, SlotId)> = Vec::new();
        self.table.touched(0..self.table.len() as u32, |part| {
            if self.detach_range(part, &inherited, &mut remote).is_break() {
                self.memory.pause();
            }
        });
        for part in remote.chunks(INHERIT_FRAMES as usize) {
            self.copy_inherited(hand, part);
        }
        // Writes dirty pages to slots of this pager, and lets pages in flight arrive for the next
        // pass.
        self.flush(hand);
    }

    /// Copies remote inherited pages to slots of this pager. A page that a thread has changed
    /// meanwhile is left as it is.
    fn copy_inherited(&self, hand: &mut Hand, pages: &[(PageId, SlotId)]) {
        let first = self.sizes.first_inherit_frame();
        let frame = |index: usize| FrameId(first + index as u32);
        let reads: Vec<_> = pages.iter().enumerate().map(|(i, &(_, s))| (s, frame(i))).collect();
        self.transfer_now(Direction::Read, &reads);
        self.allocate_slots(hand, pages.len());
        let new: Vec<SlotId> = std::iter::from_fn(|| hand.slots.pop()).collect();
        let writes: Vec<_> = new.iter().enumerate().map(|(i, &s)| (s, frame(i))).collect();
        for &(slot, frame) in &writes {
            // SAFETY: both belong to this thread, and the READ of the page is complete.
            unsafe { self.put_to_frame(slot, self.backing.inherited_page(frame), frame) };
        }
        self.transfer_now(Direction::Write, &writes);
        for (index, (&(page, old), &new)) in pages.iter().zip(&new).enumerate() {
            let unchanged =
                |entry: Entry| entry.state() == PageState::Remote && entry.slot() == Some(old.0);
            if self.table.try_lock(page, unchanged).is_none() {
                let emptied = self.slots().give_back(new);
                self.note_emptied(emptied);
                continue;
            }
            let content = self.backing.inherited_page(frame(index));
            // SAFETY: a page of this thread; the READ into it is complete.
            let print = unsafe { self.fingerprints.of(content) };
            self.slots().set_print(new, print);
            self.settle(page, Entry::remote(new.0));
            self.free_slot(old);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::model::ModelMemory;
    use crate::pages::{Request, model};
    use crate::stream::Advice;

    /// A fault of a thread that reads the first 128 pages in order.
    fn fault(page: u32) -> Request {
        Request {
            page: PageId(page),
            address: 0,
            thread: 1,
            write: false,
            bounds: 0..128,
            advice: Advice::Sequential,
            over_limit: false,
            alone: false,
        }
    }

    /// Numbers of pages that were read ahead, and of those that were wasted.
    fn issued_and_wasted(pages: &Pages<ModelMemory>) -> (u64, u64) {
        let counters = pages.state().streams.counters();
        (counters.issued, counters.wasted)
    }

    /// A page that was read ahead and that the program drops counts as wasted, also one that is
    /// dropped before its READ ends. Otherwise the prefetcher would wait for its use for ever.
    #[test]
    fn page_that_was_read_ahead_and_dropped_is_wasted() {
        for is_in_flight in [false, true] {
            let pages = model::remote_pages(128);
            let mut hand = Hand::default();
            assert_eq!(pages.fault(&mut hand, &fault(0)), 1);
            if !is_in_flight {
                pages.wait_flights(&mut hand);
            }
            assert_eq!(pages.state().streams.in_flight() > 0, is_in_flight);
            // A part of the window first: the window counts no more pages than it has, so a page
            // that counts twice would not show in the whole.
            pages.drop_range(1..4);
            pages.wait_flights(&mut hand);
            let (issued, wasted) = issued_and_wasted(&pages);
            assert!(issued > 3, "{issued}");
            assert_eq!(wasted, 3, "in flight: {is_in_flight}");
            pages.drop_range(1..64);
            assert_eq!(issued_and_wasted(&pages), (issued, issued), "in flight: {is_in_flight}");
        }
    }

    /// A window that the program drops shortens the next one, also if it is dropped in flight.
    #[test]
    fn window_after_a_dropped_one_is_shorter() {
        for is_in_flight in [false, true] {
            let pages = model::remote_pages(128);
            let mut hand = Hand::default();
            let mut read_ahead = |page: u32| {
                let (before, _) = issued_and_wasted(&pages);
                assert_eq!(pages.fault(&mut hand, &fault(page)), 1);
                if !is_in_flight {
                    pages.wait_flights(&mut hand);
                }
                pages.drop_range(page + 1..64);
                pages.wait_flights(&mut hand);
                issued_and_wasted(&pages).0 - before
            };
            let (first, second) = (read_ahead(0), read_ahead(64));
            assert!(second < first, "in flight: {is_in_flight}: {first} and then {second}");
        }
    }
}
