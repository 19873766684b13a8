//! The pager's address space and the state of its parts.
//!
//! ```text
//!  base                base + arena                        base + len
//!  +-------------------+-----------------------------------+
//!  | arena of the      | mappings of the program           |
//!  | allocator (RW)    | (allocated RW..., free PROT_NONE) |
//!  +-------------------+-----------------------------------+
//! ```
//!
//! The region is private anonymous memory, reserved once and unmapped with its last clone. The
//! program's mapping and unmapping only changes protections in it. The memory is private so that
//! fork's copy-on-write stays correct. Paged memory at other addresses consists of
//! [extents](crate::extent), whose pages have the numbers after the region's.
//!
//! [`RangeSet`] is a set of page ranges. [`Space`] holds the sets of free pages, of foreign pages
//! (which the program replaced by other mappings), and of pages that the program keeps from forked
//! children.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use crate::extent::{Extent, Extents};
use crate::page_table::PageId;
use crate::sys::{self, PAGE_BYTES, PAGE_SHIFT};

/// A set of page numbers, stored as disjoint ranges that do not touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeSet {
    ranges: BTreeMap<u32, u32>,
}

impl RangeSet {
    /// Adds `range`; parts that are already in the set stay.
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

    /// Removes `range`.
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

    /// Returns the parts of `range` that are in the set, ascending.
    pub fn overlap(&self, range: Range<u32>) -> Vec<Range<u32>> {
        let first = self.ranges.range(..=range.start).next_back().map_or(range.start, |(&s, _)| s);
        self.ranges
            .range(first..range.end.max(first))
            .map(|(&s, &e)| s.max(range.start)..e.min(range.end))
            .filter(|part| !part.is_empty())
            .collect()
    }

    /// Returns true if the page is in the set.
    pub fn contains(&self, page: u32) -> bool {
        self.ranges.range(..=page).next_back().is_some_and(|(_, &end)| page < end)
    }

    /// Returns true if all of `range` is in the set.
    pub fn contains_all(&self, range: Range<u32>) -> bool {
        self.ranges.range(..=range.start).next_back().is_some_and(|(_, &end)| range.end <= end)
    }

    /// Returns true if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Iterates over the ranges, ascending.
    pub fn iter(&self) -> impl Iterator<Item = Range<u32>> + '_ {
        self.ranges.iter().map(|(&start, &end)| start..end)
    }

    /// Returns the ranges of the set that overlap or touch `range`, whole, ascending.
    pub fn touching(&self, range: Range<u32>) -> Vec<Range<u32>> {
        let before = self.ranges.range(..range.start).next_back();
        let from = self.ranges.range(range.start..=range.end);
        before
            .into_iter()
            .chain(from)
            .map(|(&start, &end)| start..end)
            .filter(|part| part.end >= range.start)
            .collect()
    }

    /// Returns the highest range of `count` pages in the set.
    ///
    /// The kernel places mappings from the top down too. With this order, a program that maps twice
    /// the size that it needs and unmaps the unaligned ends leaves no hole, because the larger end
    /// that it unmaps lies below.
    pub fn find_last(&self, count: u32) -> Option<Range<u32>> {
        let mut downwards = self.ranges.iter().rev();
        downwards.find(|&(&start, &end)| end - start >= count).map(|(_, &end)| end - count..end)
    }
}

/// Allocation state of the pages.
#[derive(Clone, Debug)]
pub struct Space {
    /// Unmapped pages: PROT_NONE, absent.
    pub free: RangeSet,
    /// Pages replaced by a mapping that the pager does not serve (a file, shared memory).
    pub foreign: RangeSet,
    /// Pages that the program keeps from forked children (MADV_DONTFORK).
    pub unforked: RangeSet,
    /// Pages with a protection key other than 0.
    pub keyed: RangeSet,
    /// Numbers after the region's pages that no extent has.
    pub unused: RangeSet,
}

impl Space {
    /// Returns the parts of `pages` that the pager serves and that forked children get, ascending.
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

/// A part of a range of addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Pages of the region or of an extent, with consecutive addresses.
    Paged(Range<u32>),
    /// Addresses of other memory: the first one, and the length in bytes.
    Other(usize, usize),
}

/// The reserved address range, and the extents beside it. A clone names the same region.
#[derive(Clone, Debug)]
pub struct Region {
    base: usize,
    pages: u32,
    arena_pages: u32,
    extents: Arc<Extents>,
    /// Keeps the range mapped.
    _mapping: Arc<Mapping>,
}

/// A mapping of this process, which is unmapped with the last reference.
#[derive(Debug)]
struct Mapping {
    start: usize,
    len: usize,
}

/// Page numbers for extents, as a multiple of the region's pages. The page table needs only address
/// space for them. With a region of 1 TiB, MariaDB's reservation of 8 TiB fits.
const NUMBERS_PER_PAGE: u32 = 15;

