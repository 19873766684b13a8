//! Bytes of a region in remote memory. All words are big-endian.
//!
//! ```text
//! header      +0 magic "GRNYRGN1"   +8 bytes of a chunk   +16 number of the first chunk
//!             +24 number of chunks  +32 place of the index's root, 0 = none
//!             +40 number of pieces of the table           +64 places of the pieces
//! piece       descriptors, as many as fit a chunk
//! descriptor  +0 state: 0 no chunk of the region, 1 free, 2 + i divided into blocks of class i
//!             +8 a bit for each block of the chunk: 1 = the block is free for any client
//! ```
//!
//! Chunks have their numbers from the memory node's first chunk on. Bit 0 of a word is block 0 of
//! 64. A chunk has one block for each 64 B at most.

use crate::layout::{Malformed, class, put, word};
use crate::place::{Address, Place, UNIT};

/// Bytes of the smallest block. A block has a header of 32 B and a key.
pub(super) const BLOCK_MIN: u32 = 64;
/// Bytes of the header without the places of the pieces.
pub(super) const HEADER_BYTES: usize = 64;
/// Offset of the index's root in the header.
pub(super) const ROOT: u64 = 32;
/// State of a chunk that is free.
pub(super) const FREE: u64 = 1;

const MAGIC: u64 = u64::from_be_bytes(*b"GRNYRGN1");

/// The sizes of a region, and the places of its table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Number of the memory node.
    pub node: u8,
    /// Bytes of a chunk.
    pub chunk: u32,
    /// Number of the first chunk that has a descriptor.
    pub first: u64,
    /// Number of descriptors.
    pub chunks: u64,
    /// The pieces of the table.
    pub pieces: Vec<Place>,
}

impl Layout {
    /// Words of a descriptor: the state, and the bits.
    pub fn words(chunk: u32) -> usize {
        1 + (chunk / BLOCK_MIN).div_ceil(64) as usize
    }

    /// Descriptors of a piece.
    pub fn of_piece(chunk: u32) -> u64 {
        u64::from(chunk) / (8 * Self::words(chunk) as u64)
    }

    /// The state of a chunk with blocks of at least `bytes`, and the bytes of a block. `None`: no
    /// chunk has such blocks.
    pub fn state(&self, bytes: u32) -> Option<(u64, u32)> {
        let (class, bytes) = class::fitting(self.chunk, bytes.max(BLOCK_MIN))?;
        Some((2 + u64::from(class), bytes))
    }

    /// Number of blocks of a chunk in state `state`. 0: the state is of no class.
    pub fn blocks(&self, state: u64) -> u32 {
        match state.checked_sub(2) {
            Some(class) if class < 128 => {
                let bytes = class::bytes(self.chunk, class as u32);
                if bytes < BLOCK_MIN { 0 } else { self.chunk / bytes }
            }
            _ => 0,
        }
    }

    /// Address of word `at` of the descriptor `index`.
    pub fn word(&self, index: u64, at: usize) -> Address {
        let each = Self::of_piece(self.chunk);
        let piece = self.pieces[(index / each) as usize];
        piece.at(8 * (index % each * Self::words(self.chunk) as u64 + at as u64))
    }

    /// The place of block `block` of `bytes` in the chunk of descriptor `index`.
    pub fn place(&self, index: u64, block: u32, bytes: u32) -> Place {
        let offset = (self.first + index) * u64::from(self.chunk) + u64::from(block * bytes);
        Place::new(self.node, offset / UNIT).unwrap_or_default()
    }

    /// Descriptor and number of the block of `bytes` at `place`. `None`: the region has no such
    /// block.
    pub fn locate(&self, place: Place, bytes: u32) -> Option<(u64, u32)> {
        let offset = place.at(0).offset;
        let index = (offset / u64::from(self.chunk)).checked_sub(self.first)?;
        let within = (offset % u64::from(self.chunk)) as u32;
        let block = within / bytes;
        let is_one = place.node() == self.node
            && index < self.chunks
            && within.is_multiple_of(bytes)
            && block < self.chunk / bytes;
        is_one.then_some((index, block))
    }

