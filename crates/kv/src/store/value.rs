//! Blocks of values: writing, reading and freeing, also of values in pieces.

use super::Store;
use super::access::Steps;
use super::cache::Standing;
use super::look::Hit;
use super::owned::Owned;
use super::scratch::Scratch;
use super::trips::Trip;
use crate::blocks::Blocks;
use crate::environment::Environment;
use crate::error::Error;
use crate::layout::block::{
    self, Block, Head, Kind, LIST_HEAD_BYTES, VALUE_MAX, list_bytes, list_head, piece_word,
    string_bytes,
};
use crate::layout::table::Slot;
use crate::layout::{Malformed, class};
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

impl<R: Reach, B: Blocks, E: Environment> Store<R, B, E> {
    /// Allocates and encodes a block for `key` and `value`. Pieces are written, the block is not.
    pub(super) async fn fresh(
        &self,
        trip: &Trip<'_>,
        key: &Key<'_>,
        value: &[u8],
        expiry: u64,
    ) -> Result<Fresh<'_, B>, Error> {
        let stripe = self.stripe(key.hash.upper);
        let (bytes, most) = (key.bytes.len(), self.key_max());
        if bytes > most {
            return Err(Error::KeyTooLong { bytes, most });
        }
        if value.len() > VALUE_MAX {
            return Err(Error::ValueTooLong(value.len()));
        }
        let head = Head {
            key: bytes as u32,
            value: value.len() as u32,
            kind: Kind::String,
            db: key.db,
            upper: key.hash.upper,
            expiry,
        };
        let mut parts = self.owned();
        let length = string_bytes(bytes, value.len());
        let (code, place, encoded) = match self.code(length) {
            Some(code) => {
                let spread = key.hash.upper;
                let place = parts.allocate_value(stripe, spread, length as u32).await?;
                let mut encoded = self.buffers.take();
                encoded.resize(length, 0);
                block::encode(place, &head, key.bytes, &[value], &mut encoded);
                (code, place, encoded)
            }
            None => {
                let written = self.in_pieces(trip, stripe, &head, key, value, &mut parts).await?;
                (class::PIECES, written.0, written.1)
            }
        };
        let fingerprint = key.hash.fingerprint();
        let word = Slot { fingerprint, length: code, place };
        Ok(Fresh { word, bytes: encoded, expiry, is_written: false, parts })
    }

    /// The length code of a block of `length` bytes, unless the block is longer than a slab.
    fn code(&self, length: usize) -> Option<u8> {
        if length > self.slab as usize { None } else { class::code(self.slab, length as u32) }
    }

    /// Writes `value` in pieces, in one round trip. Returns the block with the list.
    async fn in_pieces(
        &self,
        trip: &Trip<'_>,
        stripe: u32,
        head: &Head,
        key: &Key<'_>,
        value: &[u8],
        parts: &mut Owned<'_, B>,
    ) -> Result<(Place, Scratch<'_>), Error> {
        let (slab, spread) = (self.slab as usize, key.hash.upper);
        let mut entries = Vec::new();
        let mut lists = Vec::new();
        let mut steps = Steps::new();
        for piece in value.chunks(slab) {
            let place = parts.allocate_value(stripe, spread, piece.len() as u32).await?;
            entries.extend_from_slice(&piece_word(place, piece.len() as u32).to_be_bytes());
            steps.push(Step::Write { at: place.at(0), from: piece });
        }
        let crc = crc32fast::hash(value);
        // From the last list to the first, because each list names its successor.
        let first = (slab - list_bytes(key.bytes.len(), 0)) / 8 * 8;
        let each = (slab - list_bytes(0, 0)) / 8 * 8;
        let (mine, others) = entries.split_at(first.min(entries.len()));
        let mut next = 0;
        for entries in others.chunks(each).rev() {
            let bytes = list_bytes(0, entries.len() / 8);
            let place = parts.allocate_value(stripe, spread, bytes as u32).await?;
            let head = Head { key: 0, kind: Kind::Continuation, expiry: 0, ..*head };
            let mut list = vec![0; bytes];
            let begin = list_head(crc, entries.len() as u32 / 8, next);
            block::encode(place, &head, &[], &[&begin, entries], &mut list);
            lists.push((place, list));
            next = piece_word(place, bytes as u32);
        }
        steps.extend(lists.iter().map(|(place, list)| Step::Write { at: place.at(0), from: list }));
        self.run(trip, &mut steps).await?;
        let length = list_bytes(key.bytes.len(), mine.len() / 8);
        let place = parts.allocate_value(stripe, spread, length as u32).await?;
        let mut encoded = self.buffers.take();
        encoded.resize(length, 0);
        let head = Head { kind: Kind::Pieces, ..*head };
        let begin: [u8; LIST_HEAD_BYTES] = list_head(crc, mine.len() as u32 / 8, next);
        block::encode(place, &head, key.bytes, &[&begin, mine], &mut encoded);
        Ok((place, encoded))
    }

    /// Appends the value of `block` to `out`. A value in pieces takes further round trips.
    pub(super) async fn load(
        &self,
        trip: &Trip<'_>,
        place: Place,
        block: &Block<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), Error> {
        if block.head.kind == Kind::String {
            out.extend_from_slice(block.rest);
            return Ok(());
        }
        let malformed = Error::malformed(place.at(0));
        let crc = block.list().map_err(&malformed)?.crc;
        let (pieces, _) = self.pieces(trip, place, block).await?;
        let (start, bytes) = (out.len(), block.head.value as usize);
        let room: usize = pieces.iter().map(|(_, bytes)| *bytes as usize).sum();
        if room < bytes || room > bytes + self.slab as usize {
            return Err(malformed(Malformed("the pieces of a value have another length in all")));
        }
        out.resize(start + bytes, 0);
        {
            let mut rest = &mut out[start..];
            let mut steps = Steps::new();
            for (place, bytes) in &pieces {
                let (into, more) = rest.split_at_mut((*bytes as usize).min(rest.len()));
                steps.push(Step::Read { at: place.at(0), into });
                rest = more;
            }
            self.run(trip, &mut steps).await?;
        }
        if crc32fast::hash(&out[start..]) != crc {
            return Err(malformed(Malformed("the checksum of a value in pieces differs")));
        }
        Ok(())
    }

    /// The pieces of the value of `block`, and the lists that continue its list. Each list takes a
    /// round trip.
    pub(super) async fn pieces(
        &self,
        trip: &Trip<'_>,
        place: Place,
        block: &Block<'_>,
    ) -> Result<(Vec<(Place, u32)>, Vec<(Place, u32)>), Error> {
        let (mut pieces, mut lists) = (Vec::new(), Vec::new());
        if block.head.kind == Kind::String {
            return Ok((pieces, lists));
        }
        let malformed = Error::malformed(place.at(0));
        let list = block.list().map_err(&malformed)?;
        for piece in list.pieces() {
            pieces.push(piece.map_err(&malformed)?);
        }
        let most = (block.head.value as usize).div_ceil(self.slab as usize);
        let mut next = list.next;
        let mut bytes = self.buffers.take();
        while let Some((place, length)) = next {
            if self.blocks.is_gone(place) {
                // The value is lost. The blocks that are known can be freed.
                lists.push((place, length));
                break;
            }
            let malformed = Error::malformed(place.at(0));
            if !self.is_in_slab(place, length) {
                return Err(malformed(Malformed("a list of pieces reaches beyond its slab")));
            }
            lists.push((place, length));
            bytes.resize(length as usize, 0);
            self.run(trip, &mut [Step::Read { at: place.at(0), into: &mut bytes }]).await?;
            let block = Block::parse(place, &bytes).map_err(&malformed)?;
            let list = block.list().map_err(&malformed)?;
            let before = pieces.len();
            for piece in list.pieces() {
                pieces.push(piece.map_err(&malformed)?);
            }
            // Each list has a piece, so lists that name each other end here too.
            if pieces.len() == before || pieces.len() > most {
                return Err(malformed(Malformed("a list of pieces has too many or no pieces")));
            }
            next = list.next;
        }
        Ok((pieces, lists))
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
