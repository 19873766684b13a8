//! The directory: one word for each prefix of the hash, in pieces that a header lists.
//!
//! ```text
//! word     63 depth 58 | 57 state 56 | 55..48 0 | 47 place of the subtable 0
//! header   +0 number of pieces    +8 place of each piece, one word each
//! ```
//!
//! A piece is as long as a slab, the last one as long as needed. A directory is written whole, and
//! one CAS on the root's word replaces its predecessor.

use super::{DEPTH_SHIFT, Malformed, put, word};
use crate::hash::DEPTH_MAX;
use crate::place::{Address, Place};

const STATE_SHIFT: u32 = 56;

/// A word of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Depth of the subtable.
    pub depth: u32,
    /// True while a compute node splits the subtable (mode `shared`).
    pub locked: bool,
    /// Place of the subtable's header.
    pub table: Place,
}

impl Entry {
    /// The word in remote memory.
    pub const fn word(self) -> u64 {
        (self.depth as u64) << DEPTH_SHIFT | (self.locked as u64) << STATE_SHIFT | self.table.bits()
    }

    /// Parses a word of remote memory.
    pub const fn parse(word: u64) -> Result<Self, Malformed> {
        let depth = (word >> DEPTH_SHIFT) as u32;
        let state = word >> STATE_SHIFT & 3;
        let table = Place::of(word);
        if depth > DEPTH_MAX || state > 1 || table.is_none() {
            return Err(Malformed("a directory word names no subtable"));
        }
        Ok(Self { depth, locked: state == 1, table })
    }
}

/// The sizes of a directory's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Words in all.
    pub words: usize,
    /// Words of each piece but the last.
    pub words_of_piece: usize,
    /// Number of pieces.
    pub pieces: usize,
}

impl Sizes {
    /// The sizes of a directory of `depth` in slabs of `slab` bytes.
    pub const fn of(depth: u32, slab: u32) -> Self {
        let words = 1 << depth;
        let words_of_piece = slab as usize / 8;
        Self { words, words_of_piece, pieces: words.div_ceil(words_of_piece) }
    }

    /// Bytes of the header.
    pub const fn header_bytes(self) -> usize {
        8 + 8 * self.pieces
    }

    /// Bytes of piece `piece`.
    pub const fn piece_bytes(self, piece: usize) -> usize {
        let left = self.words - piece * self.words_of_piece;
        8 * if left < self.words_of_piece { left } else { self.words_of_piece }
    }

    /// Address of word `index` of a directory with `pieces`.
    pub fn address(self, pieces: &[Place], index: usize) -> Option<Address> {
        let piece = pieces.get(index / self.words_of_piece)?;
        Some(piece.at(8 * (index % self.words_of_piece) as u64))
    }
}

/// The header of a directory with `pieces`.
pub fn encode_header(pieces: &[Place], bytes: &mut [u8]) {
    put(bytes, 0, pieces.len() as u64);
    for (i, piece) in pieces.iter().enumerate() {
        put(bytes, 8 + 8 * i, piece.bits());
    }
}

/// Parses a header. The number of pieces must be that of `sizes`.
pub fn parse_header(bytes: &[u8], sizes: Sizes) -> Result<Vec<Place>, Malformed> {
    if bytes.len() < sizes.header_bytes() || word(bytes, 0) != sizes.pieces as u64 {
        return Err(Malformed("the directory's header lists another number of pieces"));
    }
    let pieces = (0..sizes.pieces).map(|i| Place::of(word(bytes, 8 + 8 * i)));
    let pieces: Vec<_> = pieces.collect();
    if pieces.iter().any(|piece| piece.is_none()) {
        return Err(Malformed("the directory's header lists a piece without a place"));
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_parses_to_what_was_encoded() {
        let entry = Entry { depth: 24, locked: true, table: Place::of(0xffff_0000_0001) };
        assert_eq!(Entry::parse(entry.word()), Ok(entry));
        assert!(Entry::parse(0).is_err());
        assert!(Entry::parse(25 << 58 | 1).is_err());
    }

    #[test]
    fn directory_of_many_words_is_in_pieces() {
        let sizes = Sizes::of(7, 512);
        assert_eq!((sizes.pieces, sizes.piece_bytes(1), sizes.header_bytes()), (2, 512, 24));
        let pieces = [Place::of(1), Place::of(100)];
        assert_eq!(sizes.address(&pieces, 65), Some(Place::of(100).at(8)));
        let mut bytes = [0; 24];
        encode_header(&pieces, &mut bytes);
        assert_eq!(parse_header(&bytes, sizes), Ok(pieces.to_vec()));
        assert!(parse_header(&bytes, Sizes::of(8, 512)).is_err());
        assert_eq!(Sizes::of(0, 512).piece_bytes(0), 8);
    }
}
