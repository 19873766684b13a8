//! The asynchronous path: takes pages out of the program's memory, writes them back, and reclaims
//! their positions.
//!
//! Pages are taken out in runs, inspected while they are BUSY, and then stay on the shelf:
//!
//! ```text
//!   resident --take_out--> inspected --> all zero: no memory is needed        position: blank
//!                                    --> one repeated word: the entry has it  position: blank
//!                                    --> equal to its slot                    position: clean
//!                                    --> else                                 position: dirty
//! ```
//!
//! Each slot has a keyed 128-bit fingerprint of its content. A page is equal to its slot if the
//! fingerprints are equal. So no page must be write-protected to detect a change.
//!
//! [`Pages::work`] does a bounded part of the due work. Where the machine has a core for the
//! worker, the worker calls `work`; otherwise the handler calls `work` after each fault.
//! `Pages::make_blank` does the same work for a fault that finds no blank position.

use std::ops::Range;

use crate::fingerprint::Content;
use crate::memory::{Memory, Position, Stop};
use crate::page_table::{Entry, PageId, State as PageState};
use crate::pages::overrun::KEPT;
use crate::pages::{Pages, State};
use crate::patience::Patience;
use crate::policy::{Policy, Run};
use crate::shelf::{NO_RECORD, Record, Use};
use crate::slots::{SlotId, Source};
use crate::stats::Counter;
use crate::stream::CLUSTER_PAGES;
use crate::transport::FrameId;

/// Maximum number of pages that a fault takes out at once. In a run, a page costs about 0.4 us.
const SLICE_PAGES: u32 = 16;
/// Maximum number of pages that are taken out at once while no fault waits.
const BATCH_PAGES: u32 = 64;
/// Number of pages that a fault of `Paths::Linux` takes out and writes together, as Linux does
/// (SWAP_CLUSTER_MAX).
const DIRECT_PAGES: u32 = 32;
/// Maximum number of positions that get memory together.
const GROWTH_PAGES: u32 = 16;

/// Buffers of one thread that works on pages. The hand of a handler also keeps a blank position for
/// the next fault.
pub struct Hand {
    /// A reserved position with memory.
    pub(super) blank: Option<Position>,
    pub(super) pairs: Vec<(Source, FrameId)>,
    /// Pages of a flight, with their positions and slots.
    pub(super) landing: Vec<(PageId, Position, SlotId)>,
    pub(super) woken: Vec<PageId>,
    pub(super) run: Vec<(PageId, Entry)>,
    /// Slots for a write-back batch.
    pub(super) slots: Vec<SlotId>,
    /// Time for which a fault has found no page without progress of other threads.
    pub(super) patience: Patience,
    taken: Vec<Taken>,
    /// Pages of `taken` that devices have pinned.
    pinned: u32,
    /// Write-back batches that this thread waited for.
    pub waited_writes: u64,
    /// Pages that this thread took out.
    pub taken_out: u64,
}

impl Default for Hand {
    fn default() -> Self {
        let pages = BATCH_PAGES as usize;
        Self {
            blank: None,
            pairs: Vec::with_capacity(pages),
            landing: Vec::with_capacity(pages),
            woken: Vec::with_capacity(pages),
            run: Vec::with_capacity(pages),
            slots: Vec::with_capacity(pages),
            patience: Patience::default(),
            taken: Vec::with_capacity(pages),
            pinned: 0,
            waited_writes: 0,
            taken_out: 0,
        }
    }
}

#[cfg(test)]
impl Hand {
    /// Returns true if this thread keeps a blank position.
    pub(crate) fn has_blank(&self) -> bool {
        self.blank.is_some()
    }
}

/// A page that is being taken out.
#[derive(Clone, Copy)]
struct Taken {
    page: PageId,
    entry: Entry,
    position: Position,
    /// The content, once the page is on the shelf.
    content: Option<Content>,
}

/// Result of an attempt to take pages out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakenOut {
    /// Number of pages that were moved out of the program's memory.
    Pages(u32),
    /// No page was taken out: the handler must follow a fork first.
    Forking,
    /// No page was taken out. All pages are BUSY, locked in memory or pinned by devices, no
    /// position is empty, or another thread has locked the protections.
    None,
}

