//! Slots: places of 4 KiB, in chunks, that hold evicted pages.
//!
//! ```text
//!  SlotId = chunk index << pages_log2 | page in chunk
//!
//!  chunks:  0 [pool 17]   1 [overflow 0]   2 [pool 4]   ...
//!             ####.##       ####             #....        used / free pages
//! ```
//!
//! A chunk is allocated when no open chunk has room, and freed when its last slot is freed. When
//! the pool is full, chunks are allocated in the overflow file, and the pool is tried again later.
//! Pages that are evicted together get adjacent slots, so that they are written and read in one
//! transfer.
//!
//! Slots are *frozen* while a forked child may still read their content (see [`crate::fork`]). Each
//! fork begins an *epoch*; a child needs the slots that were used at its fork. A frozen slot is
//! neither overwritten nor reused while the child of any epoch from the slot's first freeze to its
//! free lives. So slots become free again even if there is always a living child.
//!
//! Each slot has the fingerprint of its content ([`crate::fingerprint`]). A slot whose content is
//! encrypted has its seal too (`seals`).
//!
//! Two kinds of slots have no memory. The content of an *inherited* slot is held by the page server
//! of another process ([`crate::fork`]). A *word* slot is a page that repeats one word, which the
//! index itself contains.
//!
//! Invariants: a used slot belongs to one page or one position; `live` is the number of used slots
//! of a chunk; a chunk without used slots does not exist.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use seal::Seal;
use smallvec::{SmallVec, smallvec};

use crate::page_table::PageId;
use crate::sys::{PAGE_BYTES, PAGE_SHIFT};
use crate::transport::ChunkHandle;

mod compaction;
mod fill;
mod scatter;
mod seals;

pub use compaction::Usage;
use fill::Fill;
use scatter::Scatter;
pub use scatter::{Random, kernel_random};
pub use seals::{Key, Sealing};

/// Index of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u64);

/// Bit in the index of a slot whose content the page server of another process holds: see
/// [`crate::fork`].
const INHERITED: u64 = 1 << 47;
/// Bit in the index of a slot whose page repeats a word. Two bits below it name the form of the
/// word, and the lower ones hold it.
const WORD: u64 = 1 << 46;
const WORD_BITS: u32 = 44;

impl SlotId {
    /// Returns the slot of a forked child's page whose content its parent's page server holds.
    pub fn inherited(page: PageId) -> Self {
        Self(INHERITED | u64::from(page.0))
    }

    /// Returns the slot of a page that repeats a word, if the index can hold the word. An index can
    /// hold a repeated 32-bit pattern, or a word with 20 leading or 20 trailing zero bits.
    pub fn word(word: u64) -> Option<Self> {
        let low = word & u64::from(u32::MAX);
        let (kind, bits) = if word >> 32 == low {
            (0, low)
        } else if word.trailing_zeros() >= 20 {
            (1, word >> 20)
        } else if word.leading_zeros() >= 20 {
            (2, word)
        } else {
            return None;
        };
        Some(Self(WORD | kind << WORD_BITS | bits))
    }

    /// Returns the word that the page of a word slot repeats, or `None` for another slot.
    pub fn as_word(self) -> Option<u64> {
        if self.0 & (INHERITED | WORD) != WORD {
            return None;
        }
        let bits = self.0 & ((1 << WORD_BITS) - 1);
        Some(match self.0 >> WORD_BITS & 0b11 {
            0 => bits << 32 | bits,
            1 => bits << 20,
            _ => bits,
        })
    }

    /// Returns true if the slot has a place in a chunk.
    fn has_place(self) -> bool {
        self.0 & (INHERITED | WORD) == 0
    }

    /// Returns the page of an inherited slot, or `None` for a slot of this process.
    pub fn inherited_page(self) -> Option<PageId> {
        (self.0 & INHERITED != 0).then_some(PageId(self.0 as u32))
    }
}

/// Location of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkLocation {
    /// A chunk of the pool.
    Pool(ChunkHandle),
    /// A chunk-sized stretch of the overflow file, by index.
    Overflow(u32),
}

/// Location of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Location of its chunk.
    pub location: ChunkLocation,
    /// Byte offset in the chunk.
    pub offset_bytes: u32,
}

