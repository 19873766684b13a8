//! The state of every page of the region, 8 bytes each.
//!
//! ```text
//!  63                    16 15     8  7    6    5    4    3    2   1  0
//! +------------------------+---------+----+----+----+----+----+---+----+
//! | slot or pos. (48 bit)  | evicted |pin | -  |slot| -  |wait|bus|stat|
//! +------------------------+---------+----+----+----+----+----+---+----+
//! ```
//!
//! | state | location of the content | payload |
//! | --- | --- | --- |
//! | Absent | none: the page reads as zeros | none |
//! | Resident | the program's memory; it may differ from its slot | slot, if SLOT |
//! | Shelved | a position of the shelf, or on its way there | position |
//! | Remote | its slot | slot |
//!
//! Invariants:
//! - A page changes its state only under BUSY, which one thread sets with a compare-and-swap. A
//!   busy page keeps its old state and payload, so a reader finds the previous location of the
//!   content.
//! - A fault handler that finds a page busy sets WAIT and drops the fault. The thread that clears
//!   BUSY and finds WAIT wakes the page's waiters, which then fault again. So handlers never block
//!   on a page.
//! - EVICTED says when the page was last taken out, as a stamp of the replacement policy's caller.
//!   The stamp is a hint, and stays through all states.
//!
//! The table is reserved memory that the kernel backs on first touch, so a program that uses little
//! of the region needs little of the table. [`PageTable::touched`] skips parts that were never
//! used.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::point;
use crate::sys::{self, PAGE_BYTES};

/// Index of a page in the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u32);

/// Location of a page's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Never written, or dropped: the page reads as zeros.
    Absent,
    /// The program's memory.
    Resident,
    /// A position of the shelf ([`crate::shelf`]), or on its way there.
    Shelved,
    /// A slot.
    Remote,
}

/// Value of one entry, not the atomic itself.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Entry(u64);

const STATE: u64 = 0b11;
const BUSY: u64 = 1 << 2;
const WAIT: u64 = 1 << 3;
const SLOT: u64 = 1 << 5;
const PINNED: u64 = 1 << 7;
const EVICTED_SHIFT: u32 = 8;
const EVICTED: u64 = 0xff << EVICTED_SHIFT;
/// Bits that stay when BUSY is cleared.
const KEPT: u64 = PINNED | EVICTED;
const PAYLOAD_SHIFT: u32 = 16;
const LOW: u64 = (1 << PAYLOAD_SHIFT) - 1;

impl Entry {
    /// An absent page, which reads as zeros.
    pub const ABSENT: Self = Self(0);

    /// Resident. `slot` holds an earlier or the same content.
    pub fn resident(slot: Option<u64>) -> Self {
        match slot {
            Some(slot) => Self(1 | SLOT | slot << PAYLOAD_SHIFT),
            None => Self(1),
        }
    }

    /// On the shelf, at `position`.
    pub fn shelved(position: u32) -> Self {
        Self(2 | u64::from(position) << PAYLOAD_SHIFT)
    }

    /// Remote in `slot`.
    pub fn remote(slot: u64) -> Self {
        Self(3 | slot << PAYLOAD_SHIFT)
    }

    /// Returns the location of the content.
    pub fn state(self) -> State {
        match self.0 & STATE {
            0 => State::Absent,
            1 => State::Resident,
            2 => State::Shelved,
            _ => State::Remote,
        }
    }

    /// Returns true if a thread is changing the page's state.
    pub fn is_busy(self) -> bool {
        self.0 & BUSY != 0
    }

    /// Returns true if the program has locked the page in memory.
    pub fn is_pinned(self) -> bool {
        self.0 & PINNED != 0
    }

    /// Returns the stamp of the last time at which the page was taken out.
    pub fn evicted(self) -> u8 {
        (self.0 >> EVICTED_SHIFT) as u8
    }