impl<M: Memory> Pages<M> {
    /// Does the due work without waiting. It ends complete transfers, reclaims clean positions,
    /// takes out at most `pages` pages, and starts to write dirty positions back. Returns true if
    /// more work may be due.
    pub fn work(&self, hand: &mut Hand, pages: u32) -> bool {
        self.reap(hand);
        let late;
        let (missing, dirty, excess) = {
            let mut state = self.state();
            self.extend(&mut state);
            self.open_window(&mut state);
            self.reclaim_surplus(&mut state);
            late = !state.late_wakes.is_empty();
            self.note_present(state.present());
            self.stats.record_prefetch(&state.streams.counters());
            let ready = state.room() + state.shelf.blank();
            let later = state.shelf.clean() + state.shelf.dirty() + state.flights.writing();
            let wanted = self.stock(&state) + self.keep(&state);
            let excess = state.present().saturating_sub(state.limit);
            (wanted.saturating_sub(ready + later), state.shelf.dirty(), excess)
        };
        if late {
            self.wake_late();
        }
        if excess > 0 {
            self.shrink();
        }
        let mut more = false;
        if (missing > 0 || excess > 0) && pages > 0 {
            let wanted = missing.max(excess).min(pages);
            more = matches!(self.take_out(hand, wanted), TakenOut::Pages(_));
        }
        let low = missing > 0 && dirty > 0;
        if dirty >= self.sizes.window || (low && dirty >= self.sizes.window / 4) {
            more |= self.post_write(hand) > 0;
        }
        if self.has_emptied() {
            self.free_emptied();
        }
        more
    }

    /// Reclaims clean positions until the stock of blank ones is full, but keeps some clean ones.
    fn reclaim_surplus(&self, state: &mut State) {
        let ready = state.room() + state.shelf.blank();
        let wanted = self.stock(state).saturating_sub(ready);
        let surplus = state.shelf.clean().saturating_sub(self.keep(state));
        self.reclaim(state, wanted.min(surplus));
    }

    /// Turns the oldest clean positions into blank ones. Their pages become remote. Returns their
    /// number, at most `wanted`.
    pub(super) fn reclaim(&self, state: &mut State, wanted: u32) -> u32 {
        let ahead_max = self.ahead_max(state);
        let mut done = 0;
        for _ in 0..state.shelf.clean() {
            if done == wanted {
                break;
            }
            let Some(position) = state.shelf.next_to_reclaim(ahead_max) else { break };
            if self.reclaim_one(state, position) {
                done += 1;
            } else {
                // Another thread has set the page BUSY.
                state.shelf.renew_clean(position);
            }
        }
        done
    }

    /// Turns a clean position into a blank one, and its page into a remote one. Returns false if
    /// the page is BUSY.
    pub(super) fn reclaim_one(&self, state: &mut State, position: Position) -> bool {
        let Record { page, slot, window, .. } = *state.shelf.record(position);
        let is_here = |entry: Entry| entry.position() == Some(position.0);
        if self.table.try_lock(page, is_here).is_none() {
            return false;
        }
        let slot = slot.expect("a clean position has a slot");
        state.shelf.set(position, Use::Blank);
        if let Some(window) = window {
            state.streams.reclaimed(window, 1);
        }
        if self.table.unlock(page, Entry::remote(slot.0)) {
            // A thread waits for this page. The caller wakes the thread after it has released the
            // lock.
            state.late_wakes.push(page);
        }
        true
    }

    /// Frees the memory of blank positions while more pages are present than the limit allows.
    fn shrink(&self) {
        let excess = {
            let state = self.state();
            state.present().saturating_sub(state.allowed())
        };
        self.discard_blank(excess);
    }

    /// Makes sure that this thread's hand has a blank position. Waits for a WRITE if all positions
    /// with memory are dirty or in flight. Returns false if a fork waits; the program's thread must
    /// fault again then.
    pub(super) fn make_blank(&self, hand: &mut Hand, over_limit: bool) -> bool {
        let mut rounds = 0;
        while hand.blank.is_none() {
            if self.find_blank(hand) || self.grow(hand, over_limit) {
                break;
            }
            {
                let mut state = self.state();
                self.reclaim(&mut state, 1);
                hand.blank = state.shelf.take_blank(1).map(|(position, _)| position);
            }
            self.wake_late();
            if hand.blank.is_some() {
                break;
            }
            if self.is_standstill() {
                return false;
            }
            match self.take_out(hand, SLICE_PAGES) {
                TakenOut::Forking => return false,
                TakenOut::Pages(_) if rounds < 2 => {
                    rounds += 1;
                    continue;
                }
                _ => {}
            }
            rounds = 0;
            self.post_write(hand);
            if self.wait_write(hand) {
                hand.waited_writes += 1;
            } else if !self.wait_flights(hand) && !self.exceed_limit() {
                self.wait_for_others(hand, KEPT);
            }
        }
        true
    }

