//! Transfers in flight: READs of windows and of single pages, and WRITEs of batches.
//!
//! A flight owns a row of frames and the positions of its entries. Its phases:
//!
//! | phase | meaning |
//! | --- | --- |
//! | Free | no transfer |
//! | Owned | one thread posts the transfer or ends it, outside of the lock |
//! | Posted | the transfer is in flight; any thread may take the flight over and end it |
//!
//! The program may drop a page of a flight at any time, and a fault may map a page that is being
//! written. Neither thread waits for the transfer: each marks the entry with its fate. The end of
//! the flight then frees the slot, and also the position of a dropped page.

use crate::memory::{Memory, Position};
use crate::page_table::{Entry, PageId, State as PageState};
use crate::pages::sizes::{DEMAND_FRAMES, Sizes};
use crate::pages::{Hand, Pages, State};
use crate::shelf::{Record, Use};
use crate::slots::SlotId;
use crate::stats::Counter;
use crate::stream::{Window, WindowId};
use crate::transport::FrameId;
use crate::transport::{Direction, Lane, Ticket};

/// A window's frames are at most this part of the limit when the window is opened.
const WINDOW_SHARE: u32 = 8;

/// Index of a flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlightIndex(pub u8);

/// Treatment of an entry at the end of its flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// The position becomes clean.
    Land,
    /// The program dropped the page: the position becomes blank, and the slot is freed.
    Dropped,
    /// A fault mapped the page while it was written: the slot is freed.
    Mapped,
}

#[derive(Clone, Copy, Debug)]
struct FlightEntry {
    position: Position,
    slot: SlotId,
    fate: Fate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Free,
    Owned,
    Posted,
}

/// One transfer of up to [`Sizes::window`] pages.
struct Flight {
    phase: Phase,
    direction: Direction,
    first_frame: FrameId,
    entries: Vec<FlightEntry>,
    window: Option<WindowId>,
    ticket: Option<Ticket>,
    /// Threads wait for pages of this flight, which another thread owns.
    waited: bool,
}

/// All flights: single pages first, then windows, then write-back batches.
pub struct Flights {
    flights: Vec<Flight>,
    windows: std::ops::Range<usize>,
    /// Windows whose frames count in the bound, the first ones. A process that shares the bound of
    /// its run opens a window when it needs it.
    opened: usize,
    /// The limit was lowered for one more window, which can be opened once the present pages are
    /// within the limit.
    is_opening: bool,
}

/// Next step of a thread that needs a page in flight.
pub enum Late {
    /// The thread has taken the flight over, and must end it.
    Take(FlightIndex),
    /// Another thread owns the flight, and wakes the threads that wait for the page.
    Waits,
}

impl Flights {
    /// Free flights.
    pub fn new(sizes: &Sizes) -> Self {
        let demand = DEMAND_FRAMES as usize;
        let windows = demand..demand + sizes.windows as usize;
        let flight = |index: usize| {
            let (first_frame, pages) = if index < demand {
                (sizes.first_demand_frame() + index as u32, 1)
            } else {
                let row = (index - demand) as u32 * sizes.window;
                (sizes.first_window_frame() + row, sizes.window)
            };
            Flight {
                phase: Phase::Free,
                direction: Direction::Read,
                first_frame: FrameId(first_frame),
                entries: Vec::with_capacity(pages as usize),
                window: None,
                ticket: None,
                waited: false,
            }
        };
        let all = windows.end + sizes.writes as usize;
        let opened = windows.len();
        Self { flights: (0..all).map(flight).collect(), windows, opened, is_opening: false }
    }

    fn get(&mut self, index: FlightIndex) -> &mut Flight {
        &mut self.flights[index.0 as usize]
    }

    fn take_free(&mut self, among: std::ops::Range<usize>) -> Option<FlightIndex> {
        let index = among.clone().find(|&index| self.flights[index].phase == Phase::Free)?;
        let flight = &mut self.flights[index];
        flight.phase = Phase::Owned;
        flight.entries.clear();
        flight.window = None;
        flight.waited = false;
        Some(FlightIndex(index as u8))
    }

