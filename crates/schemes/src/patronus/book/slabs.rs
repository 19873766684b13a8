//! The slab allocator (Patronus §5.2), over the buddy allocator of chunks.
//!
//! ```text
//! bytes of an object            its memory
//! up to a quarter of a chunk    a slot of a slab: 64, 80, 96, 112, 128, 160, ... bytes
//! up to a chunk                 a chunk
//! more                          a block: a power of two of chunks
//! ```
//!
//! A slab is a chunk whose slots have one size. The allocator takes it when a size has no free
//! slot, and gives it back when its last slot is given back. Memory that is given to the allocator
//! is zero: cleared, or never opened.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use scheme::index::EntryId;

use super::Place;
use crate::blocks::{CHUNK_ORDER, Order};
use crate::patronus::message::Outcome;
use crate::rpc::blocks::{Blocks, Free};

/// Size of the smallest slot.
const SLOT_MIN: u64 = 64;
/// Sizes of slots between a power of two and the next one.
const STEPS: u64 = 4;

/// Memory of an object.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Piece {
    /// A slot of a slab.
    Slot {
        /// The slab: its chunk.
        slab: EntryId,
        /// Index of the slot.
        index: u32,
    },
    /// A block of chunks.
    Block(EntryId),
}

/// A size of slots.
#[cfg_attr(test, derive(Clone))]
struct Class {
    bytes: u64,
    /// Slots of a slab.
    slots: u32,
    /// Slabs with free slots. The first one is used first, so that the last ones become empty.
    open: BTreeSet<EntryId>,
}

/// A chunk with slots of one size.
#[cfg_attr(test, derive(Clone))]
struct Slab {
    class: usize,
    used: u32,
    /// The slots from this one on were never used.
    fresh: u32,
    /// Slots that were given back; the last one is used first.
    returned: VecDeque<u32>,
}

/// Free memory and slabs.
#[cfg_attr(test, derive(Clone))]
pub struct Memory {
    blocks: Blocks,
    free: Free,
    classes: Vec<Class>,
    slabs: BTreeMap<EntryId, Slab>,
}

impl Memory {
    /// All memory is free.
    pub fn new(blocks: Blocks, chunk_bytes: u64) -> Self {
        let powers = std::iter::successors(Some(SLOT_MIN), |power| power.checked_mul(2));
        let sizes = powers.flat_map(|power| (0..STEPS).map(move |i| power + i * (power / STEPS)));
        let classes = sizes.take_while(|bytes| *bytes <= chunk_bytes / 4);
        let class = |bytes| Class {
            bytes,
            slots: u32::try_from(chunk_bytes / bytes).unwrap_or(u32::MAX),
            open: BTreeSet::new(),
        };
        Self {
            blocks,
            free: Free::all(blocks),
            classes: classes.map(class).collect(),
            slabs: BTreeMap::new(),
        }
    }

    /// Number of chunks that are free.
    pub fn free_chunks(&self) -> u64 {
        self.free.chunks()
    }

    /// True if a chunk or a slot is free.
    pub fn has_room(&self) -> bool {
        self.free.chunks() > 0 || self.classes.iter().any(|class| !class.open.is_empty())
    }

    /// Length of the smallest block of at least `bytes`; `None` if no block is as large.
    pub fn block_bytes(&self, bytes: u64) -> Option<u64> {
        self.blocks.order_for(bytes).map(|order| self.blocks.bytes(order))
    }

    /// Takes memory for an object of `bytes`.
    ///
    /// # Errors
    /// [`Outcome::Empty`], [`Outcome::NoBlock`].
    pub fn take(&mut self, bytes: u64) -> Result<Piece, Outcome> {
        let class = self.classes.partition_point(|class| class.bytes < bytes);
        if class < self.classes.len() {
            return self.take_slot(class);
        }
        let order = self.blocks.order_for(bytes).ok_or(Outcome::NoBlock)?;
        self.take_block(order).map(Piece::Block)
    }

    fn take_block(&mut self, order: Order) -> Result<EntryId, Outcome> {
        let is_empty = self.free.chunks() == 0;
        let why = if is_empty { Outcome::Empty } else { Outcome::NoBlock };
        self.free.take(order).ok_or(why)
    }