    /// The bytes of the header.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES + 8 * self.pieces.len()];
        put(&mut bytes, 0, MAGIC);
        put(&mut bytes, 8, self.chunk.into());
        put(&mut bytes, 16, self.first);
        put(&mut bytes, 24, self.chunks);
        put(&mut bytes, 40, self.pieces.len() as u64);
        for (i, piece) in self.pieces.iter().enumerate() {
            put(&mut bytes, HEADER_BYTES + 8 * i, piece.bits());
        }
        bytes
    }

    /// Number of pieces in a header, whose first bytes are `bytes`.
    pub fn pieces_of(bytes: &[u8]) -> Result<usize, Malformed> {
        if word(bytes, 0) != MAGIC {
            return Err(Malformed("the bytes are no header of a region"));
        }
        let (chunk, pieces) = (word(bytes, 8), word(bytes, 40));
        if !chunk.is_power_of_two() || !(512..=class::SLAB_MAX.into()).contains(&chunk) {
            return Err(Malformed("a region has chunks of a length that no pool has"));
        }
        if pieces > (chunk - HEADER_BYTES as u64) / 8 {
            return Err(Malformed("a region has more pieces than its header has room for"));
        }
        Ok(pieces as usize)
    }

    /// Parses a whole header, which lies on memory node `node`.
    pub fn parse(node: u8, bytes: &[u8]) -> Result<Self, Malformed> {
        let count = Self::pieces_of(bytes)?;
        let pieces = (0..count).map(|i| Place::of(word(bytes, HEADER_BYTES + 8 * i))).collect();
        let chunk = word(bytes, 8) as u32;
        let (first, chunks) = (word(bytes, 16), word(bytes, 24));
        if chunks.div_ceil(Self::of_piece(chunk)) > count as u64 || first >> 40 != 0 {
            return Err(Malformed("a region has more chunks than descriptors"));
        }
        Ok(Self { node, chunk, first, chunks, pieces })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn layout(chunk: u32, chunks: u64) -> Layout {
        let pieces = chunks.div_ceil(Layout::of_piece(chunk));
        let place = |i| Place::new(3, (10 + i) * u64::from(chunk) / UNIT).unwrap();
        Layout { node: 3, chunk, first: 9, chunks, pieces: (0..pieces).map(place).collect() }
    }

    #[test]
    fn header_parses_to_what_was_encoded() {
        for (chunk, chunks) in [(512, 100), (4096, 1000), (65536, 4000)] {
            let layout = layout(chunk, chunks);
            assert_eq!(Layout::parse(3, &layout.encode()).unwrap(), layout);
        }
    }

    #[test]
    fn blocks_are_found_by_their_places() {
        let layout = layout(4096, 300);
        for wanted in [1, 64, 65, 100, 1000, 1025, 2049, 4096] {
            let (state, bytes) = layout.state(wanted).unwrap();
            assert!(bytes >= wanted && layout.blocks(state) == 4096 / bytes);
            for block in 0..layout.blocks(state) {
                let place = layout.place(299, block, bytes);
                assert_eq!(layout.locate(place, bytes), Some((299, block)));
            }
            assert_eq!(layout.locate(layout.place(300, 0, bytes), bytes), None);
        }
        assert_eq!(layout.state(4097), None);
        assert_eq!([0, 1, 200].map(|state| layout.blocks(state)), [0, 0, 0]);
    }

    proptest! {
        #[test]
        fn any_header_parses_or_is_refused(
            mut bytes in vec(any::<u8>(), 64..200), magic in any::<bool>(),
        ) {
            if magic {
                put(&mut bytes, 0, MAGIC);
                put(&mut bytes, 8, 4096);
            }
            if let Ok(layout) = Layout::parse(0, &bytes) {
                prop_assert!(layout.chunks == 0 || layout.word(layout.chunks - 1, 0).offset > 0);
            }
        }
    }
}
