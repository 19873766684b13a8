//! Extents: paged memory outside of the region, at addresses that the program chose.
//!
//! ```text
//!  page numbers   0            region.pages()                             region.numbers()
//!                 +------------+--------+------+-------+------+-----------+
//!                 | region     | unused | .bss | unused| heap | unused    |
//!                 +------------+--------+------+-------+------+-----------+
//!                                 ^      |               |
//!                              fences    v               v        addresses: anywhere
//! ```
//!
//! An extent is a range of addresses whose pages have consecutive numbers ([`PageId`]) in the same
//! page table as the region's pages. The program's `.bss` and mappings with `MAP_FIXED`,
//! `MAP_32BIT` or a low address hint are extents. An extent exists as long as the program has the
//! memory mapped. If the program unmaps a part, the rest is one or two extents.
//!
//! The handler and other threads find extents without a lock (`Latch`). Changes need `space`.
//!
//! # Fences
//! The handler and the worker work on runs of consecutive page numbers and assume that their
//! addresses are consecutive too. So the first and the last number of each unused range are
//! *fences*: their entries in the page table are BUSY for good, which ends every run.

use std::io;
use std::ops::Range;

use crate::latch::{Item, Latch};
use crate::page_table::{Entry, PageId, PageTable};
use crate::region::RangeSet;
use crate::sys::PAGE_SHIFT;

/// Maximum number of extents that the program can make by mapping memory.
///
/// The kernel limits the mappings of a process (`vm.max_map_count`, 65,530). Each extent is at
/// least one.
pub const EXTENTS_MAX: usize = 4096;
/// Maximum number of extents, with those that arise because the program unmaps parts.
const CAPACITY: usize = 2 * EXTENTS_MAX;

/// First page numbers are multiples of this number, so that a child reads whole blocks.
const ALIGN: u32 = 512;
/// Page numbers that stay unused after an extent, if there are enough, so that it can grow.
const GAP: u32 = 4096;

/// A range of paged addresses outside of the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First address.
    pub base: usize,
    /// Number of pages.
    pub pages: u32,
    /// Number of the first page.
    pub first: u32,
}

impl Extent {
    /// Returns the address after the last one.
    pub fn end(&self) -> usize {
        self.base + self.len()
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        (self.pages as usize) << PAGE_SHIFT
    }

    /// Returns true if the extent has no page.
    pub fn is_empty(&self) -> bool {
        self.pages == 0
    }

    /// Returns the numbers of the pages.
    pub fn numbers(&self) -> Range<u32> {
        self.first..self.first + self.pages
    }

    /// Returns the part in a range of addresses, which may be empty.
    pub fn part(&self, range: &Range<usize>) -> Self {
        let start = range.start.clamp(self.base, self.end());
        let end = range.end.clamp(start, self.end());
        let before = (start - self.base) >> PAGE_SHIFT;
        Self {
            base: self.base + (before << PAGE_SHIFT),
            pages: ((end - self.base).div_ceil(1 << PAGE_SHIFT) - before) as u32,
            first: self.first + before as u32,
        }
    }

    fn of_addresses(item: Item) -> Self {
        let pages = ((item.end - item.start) >> PAGE_SHIFT) as u32;
        Self { base: item.start as usize, pages, first: item.value as u32 }
    }

    fn of_numbers(item: Item) -> Self {
        let pages = (item.end - item.start) as u32;
        Self { base: item.value as usize, pages, first: item.start as u32 }
    }
}

/// All extents of a process.
pub struct Extents {
    by_address: Latch,
    by_number: Latch,
}

impl std::fmt::Debug for Extents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.all()).finish()
    }
}

impl Extents {
    /// Creates an empty set.
    pub fn new() -> io::Result<Self> {
        Ok(Self { by_address: Latch::new(CAPACITY)?, by_number: Latch::new(CAPACITY)? })
    }

    /// Returns the number of extents.
    pub fn len(&self) -> usize {
        self.by_address.len()
    }

    /// Returns true if there is no extent.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the extent that contains an address.
    pub fn at(&self, address: usize) -> Option<Extent> {
        self.by_address.find(address as u64).map(Extent::of_addresses)
    }

    /// Returns the extent that contains a page.
    pub fn of(&self, page: PageId) -> Option<Extent> {
        self.by_number.find(u64::from(page.0)).map(Extent::of_numbers)
    }