    fn take_slot(&mut self, at: usize) -> Result<Piece, Outcome> {
        let slab = match self.classes[at].open.first() {
            Some(slab) => *slab,
            None => {
                let slab = self.take_block(CHUNK_ORDER)?;
                let empty = Slab { class: at, used: 0, fresh: 0, returned: VecDeque::new() };
                self.slabs.insert(slab, empty);
                self.classes[at].open.insert(slab);
                slab
            }
        };
        let class = &mut self.classes[at];
        let state = self.slabs.get_mut(&slab).expect("a slab of the class");
        let index = state.returned.pop_back().unwrap_or_else(|| {
            state.fresh += 1;
            state.fresh - 1
        });
        state.used += 1;
        if state.used == class.slots {
            class.open.remove(&slab);
        }
        Ok(Piece::Slot { slab, index })
    }

    /// True if at least half of the chunks are free.
    pub fn is_adequate(&self) -> bool {
        2 * self.free.chunks() >= u64::from(self.blocks.chunks())
    }

    /// Gives memory back. `is_last`: a slot is used after the others of its slab.
    pub fn give(&mut self, piece: Piece, is_last: bool) {
        match piece {
            Piece::Block(entry) => self.free.give(entry),
            Piece::Slot { slab, index } => {
                let state = self.slabs.get_mut(&slab).expect("the slab of a slot");
                let class = &mut self.classes[state.class];
                state.used -= 1;
                if state.used > 0 {
                    match is_last {
                        true => state.returned.push_front(index),
                        false => state.returned.push_back(index),
                    }
                    class.open.insert(slab);
                } else {
                    class.open.remove(&slab);
                    self.slabs.remove(&slab);
                    self.free.give(slab);
                }
            }
        }
    }

    /// The whole range of a piece, with the bytes behind the object.
    pub fn place(&self, piece: Piece) -> Place {
        match piece {
            Piece::Block(entry) => {
                let (offset, len) = self.blocks.range(entry);
                Place { offset, len }
            }
            Piece::Slot { slab, index } => {
                let len = self.classes[self.slabs[&slab].class].bytes;
                let (offset, _) = self.blocks.range(slab);
                Place { offset: offset + u64::from(index) * len, len }
            }
        }
    }

    /// Checks that every chunk is free, a slab or the block of an object, and every slot of a slab
    /// free or an object's. `used` has the pieces of all objects.
    pub fn audit(&self, used: impl Iterator<Item = Piece>) -> Result<(), String> {
        let mut covered = vec![false; self.blocks.chunks() as usize];
        let mut cover = |entry: EntryId, what: &str| {
            for chunk in
                self.blocks.block(entry).chunks().start.raw()..self.blocks.block(entry).end().raw()
            {
                if std::mem::replace(&mut covered[chunk as usize], true) {
                    return Err(format!("chunk {chunk} is {what}, and something else, too"));
                }
            }
            Ok(())
        };
        self.free.entries().try_for_each(|entry| cover(entry, "free"))?;
        self.slabs.keys().try_for_each(|slab| cover(*slab, "a slab"))?;
        let mut slots: BTreeMap<EntryId, BTreeSet<u32>> = BTreeMap::new();
        for piece in used {
            match piece {
                Piece::Block(entry) => cover(entry, "an object's")?,
                Piece::Slot { slab, index } => {
                    if !slots.entry(slab).or_default().insert(index) {
                        return Err(format!("slot {index} of slab {slab} has two objects"));
                    }
                }
            }
        }
        if let Some(chunk) = covered.iter().position(|covered| !covered) {
            return Err(format!("chunk {chunk} is lost"));
        }
        for (slab, state) in &self.slabs {
            let class = &self.classes[state.class];
            let mut free: BTreeSet<u32> = state.returned.iter().copied().collect();
            free.extend(state.fresh..class.slots);
            let used = slots.remove(slab).unwrap_or_default();
            let is_whole = used.is_disjoint(&free)
                && used.len() + free.len() == class.slots as usize
                && state.returned.len() + (class.slots - state.fresh) as usize == free.len()
                && used.len() == state.used as usize;
            if !is_whole || used.is_empty() {
                return Err(format!("slab {slab}: used {used:?}, free {free:?}"));
            }
            if class.open.contains(slab) == free.is_empty() {
                return Err(format!("slab {slab} is on the wrong list"));
            }
        }
        let open = self.classes.iter().flat_map(|class| &class.open);
        if let Some(slab) = open.chain(slots.keys()).find(|slab| !self.slabs.contains_key(slab)) {
            return Err(format!("chunk {slab} is not a slab"));
        }
        Ok(())
    }
}
