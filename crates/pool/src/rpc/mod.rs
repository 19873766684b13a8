//! Allocation by RPC to the memory node's CPU: the baselines in which the CPU opens a chunk to a
//! compute node, and closes it.
//!
//! A compute node SENDs a request on its management QP; the memory node's CPU takes a chunk from a
//! free list, opens it, and SENDs the grant back. A free closes the chunk, clears it and gives it back.
//! What opens a chunk makes the scheme:
//!
//! | scheme | what opens a chunk | who is kept out by what | source |
//! | --- | --- | --- | --- |
//! | `rpc-mw-2` | a type-2 window for each access QP of the group | the window names the QP | OneSidedMW §2.2.2, Patronus |
//! | `rpc-mw-1` | one type-1 window; a free and the next allocation are one rebind | **unsafe**: 8 bits of tag | OneSidedMW §2.2.2, §2.3 |
//! | `fine-mr` | an MR, registered by each allocation and ended by each free | a PD for each compute node | OneSidedMW §6 |
//! | `static-mr` | an MR that was registered ahead | a PD for each compute node | OneSidedMW §2.2.1 |
//! | `ondemand-rpc` | as `fine-mr`, of several sizes | a PD for each compute node | FineMem §6.1 |
//! | `premmap-rpc` | a type-1 window that was bound ahead; a free rebinds it | **trust**: 8 bits of tag | FineMem §6.1 |
//!
//! The CPU knows who asks by the QP that the request came in on, so the proof of ownership that a
//! chain takes from the guard window is a comparison here: a group has one window less.
//!
//! **`rpc-mw-1`** binds one window for a chunk, since any QP of the PD may use it; that is its
//! weakness too: a compute node that guesses the 8 bits of a tag is in, and nothing can be done about
//! it at the memory node. A free is answered without the NIC: the chunk is set aside, its window still
//! bound. The next allocation of the same compute node takes a chunk that is free and clear, and one
//! rebind takes the window from the old chunk to the new one. Only then is the old one cleared and free:
//! nobody is given a chunk that another key opens. But its last owner can reach it for that long after
//! the free has returned, so that *released* comes late. At most `credits` chunks of a compute node are
//! aside; when the free list is empty they are unbound, cleared and free.
//!
//! **MRs** are keyed by PD: their key opens them on every QP of it. So each compute node has a PD of its
//! own, with its QPs and the MRs of its chunks. (The published forms share one PD, and never end a key
//! of Static-MR: its strong isolation is that of a chunk which has one owner for ever.) `static-mr`
//! registers ahead, in each compute node's PD, when that is admitted and when the CPU has nothing else
//! to do, up to [`regions::AHEAD`] chunks: an allocation takes one of these, and only finds out which. A
//! free ends the MR, as everywhere; a chunk that is registered ahead for one goes to another when there
//! is no free one.
//!
//! **Sizes.** `premmap-rpc` and `ondemand-rpc` hand out blocks of every power of two of chunks ([`blocks`]); the
//! others have chunks.
//!
//! **`premmap-rpc`** has a window bound ahead over every block, so that an allocation only finds out which. The
//! published form ("memory is premapped") has one region and one key, which stays good for ever. Here a
//! free rebinds the block's window before it is answered: the old key is dead, and the next one is there.
//!
//! The CPU may be several cores ([`crate::Settings::cores`]): each has a CQ for requests and its share
//! of the compute nodes, and all work on one [`table::Table`].
//!
//! ```text
//! request (16 B)                       reply (64 B)
//! +0  op: 1 allocate, 2 free  (1)      +0  status                (1)
//! +1  log of chunks wanted    (1)      +1  keys                  (1)
//! +2  QP group                (be16)   +2  zero                  (2)
//! +4  entry to free           (be32)   +4  entry                 (be32)
//! +8  number of the request   (be64)   +8  number of the request (be64)
//!                                      +16 address               (be64)
//!                                      +24 length                (be64)
//!                                      +32 keys, one per lane    (be32 each)
//! ```
//!
//! Invariants: replies come in the order of the requests of a compute node; a request is answered
//! in any case, also when it makes no sense; the memory node posts `credits` receives for each
//! compute node, so that who sends more waits alone.

