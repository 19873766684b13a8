//! The block of one key: a header of 32 bytes, the key, and the value or the list of its pieces.
//!
//! ```text
//! +0   crc32 of +4..+24 and +32..end, begun with the block's place
//! +4   key bytes u32    +8 value bytes u32    +12 kind u8, flags u8, database u8, 0
//! +16  upper half of the key's hash
//! +24  expiry: 63 crc16 of the rest 48 | 47 ms since 1970 0, or 0 for none
//! +32  key, then by kind: 0 the value
//!                         1 the head of the list of pieces, then its entries
//! head of a list   +0 crc32 of the value u32, number of entries here u32
//!                  +8 word of the list that continues this one, 0 = none
//! entry            63 units of 32 B 48 | 47 place 0
//! ```
//!
//! The expiry is not under the CRC-32, because one WRITE of 8 bytes changes the expiry in place. A
//! list that continues another has kind 2 and no key.

use super::{Malformed, half, put, word};
use crate::place::{PLACE_BITS, Place, UNIT};

/// Bytes of the header.
pub const HEADER_BYTES: usize = 32;
/// Offset of the expiry.
pub const EXPIRY: u64 = 24;
/// Bytes of the head of a list of pieces.
pub const LIST_HEAD_BYTES: usize = 16;
/// Maximum bytes of a value: those of Redis.
pub const VALUE_MAX: usize = 512 << 20;
/// Expiries have 48 bits.
pub const EXPIRY_MAX: u64 = (1 << 48) - 1;

const _: () = assert!(HEADER_BYTES as u64 == UNIT);

/// The content of a block behind its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A string.
    String,
    /// The list of the pieces of a string.
    Pieces,
    /// The continuation of a list of pieces.
    Continuation,
}

/// The header of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Bytes of the key.
    pub key: u32,
    /// Bytes of the value, also of a value in pieces.
    pub value: u32,
    /// What lies behind the key.
    pub kind: Kind,
    /// The database at the time of the write.
    pub db: u8,
    /// Upper half of the key's hash.
    pub upper: u64,
    /// Milliseconds since 1970; 0: none.
    pub expiry: u64,
}

/// The checksum of bytes that lie at `place`.
///
/// The checksum begins with the place. Otherwise an old block that a misdirected READ returns would
/// be valid.
pub(crate) fn checksum(place: Place, bytes: &[u8]) -> u32 {
    let mut crc = begun(place);
    crc.update(bytes);
    crc.finalize()
}

fn begun(place: Place) -> crc32fast::Hasher {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&place.bits().to_be_bytes());
    crc
}

/// The expiry word for `expiry` milliseconds; 0 stays 0.
pub fn expiry_word(expiry: u64) -> u64 {
    let expiry = expiry & EXPIRY_MAX;
    if expiry == 0 { 0 } else { u64::from(crc16(expiry)) << 48 | expiry }
}

/// The expiry in `word`.
pub fn parse_expiry(word: u64) -> Result<u64, Malformed> {
    let expiry = word & EXPIRY_MAX;
    if expiry_word(expiry) == word {
        Ok(expiry)
    } else {
        Err(Malformed("an expiry's checksum differs"))
    }
}

/// CRC-16 (polynomial 0x1021) of the lower 48 bits of `word`.
fn crc16(word: u64) -> u16 {
    let mut crc = 0xffff_u16;
    for byte in &word.to_be_bytes()[2..] {
        crc ^= u16::from(*byte) << 8;
        for _ in 0..8 {
            let carry = crc >> 15 != 0;
            crc = crc << 1 ^ if carry { 0x1021 } else { 0 };
        }
    }
    crc
}

/// Bytes of the block of a string.
pub const fn string_bytes(key: usize, value: usize) -> usize {
    HEADER_BYTES + key + value
}

/// Bytes of a block with a list of `entries` pieces.
pub const fn list_bytes(key: usize, entries: usize) -> usize {
    HEADER_BYTES + key + LIST_HEAD_BYTES + 8 * entries
}