    /// Takes a free flight for a single page.
    fn take_demand(&mut self) -> Option<FlightIndex> {
        self.take_free(0..self.windows.start)
    }

    /// Takes a free flight for a window among the opened ones.
    fn take_window(&mut self) -> Option<FlightIndex> {
        self.take_free(self.windows.start..self.windows.start + self.opened)
    }

    /// Returns the number of windows whose frames count in the bound.
    #[cfg(test)]
    pub(crate) fn opened_windows(&self) -> u32 {
        self.opened as u32
    }

    /// Closes all windows, before any is used.
    pub fn close_windows(&mut self) {
        self.opened = 0;
    }

    /// Takes a free flight for a write-back batch.
    fn take_write(&mut self) -> Option<FlightIndex> {
        self.take_free(self.windows.end..self.flights.len())
    }

    /// Returns true if a flight for a WRITE is free.
    fn can_write(&self) -> bool {
        self.flights[self.windows.end..].iter().any(|flight| flight.phase == Phase::Free)
    }

    /// Returns the number of pages that are being written.
    pub fn writing(&self) -> u32 {
        let writes = &self.flights[self.windows.end..];
        writes.iter().filter(|f| f.phase != Phase::Free).map(|f| f.entries.len() as u32).sum()
    }

    /// Returns true if no transfer is in flight.
    pub fn is_idle(&self) -> bool {
        self.flights.iter().all(|flight| flight.phase == Phase::Free)
    }

    /// Takes a posted flight over for a thread that needs one of its pages. A flight with an owner
    /// is marked instead, so that the owner wakes the threads that wait for its pages.
    pub fn need(&mut self, index: FlightIndex) -> Late {
        let flight = self.get(index);
        match flight.phase {
            Phase::Posted => {
                flight.phase = Phase::Owned;
                Late::Take(index)
            }
            Phase::Owned | Phase::Free => {
                flight.waited = true;
                Late::Waits
            }
        }
    }

    /// Takes over the posted write-back batch with the lowest index.
    fn need_write(&mut self) -> Option<FlightIndex> {
        let writes = self.windows.end..self.flights.len();
        let index = writes.into_iter().find(|&i| self.flights[i].phase == Phase::Posted)?;
        self.flights[index].phase = Phase::Owned;
        Some(FlightIndex(index as u8))
    }

    /// Takes over any posted flight.
    fn need_any(&mut self) -> Option<FlightIndex> {
        let index = self.flights.iter().position(|flight| flight.phase == Phase::Posted)?;
        self.flights[index].phase = Phase::Owned;
        Some(FlightIndex(index as u8))
    }

    /// Returns true if a page that is being written can be mapped now: its bytes are in a frame.
    pub fn is_copied(&mut self, index: FlightIndex) -> bool {
        self.get(index).phase == Phase::Posted
    }

    /// Notes that a fault maps a page that is being written.
    pub fn note_mapped(&mut self, index: FlightIndex, entry: u8) {
        self.get(index).entries[entry as usize].fate = Fate::Mapped;
    }

    /// Notes that the program dropped a page in flight. Returns true if threads may wait for it.
    #[must_use]
    pub fn note_dropped(&mut self, index: FlightIndex, entry: u8) -> bool {
        let flight = self.get(index);
        flight.entries[entry as usize].fate = Fate::Dropped;
        flight.waited
    }
}

impl<M: Memory> Pages<M> {
    /// Starts to read a page to a position, and clears BUSY. The calling thread has set the page
    /// BUSY and has reserved the position. Returns `None` if no frame is free; then nothing has
    /// changed.
    pub(super) fn post_demand(
        &self,
        hand: &mut Hand,
        page: PageId,
        slot: SlotId,
        position: Position,
    ) -> Option<FlightIndex> {
        let mut state = self.state();
        let index = state.flights.take_demand()?;
        self.add_fetch(&mut state, index, page, slot, position, None);
        let flight = state.flights.get(index);
        flight.direction = Direction::Read;
        hand.pairs.clear();
        let frame = flight.first_frame;
        hand.pairs.push((self.slots().source(slot), frame));
        drop(state);
        let ticket = self.backing.post(Lane::Demand, Direction::Read, &hand.pairs);
        self.state().flights.get(index).ticket = Some(ticket);
        Some(index)
    }

