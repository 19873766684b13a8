//! The subtable: a header, and groups of three buckets of eight words.
//!
//! ```text
//! header   +0 magic "GSUB" u32, groups u16, database u8, 0    +8 bucket word of the whole subtable
//!          +16 number of the split or merge that made the subtable
//!          +64 places of the pieces, one word each, only if the groups are in pieces
//! group i  | main 2i (64 B) | overflow i (64 B) | main 2i+1 (64 B) |
//! bucket   | bucket word | slot 0 | ... | slot 6 |
//! bucket word  63 depth 58 | 57 state 56 | 55 version 48 | 47 prefix of the hash 0
//! slot         63 fingerprint 56 | 55 length 48 | 47 place of the block 0        0 = empty
//! ```
//!
//! The combined bucket of a main is the main and the group's overflow bucket: 128 contiguous bytes.
//! A subtable in a slab of 4 KiB or more is one block. In smaller slabs the groups are in pieces,
//! and no group straddles two pieces, because a combined bucket must be one READ.

use super::{DEPTH_SHIFT, Malformed, half, put, word};
use crate::hash::{DEPTH_MAX, prefix};
use crate::place::{Address, Place};

/// Bytes of a header without a list of pieces.
pub const HEADER_BYTES: u32 = 64;
/// Bytes of a group.
pub const GROUP_BYTES: u32 = 192;
/// Bytes of a bucket.
pub const BUCKET_BYTES: usize = 64;
/// Slots of a bucket.
pub const SLOTS: usize = 7;
/// Bytes of a combined bucket.
pub const COMBINED_BYTES: usize = 2 * BUCKET_BYTES;
/// Offset of the header's bucket word.
pub const HEADER_WORD: u64 = 8;

const SEQUENCE: usize = 16;
const MAGIC: u32 = u32::from_be_bytes(*b"GSUB");
/// Slabs from this size on hold a subtable in one block.
const WHOLE_FROM: u32 = 4096;
const TABLE_MAX: u32 = 16 << 10;

const _: () = assert!(BUCKET_BYTES == 8 * (1 + SLOTS));
const _: () = assert!(GROUP_BYTES as usize == 3 * BUCKET_BYTES);
const _: () = assert!(HEADER_BYTES + 21 * GROUP_BYTES == 4096);
const _: () = assert!(HEADER_BYTES + 85 * GROUP_BYTES == 16 << 10);

/// The sizes of a subtable's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Groups of buckets.
    pub groups: u32,
    /// Groups of each piece; all groups if the subtable is one block.
    pub groups_of_piece: u32,
    /// Number of pieces; 0 if the subtable is one block.
    pub pieces: u32,
}

impl Shape {
    /// The largest number of groups that a subtable in slabs of `slab` bytes should have.
    pub const fn groups_of(slab: u32) -> u32 {
        if slab < WHOLE_FROM {
            return (WHOLE_FROM - HEADER_BYTES) / GROUP_BYTES;
        }
        let mut bytes = slab;
        let mut class = 0;
        while bytes > TABLE_MAX {
            class += 1;
            bytes = super::class::bytes(slab, class);
        }
        (bytes - HEADER_BYTES) / GROUP_BYTES
    }

    /// The shape of a subtable of `groups` groups. `None` if the groups fit no subtable of slabs of
    /// `slab` bytes.
    pub const fn new(groups: u32, slab: u32) -> Option<Self> {
        if groups == 0 || slab < HEADER_BYTES + GROUP_BYTES {
            return None;
        }
        if HEADER_BYTES + groups * GROUP_BYTES <= slab {
            return Some(Self { groups, groups_of_piece: groups, pieces: 0 });
        }
        let groups_of_piece = slab / GROUP_BYTES;
        let pieces = groups.div_ceil(groups_of_piece);
        if HEADER_BYTES + 8 * pieces > slab {
            return None;
        }
        Some(Self { groups, groups_of_piece, pieces })
    }

    /// Bytes of the block that begins with the header.
    pub const fn header_bytes(self) -> u32 {
        match self.pieces {
            0 => HEADER_BYTES + self.groups * GROUP_BYTES,
            pieces => HEADER_BYTES + 8 * pieces,
        }
    }

    /// Bytes of piece `piece`.
    pub const fn piece_bytes(self, piece: u32) -> u32 {
        let left = self.groups - piece * self.groups_of_piece;
        GROUP_BYTES * if left < self.groups_of_piece { left } else { self.groups_of_piece }
    }

    /// Number of buckets.
    pub const fn buckets(self) -> u32 {
        3 * self.groups
    }

