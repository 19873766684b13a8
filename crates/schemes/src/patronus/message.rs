//! Requests and replies on the management QP.
//!
//! ```text
//! request (64 B, big-endian)                 reply (80 B, big-endian)
//! +0  op                          (8)        +0  outcome                     (8)
//! +1  right: 0 read, 1 write      (8)        +1  keys                        (8)
//! +2  sharing: 0 shared, 1 excl.  (8)        +2  limit, for too many         (8)
//! +3  others                      (8)        +3  1: a header follows         (8)
//! +4  QP group                    (16)       +4  slot of the lifetime word   (32)
//! +6  zero                        (16)
//! +8  number of the request       (64)       +8  number of the request       (64)
//! +16 entry of the object         (32)       +16 entry of the object         (32)
//! +20 generation of the object    (32)       +20 generation of the object    (32)
//! +24 permission                  (64)       +24 permission                  (64)
//! +32 offset in the object        (64)       +32 address, or the limit       (64)
//! +40 length                      (64)       +40 time waited, us             (64)
//! +48 lease, us                   (64)       +48 lifetime word               (64)
//! +56 longest wait, us            (64)       +56 keys, by lane            (6*32)
//! ```
//!
//! In the published form (`header`), the lifetime word of a permission is in its header, and a
//! reply that grants one ends otherwise. A type-1 window has one key for all lanes:
//!
//! ```text
//! +56 key of the range (32)   +60 key of the header (32)   +64 address of the lifetime (64)
//! ```
//!
//! Replies come in any order, because a request may have to wait for a permission to end. The
//! number of a request is the compute node's own; it tells the reply to which request it belongs.

use scheme::index::EntryId;
use scheme::{GroupId, MAX_GROUP, Others, Right, Sharing};
use verbs::{Key, Remote};

/// Length of a request.
pub const REQUEST_BYTES: usize = 64;
/// Length of a reply.
pub const REPLY_BYTES: usize = 80;

/// Number of a permission: `serial (40) | slot (24)`. No two permissions of a compute node have the
/// same number, so that a request that arrives late cannot end another permission (Patronus §5.6
/// uses the start time, which repeats at more than a million permissions a second).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PermissionNumber(pub u64);

impl PermissionNumber {
    /// Slots of a compute node for permissions with leases, at most. Permissions without leases
    /// have the slots from here on, which have no lifetime words.
    pub const LEASED_MAX: u32 = 1 << 16;
    /// Slots of a compute node, at most.
    pub const SLOTS_MAX: u32 = 1 << 24;

    /// The number of the `serial`-th permission of a slot.
    pub fn new(serial: u64, slot: u32) -> Self {
        debug_assert!(slot < Self::SLOTS_MAX && serial < 1 << 40);
        Self(serial << 24 | u64::from(slot))
    }

    /// The slot.
    pub fn slot(self) -> u32 {
        self.0 as u32 & (Self::SLOTS_MAX - 1)
    }

    /// Number of this permission among those of its slot, from 1.
    pub fn serial(self) -> u64 {
        self.0 >> 24
    }

    /// The nonce of the lifetime word.
    pub fn nonce(self) -> u16 {
        self.serial() as u16
    }
}

/// A lifetime word: `nonce (16) | lifetime in microseconds (48)`.
///
/// The compute node extends its permission by a CAS of the word. The word is a wish: the memory
/// node ends the lease at the start plus the lifetime or the longest lease, whichever comes first.
/// A lifetime of zero is the notice that the lease cannot be extended any more (Patronus §5.3). The
/// nonce changes with each use of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lifetime(pub u64);

impl Lifetime {
    const MICROS: u64 = (1 << 48) - 1;

    /// A lifetime of `micros`, at most 2^48 - 1.
    pub fn new(nonce: u16, micros: u64) -> Self {
        Self(u64::from(nonce) << 48 | micros.min(Self::MICROS))
    }

    /// The nonce.
    pub fn nonce(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// The lifetime in microseconds.
    pub fn micros(self) -> u64 {
        self.0 & Self::MICROS
    }
}

/// An object, as requests name it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ObjectId {
    /// The entry in the table of objects.
    pub entry: u32,
    /// Number of earlier objects with this entry.
    pub generation: u32,
}

/// Terms of a permission, as a request has them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AskTerms {
    /// The group whose QPs use the keys.
    pub group: GroupId,
    /// The operations.
    pub right: Right,
    /// Permissions beside this one.
    pub sharing: Sharing,
    /// Length of the lease in microseconds; [`AskTerms::FOREVER`]: none.
    pub lease_us: u64,
    /// Longest wait in microseconds.
    pub wait_us: u64,
}