    /// Gives the hand a blank position of the shelf unless it has one. Returns false if there is
    /// none.
    pub(super) fn find_blank(&self, hand: &mut Hand) -> bool {
        if hand.blank.is_none() {
            hand.blank = self.state().shelf.take_blank(1).map(|(position, _)| position);
        }
        hand.blank.is_some()
    }

    /// Makes room for a cluster, as the direct reclaim of Linux does: takes pages out, and waits
    /// until they are written. [`Pages::make_blank`] does what is left if no page can be taken out.
    pub(super) fn reclaim_directly(&self, hand: &mut Hand) {
        let lacks_room = || {
            let state = self.state();
            state.room() + state.shelf.blank() < CLUSTER_PAGES || state.present() > state.limit
        };
        while lacks_room() {
            let mut more = self.work(hand, DIRECT_PAGES);
            while self.post_write(hand) > 0 {}
            while self.wait_write(hand) {
                hand.waited_writes += 1;
                more = true;
            }
            self.reclaim_surplus(&mut self.state());
            self.wake_late();
            if !more {
                return;
            }
        }
    }

    /// Gives memory to empty positions within the room below the limit, and gives one of them to
    /// the hand. Returns false if there is no room or no empty position.
    pub(super) fn grow(&self, hand: &mut Hand, over_limit: bool) -> bool {
        let taken = {
            let mut state = self.state();
            self.extend(&mut state);
            let room = state.room().max(u32::from(over_limit)).min(GROWTH_PAGES);
            let taken = state.shelf.take_empty(room);
            if let Some((first, count)) = taken {
                // The positions count as present from now on.
                let filled = Use::Reserved { filled: true };
                (0..count).for_each(|at| state.shelf.set(first.plus(at), filled));
            }
            taken
        };
        let Some((first, count)) = taken else { return false };
        self.memory.populate(first, count);
        let mut state = self.state();
        (1..count).for_each(|at| state.shelf.set(first.plus(at), Use::Blank));
        hand.blank = Some(first);
        true
    }

    /// Takes out at most `max` resident pages, in the policy's order, and inspects them.
    pub fn take_out(&self, hand: &mut Hand, max: u32) -> TakenOut {
        let Some(_protection) = self.try_lock_protection() else { return TakenOut::None };
        if self.is_standstill() {
            return TakenOut::Forking;
        }
        debug_assert!(!self.slots().is_freezing(), "each version of a page would keep its slot");
        self.choose(hand, max.min(BATCH_PAGES));
        self.take_chosen(hand)
    }

    /// Takes out the resident pages of a range.
    pub fn take_out_range(&self, hand: &mut Hand, pages: Range<u32>) {
        let mut pages = pages.map(PageId).peekable();
        while pages.peek().is_some() && !self.is_standstill() {
            {
                let _protection = self.lock_protection();
                let admit = |e: Entry| e.state() == PageState::Resident && !e.is_pinned();
                let lock = |page| Some((page, self.table.try_lock(page, admit)?));
                hand.run.clear();
                hand.run.extend(pages.by_ref().filter_map(lock).take(BATCH_PAGES as usize));
                let mut state = self.state();
                hand.run.iter().for_each(|&(page, _)| state.note_removed(page));
                self.place(hand, &mut state);
                drop(state);
                if matches!(self.take_chosen(hand), TakenOut::Forking) {
                    return;
                }
            }
            self.write_all(hand);
            let clean = {
                let mut state = self.state();
                let clean = state.shelf.clean();
                self.reclaim(&mut state, clean)
            };
            self.wake_late();
            self.discard_blank(clean);
        }
    }

    /// Writes back the pages that are dirty now, and waits for the transfers.
    ///
    /// These pages may need more WRITEs than can start at once: with a small bound, all WRITEs in
    /// flight together hold fewer pages than a batch, and others may be in flight already. Pages
    /// that other threads make dirty meanwhile do not extend the work.
    fn write_all(&self, hand: &mut Hand) {
        let writes = self.state().shelf.dirty().div_ceil(self.sizes.window);
        for _ in 0..writes {
            if self.post_write(hand) == 0 && self.wait_write(hand) {
                self.post_write(hand);
            }
        }
        self.wait_flights(hand);
    }

    /// Makes the pages of a range the next victims, if they are resident.
    pub fn note_unneeded(&self, pages: Range<u32>) {
        self.table.touched(pages, |part| {
            let run = Run { start: part.start, pages: part.end - part.start };
            self.state().policy.unneeded(run);
        });
    }

    /// Frees the memory of at most `count` blank positions.
    fn discard_blank(&self, mut count: u32) {
        while count > 0 {
            let taken = self.state().shelf.take_blank(count);
            let Some((first, taken)) = taken else { return };
            self.memory.discard(first, taken);
            let mut state = self.state();
            (0..taken).for_each(|at| state.shelf.set(first.plus(at), Use::Empty));
            count -= taken;
        }
    }

