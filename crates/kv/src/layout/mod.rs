//! The layouts of a store in remote memory. All words are big-endian, as the pool's atomics are.
//!
//! | structure | module |
//! | --- | --- |
//! | root, directory | [`root`], [`directory`] |
//! | subtable: header, groups, buckets, slots | [`table`] |
//! | block: header, key, value, list of pieces | [`block`] |
//! | record of a call of several keys | [`journal`] |
//!
//! Each parser takes bytes that another compute node or a broken memory node may have written. A
//! parser returns [`Malformed`] for bytes that the store cannot have written, and never panics.

pub mod block;
pub mod directory;
pub mod journal;
pub mod root;
pub mod table;

/// Bytes in remote memory that the store cannot have written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(pub &'static str);

/// Depth in the upper six bits of a word.
pub(crate) const DEPTH_SHIFT: u32 = 58;

/// Reads the big-endian word at `at`; 0 if the word is not whole.
pub(crate) fn word(bytes: &[u8], at: usize) -> u64 {
    match bytes.get(at..at + 8).and_then(|word| word.try_into().ok()) {
        Some(word) => u64::from_be_bytes(word),
        None => 0,
    }
}

/// Reads the big-endian half word at `at`; 0 if the half word is not whole.
pub(crate) fn half(bytes: &[u8], at: usize) -> u32 {
    match bytes.get(at..at + 4).and_then(|word| word.try_into().ok()) {
        Some(word) => u32::from_be_bytes(word),
        None => 0,
    }
}

/// Writes `word` at `at`. The caller's buffer is long enough.
pub(crate) fn put(bytes: &mut [u8], at: usize, word: u64) {
    bytes[at..at + 8].copy_from_slice(&word.to_be_bytes());
}

/// The class sizes of blocks in a slab, and the length codes of slots.
pub mod class {
    use crate::place::UNIT;

    /// The number of lengths that a code names exactly: 1 to 224 units of 32 B.
    pub const EXACT: u8 = 224;
    /// Code of a value in pieces.
    pub const PIECES: u8 = 255;
    /// Bytes of the longest block with an exact code.
    pub const EXACT_BYTES: u32 = EXACT as u32 * UNIT as u32;
    /// Bytes of the largest slab.
    pub const SLAB_MAX: u32 = 1 << 20;

    /// The `i`th divisor of a slab: 1 2 3 4 5 6 7 8 10 12 14 16 20 24 28 32 40 ...
    pub const fn divisor(i: u32) -> u32 {
        if i < 4 {
            return i + 1;
        }
        (5 + i % 4) << (i / 4 - 1)
    }

    /// Bytes of class `i` of a slab: the slab over the `i`th divisor, rounded down to 32 B.
    pub const fn bytes(slab: u32, i: u32) -> u32 {
        slab / divisor(i) / UNIT as u32 * UNIT as u32
    }

    /// The smallest class that holds `bytes`, as its number and bytes. `None` if none does.
    pub const fn fitting(slab: u32, wanted: u32) -> Option<(u32, u32)> {
        let mut found = None;
        let mut i = 0;
        while divisor(i) <= slab / UNIT as u32 && bytes(slab, i) >= wanted {
            found = Some((i, bytes(slab, i)));
            i += 1;
        }
        found
    }

    /// The code of a block of `length` bytes. `None` for a length that no slot can name.
    pub const fn code(slab: u32, length: u32) -> Option<u8> {
        let units = length.div_ceil(UNIT as u32);
        if units == 0 {
            return None;
        }
        if units <= EXACT as u32 {
            return Some(units as u8);
        }
        match fitting(slab, length) {
            Some((i, _)) if EXACT as u32 + 1 + i < PIECES as u32 => Some(EXACT + 1 + i as u8),
            _ => None,
        }
    }

    /// Bytes that a reader of a block with `code` reads. `None` for codes 0 and 255.
    pub const fn length(slab: u32, code: u8) -> Option<u32> {
        match code {
            0 | PIECES => None,
            1..=EXACT => Some(code as u32 * UNIT as u32),
            _ => Some(bytes(slab, (code - EXACT - 1) as u32)),
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn divisors_are_as_in_the_design() {
            let divisors: Vec<_> = (0..21).map(divisor).collect();
            let expected =
                [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80];
            assert_eq!(divisors, expected);
        }

        #[test]
        fn every_length_to_the_slab_has_a_code_that_covers_it() {
            for slab in [512, 2048, 4096, 16 << 10, 64 << 10, 1 << 20] {
                for length in (1..=slab).step_by(31).chain([slab]) {
                    let code = code(slab, length).expect("a code");
                    let read = super::length(slab, code).expect("a length");
                    assert!(read >= length && read <= slab, "{slab} {length} {code} {read}");
                }
                assert_eq!(code(slab, 0), None);
            }
        }

        #[test]
        fn classes_lose_nothing_at_the_papers_sizes() {
            assert_eq!(bytes(4096, 3), 1024);
            assert_eq!(bytes(2048, 1), 1024);
            assert_eq!(fitting(8192, 1024), Some((7, 1024)));
            assert_eq!(fitting(4096, 4097), None);
        }
    }
}
