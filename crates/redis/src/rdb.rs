//! Database files (RDB) and the payloads of DUMP.
//!
//! [`Reader`] reads the versions 1 to 12 of Redis and 80 of Valkey from any `Read`. The reader
//! returns strings with their keys. Values of other types are parsed for their length, skipped
//! exactly, and named by their [`Kind`]. [`Writer`] writes version 10, that of Redis 7.0, to any
//! `Write`.
//!
//! The reader holds one key and one value, of which each is at most [`Limits::value`] long. Memory
//! grows with the bytes that were read, not with the bytes that a length announces.
//!
//! ```
//! use redis_formats::rdb::{Event, Limits, Meta, Options, Reader, Value, Writer};
//!
//! # fn main() -> Result<(), redis_formats::Error> {
//! let mut writer = Writer::new(Vec::new(), Options::default())?;
//! writer.database(0)?;
//! writer.entry(b"key", b"value", Meta::default())?;
//! let file = writer.finish()?;
//!
//! let mut reader = Reader::new(&file[..], Limits::default())?;
//! while let Some(event) = reader.next()? {
//!     if let Event::Entry(entry) = event {
//!         assert_eq!((entry.key, entry.value), (&b"key"[..], Value::String(b"value")));
//!     }
//! }
//! # Ok(())
//! # }
//! ```

mod crc64;
mod dump;
mod kind;
mod lzf;
mod reader;
mod skip;
mod source;
mod strings;
#[cfg(test)]
mod tests;
mod writer;

pub use crc64::Crc64;
pub use dump::{dump, restore};
pub use kind::Kind;
pub use lzf::{Compressor, decompress};
pub use reader::{Entry, Event, Reader, Value};
pub use writer::{Options, Writer};

/// Version that the writer writes.
pub const VERSION: u16 = 10;

/// Limits of the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum bytes of a key and of a value.
    pub value: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { value: 512 << 20 }
    }
}

/// Properties of a key besides its value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// Expiry as Unix time in milliseconds.
    pub expires_ms: Option<i64>,
    /// Seconds since the last access, under an LRU policy.
    pub idle_seconds: Option<u64>,
    /// Access counter, under an LFU policy.
    pub frequency: Option<u8>,
}

/// An error of a database file or a payload.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RdbError {
    /// Reading failed.
    #[error("reading the database at byte {offset}: {cause}; check the disk and the file's rights")]
    Read {
        /// Bytes before the failed read.
        offset: u64,
        /// Cause.
        #[source]
        cause: std::io::Error,
    },
    /// Writing failed.
    #[error("writing the database at byte {offset}: {cause}; check the disk and its free space")]
    Write {
        /// Bytes before the failed write.
        offset: u64,
        /// Cause.
        #[source]
        cause: std::io::Error,
    },
    /// The bytes end within the database.
    #[error(
        "reading the database: the bytes end at {offset} within it; use a file that was written \
         completely"
    )]
    Truncated {
        /// Number of bytes.
        offset: u64,
    },
    /// The first bytes are not those of a database.
    #[error(
        "reading the database: the first bytes are not REDIS and a version; check the file's name"
    )]
    Magic,
    /// The version is unknown.
    #[error(
        "reading the database: version {0} is unknown, known are 1 to 11 and 80; write the file \
         with Redis 7.2 or older, or with Valkey"
    )]
    Version(u32),
    /// The bytes contradict the format.
    #[error("reading the database at byte {offset}: {problem}; the bytes are damaged")]
    Damaged {
        /// Bytes before the problem.
        offset: u64,
        /// Problem.
        problem: &'static str,
    },
    /// A type or an opcode is unknown or not supported.
    #[error(
        "reading the database at byte {offset}: {what} {number} cannot be read; remove such keys \
         before the file is written"
    )]
    Unsupported {
        /// Bytes before the type.
        offset: u64,
        /// The object of the error.
        what: &'static str,
        /// Number of the type or the opcode.
        number: u8,
    },
    /// A key or a value is too long.
    #[error(
        "reading the database at byte {offset}: a string of {len} bytes is longer than the limit \
         of {limit}; raise proto-max-bulk-len"
    )]
    TooLong {
        /// Bytes before the string.
        offset: u64,
        /// Bytes of the string.
        len: u64,
        /// Limit.
        limit: usize,
    },
    /// The checksum differs.
    #[error(
        "reading the database: checksum {found:#018x} instead of {expected:#018x}; the bytes are \
         damaged"
    )]
    Checksum {
        /// Checksum of the bytes.
        found: u64,
        /// Checksum that is stored.
        expected: u64,
    },
    /// The file ended, and the writer or reader was used on.
    #[error("using a database after an error of it; make another reader or writer")]
    Broken,
}

/// Opcodes of a database.
mod opcode {
    pub const SLOT_INFO: u8 = 244;
    pub const FUNCTION2: u8 = 245;
    pub const FUNCTION_BEFORE_RELEASE: u8 = 246;
    pub const MODULE_AUX: u8 = 247;
    pub const IDLE: u8 = 248;
    pub const FREQUENCY: u8 = 249;
    pub const AUX: u8 = 250;
    pub const SIZES: u8 = 251;
    pub const EXPIRES_MS: u8 = 252;
    pub const EXPIRES_SECONDS: u8 = 253;
    pub const DATABASE: u8 = 254;
    pub const END: u8 = 255;
}

/// Encodings of a length, and of a string in place of a length.
mod encoding {
    pub const BITS_32: u8 = 0x80;
    pub const BITS_64: u8 = 0x81;
    pub const INT8: u8 = 0xc0;
    pub const INT16: u8 = 0xc1;
    pub const INT32: u8 = 0xc2;
    pub const LZF: u8 = 0xc3;
}

/// Returns whether the reader knows the version.
fn is_known_version(version: u32) -> bool {
    matches!(version, 1..=12 | 80)
}
