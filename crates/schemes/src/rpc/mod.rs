//! Allocation by RPC to the memory node's CPU: the baseline schemes in which the CPU opens a chunk
//! to a compute node (makes it accessible) and closes it.
//!
//! A compute node SENDs a request on its management QP. The memory node's CPU takes a chunk from a
//! free list, opens it, and SENDs the grant back. A free closes the chunk, clears it and returns it
//! to the list. The schemes differ in the mechanism that opens a chunk:
//!
//! | scheme | mechanism | isolation of compute nodes | source |
//! | --- | --- | --- | --- |
//! | `rpc-mw-2` | a type-2 window per access QP of the group | the window is bound to the QP | OneSidedMW §2.2.2, Patronus |
//! | `rpc-mw-1` | one type-1 window; a free and the next allocation are one rebind | **unsafe**: 8 bits of tag | OneSidedMW §2.2.2, §2.3 |
//! | `fine-mr` | an MR, registered by each allocation and deregistered by each free | a PD per compute node | OneSidedMW §6 |
//! | `static-mr` | an MR that was registered in advance | a PD per compute node | OneSidedMW §2.2.1 |
//! | `ondemand-rpc` | as `fine-mr`, with several sizes | a PD per compute node | FineMem §6.1 |
//! | `premmap-rpc` | a type-1 window that was bound in advance; a free rebinds it | **trust**: 8 bits of tag | FineMem §6.1 |
//! | `shared-region` | none: one MR over all chunks | **none**: one key for all compute nodes | RACE, FUSEE, Patronus (unprotected) |
//!
//! The CPU identifies the sender of a request by its QP. Therefore a free needs no guard window as
//! proof of ownership, as the chains of OneSidedMW do, and a group has one window less.
//!
//! **`rpc-mw-1`** binds one window per chunk, which any QP of the PD may use. This is also its
//! weakness: a compute node that guesses the 8 bits of the tag has access, and the memory node
//! cannot prevent it. A free is answered without the NIC: the chunk is set aside with its window
//! still bound. The next allocation of the same compute node takes a chunk that is free and
//! cleared, and one rebind moves the window from the old chunk to the new one. Only then is the old
//! chunk cleared and freed, so that no chunk is allocated while an old key opens it. But its last
//! owner can access it until then, after the free has returned; therefore the chunk is *released*
//! late. At most `credits` chunks of a compute node are set aside. When the free list is empty,
//! they are unbound, cleared and freed.
//!
//! **MRs** belong to a PD: their key is valid on every QP of it. Therefore each compute node has a
//! PD of its own, with its QPs and the MRs of its chunks. (The published forms share one PD and
//! never invalidate a key of Static-MR; their strong isolation holds only for a chunk that never
//! changes its owner.) `static-mr` registers up to `regions::AHEAD` chunks in advance in each
//! compute node's PD: when it is admitted, and when the CPU is idle. An allocation takes one of
//! these. A free deregisters the MR, as in the other schemes. When no chunk is free, a chunk that
//! is registered in advance for one compute node is allocated to another.
//!
//! **Sizes.** `premmap-rpc` and `ondemand-rpc` have blocks of every power of two of chunks
//! (`blocks`); the other schemes have chunks only.
//!
//! **`premmap-rpc`** binds a window over every block in advance, so that an allocation only selects
//! a block. The published form ("memory is premapped") has one region and one key, which stays
//! valid for ever. Here a free rebinds the block's window before it is answered: the old key is
//! dead, and the next key is valid.
//!
//! **`shared-region`** has one MR over all chunks. Every compute node learns its key when it is
//! admitted, and reaches every byte of the pool, allocated or not. An allocation only selects a
//! chunk, and a free only clears it. Data structures that several compute nodes change with CAS
//! (RACE, FUSEE) need such a key: the keys of the other schemes are for one compute node.
//!
//! The CPU may have several cores ([`Options::cores`]). Each core has a CQ for requests and
//! serves a part of the compute nodes; all cores share one `table::Table`.
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
//! Invariants: replies are sent in the order of a compute node's requests. Every request is
//! answered, including invalid ones. The memory node posts `credits` receives per compute node, so
//! that a compute node that sends more delays only itself.

