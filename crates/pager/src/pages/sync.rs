//! The synchronous path: from a fault to a mapped page.
//!
//! The handler maps the page and wakes the thread before it does any other work. A fault waits for
//! a WRITE only if no position is blank, none is clean, and no page can be taken out clean.

use crate::backing;
use crate::config::Paths;
use crate::memory::{Memory, Position, Stop};
use crate::page_table::{Entry, PageId, State as PageState};
use crate::pages::flight::Late;
use crate::pages::overrun::KEPT;
use crate::pages::{Hand, Pages, State, is_recent};
use crate::patience::Patience;
use crate::policy::{Policy, Run};
use crate::shelf::{Record, Use};
use crate::slots::SlotId;
use crate::stats::Counter;
use crate::stream::{Advice, Fault, Found, Plan};
use crate::sys::PAGE_BYTES;

/// Pages of zeros that the first touch of a block maps together.
const BLOCK_PAGES: u32 = 16;

/// A fault of the program.
#[derive(Clone, Debug)]
pub struct Request {
    /// The page that the program touched.
    pub page: PageId,
    /// The address of the page.
    pub address: usize,
    /// Id of the thread.
    pub thread: u32,
    /// True if the access was a write.
    pub write: bool,
    /// The pages of the region around `page`: no page outside of them is prefetched.
    pub bounds: std::ops::Range<u32>,
    /// The program's advice for the range.
    pub advice: Advice,
    /// True if the page must be served beyond the bound. The thread is forking then, and no page
    /// can be taken out until the fork is over.
    pub over_limit: bool,
    /// True if no other page is mapped or read with this one: a trace of the faults must show the
    /// accesses to the others.
    pub alone: bool,
}

/// Result of one attempt to serve a fault.
enum Attempt {
    /// The fault is served: the number of pages that are mapped now. 0 if the page was mapped
    /// already, or if another thread will wake the faulting thread.
    Served(u32),
    /// The page's state has changed meanwhile, and the handler tries again.
    Again,
    /// The kernel changes no page now, or the thread's mapping has changed: the thread must fault
    /// again.
    Refault,
}

impl<M: Memory> Pages<M> {
    /// Serves a fault. Returns the number of pages that are mapped now.
    pub fn fault(&self, hand: &mut Hand, request: &Request) -> u32 {
        let page = request.page;
        let mut plan = None;
        hand.patience = Patience::default();
        loop {
            let seen = self.table.load(page);
            let has_room = !self.needs_blank(seen, request)
                || self.make_room(hand, request.over_limit)
                || self.make_granted_room(hand);
            if !has_room {
                plan.iter().for_each(|plan| self.cancel(plan));
                self.refuse(page);
                return 0;
            }
            let Some(entry) = self.table.lock_or_wait(page) else {
                plan.iter().for_each(|plan| self.cancel(plan));
                return 0;
            };
            let attempt = match entry.state() {
                _ if !self.memory.is_at(page, request.address) => {
                    self.settle(page, entry);
                    Attempt::Refault
                }
                PageState::Resident => self.spurious(request, entry),
                PageState::Absent => self.first_touch(hand, request, &mut plan),
                PageState::Remote => self.fetch(hand, request, entry, &mut plan),
                PageState::Shelved => self.restore(hand, request, entry, &mut plan),
            };
            match attempt {
                Attempt::Served(pages) => {
                    if let Some(plan) = plan {
                        self.prefetch(hand, &plan);
                    }
                    return pages;
                }
                Attempt::Again => {}
                Attempt::Refault => {
                    self.memory.wake(page, 1);
                    if let Some(plan) = plan {
                        self.cancel(&plan);
                    }
                    return 0;
                }
            }
        }
    }

    /// Returns true if serving a page needs a blank position that the hand does not have yet.
    fn needs_blank(&self, seen: Entry, request: &Request) -> bool {
        match seen.state() {
            PageState::Remote => true,
            PageState::Absent if request.over_limit => false,
            PageState::Absent => {
                let mut state = self.state();
                self.extend(&mut state);
                state.room() == 0
            }
            PageState::Resident | PageState::Shelved => false,
        }
    }

    /// Makes sure that this thread's hand has a blank position, as [`Pages::make_blank`] does.
    pub(super) fn make_room(&self, hand: &mut Hand, over_limit: bool) -> bool {
        let is_direct = self.paths == Paths::Linux && !over_limit;
        if !is_direct && self.find_blank(hand) {
            return true;
        }
        let start = self.memory.now_ns();
        if is_direct {
            self.reclaim_directly(hand);
        }
        let made = self.make_blank(hand, over_limit);
        self.stats.add(Counter::FaultEvictNs, self.memory.now_ns() - start);
        made
    }