/// Source or target of a transfer of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A place in a chunk.
    Place(Place),
    /// A page of the parent's page server.
    Inherited(PageId),
    /// A repeated word.
    Word(u64),
}

/// Location of a chunk that has become empty. The caller frees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Emptied(pub ChunkLocation);

/// Number of a fork. The numbers ascend, and restart when no child needs a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Epoch(pub u32);

struct Chunk {
    location: ChunkLocation,
    /// A bit for each slot. This list and `prints` need no memory of their own in chunks of 4 KiB.
    used: SmallVec<[u64; 1]>,
    /// Epoch of the first freeze of each slot, 0 for a slot that was never frozen. Empty if no slot
    /// of the chunk was ever frozen.
    frozen: Vec<u32>,
    /// Fingerprints of the content of used slots, 0 for a slot without a fingerprint.
    prints: SmallVec<[u128; 1]>,
    /// Seals of the content of used slots. Empty if the chunk's content is not encrypted.
    seals: SmallVec<[Seal; 1]>,
    live: u32,
    /// The slots are moved to other chunks: see [`compaction`].
    is_closed: bool,
}

/// A slot whose freeing waits for children.
struct Deferred {
    slot: SlotId,
    /// Epochs whose children may read the slot.
    epochs: std::ops::RangeInclusive<Epoch>,
}

/// All slots of a process.
pub struct Slots {
    chunks: Vec<Option<Chunk>>,
    vacant: Vec<u32>,
    /// Chunks that are not closed.
    fill: Fill,
    /// Chunks that were closed by the pass of compaction in progress.
    closed: Vec<u32>,
    /// Number of used slots.
    live: u64,
    open: Option<u32>,
    cursor: u32,
    pages_log2: u32,
    overflow_free: Vec<u32>,
    overflow_next: u32,
    full_since: Option<Instant>,
    /// Ascending by the last epoch.
    deferred: Vec<Deferred>,
    /// The latest epoch. Restarts at 0 when no child needs a slot.
    epoch: Epoch,
    /// Number of children per epoch that need slots.
    dependents: BTreeMap<Epoch, u32>,
    freezing: bool,
    pool_chunks: u32,
    overflow_chunks: u32,
    inherited: u32,
    sealing: Sealing,
    scatter: Option<Scatter>,
}

/// Time after which the pager asks a pool again that was full.
const FULL_RETRY_INTERVAL: Duration = Duration::from_millis(100);

impl Slots {
    /// Creates an empty set of slots, in chunks of `chunk_bytes`.
    pub fn new(chunk_bytes: usize) -> Self {
        assert!(chunk_bytes.is_power_of_two() && chunk_bytes >= PAGE_BYTES);
        Self {
            chunks: Vec::new(),
            vacant: Vec::new(),
            fill: Fill::default(),
            closed: Vec::new(),
            live: 0,
            open: None,
            cursor: 0,
            pages_log2: chunk_bytes.trailing_zeros() - PAGE_SHIFT,
            overflow_free: Vec::new(),
            overflow_next: 0,
            full_since: None,
            deferred: Vec::new(),
            epoch: Epoch(0),
            dependents: BTreeMap::new(),
            freezing: false,
            pool_chunks: 0,
            overflow_chunks: 0,
            inherited: 0,
            sealing: Sealing::None,
            scatter: None,
        }
    }

    /// Sets the number of inherited slots.
    pub fn inherit(&mut self, slots: u32) {
        self.inherited = slots;
    }

    /// Returns the number of inherited slots that are still in use.
    pub fn inherited(&self) -> u32 {
        self.inherited
    }

    /// Returns the number of chunks held in the pool and in the overflow file.
    pub fn held(&self) -> (u32, u32) {
        (self.pool_chunks, self.overflow_chunks)
    }

    /// Returns the bytes of a chunk.
    pub fn chunk_bytes(&self) -> usize {
        PAGE_BYTES << self.pages_log2
    }

    fn chunk_pages(&self) -> u32 {
        1 << self.pages_log2
    }

    /// Allocates a slot, adjacent to the previously allocated one where possible. Returns `None` if
    /// no chunk has room: the caller adds one, by [`Slots::add_pool_chunk`] or, if
    /// [`Slots::wants_pool`] is false, by [`Slots::add_overflow_chunk`]. So the lock of the slots
    /// is not held while the pool allocates.
    pub fn allocate(&mut self) -> Option<SlotId> {
        if self.scatter.is_some() {
            return self.allocate_scattered();
        }
        loop {
            if let Some(slot) = self.allocate_open() {
                return Some(slot);
            }
            self.cursor = 0;
            self.open = self.roomy();
            self.open?;
        }
    }