impl AskTerms {
    /// A permission without a lease, which lives as long as its owner. Only an allocation may ask
    /// for it.
    pub const FOREVER: u64 = u64::MAX;
}

/// Operation of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ask {
    /// Allocate an object, and acquire a permission for all of it.
    Allocate {
        /// Terms of the permission.
        terms: AskTerms,
        /// Length of the object.
        bytes: u64,
        /// The right of the other members of the domain.
        others: Others,
    },
    /// Acquire a permission for a range of an object.
    Acquire {
        /// Terms of the permission.
        terms: AskTerms,
        /// The object.
        object: ObjectId,
        /// First byte of the range.
        offset: u64,
        /// Length of the range.
        len: u64,
    },
    /// Begin a new lease under new keys.
    Renew {
        /// The permission.
        permission: PermissionNumber,
        /// Length of the lease in microseconds.
        lease_us: u64,
    },
    /// End a permission.
    Revoke {
        /// The permission.
        permission: PermissionNumber,
    },
    /// Free an object.
    Free {
        /// The object.
        object: ObjectId,
    },
    /// Free the object of a grant, which the compute node holds without a lease.
    FreeGrant {
        /// The entry of the object.
        entry: u32,
        /// Its address, which tells the object from later ones with the same entry.
        address: u64,
    },
    /// Extend a lease by RPC, for comparison with the CAS (Patronus §5.3, the naive approach).
    Extend {
        /// The permission.
        permission: PermissionNumber,
        /// The lifetime from the start of the lease, in microseconds.
        lifetime_us: u64,
    },
}

/// A request with its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The compute node's number of the request.
    pub number: u64,
    /// The operation.
    pub ask: Ask,
}

const OP_ALLOCATE: u8 = 1;
const OP_ACQUIRE: u8 = 2;
const OP_RENEW: u8 = 3;
const OP_REVOKE: u8 = 4;
const OP_FREE: u8 = 5;
const OP_FREE_GRANT: u8 = 6;
const OP_EXTEND: u8 = 7;

impl Request {
    /// The request as bytes.
    pub fn to_bytes(self) -> [u8; REQUEST_BYTES] {
        let mut out = [0; REQUEST_BYTES];
        put64(&mut out, 8, self.number);
        let op = match self.ask {
            Ask::Allocate { terms, bytes, others } => {
                put_terms(&mut out, terms);
                out[3] = others as u8;
                put64(&mut out, 40, bytes);
                OP_ALLOCATE
            }
            Ask::Acquire { terms, object, offset, len } => {
                put_terms(&mut out, terms);
                put_object(&mut out, object);
                put64(&mut out, 32, offset);
                put64(&mut out, 40, len);
                OP_ACQUIRE
            }
            Ask::Renew { permission, lease_us } => {
                put64(&mut out, 24, permission.0);
                put64(&mut out, 48, lease_us);
                OP_RENEW
            }
            Ask::Revoke { permission } => {
                put64(&mut out, 24, permission.0);
                OP_REVOKE
            }
            Ask::Free { object } => {
                put_object(&mut out, object);
                OP_FREE
            }
            Ask::FreeGrant { entry, address } => {
                put_object(&mut out, ObjectId { entry, generation: 0 });
                put64(&mut out, 32, address);
                OP_FREE_GRANT
            }
            Ask::Extend { permission, lifetime_us } => {
                put64(&mut out, 24, permission.0);
                put64(&mut out, 48, lifetime_us);
                OP_EXTEND
            }
        };
        out[0] = op;
        out
    }

    /// Decodes a request: its number, and its operation if that is valid.
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> (u64, Option<Ask>) {
        (be64(bytes, 8), parse_ask(bytes))
    }
}

