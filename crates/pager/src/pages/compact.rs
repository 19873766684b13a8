//! Compaction: moves pages out of sparse chunks, so that the pool gets these chunks back.
//!
//! One pass goes over the page table once. There is no map from slots to pages, which would cost
//! memory for each slot.
//!
//! ```text
//!   close the emptiest chunks --> for each page with a slot in a closed chunk:
//!
//!     Resident        gives its slot up; its next write-back goes to another slot
//!     Shelved         becomes dirty without a slot, and is written to another slot
//!     Remote          is read to the shelf, then as above, and is reclaimed
//!     in flight       stays where it is, for the next pass
//! ```
//!
//! A remote page passes the shelf as a page that is read ahead does. So the program may use, change
//! or drop the page at any time, and no thread waits for a transfer with a BUSY page.
//!
//! Frozen slots do not move: their chunks are not closed, and between the write-back before a fork
//! and the fork's snapshot no page changes its slot.

use std::ops::ControlFlow;

use crate::memory::{Memory, Position};
use crate::page_table::{BLOCK_PAGES, Entry, PageId, State as PageState};
use crate::pages::{Hand, Pages};
use crate::shelf::{Record, Use};
use crate::slots::SlotId;
use crate::stats::Counter;

/// Entries of the page table that one step looks at.
const STEP_ENTRIES: u32 = 16 * BLOCK_PAGES as u32;

/// A pass of compaction in progress.
#[derive(Default)]
pub struct Pass {
    is_active: bool,
    /// The first page that the pass has not reached.
    next: u32,
    /// Remote pages of the current step.
    remote: Vec<(PageId, SlotId)>,
}

impl Pass {
    /// Returns true between the first step and the last one.
    pub fn is_active(&self) -> bool {
        self.is_active
    }
}

/// Number of pages in a step of a pass, and whether more steps follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Remote pages that were moved.
    pub moved: u32,
    /// The pass is not at its end.
    pub more: bool,
}

impl<M: Memory> Pages<M> {
    /// Does one step of a pass of compaction. Begins a pass if none is active. Waits for transfers.
    /// Only one thread compacts.
    pub fn compact(&self, hand: &mut Hand, pass: &mut Pass) -> Step {
        if !pass.is_active {
            if self.slots().close_sparse() == 0 {
                return Step { moved: 0, more: false };
            }
            (pass.is_active, pass.next) = (true, 0);
        }
        let scanned = self.scan_closed(pass);
        let remote = std::mem::take(&mut pass.remote);
        let mut moved = 0;
        for pages in remote.chunks(self.sizes.window as usize) {
            moved += self.move_remote(hand, pages);
        }
        pass.remote = remote;
        pass.remote.clear();
        if scanned.is_continue() && pass.next as usize == self.table.len() {
            self.slots().reopen();
            pass.is_active = false;
        }
        self.stats.add(Counter::PagesCompacted, u64::from(moved));
        Step { moved, more: pass.is_active }
    }

    /// Goes on through the page table: detaches pages that are here from slots in closed chunks,
    /// and collects the remote ones. Breaks while a fork forbids it.
    fn scan_closed(&self, pass: &mut Pass) -> ControlFlow<()> {
        let is_closed = |slot: SlotId| self.slots().is_closed(slot);
        let mut entries = 0;
        while (pass.next as usize) < self.table.len()
            && entries < STEP_ENTRIES
            && (pass.remote.len() as u32) < self.sizes.window
        {
            let end = (pass.next / BLOCK_PAGES as u32 + 1).saturating_mul(BLOCK_PAGES as u32);
            let end = end.min(self.table.len() as u32);
            let mut flow = ControlFlow::Continue(());
            self.table.touched(pass.next..end, |part| {
                entries += part.len() as u32;
                flow = self.detach_range(part, &is_closed, &mut pass.remote);
            });
            flow?;
            pass.next = end;
        }
        ControlFlow::Continue(())
    }

    /// Detaches the pages of a range from the slots for which `leaves` is true. Remote pages are
    /// collected instead. Breaks, without an effect, between the write-back before a fork and the
    /// fork's snapshot, because each page must keep its slot then.
    pub(super) fn detach_range(
        &self,
        pages: std::ops::Range<u32>,
        leaves: &dyn Fn(SlotId) -> bool,
        remote: &mut Vec<(PageId, SlotId)>,
    ) -> ControlFlow<()> {
        let protection = self.try_lock_protection();
        if protection.is_none() || self.is_standstill() {
            return ControlFlow::Break(());
        }
        for page in pages.map(PageId) {
            let entry = self.table.load(page);
            let slot = entry.slot().map(SlotId);
            match entry.state() {
                PageState::Absent => {}
                PageState::Resident => {
                    if slot.is_some_and(leaves) {
                        self.detach_resident(page, leaves);
                    }
                }
                PageState::Shelved => self.detach_shelved(page, leaves),
                PageState::Remote => {
                    remote.extend(slot.filter(|slot| leaves(*slot)).map(|slot| (page, slot)));
                }
            }
        }
        ControlFlow::Continue(())
    }

