//! Random numbers that are the same on every machine.

use rand_xoshiro::Xoshiro256StarStar;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};

/// A sequence of random numbers, determined by a seed.
#[derive(Clone, Debug)]
pub struct Random(Xoshiro256StarStar);

impl Random {
    /// Creates the sequence of `seed` for `purpose`. Each use has its own sequence, so that an
    /// additional number in one use does not change the others.
    pub fn new(seed: u64, purpose: u64) -> Self {
        Self(Xoshiro256StarStar::seed_from_u64(seed ^ purpose.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    /// Returns 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a number below `end`, which must not be 0.
    pub fn below(&mut self, end: u64) -> u64 {
        ((self.bits() as u128 * end as u128) >> 64) as u64
    }

    /// Returns true once in `n` calls on average; never if `n` is 0.
    pub fn once_in(&mut self, n: u64) -> bool {
        n > 0 && self.below(n) == 0
    }

    /// Returns a random element of a list.
    pub fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len() as u64) as usize]
    }
}