fn parse_ask(bytes: &[u8; REQUEST_BYTES]) -> Option<Ask> {
    let permission = PermissionNumber(be64(bytes, 24));
    let object = ObjectId { entry: be32(bytes, 16), generation: be32(bytes, 20) };
    Some(match bytes[0] {
        OP_ALLOCATE => Ask::Allocate {
            terms: parse_terms(bytes)?,
            bytes: be64(bytes, 40),
            others: match bytes[3] {
                0 => Others::None,
                1 => Others::Read,
                2 => Others::Write,
                3 => Others::Own,
                _ => return None,
            },
        },
        OP_ACQUIRE => Ask::Acquire {
            terms: parse_terms(bytes)?,
            object,
            offset: be64(bytes, 32),
            len: be64(bytes, 40),
        },
        OP_RENEW => Ask::Renew { permission, lease_us: be64(bytes, 48) },
        OP_REVOKE => Ask::Revoke { permission },
        OP_FREE => Ask::Free { object },
        OP_FREE_GRANT => Ask::FreeGrant { entry: object.entry, address: be64(bytes, 32) },
        OP_EXTEND => Ask::Extend { permission, lifetime_us: be64(bytes, 48) },
        _ => return None,
    })
}

fn put_terms(out: &mut [u8; REQUEST_BYTES], terms: AskTerms) {
    out[1] = terms.right as u8;
    out[2] = terms.sharing as u8;
    out[4..6].copy_from_slice(&terms.group.0.to_be_bytes());
    put64(out, 48, terms.lease_us);
    put64(out, 56, terms.wait_us);
}

fn parse_terms(bytes: &[u8; REQUEST_BYTES]) -> Option<AskTerms> {
    Some(AskTerms {
        group: GroupId(u16::from_be_bytes([bytes[4], bytes[5]])),
        right: match bytes[1] {
            0 => Right::Read,
            1 => Right::Write,
            _ => return None,
        },
        sharing: match bytes[2] {
            0 => Sharing::Shared,
            1 => Sharing::Exclusive,
            _ => return None,
        },
        lease_us: be64(bytes, 48),
        wait_us: be64(bytes, 56),
    })
}

fn put_object(out: &mut [u8; REQUEST_BYTES], object: ObjectId) {
    out[16..20].copy_from_slice(&object.entry.to_be_bytes());
    out[20..24].copy_from_slice(&object.generation.to_be_bytes());
}

/// Things whose number is limited.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Limit {
    /// Permissions of a compute node.
    Permissions = 1,
    /// Objects of a compute node or of a domain.
    Objects = 2,
    /// Bytes of a compute node or of a domain.
    Bytes = 3,
    /// Requests of a compute node that wait for permissions to end.
    Waiting = 4,
}

impl Limit {
    /// The limited things, for messages.
    pub fn name(self) -> &'static str {
        match self {
            Limit::Permissions => "permissions",
            Limit::Objects => "objects",
            Limit::Bytes => "bytes",
            Limit::Waiting => "waiting requests",
        }
    }
}

/// Result of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// A permission was granted, or its lease renewed.
    Granted(Granted),
    /// A lease was extended by RPC: its lifetime word.
    Extended(Lifetime),
    /// The request was executed, or had no effect because its effect was there already.
    Done,
    /// No memory is free.
    Empty,
    /// Memory is free, but no block of the requested size.
    NoBlock,
    /// The object does not exist, or the compute node may not do this with it.
    NoSuchObject,
    /// The permission or grant belongs to another compute node.
    NotYours,
    /// The lease has ended.
    Expired,
    /// Another compute node waits for the object, or the object is being freed.
    NotExtendable,
    /// Conflicting permissions did not end in time.
    Busy,
    /// A limit is reached.
    TooMany(Limit, u64),
    /// The request cannot be decoded, or its values are not possible.
    BadRequest,
    /// The memory node's NIC could not open the range.
    Failed,
}

/// A permission, as a reply grants it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Granted {
    /// The object.
    pub object: ObjectId,
    /// The permission.
    pub permission: PermissionNumber,
    /// Address of the range.
    pub address: u64,
    /// Time from the arrival of the request until the start of the lease, rounded down.
    pub waited_us: u64,
    /// The lifetime word; of a permission without a lease, its lifetime is 2^48 - 1.
    pub word: Lifetime,
    /// Number of keys.
    pub lanes: usize,
    /// The keys, by lane.
    pub keys: [Key; MAX_GROUP],
    /// Address and key of the lifetime word, in the published form. All lanes have one key then.
    pub header: Option<Remote>,
}

/// A reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reply {
    /// Number of the request.
    pub number: u64,
    /// The result.
    pub outcome: Outcome,
    /// Entry of the object that the request named; 0 if it named none.
    pub entry: EntryId,
}

const GRANTED: u8 = 1;
const EXTENDED: u8 = 13;