    /// Adds a page that is BUSY by this thread to a flight of READs, and clears BUSY.
    fn add_fetch(
        &self,
        state: &mut State,
        index: FlightIndex,
        page: PageId,
        slot: SlotId,
        position: Position,
        window: Option<WindowId>,
    ) {
        let flight = state.flights.get(index);
        let entry = flight.entries.len() as u8;
        flight.entries.push(FlightEntry { position, slot, fate: Fate::Land });
        let record = Record { page, slot: Some(slot), print: 0, window, was_read: true };
        state.shelf.hold(position, Use::Fetching(index, entry), record);
        // A thread that found the page BUSY waits for this flight.
        if self.table.unlock(page, Entry::shelved(position.0)) {
            state.flights.get(index).waited = true;
        }
    }

    /// Starts the READs of a prefetch window. Pages that are not remote are skipped. Returns the
    /// number of pages that were posted: 0 without a free flight or a blank position.
    pub(super) fn post_window(&self, hand: &mut Hand, window: &Window) -> u32 {
        hand.pairs.clear();
        let mut guard = self.state();
        let state = &mut *guard;
        self.open_window(state);
        let taken = state.flights.take_window();
        if taken.is_none() {
            self.want_window(state);
        }
        let posted = taken.inspect(|&index| {
            self.gather_window(state, index, window);
            let flight = state.flights.get(index);
            flight.direction = Direction::Read;
            flight.window = Some(window.id);
            for (at, entry) in flight.entries.iter().enumerate() {
                let frame = FrameId(flight.first_frame.0 + at as u32);
                hand.pairs.push((self.slots().source(entry.slot), frame));
            }
            if hand.pairs.is_empty() {
                flight.phase = Phase::Free;
            }
        });
        let pages = hand.pairs.len() as u32;
        let Some(index) = posted.filter(|_| pages > 0) else {
            state.streams.arrived(window.id, 0);
            return 0;
        };
        drop(guard);
        let ticket = self.backing.post(Lane::Prefetch, Direction::Read, &hand.pairs);
        self.stats.add(Counter::PagesReadAhead, u64::from(pages));
        self.set_posted(hand, index, ticket);
        pages
    }

    /// Lowers the limit for one more window, if that leaves enough.
    fn want_window(&self, state: &mut State) {
        let flights = &mut state.flights;
        let is_closed = flights.opened < flights.windows.len() && !flights.is_opening;
        if is_closed && state.limit >= WINDOW_SHARE * self.sizes.window {
            flights.is_opening = true;
            state.limit -= self.sizes.window;
        }
    }

    /// Opens the window for which the limit was lowered, once the pages are gone.
    pub(super) fn open_window(&self, state: &mut State) {
        if state.flights.is_opening && state.present() <= state.limit {
            state.flights.is_opening = false;
            state.flights.opened += 1;
        }
    }