pub(crate) mod blocks;
mod client;
mod connection;
mod node;
mod options;
mod regions;
mod table;
#[cfg(test)]
mod tests;
mod view;
mod windows;
mod worker;

pub use client::Client;
pub use node::Node;
pub use options::{ControlMode, Options};
pub use table::ChunkState;
pub use view::AllocationView;

use scheme::index::EntryId;
use scheme::info::{
    AccessKind, Allocator, Isolation, Need, ReleaseTime, Scheme, SchemeInfo, Sizes,
};
use scheme::registry::{self, ClientFamily, ClientParts, NodeFamily};
use scheme::{CHUNKS_MAX, ClientScheme, Error, MAX_GROUP, NodeScheme, NodeSettings};
use serde::{Deserialize, Serialize};
use verbs::{Key, Nic};

use crate::blocks::Order;

/// Size of a request in bytes.
const REQUEST_BYTES: usize = 16;
/// Size of a reply in bytes.
const REPLY_BYTES: usize = 64;

/// Inline data of a reply.
const INLINE: Need = Need::Inline(REPLY_BYTES as u32);
/// The reason why a scheme with unguarded type-1 windows is unsafe.
const GUESSABLE: &str = "keys have 8 secret bits and can be guessed";

/// Scheme `rpc-mw-2`: the CPU binds type-2 windows.
pub const RPC_MW_2: Scheme = &SchemeInfo {
    name: "rpc-mw-2",
    source: "OneSidedMW §2.2.2",
    allocator: Allocator::NodeCpu,
    isolation: Isolation::QpWindows,
    sizes: Sizes::Chunk,
    access: AccessKind::OneSided,
    leases: false,
    release: ReleaseTime::BeforeReturn,
    needs: &[Need::Type2Windows, INLINE],
    chunk_bytes: None,
    chunks_max: CHUNKS_MAX,
    options: &["cores", "control"],
    unsafe_because: None,
};

/// Scheme `rpc-mw-1`: `rpc-mw-2` with type-1 windows. One rebind frees and allocates a chunk.
pub const RPC_MW_1: Scheme = &SchemeInfo {
    name: "rpc-mw-1",
    source: "OneSidedMW §2.2.2, §2.3",
    allocator: Allocator::NodeCpu,
    isolation: Isolation::SharedWindows,
    sizes: Sizes::Chunk,
    access: AccessKind::OneSided,
    leases: false,
    release: ReleaseTime::Quarantine,
    needs: &[Need::Type1Windows, INLINE],
    chunk_bytes: None,
    chunks_max: CHUNKS_MAX,
    options: &["cores", "control"],
    unsafe_because: Some(GUESSABLE),
};

/// Scheme `fine-mr`: the CPU registers a memory region for each allocation.
pub const FINE_MR: Scheme = &SchemeInfo {
    name: "fine-mr",
    source: "OneSidedMW §6",
    allocator: Allocator::NodeCpu,
    isolation: Isolation::Regions,
    sizes: Sizes::Chunk,
    access: AccessKind::OneSided,
    leases: false,
    release: ReleaseTime::BeforeReturn,
    needs: &[INLINE],
    chunk_bytes: None,
    chunks_max: CHUNKS_MAX,
    options: &["cores", "control"],
    unsafe_because: None,
};

/// Scheme `static-mr`: the CPU allocates from coarse regions that it registered in advance.
pub const STATIC_MR: Scheme = &SchemeInfo {
    name: "static-mr",
    source: "OneSidedMW §2.2.1",
    allocator: Allocator::NodeCpu,
    isolation: Isolation::Regions,
    sizes: Sizes::Chunk,
    access: AccessKind::OneSided,
    leases: false,
    release: ReleaseTime::BeforeReturn,
    needs: &[INLINE],
    chunk_bytes: None,
    chunks_max: CHUNKS_MAX,
    options: &["cores", "control"],
    unsafe_because: None,
};

