//! Requests and replies on the management QP: a header of 64 bytes, then data.
//!
//! ```text
//! request (big-endian)                       reply (big-endian)
//! +0  op                             (8)     +0  outcome                       (8)
//! +1  others                         (8)     +1  limit, for too many           (8)
//! +2  zero                           (16)    +2  zero                          (16)
//! +4  entry of the object            (32)    +4  entry of the object           (32)
//! +8  number of the request          (64)    +8  number of the request         (64)
//! +16 generation of the object       (32)    +16 generation of the object      (32)
//! +20 length of the access           (32)    +20 zero                          (32)
//! +24 offset in the object, or       (64)    +24 previous word, or the limit   (64)
//!     length of a new object
//! +32 expected word, or addend       (64)    +32 zero                       (4*64)
//! +40 new word                       (64)
//! +48 zero                         (2*64)
//! +64 data of a WRITE                        +64 data of a READ
//! ```
//!
//! Replies are sent in the order of a compute node's requests.

use scheme::{Atomic, Others};

use crate::patronus::message::Limit;

/// Length of a header.
pub const HEADER_BYTES: usize = 64;

/// The name of an object.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ObjectId {
    /// The entry in the table of objects.
    pub entry: u32,
    /// Number of earlier objects with this entry.
    pub generation: u32,
}

impl ObjectId {
    /// Bits of an offset in an object, in the address of a grant.
    const OFFSET_BITS: u32 = 40;
    /// Entries of the table, at most.
    pub const ENTRIES_MAX: u32 = 1 << (u64::BITS - Self::OFFSET_BITS);

    /// Address of the object's first byte, as grants have it: `entry (24) | offset (40)`. It names
    /// no memory, so that a compute node knows it without a request.
    pub fn address(self) -> u64 {
        u64::from(self.entry) << Self::OFFSET_BITS
    }

    /// The name as one number.
    pub fn to_raw(self) -> u64 {
        u64::from(self.entry) << 32 | u64::from(self.generation)
    }

    /// The inverse of [`ObjectId::to_raw`].
    pub fn from_raw(raw: u64) -> Self {
        Self { entry: (raw >> 32) as u32, generation: raw as u32 }
    }
}

/// Bytes of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    /// The object.
    pub object: ObjectId,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u32,
}

/// Operation of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ask {
    /// Allocate an object.
    Allocate {
        /// Its length.
        bytes: u64,
        /// The right of the other members of the domain.
        others: Others,
    },
    /// Free an object.
    Free {
        /// The object.
        object: ObjectId,
    },
    /// Read bytes. They follow the header of the reply.
    Read(Range),
    /// Write the bytes that follow the header.
    Write(Range),
    /// Execute an atomic operation on a word.
    Atomic {
        /// The object.
        object: ObjectId,
        /// Offset of the word.
        offset: u64,
        /// The operation.
        atomic: Atomic,
    },
}

const OP_ALLOCATE: u8 = 1;
const OP_FREE: u8 = 2;
const OP_READ: u8 = 3;
const OP_WRITE: u8 = 4;
const OP_COMPARE_AND_SWAP: u8 = 5;
const OP_FETCH_AND_ADD: u8 = 6;

