//! Windows of prefetched pages, and the fate of each page: used, wasted or still outstanding.

use std::ops::Range;

use super::{Counters, Found};
use crate::page_table::PageId;

/// Maximum number of windows in flight.
pub(super) const IN_FLIGHT: u32 = 8;

/// Number of windows whose fate is followed, a power of two.
const RECORDS: usize = 512;

/// Name of a window, unique within its [`Streams`](super::Streams).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WindowId(pub u32);

/// Pages to read ahead: `first`, `first + step`, and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Name for [`Found`] and for the later calls of [`Streams`](super::Streams).
    pub id: WindowId,
    /// The page that the stream reaches first: the highest one of a backward window.
    pub first: PageId,
    /// Number of pages, 1 to 64.
    pub pages: u32,
    /// Distance from each page to the next one: 1, -1 or a stride.
    pub step: i32,
}

impl Window {
    /// The pages of the window, in the order in which the stream reaches them.
    pub fn iter(&self) -> impl Iterator<Item = PageId> {
        let span = self.span();
        (0..self.pages).map(move |index| PageId(span.page(index.into()) as u32))
    }

    pub(super) fn span(&self) -> Span {
        Span { first: self.first.0, pages: self.pages, step: self.step }
    }
}

/// Pages at a constant distance. All positions are computed in 64 bits, so none overflows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub first: u32,
    pub pages: u32,
    pub step: i32,
}

impl Span {
    /// Page at an index, which may lie before or behind the span.
    pub(super) fn page(self, index: i64) -> i64 {
        i64::from(self.first) + index * i64::from(self.step)
    }

    /// The page that follows the span.
    pub(super) fn end(self) -> i64 {
        self.page(self.pages.into())
    }

    /// Index of a page, which may lie before or behind the span. None for a page between two steps.
    pub(super) fn index(self, page: i64) -> Option<i64> {
        let distance = page - i64::from(self.first);
        match self.step {
            1 => Some(distance),
            -1 => Some(-distance),
            step => (distance % i64::from(step) == 0).then(|| distance / i64::from(step)),
        }
    }

    /// True if neighbouring pages are neighbours in memory, so that one operation maps them all.
    pub(super) fn is_contiguous(self) -> bool {
        self.step.abs() == 1
    }

    /// The pages of a contiguous span in ascending order.
    pub(super) fn range(self) -> Range<u32> {
        match self.step {
            -1 => self.first + 1 - self.pages..self.first + 1,
            _ => self.first..self.first + self.pages,
        }
    }
}

/// The context that has planned a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub context: usize,
    /// Distinguishes successive contexts of one table entry.
    pub birth: u64,
}

/// A window that lost more than a quarter of its pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wasteful {
    pub owner: Owner,
    pub pages: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Not reached, or the stream is in this window.
    Open,
    /// The stream has gone on behind this window.
    Passed,
    /// The stream ended within this window.
    Dropped,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    window: Window,
    owner: Owner,
    is_in_flight: bool,
    fate: Fate,
    /// Pages for which a READ was posted.
    posted: u32,
    used: u32,
    wasted: u32,
    /// Number of faults that found a page of this window.
    faults: u32,
    /// Pages from the first mapped one to the end of the window.
    mapped: u32,
    /// Highest index of a page that faulted.
    highest: u32,
    /// The window was reported as wasteful, which happens once.
    is_reported: bool,
}

impl Record {
    fn outstanding(&self) -> u32 {
        self.posted - self.used - self.wasted
    }

    /// Updates the numbers of used and wasted pages. Returns the window if it is wasteful now.
    fn settle(&mut self, counters: &mut Counters) -> Option<Wasteful> {
        if self.is_in_flight {
            return None;
        }
        let reached_half = 2 * self.highest >= self.window.pages;
        let proven = match self.fate {
            Fate::Open => self.faults,
            Fate::Dropped if !reached_half => self.faults,
            Fate::Passed | Fate::Dropped => self.faults.max(self.mapped),
        };
        let used = proven.saturating_sub(self.used).min(self.outstanding());
        self.used += used;
        counters.used += u64::from(used);
        if self.fate == Fate::Dropped {
            let wasted = self.mapped.saturating_sub(proven).min(self.outstanding());
            self.mapped = 0;
            self.wasted += wasted;
            counters.wasted += u64::from(wasted);
        }
        let is_new = 4 * self.wasted > self.posted && !self.is_reported;
        self.is_reported |= is_new;
        is_new.then_some(Wasteful { owner: self.owner, pages: self.window.pages })
    }
}

/// The newest windows, and the counters of all.
#[derive(Debug)]
pub(super) struct Windows {
    /// The record of window `id` lies at `id % RECORDS` until a newer window replaces it.
    records: Box<[Option<Record>]>,
    next: u32,
    in_flight: u32,
    counters: Counters,
    /// Outstanding pages of windows whose record was replaced.
    orphaned: u64,
}

impl Windows {
    pub(super) fn new() -> Windows {
        Windows {
            records: vec![None; RECORDS].into_boxed_slice(),
            next: 0,
            in_flight: 0,
            counters: Counters::default(),
            orphaned: 0,
        }
    }

    pub(super) fn counters(&self) -> Counters {
        self.counters
    }