    /// Takes out the pages of `hand.taken`.
    fn take_chosen(&self, hand: &mut Hand) -> TakenOut {
        if hand.taken.is_empty() {
            self.wake_late();
            return TakenOut::None;
        }
        let stop = self.move_chosen(hand);
        let done = self.settle_taken(hand);
        hand.taken_out += u64::from(done);
        self.stats.add(Counter::PagesEvicted, u64::from(done));
        match (done, stop) {
            (0, Some(Stop::Forking)) => TakenOut::Forking,
            (0, _) => TakenOut::None,
            _ => TakenOut::Pages(done),
        }
    }

    /// Sets victims BUSY, oldest first, and reserves empty positions for them.
    ///
    /// Asks the policy for no more victims than there are empty positions. A victim without a
    /// position would come back, and count as one that cannot leave.
    fn choose(&self, hand: &mut Hand, max: u32) {
        hand.run.clear();
        let mut guard = self.state();
        let state = &mut *guard;
        let max = max.min(state.shelf.empty());
        for _ in 0..max {
            let wanted = max - hand.run.len() as u32;
            if wanted == 0 {
                break;
            }
            let Some(victims) = state.policy.victim_run(wanted) else { break };
            for page in (victims.start..victims.end()).map(PageId) {
                let admit = |e: Entry| e.state() == PageState::Resident && !e.is_pinned();
                if let Some(entry) = self.table.try_lock(page, admit) {
                    hand.run.push((page, entry));
                } else {
                    let entry = self.table.peek(page);
                    debug_assert!(entry.is_busy() || entry.state() == PageState::Resident);
                    state.note_returned(page);
                }
            }
        }
        self.place(hand, state);
    }

    /// Reserves empty positions for the BUSY pages of `hand.run`: consecutive positions for
    /// consecutive pages.
    fn place(&self, hand: &mut Hand, state: &mut State) {
        hand.taken.clear();
        hand.run.sort_unstable_by_key(|(page, _)| page.0);
        let mut at = 0;
        while at < hand.run.len() {
            let first = hand.run[at].0;
            let next =
                |&(index, (page, _)): &(usize, &(PageId, Entry))| page.0 == first.0 + index as u32;
            let run = hand.run[at..].iter().enumerate().take_while(next).count();
            let Some((position, count)) = state.shelf.take_empty(run as u32) else { break };
            for (index, &(page, entry)) in hand.run[at..at + count as usize].iter().enumerate() {
                let position = position.plus(index as u32);
                hand.taken.push(Taken { page, entry, position, content: None });
            }
            at += count as usize;
        }
        // Without an empty position, pages stay resident.
        for &(page, entry) in &hand.run[at..] {
            state.note_returned(page);
            if self.table.unlock(page, entry) {
                state.late_wakes.push(page);
            }
        }
    }

    /// Moves the chosen pages to their positions and inspects them.
    fn move_chosen(&self, hand: &mut Hand) -> Option<Stop> {
        let mut at = 0;
        hand.pinned = 0;
        while at < hand.taken.len() {
            let first = hand.taken[at];
            let follows = |&(index, taken): &(usize, &Taken)| {
                let index = index as u32;
                taken.page.0 == first.page.0 + index && taken.position == first.position.plus(index)
            };
            let run = hand.taken[at..].iter().enumerate().take_while(follows).count();
            let done = self.memory.take_out(first.page, first.position, run as u32);
            for taken in &mut hand.taken[at..at + done.pages as usize] {
                let bytes = self.memory.position(taken.position);
                // SAFETY: the position has memory, and it is reserved by this thread.
                taken.content = Some(unsafe { self.inspect(bytes) });
            }
            at += done.pages as usize;
            match done.stop {
                None => {}
                Some(Stop::Forking) => return Some(Stop::Forking),
                // This page stays resident. The pages behind it are taken out by the next call.
                Some(stop @ (Stop::Pinned | Stop::Changed)) => {
                    hand.pinned += u32::from(stop == Stop::Pinned);
                    at += 1;
                }
            }
        }
        None
    }

    /// Returns the content of a page. A repeated word that no slot index can hold counts as
    /// [`Content::Other`].
    ///
    /// # Safety
    /// `bytes` points to a page that no other thread writes.
    unsafe fn inspect(&self, bytes: *const u8) -> Content {
        // SAFETY: by the caller.
        match unsafe { self.fingerprints.inspect(bytes) } {
            Content::Word(word) if SlotId::word(word).is_none() => {
                // SAFETY: by the caller.
                Content::Other(unsafe { self.fingerprints.of(bytes) })
            }
            content => content,
        }
    }

