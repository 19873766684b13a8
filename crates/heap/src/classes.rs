//! Size classes: the lengths of blocks.

use crate::place::UNIT_BYTES;

/// Maximum bytes of a slab. A longer chunk is cut into slabs of this length.
///
/// Because lengths of blocks follow from the length of the slab, a bound keeps the number of
/// classes small.
pub const SLAB_BYTES_MAX: u64 = 1 << 20;

/// The minimum length of a chunk in bytes.
const CHUNK_BYTES_MIN: u64 = 64;

/// Number of a size class. Class 0 has the longest blocks, which fill a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Class(u8);

impl Class {
    /// The number of the class.
    pub const fn number(self) -> u8 {
        self.0
    }

    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The size classes of a chunk length.
///
/// The blocks of a class are a slab's length divided by 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20,
/// 24, 28, 32, 40 and so on, rounded down to 32 bytes. No byte of a slab is used for anything else,
/// so exactly four blocks of 1 KiB fit a chunk of 4 KiB. A block of a quarter of a slab or less is
/// at most a quarter longer than requested, except for the rounding to 32 bytes.
///
/// ```
/// let classes = heap::Classes::new(4096).unwrap();
/// let class = classes.class_of(1000).unwrap();
/// assert_eq!(classes.bytes(class), 1024);
/// assert_eq!(classes.blocks(class), 4);
/// assert_eq!(classes.class_of(4097), None);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Classes {
    chunk_bytes: u64,
    slab_bytes: u64,
    /// Lengths of the blocks in units, longest first.
    units: Vec<u32>,
}

/// The divisors of a slab: 1 to 8, and then four between each power of two and the next.
fn divisors() -> impl Iterator<Item = u64> {
    let upper = (3..).flat_map(|log2: u32| (1..5).map(move |step| (4 + step) << (log2 - 2)));
    (1..=8).chain(upper)
}

impl Classes {
    /// The classes for chunks of `chunk_bytes`. `None` unless this is a power of two from 64 on.
    pub fn new(chunk_bytes: u64) -> Option<Self> {
        if !chunk_bytes.is_power_of_two() || chunk_bytes < CHUNK_BYTES_MIN {
            return None;
        }
        let slab_bytes = chunk_bytes.min(SLAB_BYTES_MAX);
        let units = divisors().map(|divisor| (slab_bytes / divisor / UNIT_BYTES) as u32);
        let mut units: Vec<u32> = units.take_while(|units| *units > 0).collect();
        units.dedup();
        Some(Self { chunk_bytes, slab_bytes, units })
    }

    /// Bytes of a chunk.
    pub fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// Bytes of a slab, and of the longest block.
    pub fn slab_bytes(&self) -> u64 {
        self.slab_bytes
    }

    /// Number of classes.
    pub fn count(&self) -> usize {
        self.units.len()
    }

    /// All classes, that of the longest blocks first.
    pub fn iter(&self) -> impl Iterator<Item = Class> + use<> {
        (0..self.units.len() as u8).map(Class)
    }

    /// The class with this number.
    pub fn get(&self, number: u8) -> Option<Class> {
        (usize::from(number) < self.count()).then_some(Class(number))
    }

    /// The class with the shortest blocks that have at least `bytes`. `None` if `bytes` exceeds a
    /// slab.
    #[inline]
    pub fn class_of(&self, bytes: u64) -> Option<Class> {
        let needed = bytes.div_ceil(UNIT_BYTES);
        let fitting = self.units.partition_point(|units| u64::from(*units) >= needed);
        Some(Class(fitting.checked_sub(1)? as u8))
    }

    /// Bytes of a block of `class`.
    #[inline]
    pub fn bytes(&self, class: Class) -> u64 {
        u64::from(self.units(class)) * UNIT_BYTES
    }

    /// Number of blocks of `class` in a slab.
    pub fn blocks(&self, class: Class) -> u32 {
        (self.slab_bytes / self.bytes(class)) as u32
    }