mod blocks;
mod books;
mod client;
mod node;
mod peer;
mod regions;
mod table;
#[cfg(test)]
mod tests;
mod windows;
mod worker;

pub use books::{Books, ChunkState};
pub use client::Client;
pub use node::Node;

use fabric::Key;

use crate::scheme::MAX_GROUP;

/// Bytes of a request.
const REQUEST_BYTES: usize = 16;
/// Bytes of a reply.
const REPLY_BYTES: usize = 64;

/// What a request asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ask {
    /// 2^`order` chunks for the QPs of a group.
    Allocate { group: u16, order: u8 },
    /// Take a chunk back.
    Free { entry: u32 },
}

/// A request with its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Request {
    number: u64,
    ask: Ask,
}

const OP_ALLOCATE: u8 = 1;
const OP_FREE: u8 = 2;

impl Request {
    fn to_bytes(self) -> [u8; REQUEST_BYTES] {
        let mut out = [0; REQUEST_BYTES];
        match self.ask {
            Ask::Allocate { group, order } => {
                out[0] = OP_ALLOCATE;
                out[1] = order;
                out[2..4].copy_from_slice(&group.to_be_bytes());
            }
            Ask::Free { entry } => {
                out[0] = OP_FREE;
                out[4..8].copy_from_slice(&entry.to_be_bytes());
            }
        }
        out[8..16].copy_from_slice(&self.number.to_be_bytes());
        out
    }

    /// The number, and what is asked if that is known.
    fn parse(bytes: &[u8; REQUEST_BYTES]) -> (u64, Option<Ask>) {
        let number = be64(bytes, 8);
        let ask = match bytes[0] {
            OP_ALLOCATE => {
                let group = u16::from_be_bytes([bytes[2], bytes[3]]);
                Some(Ask::Allocate { group, order: bytes[1] })
            }
            OP_FREE => Some(Ask::Free { entry: be32(bytes, 4) }),
            _ => None,
        };
        (number, ask)
    }
}

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum Outcome {
    Done = 1,
    Empty = 2,
    NotYours = 3,
    BadRequest = 4,
    Failed = 5,
    /// There is memory, and no block as large.
    NoBlock = 6,
}

/// A reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Reply {
    number: u64,
    outcome: Outcome,
    entry: u32,
    addr: u64,
    len: u64,
    lanes: usize,
    keys: [Key; MAX_GROUP],
}

impl Reply {
    /// A reply that grants nothing.
    fn bare(number: u64, outcome: Outcome, entry: u32) -> Self {
        Self {
            number,
            outcome,
            entry,
            addr: 0,
            len: 0,
            lanes: 0,
            keys: [Key::default(); MAX_GROUP],
        }
    }

    fn to_bytes(self) -> [u8; REPLY_BYTES] {
        let mut out = [0; REPLY_BYTES];
        out[0] = self.outcome as u8;
        out[1] = self.lanes as u8;
        out[4..8].copy_from_slice(&self.entry.to_be_bytes());
        out[8..16].copy_from_slice(&self.number.to_be_bytes());
        out[16..24].copy_from_slice(&self.addr.to_be_bytes());
        out[24..32].copy_from_slice(&self.len.to_be_bytes());
        for (i, key) in self.keys[..self.lanes].iter().enumerate() {
            out[32 + 4 * i..36 + 4 * i].copy_from_slice(&key.0.to_be_bytes());
        }
        out
    }

    /// `None` if it is not a reply.
    fn parse(bytes: &[u8; REPLY_BYTES]) -> Option<Self> {
        let outcome = match bytes[0] {
            1 => Outcome::Done,
            2 => Outcome::Empty,
            3 => Outcome::NotYours,
            4 => Outcome::BadRequest,
            5 => Outcome::Failed,
            6 => Outcome::NoBlock,
            _ => return None,
        };
        let lanes = bytes[1] as usize;
        if lanes > MAX_GROUP {
            return None;
        }
        let mut keys = [Key::default(); MAX_GROUP];
        for (i, key) in keys[..lanes].iter_mut().enumerate() {
            *key = Key(be32(bytes, 32 + 4 * i));
        }
        Some(Self {
            number: be64(bytes, 8),
            outcome,
            entry: be32(bytes, 4),
            addr: be64(bytes, 16),
            len: be64(bytes, 24),
            lanes,
            keys,
        })
    }
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}
