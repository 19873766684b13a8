//! Blocks that no word in remote memory names yet.

use smallvec::SmallVec;

use super::Store;
use crate::blocks::{Blocks, NoBlock};
use crate::environment::Environment;
use crate::place::Place;
use crate::reach::Reach;

/// Blocks that are freed when the value is dropped, unless they are kept.
pub(super) struct Owned<'s, B: Blocks> {
    blocks: &'s B,
    /// Two places fit without memory from the allocator.
    places: SmallVec<[Place; 2]>,
    is_kept: bool,
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// An empty list of blocks.
    pub(super) fn owned(&self) -> Owned<'_, B> {
        Owned { blocks: &self.blocks, places: SmallVec::new(), is_kept: false }
    }
}

impl<B: Blocks> Owned<'_, B> {
    /// Allocates a block.
    pub async fn allocate(&mut self, stripe: u32, bytes: u32) -> Result<Place, NoBlock> {
        let mut place = self.blocks.allocate(stripe, bytes).await?;
        if place.is_none() {
            // Words use place 0 for "none". The block stays allocated, so this happens once.
            place = self.blocks.allocate(stripe, bytes).await?;
        }
        self.places.push(place);
        Ok(place)
    }

    /// Allocates a block of a value, as [`Blocks::allocate_value`] does.
    pub async fn allocate_value(
        &mut self,
        stripe: u32,
        spread: u64,
        bytes: u32,
    ) -> Result<Place, NoBlock> {
        let mut place = self.blocks.allocate_value(stripe, spread, bytes).await?;
        if place.is_none() {
            place = self.blocks.allocate_value(stripe, spread, bytes).await?;
        }
        self.places.push(place);
        Ok(place)
    }

    /// Keeps the blocks, because a word in remote memory may name them.
    pub fn keep(&mut self) {
        self.is_kept = true;
    }

    /// Frees the blocks at the end, because no word names them.
    pub fn free(&mut self) {
        self.is_kept = false;
    }
}

impl<B: Blocks> Drop for Owned<'_, B> {
    fn drop(&mut self) {
        if !self.is_kept {
            self.places.iter().for_each(|place| self.blocks.release(*place));
        }
    }
}
