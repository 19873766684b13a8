//! `madvise` on paged memory.
//!
//! | advice | effect |
//! | --- | --- |
//! | DONTNEED, FREE | the pages are dropped at once |
//! | WILLNEED | the worker brings in pages that are not resident, up to half of the bound |
//! | SEQUENTIAL | recorded: long read-ahead, and pages that were read are the next victims |
//! | RANDOM, NORMAL | recorded: no read-ahead, or the usual one |
//! | COLD | resident pages are the next victims |
//! | PAGEOUT | the worker takes the pages out soon |
//! | DONTFORK, DOFORK | recorded, and passed to the kernel |
//! | HUGEPAGE, MERGEABLE and their opposites | accepted and ignored |
//! | MADV_WIPEONFORK and unknown advice | refused (`EINVAL`), as by an older kernel |

use std::io;
use std::ops::Range;
use std::sync::Mutex;

use crate::errno::Errno;
use crate::latch::{Item, Latch};
use crate::mapping::errno;
use crate::page_table::{PageId, State};
use crate::pager::Pager;
use crate::pages::{Hand, Request};
use crate::region::Piece;
pub use crate::stream::Advice as Access;
use crate::sys::{self, PAGE_BYTES, PAGE_SHIFT, SignalsBlocked};

/// Maximum number of ranges with advice. Advice for further ranges is ignored.
const RANGES: usize = 1024;

/// The advice on access, by ranges of pages. Read without a lock; changes need `space`.
pub struct AdviceMap(Latch);

impl std::fmt::Debug for AdviceMap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.all()).finish()
    }
}

impl AdviceMap {
    /// Creates a map without advice.
    pub fn new() -> io::Result<Self> {
        Latch::new(RANGES).map(Self)
    }

    /// Returns the advice for a page.
    pub fn of(&self, page: PageId) -> Access {
        match self.0.find(u64::from(page.0)).map(|item| item.value) {
            None => Access::Normal,
            Some(value) if value == Access::Sequential as u64 => Access::Sequential,
            Some(_) => Access::Random,
        }
    }

    /// Sets the advice for a range.
    pub(crate) fn set(&self, range: Range<u32>, access: Access) {
        let (start, end) = (u64::from(range.start), u64::from(range.end));
        if access == Access::Normal && !self.0.overlaps(&(start..end)) {
            return;
        }
        let mut items: Vec<Item> = Vec::new();
        for item in self.0.all() {
            items.push(Item { end: item.end.min(start), ..item });
            items.push(Item { start: item.start.max(end), ..item });
        }
        items.push(Item { start, end, value: access as u64 });
        items.retain(|item| item.start < item.end && item.value != Access::Normal as u64);
        items.sort_unstable_by_key(|item| item.start);
        items.dedup_by(|next, last| {
            let joined = last.end == next.start && last.value == next.value;
            if joined {
                last.end = next.end;
            }
            joined
        });
        if items.len() <= self.0.capacity() {
            self.0.set(&items);
        }
    }

    /// Removes the advice for a range that the program unmaps or maps again.
    pub(crate) fn forget(&self, range: Range<u32>) {
        self.set(range, Access::Normal);
    }
}

/// The thread in whose name the worker brings pages in. No thread of Linux has this id.
const ADVISED: u32 = 0;

/// Takes the ranges for which the worker follows the program's advice.
fn take(advised: &Mutex<Vec<Range<u32>>>) -> Vec<Range<u32>> {
    std::mem::take(&mut *advised.lock().expect("no thread panics while it holds this lock"))
}

const MADV_COLD: i32 = 20;
const MADV_PAGEOUT: i32 = 21;
const MADV_POPULATE_READ: i32 = 22;
const MADV_POPULATE_WRITE: i32 = 23;
const MADV_DONTNEED_LOCKED: i32 = 24;

/// Returns true for advice that the pager knows.
///
/// Other advice may drop pages without the pager's knowledge, as MADV_GUARD_INSTALL (Linux 6.13)
/// does. Programs handle EINVAL, because older kernels return it too. MADV_WIPEONFORK is refused
/// because the child would still receive pages that are not resident.
fn is_known(advice: i32) -> bool {
    matches!(
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
    )
}

fn kernel_advise(start: usize, len: usize, advice: i32) -> Result<(), Errno> {
    // SAFETY: the program's own request, on memory that is not paged or with advice that drops
    // nothing.
    unsafe { sys::madvise(start, len, advice) }.map_err(errno)
}

impl Pager {
    /// Applies advice.
    ///
    /// # Errors
    /// Those of `madvise(2)`.
    pub fn advise(&self, address: usize, len: usize, advice: i32) -> Result<(), Errno> {
        if !address.is_multiple_of(PAGE_BYTES) {
            return Err(libc::EINVAL);
        }
        let pieces = self.region.pieces(address, len);
        if !is_known(advice) {
            let _blocked = SignalsBlocked::new();
            let space = self.space()?;
            let is_foreign = |piece: &Piece| match piece {
                Piece::Paged(range) => space.foreign.contains_all(range.clone()),
                Piece::Other(..) => true,
            };
            if !pieces.iter().all(is_foreign) {
                return Err(libc::EINVAL);
            }
        }
        for piece in pieces {
            match piece {
                Piece::Other(start, len) => kernel_advise(start, len, advice)?,
                Piece::Paged(range) => self.advise_pages(range, advice)?,
            }
        }
        Ok(())
    }