    /// Returns the slot of a remote or resident page.
    pub fn slot(self) -> Option<u64> {
        match self.state() {
            State::Remote => Some(self.0 >> PAYLOAD_SHIFT),
            State::Resident if self.0 & SLOT != 0 => Some(self.0 >> PAYLOAD_SHIFT),
            _ => None,
        }
    }

    /// Returns the position of a page on the shelf.
    pub fn position(self) -> Option<u32> {
        (self.state() == State::Shelved).then_some((self.0 >> PAYLOAD_SHIFT) as u32)
    }
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}({:#x}, {:#04x})", self.state(), self.0 >> PAYLOAD_SHIFT, self.0 & LOW)
    }
}

/// Pages per byte of the map of touched blocks: the entries in one page of the table.
pub const BLOCK_PAGES: usize = PAGE_BYTES / 8;

/// The page table.
pub struct PageTable {
    entries: *const AtomicU64,
    touched: *const AtomicU8,
    touched_blocks: AtomicU32,
    pages: usize,
}

// SAFETY: all access to the two arrays is atomic, and they are never unmapped before drop.
unsafe impl Send for PageTable {}
// SAFETY: as above.
unsafe impl Sync for PageTable {}

impl PageTable {
    /// Creates a table of `pages` absent pages.
    pub fn new(pages: usize) -> io::Result<Self> {
        let entries = sys::map_anonymous(pages * 8)? as *const AtomicU64;
        let touched = sys::map_anonymous(pages.div_ceil(BLOCK_PAGES))? as *const AtomicU8;
        Ok(Self { entries, touched, touched_blocks: AtomicU32::new(0), pages })
    }

    /// Returns the number of pages.
    pub fn len(&self) -> usize {
        self.pages
    }

    /// Returns true if the table has no page.
    pub fn is_empty(&self) -> bool {
        self.pages == 0
    }

    fn entry(&self, page: PageId) -> &AtomicU64 {
        assert!((page.0 as usize) < self.pages, "page {} of {}", page.0, self.pages);
        // SAFETY: in bounds; anonymous memory starts as zeros and is only accessed as atomics.
        unsafe { &*self.entries.add(page.0 as usize) }
    }

    fn block(&self, index: usize) -> &AtomicU8 {
        assert!(index < self.pages.div_ceil(BLOCK_PAGES));
        // SAFETY: in bounds; see `entry`.
        unsafe { &*self.touched.add(index) }
    }

    /// Loads the current entry.
    pub fn load(&self, page: PageId) -> Entry {
        point();
        self.peek(page)
    }

    pub(crate) fn peek(&self, page: PageId) -> Entry {
        Entry(self.entry(page).load(Ordering::Acquire))
    }

    /// Sets BUSY if `admit` accepts the entry. Returns `None` if the page is busy or not admitted.
    pub fn try_lock(&self, page: PageId, admit: impl Fn(Entry) -> bool) -> Option<Entry> {
        point();
        let entry = self.entry(page);
        let mut now = entry.load(Ordering::Acquire);
        loop {
            if now & BUSY != 0 || !admit(Entry(now)) {
                return None;
            }
            match entry.compare_exchange_weak(now, now | BUSY, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => {
                    self.touch(page);
                    return Some(Entry(now));
                }
                Err(other) => now = other,
            }
        }
    }

