//! Rebuilding the state of a group from the blocks that are in use.

use crate::classes::Class;
use crate::place::Place;
use crate::state::State;

impl<C: Clone> State<C> {
    /// All chunks.
    pub fn handles(&self) -> Vec<C> {
        self.chunks.iter().flatten().map(|chunk| chunk.handle.clone()).collect()
    }
}

impl<C> State<C> {
    /// Makes the block of `class` at `place` in the chunk in `slot` live. The list of empty chunks
    /// is wrong until [`State::finish_claims`].
    pub fn claim(&mut self, slot: u32, place: Place, class: Class) -> Result<(), &'static str> {
        let (slab, within) = self.slab_at(slot, place).ok_or("the heap has no chunk there")?;
        match self.slabs[slab as usize].class {
            None => self.open(slab, class),
            Some(other) if other == class => {}
            Some(_) => return Err("the slab has blocks of another length"),
        }
        let units = self.classes.units(class);
        if !within.is_multiple_of(units) || within / units >= self.classes.blocks(class) {
            return Err("no block of this length begins there");
        }
        if !self.slabs[slab as usize].claim(within / units) {
            return Err("the place is in the list twice");
        }
        self.counts[class.index()].live += 1;
        Ok(())
    }

    /// Lists the chunks that have no block, and the slabs with free blocks.
    pub fn finish_claims(&mut self) {
        self.empty.clear();
        for slot in 0..self.chunks.len() as u32 {
            match &self.chunks[slot as usize] {
                Some(chunk) if chunk.slabs_used == 0 => self.empty.push(slot),
                _ => self.relist_chunk(slot),
            }
        }
    }
}
