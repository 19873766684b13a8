//! `mremap` on paged memory.

use crate::errno::{Errno, NEEDS_PROMOTION};
use crate::mapping::{MapRequest, pages_of};
use crate::page_table::PageId;
use crate::pager::Pager;
use crate::pages::Hand;
use crate::region::Piece;
use crate::sys::{PAGE_BYTES, SignalsBlocked};

/// Linux 5.7; not in all versions of the `libc` crate for all C libraries.
const MREMAP_DONTUNMAP: i32 = 4;

impl Pager {
    /// Resizes or moves a mapping that begins in paged memory.
    ///
    /// # Errors
    /// Those of `mremap(2)`. A mapping that is only partly paged cannot be moved (`EINVAL`).
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
        let (fixed, keeps) = (flags & libc::MREMAP_FIXED != 0, flags & MREMAP_DONTUNMAP != 0);
        let known = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | MREMAP_DONTUNMAP;
        let moves = flags & libc::MREMAP_MAYMOVE != 0;
        if flags & !known != 0 || (fixed || keeps) && !moves {
            return Err(libc::EINVAL);
        }
        let (old, new) = (pages_of(old_len)?, pages_of(new_len)?);
        if keeps && old != new {
            return Err(libc::EINVAL);
        }
        if new > self.region.numbers() / 2 {
            return Err(libc::ENOMEM);
        }
        let (old_bytes, new_bytes) = (old as usize * PAGE_BYTES, new as usize * PAGE_BYTES);
        let _blocked = SignalsBlocked::new();
        let mut space = self.space()?;
        let pieces = self.region.pieces(address, old_bytes);
        let [Piece::Paged(range)] = &pieces[..] else { return Err(libc::EFAULT) };
        let range = range.clone();
        let in_region = range.start < self.region.pages();
        if !space.free.overlap(range.clone()).is_empty() {
            return Err(libc::EFAULT);
        }
        if !space.foreign.overlap(range.clone()).is_empty() {
            // Part of the range is a foreign mapping. Moving it would leave a hole that the pager
            // does not own.
            return Err(libc::EINVAL);
        }
        if fixed || keeps {
            let end = new_address.checked_add(new_bytes).ok_or(libc::EINVAL)?;
            let meets = new_address < address + old_bytes && address < end;
            if meets || !new_address.is_multiple_of(PAGE_BYTES) {
                return Err(libc::EINVAL);
            }
        }
        if !fixed && !keeps && new <= old {
            if new < old && in_region {
                self.unmap_pages(&mut space, range.start + new..range.end)?;
            } else if new < old {
                self.unmap_outside(&mut space, address + new_bytes, old_bytes - new_bytes)?;
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
        let more = range.end..range.end.saturating_add(new.saturating_sub(old));
        if !fixed && !keeps && in_region && space.free.contains_all(more.clone()) {
            self.set_protection(more.clone(), prot)?;
            space.free.remove(more);
            return Ok(address);
        }
        if !moves {
            return Err(libc::ENOMEM);
        }
        let request = |address, flags| MapRequest {
            address,
            len: new_bytes,
            prot,
            flags: libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags,
            fd: -1,
            offset: 0,
        };
        let target = if fixed {
            match self.region.clip(new_address, new_bytes) {
                Some(target) if target.len() as u32 == new => {
                    self.reclaim_foreign(&mut space, target.clone())?;
                    self.drop_pages(target.clone());
                    self.set_protection(target.clone(), prot)?;
                    Some(target)
                }
                Some(_) => return Err(libc::EINVAL),
                None => {
                    self.map_outside_in(&mut space, request(new_address, libc::MAP_FIXED))?;
                    None
                }
            }
        } else if keeps && new_address != 0 && !self.region.overlaps(new_address, new_bytes) {
            // The address is a hint, which only the kernel can tell to be free.
            None
        } else if let Some(target) = space.free.find_last(new) {
            self.set_protection(target.clone(), prot)?;
            Some(target)
        } else {
            None
        };
        let new_hint = if keeps { new_address } else { 0 };
        let target = match target {
            Some(target) => {
                space.free.remove(target.clone());
                target
            }
            None => {
                let at = match fixed {
                    true => new_address,
                    false => self.map_outside_in(&mut space, request(new_hint, 0))?,
                };
                match &self.region.pieces(at, new_bytes)[..] {
                    [Piece::Paged(target)] => target.clone(),
                    _ => {
                        // There is no room for another extent.
                        self.unmap_outside(&mut space, at, new_bytes)?;
                        return Err(libc::ENOMEM);
                    }
                }
            }
        };
        let mut hand = Hand::default();
        for page in 0..old.min(new) {
            let (from, to) = (PageId(range.start + page), PageId(target.start + page));
            self.pages.move_page(&mut hand, from, to);
        }
        if keeps {
            self.drop_pages(range);
        } else if in_region {
            self.unmap_pages(&mut space, range)?;
        } else {
            self.unmap_outside(&mut space, address, old_bytes)?;
        }
        Ok(self.region.address(PageId(target.start)))
    }
}
