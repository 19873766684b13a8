//! Pseudo-random numbers for experiments and tests. They are no secrets: use `getrandom` for keys.

/// The increment of SplitMix64: 2^64 divided by the golden ratio.
const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64 (Steele, Lea, Flood 2014). The same seed gives the same numbers on every machine.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates the generator of a seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Creates the generator of one stream of a seed, e.g. of one thread.
    pub const fn stream(seed: u64, stream: u32) -> Self {
        Self(seed.wrapping_mul(INCREMENT) ^ ((stream as u64) << 32))
    }

    /// Returns 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(INCREMENT);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Returns a number from 0 to below `end`, which must not be 0.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(end)) >> 64) as u64
    }

    /// Shuffles the items (Fisher-Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            let other = self.below(at as u64 + 1);
            items.swap(at, other as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_is_splitmix64() {
        // Numbers of the reference implementation by Vigna for seed 1234567.
        let mut random = Random::new(1_234_567);
        let first = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973];
        assert_eq!([random.bits(), random.bits()], first);
    }

    #[test]
    fn shuffle_keeps_all_items() {
        let mut items: Vec<usize> = (0..1000).collect();
        Random::stream(1, 0).shuffle(&mut items);
        assert!(!items.is_sorted());
        items.sort();
        assert!(items.iter().copied().eq(0..1000));
    }
}
