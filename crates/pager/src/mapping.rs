//! The `mmap` family on the region: map, unmap, protect, advise and remap.
//!
//! The region stays mapped. A mapping of the program is a change of protection within it. Pages
//! that are unmapped, dropped by advice, or replaced by another mapping lose their frames and slots
//! here. A chunk is freed with its last slot.
//!
//! All functions run on the program's threads with signals blocked and `space` locked. Faults are
//! served concurrently, page by page. Errors are `errno` values for the program.

use std::ops::Range;

use crate::descriptor;
pub use crate::errno::Errno;
use crate::errno::{MOVED, NEEDS_PROMOTION};
use crate::page_table::PageId;
use crate::pager::Pager;
use crate::pages::Hand;
use crate::region::{RangeSet, Space};
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

const MAP_FIXED_NOREPLACE: i32 = 0x10_0000;
const UNPAGEABLE_FLAGS: i32 = libc::MAP_FIXED
    | MAP_FIXED_NOREPLACE
    | libc::MAP_SHARED
    | libc::MAP_STACK
    | libc::MAP_GROWSDOWN
    | libc::MAP_HUGETLB
    | libc::MAP_LOCKED
    | libc::MAP_32BIT;

impl MapRequest {
    /// Returns true if the pager serves such a mapping: private, anonymous, not executable, at any
    /// address.
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

    /// Returns true if the program chooses the address.
    pub fn is_fixed(&self) -> bool {
        self.flags & (libc::MAP_FIXED | MAP_FIXED_NOREPLACE) != 0
    }

    fn to_kernel(self) -> Result<usize, Errno> {
        // SAFETY: the program's own request, unchanged.
        unsafe { sys::mmap(self.address, self.len, self.prot, self.flags, self.fd, self.offset) }
            .map_err(errno)
    }
}

fn errno(error: std::io::Error) -> Errno {
    error.raw_os_error().unwrap_or(libc::EIO)
}

fn pages_of(len: usize) -> Result<u32, Errno> {
    u32::try_from(len.div_ceil(PAGE_BYTES)).map_err(|_| libc::ENOMEM)
}

impl Pager {
    /// Maps zeroed memory in the region.
    ///
    /// # Errors
    /// `ENOMEM` if no free range is large enough.
    pub fn map(&self, len: usize, prot: i32) -> Result<usize, Errno> {
        if len == 0 {
            return Err(libc::EINVAL);
        }
        let pages = pages_of(len)?;
        let _blocked = SignalsBlocked::new();
        let mut space = self.space()?;
        let range = space.free.find_last(pages).ok_or(libc::ENOMEM)?;
        self.set_protection(range.clone(), prot)?;
        space.free.remove(range.clone());
        Ok(self.region.address(PageId(range.start)))
    }

    /// Maps at a fixed address that lies in the region, wholly or partly.
    pub fn map_fixed(&self, request: MapRequest) -> Result<usize, Errno> {
        let Some(range) = self.region.clip(request.address, request.len) else {
            return request.to_kernel();
        };
        let whole = self.region.address(PageId(range.start)) == request.address
            && range.len() == request.len.div_ceil(PAGE_BYTES);
        let _blocked = SignalsBlocked::new();
        let mut space = self.space()?;
        if request.flags & MAP_FIXED_NOREPLACE != 0 && !space.free.contains_all(range.clone()) {
            return Err(libc::EEXIST);
        }
        let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let special = libc::MAP_SHARED | libc::MAP_GROWSDOWN | libc::MAP_HUGETLB;
        if whole && request.flags & anonymous == anonymous && request.flags & special == 0 {
            self.reclaim_foreign(&mut space, range.clone())?;
            self.drop_pages(range.clone());
            self.set_protection(range.clone(), request.prot)?;
            self.keep_from_children(&mut space, range.clone(), false)?;
            space.free.remove(range);
            return Ok(request.address);
        }
        self.drop_pages(range.clone());
        let flags = request.flags & !MAP_FIXED_NOREPLACE | libc::MAP_FIXED;
        let mapped = MapRequest { flags, ..request }.to_kernel()?;
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
        let range = self.region.clip(address, len);
        for (start, len) in self.outside(address, len) {
            // SAFETY: the program unmaps the range.
            unsafe { sys::munmap(start, len) }.map_err(errno)?;
        }
        let Some(range) = range else { return Ok(()) };
        let _blocked = SignalsBlocked::new();
        let mut space = self.space()?;
        self.unmap_pages(&mut space, range)
    }

    fn unmap_pages(&self, space: &mut Space, range: Range<u32>) -> Result<(), Errno> {
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
        self.forget_protection(range.clone());
        self.keep_from_children(space, range.clone(), false)?;
        space.free.insert(range);
        Ok(())
    }