/// Scheme `premmap-rpc`: the CPU allocates blocks of several sizes whose windows it bound in
/// advance. Windows are of type 1: clients must trust each other not to guess keys.
pub const PREMMAP_RPC: Scheme = &SchemeInfo {
    name: "premmap-rpc",
    source: "FineMem §6.1",
    allocator: Allocator::NodeCpu,
    isolation: Isolation::SharedWindowsAhead,
    sizes: Sizes::Blocks,
    access: AccessKind::OneSided,
    leases: false,
    release: ReleaseTime::BeforeReturn,
    needs: &[Need::Type1Windows, INLINE],
    chunk_bytes: None,
    chunks_max: CHUNKS_MAX,
    options: &["cores", "control"],
    unsafe_because: Some(GUESSABLE),
};

/// Scheme `ondemand-rpc`: `fine-mr` with several sizes.
pub const ONDEMAND_RPC: Scheme = &SchemeInfo {
    name: "ondemand-rpc",
    source: "FineMem §6.1",
    allocator: Allocator::NodeCpu,
    isolation: Isolation::Regions,
    sizes: Sizes::Blocks,
    access: AccessKind::OneSided,
    leases: false,
    release: ReleaseTime::BeforeReturn,
    needs: &[INLINE],
    chunk_bytes: None,
    chunks_max: CHUNKS_MAX,
    options: &["cores", "control"],
    unsafe_because: None,
};

/// Scheme `shared-region`: the CPU allocates chunks of one region, whose key every client has.
pub const SHARED_REGION: Scheme = &SchemeInfo {
    name: "shared-region",
    source: "RACE; FUSEE; Patronus, unprotected",
    allocator: Allocator::NodeCpu,
    isolation: Isolation::SharedRegion,
    sizes: Sizes::Chunk,
    access: AccessKind::OneSided,
    leases: false,
    release: ReleaseTime::Never,
    needs: &[INLINE],
    chunk_bytes: None,
    chunks_max: CHUNKS_MAX,
    options: &["cores", "control"],
    unsafe_because: Some("every client has the key to all memory of the pool"),
};

/// The schemes of this module.
pub const SCHEMES: &[Scheme] =
    &[RPC_MW_2, RPC_MW_1, FINE_MR, STATIC_MR, PREMMAP_RPC, ONDEMAND_RPC, SHARED_REGION];

/// Registers the schemes of this module.
pub struct Family;

impl registry::Family for Family {
    fn schemes(&self) -> &'static [Scheme] {
        SCHEMES
    }

    fn check(&self, settings: &NodeSettings) -> Result<(), Error> {
        Options::of(settings).map(drop)
    }
}

impl<N: Nic> NodeFamily<N> for Family {
    fn node(&self, nic: &N, settings: &NodeSettings) -> Result<Box<dyn NodeScheme>, Error> {
        Ok(Box::new(Node::new(nic, settings)?))
    }
}

impl<N: Nic> ClientFamily<N> for Family {
    fn client(&self, parts: &ClientParts<'_, N>) -> Result<Box<dyn ClientScheme>, Error> {
        let ClientParts { nic, pd, offer, .. } = *parts;
        Ok(Box::new(Client::new(nic, pd, offer)?))
    }
}

/// The scheme of this name.
fn find(name: &str) -> Result<Scheme, Error> {
    let all = SCHEMES.iter().copied();
    all.into_iter().find(|scheme| scheme.name == name).ok_or_else(|| scheme::unknown(name))
}

