//! Changes of the [extents](crate::extent): mapping, adoption and unmapping of paged memory outside
//! of the region.
//!
//! An extent at free addresses is mapped without access first, then registered, and then given its
//! access, so that no page of it exists before the pager knows the extent. Memory that replaces
//! other memory must have its access at once, because other threads may be using the addresses.
//! There, and in adopted memory, pages may exist already; they become resident pages.

use std::ops::Range;

use crate::errno::{Errno, NEEDS_PROMOTION};
use crate::extent::{EXTENTS_MAX, Extent, give_numbers, take_numbers};
use crate::mapping::{MAP_FIXED_NOREPLACE, MapRequest, errno, pages_of};
use crate::page_table::{Entry, PageId, State};
use crate::pager::Pager;
use crate::presence::{PAGES_AT_ONCE, Presence};
use crate::region::Space;
use crate::stats::Counter;
use crate::sys::{self, PAGE_BYTES, PAGE_SHIFT, SignalsBlocked};

/// Maximum size of a mapping that replaces another one with its access at once: longer ones would
/// take too long to search for pages that exist already.
const REPLACED_BYTES_MAX: usize = 1 << 30;

impl Pager {
    /// Maps private anonymous memory at an address that the kernel or the program chooses.
    pub(crate) fn map_outside(&self, request: MapRequest) -> Result<usize, Errno> {
        let _blocked = SignalsBlocked::new();
        let mut space = self.space()?;
        self.map_outside_in(&mut space, request)
    }

    /// As [`Pager::map_outside`], with `space` locked. No part of the range lies in the region.
    ///
    /// If there is no room for another extent, the mapping is made but not paged.
    pub(crate) fn map_outside_in(
        &self,
        space: &mut Space,
        request: MapRequest,
    ) -> Result<usize, Errno> {
        if self.forks.is_light() {
            return Err(NEEDS_PROMOTION);
        }
        let pages = pages_of(request.len)?;
        // Without a reservation: the pager bounds resident memory, and the mapping may be larger.
        let flags = request.flags & !libc::MAP_POPULATE | libc::MAP_NORESERVE;
        let request = MapRequest { flags, ..request };
        let empty = MapRequest { prot: libc::PROT_NONE, ..request };
        let replaces = flags & (libc::MAP_FIXED | MAP_FIXED_NOREPLACE) == libc::MAP_FIXED;
        let at_free_addresses = MapRequest { flags: flags | MAP_FIXED_NOREPLACE, ..empty };
        let at_free_addresses = match replaces {
            true => at_free_addresses.to_kernel().ok(),
            false => Some(empty.to_kernel()?),
        };
        let base = match at_free_addresses {
            Some(base) => {
                self.add_extent(space, base, pages);
                base
            }
            None => {
                let presence =
                    (request.len <= REPLACED_BYTES_MAX).then(|| Presence::open().ok()).flatten();
                let first = if presence.is_some() { request } else { empty };
                let base = self
                    .replace_extents(space, request.address, request.len, || first.to_kernel())?;
                if self.add_extent(space, base, pages)
                    && let Some(presence) = presence
                    && let Err(error) = self.adopt_pages(&presence, base, pages)
                {
                    self.fatal("read which pages of a new mapping exist", &error);
                }
                base
            }
        };
        let access = match self.region.find(base) {
            Some(first) => self.set_protection(first.0..first.0 + pages, request.prot),
            // SAFETY: the mapping that was just made.
            None => unsafe { sys::mprotect(base, request.len, request.prot) }.map_err(errno),
        };
        if let Err(error) = access {
            self.unmap_outside(space, base, request.len)?;
            return Err(error);
        }
        Ok(base)
    }

    /// Pages private anonymous memory that is already mapped and may have content. Returns false if
    /// there is no room for another extent.
    ///
    /// # Errors
    /// `/proc/self/pagemap` cannot be read.
    ///
    /// # Safety
    /// The range is private anonymous memory, at whole pages, that stays mapped or is unmapped by
    /// [`Pager::unmap`].
    pub unsafe fn adopt(&self, base: usize, len: usize) -> std::io::Result<bool> {
        let presence = Presence::open()?;
        let _blocked = SignalsBlocked::new();
        let (Ok(mut space), Ok(pages)) = (self.space(), pages_of(len)) else { return Ok(false) };
        if self.forks.is_light() || !self.add_extent(&mut space, base, pages) {
            return Ok(false);
        }
        self.adopt_pages(&presence, base, pages)?;
        self.wake_evictor(false);
        Ok(true)
    }

