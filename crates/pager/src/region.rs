//! The address space that the pager owns, and who has which part of it.
//!
//! ```text
//!  base                base + arena                        base + len
//!  +-------------------+-----------------------------------+
//!  | arena of the      | mappings of the program           |
//!  | allocator (RW)    | (allocated RW..., free PROT_NONE) |
//!  +-------------------+-----------------------------------+
//! ```
//!
//! Private anonymous memory, reserved once and never unmapped: what the program maps and unmaps is
//! a change of protection here. Private, because fork's copy-on-write must stay right.
//!
//! [`RangeSet`] is a set of page ranges; [`Space`] keeps with it what is free and what the program
//! replaced by other mappings (foreign).

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use crate::page_table::PageId;
use crate::sys::{self, PAGE_BYTES, PAGE_SHIFT};

/// A set of page numbers, kept as disjoint ranges that do not touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeSet {
    ranges: BTreeMap<u32, u32>,
}

impl RangeSet {
    /// Adds `range`; what of it is there already stays.
    pub fn insert(&mut self, range: Range<u32>) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start, range.end);
        if let Some((&s, &e)) = self.ranges.range(..=start).next_back()
            && e >= start
        {
            start = s;
            end = end.max(e);
        }
        while let Some((&s, &e)) = self.ranges.range(start..=end).next() {
            end = end.max(e);
            self.ranges.remove(&s);
        }
        self.ranges.insert(start, end);
    }

    /// Takes `range` out.
    pub fn remove(&mut self, range: Range<u32>) {
        for part in self.overlap(range) {
            let (&start, &end) =
                self.ranges.range(..=part.start).next_back().expect("the overlap is in the set");
            self.ranges.remove(&start);
            if start < part.start {
                self.ranges.insert(start, part.start);
            }
            if part.end < end {
                self.ranges.insert(part.end, end);
            }
        }
    }

    /// The parts of `range` that are in the set, ascending.
    pub fn overlap(&self, range: Range<u32>) -> Vec<Range<u32>> {
        let first = self.ranges.range(..=range.start).next_back().map_or(range.start, |(&s, _)| s);
        self.ranges
            .range(first..range.end.max(first))
            .map(|(&s, &e)| s.max(range.start)..e.min(range.end))
            .filter(|part| !part.is_empty())
            .collect()
    }

    /// True if the page is in the set.
    pub fn contains(&self, page: u32) -> bool {
        self.ranges.range(..=page).next_back().is_some_and(|(_, &end)| page < end)
    }

    /// True if all of `range` is in the set.
    pub fn contains_all(&self, range: Range<u32>) -> bool {
        self.ranges.range(..=range.start).next_back().is_some_and(|(_, &end)| range.end <= end)
    }

    /// True if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The highest range of `count` pages in the set.
    ///
    /// The kernel places mappings from the top down too. A program that maps twice what it needs and
    /// unmaps the unaligned ends leaves no hole then: the end that it unmaps lies below.
    pub fn find_last(&self, count: u32) -> Option<Range<u32>> {
        let mut downwards = self.ranges.iter().rev();
        downwards.find(|&(&start, &end)| end - start >= count).map(|(_, &end)| end - count..end)
    }
}

/// Who has which pages.
#[derive(Clone, Debug)]
pub struct Space {
    /// Pages that nobody mapped: PROT_NONE, absent.
    pub free: RangeSet,
    /// Pages behind which there is a mapping that is not ours (a file, shared memory).
    pub foreign: RangeSet,
    /// Pages that the program keeps from its children (MADV_DONTFORK).
    pub unforked: RangeSet,
}

impl Space {
    /// What of `pages` is ours and for forked children too, ascending.
    pub fn for_children(&self, pages: Range<u32>) -> Vec<Range<u32>> {
        let mut not = self.foreign.clone();
        self.unforked.overlap(pages.clone()).into_iter().for_each(|part| not.insert(part));
        let mut at = pages.start;
        let mut parts = Vec::new();
        for part in not.overlap(pages.clone()) {
            parts.push(at..part.start);
            at = part.end;
        }
        parts.push(at..pages.end);
        parts.retain(|part| !part.is_empty());
        parts
    }
}

/// The region.
#[derive(Debug)]
pub struct Region {
    base: usize,
    pages: u32,
    arena_pages: u32,
}

impl Region {
    /// Reserves `bytes` of address space, or as much of it as the limit of the address space admits:
    /// it is halved until the kernel agrees. A half is the arena.
    pub fn reserve(bytes: usize) -> io::Result<Self> {
        const SMALLEST: usize = 256 << 20;
        const ALIGN: usize = 64 << 20;
        let mut len = bytes.next_power_of_two().clamp(SMALLEST, 1 << 43);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        loop {
            // SAFETY: no MAP_FIXED, so no existing mapping is touched.
            match unsafe { sys::mmap(0, len + ALIGN, libc::PROT_NONE, flags, -1, 0) } {
                Ok(start) => {
                    let base = start.next_multiple_of(ALIGN);
                    // SAFETY: the two ends of the mapping that was just made.
                    unsafe {
                        if base > start {
                            let _ = sys::munmap(start, base - start);
                        }
                        let _ = sys::munmap(base + len, start + ALIGN - base);
                    }
                    let pages = (len >> PAGE_SHIFT) as u32;
                    return Ok(Self { base, pages, arena_pages: pages / 2 });
                }
                Err(_) if len > SMALLEST => len /= 2,
                Err(error) => return Err(error),
            }
        }
    }