    /// Allocates a slot of the chunk that was added last. Returns `None` if the chunk is full.
    pub fn allocate_open(&mut self) -> Option<SlotId> {
        if self.scatter.is_some() {
            // The first slot only. The others are drawn from all chunks.
            return self.open.take().and_then(|index| self.allocate_within(index));
        }
        self.open.and_then(|index| self.allocate_in(index))
    }

    fn allocate_in(&mut self, index: u32) -> Option<SlotId> {
        let (cursor, pages) = (self.cursor, self.chunk_pages());
        let chunk = self.chunks[index as usize].as_mut().expect("the open chunk exists");
        let page = free_page(&chunk.used, cursor, pages)?;
        set(&mut chunk.used, page, true);
        chunk.live += 1;
        self.live += 1;
        self.fill.set(index, chunk.live, self.pages_log2);
        if self.freezing {
            chunk.frozen.resize(pages as usize, 0);
            chunk.frozen[page as usize] = self.epoch.0;
        }
        self.cursor = page + 1;
        Some(SlotId(u64::from(index) << self.pages_log2 | u64::from(page)))
    }

    /// Returns a chunk in which the next slots are allocated: one of the emptiest, if at least a
    /// quarter of the chunk is free. If the pool is full or chunks are being compacted, one free
    /// slot is enough.
    fn roomy(&self) -> Option<u32> {
        let takes_any = !self.closed.is_empty() || !self.wants_pool();
        self.fill.emptiest(if takes_any { fill::ANY_FREE } else { fill::QUARTER_FREE })
    }

    /// Returns true if the caller should ask the pool for a chunk. False for a while after the pool
    /// was full.
    pub fn wants_pool(&self) -> bool {
        self.full_since.is_none_or(is_retry_due)
    }

    /// Adds a chunk of the pool, from which the next slots are allocated.
    pub fn add_pool_chunk(&mut self, handle: ChunkHandle) {
        self.full_since = None;
        self.pool_chunks += 1;
        self.cursor = 0;
        self.open = Some(self.add_chunk(ChunkLocation::Pool(handle)));
    }

    /// Notes that the pool is full.
    pub fn note_full(&mut self) {
        self.full_since = Some(Instant::now());
    }

    /// Adds a chunk of the overflow file, from which the next slots are allocated.
    pub fn add_overflow_chunk(&mut self) {
        let stretch = self.overflow_free.pop().unwrap_or_else(|| {
            self.overflow_next += 1;
            self.overflow_next - 1
        });
        self.overflow_chunks += 1;
        self.cursor = 0;
        self.open = Some(self.add_chunk(ChunkLocation::Overflow(stretch)));
    }

    /// Notes that a stretch of the overflow file is free: the caller has freed the location that
    /// [`Slots::free`] returned. A new chunk that used the stretch earlier would lose its content.
    pub fn note_freed(&mut self, stretch: u32) {
        self.overflow_free.push(stretch);
    }

    /// Records the fingerprint of the content that is written to a slot.
    pub fn set_print(&mut self, slot: SlotId, print: u128) {
        let (index, page) = self.split(slot);
        let chunk = self.chunks[index].as_mut().expect("a slot's chunk exists");
        chunk.prints[page as usize] = print;
    }

    /// Returns the fingerprint of a slot's content, if it is known.
    pub fn print(&self, slot: SlotId) -> Option<u128> {
        if !slot.has_place() {
            return None;
        }
        let (index, page) = self.split(slot);
        let print =
            self.chunks[index].as_ref().expect("a slot's chunk exists").prints[page as usize];
        (print != 0).then_some(print)
    }

    /// Returns the source of a slot's content.
    pub fn source(&self, slot: SlotId) -> Source {
        match (slot.inherited_page(), slot.as_word()) {
            (Some(page), _) => Source::Inherited(page),
            (None, Some(word)) => Source::Word(word),
            (None, None) => Source::Place(self.place(slot)),
        }
    }

