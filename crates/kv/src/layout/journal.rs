//! The journal: what a call that changes several slots is about to do.
//!
//! ```text
//! journal   +8*stripe  place of the stripe's word, which lies in the stripe
//! word      63 units of 32 B 48 | 47 place of the record 0    0 = none
//! record    +0 crc32 of +4..end, begun with the record's place   +4 number of changes u32
//!           +8 word of the record that continues this one, 0 = none
//!           +16 changes: address of a slot, old word, new word
//! ```

use super::{Malformed, half, put, word};
use crate::place::{Address, PLACE_BITS, Place, UNIT};

/// Bytes before the first change of a record.
pub const HEAD_BYTES: usize = 16;
/// Bytes of a change.
pub const CHANGE_BYTES: usize = 24;

/// A change of one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Address of the slot.
    pub slot: Address,
    /// The slot before the call.
    pub old: u64,
    /// The slot after the call.
    pub new: u64,
}

/// The word that names a record of `bytes` at `place`.
pub const fn record_word(place: Place, bytes: u32) -> u64 {
    (bytes.div_ceil(UNIT as u32) as u64) << PLACE_BITS | place.bits()
}

/// The place and length that a record word names. `None` for 0.
pub const fn parse_word(word: u64) -> Option<(Place, u32)> {
    let place = Place::of(word);
    let bytes = (word >> PLACE_BITS) as u32 * UNIT as u32;
    if bytes == 0 || place.is_none() { None } else { Some((place, bytes)) }
}

/// Bytes of a record of `changes` changes.
pub const fn bytes_of(changes: usize) -> usize {
    HEAD_BYTES + changes * CHANGE_BYTES
}

/// Writes a record that lies at `place`.
pub fn encode(place: Place, changes: &[Change], next: u64, bytes: &mut [u8]) {
    bytes[4..8].copy_from_slice(&(changes.len() as u32).to_be_bytes());
    put(bytes, 8, next);
    for (i, change) in changes.iter().enumerate() {
        let at = bytes_of(i);
        put(bytes, at, change.slot.word());
        put(bytes, at + 8, change.old);
        put(bytes, at + 16, change.new);
    }
    let crc = crc(place, &bytes[4..bytes_of(changes.len())]);
    bytes[..4].copy_from_slice(&crc.to_be_bytes());
}

/// Parses the record at `place`. Returns the changes and the word of the next record.
pub fn parse(place: Place, bytes: &[u8]) -> Result<(Vec<Change>, u64), Malformed> {
    let count = half(bytes, 4) as usize;
    let end = count.checked_mul(CHANGE_BYTES).map(|changes| HEAD_BYTES + changes);
    let covered = end.and_then(|end| bytes.get(4..end));
    let Some(covered) = covered.filter(|covered| crc(place, covered) == half(bytes, 0)) else {
        return Err(Malformed("a journal record's checksum differs"));
    };
    let changes = covered[HEAD_BYTES - 4..].chunks_exact(CHANGE_BYTES).map(|change| Change {
        slot: Address::of(word(change, 0)),
        old: word(change, 8),
        new: word(change, 16),
    });
    Ok((changes.collect(), word(bytes, 8)))
}

fn crc(place: Place, bytes: &[u8]) -> u32 {
    super::block::checksum(place, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_parses_only_whole_and_at_its_place() {
        let change = |i| Change { slot: Place::of(i).at(8), old: i, new: i + 1 };
        let changes: Vec<_> = (1..4).map(change).collect();
        let mut bytes = vec![0; bytes_of(3)];
        encode(Place::of(9), &changes, 5, &mut bytes);
        assert_eq!(parse(Place::of(9), &bytes), Ok((changes, 5)));
        assert!(parse(Place::of(8), &bytes).is_err());
        for byte in 0..bytes.len() {
            bytes[byte] ^= 0x80;
            assert!(parse(Place::of(9), &bytes).is_err(), "byte {byte}");
            bytes[byte] ^= 0x80;
        }
        assert_eq!(parse_word(record_word(Place::of(9), 88)), Some((Place::of(9), 96)));
    }
}
