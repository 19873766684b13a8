//! Random numbers that are the same on every machine.

/// A sequence of random numbers, determined by a seed (SplitMix64).
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// Creates the sequence of `seed` for `purpose`. Each use has its own sequence, so that an
    /// additional number in one use does not change the others.
    pub(crate) fn new(seed: u64, purpose: u64) -> Self {
        let mut random = Self(seed ^ purpose.wrapping_mul(0xd134_2543_de82_ef95));
        random.bits();
        random
    }

    /// Returns 64 random bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ bits >> 31
    }

    /// Returns a number below `end`, which must not be 0.
    pub(crate) fn below(&mut self, end: u32) -> u32 {
        (((self.bits() >> 32) * u64::from(end)) >> 32) as u32
    }

    /// Returns a number of a range that is not empty.
    pub(crate) fn within(&mut self, range: std::ops::RangeInclusive<u32>) -> u32 {
        range.start() + self.below(range.end() - range.start() + 1)
    }

    /// Returns true once in `n` calls on average; never if `n` is 0.
    pub(crate) fn once_in(&mut self, n: u32) -> bool {
        n > 0 && self.below(n) == 0
    }

    /// Returns a random element of a list.
    pub(crate) fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u32) as usize]
    }
}
