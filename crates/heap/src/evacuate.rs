//! Evacuation: finding sparse chunks, and keeping new blocks out of them.

use crate::classes::Class;
use crate::heap::{Block, ChunkUse};
use crate::place::Place;
use crate::state::State;

impl<C> State<C> {
    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.chunks.len() as u32
    }

    /// Slots and places of the chunks.
    pub fn places(&self) -> impl Iterator<Item = (u32, Place)> {
        let chunks = self.chunks.iter().enumerate();
        chunks.filter_map(|(slot, chunk)| Some((slot as u32, chunk.as_ref()?.place)))
    }

    /// Use of the chunk in `slot`. `None` for an empty chunk, and for a slot without a chunk.
    pub fn chunk_use(&self, slot: u32) -> Option<ChunkUse> {
        let chunk = self.chunks.get(slot as usize)?.as_ref().filter(|c| c.slabs_used > 0)?;
        let (mut live_bytes, mut limbo_bytes) = (0, 0);
        let mut classes: Vec<Class> = Vec::new();
        for slab in &self.slabs[self.range(slot)] {
            let Some(class) = slab.class else { continue };
            live_bytes += u64::from(slab.live) * self.classes.bytes(class);
            limbo_bytes += u64::from(slab.used - slab.live) * self.classes.bytes(class);
            if !classes.contains(&class) {
                classes.push(class);
            }
        }
        let (place, is_evacuating) = (chunk.place, chunk.is_evacuating);
        Some(ChunkUse { place, live_bytes, limbo_bytes, classes, is_evacuating })
    }

    /// Live bytes of the chunk in `slot`, if the chunk is used and is not being evacuated.
    pub fn evacuable_bytes(&self, slot: u32) -> Option<u64> {
        let chunk = self.chunks.get(slot as usize)?.as_ref()?;
        if chunk.slabs_used == 0 || chunk.is_evacuating {
            return None;
        }
        let bytes = |class| self.classes.bytes(class);
        let slabs = self.slabs[self.range(slot)].iter();
        Some(slabs.filter_map(|s| Some(u64::from(s.live) * bytes(s.class?))).sum())
    }

    /// Sets whether the chunk in `slot` is being evacuated. An empty chunk is not changed.
    pub fn set_evacuating(&mut self, slot: u32, is_evacuating: bool) {
        if let Some(Some(chunk)) = self.chunks.get_mut(slot as usize)
            && chunk.slabs_used > 0
        {
            chunk.is_evacuating = is_evacuating;
            self.relist_chunk(slot);
        }
    }

    /// At most `most` live blocks of the chunk in `slot`, by place, that begin behind `after`.
    pub fn live_blocks(&self, slot: u32, after: Option<Place>, most: usize) -> Vec<Block> {
        let mut found = Vec::new();
        for slab in self.slabs_of(slot) {
            let Some(class) = self.slabs[slab as usize].class else { continue };
            let first = self.place_of(slab, 0);
            let units = u64::from(self.classes.units(class));
            let from = match after {
                Some(after) if after >= first => (after.raw() - first.raw()) / units + 1,
                _ => 0,
            };
            let mut next = from.min(u64::from(u32::MAX)) as u32;
            while let Some(block) = self.slabs[slab as usize].live_from(next) {
                if found.len() == most {
                    return found;
                }
                let (place, bytes) = (self.place_of(slab, block), self.classes.bytes(class));
                found.push(Block { place, bytes });
                next = block + 1;
            }
        }
        found
    }

    fn range(&self, slot: u32) -> std::ops::Range<usize> {
        let slabs = self.slabs_of(slot);
        slabs.start as usize..slabs.end as usize
    }
}
