//! The state of a group: its chunks, their slabs, and the blocks in limbo.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::classes::{Class, Classes};
use crate::epoch::Epochs;
use crate::lists::{ListId, Lists};
use crate::place::Place;
use crate::slab::Slab;

/// Blocks that one call frees from limbo at most, when the caller waits for the call.
pub(crate) const SLICE: usize = 64;

/// Blocks that a free takes out of limbo at most: more than it puts there, so that limbo drains.
const PER_FREE: usize = 2;

/// Frees between two attempts to begin an epoch. An attempt reads a cache line of each lane.
const FREES_PER_EPOCH: u32 = 32;

/// Entries of limbo whose memory is kept when limbo is empty.
const LIMBO_KEPT: usize = 4096;

/// A chunk of a group.
pub(crate) struct Chunk<C> {
    pub handle: C,
    pub place: Place,
    /// Number of slabs that have a class.
    pub slabs_used: u32,
    /// No new block is allocated in the chunk.
    pub is_evacuating: bool,
}

/// A block in limbo.
#[derive(Clone, Copy)]
pub(super) struct Freed {
    pub epoch: u64,
    pub slab: u32,
    pub block: u32,
}

/// Counts of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub live: u64,
    pub limbo: u64,
    pub slabs: u64,
}

/// The state of a group.
///
/// A slab's list follows from its state ([`State::wanted_list`]), and is set again after each
/// change. Slab `n` of the chunk in slot `s` has the number `s * slabs of a chunk + n`.
pub(crate) struct State<C> {
    pub(super) classes: Arc<Classes>,
    /// The chunks by slot.
    pub(super) chunks: Vec<Option<Chunk<C>>>,
    /// Slots without a chunk.
    pub(super) vacant: Vec<u32>,
    pub(super) slabs: Vec<Slab>,
    /// For each class the slabs with a free block, and then the slabs without a class in chunks
    /// that are used.
    pub(super) lists: Lists,
    /// Slots of the chunks in which no slab has a class.
    pub(super) empty: Vec<u32>,
    /// The blocks in limbo, by epoch.
    pub(super) limbo: VecDeque<Freed>,
    pub(super) counts: Vec<Counts>,
    /// Chunks that are being allocated for the reserve.
    pub coming: usize,
    frees: u32,
}

impl<C> State<C> {
    pub fn new(classes: Arc<Classes>) -> Self {
        let (lists, counts) =
            (Lists::new(classes.count() + 1), vec![Counts::default(); classes.count()]);
        Self {
            classes,
            chunks: Vec::new(),
            vacant: Vec::new(),
            slabs: Vec::new(),
            lists,
            empty: Vec::new(),
            limbo: VecDeque::new(),
            counts,
            coming: 0,
            frees: 0,
        }
    }

    /// Number of empty chunks.
    pub fn empty(&self) -> usize {
        self.empty.len()
    }

    /// Number of blocks in limbo.
    pub fn limbo(&self) -> usize {
        self.limbo.len()
    }

    /// The chunk in `slot`, if it has `place`.
    pub fn chunk_at(&self, slot: u32, place: Place) -> Option<&Chunk<C>> {
        let chunk = self.chunks.get(slot as usize)?.as_ref()?;
        let (start, bytes) = (chunk.place, self.classes.chunk_bytes());
        let is_within = place.node() == start.node()
            && place.offset() >= start.offset()
            && place.offset() - start.offset() < bytes;
        is_within.then_some(chunk)
    }

    /// The slot of the next chunk.
    pub fn next_slot(&self) -> u32 {
        self.vacant.last().copied().unwrap_or(self.chunks.len() as u32)
    }

    /// Adds an empty chunk.
    pub fn add(&mut self, handle: C, place: Place) {
        let slot = self.next_slot();
        if self.vacant.pop().is_none() {
            self.chunks.push(None);
            let slabs = self.chunks.len() * self.classes.slabs() as usize;
            self.slabs.resize_with(slabs, Slab::default);
        }
        let chunk = Chunk { handle, place, slabs_used: 0, is_evacuating: false };
        self.chunks[slot as usize] = Some(chunk);
        self.empty.push(slot);
    }

    /// Removes an empty chunk if there are more than `keep`.
    pub fn remove_empty(&mut self, keep: usize) -> Option<Chunk<C>> {
        if self.empty.len() <= keep {
            return None;
        }
        let slot = self.empty.pop()?;
        self.vacant.push(slot);
        for slab in self.slabs_of(slot) {
            self.slabs[slab as usize] = Slab::default();
        }
        self.chunks[slot as usize].take()
    }

    /// Allocates a block of `class`. `None` if the group needs another chunk.
    pub fn allocate(&mut self, class: Class, epochs: &Epochs) -> Option<Place> {
        if self.lists.first(class.number()).is_none() && !self.limbo.is_empty() {
            epochs.advance_twice();
            self.collect(epochs, SLICE);
        }
        let slab = match self.lists.first(class.number()) {
            Some(slab) => slab,
            None => self.open_next(class)?,
        };
        let taken = &mut self.slabs[slab as usize];
        let block = taken.take().expect("a listed slab has a free block");
        if taken.is_full() {
            self.relist(slab);
        }
        self.counts[class.index()].live += 1;
        Some(self.place_of(slab, block))
    }

    /// Moves the block at `place` in the chunk in `slot` to limbo. False if it is not live.
    pub fn retire(&mut self, slot: u32, place: Place, epochs: &Epochs) -> bool {
        let Some((slab, class, block)) = self.block_at(slot, place) else { return false };
        if !self.slabs[slab as usize].retire(block) {
            return false;
        }
        let counts = &mut self.counts[class.index()];
        (counts.live, counts.limbo) = (counts.live - 1, counts.limbo + 1);
        self.limbo.push_back(Freed { epoch: epochs.retire(), slab, block });
        self.frees += 1;
        if self.frees.is_multiple_of(FREES_PER_EPOCH) {
            epochs.advance();
        }
        self.collect(epochs, PER_FREE);
        true
    }

