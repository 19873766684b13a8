//! The shelf: the use of each position of the pager's own page memory.
//!
//! The shelf is SAMS's page manager ("Effective Page Eviction"): pages that were taken out of the
//! program's memory and pages that were prefetched wait here, ready to be mapped. [`Shelf`] records
//! the use of each position, and [`crate::memory`] moves the bytes. The caller's lock guards the
//! shelf.
//!
//! ```text
//!   Empty --populate--> Blank --take_blank--> Reserved --READ--> Fetching --> Clean
//!     ^                   ^                                                   |
//!     |                   +------------------ reclaim ------------------------+
//!     +---put_in--- Clean, Dirty, Writing
//!   Empty --take_empty--> Reserved --take_out--> Clean, Dirty, Blank
//!   Dirty --WRITE--> Writing --> Clean
//! ```
//!
//! Positions are allocated in runs, because the kernel moves a run of pages in little more time
//! than one page. A run lies within a *tray* of 64 positions, so that one word of a bitmap
//! describes it.

use crate::memory::Position;
use crate::page_table::PageId;
use crate::pages::FlightIndex;
use crate::slots::SlotId;
use crate::stream::WindowId;

/// Use of a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// No memory. No thread touches an empty position, because the kernel moves pages only to
    /// positions without memory.
    Empty,
    /// Memory of any content that no page uses.
    Blank,
    /// One thread works with the position outside of the lock; `filled` if there is memory.
    Reserved {
        /// True if the position has memory.
        filled: bool,
    },
    /// A READ of the record's page is in flight, as entry `1` of flight `0`.
    Fetching(FlightIndex, u8),
    /// Holds the record's page, equal to its slot.
    Clean,
    /// Holds the record's page, which differs from its slot or has none.
    Dirty,
    /// Holds the record's page while it is written to its slot, as entry `1` of flight `0`.
    Writing(FlightIndex, u8),
}

/// The page of a position. Valid for the uses that hold a page.
#[derive(Clone, Copy, Debug)]
pub struct Record {
    /// The page.
    pub page: PageId,
    /// Its slot. A clean page has one; a dirty page may have an old one.
    pub slot: Option<SlotId>,
    /// Fingerprint of a dirty page's content.
    pub print: u128,
    /// Window by which the page was prefetched, until the page is mapped.
    pub window: Option<WindowId>,
    /// True if the page was read from its slot, and not taken out of the program's memory.
    pub was_read: bool,
}

/// The record of no page.
pub const NO_RECORD: Record =
    Record { page: PageId(u32::MAX), slot: None, print: 0, window: None, was_read: false };

/// Index that ends a list.
const NONE: u32 = u32::MAX;

/// A list of positions in the order of their arrival, linked through [`Links`].
#[derive(Clone, Copy, Debug)]
struct List {
    first: u32,
    last: u32,
    len: u32,
}

const EMPTY_LIST: List = List { first: NONE, last: NONE, len: 0 };

#[derive(Clone, Copy, Debug)]
struct Links {
    before: u32,
    after: u32,
}

/// Uses and records of all positions.
pub struct Shelf {
    uses: Vec<Use>,
    records: Vec<Record>,
    links: Vec<Links>,
    /// Clean positions whose pages no window has read ahead.
    clean: List,
    /// Clean positions whose pages a window has read ahead, and which were not mapped since.
    ahead: List,
    dirty: List,
    empty: Bits,
    blank: Bits,
    /// Positions with memory.
    filled: u32,
}

impl Shelf {
    /// A shelf of empty positions; their number is rounded up to whole trays.
    pub fn new(positions: u32) -> Self {
        let positions = positions.next_multiple_of(64);
        let mut empty = Bits::new(positions);
        (0..positions).for_each(|index| empty.set(index, true));
        Self {
            uses: vec![Use::Empty; positions as usize],
            records: vec![NO_RECORD; positions as usize],
            links: vec![Links { before: NONE, after: NONE }; positions as usize],
            clean: EMPTY_LIST,
            ahead: EMPTY_LIST,
            dirty: EMPTY_LIST,
            empty,
            blank: Bits::new(positions),
            filled: 0,
        }
    }

    /// Returns the number of positions.
    pub fn len(&self) -> u32 {
        self.uses.len() as u32
    }

    /// Returns true if there is no position.
    pub fn is_empty(&self) -> bool {
        self.uses.is_empty()
    }

    /// Returns the number of positions with memory.
    pub fn filled(&self) -> u32 {
        self.filled
    }