impl Outcome {
    fn code(self) -> u8 {
        match self {
            Outcome::Granted(_) => GRANTED,
            Outcome::Done => 2,
            Outcome::Empty => 3,
            Outcome::NoBlock => 4,
            Outcome::NoSuchObject => 5,
            Outcome::NotYours => 6,
            Outcome::Expired => 7,
            Outcome::NotExtendable => 8,
            Outcome::Busy => 9,
            Outcome::TooMany(..) => 10,
            Outcome::BadRequest => 11,
            Outcome::Failed => 12,
            Outcome::Extended(_) => EXTENDED,
        }
    }
}

impl Reply {
    /// The reply as bytes.
    pub fn to_bytes(self) -> [u8; REPLY_BYTES] {
        let mut out = [0; REPLY_BYTES];
        out[0] = self.outcome.code();
        put64(&mut out, 8, self.number);
        out[16..20].copy_from_slice(&u32::from(self.entry).to_be_bytes());
        match self.outcome {
            Outcome::Granted(granted) => {
                out[1] = granted.lanes as u8;
                out[4..8].copy_from_slice(&granted.permission.slot().to_be_bytes());
                out[16..20].copy_from_slice(&granted.object.entry.to_be_bytes());
                out[20..24].copy_from_slice(&granted.object.generation.to_be_bytes());
                put64(&mut out, 24, granted.permission.0);
                put64(&mut out, 32, granted.address);
                put64(&mut out, 40, granted.waited_us);
                put64(&mut out, 48, granted.word.0);
                let mut put_key = |at: usize, key: Key| {
                    out[at..at + 4].copy_from_slice(&key.0.to_be_bytes());
                };
                if let Some(header) = granted.header {
                    put_key(56, granted.keys[0]);
                    put_key(60, header.rkey);
                    out[3] = 1;
                    put64(&mut out, 64, header.addr);
                } else {
                    let keys = granted.keys[..granted.lanes].iter().enumerate();
                    keys.for_each(|(i, key)| put_key(56 + 4 * i, *key));
                }
            }
            Outcome::Extended(word) => put64(&mut out, 48, word.0),
            Outcome::TooMany(limit, most) => {
                out[2] = limit as u8;
                put64(&mut out, 32, most);
            }
            _ => {}
        }
        out
    }

    /// Number of the request that a reply answers.
    pub fn number(bytes: &[u8; REPLY_BYTES]) -> u64 {
        be64(bytes, 8)
    }

    /// Decodes a reply; `None` if it is invalid.
    pub fn parse(bytes: &[u8; REPLY_BYTES]) -> Option<Self> {
        let entry = be32(bytes, 16);
        let outcome = match bytes[0] {
            GRANTED => {
                let lanes = bytes[1] as usize;
                if lanes > MAX_GROUP {
                    return None;
                }
                let header = match bytes[3] {
                    0 => None,
                    1 => Some(Remote { addr: be64(bytes, 64), rkey: Key(be32(bytes, 60)) }),
                    _ => return None,
                };
                let mut keys = [Key::default(); MAX_GROUP];
                for (i, key) in keys[..lanes].iter_mut().enumerate() {
                    let at = if header.is_some() { 0 } else { i };
                    *key = Key(be32(bytes, 56 + 4 * at));
                }
                let permission = PermissionNumber(be64(bytes, 24));
                if permission.slot() != be32(bytes, 4) {
                    return None;
                }
                Outcome::Granted(Granted {
                    object: ObjectId { entry, generation: be32(bytes, 20) },
                    permission,
                    address: be64(bytes, 32),
                    waited_us: be64(bytes, 40),
                    word: Lifetime(be64(bytes, 48)),
                    lanes,
                    keys,
                    header,
                })
            }
            2 => Outcome::Done,
            3 => Outcome::Empty,
            4 => Outcome::NoBlock,
            5 => Outcome::NoSuchObject,
            6 => Outcome::NotYours,
            7 => Outcome::Expired,
            8 => Outcome::NotExtendable,
            9 => Outcome::Busy,
            10 => {
                let limit = match bytes[2] {
                    1 => Limit::Permissions,
                    2 => Limit::Objects,
                    3 => Limit::Bytes,
                    4 => Limit::Waiting,
                    _ => return None,
                };
                Outcome::TooMany(limit, be64(bytes, 32))
            }
            11 => Outcome::BadRequest,
            12 => Outcome::Failed,
            EXTENDED => Outcome::Extended(Lifetime(be64(bytes, 48))),
            _ => return None,
        };
        Some(Self { number: be64(bytes, 8), outcome, entry: entry.into() })
    }
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
#[path = "message_tests.rs"]
mod tests;