    /// Frees at most `most` blocks of limbo that no reader can know. Returns their number.
    pub fn collect(&mut self, epochs: &Epochs, most: usize) -> usize {
        let mut collected = 0;
        while collected < most
            && let Some(freed) = self.limbo.front().copied()
            && epochs.has_passed(freed.epoch)
        {
            self.limbo.pop_front();
            self.release(freed);
            collected += 1;
        }
        collected
    }

    /// Returns memory that limbo needed in the past.
    pub fn shrink(&mut self) {
        if self.limbo.is_empty() {
            self.limbo.shrink_to(LIMBO_KEPT);
        }
    }

    /// The slab, class and number of the block that begins at `place` in the chunk in `slot`.
    pub fn block_at(&self, slot: u32, place: Place) -> Option<(u32, Class, u32)> {
        let (slab, within) = self.slab_at(slot, place)?;
        let class = self.slabs[slab as usize].class?;
        let units = self.classes.units(class);
        within.is_multiple_of(units).then(|| (slab, class, within / units))
    }

    /// True if the block at `place` in the chunk in `slot` is live; with its length in bytes.
    pub fn live_bytes_at(&self, slot: u32, place: Place) -> Option<u64> {
        let (slab, class, block) = self.block_at(slot, place)?;
        self.slabs[slab as usize].is_live(block).then(|| self.classes.bytes(class))
    }

    /// The slab that has `place`, and the units before `place` in it.
    pub(super) fn slab_at(&self, slot: u32, place: Place) -> Option<(u32, u32)> {
        let start = self.chunk_at(slot, place)?.place;
        let (units, per_slab) = (place.units() - start.units(), self.classes.slab_units());
        let slab = slot * self.classes.slabs() + (units / per_slab) as u32;
        Some((slab, (units % per_slab) as u32))
    }

    /// The place of a block.
    pub(super) fn place_of(&self, slab: u32, block: u32) -> Place {
        let (slot, number) = (slab / self.classes.slabs(), slab % self.classes.slabs());
        let chunk = self.chunks[slot as usize].as_ref().expect("a used slab has a chunk");
        let class = self.slabs[slab as usize].class.expect("a used slab has a class");
        let units = u64::from(block) * u64::from(self.classes.units(class));
        chunk.place.plus(u64::from(number) * self.classes.slab_units() + units)
    }

    /// Numbers of the slabs of the chunk in `slot`.
    pub(super) fn slabs_of(&self, slot: u32) -> std::ops::Range<u32> {
        let slabs = self.classes.slabs();
        slot * slabs..(slot + 1) * slabs
    }

    /// Gives `class` to an unused slab, of a chunk that is used if there is one.
    fn open_next(&mut self, class: Class) -> Option<u32> {
        let slab = match self.lists.first(self.unused_list()) {
            Some(slab) => slab,
            None => self.empty.pop()? * self.classes.slabs(),
        };
        self.open(slab, class);
        Some(slab)
    }

    /// Gives `class` to an unused slab.
    pub(super) fn open(&mut self, slab: u32, class: Class) {
        self.slabs[slab as usize].divide(class, self.classes.blocks(class));
        self.counts[class.index()].slabs += 1;
        let slot = slab / self.classes.slabs();
        let chunk = self.chunks[slot as usize].as_mut().expect("an unused slab has a chunk");
        chunk.slabs_used += 1;
        match chunk.slabs_used {
            1 => self.relist_chunk(slot),
            _ => self.relist(slab),
        }
    }

    fn release(&mut self, freed: Freed) {
        let slab = &mut self.slabs[freed.slab as usize];
        let class = slab.class.expect("a slab with blocks in limbo has a class");
        let was_full = slab.is_full();
        slab.release(freed.block);
        self.counts[class.index()].limbo -= 1;
        if slab.used == 0 {
            self.close(freed.slab, class);
        } else if was_full {
            self.relist(freed.slab);
        }
    }

    /// Takes the class from a slab whose blocks are all free.
    fn close(&mut self, slab: u32, class: Class) {
        self.slabs[slab as usize].class = None;
        self.counts[class.index()].slabs -= 1;
        let slot = slab / self.classes.slabs();
        let chunk = self.chunks[slot as usize].as_mut().expect("a used slab has a chunk");
        chunk.slabs_used -= 1;
        if chunk.slabs_used > 0 {
            return self.relist(slab);
        }
        chunk.is_evacuating = false;
        self.empty.push(slot);
        self.relist_chunk(slot);
    }

    /// The list of the unused slabs in chunks that are used.
    fn unused_list(&self) -> ListId {
        self.classes.count() as ListId
    }

    /// The list in which a slab belongs.
    pub(super) fn wanted_list(&self, slab: u32) -> Option<ListId> {
        let slot = slab / self.classes.slabs();
        let chunk = self.chunks[slot as usize].as_ref()?;
        if chunk.is_evacuating || chunk.slabs_used == 0 {
            return None;
        }
        let slab = &self.slabs[slab as usize];
        match slab.class {
            None => Some(self.unused_list()),
            Some(class) => (!slab.is_full()).then(|| class.number()),
        }
    }

    pub(super) fn relist(&mut self, slab: u32) {
        let wanted = self.wanted_list(slab);
        self.lists.place(&mut self.slabs, slab, wanted);
    }

    pub(super) fn relist_chunk(&mut self, slot: u32) {
        self.slabs_of(slot).for_each(|slab| self.relist(slab));
    }
}