    fn record(&mut self, id: WindowId) -> Option<(&mut Record, &mut Counters)> {
        let record = self.records[id.0 as usize % RECORDS].as_mut();
        let record = record.filter(|record| record.window.id == id)?;
        Some((record, &mut self.counters))
    }

    /// Plans a window. None while the maximum number is in flight.
    pub(super) fn plan(&mut self, owner: Owner, span: Span) -> Option<Window> {
        if self.in_flight == IN_FLIGHT {
            return None;
        }
        // Fewer windows are in flight than records exist, so this loop ends.
        while self.records[self.next as usize % RECORDS].is_some_and(|r| r.is_in_flight) {
            self.next = self.next.wrapping_add(1);
        }
        let id = WindowId(self.next);
        self.next = self.next.wrapping_add(1);
        self.in_flight += 1;
        let Span { first, pages, step } = span;
        let window = Window { id, first: PageId(first), pages, step };
        let record = Record {
            window,
            owner,
            is_in_flight: true,
            fate: Fate::Open,
            posted: 0,
            used: 0,
            wasted: 0,
            faults: 0,
            mapped: 0,
            highest: 0,
            is_reported: false,
        };
        if let Some(old) = self.records[id.0 as usize % RECORDS].replace(record) {
            self.orphaned += u64::from(old.outstanding());
        }
        Some(window)
    }

    /// True for a window for which [`arrived`](Self::arrived) is still due.
    pub(super) fn is_in_flight(&mut self, id: WindowId) -> bool {
        self.record(id).is_some_and(|(record, _)| record.is_in_flight)
    }

    /// Counts a fault. Returns the owner of the window that the fault found.
    pub(super) fn fault(&mut self, found: Found, page: PageId) -> Option<Owner> {
        let (id, is_late) = match found {
            Found::Absent | Found::Evicted => return None,
            Found::Remote => {
                self.counters.demand += 1;
                return None;
            }
            Found::Ready(id) => (id, false),
            Found::Late(id) => (id, true),
        };
        self.counters.late += u64::from(is_late);
        let Some((record, counters)) = self.record(id) else {
            let used = self.orphaned.min(1);
            self.orphaned -= used;
            self.counters.used += used;
            return None;
        };
        record.faults += 1;
        let index = record.window.span().index(page.0.into()).unwrap_or(0);
        record.highest = record.highest.max(index.clamp(0, 64) as u32);
        record.settle(counters);
        Some(record.owner)
    }

    /// Records that a fault at `page` maps all pages from there to the end of the window.
    pub(super) fn mapped_to_end(&mut self, id: WindowId, page: PageId) {
        if let Some((record, _)) = self.record(id) {
            let index = record.window.span().index(page.0.into()).unwrap_or(0).max(0);
            let mapped = i64::from(record.window.pages) - index;
            record.mapped = record.mapped.max(mapped.max(0) as u32);
        }
    }

    /// Counts mapped pages of a window as used at once.
    pub(super) fn mapped_in_passing(&mut self, id: WindowId, pages: u32) {
        if let Some((record, _)) = self.record(id) {
            record.mapped = (record.mapped + pages).min(record.window.pages);
            self.passed(id);
        }
    }

    /// Counts the mapped pages of a window as used. Returns false if the window was reported as
    /// wasteful.
    pub(super) fn passed(&mut self, id: WindowId) -> bool {
        let Some((record, counters)) = self.record(id) else { return true };
        if record.fate == Fate::Open {
            record.fate = Fate::Passed;
        }
        record.settle(counters);
        !record.is_reported
    }

    /// Records that a stream has ended within this window.
    pub(super) fn dropped(&mut self, id: WindowId) -> Option<Wasteful> {
        let (record, counters) = self.record(id)?;
        if record.fate == Fate::Open {
            record.fate = Fate::Dropped;
        }
        record.settle(counters)
    }

    /// Ends the flight of a window. Returns its owner, and the window if it is wasteful.
    pub(super) fn arrived(
        &mut self,
        id: WindowId,
        pages: u32,
    ) -> Option<(Owner, Option<Wasteful>)> {
        let (record, counters) = self.record(id).filter(|(record, _)| record.is_in_flight)?;
        record.is_in_flight = false;
        record.posted = pages.min(record.window.pages);
        counters.issued += u64::from(record.posted);
        let result = (record.owner, record.settle(counters));
        self.in_flight -= 1;
        Some(result)
    }

    /// Counts pages that were reclaimed before the program needed them.
    pub(super) fn reclaimed(&mut self, id: WindowId, pages: u32) -> Option<Wasteful> {
        let Some((record, counters)) = self.record(id) else {
            let wasted = self.orphaned.min(pages.into());
            self.orphaned -= wasted;
            self.counters.wasted += wasted;
            return None;
        };
        let wasted = pages.min(record.outstanding());
        record.wasted += wasted;
        counters.wasted += u64::from(wasted);
        record.settle(counters)
    }

    /// Windows in flight, and outstanding pages, as the records have them.
    #[cfg(test)]
    pub(super) fn totals(&self) -> (usize, u64) {
        let records = || self.records.iter().flatten();
        let outstanding = records().map(|record| u64::from(record.outstanding())).sum::<u64>();
        (records().filter(|record| record.is_in_flight).count(), outstanding + self.orphaned)
    }
}