    /// Applies advice to pages with consecutive addresses.
    fn advise_pages(&self, range: Range<u32>, advice: i32) -> Result<(), Errno> {
        let _blocked = SignalsBlocked::new();
        let mut space = self.space()?;
        let address = |page: u32| self.region.find_address(PageId(page)).ok_or(libc::ENOMEM);
        let on_foreign = |foreign: Vec<Range<u32>>| {
            foreign.into_iter().try_for_each(|part| {
                kernel_advise(address(part.start)?, part.len() << PAGE_SHIFT, advice)
            })
        };
        match advice {
            libc::MADV_DONTNEED | libc::MADV_FREE | MADV_DONTNEED_LOCKED => {
                on_foreign(space.foreign.overlap(range.clone()))?;
                self.drop_pages(range);
                Ok(())
            }
            libc::MADV_NORMAL | libc::MADV_RANDOM | libc::MADV_SEQUENTIAL => {
                let access = match advice {
                    libc::MADV_RANDOM => Access::Random,
                    libc::MADV_SEQUENTIAL => Access::Sequential,
                    _ => Access::Normal,
                };
                self.advice.set(range, access);
                Ok(())
            }
            libc::MADV_WILLNEED | MADV_COLD | MADV_PAGEOUT => {
                drop(space);
                match advice {
                    // The page server serves a light child: no page is taken out.
                    _ if self.forks.is_light() => {}
                    MADV_COLD => self.pages.note_unneeded(range),
                    libc::MADV_WILLNEED => self.leave_to_worker(&self.advised_in, range),
                    _ => self.leave_to_worker(&self.advised_out, range),
                }
                Ok(())
            }
            libc::MADV_HUGEPAGE
            | libc::MADV_NOHUGEPAGE
            | libc::MADV_MERGEABLE
            | libc::MADV_UNMERGEABLE => Ok(()),
            libc::MADV_DONTFORK | libc::MADV_DOFORK => {
                on_foreign(space.foreign.overlap(range.clone()))?;
                self.keep_from_children(&mut space, range, advice == libc::MADV_DONTFORK)
            }
            other => {
                let start = address(range.start)?;
                drop(space);
                kernel_advise(start, range.len() << PAGE_SHIFT, other)
            }
        }
    }

    fn leave_to_worker(&self, advised: &Mutex<Vec<Range<u32>>>, range: Range<u32>) {
        advised.lock().expect("no thread panics while it holds this lock").push(range);
        self.wake_worker(true);
    }

    /// Brings in the pages of which the program has said that it needs them soon.
    pub(crate) fn bring_in_advised(&self, hand: &mut Hand) {
        for range in take(&self.advised_in) {
            self.bring_in(hand, range);
        }
    }

    /// Brings the pages of a range in that are not resident, in the order of addresses, up to half
    /// of the bound. Each page is served as if a thread had touched it, so that a stream reads the
    /// next ones ahead. A fork ends the work, because it waits for this thread.
    fn bring_in(&self, hand: &mut Hand, range: Range<u32>) {
        let mut left = self.limit() / 2;
        self.pages.table.touched(range.clone(), |part| {
            for page in part.map(PageId) {
                let state = self.pages.table.load(page).state();
                if left == 0 || !matches!(state, State::Remote | State::Shelved) {
                    continue;
                }
                let Some(address) = self.region.find_address(page) else { continue };
                if self.forks.is_asked() || self.pages.is_standstill() {
                    left = 0;
                    continue;
                }
                let Range { start, end } = self.region.neighbours(page);
                let request = Request {
                    page,
                    address,
                    thread: ADVISED,
                    write: false,
                    bounds: start.max(range.start)..end.min(range.end),
                    advice: Access::WillNeed,
                    over_limit: false,
                    alone: self.trace.is_some(),
                };
                let pages = self.pages.fault(hand, &request);
                left = left.saturating_sub(pages);
                self.pages.work(hand, pages);
            }
        });
    }

    /// Takes out the pages of which the program has said that it does not need them soon.
    pub(crate) fn take_out_advised(&self, hand: &mut Hand) {
        for range in take(&self.advised_out) {
            self.pages.table.touched(range, |part| {
                if !self.forks.is_asked() {
                    self.pages.take_out_range(hand, part);
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_advice_replaces_earlier_advice() {
        let advice = AdviceMap::new().unwrap();
        let of = |page| advice.of(PageId(page));
        advice.set(10..20, Access::Random);
        advice.set(20..30, Access::Random);
        assert_eq!(advice.0.len(), 1);
        advice.set(14..16, Access::Sequential);
        assert_eq!((of(9), of(10), of(13)), (Access::Normal, Access::Random, Access::Random));
        assert_eq!(
            (of(14), of(15), of(16)),
            (Access::Sequential, Access::Sequential, Access::Random)
        );
        advice.forget(0..12);
        advice.forget(29..100);
        assert_eq!(
            (of(11), of(12), of(28), of(29)),
            (Access::Normal, Access::Random, Access::Random, Access::Normal)
        );
        advice.forget(0..100);
        assert_eq!(advice.0.len(), 0);
    }

    #[test]
    fn advice_for_too_many_ranges_is_ignored() {
        let advice = AdviceMap::new().unwrap();
        for range in 0..2 * RANGES as u32 {
            advice.set(3 * range..3 * range + 1, Access::Random);
        }
        assert_eq!(advice.0.len(), RANGES);
        assert_eq!(advice.of(PageId(0)), Access::Random);
        assert_eq!(advice.of(PageId(3 * RANGES as u32)), Access::Normal);
    }
}
