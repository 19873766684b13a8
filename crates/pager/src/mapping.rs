//! What the program does with its address space: the `mmap` family on the region.
//!
//! A mapping of the program is a change of protection within the region, which stays mapped. Pages
//! that are unmapped, dropped by advice, or covered by another mapping lose their frames and
//! slots here, and with the last slot of a chunk the chunk.
//!
//! All of it runs on the program's threads, with signals blocked and `space` locked, and with `gate`
//! locked where the evictor must stand still; faults go on, page by page. Errors are `errno` values, as the program expects
//! them.

use std::ops::Range;

use crate::descriptor;
use crate::evict::abandon;
use crate::page_table::{Entry, PageId, State};
use crate::pager::Pager;
use crate::region::{RangeSet, Space};
use crate::slots::SlotId;
use crate::staging::FrameId;
use crate::sys::{self, PAGE_BYTES, PAGE_SHIFT, SignalsBlocked};

/// An `errno`.
pub type Errno = i32;

/// Not an `errno`: another pager took the place of this one, in a forked child.
pub(crate) const MOVED: Errno = -1;
/// Not an `errno`: a forked child needs a pager of its own for this.
const NEEDS_GROWTH: Errno = -2;

/// Makes a call with the program's pager, again where that changed meanwhile. None if there is none.
pub fn with_current<T>(
    call: impl Fn(&'static Pager) -> Result<T, Errno>,
) -> Option<Result<T, Errno>> {
    let mut pager = crate::pager::current()?;
    loop {
        match call(pager) {
            Err(MOVED) => pager = pager.wait_grown(),
            Err(NEEDS_GROWTH) => pager = pager.grow_now(),
            result => return Some(result),
        }
    }
}

/// The arguments of `mmap(2)`.
#[derive(Clone, Copy, Debug)]
pub struct MapRequest {
    /// Hint, or the place with MAP_FIXED.
    pub address: usize,
    /// Bytes.
    pub len: usize,
    /// PROT_*.
    pub prot: i32,
    /// MAP_*.
    pub flags: i32,
    /// File.
    pub fd: i32,
    /// Bytes into the file.
    pub offset: i64,
}

const MAP_FIXED_NOREPLACE: i32 = 0x10_0000;
const KERNELS: i32 = libc::MAP_FIXED
    | MAP_FIXED_NOREPLACE
    | libc::MAP_SHARED
    | libc::MAP_STACK
    | libc::MAP_GROWSDOWN
    | libc::MAP_HUGETLB
    | libc::MAP_LOCKED
    | libc::MAP_32BIT;

impl MapRequest {
    /// True if the pager takes such a mapping: private, anonymous, anywhere, not code.
    ///
    /// There is no least size: a garbage collector maps its heap page by page (Ruby 3.1: 32 KiB at a
    /// time, of which 16 KiB stay mapped), and gigabytes of small mappings would stay resident.
    pub fn is_pageable(&self) -> bool {
        self.flags & (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)
            == libc::MAP_PRIVATE | libc::MAP_ANONYMOUS
            && self.flags & KERNELS == 0
            && self.prot & libc::PROT_EXEC == 0
            && self.len > 0
    }

    /// True if the mapping goes where the program says.
    pub fn is_fixed(&self) -> bool {
        self.flags & (libc::MAP_FIXED | MAP_FIXED_NOREPLACE) != 0
    }

    fn to_kernel(self) -> Result<usize, Errno> {
        // SAFETY: what the program asked for, as it asked for it.
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
    /// Maps fresh zeros in the region. `ENOMEM` if there is no room in the address space.
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

    /// A fixed mapping that lies in the region, wholly or partly.
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

    /// Unmaps. The part outside of the region goes to the kernel.
    pub fn unmap(&self, address: usize, len: usize) -> Result<(), Errno> {
        if !address.is_multiple_of(PAGE_BYTES) || len == 0 {
            return Err(libc::EINVAL);
        }
        let range = self.region.clip(address, len);
        for (start, len) in self.outside(address, len) {
            // SAFETY: the program gives it up.
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
            let mut unreadable = self.gate();
            // The evictor reads pages: it must not meet those that become inaccessible here.
            // SAFETY: the program gives the range up; it stays reserved.
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

    /// Changes the protection.
    pub fn protect(&self, address: usize, len: usize, prot: i32) -> Result<(), Errno> {
        for (start, len) in self.outside(address, len) {
            // SAFETY: what the program asked for.
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
        let mut unreadable = self.gate();
        // SAFETY: what the program asked for; the evictor, which reads these pages, stands still and
        // is told before it goes on.
        unsafe { sys::mprotect(start, range.len() << PAGE_SHIFT, prot) }.map_err(errno)?;
        if prot & libc::PROT_READ != 0 {
            unreadable.remove(range);
        } else {
            unreadable.insert(range);
        }
        Ok(())
    }

    fn forget_protection(&self, range: Range<u32>) {
        self.gate().remove(range);
    }

    /// Advice. What drops pages is done here; what concerns their place is not the program's business
    /// any more.
    pub fn advise(&self, address: usize, len: usize, advice: i32) -> Result<(), Errno> {
        const MADV_COLD: i32 = 20;
        const MADV_PAGEOUT: i32 = 21;
        const MADV_DONTNEED_LOCKED: i32 = 24;
        const MADV_POPULATE_READ: i32 = 22;
        const MADV_POPULATE_WRITE: i32 = 23;
        let paged = self.region.clip(address, len);
        // Advice that this pager does not know may drop pages behind its back, as that of guard
        // regions does (`MADV_GUARD_INSTALL`, Linux 6.13). Kernels before the advice answer so, too.
        // After MADV_WIPEONFORK, pages that are paged out would be there in the child.
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
            // SAFETY: what the program asked for.
            unsafe { sys::madvise(start, len, advice) }.map_err(errno)?;
        }
        let Some(range) = paged else { return Ok(()) };
        match advice {
            libc::MADV_DONTNEED | libc::MADV_FREE | MADV_DONTNEED_LOCKED => {
                let _blocked = SignalsBlocked::new();
                let space = self.space()?;
                for part in space.foreign.overlap(range.clone()) {
                    let start = self.region.address(PageId(part.start));
                    // SAFETY: what the program asked for, on a mapping that is not paged.
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
                    // SAFETY: what the program asked for, on a mapping that is not paged.
                    unsafe { sys::madvise(start, part.len() << PAGE_SHIFT, advice) }
                        .map_err(errno)?;
                }
                self.keep_from_children(&mut space, range, advice == libc::MADV_DONTFORK)
            }
            other => {
                let start = self.region.address(PageId(range.start));
                // SAFETY: what the program asked for; known advice of other kinds drops nothing.
                unsafe { sys::madvise(start, range.len() << PAGE_SHIFT, other) }.map_err(errno)
            }
        }
    }

    /// Pages that are ours are in children, or are not, from now on.
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
                // SAFETY: changes only what a fork copies.
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

    /// What of the region a forked child gets and has to register: addresses and bytes.
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
            // A mapping of another kind inside the region: it would leave a hole that is not ours.
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
            // A light child's pages come from the keeper by their place.
            return Err(NEEDS_GROWTH);
        }
        let prot = if self.gate().contains(range.start) {
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
                // Out of the region: the pages would leave the pager. Nobody does this.
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
        let still = self.gate();
        for page in 0..old.min(new) {
            self.move_page(PageId(range.start + page), PageId(target.start + page));
        }
        drop(still);
        const MREMAP_DONTUNMAP: i32 = 4;
        if flags & MREMAP_DONTUNMAP != 0 {
            self.drop_pages(range);
        } else {
            self.unmap_pages(&mut space, range)?;
        }
        Ok(self.region.address(PageId(target.start)))
    }

    /// Moves what a page holds. The two are mapped alike; `gate` is locked.
    fn move_page(&self, from: PageId, to: PageId) {
        if self.table.load(from) == Entry::ABSENT {
            return;
        }
        let entry = self.table.lock(from);
        self.lock_absent(to);
        let moved = match entry.state() {
            State::Absent => entry,
            State::Remote => Entry::remote(entry.slot().expect("a remote page has a slot")),
            State::Staged => {
                let frame = entry.frame().expect("a staged page has a frame");
                self.staging.set_page(FrameId(frame), to);
                entry
            }
            State::Resident => {
                let (source, target) = (self.region.address(from), self.region.address(to));
                // SAFETY: a resident page, BUSY by us, to an absent one, BUSY by us; then the source,
                // of which there is a copy now, is dropped. The room of the one goes to the other.
                let done = unsafe {
                    self.uffd
                        .copy_without_wake(target, source, PAGE_BYTES, false)
                        .map(drop)
                        .and_then(|()| sys::madvise(source, PAGE_BYTES, libc::MADV_DONTNEED))
                };
                if let Err(error) = done {
                    self.broken("move a page for mremap", &error);
                }
                self.residency().push(&self.table, to, 1);
                Entry::dirty(entry.slot())
            }
        };
        self.settle(to, moved);
        self.settle(from, Entry::ABSENT);
    }

    /// Sets a page of a move's target BUSY, with nothing in it.
    ///
    /// Read-ahead of the mapping below may have filled the page with zeros since the target was
    /// dropped: the kernel merges neighbouring mappings, and the handler goes by the page table.
    fn lock_absent(&self, page: PageId) {
        loop {
            let entry = self.table.lock(page);
            if entry.state() == State::Absent {
                return;
            }
            let room = self.drop_run(&[(page, entry)]);
            self.give_room(room);
        }
    }

    /// The parts of a range that are not in the region.
    fn outside(&self, address: usize, len: usize) -> Vec<(usize, usize)> {
        let end = address.saturating_add(len);
        let (base, top) = (self.region.base(), self.region.base() + self.region.len());
        [(address, end.min(base)), (address.max(top), end)]
            .into_iter()
            .filter(|(start, end)| start < end)
            .map(|(start, end)| (start, end - start))
            .collect()
    }

    /// Makes the foreign parts of a range ours again: empty and registered.
    fn reclaim_foreign(&self, space: &mut Space, range: Range<u32>) -> Result<(), Errno> {
        let parts = space.foreign.overlap(range);
        if self.forks.is_light() && !parts.is_empty() {
            return Err(NEEDS_GROWTH);
        }
        for part in parts {
            let start = self.region.address(PageId(part.start));
            let len = part.len() << PAGE_SHIFT;
            let flags =
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
            // SAFETY: the range is in the region, and what the program mapped there goes away.
            unsafe {
                sys::mmap(start, len, libc::PROT_NONE, flags, -1, 0).map_err(errno)?;
                self.region.prepare(start, len, self.fork_events);
                if let Err(error) = self.uffd.register(start, len) {
                    self.broken("register a part of the region again", &error);
                }
            }
            space.foreign.remove(part);
        }
        Ok(())
    }

    /// Drops the content of pages: they read as zeros. With `space` locked.
    fn drop_pages(&self, range: Range<u32>) {
        if self.forks.is_light() {
            self.forks.drop_in_child(self, range);
            return;
        }
        let _still = self.gate();
        let mut room = 0;
        self.table.touched(range, |part| {
            let mut at = part.start;
            while at < part.end {
                // A run of pages that hold something.
                let mut run = Vec::new();
                while at < part.end {
                    let now = self.table.load(PageId(at));
                    if now.state() == State::Absent && !now.is_busy() {
                        break;
                    }
                    run.push((PageId(at), self.table.lock(PageId(at))));
                    at += 1;
                }
                room += self.drop_run(&run);
                at += 1;
            }
        });
        self.give_room(room);
    }

    /// Drops a contiguous run of BUSY pages; returns how many were resident.
    fn drop_run(&self, run: &[(PageId, Entry)]) -> u32 {
        let resident = |entry: Entry| entry.state() == State::Resident;
        if run.iter().any(|&(_, entry)| resident(entry)) {
            let start = self.region.address(run[0].0);
            // SAFETY: the program drops these pages, and they are BUSY by us.
            let done = unsafe { sys::madvise(start, run.len() * PAGE_BYTES, libc::MADV_DONTNEED) };
            if let Err(error) = done {
                self.broken("drop pages", &error);
            }
        }
        let mut freed: Vec<SlotId> = Vec::new();
        for &(page, entry) in run {
            match entry.state() {
                State::Staged => {
                    let frame = FrameId(entry.frame().expect("a staged page has a frame"));
                    freed.extend(abandon(self.staging.leave(frame)));
                }
                _ => freed.extend(entry.slot().map(SlotId)),
            }
            self.table.set_pinned(page, false);
            self.settle(page, Entry::ABSENT);
        }
        if !freed.is_empty() {
            let mut emptied = Vec::new();
            {
                let mut slots = self.slots();
                emptied.extend(freed.into_iter().filter_map(|slot| slots.free(slot)));
            }
            self.note_emptied(emptied);
        }
        run.iter().filter(|&&(_, entry)| resident(entry)).count() as u32
    }

    /// `close(2)` for the program: our descriptors are not its to close.
    pub fn may_close(fd: i32) -> bool {
        !descriptor::is_ours(fd)
    }
}
