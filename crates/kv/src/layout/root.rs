//! The root: 512 bytes, from which a compute node finds a whole store.
//!
//! ```text
//! +0    magic "GRNYKV01"
//! +8    version u8, mode u8, stripe bits u8, 0, partition u16, groups of a subtable u16
//! +16   slab bytes u32, first and last slot of the partition u16 u16
//! +24   place of the epoch words (mode `shared`), 0 otherwise
//! +32   directory word of database 0 to 15:   63 depth 58 | 57..48 0 | 47 place of the header 0
//! +160  secret of the hash, 192 B
//! +352  generation of the owner       +360  place of the journal
//! +368  CRC-32 of +0..32 and +160..352, in the lower half of the word
//! ```

use super::{DEPTH_SHIFT, Malformed, class, half, put, word};
use crate::hash::{DEPTH_MAX, SECRET_BYTES};
use crate::place::{Address, Place};

/// Bytes of a root.
pub const ROOT_BYTES: usize = 512;
/// Number of databases of a store.
pub const DATABASES: usize = 16;

const MAGIC: u64 = u64::from_be_bytes(*b"GRNYKV01");
const VERSION: u8 = 1;
const DIRECTORIES: usize = 32;
const SECRET: usize = 160;
const GENERATION: usize = 352;
const JOURNAL: usize = 360;
const CRC: usize = 368;

const _: () = assert!(DIRECTORIES + 8 * DATABASES == SECRET);
const _: () = assert!(SECRET + SECRET_BYTES == GENERATION);
const _: () = assert!(CRC + 8 <= ROOT_BYTES);

/// Which compute nodes change an index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// One compute node owns the index.
    #[default]
    Alone,
    /// Several compute nodes change one index, as published for RACE hashing.
    Shared,
}

/// What never changes in a root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fixed {
    /// Which compute nodes change the index.
    pub mode: Mode,
    /// The stripes (QP groups) number 2 to the power of this value, at most 64.
    pub stripe_bits: u8,
    /// Number of the partition.
    pub partition: u16,
    /// Groups of buckets in a subtable.
    pub groups: u16,
    /// Bytes of a slab, whose parts are the classes of blocks.
    pub slab: u32,
    /// First and last hash slot (of Redis Cluster) of the partition.
    pub slots: (u16, u16),
    /// Place of the epoch words of clients in mode `shared`; none otherwise.
    pub epochs: Place,
    /// The secret of the hash.
    pub secret: [u8; SECRET_BYTES],
}

/// A root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    /// What never changes.
    pub fixed: Fixed,
    /// The directory of each database.
    pub directories: [DirectoryRoot; DATABASES],
    /// Number of owners so far. An owner that reads another number is deposed.
    pub generation: u64,
    /// Place of the journal.
    pub journal: Place,
}

/// The word of a root that names the directory of one database.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectoryRoot {
    /// The directory has 2 to the power of `depth` words.
    pub depth: u32,
    /// Place of the directory's header. None: the database is empty.
    pub header: Place,
}

impl DirectoryRoot {
    /// The word in remote memory.
    pub const fn word(self) -> u64 {
        (self.depth as u64) << DEPTH_SHIFT | self.header.bits()
    }

    /// Parses a word of remote memory.
    pub const fn parse(word: u64) -> Result<Self, Malformed> {
        let found = Self { depth: (word >> DEPTH_SHIFT) as u32, header: Place::of(word) };
        if found.depth > DEPTH_MAX || found.header.is_none() && found.depth != 0 {
            return Err(Malformed("the root names a directory deeper than 24 or without a place"));
        }
        Ok(found)
    }
}

/// Address of the directory word of database `db`.
pub const fn directory_word(root: Place, db: usize) -> Address {
    root.at((DIRECTORIES + 8 * db) as u64)
}

/// Address of the generation.
pub const fn generation_word(root: Place) -> Address {
    root.at(GENERATION as u64)
}