    /// Returns the number of empty positions.
    pub fn empty(&self) -> u32 {
        self.empty.count
    }

    /// Returns the number of blank positions.
    pub fn blank(&self) -> u32 {
        self.blank.count
    }

    /// Returns the number of clean positions.
    pub fn clean(&self) -> u32 {
        self.clean.len + self.ahead.len
    }

    /// Returns the number of clean positions whose pages were read ahead and not mapped since.
    pub fn ahead(&self) -> u32 {
        self.ahead.len
    }

    /// Returns the number of dirty positions.
    pub fn dirty(&self) -> u32 {
        self.dirty.len
    }

    /// Returns the use of a position.
    pub fn used(&self, position: Position) -> Use {
        self.uses[position.0 as usize]
    }

    /// Returns the record of a position.
    pub fn record(&self, position: Position) -> &Record {
        &self.records[position.0 as usize]
    }

    /// Returns the record of a position.
    pub fn record_mut(&mut self, position: Position) -> &mut Record {
        &mut self.records[position.0 as usize]
    }

    /// Sets the use of a position.
    pub fn set(&mut self, position: Position, new: Use) {
        let index = position.0;
        let old = std::mem::replace(&mut self.uses[index as usize], new);
        let code = |u: Use| match u { Use::Empty => 0u64, Use::Blank => 1, Use::Reserved { filled: false } => 2, Use::Reserved { filled: true } => 3, Use::Fetching(f, e) => 4 | (f.0 as u64) << 8 | (e as u64) << 16, Use::Clean => 5, Use::Dirty => 6, Use::Writing(f, e) => 7 | (f.0 as u64) << 8 | (e as u64) << 16 };
        crate::dbg::log(self.uses.as_ptr() as usize, 1, index, 1, code(old) << 32 | code(new) | (self.records[index as usize].page.0 as u64) << 48);
        match old {
            Use::Empty => self.empty.set(index, false),
            Use::Blank => self.blank.set(index, false),
            Use::Clean => {
                let (links, list) = self.clean_list(index);
                unlink(links, list, index);
            }
            Use::Dirty => unlink(&mut self.links, &mut self.dirty, index),
            Use::Reserved { .. } | Use::Fetching(..) | Use::Writing(..) => {}
        }
        match new {
            Use::Empty => self.empty.set(index, true),
            Use::Blank => self.blank.set(index, true),
            Use::Clean => {
                let (links, list) = self.clean_list(index);
                append(links, list, index);
            }
            Use::Dirty => append(&mut self.links, &mut self.dirty, index),
            Use::Reserved { .. } | Use::Fetching(..) | Use::Writing(..) => {}
        }
        match (is_filled(old), is_filled(new)) {
            (false, true) => self.filled += 1,
            (true, false) => self.filled -= 1,
            _ => {}
        }
        if !holds_page(new) {
            self.records[index as usize] = NO_RECORD;
        }
    }

    /// Sets the use of a position and its record.
    pub fn hold(&mut self, position: Position, new: Use, record: Record) {
        // The old record names the list that the position leaves.
        self.set(position, Use::Reserved { filled: is_filled(self.used(position)) });
        self.records[position.0 as usize] = record;
        self.set(position, new);
    }

    /// Returns the list of a clean position. The record of a clean position keeps its window.
    fn clean_list(&mut self, index: u32) -> (&mut [Links], &mut List) {
        let list = match self.records[index as usize].window {
            Some(_) => &mut self.ahead,
            None => &mut self.clean,
        };
        (&mut self.links, list)
    }

    /// Reserves consecutive empty positions: `wanted` of them, at most 64, or the longest run if
    /// all runs are shorter.
    pub fn take_empty(&mut self, wanted: u32) -> Option<(Position, u32)> {
        let (first, count) = self.empty.find(wanted)?;
        for index in first..first + count {
            self.set(Position(index), Use::Reserved { filled: false });
        }
        Some((Position(first), count))
    }

    /// Reserves consecutive blank positions: `wanted` of them, at most 64, or the longest run if
    /// all runs are shorter.
    pub fn take_blank(&mut self, wanted: u32) -> Option<(Position, u32)> {
        let (first, count) = self.blank.find(wanted)?;
        for index in first..first + count {
            self.set(Position(index), Use::Reserved { filled: true });
        }
        Some((Position(first), count))
    }