/// Writes a block that lies at `place` into `bytes`, whose end is the block's end.
pub fn encode(place: Place, head: &Head, key: &[u8], rest: &[&[u8]], bytes: &mut [u8]) {
    bytes[4..8].copy_from_slice(&head.key.to_be_bytes());
    bytes[8..12].copy_from_slice(&head.value.to_be_bytes());
    let kind = match head.kind {
        Kind::String => 0,
        Kind::Pieces => 1,
        Kind::Continuation => 2,
    };
    bytes[12..16].copy_from_slice(&[kind, 0, head.db, 0]);
    put(bytes, 16, head.upper);
    put(bytes, EXPIRY as usize, expiry_word(head.expiry));
    let mut at = HEADER_BYTES;
    for part in [key].iter().chain(rest) {
        bytes[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
    let crc = covered(place, &bytes[..at]);
    bytes[..4].copy_from_slice(&crc.to_be_bytes());
}

/// Renews the checksum of a whole block that moves to `place`.
pub fn reseal(place: Place, block: &mut [u8]) {
    let crc = covered(place, block);
    block[..4].copy_from_slice(&crc.to_be_bytes());
}

#[cfg(test)]
thread_local! {
    /// Checksums of blocks that this thread has compared.
    pub(crate) static COMPARED: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

fn covered(place: Place, block: &[u8]) -> u32 {
    let mut crc = begun(place);
    crc.update(&block[4..EXPIRY as usize]);
    crc.update(&block[HEADER_BYTES..]);
    crc.finalize()
}

impl Head {
    /// Parses the first 32 bytes of a block. The checksum is not compared.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        if bytes.len() < HEADER_BYTES {
            return Err(Malformed("a block is shorter than its header"));
        }
        let kind = match bytes[12] {
            0 => Kind::String,
            1 => Kind::Pieces,
            2 => Kind::Continuation,
            _ => return Err(Malformed("a block is of an unknown kind")),
        };
        let head = Self {
            key: half(bytes, 4),
            value: half(bytes, 8),
            kind,
            db: bytes[14],
            upper: word(bytes, 16),
            expiry: parse_expiry(word(bytes, EXPIRY as usize))?,
        };
        if head.value as usize > VALUE_MAX || head.key as usize > VALUE_MAX {
            return Err(Malformed("a block names a key or value longer than 512 MiB"));
        }
        Ok(head)
    }

    /// True if the key has expired at `now`.
    pub const fn is_expired(&self, now: u64) -> bool {
        self.expiry != 0 && self.expiry <= now
    }

    /// Bytes of the block, in the words of its own header; `entries` is 0 for a string.
    pub const fn block_bytes(&self, entries: usize) -> usize {
        match self.kind {
            Kind::String => string_bytes(self.key as usize, self.value as usize),
            _ => list_bytes(self.key as usize, entries),
        }
    }
}

/// A whole block in local memory, whose checksum fits.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a> {
    /// The header.
    pub head: Head,
    /// The key.
    pub key: &'a [u8],
    /// The value, or the list of its pieces.
    pub rest: &'a [u8],
}

impl<'a> Block<'a> {
    /// Parses `bytes`, which begin with the block at `place`.
    pub fn parse(place: Place, bytes: &'a [u8]) -> Result<Self, Malformed> {
        let head = Head::parse(bytes)?;
        let key_end = HEADER_BYTES + head.key as usize;
        let entries = match head.kind {
            Kind::String => 0,
            _ => half(bytes, key_end + 4) as usize,
        };
        let entries = entries.min(bytes.len());
        let end = head.block_bytes(entries);
        let Some(block) = bytes.get(..end) else {
            return Err(Malformed("a block is longer than its slot says"));
        };
        #[cfg(test)]
        COMPARED.set(COMPARED.get() + 1);
        if covered(place, block) != half(bytes, 0) {
            return Err(Malformed("a block's checksum differs"));
        }
        Ok(Self { head, key: &block[HEADER_BYTES..key_end], rest: &block[key_end..] })
    }

    /// Divides the bytes of a block that was parsed before. The checksum is not compared again.
    pub(crate) fn divide(head: Head, block: &'a [u8]) -> Self {
        let (key, rest) = block[HEADER_BYTES..].split_at(head.key as usize);
        Self { head, key, rest }
    }

    /// Bytes of the block.
    pub fn bytes(&self) -> usize {
        HEADER_BYTES + self.key.len() + self.rest.len()
    }

    /// The list of pieces. An error for a string.
    pub fn list(&self) -> Result<List<'a>, Malformed> {
        if self.head.kind == Kind::String || self.rest.len() < LIST_HEAD_BYTES {
            return Err(Malformed("a block has no list of pieces where its slot names one"));
        }
        let next = parse_piece(word(self.rest, 8));
        Ok(List { crc: half(self.rest, 0), next, entries: &self.rest[LIST_HEAD_BYTES..] })
    }
}