    /// Changes the protection of a range.
    pub fn protect(&self, address: usize, len: usize, prot: i32) -> Result<(), Errno> {
        for (start, len) in self.outside(address, len) {
            // SAFETY: the program's own request.
            unsafe { sys::mprotect(start, len, prot) }.map_err(errno)?;
        }
        let Some(range) = self.region.clip(address, len) else { return Ok(()) };
        let _blocked = SignalsBlocked::new();
        let space = self.space()?;
        if !space.free.overlap(range.clone()).is_empty() {
            return Err(libc::ENOMEM);
        }
        self.set_protection(range, prot)
    }

    fn set_protection(&self, range: Range<u32>, prot: i32) -> Result<(), Errno> {
        let start = self.region.address(PageId(range.start));
        let mut unreadable = self.unreadable();
        // SAFETY: the program's own request.
        unsafe { sys::mprotect(start, range.len() << PAGE_SHIFT, prot) }.map_err(errno)?;
        if prot & libc::PROT_READ != 0 {
            unreadable.remove(range);
        } else {
            unreadable.insert(range);
        }
        Ok(())
    }

    fn forget_protection(&self, range: Range<u32>) {
        self.unreadable().remove(range);
    }

    /// Applies advice. Advice that drops pages is done by the pager. Advice on residency is
    /// accepted and ignored, because the pager decides which pages are resident.
    pub fn advise(&self, address: usize, len: usize, advice: i32) -> Result<(), Errno> {
        const MADV_COLD: i32 = 20;
        const MADV_PAGEOUT: i32 = 21;
        const MADV_DONTNEED_LOCKED: i32 = 24;
        const MADV_POPULATE_READ: i32 = 22;
        const MADV_POPULATE_WRITE: i32 = 23;
        let paged = self.region.clip(address, len);
        // Advice that the pager does not know may drop pages without the pager's knowledge, as
        // MADV_GUARD_INSTALL (Linux 6.13) does. Programs handle EINVAL, because older kernels
        // return it too. MADV_WIPEONFORK is refused because the child would still receive pages
        // that are not resident.
        let is_known = matches!(
            advice,
            libc::MADV_NORMAL
                ..=libc::MADV_DONTNEED
                    | libc::MADV_FREE
                    | libc::MADV_DONTFORK
                    | libc::MADV_DOFORK
                    | libc::MADV_MERGEABLE
                    | libc::MADV_UNMERGEABLE
                    | libc::MADV_HUGEPAGE
                    | libc::MADV_NOHUGEPAGE
                    | libc::MADV_DONTDUMP
                    | libc::MADV_DODUMP
                    | libc::MADV_KEEPONFORK
                    | MADV_COLD
                    | MADV_PAGEOUT
                    | MADV_POPULATE_READ
                    | MADV_POPULATE_WRITE
                    | MADV_DONTNEED_LOCKED
        );
        if let Some(range) = paged.clone().filter(|_| !is_known) {
            let _blocked = SignalsBlocked::new();
            let foreign = self.space()?.foreign.overlap(range.clone());
            if foreign.iter().map(|part| part.len()).sum::<usize>() < range.len() {
                return Err(libc::EINVAL);
            }
        }
        for (start, len) in self.outside(address, len) {
            // SAFETY: the program's own request.
            unsafe { sys::madvise(start, len, advice) }.map_err(errno)?;
        }
        let Some(range) = paged else { return Ok(()) };
        match advice {
            libc::MADV_DONTNEED | libc::MADV_FREE | MADV_DONTNEED_LOCKED => {
                let _blocked = SignalsBlocked::new();
                let space = self.space()?;
                for part in space.foreign.overlap(range.clone()) {
                    let start = self.region.address(PageId(part.start));
                    // SAFETY: the program's own request, on a mapping that is not paged.
                    unsafe { sys::madvise(start, part.len() << PAGE_SHIFT, advice) }
                        .map_err(errno)?;
                }
                self.drop_pages(range);
                Ok(())
            }
            libc::MADV_NORMAL
            | libc::MADV_RANDOM
            | libc::MADV_SEQUENTIAL
            | libc::MADV_WILLNEED
            | libc::MADV_HUGEPAGE
            | libc::MADV_NOHUGEPAGE
            | libc::MADV_MERGEABLE
            | libc::MADV_UNMERGEABLE
            | MADV_COLD
            | MADV_PAGEOUT => Ok(()),
            libc::MADV_DONTFORK | libc::MADV_DOFORK => {
                let _blocked = SignalsBlocked::new();
                let mut space = self.space()?;
                for part in space.foreign.overlap(range.clone()) {
                    let start = self.region.address(PageId(part.start));
                    // SAFETY: the program's own request, on a mapping that is not paged.
                    unsafe { sys::madvise(start, part.len() << PAGE_SHIFT, advice) }
                        .map_err(errno)?;
                }
                self.keep_from_children(&mut space, range, advice == libc::MADV_DONTFORK)
            }
            other => {
                let start = self.region.address(PageId(range.start));
                // SAFETY: the program's own request; other known advice drops nothing.
                unsafe { sys::madvise(start, range.len() << PAGE_SHIFT, other) }.map_err(errno)
            }
        }
    }