impl Ask {
    /// The header of a request with this number.
    pub fn to_bytes(self, number: u64) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        put64(&mut out, 8, number);
        let (op, object, len, offset) = match self {
            Ask::Allocate { bytes, others } => {
                out[1] = others as u8;
                (OP_ALLOCATE, None, 0, bytes)
            }
            Ask::Free { object } => (OP_FREE, Some(object), 0, 0),
            Ask::Read(Range { object, offset, len }) => (OP_READ, Some(object), len, offset),
            Ask::Write(Range { object, offset, len }) => (OP_WRITE, Some(object), len, offset),
            Ask::Atomic { object, offset, atomic } => {
                let op = match atomic {
                    Atomic::CompareAndSwap { expected, new } => {
                        put64(&mut out, 32, expected);
                        put64(&mut out, 40, new);
                        OP_COMPARE_AND_SWAP
                    }
                    Atomic::FetchAndAdd { add } => {
                        put64(&mut out, 32, add);
                        OP_FETCH_AND_ADD
                    }
                };
                (op, Some(object), 8, offset)
            }
        };
        out[0] = op;
        if let Some(ObjectId { entry, generation }) = object {
            put32(&mut out, 4, entry);
            put32(&mut out, 16, generation);
        }
        put32(&mut out, 20, len);
        put64(&mut out, 24, offset);
        out
    }

    /// Decodes the header of a request that has `bytes` bytes: its number, and its operation if
    /// that is valid and as long as it says.
    pub fn parse(header: &[u8; HEADER_BYTES], bytes: usize) -> (u64, Option<Self>) {
        let data = match header[0] {
            OP_WRITE => be32(header, 20) as usize,
            _ => 0,
        };
        let is_whole = HEADER_BYTES.checked_add(data) == Some(bytes);
        (be64(header, 8), parse_ask(header).filter(|_| is_whole))
    }
}

fn parse_ask(header: &[u8; HEADER_BYTES]) -> Option<Ask> {
    let object = ObjectId { entry: be32(header, 4), generation: be32(header, 16) };
    let (len, offset) = (be32(header, 20), be64(header, 24));
    let (first, second) = (be64(header, 32), be64(header, 40));
    let atomic = |atomic| Ask::Atomic { object, offset, atomic };
    Some(match header[0] {
        OP_ALLOCATE => {
            let others = match header[1] {
                0 => Others::None,
                1 => Others::Read,
                2 => Others::Write,
                3 => Others::Own,
                _ => return None,
            };
            Ask::Allocate { bytes: offset, others }
        }
        OP_FREE => Ask::Free { object },
        OP_READ => Ask::Read(Range { object, offset, len }),
        OP_WRITE => Ask::Write(Range { object, offset, len }),
        OP_COMPARE_AND_SWAP => atomic(Atomic::CompareAndSwap { expected: first, new: second }),
        OP_FETCH_AND_ADD => atomic(Atomic::FetchAndAdd { add: first }),
        _ => return None,
    })
}

/// Result of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The request was executed.
    Done,
    /// An object was allocated.
    Allocated(ObjectId),
    /// An atomic operation was executed. The previous word.
    Previous(u64),
    /// No memory is free.
    Empty,
    /// Memory is free, but no block of the requested size.
    NoBlock,
    /// The object does not exist, the compute node may not do this with it, or the range ends
    /// beyond it.
    NoSuchObject,
    /// A limit is reached.
    TooMany(Limit, u64),
    /// The request cannot be decoded, or its values are not possible.
    BadRequest,
}

const DONE: u8 = 1;
const ALLOCATED: u8 = 2;
const PREVIOUS: u8 = 3;
const EMPTY: u8 = 4;
const NO_BLOCK: u8 = 5;
const NO_SUCH_OBJECT: u8 = 6;
const TOO_MANY: u8 = 7;
const BAD_REQUEST: u8 = 8;

impl Outcome {
    /// The header of a reply to the request with this number.
    pub fn to_bytes(self, number: u64) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        put64(&mut out, 8, number);
        out[0] = match self {
            Outcome::Done => DONE,
            Outcome::Allocated(ObjectId { entry, generation }) => {
                put32(&mut out, 4, entry);
                put32(&mut out, 16, generation);
                ALLOCATED
            }
            Outcome::Previous(word) => {
                put64(&mut out, 24, word);
                PREVIOUS
            }
            Outcome::Empty => EMPTY,
            Outcome::NoBlock => NO_BLOCK,
            Outcome::NoSuchObject => NO_SUCH_OBJECT,
            Outcome::TooMany(limit, most) => {
                out[1] = limit as u8;
                put64(&mut out, 24, most);
                TOO_MANY
            }
            Outcome::BadRequest => BAD_REQUEST,
        };
        out
    }

    /// Decodes the header of a reply: the number of the request, and the outcome if valid.
    pub fn parse(header: &[u8; HEADER_BYTES]) -> (u64, Option<Self>) {
        (be64(header, 8), parse_outcome(header))
    }
}

