//! Authenticated encryption of pages that leave the process.
//!
//! A [`Sealer`] encrypts bytes before a memory node or a file gets them, and verifies the bytes
//! that come back. The process that owns the bytes keeps one [`Seal`] of 24 bytes for each stored
//! content, and passes this seal to [`Sealer::open`]. Bytes open only if all of these are equal to
//! those of the store: every byte, the length, the place, the seal, and the sealer. So changed
//! bytes, bytes of another place, an older content of the same place, and a truncated content fail
//! alike, with [`Tampered`]. The output then is zeros: unverified bytes are never visible.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let sealer = seal::Sealer::new(seal::Cipher::default())?;
//! let (place, page) = (7, [1; 4096]);
//! let mut stored = [0; 4096];
//! let first = sealer.seal(place, &page, &mut stored)?;
//!
//! let mut opened = [0; 4096];
//! sealer.open(place, &first, &stored, &mut opened)?;
//! assert_eq!(opened, page);
//! sealer.forget(&first);
//! # Ok(())
//! # }
//! ```
//!
//! # Construction
//!
//! | part | content |
//! | --- | --- |
//! | cipher | AES-GCM ([`Cipher`]), tag of 128 bits |
//! | key | random, for each *generation* of the sealer |
//! | nonce | generation (32 bits, big endian), store number (64 bits, big endian) |
//! | associated data | run id (16 random bytes of the sealer), place (64 bits, big endian) |
//!
//! A store number is taken from the generation's counter once, by an atomic addition. The number is
//! not derived from the place or a time, and is never written to a disk. Therefore no two stores
//! under one key have the same nonce. A forked child has copies of its parent's keys and counters,
//! so [`Sealer::seal`] refuses to work in a child ([`Error::Forked`]).
//!
//! A new generation begins after 2^36 stores, after 24 hours ([`Sealer::tick`]), and on demand
//! ([`Sealer::rekey`]). The key of an older generation is dropped when no seal names it any more
//! ([`Sealer::forget`]). aws-lc overwrites the memory of a key with zeros when it frees the key.
//!
//! # Parts
//!
//! | module | content |
//! | --- | --- |
//! | `sealer` | the API: nonces, associated data, rekeying |
//! | `generations` | keys by generation, their counters, and the release of unused keys |
//! | `key` | the calls to aws-lc |
//! | `home` | detection of a forked child |
//!
//! Miri cannot execute aws-lc, which is C and assembly. Module `generations` has all shared state
//! and is generic over the key, so Miri can execute its tests.

mod generations;
mod home;
mod key;
mod sealer;

use std::fmt;
use std::str::FromStr;

pub use home::Home;
pub use sealer::{Random, Sealer, Statistics};

/// Bytes of an authentication tag.
pub const TAG_BYTES: usize = 16;

/// An authenticated cipher.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cipher {
    /// AES-GCM with a key of 256 bits.
    #[default]
    Aes256Gcm,
    /// AES-GCM with a key of 128 bits. TDMEM (§6.2.3) measures this cipher.
    Aes128Gcm,
}

impl Cipher {
    /// All ciphers.
    pub const ALL: [Self; 2] = [Self::Aes256Gcm, Self::Aes128Gcm];

    /// The name that options and reports have: `aes-256-gcm`, `aes-128-gcm`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Aes256Gcm => "aes-256-gcm",
            Self::Aes128Gcm => "aes-128-gcm",
        }
    }
}

impl fmt::Display for Cipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Cipher {
    type Err = UnknownCipher;

    fn from_str(name: &str) -> Result<Self, UnknownCipher> {
        let known = Self::ALL.into_iter().find(|cipher| cipher.name() == name);
        known.ok_or_else(|| UnknownCipher(name.to_owned()))
    }
}

/// The name of a cipher that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("choosing the cipher {0:?}: no such cipher; use aes-256-gcm or aes-128-gcm")]
pub struct UnknownCipher(String);

/// Identifies a stored content: the key, the nonce and the tag. The owner of the content keeps it.
///
/// The default value names no stored content: [`Sealer::open`] refuses it. A seal is no secret, but
/// a party that can replace the owner's seals can replay older contents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Seal {
    /// Key generation (the upper 16 bits) and store number (the lower 48 bits, from 1 on).
    pub counter: u64,
    /// Authentication tag.
    pub tag: [u8; TAG_BYTES],
}

/// Bits of [`Seal::counter`] that are the store number.
const STORE_BITS: u32 = 48;

impl Seal {
    /// Returns the number of the key's generation.
    pub const fn generation(&self) -> u16 {
        (self.counter >> STORE_BITS) as u16
    }

    /// Returns the number of the store under this key. Number 0 means that nothing was stored.
    pub const fn store(&self) -> u64 {
        self.counter & ((1 << STORE_BITS) - 1)
    }

    /// Returns false for the default value, which names no stored content.
    pub const fn is_stored(&self) -> bool {
        self.store() != 0
    }
}

/// The bytes, their length, their place or their seal differ from those of the store.
///
/// This error has no details: AES-GCM cannot tell the causes apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "opening sealed bytes: authentication failed, so the bytes are not those that were last stored \
     at this place; do not trust the memory node or the file that returned them"
)]
pub struct Tampered;

/// Errors of a [`Sealer`] other than a failed authentication.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel gave no random bytes.
    #[error("making a key: getrandom failed: {0}; check the kernel and the seccomp filter")]
    Random(#[source] std::io::Error),
    /// The kernel has no memory that a fork wipes.
    #[error(
        "making a sealer: no memory that a fork wipes (mmap, MADV_WIPEONFORK): {0}; use Linux 4.14 \
         or later, and check the limits on memory"
    )]
    WipeOnFork(#[source] std::io::Error),
    /// The process is a forked child of the process that made the sealer.
    #[error(
        "sealing: the key belongs to the parent process, and a forked child must not use it; make \
         a sealer of the child's own"
    )]
    Forked,
    /// The keys were dropped by [`Sealer::wipe`].
    #[error("sealing: the keys of this sealer were wiped; make another sealer")]
    Wiped,
    /// All store numbers of the current key are used.
    #[error("sealing: all 2^48 nonces of the key are used; call rekey")]
    Nonces,
    /// All numbers of key generations are used.
    #[error("changing the key: all 65536 key generations are used; make another sealer")]
    Generations,
    /// The output is not as long as the input, or the input is too long for AES-GCM.
    #[error(
        "sealing {plain} bytes into {sealed}: the lengths must be equal, and below 64 GiB; correct \
         the caller"
    )]
    Length {
        /// Bytes of the input.
        plain: usize,
        /// Bytes of the output.
        sealed: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seal_has_24_bytes() {
        assert_eq!(size_of::<Seal>(), 24);
    }

    #[test]
    fn names_of_ciphers_parse() {
        for cipher in Cipher::ALL {
            assert_eq!(cipher.to_string().parse(), Ok(cipher));
        }
        assert_eq!(Cipher::default(), Cipher::Aes256Gcm);
        let error = "rot13".parse::<Cipher>().unwrap_err();
        assert!(error.to_string().contains("\"rot13\""), "{error}");
    }

    #[test]
    fn counter_has_generation_and_store() {
        let seal = Seal { counter: 0x1234_0000_0000_0005, tag: [0; TAG_BYTES] };
        assert_eq!((seal.generation(), seal.store(), seal.is_stored()), (0x1234, 5, true));
        assert!(!Seal::default().is_stored());
        let no_store = Seal { counter: 0x1234 << 48, ..Seal::default() };
        assert!(!no_store.is_stored());
    }
}