    /// Returns the clean position to reclaim next: the oldest one that was not read ahead, or the
    /// oldest one that was, if there are more than `ahead_max` of these or no others.
    ///
    /// The program needs a page that was read ahead soon, and needs an evicted page late or never.
    pub fn next_to_reclaim(&self, ahead_max: u32) -> Option<Position> {
        let is_ahead = self.ahead.len > ahead_max || self.clean.first == NONE;
        let first = if is_ahead { self.ahead.first } else { self.clean.first };
        (first != NONE).then_some(Position(first))
    }

    /// Makes a clean position the newest one.
    pub fn renew_clean(&mut self, position: Position) {
        self.set(position, Use::Clean);
    }

    /// Returns the position that has been dirty for the longest time.
    pub fn oldest_dirty(&self) -> Option<Position> {
        (self.dirty.first != NONE).then_some(Position(self.dirty.first))
    }

    /// Makes a dirty position the newest one.
    pub fn renew_dirty(&mut self, position: Position) {
        unlink(&mut self.links, &mut self.dirty, position.0);
        append(&mut self.links, &mut self.dirty, position.0);
    }

    /// Returns the dirty positions, oldest first.
    pub fn dirty_positions(&self) -> impl Iterator<Item = Position> + '_ {
        let after = |index: &u32| match self.links[*index as usize].after {
            NONE => None,
            after => Some(after),
        };
        let first = (self.dirty.first != NONE).then_some(self.dirty.first);
        std::iter::successors(first, after).map(Position)
    }

    /// Returns all positions that hold a page or fetch one.
    pub fn held(&self) -> impl Iterator<Item = Position> + '_ {
        let held = |&index: &u32| holds_page(self.uses[index as usize]);
        (0..self.len()).filter(held).map(Position)
    }

    /// Checks the counts against the uses.
    pub fn check(&self) {
        let count =
            |wanted: fn(&Use) -> bool| self.uses.iter().filter(|u| wanted(u)).count() as u32;
        assert_eq!(self.filled, count(|u| is_filled(*u)), "filled positions");
        assert_eq!(self.clean(), count(|u| *u == Use::Clean), "clean positions");
        let is_ahead =
            |position| self.used(position) == Use::Clean && self.record(position).window.is_some();
        let ahead = (0..self.len()).filter(|&index| is_ahead(Position(index))).count();
        assert_eq!(self.ahead.len as usize, ahead, "positions read ahead");
        assert_eq!(self.dirty.len, count(|u| *u == Use::Dirty), "dirty positions");
        assert_eq!(self.empty.count, count(|u| *u == Use::Empty), "empty positions");
        let blank = count(|u| *u == Use::Blank);
        assert_eq!(self.blank.count, blank, "blank positions");
    }
}

fn is_filled(used: Use) -> bool {
    !matches!(used, Use::Empty | Use::Reserved { filled: false })
}

/// Returns true if the position belongs to a page.
pub fn holds_page(used: Use) -> bool {
    matches!(used, Use::Clean | Use::Dirty | Use::Writing(..) | Use::Fetching(..))
}

fn unlink(links: &mut [Links], list: &mut List, index: u32) {
    let Links { before, after } = links[index as usize];
    match before {
        NONE => list.first = after,
        before => links[before as usize].after = after,
    }
    match after {
        NONE => list.last = before,
        after => links[after as usize].before = before,
    }
    list.len -= 1;
}

fn append(links: &mut [Links], list: &mut List, index: u32) {
    links[index as usize] = Links { before: list.last, after: NONE };
    match list.last {
        NONE => list.first = index,
        last => links[last as usize].after = index,
    }
    list.last = index;
    list.len += 1;
}

/// A set of positions, one word for each tray.
struct Bits {
    trays: Vec<u64>,
    count: u32,
    /// Tray at which the next search begins.
    cursor: usize,
}

impl Bits {
    fn new(positions: u32) -> Self {
        Self { trays: vec![0; positions as usize / 64], count: 0, cursor: 0 }
    }

    fn set(&mut self, index: u32, member: bool) {
        let (tray, mask) = (&mut self.trays[index as usize / 64], 1 << (index % 64));
        debug_assert_eq!(*tray & mask != 0, !member, "position {index}");
        *tray ^= mask;
        self.count = if member { self.count + 1 } else { self.count - 1 };
    }