impl Root {
    /// The root's bytes.
    pub fn encode(&self) -> [u8; ROOT_BYTES] {
        let mut bytes = [0; ROOT_BYTES];
        let fixed = &self.fixed;
        put(&mut bytes, 0, MAGIC);
        bytes[8] = VERSION;
        bytes[9] = matches!(fixed.mode, Mode::Shared) as u8;
        bytes[10] = fixed.stripe_bits;
        bytes[12..14].copy_from_slice(&fixed.partition.to_be_bytes());
        bytes[14..16].copy_from_slice(&fixed.groups.to_be_bytes());
        bytes[16..20].copy_from_slice(&fixed.slab.to_be_bytes());
        bytes[20..22].copy_from_slice(&fixed.slots.0.to_be_bytes());
        bytes[22..24].copy_from_slice(&fixed.slots.1.to_be_bytes());
        put(&mut bytes, 24, fixed.epochs.bits());
        for (db, directory) in self.directories.iter().enumerate() {
            put(&mut bytes, DIRECTORIES + 8 * db, directory.word());
        }
        bytes[SECRET..GENERATION].copy_from_slice(&fixed.secret);
        put(&mut bytes, GENERATION, self.generation);
        put(&mut bytes, JOURNAL, self.journal.bits());
        let crc = crc(&bytes);
        put(&mut bytes, CRC, crc.into());
        bytes
    }

    /// Parses the bytes of a root.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        if bytes.len() < ROOT_BYTES || word(bytes, 0) != MAGIC {
            return Err(Malformed("no root of a store lies here: the magic number differs"));
        }
        if word(bytes, CRC) != u64::from(crc(bytes)) {
            return Err(Malformed("the root's checksum differs"));
        }
        let fixed = fixed(bytes)?;
        let mut directories = [DirectoryRoot::default(); DATABASES];
        for (db, directory) in directories.iter_mut().enumerate() {
            *directory = DirectoryRoot::parse(word(bytes, DIRECTORIES + 8 * db))?;
        }
        let journal = Place::of(word(bytes, JOURNAL));
        Ok(Self { fixed, directories, generation: word(bytes, GENERATION), journal })
    }
}

/// Renews the checksum of a root whose bytes were changed.
pub fn reseal(bytes: &mut [u8; ROOT_BYTES]) {
    let crc = crc(bytes);
    put(bytes, CRC, crc.into());
}

fn fixed(bytes: &[u8]) -> Result<Fixed, Malformed> {
    let pair = |at: usize| half(bytes, at & !3).to_be_bytes();
    let short = |at: usize| u16::from_be_bytes([pair(at)[at & 2], pair(at)[(at & 2) + 1]]);
    let mode = match bytes[9] {
        0 => Mode::Alone,
        1 => Mode::Shared,
        _ => return Err(Malformed("the root names an unknown mode")),
    };
    let mut secret = [0; SECRET_BYTES];
    secret.copy_from_slice(&bytes[SECRET..GENERATION]);
    let fixed = Fixed {
        mode,
        stripe_bits: bytes[10],
        partition: short(12),
        groups: short(14),
        slab: half(bytes, 16),
        slots: (short(20), short(22)),
        epochs: Place::of(word(bytes, 24)),
        secret,
    };
    if bytes[8] != VERSION {
        return Err(Malformed("the root is of another version of the store"));
    }
    let slab = fixed.slab;
    if fixed.stripe_bits > 6
        || slab < ROOT_BYTES as u32
        || slab > class::SLAB_MAX
        || !slab.is_multiple_of(32)
    {
        return Err(Malformed("the root names impossible sizes"));
    }
    Ok(fixed)
}

fn crc(bytes: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&bytes[..DIRECTORIES]);
    crc.update(&bytes[SECRET..GENERATION]);
    crc.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> Root {
        let fixed = Fixed {
            mode: Mode::Shared,
            stripe_bits: 2,
            partition: 0x1234,
            groups: 21,
            slab: 4096,
            slots: (7, 16383),
            epochs: Place::of(9),
            secret: [5; SECRET_BYTES],
        };
        let mut directories = [DirectoryRoot::default(); DATABASES];
        directories[15] = DirectoryRoot { depth: 24, header: Place::of(77) };
        Root { fixed, directories, generation: 3, journal: Place::of(11) }
    }

    #[test]
    fn root_parses_to_what_was_encoded() {
        assert_eq!(Root::parse(&root().encode()), Ok(root()));
    }

    #[test]
    fn root_with_one_changed_bit_is_refused() {
        for byte in (0..DIRECTORIES).chain(SECRET..GENERATION) {
            let mut bytes = root().encode();
            bytes[byte] ^= 1;
            assert!(Root::parse(&bytes).is_err(), "byte {byte}");
        }
        assert!(Root::parse(&root().encode()[..100]).is_err());
    }
}