    /// Number of slots.
    pub const fn slots(self) -> usize {
        self.buckets() as usize * SLOTS
    }

    /// Bytes of the groups.
    pub const fn group_bytes(self) -> usize {
        (self.groups * GROUP_BYTES) as usize
    }
}

/// Where a subtable lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spot {
    /// Place of the header.
    pub header: Place,
    /// Places of the pieces; empty if the subtable is one block.
    pub pieces: Vec<Place>,
    /// The sizes.
    pub shape: Shape,
}

impl Spot {
    /// Address of bucket `bucket`, which is less than the shape's number of buckets.
    pub fn bucket(&self, bucket: u32) -> Address {
        let group = bucket / 3;
        let (place, start, first) =
            match self.pieces.get((group / self.shape.groups_of_piece) as usize) {
                Some(piece) => {
                    (*piece, 0, group / self.shape.groups_of_piece * self.shape.groups_of_piece)
                }
                None => (self.header, HEADER_BYTES, 0),
            };
        let group_at = u64::from(start) + u64::from((group - first) * GROUP_BYTES);
        place.at(group_at + u64::from(bucket % 3) * BUCKET_BYTES as u64)
    }

    /// Address of slot `slot` of all slots of the subtable.
    pub fn slot(&self, slot: usize) -> Address {
        let (bucket, slot) = (slot / SLOTS, slot % SLOTS);
        self.bucket(bucket as u32).plus(8 * (1 + slot as u64))
    }

    /// The contiguous parts of the groups: address, and range in the groups' bytes.
    pub fn parts(&self) -> impl Iterator<Item = (Address, std::ops::Range<usize>)> + '_ {
        let shape = self.shape;
        (0..shape.pieces.max(1)).map(move |piece| {
            let first = piece * shape.groups_of_piece;
            let start = (first * GROUP_BYTES) as usize;
            (self.bucket(3 * first), start..start + shape.piece_bytes(piece) as usize)
        })
    }
}

/// The first bucket of the combined bucket of main `main`.
pub const fn combined(main: u32) -> u32 {
    main / 2 * 3 + main % 2
}

/// The main bucket among the two of the combined bucket of main `main`: 0 or 1.
pub const fn main_half(main: u32) -> usize {
    (main % 2) as usize
}

/// The first word of a bucket, and the same word of a header for the whole subtable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BucketWord {
    /// Depth of the subtable.
    pub depth: u32,
    /// True while a split moves slots out of the bucket (mode `shared`).
    pub moving: bool,
    /// Number of changes of the word.
    pub version: u8,
    /// The first `depth` bits of the hash of all keys, left-aligned in 48 bits.
    pub prefix: u64,
}

impl BucketWord {
    /// The word in remote memory.
    pub const fn word(self) -> u64 {
        (self.depth as u64) << DEPTH_SHIFT
            | (self.moving as u64) << 56
            | (self.version as u64) << 48
            | self.prefix
    }

    /// Parses a word of remote memory.
    pub const fn parse(word: u64) -> Result<Self, Malformed> {
        let found = Self {
            depth: (word >> DEPTH_SHIFT) as u32,
            moving: word >> 56 & 1 != 0,
            version: (word >> 48) as u8,
            prefix: word & ((1 << 48) - 1),
        };
        if found.depth > DEPTH_MAX || word >> 57 & 1 != 0 {
            return Err(Malformed("a bucket's first word has an impossible depth or state"));
        }
        if found.prefix != prefix(found.prefix << 16, found.depth) {
            return Err(Malformed("a bucket's prefix is longer than its depth"));
        }
        Ok(found)
    }

    /// True if the hash with the half `upper` belongs to a bucket with this word.
    pub const fn covers(self, upper: u64) -> bool {
        prefix(upper, self.depth) == self.prefix
    }
}

/// A slot that is not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Eight bits of the key's hash.
    pub fingerprint: u8,
    /// Code of the block's length.
    pub length: u8,
    /// Place of the block.
    pub place: Place,
}

impl Slot {
    /// The word in remote memory.
    pub const fn word(self) -> u64 {
        (self.fingerprint as u64) << 56 | (self.length as u64) << 48 | self.place.bits()
    }

    /// Parses a word of remote memory. `None`: the slot is empty, or names no block.
    pub const fn parse(word: u64) -> Option<Self> {
        let length = (word >> 48) as u8;
        let place = Place::of(word);
        if length == 0 || place.is_none() {
            return None;
        }
        Some(Self { fingerprint: (word >> 56) as u8, length, place })
    }
}