    /// Lengths of the blocks that hold a value of `bytes`: whole slabs, and the rest.
    pub fn pieces(&self, bytes: u64) -> impl Iterator<Item = u64> + use<> {
        let slab = self.slab_bytes;
        let whole = (0..bytes / slab).map(move |_| slab);
        whole.chain(Some(bytes % slab).filter(|rest| *rest > 0))
    }

    /// Units of a block of `class`.
    #[inline]
    pub(crate) fn units(&self, class: Class) -> u32 {
        self.units[class.index()]
    }

    /// Units of a slab.
    #[inline]
    pub(crate) fn slab_units(&self) -> u64 {
        self.slab_bytes / UNIT_BYTES
    }

    /// Number of slabs in a chunk.
    #[inline]
    pub(crate) fn slabs(&self) -> u32 {
        (self.chunk_bytes / self.slab_bytes) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(chunk_bytes: u64) -> Vec<u64> {
        let classes = Classes::new(chunk_bytes).unwrap();
        classes.iter().map(|class| classes.bytes(class)).collect()
    }

    #[test]
    fn divisors_have_four_steps_to_each_power_of_two() {
        let first: Vec<_> = divisors().take(24).collect();
        let expected = [
            1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112,
            128,
        ];
        assert_eq!(first, expected);
    }

    #[test]
    fn lengths_are_parts_of_the_chunk() {
        let expected = [
            4096, 2048, 1344, 1024, 800, 672, 576, 512, 384, 320, 288, 256, 192, 160, 128, 96, 64,
            32,
        ];
        assert_eq!(lengths(4096), expected);
        assert_eq!(lengths(64), [64, 32]);
        assert_eq!(lengths(16 << 20), lengths(1 << 20));
    }

    #[test]
    fn blocks_of_1_kib_divide_a_chunk_exactly() {
        for (chunk_bytes, blocks) in [(2048, 2), (4096, 4), (8192, 8), (65536, 64)] {
            let classes = Classes::new(chunk_bytes).unwrap();
            let class = classes.class_of(1024).unwrap();
            assert_eq!((classes.bytes(class), classes.blocks(class)), (1024, blocks));
        }
    }

    /// The codes of a length above 224 units in a slot are 225 to 254.
    #[test]
    fn classes_above_7_kib_have_codes_in_a_slot() {
        let all = lengths(SLAB_BYTES_MAX);
        assert!(all.iter().filter(|bytes| **bytes > 224 * UNIT_BYTES).count() <= 30);
        assert!(all.len() <= usize::from(u8::MAX));
    }

    #[test]
    fn class_is_the_shortest_that_fits() {
        for chunk_bytes in [512, 4096, 65536, 1 << 20, 1 << 30] {
            let classes = Classes::new(chunk_bytes).unwrap();
            for bytes in (0..classes.slab_bytes()).step_by(31).chain([1, 32, 33]) {
                let class = classes.class_of(bytes).unwrap();
                assert!(classes.bytes(class) >= bytes);
                let next = classes.get(class.number() + 1);
                assert!(next.is_none_or(|next| classes.bytes(next) < bytes), "{bytes}");
                if bytes > 0 && bytes <= classes.slab_bytes() / 4 {
                    let longest = (bytes + bytes / 4).next_multiple_of(UNIT_BYTES);
                    assert!(classes.bytes(class) <= longest, "{bytes} in {chunk_bytes}");
                }
            }
            assert_eq!(classes.class_of(classes.slab_bytes() + 1), None);
            assert_eq!(classes.class_of(u64::MAX), None);
        }
    }

    #[test]
    fn lengths_of_no_chunk_are_refused() {
        for chunk_bytes in [0, 32, 96, 4095, u64::MAX] {
            assert_eq!(Classes::new(chunk_bytes), None);
        }
    }

    #[test]
    fn pieces_are_whole_slabs_and_a_rest() {
        let classes = Classes::new(16 << 20).unwrap();
        let pieces = |bytes| classes.pieces(bytes).collect::<Vec<_>>();
        assert!(pieces(0).is_empty());
        assert_eq!(pieces(5), [5]);
        assert_eq!(pieces(2 << 20), [1 << 20, 1 << 20]);
        assert_eq!(pieces((1 << 20) + 7), [1 << 20, 7]);
    }
}