    /// Serves a fault on a page that the table has as resident. Either another fault has mapped the
    /// page meanwhile, or the program dropped it by a raw system call, and its content is zeros
    /// now.
    fn spurious(&self, request: &Request, entry: Entry) -> Attempt {
        let _ = self.memory.put_zeros(request.page, 1, request.write);
        self.settle(request.page, entry);
        self.memory.wake(request.page, 1);
        Attempt::Served(0)
    }

    /// Maps zeros at an absent page, which is BUSY, and at absent pages behind it.
    fn first_touch(&self, hand: &mut Hand, request: &Request, plan: &mut Option<Plan>) -> Attempt {
        let page = request.page;
        let mut guard = self.state();
        let state = &mut *guard;
        let map = plan.get_or_insert_with(|| request.plan(state, Found::Absent)).map;
        let left = request.bounds.end.saturating_sub(page.0).max(1);
        let room = state.room();
        let plenty = room > state.limit / 4;
        let block = if plenty && !request.alone { BLOCK_PAGES - page.0 % BLOCK_PAGES } else { 1 };
        let room = room.min(map.max(block)).min(left).max(u32::from(request.over_limit));
        if room > 0 {
            // These pages count as present from now on.
            state.resident += room;
            drop(guard);
            return self.zeros_in_room(hand, request, room);
        }
        let blanks = match state.shelf.take_blank(map.min(BLOCK_PAGES).min(left)) {
            Some(blanks) => Some(blanks),
            None => hand.blank.take().map(|blank| (blank, 1)),
        };
        drop(guard);
        match blanks {
            Some((first, count)) => self.zeros_from_shelf(hand, request, first, count),
            None => {
                self.settle(page, Entry::ABSENT);
                Attempt::Again
            }
        }
    }

    /// Locks the absent pages behind the page of the request, which is BUSY. Returns the number of
    /// BUSY pages, at most `max`.
    fn lock_absent_behind(&self, request: &Request, max: u32) -> u32 {
        let page = request.page.0;
        let absent = |entry: Entry| entry.state() == PageState::Absent;
        let more = (1..max).take_while(|at| {
            let next = PageId(page + at);
            (next.0 as usize) < self.table.len() && self.table.try_lock(next, absent).is_some()
        });
        1 + more.count() as u32
    }

    fn zeros_in_room(&self, hand: &mut Hand, request: &Request, room: u32) -> Attempt {
        let count = self.lock_absent_behind(request, room);
        let done = self.memory.put_zeros(request.page, count, request.write);
        self.state().resident -= room - done.pages;
        self.settle_zeros(hand, request.page, count, done.pages, done.stop)
    }

    fn zeros_from_shelf(
        &self,
        hand: &mut Hand,
        request: &Request,
        first: Position,
        blanks: u32,
    ) -> Attempt {
        let count = self.lock_absent_behind(request, blanks);
        for at in 0..count {
            // SAFETY: the position has memory, and it is reserved by this thread.
            unsafe { self.memory.position(first.plus(at)).write_bytes(0, PAGE_BYTES) };
        }
        let done = self.memory.put_in(first, request.page, count);
        {
            let mut state = self.state();
            state.resident += done.pages;
            for at in 0..blanks {
                let used = if at < done.pages { Use::Empty } else { Use::Blank };
                state.shelf.set(first.plus(at), used);
            }
        }
        self.settle_zeros(hand, request.page, count, done.pages, done.stop)
    }

    /// Stores the entries of `count` BUSY pages, of which the first `mapped` are mapped.
    fn settle_zeros(
        &self,
        hand: &mut Hand,
        first: PageId,
        count: u32,
        mapped: u32,
        stop: Option<Stop>,
    ) -> Attempt {
        let mut state = self.state();
        hand.woken.clear();
        for at in 0..count {
            let page = PageId(first.0 + at);
            let entry = if at < mapped { Entry::resident(None) } else { Entry::ABSENT };
            if self.table.unlock(page, entry) {
                hand.woken.push(page);
            }
        }
        state.note_arrived(first, mapped);
        drop(state);
        hand.woken.drain(..).for_each(|page| self.memory.wake(page, 1));
        self.stats.add(Counter::PagesZeroed, u64::from(mapped));
        debug_assert!(mapped == count || stop.is_some());
        if mapped > 0 { Attempt::Served(mapped) } else { Attempt::Refault }
    }