    /// Gives the pages of `hand.taken` their new states. Returns the number of pages that have left
    /// the program's memory.
    fn settle_taken(&self, hand: &mut Hand) -> u32 {
        let mut done = 0;
        hand.woken.clear();
        let mut guard = self.state();
        let state = &mut *guard;
        for &Taken { page, entry, position, content } in &hand.taken {
            let Some(content) = content else {
                state.shelf.set(position, Use::Empty);
                state.note_returned(page);
                if self.table.unlock(page, entry) {
                    hand.woken.push(page);
                }
                continue;
            };
            done += 1;
            state.resident -= 1;
            self.table.set_evicted(page, state.stamp());
            state.taken_out += 1;
            let entry = self.shelve(state, page, position, entry.slot().map(SlotId), content);
            if self.table.unlock(page, entry) {
                hand.woken.push(page);
            }
        }
        state.overrun.note(done, hand.pinned);
        self.note_present(state.present());
        drop(guard);
        hand.woken.drain(..).for_each(|page| self.memory.wake(page, 1));
        self.wake_late();
        if done > 0 {
            self.note_room();
        }
        done
    }

    /// Sets the use of a position by the content of the page that was moved there. Returns the
    /// page's new entry.
    fn shelve(
        &self,
        state: &mut State,
        page: PageId,
        position: Position,
        slot: Option<SlotId>,
        content: Content,
    ) -> Entry {
        let (used, entry) = match content {
            Content::Zero => {
                self.stats.add(Counter::PagesZeroEvicted, 1);
                (Use::Blank, Entry::ABSENT)
            }
            Content::Word(word) => {
                let slot = SlotId::word(word).expect("`inspect` has checked the word");
                self.stats.add(Counter::PagesWordEvicted, 1);
                (Use::Blank, Entry::remote(slot.0))
            }
            Content::Other(print) => {
                let is_stored = slot.is_some_and(|slot| self.slots().print(slot) == Some(print));
                let used = if is_stored { Use::Clean } else { Use::Dirty };
                self.stats.add(Counter::PagesCleanEvicted, u64::from(is_stored));
                state.shelf.hold(position, used, Record { page, slot, print, ..NO_RECORD });
                return Entry::shelved(position.0);
            }
        };
        state.shelf.set(position, used);
        slot.into_iter().for_each(|slot| self.free_slot(slot));
        entry
    }

    /// Wakes the threads at pages that were unlocked under the state's lock.
    pub(super) fn wake_late(&self) {
        loop {
            let page = self.state().late_wakes.pop();
            match page {
                Some(page) => self.memory.wake(page, 1),
                None => return,
            }
        }
    }

    /// Returns true if work is due for [`Pages::work`].
    pub fn has_work(&self) -> bool {
        let state = self.state();
        let ready = state.room() + state.shelf.blank();
        ready < self.stock(&state) || state.shelf.dirty() >= self.sizes.window
    }

    /// Writes back every dirty page and waits for all transfers. Every page on the shelf is equal
    /// to its slot then, unless pages are taken out meanwhile.
    pub fn flush(&self, hand: &mut Hand) {
        loop {
            self.post_write(hand);
            let waited = self.wait_flights(hand);
            let state = self.state();
            if state.shelf.dirty() == 0 && state.flights.is_idle() {
                return;
            }
            drop(state);
            if !waited {
                self.memory.pause();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::model;

    /// Pages that the program does not need leave local memory, however many WRITEs that takes.
    #[test]
    fn pages_that_are_taken_out_are_written_and_reclaimed() {
        for count in [1, 48, 64, 65, 800] {
            let pages = model::resident_pages(count);
            pages.take_out_range(&mut Hand::default(), 0..count);
            assert_eq!(pages.present(), 0, "of {count} pages");
            pages.check_quiet(true);
        }
    }

    /// WRITEs that are in flight already do not keep pages in local memory.
    #[test]
    fn pages_are_taken_out_while_no_write_can_start() {
        let pages = model::resident_pages(64);
        let mut hand = Hand::default();
        let written = pages.sizes.writes * pages.sizes.window;
        assert_eq!(pages.take_out(&mut hand, written), TakenOut::Pages(written));
        while pages.post_write(&mut hand) > 0 {}
        assert_eq!(pages.state().flights.writing(), written);
        pages.take_out_range(&mut hand, 0..64);
        assert_eq!(pages.present(), 0);
        pages.check_quiet(true);
    }
}