    /// Starts to read remote pages to the shelf for compaction, as far as blank positions are not
    /// needed for faults. Pages that have left their slots are skipped. The flight belongs to this
    /// thread. Returns the number of pages, or `None` without a free flight or a page to read.
    pub(super) fn post_moves(
        &self,
        hand: &mut Hand,
        pages: &[(PageId, SlotId)],
    ) -> Option<(FlightIndex, u32)> {
        hand.pairs.clear();
        let mut guard = self.state();
        let state = &mut *guard;
        let room = state.shelf.blank().saturating_sub(self.sizes.stock / 2) as usize;
        if room == 0 {
            return None;
        }
        self.open_window(state);
        let index = match state.flights.take_window() {
            Some(index) => index,
            // A program that reads nothing ahead has opened no window.
            None => {
                self.want_window(state);
                self.open_window(state);
                state.flights.take_window()?
            }
        };
        let flight = state.flights.get(index);
        flight.direction = Direction::Read;
        let first_frame = flight.first_frame;
        for &(page, slot) in pages {
            if hand.pairs.len() == room {
                break;
            }
            let is_there =
                |e: Entry| e.state() == PageState::Remote && e.slot().map(SlotId) == Some(slot);
            if self.table.try_lock(page, is_there).is_none() {
                continue;
            }
            let (position, _) = state.shelf.take_blank(1).expect("counted above");
            let frame = FrameId(first_frame.0 + hand.pairs.len() as u32);
            hand.pairs.push((self.slots().source(slot), frame));
            self.add_fetch(state, index, page, slot, position, None);
        }
        let count = hand.pairs.len() as u32;
        if count == 0 {
            state.flights.get(index).phase = Phase::Free;
            return None;
        }
        drop(guard);
        let ticket = self.backing.post(Lane::Prefetch, Direction::Read, &hand.pairs);
        self.state().flights.get(index).ticket = Some(ticket);
        Some((index, count))
    }

    /// Lets any thread end a flight from now on, and wakes the threads that need its pages.
    fn set_posted(&self, hand: &mut Hand, index: FlightIndex, ticket: Ticket) {
        let mut guard = self.state();
        let State { flights, shelf, .. } = &mut *guard;
        let flight = flights.get(index);
        flight.ticket = Some(ticket);
        flight.phase = Phase::Posted;
        if !std::mem::take(&mut flight.waited) {
            return;
        }
        hand.woken.clear();
        let land = flight.entries.iter().filter(|entry| entry.fate == Fate::Land);
        hand.woken.extend(land.map(|entry| shelf.record(entry.position).page));
        drop(guard);
        hand.woken.drain(..).for_each(|page| self.memory.wake(page, 1));
    }

    /// Reserves blank positions for the remote pages of a window, lowest page first, so that
    /// consecutive pages get consecutive positions.
    fn gather_window(&self, state: &mut State, index: FlightIndex, window: &Window) {
        let mut blanks: Option<(Position, u32)> = None;
        // If too few positions are blank, only the pages that the stream reaches first are read.
        let mut left = window.pages.min(self.sizes.window).min(state.shelf.blank());
        let count = left;
        let ascending = (0..count).map(|at| if window.step < 0 { count - 1 - at } else { at });
        let page = |at: u32| window.first.0.wrapping_add_signed(window.step * at as i32);
        for page in ascending.map(|at| PageId(page(at))) {
            if blanks.is_none_or(|(_, count)| count == 0) {
                blanks = state.shelf.take_blank(left);
            }
            let Some((position, count)) = blanks else { break };
            left -= 1;
            if page.0 as usize >= self.table.len() {
                continue;
            }
            let Some(entry) = self.table.try_lock(page, |e| e.state() == PageState::Remote) else {
                continue;
            };
            let slot = SlotId(entry.slot().expect("a remote page has a slot"));
            self.add_fetch(state, index, page, slot, position, Some(window.id));
            blanks = Some((position.plus(1), count - 1));
        }
        if let Some((position, count)) = blanks {
            (0..count).for_each(|at| state.shelf.set(position.plus(at), Use::Blank));
        }
    }

    /// Waits for a flight that this thread owns, and ends it.
    pub(super) fn wait_flight(&self, hand: &mut Hand, index: FlightIndex) {
        let ticket = self.state().flights.get(index).ticket.take();
        if let Some(ticket) = ticket {
            self.backing.wait(ticket);
        }
        self.end_owned(hand, index);
    }

    /// Waits for a write-back batch and ends it. Returns false if every batch in flight has another
    /// owner, or none is in flight.
    pub(super) fn wait_write(&self, hand: &mut Hand) -> bool {
        let index = self.state().flights.need_write();
        index.map(|index| self.wait_flight(hand, index)).is_some()
    }