    fn add_chunk(&mut self, location: ChunkLocation) -> u32 {
        let words = (self.chunk_pages() as usize).div_ceil(64);
        let chunk = Chunk {
            location,
            used: smallvec![0; words],
            frozen: Vec::new(),
            prints: smallvec![0; self.chunk_pages() as usize],
            seals: match self.sealing.includes(location) {
                true => smallvec![Seal::default(); self.chunk_pages() as usize],
                false => SmallVec::new(),
            },
            live: 0,
            is_closed: false,
        };
        match self.vacant.pop() {
            Some(index) => {
                self.chunks[index as usize] = Some(chunk);
                index
            }
            None => {
                self.chunks.push(Some(chunk));
                self.chunks.len() as u32 - 1
            }
        }
    }

    fn split(&self, slot: SlotId) -> (usize, u32) {
        ((slot.0 >> self.pages_log2) as usize, slot.0 as u32 & (self.chunk_pages() - 1))
    }

    /// Returns the location of a slot.
    pub fn place(&self, slot: SlotId) -> Place {
        let (index, page) = self.split(slot);
        let chunk = self.chunks[index].as_ref().expect("a slot's chunk exists");
        debug_assert!(get(&chunk.used, page), "{slot:?} is free");
        Place { location: chunk.location, offset_bytes: page << PAGE_SHIFT }
    }

    /// Returns true if the slot must not be overwritten.
    pub fn is_frozen(&self, slot: SlotId) -> bool {
        !slot.has_place() || self.is_needed(self.first_freeze(slot), self.epoch)
    }

    /// Returns the epoch of the slot's first freeze, 0 if it was never frozen.
    fn first_freeze(&self, slot: SlotId) -> Epoch {
        let (index, page) = self.split(slot);
        let chunk = self.chunks[index].as_ref().expect("a slot's chunk exists");
        Epoch(chunk.frozen.get(page as usize).copied().unwrap_or(0))
    }

    /// Returns true if a child of one of these epochs lives.
    fn is_needed(&self, first: Epoch, last: Epoch) -> bool {
        first != Epoch(0) && self.dependents.range(first..=last).next().is_some()
    }

    /// Frees a slot. The free of a frozen slot is deferred until no child needs the slot. If the
    /// slot's chunk becomes empty, the chunk is removed, and the caller frees the returned
    /// location.
    #[must_use]
    pub fn free(&mut self, slot: SlotId) -> Option<Emptied> {
        if slot.inherited_page().is_some() {
            self.inherited -= 1;
            return None;
        }
        if !slot.has_place() {
            return None;
        }
        let first = self.first_freeze(slot);
        if self.is_needed(first, self.epoch) {
            self.deferred.push(Deferred { slot, epochs: first..=self.epoch });
            return None;
        }
        self.free_now(slot)
    }

    /// Frees a slot that was allocated and that no page or position has named since. No child can
    /// read it, so the free is not deferred, even while a fork is in progress.
    #[must_use]
    pub fn give_back(&mut self, slot: SlotId) -> Option<Emptied> {
        self.free_now(slot)
    }

    fn free_now(&mut self, slot: SlotId) -> Option<Emptied> {
        let (index, page) = self.split(slot);
        let chunk = self.chunks[index].as_mut().expect("a slot's chunk exists");
        assert!(get(&chunk.used, page), "{slot:?} is freed twice");
        set(&mut chunk.used, page, false);
        chunk.prints[page as usize] = 0;
        if let Some(seal) = chunk.seals.get_mut(page as usize) {
            self.sealing.forget(&std::mem::take(seal));
        }
        if let Some(first) = chunk.frozen.get_mut(page as usize) {
            *first = 0;
        }
        chunk.live -= 1;
        self.live -= 1;
        if chunk.live > 0 {
            if !chunk.is_closed {
                self.fill.set(index as u32, chunk.live, self.pages_log2);
            }
            return None;
        }
        let location = chunk.location;
        self.fill.remove(index as u32);
        self.chunks[index] = None;
        self.vacant.push(index as u32);
        if self.open == Some(index as u32) {
            self.open = None;
        }
        match location {
            ChunkLocation::Pool(_) => self.pool_chunks -= 1,
            ChunkLocation::Overflow(_) => self.overflow_chunks -= 1,
        }
        // The pool has free memory again once this chunk is freed.
        self.full_since = None;
        Some(Emptied(location))
    }