    /// Sets BUSY; if another thread has set it, sets WAIT and returns `None`.
    pub fn lock_or_wait(&self, page: PageId) -> Option<Entry> {
        point();
        let entry = self.entry(page);
        let mut now = entry.load(Ordering::Acquire);
        loop {
            let busy = now & BUSY != 0;
            let next = if busy { now | WAIT } else { now | BUSY };
            match entry.compare_exchange_weak(now, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) if busy => return None,
                Ok(_) => {
                    self.touch(page);
                    return Some(Entry(now));
                }
                Err(other) => now = other,
            }
        }
    }

    /// Sets BUSY. Spins while another thread has set it, and calls `pause` now and then. Only for
    /// threads on which no fault depends.
    pub fn lock_with(&self, page: PageId, pause: impl Fn()) -> Entry {
        let mut spins = 0u32;
        loop {
            if let Some(entry) = self.try_lock(page, |_| true) {
                return entry;
            }
            spins += 1;
            if spins < 64 {
                std::hint::spin_loop();
            } else {
                pause();
            }
        }
    }

    /// As [`PageTable::lock_with`], giving way to other threads of the machine.
    pub fn lock(&self, page: PageId) -> Entry {
        self.lock_with(page, std::thread::yield_now)
    }

    /// Stores the new state and clears BUSY; PINNED and EVICTED stay. Returns true if a thread
    /// waits: the caller must wake the page.
    #[must_use]
    pub fn unlock(&self, page: PageId, new: Entry) -> bool {
        point();
        let entry = self.entry(page);
        let mut now = entry.load(Ordering::Acquire);
        loop {
            assert!(now & BUSY != 0, "page {} is not busy", page.0);
            let next = new.0 & !(BUSY | WAIT | KEPT) | now & KEPT;
            match entry.compare_exchange_weak(now, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break,
                Err(other) => now = other,
            }
        }
        now & WAIT != 0
    }

    /// Sets the stamp of the last time at which the page was taken out. The page is BUSY by this
    /// thread.
    pub fn set_evicted(&self, page: PageId, stamp: u8) {
        let entry = self.entry(page);
        let change = u64::from(stamp ^ Entry(entry.load(Ordering::Acquire)).evicted());
        // Only the holder of BUSY changes the stamp.
        entry.fetch_xor(change << EVICTED_SHIFT, Ordering::AcqRel);
    }

    /// Sets or clears PINNED.
    pub fn set_pinned(&self, page: PageId, pinned: bool) {
        if pinned {
            self.entry(page).fetch_or(PINNED, Ordering::AcqRel);
        } else {
            self.entry(page).fetch_and(!PINNED, Ordering::AcqRel);
        }
        self.touch(page);
    }

    /// Notes that an entry changes. Called before the page gets content: a thread that sees the
    /// content may drop the page before BUSY is cleared.
    fn touch(&self, page: PageId) {
        let block = self.block(page.0 as usize / BLOCK_PAGES);
        if block.load(Ordering::Relaxed) == 0 && block.swap(1, Ordering::AcqRel) == 0 {
            self.touched_blocks.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the bytes of the table that have memory.
    pub fn used_bytes(&self) -> u64 {
        u64::from(self.touched_blocks.load(Ordering::Relaxed)) * PAGE_BYTES as u64
    }

    /// Calls `visit` with the part of `range` in each block in which an entry has ever been
    /// changed.
    pub fn touched(&self, range: Range<u32>, mut visit: impl FnMut(Range<u32>)) {
        let mut at = range.start;
        while at < range.end {
            let index = at as usize / BLOCK_PAGES;
            let next = (((index + 1) * BLOCK_PAGES) as u64).min(u64::from(range.end)) as u32;
            if self.block(index).load(Ordering::Acquire) != 0 {
                visit(at..next);
            }
            at = next;
        }
    }
}

impl Drop for PageTable {
    fn drop(&mut self) {
        // SAFETY: the table owns both arrays, and no reference outlives it.
        unsafe {
            let _ = sys::unmap_anonymous(self.entries as usize, self.pages * 8);
            let blocks = self.pages.div_ceil(BLOCK_PAGES);
            let _ = sys::unmap_anonymous(self.touched as usize, blocks);
        }
    }
}

/// A fixed array of 64-bit words. It starts as zeros, and the kernel backs it on first touch.
pub struct Words {
    start: *mut u64,
    len: usize,
}

// SAFETY: the words belong to this value alone, and stay mapped until it is dropped.
unsafe impl Send for Words {}
// SAFETY: as above; a shared reference only reads.
unsafe impl Sync for Words {}

impl Words {
    /// Creates an array of `len` words.
    pub fn new(len: usize) -> io::Result<Self> {
        let start = sys::map_anonymous(len.max(1) * 8)? as *mut u64;
        Ok(Self { start, len })
    }

    /// Returns a word.
    pub fn get(&self, index: usize) -> u64 {
        assert!(index < self.len, "word {index} of {}", self.len);
        // SAFETY: in bounds, and mapped as long as `self` exists.
        unsafe { *self.start.add(index) }
    }

    /// Sets a word.
    pub fn set(&mut self, index: usize, word: u64) {
        assert!(index < self.len, "word {index} of {}", self.len);
        // SAFETY: as above, and nothing else refers to the words.
        unsafe { *self.start.add(index) = word }
    }
}

impl std::fmt::Debug for Words {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Words({})", self.len)
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: this value owns the words, and no reference outlives it.
        let _ = unsafe { sys::unmap_anonymous(self.start as usize, self.len.max(1) * 8) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_return_their_state_and_payload() {
        let slot = (1 << 40) + 7;
        assert_eq!(Entry::ABSENT.state(), State::Absent);
        assert_eq!(Entry::remote(slot).slot(), Some(slot));
        assert_eq!(Entry::resident(Some(0)).slot(), Some(0));
        assert_eq!(Entry::resident(None).slot(), None);
        assert_eq!(Entry::shelved(9).position(), Some(9));
        assert_eq!(Entry::shelved(9).slot(), None);
    }

    #[test]
    fn busy_page_keeps_its_payload_and_records_waiters() {
        let table = PageTable::new(10_000).unwrap();
        let page = PageId(5_000);
        assert_eq!(table.lock(page), Entry::ABSENT);
        assert!(!table.unlock(page, Entry::remote(3)));
        assert_eq!(table.lock_or_wait(page).unwrap().slot(), Some(3));
        assert_eq!(table.load(page).slot(), Some(3));
        assert!(table.try_lock(page, |_| true).is_none());
        assert!(table.lock_or_wait(page).is_none());
        assert!(table.unlock(page, Entry::resident(Some(3))), "a waiter is reported once");
        assert_eq!(table.lock(page).state(), State::Resident);
        assert!(!table.unlock(page, Entry::ABSENT));
    }

    #[test]
    fn stamp_and_pinned_bit_survive_transitions() {
        let table = PageTable::new(16).unwrap();
        let page = PageId(1);
        table.set_pinned(page, true);
        table.lock(page);
        table.set_evicted(page, 0xa5);
        table.set_evicted(page, 0xc3);
        let _ = table.unlock(page, Entry::remote(7));
        let entry = table.load(page);
        assert_eq!((entry.evicted(), entry.is_pinned(), entry.slot()), (0xc3, true, Some(7)));
    }

    #[test]
    fn words_start_as_zeros_and_keep_their_values() {
        let mut words = Words::new(10_000).unwrap();
        assert_eq!((words.get(0), words.get(9_999)), (0, 0));
        words.set(9_999, 5);
        assert_eq!((words.get(9_998), words.get(9_999)), (0, 5));
        assert!(std::panic::catch_unwind(|| Words::new(10).unwrap().get(10)).is_err());
    }

    #[test]
    fn only_touched_blocks_are_visited() {
        let table = PageTable::new(1 << 20).unwrap();
        let page = PageId(513);
        table.lock(page);
        let _ = table.unlock(page, Entry::resident(None));
        let mut seen = Vec::new();
        table.touched(100..1 << 20, |range| seen.push(range));
        assert_eq!(seen, vec![512..1024u32; 1]);
        seen.clear();
        table.touched(514..600, |range| seen.push(range));
        assert_eq!(seen, vec![514..600u32; 1]);
    }
}