    /// Waits for all flights that no other thread owns. Returns true if there was one.
    pub fn wait_flights(&self, hand: &mut Hand) -> bool {
        let mut any = false;
        loop {
            let index = self.state().flights.need_any();
            let Some(index) = index else { return any };
            self.wait_flight(hand, index);
            any = true;
        }
    }

    /// Ends the flights whose transfers are complete, without waiting.
    pub fn reap(&self, hand: &mut Hand) {
        loop {
            let mut state = self.state();
            let complete = state.flights.flights.iter_mut().position(|flight| {
                flight.phase == Phase::Posted
                    && self.backing.poll(flight.ticket.as_mut().expect("posted with a ticket"))
            });
            let Some(index) = complete else { return };
            let flight = &mut state.flights.flights[index];
            flight.phase = Phase::Owned;
            flight.ticket = None;
            drop(state);
            self.end_owned(hand, FlightIndex(index as u8));
        }
    }

    /// Ends a flight whose transfer is complete and which this thread owns.
    fn end_owned(&self, hand: &mut Hand, index: FlightIndex) {
        let mut guard = self.state();
        let State { flights, shelf, .. } = &mut *guard;
        let flight = flights.get(index);
        let (direction, first_frame) = (flight.direction, flight.first_frame);
        if direction == Direction::Read {
            hand.landing.clear();
            hand.landing.extend(
                flight
                    .entries
                    .iter()
                    .map(|entry| (shelf.record(entry.position).page, entry.position, entry.slot)),
            );
            drop(guard);
            // The entries of an owned flight keep their positions and their slots.
            for (at, &(page, position, slot)) in hand.landing.iter().enumerate() {
                let frame = FrameId(first_frame.0 + at as u32);
                // SAFETY: the frame and the position belong to this flight, which this thread owns,
                // and both have memory of a page.
                unsafe { self.take_from_frame(page, slot, frame, self.memory.position(position)) }
            }
            guard = self.state();
        }
        let waited = self.land(&mut guard, hand, index);
        drop(guard);
        if waited {
            for page in hand.woken.drain(..) {
                self.memory.wake(page, 1);
            }
        }
        self.note_room();
    }

    /// Gives the entries of a flight their new uses, and frees the flight. Returns true if threads
    /// wait for the pages in `hand.woken`.
    fn land(&self, state: &mut State, hand: &mut Hand, index: FlightIndex) -> bool {
        // A forked child finds the pages that are not resident in their slots.
        let forks = self.is_standstill();
        let flight = state.flights.get(index);
        let entries = std::mem::take(&mut flight.entries);
        let (waited, window, direction) = (flight.waited, flight.window, flight.direction);
        flight.phase = Phase::Free;
        hand.woken.clear();
        let mut wasted = 0;
        for entry in &entries {
            match entry.fate {
                Fate::Land => {
                    hand.woken.push(state.shelf.record(entry.position).page);
                    let is_read = direction == Direction::Read && !forks;
                    if is_read && self.slots().is_read_once(entry.slot) {
                        self.land_without_slot(state, entry);
                    } else {
                        state.shelf.set(entry.position, Use::Clean);
                    }
                }
                Fate::Dropped => {
                    wasted += u32::from(state.shelf.record(entry.position).window.is_some());
                    state.shelf.set(entry.position, Use::Blank);
                    self.free_slot(entry.slot);
                }
                Fate::Mapped => self.free_slot(entry.slot),
            }
        }
        let pages = entries.len() as u32;
        // The flight keeps the list, so that the next use allocates nothing.
        state.flights.get(index).entries = entries;
        match direction {
            Direction::Read => self.stats.add(Counter::PagesIn, u64::from(pages)),
            Direction::Write => self.stats.add(Counter::PagesOut, u64::from(pages)),
        }
        if let Some(window) = window {
            state.streams.arrived(window, pages);
            if wasted > 0 {
                state.streams.reclaimed(window, wasted);
            }
        }
        waited
    }

