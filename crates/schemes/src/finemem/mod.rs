//! FineMem: the client allocates by itself, with READ and CAS on a bitmap tree in the memory node.
//!
//! ```text
//! compute node                                     memory node's memory
//!   allocate   CAS header ─────────────────────────► span or section: commits bits and log
//!              READ log, READ header, CAS log ─────► full log of the block
//!              READ capability ◄──────────────────── its key: the window is already bound
//!   access     READ, WRITE, atomics under that key, on its access QPs
//!   free       CAS capability ─────────────────────► quarantined
//!                                         scan (CPU): rebind, clear, new key, clear bits
//! ```
//!
//! - Scheme `premmap-onesided` is the same with a free array in place of the tree ([`mod@array`]).
//! - [`header`], [`log`] and [`layout`] define the words; [`tree`] has the operations on them.
//! - The metadata is accessible to each client's management QP through a type-2 window that is
//!   bound to that QP. A process that has only access QPs cannot reach the metadata, whatever key
//!   it guesses.
//! - Windows over the blocks are of type 1, because the QP that will use a block is not yet known
//!   when its window is bound. If the NIC has guarded windows, each window checks the owner in the
//!   block's full log. Otherwise only 8 bits of key tag protect a block from other clients' access
//!   QPs (OneSidedMW §2.3), as in `rpc-mw-1`.
//! - A client is trusted with the metadata (FineMem §4.3): it is a service that allocates for the
//!   applications of its compute node.
//! - A freed block is not reallocated before its old key is dead and it has been cleared. Scheme
//!   `finemem-paper` reallocates at once, as published; it is unsafe, and exists for comparison
//!   (`release`).

mod allocation_view;
pub mod array;
mod audit;
pub mod block;
mod client;
mod connection;
mod effort;
mod function;
pub mod header;
mod keys;
pub mod layout;
pub mod log;
mod map;
mod node;
mod options;
mod release;
mod scan;
mod table;
pub mod tree;
mod words;

pub use allocation_view::AllocationView;
pub use client::Client;
pub use node::Node;
pub use options::{Metadata, Options};
pub use scan::ReleaseTimes;

use scheme::info::{
    AccessKind, Allocator, Isolation, Need, ReleaseTime, Scheme, SchemeInfo, Sizes,
};
use scheme::registry::{self, ClientFamily, ClientParts, NodeFamily};
use scheme::{ClientScheme, Error, NodeScheme, NodeSettings};
use verbs::Nic;

/// Capabilities that the schemes need.
const NEEDS: &[Need] =
    &[Need::Type1Windows, Need::Type2Windows, Need::BigEndianAtomics, Need::GlobalAtomics];
/// Maximum number of chunks: a single window of up to 2 GiB covers the metadata.
const CHUNKS_MAX: u64 = 1 << 26;
/// The reason why a scheme with unguarded type-1 windows is unsafe.
const GUESSABLE: &str = "keys have 8 secret bits and can be guessed";

/// Scheme `finemem`: the client allocates with READ and CAS on a bitmap tree in the memory node. A
/// freed block is in quarantine until its key is dead and the block is cleared. Windows are of type
/// 1; on a NIC without guarded windows, clients must trust each other not to guess keys.
pub const FINEMEM: Scheme = &SchemeInfo {
    name: "finemem",
    source: "FineMem §4",
    allocator: Allocator::Client,
    isolation: Isolation::GuardedWindows,
    sizes: Sizes::Blocks,
    access: AccessKind::OneSided,
    leases: false,
    release: ReleaseTime::Quarantine,
    needs: NEEDS,
    chunk_bytes: None,
    chunks_max: CHUNKS_MAX,
    options: &["contention_control"],
    unsafe_because: None,
};

/// Scheme `finemem-paper`: `finemem` as published, for comparison. A freed block is free at once,
/// under a backup key.
pub const FINEMEM_PAPER: Scheme = &SchemeInfo {
    name: "finemem-paper",
    source: "FineMem §4.3",
    allocator: Allocator::Client,
    isolation: Isolation::SharedWindowsAhead,
    sizes: Sizes::Blocks,
    access: AccessKind::OneSided,
    leases: false,
    release: ReleaseTime::AfterReuse,
    needs: NEEDS,
    chunk_bytes: None,
    chunks_max: CHUNKS_MAX,
    options: &["contention_control"],
    unsafe_because: Some(
        "a freed block is reused while its last owner's key is still valid, and is not cleared; \
         keys have 8 secret bits and can be guessed",
    ),
};

/// Scheme `premmap-onesided`: the client allocates with CAS on an array of one word per chunk:
/// `finemem` without the tree (CXL-SHM's free array).
pub const PREMMAP_ONESIDED: Scheme = &SchemeInfo {
    name: "premmap-onesided",
    source: "FineMem §6.1",
    allocator: Allocator::Client,
    isolation: Isolation::SharedWindowsAhead,
    sizes: Sizes::Blocks,
    access: AccessKind::OneSided,
    leases: false,
    release: ReleaseTime::Quarantine,
    needs: NEEDS,
    chunk_bytes: None,
    chunks_max: CHUNKS_MAX,
    options: &["contention_control"],
    unsafe_because: Some(GUESSABLE),
};

/// The schemes of this module.
pub const SCHEMES: &[Scheme] = &[FINEMEM, FINEMEM_PAPER, PREMMAP_ONESIDED];

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

/// True if the scheme has a tree. The memory node's CPU then has background work that can be
/// aborted.
pub fn has_tree(scheme: Scheme) -> bool {
    matches!(scheme, FINEMEM | FINEMEM_PAPER)
}

#[cfg(test)]
mod tests;
