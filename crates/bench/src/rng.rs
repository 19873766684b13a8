//! The pseudo-random number generator of experiments.

/// SplitMix64 (Steele, Lea, Flood 2014). The same seed and stream give the same numbers on every
/// machine.
pub struct Rng(u64);

impl Rng {
    /// The generator of one stream, e.g. of one thread.
    pub fn new(seed: u64, stream: u32) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (u64::from(stream) << 32))
    }

    /// A number from 0 to below `end`, which must not be 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(x ^ (x >> 31)) * u128::from(end)) >> 64) as u64
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
    fn shuffle_keeps_all_items() {
        let mut items: Vec<usize> = (0..1000).collect();
        Rng::new(1, 0).shuffle(&mut items);
        assert!(!items.is_sorted());
        items.sort();
        assert!(items.iter().copied().eq(0..1000));
    }
}