    /// Gives up the slot of a page that was read, so that no memory node sees a second READ of it.
    fn land_without_slot(&self, state: &mut State, entry: &FlightEntry) {
        let record = *state.shelf.record(entry.position);
        let print = self.slots().print(entry.slot).expect("a slot that was written has one");
        let record = Record { slot: None, print, ..record };
        state.shelf.hold(entry.position, Use::Dirty, record);
        self.free_slot(entry.slot);
    }

    /// Starts to write a batch of the oldest dirty positions to their slots. Returns the number of
    /// pages: 0 without a free flight or a dirty position.
    pub(super) fn post_write(&self, hand: &mut Hand) -> u32 {
        let new_slots = {
            let state = self.state();
            if !state.flights.can_write() {
                return 0;
            }
            let needs_slot = |position: &Position| {
                let slot = state.shelf.record(*position).slot;
                slot.is_none_or(|slot| self.slots().needs_another(slot))
            };
            state
                .shelf
                .dirty_positions()
                .take(self.sizes.window as usize)
                .filter(needs_slot)
                .count()
        };
        self.allocate_slots(hand, new_slots);
        let mut guard = self.state();
        let state = &mut *guard;
        let index = (state.shelf.dirty() > 0).then(|| state.flights.take_write()).flatten();
        let Some(index) = index else {
            self.give_back_slots(hand);
            return 0;
        };
        let first_frame = state.flights.get(index).first_frame;
        hand.pairs.clear();
        hand.landing.clear();
        for _ in 0..state.shelf.dirty() {
            if hand.landing.len() == self.sizes.window as usize {
                break;
            }
            let Some(position) = state.shelf.oldest_dirty() else { break };
            let record = *state.shelf.record(position);
            if self.table.load(record.page).is_busy() {
                // Another thread may be mapping the page: the position may be empty already.
                state.shelf.renew_dirty(position);
                continue;
            }
            let slot = match record.slot {
                Some(slot) if !self.slots().needs_another(slot) => slot,
                old => {
                    let Some(slot) = hand.slots.pop() else { break };
                    old.into_iter().for_each(|old| self.free_slot(old));
                    slot
                }
            };
            self.slots().set_print(slot, record.print);
            let at = hand.landing.len();
            let record = Record { slot: Some(slot), ..record };
            state.shelf.hold(position, Use::Writing(index, at as u8), record);
            let entry = FlightEntry { position, slot, fate: Fate::Land };
            state.flights.get(index).entries.push(entry);
            hand.landing.push((record.page, position, slot));
            let frame = FrameId(first_frame.0 + at as u32);
            hand.pairs.push((self.slots().source(slot), frame));
        }
        self.give_back_slots(hand);
        let flight = state.flights.get(index);
        if hand.landing.is_empty() {
            flight.phase = Phase::Free;
            return 0;
        }
        flight.direction = Direction::Write;
        drop(guard);
        for (&(_, position, slot), &(_, frame)) in hand.landing.iter().zip(&hand.pairs) {
            // SAFETY: the frame and the position belong to this flight, which this thread owns: no
            // fault maps a page of a flight that is not posted yet.
            unsafe { self.put_to_frame(slot, self.memory.position(position), frame) }
        }
        let ticket = self.backing.post(Lane::WriteBack, Direction::Write, &hand.pairs);
        let pages = hand.pairs.len() as u32;
        self.set_posted(hand, index, ticket);
        pages
    }

    /// Frees the slots of `hand.slots`, which no page or position names.
    fn give_back_slots(&self, hand: &mut Hand) {
        for slot in hand.slots.drain(..) {
            let emptied = self.slots().give_back(slot);
            self.note_emptied(emptied);
        }
    }

    /// Allocates slots for a batch into `hand.slots`, in reverse order, because the batch pops them
    /// from the end. A chunk is allocated outside of the lock.
    pub(super) fn allocate_slots(&self, hand: &mut Hand, count: usize) {
        if count == 0 {
            return;
        }
        self.backing.allocate_slots(|| self.slots(), count, &mut hand.slots);
        hand.slots.reverse();
        self.note_chunks();
    }
}
