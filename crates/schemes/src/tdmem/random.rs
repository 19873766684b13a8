//! The random numbers that select pages.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rustix::rand::{GetRandomFlags, getrandom};
use scheme::Error;

/// Bytes of a seed.
const SEED_BYTES: usize = 32;

/// A generator of random numbers that an observer of its results cannot predict: ChaCha with 8
/// rounds.
pub struct Random(ChaCha8Rng);

impl Random {
    /// A generator with this seed, or with one of the system's.
    ///
    /// # Errors
    /// The system has no random bytes.
    pub fn new(seed: Option<u64>) -> Result<Self, Error> {
        if let Some(seed) = seed {
            return Ok(Self(ChaCha8Rng::seed_from_u64(seed)));
        }
        let mut bytes = [0; SEED_BYTES];
        // `getrandom` returns up to 256 bytes completely unless a signal interrupts the call.
        loop {
            match getrandom(&mut bytes[..], GetRandomFlags::empty()) {
                Ok(SEED_BYTES) => return Ok(Self(ChaCha8Rng::from_seed(bytes))),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => {
                    return Err(Error::System {
                        attempt: "seeding the choice of pages".into(),
                        source: e.into(),
                    });
                }
            }
        }
    }

    /// A number below `end`, which is not 0. Each number has the probability `1 / end`, with an
    /// error below 2^-32 of it.
    pub fn below(&mut self, end: u32) -> u32 {
        (u128::from(self.0.next_u64()) * u128::from(end) >> 64) as u32
    }
}