    /// Begins the epoch of a fork: freezes all used slots, and all slots that are allocated until
    /// [`Slots::end_freezing`]. One child needs them, until [`Slots::remove_dependent`].
    pub fn freeze(&mut self) -> Epoch {
        self.freezing = true;
        self.freeze_used()
    }

    /// Begins the epoch of a fork whose snapshot is taken before the next slot is allocated:
    /// freezes all used slots, as [`Slots::freeze`] does.
    pub fn freeze_used(&mut self) -> Epoch {
        // After 2^32 forks without a gap, all further ones share an epoch, so that slots stay
        // frozen for longer than necessary.
        self.epoch = Epoch(self.epoch.0.saturating_add(1));
        self.add_dependent(self.epoch);
        for chunk in self.chunks.iter_mut().flatten() {
            chunk.frozen.resize(1 << self.pages_log2, 0);
            for (page, first) in chunk.frozen.iter_mut().enumerate() {
                if *first == 0 && get(&chunk.used, page as u32) {
                    *first = self.epoch.0;
                }
            }
        }
        self.epoch
    }

    /// Ends the freezing of newly allocated slots.
    pub fn end_freezing(&mut self) {
        self.freezing = false;
    }

    /// Returns true between [`Slots::freeze`] and [`Slots::end_freezing`].
    pub fn is_freezing(&self) -> bool {
        self.freezing
    }

    /// Counts one more child that needs the slots of an epoch.
    pub fn add_dependent(&mut self, epoch: Epoch) {
        *self.dependents.entry(epoch).or_default() += 1;
    }

    /// Returns true if a child needs frozen slots.
    pub fn has_dependents(&self) -> bool {
        !self.dependents.is_empty()
    }

    /// Records that one child less needs the slots of an epoch. Frees the slots whose free was
    /// deferred and that no child needs any more. Returns the chunks that became empty.
    #[must_use]
    pub fn remove_dependent(&mut self, epoch: Epoch) -> Vec<Emptied> {
        let children = self.dependents.get_mut(&epoch).expect("a child of this epoch was counted");
        *children -= 1;
        if *children > 0 {
            return Vec::new();
        }
        self.dependents.remove(&epoch);
        // Slots that were freed before this epoch do not depend on its children.
        let from = self.deferred.partition_point(|deferred| *deferred.epochs.end() < epoch);
        let mut emptied = Vec::new();
        for deferred in self.deferred.split_off(from) {
            let (first, last) = deferred.epochs.clone().into_inner();
            if self.is_needed(first, last) {
                self.deferred.push(deferred);
            } else {
                emptied.extend(self.free_now(deferred.slot));
            }
        }
        if self.dependents.is_empty() {
            self.chunks.iter_mut().flatten().for_each(|chunk| chunk.frozen = Vec::new());
            self.epoch = Epoch(0);
        }
        emptied
    }
}

/// Returns true if the pager should ask a pool again that was full at `since`.
fn is_retry_due(since: Instant) -> bool {
    #[cfg(test)]
    if let Some(step) = crate::sim::fiber::step() {
        return step.is_multiple_of(64);
    }
    since.elapsed() >= FULL_RETRY_INTERVAL
}

fn get(bits: &[u64], index: u32) -> bool {
    bits[index as usize / 64] >> (index % 64) & 1 != 0
}

fn set(bits: &mut [u64], index: u32, value: bool) {
    let mask = 1u64 << (index % 64);
    if value {
        bits[index as usize / 64] |= mask;
    } else {
        bits[index as usize / 64] &= !mask;
    }
}

/// Returns the first free page from `from` on, wrapping around to the start.
fn free_page(used: &[u64], from: u32, pages: u32) -> Option<u32> {
    let find = |range: std::ops::Range<u32>| {
        let mut at = range.start;
        while at < range.end {
            let free = !used[at as usize / 64] >> (at % 64);
            if free == 0 {
                at = (at / 64 + 1) * 64;
                continue;
            }
            at += free.trailing_zeros();
            return (at < range.end).then_some(at);
        }
        None
    };
    find(from.min(pages)..pages).or_else(|| find(0..from.min(pages)))
}

#[cfg(test)]
#[path = "slots_tests.rs"]
mod tests;