fn parse_outcome(header: &[u8; HEADER_BYTES]) -> Option<Outcome> {
    Some(match header[0] {
        DONE => Outcome::Done,
        ALLOCATED => {
            let (entry, generation) = (be32(header, 4), be32(header, 16));
            Outcome::Allocated(ObjectId { entry, generation })
        }
        PREVIOUS => Outcome::Previous(be64(header, 24)),
        EMPTY => Outcome::Empty,
        NO_BLOCK => Outcome::NoBlock,
        NO_SUCH_OBJECT => Outcome::NoSuchObject,
        TOO_MANY => {
            let limits = [Limit::Objects, Limit::Bytes];
            let limit = limits.into_iter().find(|limit| *limit as u8 == header[1])?;
            Outcome::TooMany(limit, be64(header, 24))
        }
        BAD_REQUEST => Outcome::BadRequest,
        _ => return None,
    })
}

fn put32(out: &mut [u8], at: usize, value: u32) {
    out[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

fn put64(out: &mut [u8], at: usize, value: u64) {
    out[at..at + 8].copy_from_slice(&value.to_be_bytes());
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn requests_are_read_back() {
        let object = ObjectId { entry: 7, generation: u32::MAX };
        let range = Range { object, offset: 1 << 39, len: 100 };
        let swap = Atomic::CompareAndSwap { expected: 1 << 60, new: 3 };
        let asks = [
            (Ask::Allocate { bytes: 1 << 50, others: Others::Own }, 0),
            (Ask::Free { object }, 0),
            (Ask::Read(range), 0),
            (Ask::Write(range), 100),
            (Ask::Atomic { object, offset: 8, atomic: swap }, 0),
            (Ask::Atomic { object, offset: 8, atomic: Atomic::FetchAndAdd { add: 9 } }, 0),
        ];
        for (ask, data) in asks {
            let header = ask.to_bytes(1 << 50);
            assert_eq!(Ask::parse(&header, HEADER_BYTES + data), (1 << 50, Some(ask)));
            for wrong in [0, HEADER_BYTES + data - 1, HEADER_BYTES + data + 1] {
                assert_eq!(Ask::parse(&header, wrong), (1 << 50, None), "{ask:?}");
            }
        }
        assert_eq!(Ask::parse(&[0; HEADER_BYTES], HEADER_BYTES), (0, None));
    }

    #[test]
    fn replies_are_read_back() {
        let outcomes = [
            Outcome::Done,
            Outcome::Allocated(ObjectId { entry: 7, generation: 8 }),
            Outcome::Previous(u64::MAX),
            Outcome::Empty,
            Outcome::NoBlock,
            Outcome::NoSuchObject,
            Outcome::TooMany(Limit::Bytes, 1 << 40),
            Outcome::BadRequest,
        ];
        for outcome in outcomes {
            assert_eq!(Outcome::parse(&outcome.to_bytes(9)), (9, Some(outcome)));
        }
        assert_eq!(Outcome::parse(&[0; HEADER_BYTES]), (0, None));
    }

    proptest! {
        /// Any bytes are decoded without a panic, and a decoded header means the same again.
        #[test]
        fn any_bytes_are_decoded(low: [u8; 32], high: [u8; 32], is_whole: bool) {
            let mut header = [0; HEADER_BYTES];
            header[..32].copy_from_slice(&low);
            header[32..].copy_from_slice(&high);
            header[0] %= 10;
            let data = if header[0] == OP_WRITE { be32(&header, 20) as usize } else { 0 };
            let bytes = if is_whole { HEADER_BYTES + data } else { usize::from(low[31]) };
            if let (number, Some(ask)) = Ask::parse(&header, bytes) {
                prop_assert_eq!(Ask::parse(&ask.to_bytes(number), bytes), (number, Some(ask)));
            }
            if let (number, Some(outcome)) = Outcome::parse(&header) {
                let again = outcome.to_bytes(number);
                prop_assert_eq!(Outcome::parse(&again), (number, Some(outcome)));
            }
        }
    }
}
