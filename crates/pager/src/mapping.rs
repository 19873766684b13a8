//! The `mmap` family on paged memory: map, unmap and protect. `crate::remap` has `mremap`, and
//! [`crate::advice`] has `madvise`.
//!
//! The region stays mapped. A mapping of the program is a change of protection within it. An
//! [extent](crate::extent) is mapped and unmapped in the kernel (`crate::extent_mapping`). Pages
//! that are unmapped, dropped by advice, or replaced by another mapping lose their frames and slots
//! here. A chunk is freed with its last slot.
//!
//! All functions run on the program's threads with signals blocked and `space` locked. Faults are
//! served concurrently, page by page. Errors are `errno` values for the program.

use std::ops::Range;

use crate::descriptor;
pub use crate::errno::Errno;
use crate::errno::{MOVED, NEEDS_PROMOTION};
use crate::extent::EXTENTS_MAX;
use crate::page_table::PageId;
use crate::pager::Pager;
use crate::region::{Piece, RangeSet, Space};
use crate::sys::{self, PAGE_BYTES, PAGE_SHIFT, SignalsBlocked};

/// Calls `call` with the current pager, and again if the pager was replaced meanwhile. Returns
/// `None` if the process has no pager.
pub fn with_current<T>(
    call: impl Fn(&'static Pager) -> Result<T, Errno>,
) -> Option<Result<T, Errno>> {
    let mut pager = crate::pager::current()?;
    loop {
        match call(pager) {
            Err(MOVED) => pager = pager.wait_promoted(),
            Err(NEEDS_PROMOTION) => pager = pager.promote_now(),
            result => return Some(result),
        }
    }
}

/// Arguments of `mmap(2)`.
#[derive(Clone, Copy, Debug)]
pub struct MapRequest {
    /// Address hint; the exact address with MAP_FIXED.
    pub address: usize,
    /// Length in bytes.
    pub len: usize,
    /// Protection, `PROT_*`.
    pub prot: i32,
    /// Flags, `MAP_*`.
    pub flags: i32,
    /// File descriptor.
    pub fd: i32,
    /// Offset in the file, in bytes.
    pub offset: i64,
}

pub(crate) const MAP_FIXED_NOREPLACE: i32 = 0x10_0000;
const UNPAGEABLE_FLAGS: i32 =
    libc::MAP_SHARED | libc::MAP_STACK | libc::MAP_GROWSDOWN | libc::MAP_HUGETLB | libc::MAP_LOCKED;
/// Address hints below this address are always followed: programs want addresses that fit in few
/// bits there (a JVM's compressed pointers).
const LOW_HINT: usize = 64 << 30;
/// Mappings of this size follow every hint: programs reserve address space at addresses that they
/// need (a JVM's coloured pointers).
const LARGE_BYTES: usize = 32 << 20;
/// Smaller mappings follow hints above [`LOW_HINT`] while there are fewer extents. V8 gives each
/// 256 KiB of its heap a random hint, and would use up the extents. Beyond, its memory is mapped in
/// the region, where it is paged.
const HINTED_EXTENTS_MAX: usize = EXTENTS_MAX / 4;

impl MapRequest {
    /// Returns true if the pager serves such a mapping: private, anonymous, not executable.
    ///
    /// There is no minimum size. Garbage collectors map their heap page by page (Ruby 3.1: 32 KiB
    /// at a time, of which 16 KiB stay mapped), and gigabytes of small mappings would stay
    /// resident.
    pub fn is_pageable(&self) -> bool {
        self.flags & (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)
            == libc::MAP_PRIVATE | libc::MAP_ANONYMOUS
            && self.flags & UNPAGEABLE_FLAGS == 0
            && self.prot & libc::PROT_EXEC == 0
            && self.len > 0
    }

    /// Returns true if the program determines the address.
    pub fn is_fixed(&self) -> bool {
        self.flags & (libc::MAP_FIXED | MAP_FIXED_NOREPLACE) != 0
    }

    pub(crate) fn to_kernel(self) -> Result<usize, Errno> {
        // SAFETY: the program's own request, unchanged.
        unsafe { sys::mmap(self.address, self.len, self.prot, self.flags, self.fd, self.offset) }
            .map_err(errno)
    }
}

pub(crate) fn errno(error: std::io::Error) -> Errno {
    error.raw_os_error().unwrap_or(libc::EIO)
}

pub(crate) fn pages_of(len: usize) -> Result<u32, Errno> {
    u32::try_from(len.div_ceil(PAGE_BYTES)).map_err(|_| libc::ENOMEM)
}

impl Pager {
    /// Maps zeroed memory in the region.
    ///
    /// # Errors
    /// `ENOMEM` if no free range is large enough.
    pub fn map(&self, len: usize, prot: i32) -> Result<usize, Errno> {
        self.map_near(0, len, prot)
    }

    /// Maps zeroed memory in the region: at the address `hint` if the pages there are free.
    fn map_near(&self, hint: usize, len: usize, prot: i32) -> Result<usize, Errno> {
        if len == 0 {
            return Err(libc::EINVAL);
        }
        let pages = pages_of(len)?;
        let _blocked = SignalsBlocked::new();
        let mut space = self.space()?;
        let hinted = self.region.clip(hint, len).filter(|range| {
            hint.is_multiple_of(PAGE_BYTES)
                && range.len() == pages as usize
                && space.free.contains_all(range.clone())
        });
        let range = hinted.or_else(|| space.free.find_last(pages)).ok_or(libc::ENOMEM)?;
        self.set_protection(range.clone(), prot)?;
        space.free.remove(range.clone());
        Ok(self.region.address(PageId(range.start)))
    }

    /// Maps memory as the program requests: private anonymous memory anywhere, or other memory over
    /// paged memory.
    ///
    /// # Errors
    /// Those of `mmap(2)`.
    pub fn map_request(&self, request: MapRequest) -> Result<usize, Errno> {
        if request.len == 0 {
            return Err(libc::EINVAL);
        }
        if request.is_fixed() {
            return self.map_fixed(request);
        }
        if request.flags & libc::MAP_32BIT != 0 {
            return self.map_outside(request);
        }
        if let Some(mapped) = self.map_at_hint(request)? {
            return Ok(mapped);
        }
        match self.map_near(request.address, request.len, request.prot) {
            // Larger than the free part of the region (MariaDB reserves 8 TiB).
            Err(libc::ENOMEM) => self.map_outside(request),
            mapped => mapped,
        }
    }

    /// Maps outside of the region at the address that the program prefers. Returns `None` if the
    /// address is not free, or the hint is not followed.
    fn map_at_hint(&self, request: MapRequest) -> Result<Option<usize>, Errno> {
        // The kernel rounds a hint up.
        let Some(hint) = request.address.checked_next_multiple_of(PAGE_BYTES) else {
            return Ok(None);
        };
        let follows = hint < LOW_HINT
            || request.len >= LARGE_BYTES
            || self.region.extents().len() < HINTED_EXTENTS_MAX;
        if hint == 0 || !follows || self.region.overlaps(hint, request.len) {
            return Ok(None);
        }
        let flags = request.flags | MAP_FIXED_NOREPLACE;
        match self.map_outside(MapRequest { address: hint, flags, ..request }) {
            Ok(mapped) if mapped == hint => Ok(Some(mapped)),
            // A kernel before Linux 4.17, which does not know the flag.
            Ok(elsewhere) => self.unmap(elsewhere, request.len).map(|()| None),
            Err(error @ (MOVED | NEEDS_PROMOTION)) => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Maps at a fixed address.
    ///
    /// # Errors
    /// Those of `mmap(2)`.
    pub fn map_fixed(&self, request: MapRequest) -> Result<usize, Errno> {
        if !request.address.is_multiple_of(PAGE_BYTES) {
            return Err(libc::EINVAL);
        }
        let _blocked = SignalsBlocked::new();
        let mut space = self.space()?;
        let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let special = libc::MAP_SHARED | libc::MAP_GROWSDOWN | libc::MAP_HUGETLB;
        let anonymous = request.flags & anonymous == anonymous && request.flags & special == 0;
        let keeps = request.flags & MAP_FIXED_NOREPLACE != 0;
        let pieces = self.region.pieces(request.address, request.len);
        if keeps {
            let free = |piece: &Piece| match piece {
                Piece::Paged(range) => space.free.contains_all(range.clone()),
                Piece::Other(..) => true,
            };
            if !pieces.iter().all(free) {
                return Err(libc::EEXIST);
            }
        }
        if let [Piece::Paged(range)] = &pieces[..]
            && anonymous
        {
            self.reclaim_foreign(&mut space, range.clone())?;
            self.drop_pages(range.clone());
            self.reset_key(&mut space, range.clone())?;
            self.set_protection(range.clone(), request.prot)?;
            self.keep_from_children(&mut space, range.clone(), false)?;
            self.advice.forget(range.clone());
            space.free.remove(range.clone());
            return Ok(request.address);
        }
        let Some(range) = self.region.clip(request.address, request.len) else {
            return match request.is_pageable() {
                true => self.map_outside_in(&mut space, request),
                false => self.replace_extents(&mut space, request.address, request.len, || {
                    request.to_kernel()
                }),
            };
        };
        self.drop_pages(range.clone());
        let flags = request.flags & !MAP_FIXED_NOREPLACE | libc::MAP_FIXED;
        let request = MapRequest { flags, ..request };
        let mapped =
            self.replace_extents(&mut space, request.address, request.len, || request.to_kernel())?;
        space.free.remove(range.clone());
        self.forget_protection(range.clone());
        space.foreign.insert(range);
        Ok(mapped)
    }

    /// Unmaps a range. The kernel unmaps the parts outside of the region.
    pub fn unmap(&self, address: usize, len: usize) -> Result<(), Errno> {
        if !address.is_multiple_of(PAGE_BYTES) || len == 0 {
            return Err(libc::EINVAL);
        }
        let _blocked = SignalsBlocked::new();
        let mut space = self.space()?;
        let (base, top) = (self.region.base(), self.region.base() + self.region.len());
        let end = address.saturating_add(len);
        for (start, end) in [(address, end.min(base)), (address.max(top), end)] {
            if start < end {
                self.unmap_outside(&mut space, start, end - start)?;
            }
        }
        match self.region.clip(address, len) {
            Some(range) => self.unmap_pages(&mut space, range),
            None => Ok(()),
        }
    }

    /// Unmaps pages of the region.
    pub(crate) fn unmap_pages(&self, space: &mut Space, range: Range<u32>) -> Result<(), Errno> {
        self.reclaim_foreign(space, range.clone())?;
        let start = self.region.address(PageId(range.start));
        {
            let mut unreadable = self.unreadable();
            // SAFETY: the program unmaps the range; the range stays reserved.
            unsafe { sys::mprotect(start, range.len() << PAGE_SHIFT, libc::PROT_NONE) }
                .map_err(errno)?;
            unreadable.insert(range.clone());
        }
        self.drop_pages(range.clone());
        self.reset_key(space, range.clone())?;
        self.forget_protection(range.clone());
        self.keep_from_children(space, range.clone(), false)?;
        self.advice.forget(range.clone());
        space.free.insert(range);
        Ok(())
    }

    /// Changes the protection of a range.
    ///
    /// # Errors
    /// Those of `mprotect(2)`.
    pub fn protect(&self, address: usize, len: usize, prot: i32) -> Result<(), Errno> {
        self.protect_by_key(address, len, prot, None)
    }

    /// Changes the protection of a range, and its protection key if there is one.
    ///
    /// # Errors
    /// Those of `pkey_mprotect(2)`.
    pub fn protect_by_key(
        &self,
        address: usize,
        len: usize,
        prot: i32,
        key: Option<i32>,
    ) -> Result<(), Errno> {
        if !address.is_multiple_of(PAGE_BYTES) {
            return Err(libc::EINVAL);
        }
        let _blocked = SignalsBlocked::new();
        let mut space = self.space()?;
        for piece in self.region.pieces(address, len) {
            match piece {
                Piece::Other(start, len) => kernel_protect(start, len, prot, key)?,
                Piece::Paged(range) if space.free.overlap(range.clone()).is_empty() => {
                    self.set_key(&mut space, range, prot, key)?;
                }
                Piece::Paged(_) => return Err(libc::ENOMEM),
            }
        }
        Ok(())
    }

    /// Sets the protection of pages with consecutive addresses, which have no protection key.
    pub(crate) fn set_protection(&self, range: Range<u32>, prot: i32) -> Result<(), Errno> {
        let start = self.region.address(PageId(range.start));
        let mut unreadable = self.unreadable();
        kernel_protect(start, range.len() << PAGE_SHIFT, prot, None)?;
        if prot & libc::PROT_READ != 0 {
            unreadable.remove(range)
        } else {
            unreadable.insert(range)
        }
        Ok(())
    }

    /// As [`Pager::set_protection`], for pages that have a key or get one. The pager's threads may
    /// have no right to read pages with another key than 0.
    fn set_key(
        &self,
        space: &mut Space,
        range: Range<u32>,
        prot: i32,
        key: Option<i32>,
    ) -> Result<(), Errno> {
        let start = self.region.address(PageId(range.start));
        let mut unreadable = self.unreadable();
        kernel_protect(start, range.len() << PAGE_SHIFT, prot, key)?;
        match key {
            None => {}
            Some(0) => space.keyed.remove(range.clone()),
            Some(_) => space.keyed.insert(range.clone()),
        }
        if prot & libc::PROT_READ != 0 {
            unreadable.remove(range.clone());
            space.keyed.overlap(range).into_iter().for_each(|part| unreadable.insert(part));
        } else {
            unreadable.insert(range);
        }
        Ok(())
    }

    /// Removes the protection keys of pages that the program unmaps or maps again.
    fn reset_key(&self, space: &mut Space, range: Range<u32>) -> Result<(), Errno> {
        for part in space.keyed.overlap(range) {
            let start = self.region.address(PageId(part.start));
            kernel_protect(start, part.len() << PAGE_SHIFT, libc::PROT_NONE, Some(0))?;
            space.keyed.remove(part);
        }
        Ok(())
    }

    pub(crate) fn forget_protection(&self, range: Range<u32>) {
        self.unreadable().remove(range);
    }

    /// Sets whether forked children get the pager's own pages of a range: not if `kept`.
    pub(crate) fn keep_from_children(
        &self,
        space: &mut Space,
        range: Range<u32>,
        kept: bool,
    ) -> Result<(), Errno> {
        if !kept && space.unforked.overlap(range.clone()).is_empty() {
            return Ok(());
        }
        if self.fork_events {
            let mut ours = RangeSet::default();
            ours.insert(range.clone());
            space.foreign.overlap(range.clone()).into_iter().for_each(|part| ours.remove(part));
            let advice = if kept { libc::MADV_DONTFORK } else { libc::MADV_DOFORK };
            for part in ours.overlap(range.clone()) {
                let start = self.region.address(PageId(part.start));
                // SAFETY: changes only whether a fork copies the range.
                unsafe { sys::madvise(start, part.len() << PAGE_SHIFT, advice) }.map_err(errno)?;
            }
        }
        if kept {
            space.unforked.insert(range)
        } else {
            space.unforked.remove(range)
        }
        Ok(())
    }

    /// Returns the parts of paged memory that a forked child gets and must register, as addresses
    /// and bytes.
    pub(crate) fn parts_for_children(&self, space: &Space) -> Vec<(usize, usize)> {
        let all = self.region.all_numbers().into_iter();
        let parts = all.flat_map(|numbers| space.for_children(numbers));
        let address = |page| self.region.address(PageId(page));
        parts.map(|part| (address(part.start), part.len() << PAGE_SHIFT)).collect()
    }

    /// Replaces the foreign mappings of a range by empty, registered memory of the region.
    pub(crate) fn reclaim_foreign(
        &self,
        space: &mut Space,
        range: Range<u32>,
    ) -> Result<(), Errno> {
        let parts = space.foreign.overlap(range);
        if self.forks.is_light() && !parts.is_empty() {
            return Err(NEEDS_PROMOTION);
        }
        for part in parts {
            let start = self.region.address(PageId(part.start));
            let len = part.len() << PAGE_SHIFT;
            let flags =
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
            // SAFETY: the range is in the region, and the program replaces or unmaps its mapping
            // there.
            unsafe {
                sys::mmap(start, len, libc::PROT_NONE, flags, -1, 0).map_err(errno)?;
                self.region.prepare(start, len, self.fork_events);
                if let Err(error) = self.uffd.register(start, len) {
                    self.fatal("register a part of the region again", &error);
                }
            }
            space.foreign.remove(part);
        }
        Ok(())
    }

    /// Drops the content of pages, which read as zeros afterwards. `space` is locked.
    pub(crate) fn drop_pages(&self, range: Range<u32>) {
        if self.forks.is_light() {
            self.forks.drop_in_child(self, range);
            return;
        }
        self.pages.drop_range(range);
        if self.pages.has_emptied() {
            self.wake_worker(true);
        }
    }

    /// Returns true if the program may close `fd`, which is not one of the pager's descriptors.
    pub fn may_close(fd: i32) -> bool {
        !descriptor::is_ours(fd)
    }
}

fn kernel_protect(start: usize, len: usize, prot: i32, key: Option<i32>) -> Result<(), Errno> {
    let (prot, key) = (prot as usize, key.map(|key| key as usize));
    // SAFETY: the program's own request.
    unsafe {
        match key {
            None => sys::system_call(libc::SYS_mprotect, [start, len, prot, 0, 0, 0]),
            Some(key) => sys::system_call(libc::SYS_pkey_mprotect, [start, len, prot, key, 0, 0]),
        }
    }
    .map(drop)
}