    /// Frees the slot of a resident page, which gets a new slot when it is written back.
    fn detach_resident(&self, page: PageId, leaves: &dyn Fn(SlotId) -> bool) {
        let has_one = |entry: Entry| entry.state() == PageState::Resident && entry.slot().is_some();
        let Some(entry) = self.table.try_lock(page, has_one) else { return };
        match entry.slot().map(SlotId).filter(|slot| leaves(*slot)) {
            Some(slot) => {
                self.free_slot(slot);
                self.settle(page, Entry::resident(None));
            }
            None => self.settle(page, entry),
        }
    }

    /// Makes a clean or dirty page on the shelf dirty without a slot.
    fn detach_shelved(&self, page: PageId, leaves: &dyn Fn(SlotId) -> bool) {
        let mut state = self.state();
        let Some(position) = self.table.load(page).position().map(Position) else { return };
        let record = *state.shelf.record(position);
        let Some(slot) = record.slot.filter(|slot| leaves(*slot)) else { return };
        let is_here = |entry: Entry| entry.position() == Some(position.0);
        if !matches!(state.shelf.used(position), Use::Clean | Use::Dirty)
            || self.table.try_lock(page, is_here).is_none()
        {
            return;
        }
        // SAFETY: the position has memory, and its page is BUSY by this thread.
        let print = unsafe { self.fingerprints.of(self.memory.position(position)) };
        let record = Record { slot: None, print, ..record };
        state.shelf.hold(position, Use::Dirty, record);
        if self.table.unlock(page, Entry::shelved(position.0)) {
            state.late_wakes.push(page);
        }
        drop(state);
        self.free_slot(slot);
        self.wake_late();
    }

    /// Moves remote pages from their slots in closed chunks to other slots, as far as the shelf has
    /// blank positions. Returns the number of pages that were read.
    fn move_remote(&self, hand: &mut Hand, pages: &[(PageId, SlotId)]) -> u32 {
        self.provide_blanks(hand);
        let Some((index, count)) = self.post_moves(hand, pages) else { return 0 };
        self.wait_flight(hand, index);
        let leaves = |slot: SlotId| self.slots().is_closed(slot);
        for &(page, _) in pages {
            // The scan's lock was released while the READ was in flight.
            let _ = self.detach_range(page.0..page.0 + 1, &leaves, &mut Vec::new());
        }
        while self.post_write(hand) > 0 {}
        self.wait_flights(hand);
        self.reclaim_pages(pages.iter().map(|(page, _)| *page));
        count
    }

    /// Provides blank positions for a window, as far as possible: within the room below the limit,
    /// and up to the stock from dirty and clean positions.
    fn provide_blanks(&self, hand: &mut Hand) {
        let wanted = self.sizes.stock / 2 + self.sizes.window;
        while self.state().shelf.blank() < wanted && self.grow(hand, false) {
            let position = hand.blank.take().expect("the hand has got a position");
            self.state().shelf.set(position, Use::Blank);
        }
        if self.state().shelf.blank() < self.sizes.stock {
            while self.post_write(hand) > 0 {}
            self.wait_flights(hand);
            let mut state = self.state();
            let missing = self.sizes.stock.saturating_sub(state.shelf.blank());
            self.reclaim(&mut state, missing);
            drop(state);
            self.wake_late();
        }
    }

    /// Reclaims the positions of clean pages, so that the moved pages do not displace pages that
    /// the program used recently.
    fn reclaim_pages(&self, pages: impl Iterator<Item = PageId>) {
        let mut state = self.state();
        for page in pages {
            let Some(position) = self.table.load(page).position().map(Position) else { continue };
            if state.shelf.used(position) == Use::Clean {
                self.reclaim_one(&mut state, position);
            }
        }
        drop(state);
        self.wake_late();
        self.note_room();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::model;

    /// A page that compaction has moved leaves the shelf at once. Otherwise it would displace pages
    /// that the program used recently.
    #[test]
    fn moved_page_leaves_the_shelf() {
        // Two chunks, of which the first one keeps 8 pages and the second one 24.
        let pages = model::remote_pages(512);
        let kept = [0..8, 488..512];
        pages.drop_range(kept[0].end..kept[1].start);
        let (mut hand, mut pass) = (Hand::default(), Pass::default());
        let mut moved = 0;
        loop {
            let step = pages.compact(&mut hand, &mut pass);
            moved += step.moved;
            if !step.more {
                break;
            }
        }
        assert_eq!(moved, 8);
        let state = |page| pages.table.load(PageId(page)).state();
        assert!(kept.into_iter().flatten().all(|page| state(page) == PageState::Remote));
        assert_eq!(pages.state().shelf.clean(), 0);
        pages.check_quiet(true);
    }
}
