//! A block that an operation writes, before a slot names it.

use super::epochs::Epochs;
use super::{Key, SharedStore};
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::block::{self, Head, Kind, string_bytes};
use crate::layout::class;
use crate::layout::table::Slot;
use crate::place::Address;
use crate::reach::Reach;
use crate::store::scratch::Scratch;

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
pub(super) struct Fresh<'s, B: Blocks> {
    /// The slot's word.
    pub word: Slot,
    /// The block's bytes.
    pub bytes: Scratch<'s>,
    /// True if the bytes have been written to the block.
    pub is_written: bool,
    /// Which clients may know the block.
    pub known: Known,
    length: u32,
    blocks: &'s B,
    epochs: &'s Epochs,
}

impl<B: Blocks> Fresh<'_, B> {
    /// Address and bytes of the block.
    pub fn write(&self) -> (Address, &[u8]) {
        (self.word.place.at(0), &self.bytes)
    }
}

impl<B: Blocks> Drop for Fresh<'_, B> {
    fn drop(&mut self) {
        match self.known {
            Known::Nobody => self.blocks.release(self.word.place),
            Known::Readers => self.epochs.retire(self.word.place, self.length),
            Known::Slot => {}
        }
    }
}

impl<R: Reach, B: Blocks, E: Environment> SharedStore<R, B, E> {
    /// Allocates and encodes a block for `key` and `value`.
    pub(super) async fn fresh(
        &self,
        key: &Key<'_>,
        value: &[u8],
        expiry: u64,
    ) -> Result<Fresh<'_, B>, Error> {
        let (bytes, most) = (key.bytes.len(), self.key_max());
        if bytes > most {
            return Err(Error::KeyTooLong { bytes, most });
        }
        let most = self.value_max(bytes);
        if value.len() > most {
            return Err(Error::ValueBeyondSlab { bytes: value.len(), most });
        }
        let length = string_bytes(bytes, value.len()) as u32;
        let Some(code) = class::code(self.slab, length) else {
            return Err(Error::ValueBeyondSlab { bytes: value.len(), most });
        };
        let place = self.allocate(length as usize).await?;
        let head = Head {
            key: bytes as u32,
            value: value.len() as u32,
            kind: Kind::String,
            db: key.db,
            upper: key.hash.upper,
            expiry,
        };
        let mut encoded = self.buffers.take();
        encoded.resize(length as usize, 0);
        block::encode(place, &head, key.bytes, &[value], &mut encoded);
        Ok(Fresh {
            word: Slot { fingerprint: key.hash.fingerprint(), length: code, place },
            bytes: encoded,
            is_written: false,
            known: Known::Nobody,
            length,
            blocks: &self.blocks,
            epochs: &self.epochs,
        })
    }

    /// Notes that no slot names the block of `word` any more.
    pub(super) fn retire(&self, word: Slot) {
        let bytes = class::length(self.slab, word.length).unwrap_or(self.slab);
        self.epochs.retire(word.place, bytes);
    }
}