    /// Sets whether forked children get the pager's own pages of a range: not if `kept`.
    fn keep_from_children(
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

    /// Returns the parts of the region that a forked child gets and must register, as addresses and
    /// bytes.
    pub(crate) fn parts_for_children(&self, space: &Space) -> Vec<(usize, usize)> {
        let parts = space.for_children(0..self.region.pages()).into_iter();
        let address = |page| self.region.address(PageId(page));
        parts.map(|part| (address(part.start), part.len() << PAGE_SHIFT)).collect()
    }

    /// Resizes or moves a mapping that begins in the region.
    pub fn remap(
        &self,
        address: usize,
        old_len: usize,
        new_len: usize,
        flags: i32,
        new_address: usize,
    ) -> Result<usize, Errno> {
        if !address.is_multiple_of(PAGE_BYTES) || new_len == 0 || old_len == 0 {
            return Err(libc::EINVAL);
        }
        let (old, new) = (pages_of(old_len)?, pages_of(new_len)?);
        if new > self.region.pages() {
            return Err(libc::ENOMEM);
        }
        let Some(range) = self.region.clip(address, old_len) else { return Err(libc::EFAULT) };
        let _blocked = SignalsBlocked::new();
        let mut space = self.space()?;
        if range.len() as u32 != old || !space.free.overlap(range.clone()).is_empty() {
            return Err(libc::EFAULT);
        }
        if !space.foreign.overlap(range.clone()).is_empty() {
            // Part of the range is a foreign mapping. Moving it would leave a hole that the pager
            // does not own.
            return Err(libc::EINVAL);
        }
        let fixed = flags & libc::MREMAP_FIXED != 0;
        if !fixed && new <= old {
            if new < old {
                self.unmap_pages(&mut space, range.start + new..range.end)?;
            }
            return Ok(address);
        }
        if self.forks.is_light() {
            // A light child's page server finds pages by their address, so a light child cannot
            // move them.
            return Err(NEEDS_PROMOTION);
        }
        let prot = if self.unreadable().contains(range.start) {
            libc::PROT_NONE
        } else {
            libc::PROT_READ | libc::PROT_WRITE
        };
        let more = range.end..range.start + new;
        if !fixed && space.free.contains_all(more.clone()) {
            self.set_protection(more.clone(), prot)?;
            space.free.remove(more);
            return Ok(address);
        }
        if flags & libc::MREMAP_MAYMOVE == 0 {
            return Err(libc::ENOMEM);
        }
        let target = if fixed {
            match self.region.clip(new_address, new_len) {
                Some(target)
                    if target.len() as u32 == new && new_address.is_multiple_of(PAGE_BYTES) =>
                {
                    self.reclaim_foreign(&mut space, target.clone())?;
                    self.drop_pages(target.clone());
                    target
                }
                // The target lies outside of the region, where pages cannot be paged. No known
                // program needs this.
                _ => return Err(libc::EINVAL),
            }
        } else {
            space.free.find_last(new).ok_or(libc::ENOMEM)?
        };
        if target.start < range.end && range.start < target.end {
            return Err(libc::EINVAL);
        }
        self.set_protection(target.clone(), prot)?;
        space.free.remove(target.clone());
        let mut hand = Hand::default();
        for page in 0..old.min(new) {
            let (from, to) = (PageId(range.start + page), PageId(target.start + page));
            self.pages.move_page(&mut hand, from, to);
        }
        const MREMAP_DONTUNMAP: i32 = 4;
        if flags & MREMAP_DONTUNMAP != 0 {
            self.drop_pages(range);
        } else {
            self.unmap_pages(&mut space, range)?;
        }
        Ok(self.region.address(PageId(target.start)))
    }

    /// Returns the parts of a range that lie outside of the region, as addresses and bytes.
    fn outside(&self, address: usize, len: usize) -> Vec<(usize, usize)> {
        let end = address.saturating_add(len);
        let (base, top) = (self.region.base(), self.region.base() + self.region.len());
        [(address, end.min(base)), (address.max(top), end)]
            .into_iter()
            .filter(|(start, end)| start < end)
            .map(|(start, end)| (start, end - start))
            .collect()
    }

    /// Replaces the foreign mappings of a range by empty, registered memory of the region.
    fn reclaim_foreign(&self, space: &mut Space, range: Range<u32>) -> Result<(), Errno> {
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
    fn drop_pages(&self, range: Range<u32>) {
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