/// The fields of a header besides the places of the pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// The database at creation.
    pub db: u8,
    /// Depth and prefix of the subtable.
    pub whole: BucketWord,
    /// Number of the split or merge that made the subtable. Recovery believes the greater number.
    pub sequence: u64,
}

/// Writes the first 64 bytes of a header, and the list of pieces behind them.
pub fn encode_header(spot: &Spot, header: Header, bytes: &mut [u8]) {
    bytes[..HEADER_BYTES as usize].fill(0);
    bytes[..4].copy_from_slice(&MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&(spot.shape.groups as u16).to_be_bytes());
    bytes[6] = header.db;
    put(bytes, HEADER_WORD as usize, header.whole.word());
    put(bytes, SEQUENCE, header.sequence);
    for (i, piece) in spot.pieces.iter().enumerate() {
        put(bytes, HEADER_BYTES as usize + 8 * i, piece.bits());
    }
}

/// Parses a header at `header` of a subtable of `shape`.
pub fn parse_header(
    header: Place,
    bytes: &[u8],
    shape: Shape,
) -> Result<(Spot, Header), Malformed> {
    let needed = HEADER_BYTES as usize + 8 * shape.pieces as usize;
    if bytes.len() < needed || half(bytes, 0) != MAGIC {
        return Err(Malformed("no subtable lies where a directory names one"));
    }
    if half(bytes, 4) >> 16 != shape.groups {
        return Err(Malformed("a subtable has another number of groups than the root says"));
    }
    let at = |i| Place::of(word(bytes, HEADER_BYTES as usize + 8 * i));
    let pieces: Vec<_> = (0..shape.pieces as usize).map(at).collect();
    if pieces.iter().any(|piece| piece.is_none()) {
        return Err(Malformed("a subtable's header lists a piece without a place"));
    }
    let whole = BucketWord::parse(word(bytes, HEADER_WORD as usize))?;
    let said = Header { db: bytes[6], whole, sequence: word(bytes, SEQUENCE) };
    Ok((Spot { header, pieces, shape }, said))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slot_parses_to_what_was_encoded(fingerprint: u8, length in 1u8.., at in 1u64..1 << 48) {
            let slot = Slot { fingerprint, length, place: Place::of(at) };
            prop_assert_eq!(Slot::parse(slot.word()), Some(slot));
        }

        #[test]
        fn bucket_word_parses_to_what_was_encoded(
            upper: u64, depth in 0..=DEPTH_MAX, moving: bool, version: u8,
        ) {
            let word = BucketWord { depth, moving, version, prefix: prefix(upper, depth) };
            prop_assert_eq!(BucketWord::parse(word.word()), Ok(word));
            prop_assert!(word.covers(upper));
        }

        #[test]
        fn any_word_parses_or_is_refused(word: u64) {
            let _ = Slot::parse(word);
            if let Ok(parsed) = BucketWord::parse(word) {
                prop_assert_eq!(parsed.word(), word);
            }
        }
    }

    #[test]
    fn shapes_are_those_of_the_design() {
        assert_eq!(Shape::groups_of(4096), 21);
        assert_eq!(Shape::groups_of(16 << 10), 85);
        assert_eq!(Shape::groups_of(64 << 10), 85);
        assert_eq!(Shape::groups_of(1 << 20), 85);
        assert_eq!(Shape::groups_of(512), 21);
        let small = Shape::new(21, 512).expect("a shape");
        assert_eq!((small.groups_of_piece, small.pieces, small.header_bytes()), (2, 11, 152));
        assert_eq!(small.piece_bytes(10), GROUP_BYTES);
    }

    #[test]
    fn combined_bucket_lies_in_one_piece() {
        let shape = Shape::new(21, 512).expect("a shape");
        let pieces: Vec<_> = (1..=11).map(|i| Place::of(i * 100)).collect();
        let spot = Spot { header: Place::of(7), pieces, shape };
        for main in 0..42 {
            let first = combined(main);
            let (a, b) = (spot.bucket(first), spot.bucket(first + 1));
            assert_eq!(b, a.plus(BUCKET_BYTES as u64));
        }
        let total: usize = spot.parts().map(|(_, range)| range.len()).sum();
        assert_eq!(total, shape.group_bytes());
        assert_eq!(spot.slot(7), spot.bucket(1).plus(8));
        let mut bytes = vec![0; 152];
        let whole = BucketWord { depth: 1, prefix: 1 << 47, ..BucketWord::default() };
        let header = Header { db: 3, whole, sequence: 9 };
        encode_header(&spot, header, &mut bytes);
        assert_eq!(parse_header(Place::of(7), &bytes, shape), Ok((spot, header)));
    }
}