    /// Enters the existing pages of a new extent as resident.
    fn adopt_pages(&self, presence: &Presence, base: usize, pages: u32) -> std::io::Result<()> {
        let first = self.region.page(base).0;
        for at in (0..pages).step_by(PAGES_AT_ONCE) {
            let count = PAGES_AT_ONCE.min((pages - at) as usize);
            let address = base + ((at as usize) << PAGE_SHIFT);
            for index in presence.existing(address, count)? {
                self.adopt_page(PageId(first + at + index));
            }
        }
        Ok(())
    }

    /// Enters an existing page as resident, unless the handler has mapped it meanwhile.
    fn adopt_page(&self, page: PageId) {
        let entry = self.table.lock(page);
        if entry.state() != State::Absent {
            return self.settle(page, entry);
        }
        self.take_room_over_limit();
        self.settle(page, Entry::dirty(None));
        self.residency().push(&self.table, page, 1);
    }

    /// Registers mapped memory and makes an extent of it. Returns false if that is not possible.
    fn add_extent(&self, space: &mut Space, base: usize, pages: u32) -> bool {
        let done = self.try_add_extent(space, base, pages);
        if done {
            self.stats.set(Counter::Extents, self.region.extents().len() as u64);
        } else {
            self.stats.add(Counter::MappingsUnpaged, 1);
            self.stats.add(Counter::MappingsUnpagedBytes, u64::from(pages) << PAGE_SHIFT);
        }
        done
    }

    fn try_add_extent(&self, space: &mut Space, base: usize, pages: u32) -> bool {
        let extents = self.region.extents();
        let bytes = (pages as usize) << PAGE_SHIFT;
        if extents.len() >= EXTENTS_MAX {
            return false;
        }
        // SAFETY: memory of the program whose pages this pager manages from now on.
        if unsafe { self.uffd.register(base, bytes) }.is_err() {
            return false;
        }
        let before = base.checked_sub(1).and_then(|last| extents.at(last));
        let after = before.map(|before| before.numbers().end);
        let Some(first) = take_numbers(&self.table, &mut space.unused, pages, after) else {
            if let Err(error) = self.uffd.unregister(base, bytes) {
                self.fatal("unregister memory that cannot be paged", &error);
            }
            return false;
        };
        self.region.prepare(base, bytes, self.fork_events);
        let mut all = extents.all();
        match all.iter_mut().find(|extent| Some(**extent) == before && after == Some(first)) {
            Some(extent) => extent.pages += pages,
            None => all.push(Extent { base, pages, first }),
        }
        extents.set_numbers(&all);
        extents.set_addresses(&all);
        true
    }

    /// Runs `change`, by which the kernel unmaps or replaces a range, and takes the range out of
    /// the extents.
    ///
    /// # Errors
    /// Those of `change`, and `ENOMEM` if too many extents would remain.
    pub(crate) fn replace_extents<T>(
        &self,
        space: &mut Space,
        address: usize,
        len: usize,
        change: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let extents = self.region.extents();
        let range = address..address.saturating_add(len.next_multiple_of(PAGE_BYTES));
        if !extents.overlap(&range) {
            return change();
        }
        if self.forks.is_light() {
            return Err(NEEDS_PROMOTION);
        }
        let (kept, removed) = extents.without(&range).ok_or(libc::ENOMEM)?;
        let mut room = 0;
        let result = {
            // Excludes the evictor, which reads pages, while they become inaccessible.
            let mut unreadable = self.evict_lock();
            let result = change()?;
            // A handler that has set a page BUSY before finds the page's address until the page is
            // released here. A handler that looks for the address later finds no page.
            extents.set_addresses(&kept);
            for part in &removed {
                room += self.release_pages(part.numbers());
                unreadable.remove(part.numbers());
            }
            extents.set_numbers(&kept);
            result
        };
        self.give_room(room);
        for part in &removed {
            self.forget_numbers(space, part.numbers());
            // Threads that wait there fault again, on what is there now.
            if let Err(error) = self.uffd.wake(part.base, part.len()) {
                self.fatal("wake threads that wait for unmapped pages", &error);
            }
        }
        self.stats.set(Counter::Extents, extents.len() as u64);
        Ok(result)
    }

    /// Forgets all properties of pages that have left the extents, and gives their numbers back.
    fn forget_numbers(&self, space: &mut Space, numbers: Range<u32>) {
        space.unforked.remove(numbers.clone());
        space.keyed.remove(numbers.clone());
        self.advice.forget(numbers.clone());
        give_numbers(&self.table, &mut space.unused, numbers);
    }

    /// Unmaps a range that lies outside of the region.
    pub(crate) fn unmap_outside(
        &self,
        space: &mut Space,
        start: usize,
        len: usize,
    ) -> Result<(), Errno> {
        self.replace_extents(space, start, len, || {
            // SAFETY: the program unmaps the range.
            unsafe { sys::munmap(start, len) }.map_err(errno)
        })
    }
}