    /// Returns true if an extent overlaps a range of addresses.
    pub fn overlap(&self, range: &Range<usize>) -> bool {
        self.by_address.overlaps(&(range.start as u64..range.end as u64))
    }

    /// Returns all extents, ascending by address.
    pub fn all(&self) -> Vec<Extent> {
        self.by_address.all().into_iter().map(Extent::of_addresses).collect()
    }

    /// Returns the parts of extents in a range of addresses, ascending.
    pub fn parts(&self, range: &Range<usize>) -> Vec<Extent> {
        if !self.overlap(range) {
            return Vec::new();
        }
        let parts = self.all().into_iter().map(|extent| extent.part(range));
        parts.filter(|part| !part.is_empty()).collect()
    }

    /// Returns the extents that remain without a range of addresses, and the parts in the range.
    /// `None` if more would remain than fit.
    pub(crate) fn without(&self, range: &Range<usize>) -> Option<(Vec<Extent>, Vec<Extent>)> {
        let (mut kept, mut removed) = (Vec::new(), Vec::new());
        for extent in self.all() {
            kept.push(extent.part(&(0..range.start)));
            removed.push(extent.part(range));
            kept.push(extent.part(&(range.end..usize::MAX)));
        }
        kept.retain(|part| !part.is_empty());
        removed.retain(|part| !part.is_empty());
        (kept.len() <= self.by_address.capacity()).then_some((kept, removed))
    }

    /// Publishes the extents by which pages are found from addresses.
    pub(crate) fn set_addresses(&self, extents: &[Extent]) {
        let mut items: Vec<_> = extents
            .iter()
            .map(|e| Item { start: e.base as u64, end: e.end() as u64, value: u64::from(e.first) })
            .collect();
        items.sort_unstable_by_key(|item| item.start);
        self.by_address.set(&items);
    }

    /// Publishes the extents by which addresses are found from pages.
    pub(crate) fn set_numbers(&self, extents: &[Extent]) {
        let mut items: Vec<_> = extents
            .iter()
            .map(|e| {
                let numbers = e.numbers();
                let (start, end) = (u64::from(numbers.start), u64::from(numbers.end));
                Item { start, end, value: e.base as u64 }
            })
            .collect();
        items.sort_unstable_by_key(|item| item.start);
        self.by_number.set(&items);
    }
}

/// Sets the fences of all unused numbers in a new page table.
pub(crate) fn set_fences(table: &PageTable, unused: &RangeSet) {
    for fence in fences(unused, &(0..u32::MAX)) {
        table.lock(PageId(fence));
    }
}

/// Returns the fences of the unused ranges that overlap or touch `around`.
fn fences(unused: &RangeSet, around: &Range<u32>) -> Vec<u32> {
    let ranges = unused.touching(around.clone());
    let mut fences: Vec<u32> =
        ranges.iter().flat_map(|range| [range.start, range.end - 1]).collect();
    fences.dedup();
    fences
}

/// Changes the set of unused numbers by `change`, which affects `range` only, and moves the fences.
fn change_unused(
    table: &PageTable,
    unused: &mut RangeSet,
    range: &Range<u32>,
    change: impl FnOnce(&mut RangeSet),
) {
    let before = fences(unused, range);
    change(unused);
    let after = fences(unused, range);
    for &fence in after.iter().filter(|fence| !before.contains(fence)) {
        table.lock(PageId(fence));
    }
    for &fence in before.iter().filter(|fence| !after.contains(fence)) {
        let waits = table.unlock(PageId(fence), Entry::ABSENT);
        assert!(!waits, "no thread waits for a fence");
    }
}

/// Takes numbers for an extent of `pages` pages. If `after` is the number after another extent's
/// last page, the numbers that follow it are preferred. Returns the first number.
pub(crate) fn take_numbers(
    table: &PageTable,
    unused: &mut RangeSet,
    pages: u32,
    after: Option<u32>,
) -> Option<u32> {
    let fits = |first: u32| {
        let end = first.checked_add(pages)?.checked_add(1)?;
        unused.contains_all(first..end).then_some(first)
    };
    let find = |gap: u32| {
        unused.iter().find_map(|range| {
            let first = (range.start + 1).next_multiple_of(ALIGN);
            let end = first.checked_add(pages)?.checked_add(gap)?.checked_add(1)?;
            (end <= range.end).then_some(first)
        })
    };
    let first = after.and_then(fits).or_else(|| find(pages.max(GAP))).or_else(|| find(0))?;
    let range = first..first + pages;
    change_unused(table, unused, &range, |unused| unused.remove(range.clone()));
    Some(first)
}

