//! The keyed hash of keys, and the parts of the hash that name a key's buckets.

use twox_hash::XxHash3_128;

/// Bytes of the secret of a hash.
pub const SECRET_BYTES: usize = 192;

/// Maximum depth of a directory.
pub const DEPTH_MAX: u32 = 24;

/// Bits of a prefix word: the hash's first bits, left-aligned.
const PREFIX_BITS: u32 = 48;

/// The hash of one key.
///
/// The upper half is, from the top: 24 bits of directory prefix, 8 bits of fingerprint, and 16 bits
/// for each of the two main buckets. The tag is the directory prefix and the lower 40 bits of the
/// hash: a mirror knows a key by tag, fingerprint and bucket, and a split needs the prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyHash {
    /// The half that names buckets and fingerprint. Each block has a copy.
    pub upper: u64,
    /// The part that a mirror compares: 24 bits of directory prefix, and 40 more bits.
    pub tag: u64,
}

/// Bits of a tag that are no directory prefix.
const TAG_BITS: u32 = 64 - DEPTH_MAX;

impl KeyHash {
    /// The hash with these halves.
    pub const fn of(upper: u64, lower: u64) -> Self {
        let prefix = upper >> TAG_BITS << TAG_BITS;
        Self { upper, tag: prefix | lower & ((1 << TAG_BITS) - 1) }
    }

    /// Index of the key's word in a directory of `depth`.
    pub const fn index(self, depth: u32) -> usize {
        index(self.upper, depth)
    }

    /// The first `depth` bits, left-aligned in 48 bits.
    pub const fn prefix(self, depth: u32) -> u64 {
        prefix(self.upper, depth)
    }

    /// The fingerprint, which a slot has in its upper byte.
    pub const fn fingerprint(self) -> u8 {
        (self.upper >> 32) as u8
    }

    /// The two main buckets of the key in a subtable of `groups` groups. They differ.
    pub const fn mains(self, groups: u32) -> [u32; 2] {
        mains(self.upper, groups)
    }
}

/// The first `depth` bits of `upper`, left-aligned in 48 bits.
pub const fn prefix(upper: u64, depth: u32) -> u64 {
    if depth == 0 {
        return 0;
    }
    (upper >> (64 - depth)) << (PREFIX_BITS - depth)
}

/// Index of the word of `upper` in a directory of `depth`.
pub const fn index(upper: u64, depth: u32) -> usize {
    if depth == 0 { 0 } else { (upper >> (64 - depth)) as usize }
}

/// The two main buckets of the hash's half `upper`: multiply and shift, so that the number of
/// groups need not be a power of two.
pub const fn mains(upper: u64, groups: u32) -> [u32; 2] {
    let count = 2 * groups;
    let first = ((((upper >> 16) & 0xffff) * count as u64) >> 16) as u32;
    let second = (((upper & 0xffff) * count as u64) >> 16) as u32;
    // Two choices are what the load depends on, so equal mains become neighbours.
    if first == second { [first, (second + 1) % count] } else { [first, second] }
}

/// A keyed hash: XXH3-128 with a secret of one store.
///
/// Because the secret is random, a client cannot choose keys that collide.
#[derive(Clone)]
pub struct Hasher {
    secret: Box<[u8; SECRET_BYTES]>,
}

impl Hasher {
    /// The hash with `secret`.
    pub fn new(secret: &[u8; SECRET_BYTES]) -> Self {
        Self { secret: Box::new(*secret) }
    }

    /// Hashes `key`.
    pub fn hash(&self, key: &[u8]) -> KeyHash {
        // The length of the secret is the only error, and 192 bytes are more than the 136 needed.
        let hash = XxHash3_128::oneshot_with_secret(&*self.secret, key).unwrap_or_default();
        KeyHash::of((hash >> 64) as u64, hash as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_depends_on_secret_and_key() {
        let mut secret = std::array::from_fn(|i| (i * i) as u8);
        let a = Hasher::new(&secret);
        secret[9] ^= 1;
        let b = Hasher::new(&secret);
        assert_ne!(a.hash(b"key"), b.hash(b"key"));
        assert_ne!(a.hash(b"key"), a.hash(b"kez"));
        assert_eq!(a.hash(b"key"), a.hash(b"key"));
        assert_ne!(a.hash(b"").upper, 0);
    }

    #[test]
    fn parts_of_hash_have_their_bits() {
        let hash = KeyHash { upper: 0xabcd_ef12_8000_ffff, tag: 0 };
        assert_eq!(hash.fingerprint(), 0x12);
        assert_eq!(hash.index(8), 0xab);
        assert_eq!(hash.prefix(8), 0xab00_0000_0000);
        assert_eq!(hash.prefix(24), 0xabcd_ef00_0000);
        assert_eq!((hash.index(0), hash.prefix(0)), (0, 0));
        assert_eq!(hash.mains(21), [21, 41]);
        assert_eq!(KeyHash { upper: 0, tag: 0 }.mains(1), [0, 1]);
    }
}