/// A list of pieces.
#[derive(Clone, Copy, Debug)]
pub struct List<'a> {
    /// CRC-32 of the whole value.
    pub crc: u32,
    /// The list that continues this one: its place, and its length.
    pub next: Option<(Place, u32)>,
    entries: &'a [u8],
}

impl List<'_> {
    /// The pieces: place and allocated bytes.
    pub fn pieces(&self) -> impl Iterator<Item = Result<(Place, u32), Malformed>> + '_ {
        let none = Malformed("a list names a piece without place or length");
        self.entries.chunks_exact(8).map(move |entry| parse_piece(word(entry, 0)).ok_or(none))
    }
}

/// The word of a piece of `bytes` at `place`.
pub const fn piece_word(place: Place, bytes: u32) -> u64 {
    (bytes.div_ceil(UNIT as u32) as u64) << PLACE_BITS | place.bits()
}

fn parse_piece(word: u64) -> Option<(Place, u32)> {
    super::journal::parse_word(word)
}

/// The head of a list.
pub fn list_head(crc: u32, entries: u32, next: u64) -> [u8; LIST_HEAD_BYTES] {
    let mut bytes = [0; LIST_HEAD_BYTES];
    put(&mut bytes, 0, u64::from(crc) << 32 | u64::from(entries));
    put(&mut bytes, 8, next);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn head(key: &[u8], value: &[u8], expiry: u64) -> Head {
        let (key, value) = (key.len() as u32, value.len() as u32);
        Head { key, value, kind: Kind::String, db: 3, upper: 0xfeed << 40, expiry }
    }

    proptest! {
        #[test]
        fn block_parses_to_what_was_encoded(
            key in vec(any::<u8>(), 0..40), value in vec(any::<u8>(), 0..90),
            expiry in 0..=EXPIRY_MAX, place in 1u64..1 << 48,
        ) {
            let head = head(&key, &value, expiry);
            let mut bytes = vec![0xee; string_bytes(key.len(), value.len()) + 5];
            encode(Place::of(place), &head, &key, &[&value], &mut bytes);
            let block = Block::parse(Place::of(place), &bytes).unwrap();
            prop_assert_eq!((block.head, block.key, block.rest), (head, &key[..], &value[..]));
            prop_assert!(Block::parse(Place::of(place ^ 1), &bytes).is_err());
        }

        #[test]
        fn any_bytes_parse_or_are_refused(bytes in vec(any::<u8>(), 0..80)) {
            if let Ok(block) = Block::parse(Place::of(1), &bytes) {
                let _ = block.list().map(|list| list.pieces().count());
            }
        }
    }

    #[test]
    fn block_with_one_changed_byte_is_refused() {
        let mut bytes = vec![0; string_bytes(3, 4)];
        encode(Place::of(5), &head(b"key", b"1234", 99), b"key", &[b"1234"], &mut bytes);
        for byte in 0..bytes.len() {
            bytes[byte] ^= 4;
            assert!(Block::parse(Place::of(5), &bytes).is_err(), "byte {byte}");
            bytes[byte] ^= 4;
        }
    }

    #[test]
    fn expiry_changes_in_place() {
        let mut bytes = vec![0; string_bytes(3, 4)];
        encode(Place::of(5), &head(b"key", b"1234", 99), b"key", &[b"1234"], &mut bytes);
        for expiry in [0, 1, EXPIRY_MAX] {
            put(&mut bytes, EXPIRY as usize, expiry_word(expiry));
            assert_eq!(Block::parse(Place::of(5), &bytes).unwrap().head.expiry, expiry);
        }
        let head = head(b"", b"", 7);
        assert!(head.is_expired(7) && !head.is_expired(6));
    }

    #[test]
    fn list_of_pieces_parses_to_what_was_encoded() {
        let entries = [piece_word(Place::of(64), 4096), piece_word(Place::of(900), 33)];
        let entries: Vec<u8> = entries.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        let head = Head { kind: Kind::Pieces, value: 4129, ..head(b"k", b"", 0) };
        let mut bytes = vec![0; list_bytes(1, 2)];
        let list = list_head(7, 2, piece_word(Place::of(3), 64));
        encode(Place::of(5), &head, b"k", &[&list, &entries], &mut bytes);
        let block = Block::parse(Place::of(5), &bytes).unwrap();
        let list = block.list().unwrap();
        assert_eq!((list.crc, list.next), (7, Some((Place::of(3), 64))));
        let pieces: Vec<_> = list.pieces().collect::<Result<_, _>>().unwrap();
        assert_eq!(pieces, [(Place::of(64), 4096), (Place::of(900), 64)]);
    }
}