    /// Brings a remote page, which is BUSY, to the shelf.
    fn fetch(
        &self,
        hand: &mut Hand,
        request: &Request,
        entry: Entry,
        plan: &mut Option<Plan>,
    ) -> Attempt {
        let page = request.page;
        let slot = SlotId(entry.slot().expect("a remote page has a slot"));
        let Some(position) = hand.blank.take() else {
            self.settle(page, entry);
            return Attempt::Again;
        };
        if plan.is_none() {
            *plan = Some(request.plan(&mut self.state(), Found::Remote));
        }
        if let Some(word) = slot.as_word() {
            return self.map_word(page, slot, word, position);
        }
        let start = self.memory.now_ns();
        match self.post_demand(hand, page, slot, position) {
            Some(flight) => {
                if self.paths == Paths::Linux
                    && let Some(plan) = plan
                {
                    self.prefetch(hand, plan);
                    plan.issue = Default::default();
                }
                self.wait_flight(hand, flight);
                self.stats.add(Counter::FaultReadNs, self.memory.now_ns() - start);
            }
            None => {
                hand.blank = Some(position);
                self.settle(page, entry);
                // All flights may belong to other handlers.
                if !self.wait_flights(hand) {
                    self.wait_for_others(hand, KEPT);
                }
            }
        }
        Attempt::Again
    }

    /// Maps a page that repeats one word.
    fn map_word(&self, page: PageId, slot: SlotId, word: u64, position: Position) -> Attempt {
        // SAFETY: the position has memory of a page, and it is reserved by this thread.
        unsafe { backing::fill(self.memory.position(position), word) };
        let done = self.memory.put_in(position, page, 1);
        let mut state = self.state();
        state.resident += done.pages;
        state.shelf.set(position, if done.pages == 1 { Use::Empty } else { Use::Blank });
        if done.pages == 1 {
            let (now, stamp) = (state.stamp(), self.table.peek(page).evicted());
            let recent = is_recent(now, stamp);
            state.returns.note(now, stamp, 1);
            state.policy.refetched(Run { start: page.0, pages: 1 }, recent);
        }
        drop(state);
        self.stats.add(Counter::PagesWordMapped, u64::from(done.pages));
        match done.pages {
            1 => {
                // The entry keeps the slot: until the page is taken out, a forked child's snapshot
                // finds the content there.
                self.settle(page, Entry::resident(Some(slot.0)));
                Attempt::Served(1)
            }
            _ => {
                self.settle(page, Entry::remote(slot.0));
                Attempt::Refault
            }
        }
    }

    /// Maps a page of the shelf, which is BUSY, and the pages of the same window next to it.
    fn restore(
        &self,
        hand: &mut Hand,
        request: &Request,
        entry: Entry,
        plan: &mut Option<Plan>,
    ) -> Attempt {
        let page = request.page;
        let position = Position(entry.position().expect("a shelved page has a position"));
        let mut guard = self.state();
        let state = &mut *guard;
        let window = state.shelf.record(position).window;
        let flight = match state.shelf.used(position) {
            Use::Fetching(flight, _) => Some(flight),
            Use::Writing(flight, _) if !state.flights.is_copied(flight) => Some(flight),
            _ => None,
        };
        if let Some(flight) = flight {
            let found = window.map_or(Found::Evicted, Found::Late);
            plan.get_or_insert_with(|| request.plan(state, found));
            let late = state.flights.need(flight);
            drop(guard);
            self.settle(page, entry);
            return match late {
                Late::Take(flight) => {
                    let start = self.memory.now_ns();
                    self.wait_flight(hand, flight);
                    self.stats.add(Counter::FaultReadNs, self.memory.now_ns() - start);
                    Attempt::Again
                }
                Late::Waits => Attempt::Served(0),
            };
        }
        let found = window.map_or(Found::Evicted, Found::Ready);
        let plan = plan.get_or_insert_with(|| request.plan(state, found));
        let (first, from, count) = self.lock_beside(hand, state, (page, entry), position, plan);
        drop(guard);
        let done = self.memory.put_in(from, first, count);
        self.settle_restored(hand, done.pages);
        // With a backward run, the page of the fault is the last one.
        if page.0 < first.0 + done.pages { Attempt::Served(done.pages) } else { Attempt::Refault }
    }

