//! Keyed fingerprints of pages, and the search for pages that need no slot.
//!
//! A page whose fingerprint equals that of its slot's content need not be written again. The
//! fingerprint is the XXH3 hash of 128 bits (<https://xxhash.com>) with a random secret of each
//! process. Two different pages have the same fingerprint with probability 2^-128. Because the
//! program never sees the secret or a fingerprint, the program cannot choose contents that collide.
//! XXH3 is not a message authentication code: a fingerprint does not protect content from a memory
//! node.

use twox_hash::XxHash3_128;

use crate::sys::PAGE_BYTES;

const WORDS: usize = PAGE_BYTES / 8;
/// Words of a cache line.
const LINE: usize = 8;
/// XXH3's default size of a secret.
const SECRET_BYTES: usize = 192;

/// Content of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// All bytes are 0.
    Zero,
    /// All words of 8 bytes are equal, and not 0.
    Word(u64),
    /// Any other content, by its fingerprint.
    Other(u128),
}

/// Computes fingerprints with one secret. Fingerprints of different secrets cannot be compared.
#[derive(Clone)]
pub struct Fingerprints {
    secret: [u8; SECRET_BYTES],
}

impl Fingerprints {
    /// Creates a secret.
    ///
    /// # Errors
    /// Errors of `getrandom(2)`.
    pub fn new() -> std::io::Result<Self> {
        let mut secret = [0; SECRET_BYTES];
        // SAFETY: `secret` is valid for the write. At most 256 bytes are never returned in part.
        let got = unsafe { libc::getrandom(secret.as_mut_ptr().cast(), SECRET_BYTES, 0) };
        if got < 0 { Err(std::io::Error::last_os_error()) } else { Ok(Self { secret }) }
    }

    /// Returns the fingerprint of a page.
    ///
    /// # Safety
    /// `page` is aligned to 8 bytes and readable for [`PAGE_BYTES`], and no thread writes to the
    /// page during the call.
    pub unsafe fn of(&self, page: *const u8) -> u128 {
        // SAFETY: by the caller.
        let bytes = unsafe { &*page.cast::<[u8; PAGE_BYTES]>() };
        XxHash3_128::oneshot_with_secret(&self.secret, bytes).expect("the secret is long enough")
    }

    /// Returns the content of a page.
    ///
    /// # Safety
    /// As for [`Fingerprints::of`].
    pub unsafe fn inspect(&self, page: *const u8) -> Content {
        debug_assert!(page.cast::<u64>().is_aligned());
        // SAFETY: by the caller.
        match repeated_word(unsafe { &*page.cast::<[u64; WORDS]>() }) {
            Some(0) => Content::Zero,
            Some(word) => Content::Word(word),
            // SAFETY: by the caller.
            None => Content::Other(unsafe { self.of(page) }),
        }
    }
}

/// Returns the word of which the page consists. Most other pages differ in their first line, so the
/// search ends there.
fn repeated_word(page: &[u64; WORDS]) -> Option<u64> {
    let word = page[0];
    let is_same = |line: &[u64]| line.iter().fold(0, |all, other| all | (other ^ word)) == 0;
    page.chunks_exact(LINE).all(is_same).then_some(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inspect(fingerprints: &Fingerprints, page: &[u64; WORDS]) -> Content {
        // SAFETY: a local array.
        unsafe { fingerprints.inspect(page.as_ptr().cast()) }
    }

    fn of(fingerprints: &Fingerprints, page: &[u64; WORDS]) -> u128 {
        // SAFETY: a local array.
        unsafe { fingerprints.of(page.as_ptr().cast()) }
    }

    fn fixed(seed: u8) -> Fingerprints {
        Fingerprints { secret: std::array::from_fn(|i| (i as u8).wrapping_mul(37) ^ seed) }
    }

    #[test]
    fn pages_of_one_word_are_found() {
        let fingerprints = fixed(1);
        assert_eq!(inspect(&fingerprints, &[0; WORDS]), Content::Zero);
        for word in [1, 1 << 63, u64::MAX, 0x0102_0304_0506_0708] {
            assert_eq!(inspect(&fingerprints, &[word; WORDS]), Content::Word(word));
        }
    }

    #[test]
    fn single_different_bit_makes_another_page() {
        let fingerprints = fixed(2);
        let positions = [0, 1, LINE - 1, LINE, WORDS / 2, WORDS - 2, WORDS - 1];
        for word in [0, 7] {
            let mut seen = std::collections::HashSet::from([of(&fingerprints, &[word; WORDS])]);
            for (position, bit) in positions.iter().flat_map(|p| [0, 31, 32, 63].map(|b| (*p, b))) {
                let mut page = [word; WORDS];
                page[position] ^= 1 << bit;
                let fingerprint = of(&fingerprints, &page);
                assert_eq!(inspect(&fingerprints, &page), Content::Other(fingerprint));
                assert!(seen.insert(fingerprint), "bit {bit} of word {position}");
            }
        }
    }

    #[test]
    fn fingerprint_depends_on_content_and_secret_only() {
        let mut page: [u64; WORDS] = std::array::from_fn(|word| word as u64);
        let copy = page;
        let before = of(&fixed(3), &page);
        assert_eq!(before, of(&fixed(3), &copy));
        assert_ne!(before, of(&fixed(4), &page));
        page.swap(10, 400);
        assert_ne!(before, of(&fixed(3), &page), "the order of words counts");
    }

    #[test]
    fn secrets_differ() {
        let (one, other) = (Fingerprints::new().unwrap(), Fingerprints::new().unwrap());
        assert_ne!(one.secret, other.secret);
        assert_ne!(of(&one, &[1; WORDS]), of(&other, &[1; WORDS]));
    }
}
