//! Blocks that an operation writes, before a slot names them.

use smallvec::SmallVec;

use super::epochs::Epochs;
use super::look::Hit;
use super::{Key, Op, SharedStore};
use crate::blocks::SharedBlocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::block::{self, Block};
use crate::layout::class;
use crate::layout::table::Slot;
use crate::place::{Address, Place};
use crate::reach::{Reach, Step};
use crate::store::pieces::{self, Pieces, Places};
use crate::store::scratch::{Buffers, Scratch};
use crate::store::trips::Trip;

/// Which clients may know a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known {
    /// None: the block is free at once.
    Nobody,
    /// Clients that have read a tentative slot.
    Readers,
    /// A slot may name the block.
    Slot,
}

/// A block that no slot names for good. Freed when the value is dropped.
pub(super) struct Fresh<'s, B: SharedBlocks> {
    /// The slot's word.
    pub word: Slot,
    /// The block's bytes.
    pub bytes: Scratch<'s>,
    /// True if the bytes have been written to the block.
    pub is_written: bool,
    /// The block, and the pieces of its value.
    owned: Owned<'s, B>,
}

impl<B: SharedBlocks> Fresh<'_, B> {
    /// Address and bytes of the block.
    pub fn write(&self) -> (Address, &[u8]) {
        (self.word.place.at(0), &self.bytes)
    }

    /// Notes which clients may know the block. Returns the state before.
    pub fn know(&mut self, known: Known) -> Known {
        std::mem::replace(&mut self.owned.known, known)
    }
}

/// Blocks that are freed when the value is dropped, unless a slot names them.
struct Owned<'s, B: SharedBlocks> {
    known: Known,
    list: SmallVec<[(Place, u32); 1]>,
    blocks: &'s B,
    epochs: &'s Epochs,
}

impl<B: SharedBlocks> Drop for Owned<'_, B> {
    fn drop(&mut self) {
        for (place, bytes) in &self.list {
            match self.known {
                Known::Nobody => self.blocks.release(*place, *bytes),
                Known::Readers => self.epochs.retire(*place, *bytes),
                Known::Slot => {}
            }
        }
    }
}

impl<R: Reach, B: SharedBlocks, E: Environment> Pieces for SharedStore<R, B, E> {
    fn slab(&self) -> u32 {
        self.slab
    }

    fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// A shared index is on one memory node.
    fn is_gone(&self, _: Place) -> bool {
        false
    }

    async fn run(&self, trip: &Trip<'_>, steps: &mut [Step<'_>]) -> Result<(), Error> {
        Self::run(self, trip, steps).await
    }
}

impl<R: Reach, B: SharedBlocks, E: Environment> SharedStore<R, B, E> {
    /// Allocates and encodes a block for `key` and `value`. Pieces are written, the block is not.
    pub(super) async fn fresh(
        &self,
        op: &Op<'_>,
        key: &Key<'_>,
        value: &[u8],
        expiry: u64,
    ) -> Result<Fresh<'_, B>, Error> {
        let (blocks, epochs) = (&self.blocks, &self.epochs);
        let mut owned = Owned { known: Known::Nobody, list: SmallVec::new(), blocks, epochs };
        let allocate = async |bytes: u32, length| {
            let place = self.allocate_value(bytes as usize, length).await?;
            owned.list.push((place, bytes));
            Ok(place)
        };
        let (word, encoded) = pieces::encode(self, &op.trip, key, value, expiry, allocate).await?;
        Ok(Fresh { word, bytes: encoded, is_written: false, owned })
    }

    /// All blocks of the key of `hit`, which was looked up with all places.
    pub(super) async fn places(
        &self,
        op: &Op<'_>,
        hit: &Hit,
        buffer: &[u8],
    ) -> Result<Places, Error> {
        let place = hit.word.place;
        if let Some(bytes) = class::length(self.slab, hit.word.length) {
            return Ok(vec![(place, bytes)]);
        }
        let block = self.block(hit, buffer)?;
        let (mut places, lists) = pieces::list(self, &op.trip, place, &block).await?;
        places.extend(lists);
        places.push((place, (block::HEADER_BYTES + block.key.len() + block.rest.len()) as u32));
        Ok(places)
    }

    /// The whole block of a hit that was looked up with its value or with all places.
    pub(super) fn block<'b>(&self, hit: &Hit, buffer: &'b [u8]) -> Result<Block<'b>, Error> {
        let block = Block::parse(hit.word.place, &buffer[hit.range.clone()]);
        block.map_err(Error::malformed(hit.word.place.at(0)))
    }

    /// Notes that no slot names `places` any more.
    pub(super) fn retire(&self, places: &[(Place, u32)]) {
        places.iter().for_each(|(place, bytes)| self.epochs.retire(*place, *bytes));
    }
}