/// The mechanism that opens a chunk to a compute node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Opening {
    /// A type-2 window per access QP.
    Bind,
    /// A type-1 window, rebound from the chunk that was freed last.
    Rebind,
    /// A type-1 window that was bound in advance.
    BindAhead,
    /// A region.
    Register,
    /// A region that was registered in advance.
    RegisterAhead,
    /// One region over all chunks, which is always open.
    Always,
}

impl Opening {
    fn of(scheme: Scheme) -> Result<Self, Error> {
        Ok(match scheme {
            RPC_MW_2 => Self::Bind,
            RPC_MW_1 => Self::Rebind,
            PREMMAP_RPC => Self::BindAhead,
            FINE_MR | ONDEMAND_RPC => Self::Register,
            STATIC_MR => Self::RegisterAhead,
            SHARED_REGION => Self::Always,
            other => {
                return Err(Error::Setting {
                    setting: "scheme",
                    value: other.name.into(),
                    why: "it does not allocate by RPC".into(),
                });
            }
        })
    }

    /// True if chunks are opened with type-1 windows.
    fn is_type1(self) -> bool {
        matches!(self, Self::Rebind | Self::BindAhead)
    }

    /// True if chunks are opened with regions of their own.
    fn is_region(self) -> bool {
        matches!(self, Self::Register | Self::RegisterAhead)
    }
}

/// Terms of an admission to a scheme with one region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
struct Region {
    /// Key of the region over all chunks.
    #[serde(default, rename = "region_key", skip_serializing_if = "Option::is_none")]
    key: Option<u32>,
}

/// Operation of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ask {
    /// Allocate a block of an order for the QPs of a group.
    Allocate { group: u16, order: Order },
    /// Free a block.
    Free { entry: EntryId },
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
                out[1] = order.raw() as u8;
                out[2..4].copy_from_slice(&group.to_be_bytes());
            }
            Ask::Free { entry } => {
                out[0] = OP_FREE;
                out[4..8].copy_from_slice(&u32::from(entry).to_be_bytes());
            }
        }
        out[8..16].copy_from_slice(&self.number.to_be_bytes());
        out
    }

    /// Decodes a request: its number, and its operation if valid.
    fn parse(bytes: &[u8; REQUEST_BYTES]) -> (u64, Option<Ask>) {
        let number = be64(bytes, 8);
        let ask = match bytes[0] {
            OP_ALLOCATE => {
                let group = u16::from_be_bytes([bytes[2], bytes[3]]);
                Some(Ask::Allocate { group, order: Order::new(bytes[1].into()) })
            }
            OP_FREE => Some(Ask::Free { entry: be32(bytes, 4).into() }),
            _ => None,
        };
        (number, ask)
    }
}

/// Result of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum Outcome {
    Done = 1,
    Empty = 2,
    NotYours = 3,
    BadRequest = 4,
    Failed = 5,
    /// Memory is free, but no block of the requested size.
    NoBlock = 6,
}

/// A reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Reply {
    number: u64,
    outcome: Outcome,
    entry: EntryId,
    addr: u64,
    len: u64,
    lanes: usize,
    keys: [Key; MAX_GROUP],
}

impl Reply {
    /// A reply without a grant.
    fn bare(number: u64, outcome: Outcome, entry: EntryId) -> Self {
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
        out[4..8].copy_from_slice(&u32::from(self.entry).to_be_bytes());
        out[8..16].copy_from_slice(&self.number.to_be_bytes());
        out[16..24].copy_from_slice(&self.addr.to_be_bytes());
        out[24..32].copy_from_slice(&self.len.to_be_bytes());
        for (i, key) in self.keys[..self.lanes].iter().enumerate() {
            out[32 + 4 * i..36 + 4 * i].copy_from_slice(&key.0.to_be_bytes());
        }
        out
    }

    /// Name of the grant in the reply.
    fn grant(&self) -> Option<u64> {
        (self.outcome == Outcome::Done && self.lanes > 0).then(|| self.entry.raw().into())
    }

    /// Decodes a reply; `None` if it is invalid.
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
            entry: be32(bytes, 4).into(),
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