    /// The same region, for another pager of the same process; neither is ever dropped.
    pub(crate) fn same(&self) -> Self {
        Self { base: self.base, pages: self.pages, arena_pages: self.arena_pages }
    }

    /// First address.
    pub fn base(&self) -> usize {
        self.base
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        (self.pages as usize) << PAGE_SHIFT
    }

    /// Never: a region has pages.
    pub fn is_empty(&self) -> bool {
        self.pages == 0
    }

    /// Number of pages.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Pages of the arena: the first ones.
    pub fn arena(&self) -> Range<u32> {
        0..self.arena_pages
    }

    /// True if the address is in the arena.
    pub fn arena_contains(&self, address: usize) -> bool {
        address.wrapping_sub(self.base) < (self.arena_pages as usize) << PAGE_SHIFT
    }

    /// What is free at the start: all but the arena.
    pub fn space(&self) -> Space {
        let mut free = RangeSet::default();
        free.insert(self.arena_pages..self.pages);
        Space { free, foreign: RangeSet::default(), unforked: RangeSet::default() }
    }

    /// True if the address is in the region.
    pub fn contains(&self, address: usize) -> bool {
        address.wrapping_sub(self.base) < self.len()
    }

    /// The page of an address of the region.
    pub fn page(&self, address: usize) -> PageId {
        assert!(self.contains(address), "{address:#x} is not in the region");
        PageId(((address - self.base) >> PAGE_SHIFT) as u32)
    }

    /// The address of a page.
    pub fn address(&self, page: PageId) -> usize {
        self.base + ((page.0 as usize) << PAGE_SHIFT)
    }

    /// Advice for a part of the region that holds nothing yet: small pages, not in core dumps (the kernel would write
    /// zeros for what is not resident) and, unless `forked`, not in children.
    pub(crate) fn prepare(&self, start: usize, len: usize, forked: bool) {
        let children = if forked { libc::MADV_DOFORK } else { libc::MADV_DONTFORK };
        for advice in [libc::MADV_NOHUGEPAGE, libc::MADV_DONTDUMP, children] {
            // SAFETY: a part of the region, in which nothing is.
            let _ = unsafe { sys::madvise(start, len, advice) };
        }
    }

    /// The pages of `[address, address + len)` that are in the region; none if there are none.
    pub fn clip(&self, address: usize, len: usize) -> Option<Range<u32>> {
        let start = address.max(self.base);
        let end = address.saturating_add(len).min(self.base + self.len());
        (start < end).then(|| {
            let last = (end - self.base).div_ceil(PAGE_BYTES) as u32;
            ((start - self.base) >> PAGE_SHIFT) as u32..last
        })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: whoever drops the region has ended all use of it.
        unsafe {
            let _ = sys::munmap(self.base, self.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_range_set_is_a_set(steps in prop::collection::vec((any::<bool>(), 0u32..64, 0u32..20), 0..60)) {
            let mut set = RangeSet::default();
            let mut model = [false; 100];
            for (add, start, len) in steps {
                let range = start..start + len;
                if add { set.insert(range.clone()) } else { set.remove(range.clone()) }
                model[start as usize..(start + len) as usize].fill(add);
                for page in 0..100u32 {
                    prop_assert_eq!(set.contains(page), model[page as usize]);
                }
                let ranges: Vec<_> = set.overlap(0..100);
                prop_assert!(ranges.windows(2).all(|w| w[0].end < w[1].start), "{:?}", ranges);
                prop_assert_eq!(
                    set.find_last(5).map(|r| r.start as usize),
                    (0..96).rfind(|&at| model[at..at + 5].iter().all(|&in_set| in_set))
                );
                prop_assert_eq!(set.contains_all(10..13), model[10..13].iter().all(|&m| m));
            }
        }
    }

    #[test]
    fn children_get_what_is_ours_and_not_kept_from_them() {
        let region = Region { base: 0, pages: 100, arena_pages: 50 };
        let region = std::mem::ManuallyDrop::new(region);
        let mut space = region.space();
        assert_eq!(space.for_children(0..100), vec![0..100u32; 1]);
        space.foreign.insert(0..3);
        space.unforked.insert(2..5);
        space.unforked.insert(40..41);
        space.foreign.insert(98..100);
        assert_eq!(space.for_children(0..100), [5..40, 41..98]);
        assert_eq!(space.for_children(4..41), vec![5..40u32; 1]);
    }

    #[test]
    fn addresses_and_pages_agree() {
        let region = Region::reserve(1 << 30).unwrap();
        let page = region.page(region.base() + 5 * PAGE_BYTES + 17);
        assert_eq!(page, PageId(5));
        assert_eq!(region.address(page), region.base() + 5 * PAGE_BYTES);
        assert_eq!(region.clip(region.base() - 100, 100), None);
        assert_eq!(region.clip(region.base() - 100, 101), Some(0..1));
        assert_eq!(region.clip(region.base() + region.len() - 1, 100), {
            Some(region.pages() - 1..region.pages())
        });
    }
}
