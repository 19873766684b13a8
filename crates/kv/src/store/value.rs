//! Blocks of values: writing, reading and freeing, also of values in pieces.

use super::Store;
use super::cache::Standing;
use super::look::Hit;
use super::owned::Owned;
use super::pieces::{self, Pieces, Places};
use super::scratch::{Buffers, Scratch};
use super::trips::Trip;
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::block::Block;
use crate::layout::class;
use crate::layout::table::Slot;
use crate::place::{Address, Place};
use crate::reach::{Reach, Step};
use crate::store::Key;

/// A block that no slot names yet. Freed when the value is dropped, unless a slot
/// [owns](Fresh::own) the block.
pub(super) struct Fresh<'s, B: Blocks> {
    /// The slot's word.
    pub word: Slot,
    /// The block's bytes.
    pub bytes: Scratch<'s>,
    /// Expiry of the key.
    pub expiry: u64,
    /// True if the bytes have been written to the block.
    pub is_written: bool,
    parts: Owned<'s, B>,
}

impl<B: Blocks> Fresh<'_, B> {
    /// Address and bytes of the block.
    pub fn write(&self) -> (Address, &[u8]) {
        (self.word.place.at(0), &self.bytes)
    }

    /// Keeps the block when the value is dropped, because a slot may name the block.
    pub fn own(&mut self) {
        self.parts.keep();
    }

    /// Frees the block when the value is dropped, because no slot names the block.
    pub fn disown(&mut self) {
        self.parts.free();
    }
}

impl<R: Reach, B: Blocks, E: Environment> Pieces for Store<R, B, E> {
    fn slab(&self) -> u32 {
        self.slab
    }

    fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    fn is_gone(&self, place: Place) -> bool {
        self.blocks.is_gone(place)
    }

    async fn run(&self, trip: &Trip<'_>, steps: &mut [Step<'_>]) -> Result<(), Error> {
        Self::run(self, trip, steps).await
    }
}

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Allocates and encodes a block for `key` and `value`. Pieces are written, the block is not.
    pub(super) async fn fresh(
        &self,
        trip: &Trip<'_>,
        key: &Key<'_>,
        value: &[u8],
        expiry: u64,
    ) -> Result<Fresh<'_, B>, Error> {
        let (stripe, spread) = (self.stripe(key.hash.upper), key.hash.upper);
        let mut parts = self.owned();
        let allocate = async |bytes, _| Ok(parts.allocate_value(stripe, spread, bytes).await?);
        let (word, encoded) = pieces::encode(self, trip, key, value, expiry, allocate).await?;
        Ok(Fresh { word, bytes: encoded, expiry, is_written: false, parts })
    }

    /// Appends the value of `block` to `out`. A value in pieces takes further round trips.
    pub(super) async fn load(
        &self,
        trip: &Trip<'_>,
        place: Place,
        block: &Block<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        pieces::load(self, trip, place, block, out).await
    }

    /// The pieces of the value of `block`, and the lists that continue its list.
    pub(super) async fn pieces(
        &self,
        trip: &Trip<'_>,
        place: Place,
        block: &Block<'_>,
    ) -> Result<(Places, Places), Error> {
        pieces::list(self, trip, place, block).await
    }

    /// All blocks of the key of `hit` besides its own block. `hit` was looked up to free the key.
    pub(super) async fn parts(
        &self,
        trip: &Trip<'_>,
        hit: &Hit,
        buffer: &[u8],
    ) -> Result<Vec<(Place, u32)>, Error> {
        let Some(whole) = hit.block.as_ref().filter(|_| hit.word.length == class::PIECES) else {
            return Ok(Vec::new());
        };
        let block = whole.block(buffer);
        let (mut pieces, lists) = self.pieces(trip, hit.word.place, &block).await?;
        pieces.extend(lists);
        Ok(pieces)
    }

    /// Retires the block that `word` named, and `parts`. Returns the standing of the block in the
    /// value cache, if it was there.
    pub(super) fn retire(&self, word: Slot, parts: &[(Place, u32)]) -> Option<Standing> {
        // Before the place can have another block.
        let standing = self.cache.forget(word.place);
        self.blocks.retire(word.place);
        parts.iter().for_each(|(place, _)| self.blocks.retire(*place));
        standing
    }
}