    /// Locks the pages of the same window beside a page that is BUSY. Returns the first page, its
    /// position, and the number of pages; `hand.run` has their entries.
    fn lock_beside(
        &self,
        hand: &mut Hand,
        state: &State,
        (page, entry): (PageId, Entry),
        position: Position,
        plan: &Plan,
    ) -> (PageId, Position, u32) {
        let window = state.shelf.record(position).window;
        hand.run.clear();
        hand.run.push((page, entry));
        let mut lock = |page: Option<u32>, position: Option<u32>| {
            let (Some(page), Some(position)) = (page, position) else { return false };
            if position >= state.shelf.len() {
                return false;
            }
            let record = state.shelf.record(Position(position));
            let is_here = |entry: Entry| entry.position() == Some(position);
            let ready = matches!(state.shelf.used(Position(position)), Use::Clean | Use::Dirty)
                && record.page == PageId(page)
                && record.window == window;
            match ready.then(|| self.table.try_lock(PageId(page), is_here)).flatten() {
                Some(entry) => {
                    hand.run.push((PageId(page), entry));
                    true
                }
                None => false,
            }
        };
        let step = |from: u32, by: u32| {
            if plan.backwards { from.checked_sub(by) } else { from.checked_add(by) }
        };
        let mut count = 1;
        while count < plan.map && lock(step(page.0, count), step(position.0, count)) {
            count += 1;
        }
        if plan.backwards {
            hand.run.reverse();
            (PageId(page.0 - (count - 1)), Position(position.0 - (count - 1)), count)
        } else {
            (page, position, count)
        }
    }

    /// Stores the entries of the BUSY pages in `hand.run`, of which the first `mapped` are mapped.
    fn settle_restored(&self, hand: &mut Hand, mapped: u32) {
        let mut guard = self.state();
        let state = &mut *guard;
        self.note_restored(state, &hand.run[..mapped as usize]);
        hand.woken.clear();
        let mut restored = 0;
        for (at, &(page, entry)) in hand.run.iter().enumerate() {
            let entry = if at < mapped as usize {
                let position = Position(entry.position().expect("a shelved page has a position"));
                let Record { slot, was_read, .. } = *state.shelf.record(position);
                restored += u64::from(!was_read);
                let slot = match state.shelf.used(position) {
                    Use::Writing(flight, at) => {
                        state.flights.note_mapped(flight, at);
                        None
                    }
                    _ => slot,
                };
                state.shelf.set(position, Use::Empty);
                Entry::resident(slot.map(|slot| slot.0))
            } else {
                entry
            };
            if self.table.unlock(page, entry) {
                hand.woken.push(page);
            }
        }
        state.resident += mapped;
        drop(guard);
        hand.woken.drain(..).for_each(|page| self.memory.wake(page, 1));
        self.stats.add(Counter::PagesRestored, restored);
    }

    /// Tells the policy which pages of a run that is mapped now were still on the shelf since they
    /// were taken out, and which were read.
    fn note_restored(&self, state: &mut State, mapped: &[(PageId, Entry)]) {
        let now = state.stamp();
        let State { shelf, policy, returns, .. } = state;
        // For a page that was read, whether it had been taken out a short time before.
        let read = |entry: Entry| {
            let position = Position(entry.position().expect("a shelved page has a position"));
            shelf.record(position).was_read.then(|| is_recent(now, entry.evicted()))
        };
        for part in mapped.chunk_by(|(_, a), (_, b)| read(*a) == read(*b)) {
            let run = Run { start: part[0].0.0, pages: part.len() as u32 };
            match read(part[0].1) {
                Some(recent) => {
                    part.iter().for_each(|(_, entry)| returns.note(now, entry.evicted(), 1));
                    policy.refetched(run, recent);
                }
                None => policy.restored(run),
            }
        }
    }

    /// Starts the windows of a plan. The handler of [`Paths::Linux`] waits for them.
    fn prefetch(&self, hand: &mut Hand, plan: &Plan) {
        for window in plan.issue.iter().flatten() {
            self.post_window(hand, window);
            if self.paths == Paths::Linux {
                self.wait_flights(hand);
            }
        }
    }

    /// Reports to the prefetcher that the windows of a plan are not read.
    fn cancel(&self, plan: &Plan) {
        let mut state = self.state();
        for window in plan.issue.iter().flatten() {
            state.streams.arrived(window.id, 0);
        }
    }
}

impl Request {
    fn plan(&self, state: &mut State, found: Found) -> Plan {
        let plan = state.streams.fault(&Fault {
            thread: self.thread,
            page: self.page,
            bounds: self.bounds.clone(),
            advice: if self.alone { Advice::Random } else { self.advice },
            found,
        });
        if let Some(left) = &plan.behind {
            let left = Run { start: left.start, pages: left.end - left.start };
            match self.advice {
                Advice::Sequential => state.policy.unneeded(left),
                _ => state.policy.left_behind(left),
            }
        }
        plan
    }
}