impl Region {
    /// Reserves `bytes` of address space. If a limit forbids this size, it is halved until the
    /// kernel agrees. The first half becomes the arena.
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
                    // SAFETY: the two unaligned ends of the mapping that was just made.
                    unsafe {
                        if base > start {
                            let _ = sys::munmap(start, base - start);
                        }
                        let _ = sys::munmap(base + len, start + ALIGN - base);
                    }
                    let pages = (len >> PAGE_SHIFT) as u32;
                    let extents = Arc::new(Extents::new()?);
                    let mapping = Arc::new(Mapping { start: base, len });
                    let arena_pages = pages / 2;
                    return Ok(Self { base, pages, arena_pages, extents, _mapping: mapping });
                }
                Err(_) if len > SMALLEST => len /= 2,
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns the extents.
    pub fn extents(&self) -> &Extents {
        &self.extents
    }

    /// Returns the number of page numbers, of the region and for extents together.
    pub fn numbers(&self) -> u32 {
        const LAST: u32 = u32::MAX - 4096;
        self.pages.saturating_mul(1 + NUMBERS_PER_PAGE).min(LAST)
    }

    /// Returns the page numbers of the region and of each extent.
    pub fn all_numbers(&self) -> Vec<Range<u32>> {
        let extents = self.extents.all();
        std::iter::once(0..self.pages).chain(extents.iter().map(Extent::numbers)).collect()
    }

    /// Returns the address ranges of the region and of each extent: first address and bytes.
    pub fn all_addresses(&self) -> Vec<(usize, usize)> {
        let extents = self.extents.all();
        let extents = extents.iter().map(|extent| (extent.base, extent.len()));
        std::iter::once((self.base, self.len())).chain(extents).collect()
    }

    /// Returns the first address.
    pub fn base(&self) -> usize {
        self.base
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        (self.pages as usize) << PAGE_SHIFT
    }

    /// Always false: a region has pages.
    pub fn is_empty(&self) -> bool {
        self.pages == 0
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Returns the pages of the arena, the first ones of the region.
    pub fn arena(&self) -> Range<u32> {
        0..self.arena_pages
    }

    /// Returns true if the address is in the arena.
    pub fn arena_contains(&self, address: usize) -> bool {
        address.wrapping_sub(self.base) < (self.arena_pages as usize) << PAGE_SHIFT
    }

    /// Returns the initial state: all pages but the arena are free.
    pub fn space(&self) -> Space {
        let mut free = RangeSet::default();
        free.insert(self.arena_pages..self.pages);
        let mut unused = RangeSet::default();
        unused.insert(self.pages..self.numbers());
        let none = RangeSet::default;
        Space { free, foreign: none(), unforked: none(), keyed: none(), unused }
    }

    /// Returns true if the address is paged.
    pub fn contains(&self, address: usize) -> bool {
        self.find(address).is_some()
    }

    /// Returns the page that contains an address, or `None` if the address is not paged. Takes no
    /// lock.
    pub fn find(&self, address: usize) -> Option<PageId> {
        let offset = address.wrapping_sub(self.base);
        if offset < self.len() {
            return Some(PageId((offset >> PAGE_SHIFT) as u32));
        }
        let extent = self.extents.at(address)?;
        Some(PageId(extent.first + ((address - extent.base) >> PAGE_SHIFT) as u32))
    }

    /// Returns the page that contains an address of the region or an extent.
    ///
    /// # Panics
    /// If the address is not paged.
    pub fn page(&self, address: usize) -> PageId {
        self.find(address).unwrap_or_else(|| panic!("{address:#x} is not paged"))
    }

    /// Returns the pages of the region, or of the extent, that contains a page. Takes no lock.
    pub fn neighbours(&self, page: PageId) -> Range<u32> {
        if page.0 < self.pages {
            return 0..self.pages;
        }
        self.extents.of(page).map_or(page.0..page.0 + 1, |extent| extent.numbers())
    }

    /// Returns the address of a page, or `None` if the page belongs to no extent any more. Takes no
    /// lock.
    pub fn find_address(&self, page: PageId) -> Option<usize> {
        if page.0 < self.pages {
            return Some(self.base + ((page.0 as usize) << PAGE_SHIFT));
        }
        let extent = self.extents.of(page)?;
        Some(extent.base + (((page.0 - extent.first) as usize) << PAGE_SHIFT))
    }

    /// Returns the address of a page.
    ///
    /// # Panics
    /// If the page belongs to no extent. A page that is BUSY and not absent belongs to one.
    pub fn address(&self, page: PageId) -> usize {
        self.find_address(page).unwrap_or_else(|| panic!("page {} has no address", page.0))
    }

    /// Returns true if a part of `[address, address + len)` is paged.
    pub fn overlaps(&self, address: usize, len: usize) -> bool {
        self.clip(address, len).is_some()
            || self.extents.overlap(&(address..address.saturating_add(len)))
    }

    /// Returns the parts of `[address, address + len)`, ascending by address.
    pub fn pieces(&self, address: usize, len: usize) -> Vec<Piece> {
        let end = address.saturating_add(len);
        let extents = self.extents.parts(&(address..end));
        let mut paged: Vec<(usize, Range<u32>)> =
            extents.iter().map(|part| (part.base, part.numbers())).collect();
        if let Some(range) = self.clip(address, len) {
            paged.push((self.base + ((range.start as usize) << PAGE_SHIFT), range));
        }
        paged.sort_unstable_by_key(|&(start, _)| start);
        let (mut pieces, mut at) = (Vec::new(), address);
        for (start, range) in paged {
            if at < start {
                pieces.push(Piece::Other(at, start - at));
            }
            at = start + (range.len() << PAGE_SHIFT);
            pieces.push(Piece::Paged(range));
        }
        if at < end {
            pieces.push(Piece::Other(at, end - at));
        }
        pieces
    }

    /// Gives the kernel advice for an empty part of the region: small pages; not in core dumps,
    /// because the kernel would write zeros for pages that are not resident; and, unless `forked`,
    /// not copied to forked children.
    pub(crate) fn prepare(&self, start: usize, len: usize, forked: bool) {
        let children = if forked { libc::MADV_DOFORK } else { libc::MADV_DONTFORK };
        for advice in [libc::MADV_NOHUGEPAGE, libc::MADV_DONTDUMP, children] {
            // SAFETY: an empty part of the region.
            let _ = unsafe { sys::madvise(start, len, advice) };
        }
    }

    /// Returns the pages of the region that `[address, address + len)` overlaps, or `None` if the
    /// range lies outside of the region.
    pub fn clip(&self, address: usize, len: usize) -> Option<Range<u32>> {
        let start = address.max(self.base);
        let end = address.saturating_add(len).min(self.base + self.len());
        (start < end).then(|| {
            let last = (end - self.base).div_ceil(PAGE_BYTES) as u32;
            ((start - self.base) >> PAGE_SHIFT) as u32..last
        })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to the regions that refer to it, and none is left.
        unsafe {
            let _ = sys::munmap(self.start, self.len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns a region of addresses that are not mapped.
    fn unmapped(base: usize, pages: u32) -> Region {
        let extents = Arc::new(Extents::new().unwrap());
        // The kernel refuses to unmap no bytes.
        let _mapping = Arc::new(Mapping { start: 0, len: 0 });
        Region { base, pages, arena_pages: pages / 2, extents, _mapping }
    }

    /// Unmapping the addresses twice would remove what another thread has mapped there meanwhile.
    #[test]
    fn region_stays_mapped_while_a_clone_lives() {
        let region = Region::reserve(1 << 28).unwrap();
        let clone = region.clone();
        drop(region);
        // SAFETY: changes no content.
        unsafe { sys::madvise(clone.base(), clone.len(), libc::MADV_NOHUGEPAGE) }.unwrap();
    }

    proptest! {
        #[test]
        fn a_range_set_is_a_set(
            steps in prop::collection::vec((any::<bool>(), 0u32..64, 0u32..20), 0..60),
        ) {
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
                prop_assert!(set.iter().eq(ranges.iter().cloned()));
                let touching: Vec<_> =
                    ranges.iter().filter(|r| r.end >= 20 && r.start <= 30).cloned().collect();
                prop_assert_eq!(set.touching(20..30), touching);
            }
        }
    }

    #[test]
    fn children_get_paged_ranges_without_dontfork() {
        let region = unmapped(0, 100);
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

    #[test]
    fn a_range_of_addresses_is_cut_at_the_region_and_at_extents() {
        const PAGE: usize = PAGE_BYTES;
        let region = unmapped(100 * PAGE, 10);
        let extent = |base, pages, first| Extent { base: base * PAGE, pages, first };
        let all = [extent(50, 4, 20), extent(110, 5, 60)];
        region.extents().set_numbers(&all);
        region.extents().set_addresses(&all);
        use Piece::{Other, Paged};
        assert_eq!(
            region.pieces(48 * PAGE, 70 * PAGE),
            [
                Other(48 * PAGE, 2 * PAGE),
                Paged(20..24),
                Other(54 * PAGE, 46 * PAGE),
                Paged(0..10),
                Paged(60..65),
                Other(115 * PAGE, 3 * PAGE),
            ]
        );
        assert_eq!(region.pieces(111 * PAGE, PAGE), [Paged(61..62)]);
        assert_eq!(region.pieces(PAGE, 7), [Other(PAGE, 7)]);
        assert!(region.overlaps(53 * PAGE, 1) && !region.overlaps(54 * PAGE, PAGE));
        assert_eq!(region.find(112 * PAGE + 9), Some(PageId(62)));
        assert_eq!((region.find(54 * PAGE), region.find_address(PageId(24))), (None, None));
        assert_eq!(region.address(PageId(62)), 112 * PAGE);
        assert_eq!(region.all_numbers(), [0..10, 20..24, 60..65]);
    }
}