/// Returns the numbers of pages that are absent.
pub(crate) fn give_numbers(table: &PageTable, unused: &mut RangeSet, range: Range<u32>) {
    change_unused(table, unused, &range.clone(), |unused| unused.insert(range));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: usize = 1 << PAGE_SHIFT;

    fn extent(base: usize, pages: u32, first: u32) -> Extent {
        Extent { base: base * PAGE, pages, first }
    }

    #[test]
    fn pages_and_addresses_are_found() {
        let extents = Extents::new().unwrap();
        let both = [extent(100, 10, 5000), extent(200, 1, 1000)];
        extents.set_numbers(&both);
        extents.set_addresses(&both);
        assert_eq!(extents.at(100 * PAGE - 1), None);
        assert_eq!(extents.at(109 * PAGE + 5), Some(both[0]));
        assert_eq!(extents.at(110 * PAGE), None);
        assert_eq!(extents.of(PageId(1000)), Some(both[1]));
        assert_eq!(extents.of(PageId(5010)), None);
        assert_eq!(
            extents.parts(&(105 * PAGE..300 * PAGE)),
            [extent(105, 5, 5005), extent(200, 1, 1000)]
        );
        let (kept, removed) = extents.without(&(102 * PAGE..104 * PAGE)).unwrap();
        assert_eq!(removed, vec![extent(102, 2, 5002); 1]);
        assert_eq!(kept, [extent(100, 2, 5000), extent(104, 6, 5004), extent(200, 1, 1000)]);
        let (kept, removed) = extents.without(&(0..usize::MAX)).unwrap();
        assert_eq!((kept.len(), removed.len()), (0, 2));
    }

    #[test]
    fn a_part_covers_the_pages_that_a_range_of_bytes_touches() {
        let whole = extent(10, 4, 40);
        assert_eq!(whole.part(&(11 * PAGE + 7..12 * PAGE + 1)), extent(11, 2, 41));
        assert!(whole.part(&(0..10 * PAGE)).is_empty());
        assert!(whole.part(&(14 * PAGE..usize::MAX)).is_empty());
        assert_eq!(whole.part(&(0..usize::MAX)), whole);
    }

    proptest! {
        /// Every run of pages ends at the border of its extent, whatever was taken and given back.
        #[test]
        fn fences_are_the_ends_of_the_unused_ranges(
            steps in prop::collection::vec((any::<bool>(), 1u32..900, any::<u16>()), 1..60),
        ) {
            const NUMBERS: std::ops::Range<u32> = 1000..40_000;
            let table = PageTable::new(NUMBERS.end as usize).unwrap();
            let mut unused = RangeSet::default();
            unused.insert(NUMBERS);
            set_fences(&table, &unused);
            let mut taken: Vec<Range<u32>> = Vec::new();
            for (take, pages, which) in steps {
                if take || taken.is_empty() {
                    let after = taken.last().map(|last| last.end);
                    if let Some(first) = take_numbers(&table, &mut unused, pages, after) {
                        taken.push(first..first + pages);
                    }
                } else {
                    // Gives back a part of a range; the rest remains as one or two ranges.
                    let range = taken.swap_remove(which as usize % taken.len());
                    let start = range.start + u32::from(which) % range.len() as u32;
                    let end = range.end.min(start + pages);
                    give_numbers(&table, &mut unused, start..end);
                    taken.extend([range.start..start, end..range.end]);
                    taken.retain(|range| !range.is_empty());
                }
                for range in &taken {
                    prop_assert!(unused.overlap(range.clone()).is_empty());
                    for page in [range.start, range.end - 1] {
                        prop_assert!(!table.load(PageId(page)).is_busy());
                    }
                    prop_assert!(
                        table.load(PageId(range.end)).is_busy()
                            || taken.iter().any(|other| other.start == range.end)
                    );
                }
                let busy: Vec<u32> =
                    NUMBERS.filter(|&page| table.load(PageId(page)).is_busy()).collect();
                let mut ends: Vec<u32> =
                    unused.iter().flat_map(|range| [range.start, range.end - 1]).collect();
                ends.dedup();
                prop_assert_eq!(busy, ends);
            }
        }
    }
}