    /// Returns the first member and the length of a run of `wanted` members, or of the longest run.
    /// A run lies within a tray.
    fn find(&mut self, wanted: u32) -> Option<(u32, u32)> {
        if self.count == 0 || wanted == 0 {
            return None;
        }
        let wanted = wanted.min(64);
        let mut best = (0, 0);
        let trays = self.trays.len();
        for tray in (0..trays).map(|step| (self.cursor + step) % trays) {
            let word = self.trays[tray];
            if word.count_ones() <= best.1 {
                continue;
            }
            let (at, len) = longest_run(word, wanted);
            if len > best.1 {
                best = (tray as u32 * 64 + at, len);
                if len == wanted {
                    self.cursor = tray;
                    break;
                }
            }
        }
        Some(best)
    }
}

/// Returns the start and length of a run of `wanted` set bits, or of the longest run. The word is
/// not 0.
fn longest_run(word: u64, wanted: u32) -> (u32, u32) {
    // `runs` keeps the bits at which a run of `len` set bits begins.
    let (mut runs, mut len) = (word, 1);
    while len < wanted {
        let longer = runs & (word >> len);
        if longer == 0 {
            break;
        }
        runs = longer;
        len += 1;
    }
    (runs.trailing_zeros(), len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn longest_run_of_bits_is_found() {
        assert_eq!(longest_run(0b1011_0111, 3), (0, 3));
        assert_eq!(longest_run(0b1011_0111, 4), (0, 3));
        assert_eq!(longest_run(u64::MAX, 64), (0, 64));
        assert_eq!(longest_run(1 << 63, 5), (63, 1));
        assert_eq!(longest_run(0b1110, 2), (1, 2));
    }

    #[test]
    fn runs_stay_within_a_tray_and_are_reserved_once() {
        let mut shelf = Shelf::new(128);
        let (first, count) = shelf.take_empty(100).unwrap();
        assert_eq!(count, 64);
        let (second, count) = shelf.take_empty(64).unwrap();
        assert_eq!((count, second.0.abs_diff(first.0)), (64, 64));
        assert_eq!(shelf.take_empty(1), None);
        shelf.set(Position(5), Use::Blank);
        shelf.set(Position(6), Use::Blank);
        assert_eq!((shelf.blank(), shelf.filled()), (2, 2));
        assert_eq!(shelf.take_blank(8), Some((Position(5), 2)));
        assert_eq!(shelf.take_blank(8), None);
        shelf.check();
    }

    #[test]
    fn clean_positions_leave_in_the_order_of_arrival() {
        let mut shelf = Shelf::new(64);
        for index in [9, 3, 7] {
            shelf.take_empty(1);
            shelf.set(Position(index), Use::Clean);
        }
        assert_eq!(shelf.next_to_reclaim(0), Some(Position(9)));
        shelf.renew_clean(Position(9));
        shelf.set(Position(3), Use::Blank);
        assert_eq!(shelf.next_to_reclaim(0), Some(Position(7)));
        shelf.set(Position(7), Use::Empty);
        assert_eq!(shelf.next_to_reclaim(0), Some(Position(9)));
    }

    #[test]
    fn evicted_pages_are_reclaimed_before_those_read_ahead() {
        let mut shelf = Shelf::new(64);
        for (index, window) in [(4, Some(WindowId(1))), (5, Some(WindowId(1))), (6, None)] {
            shelf.hold(Position(index), Use::Clean, Record { window, ..NO_RECORD });
        }
        assert_eq!((shelf.clean(), shelf.ahead()), (3, 2));
        assert_eq!(shelf.next_to_reclaim(2), Some(Position(6)));
        assert_eq!(shelf.next_to_reclaim(1), Some(Position(4)), "more than one was read ahead");
        shelf.set(Position(6), Use::Blank);
        assert_eq!(shelf.next_to_reclaim(2), Some(Position(4)), "no other is left");
        shelf.renew_clean(Position(4));
        assert_eq!(shelf.next_to_reclaim(2), Some(Position(5)));
        shelf.check();
    }

    proptest! {
        #[test]
        fn counts_follow_the_uses(steps in prop::collection::vec((0u32..128, 0u8..7), 1..300)) {
            let mut shelf = Shelf::new(128);
            for (index, new) in steps {
                let new = match new {
                    0 => Use::Empty,
                    1 | 2 => Use::Blank,
                    3 => Use::Clean,
                    4 => Use::Dirty,
                    5 => Use::Writing(FlightIndex(1), 2),
                    _ => Use::Reserved { filled: false },
                };
                shelf.set(Position(index), new);
                shelf.check();
            }
        }
    }
}
