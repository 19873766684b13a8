//! OneSidedMW: allocation and release as work-request chains that the memory node's NIC executes
//! (OneSidedMW §3 to §5).
//!
//! ```text
//!  compute node                         memory node
//!  ------------                         -----------
//!  Alloc QP  == SEND qpns, reply ====>  Alloc QP   RQ: scatters the arguments into the chain
//!            <== WRITE_IMM grant =====             SQ: the reply, then RECV_EN (the credit)
//!                                       worker W ==loopback==> W'   the allocation chain
//!  Free QP   == SEND entry, reply ===>  Free QP    the same
//!            <== WRITE_IMM status ====
//!                                       worker F ==loopback==> F'   the free chain
//!  Access QPs == READ WRITE CAS FAA =>  Access QPs (one window of each group for each)
//! ```
//!
//! - [`layout`]: the table, the free queue and the steering table, byte by byte.
//! - [`program`]: writes WQEs into a ring whose instances re-arm themselves.
//! - [`alloc_chain`], [`free_chain`]: the two chains. `published_chain`: figure 5 taken literally,
//!   in scheme `onesidedmw-paper`, which is unsafe and exists for comparison.
//! - [`node`]: the memory node's side. `connection` holds the state of one client, `repair` and
//!   `in_flight` handle stopped chains and closed connections, `reclaim` handles departed clients,
//!   and `budget` enforces budgets. [`client`]: the client's side.
//!
//! Differences from the paper's figure 5, with reasons:
//! - An empty queue is answered with EMPTY. A counter of permits steers the chain through a table,
//!   so that the head never passes an unfilled slot and no repair is needed.
//! - A slot is taken by one masked CAS that swaps a zero in. Entries are pushed by a SEND into a
//!   shared receive queue whose order defines the tail. (An FAA on a tail followed by a WRITE shows
//!   empty slots to allocators although the pool is not empty.)
//! - The worker queues are loopback pairs, because FAA and READ on the memory node's own memory
//!   cannot run on a QP whose peer is the compute node.
//! - The guard window is bound to the free worker F, to which no client can post. The proof of
//!   ownership is that F unbinds the guard with the QP check.
//! - The reply is a WRITE with immediate, so that the client can sleep until the reply arrives. A
//!   free has a reply too.
//! - Chunks are cleared before they are free again.

pub mod alloc_chain;
mod audit;
mod budget;
pub mod client;
mod connection;
pub mod free_chain;
mod in_flight;
mod meter;
pub mod node;
mod options;
mod published_chain;
mod reclaim;
mod repair;

pub use crate::chain::{layout, program};
pub use client::Client;
pub use node::Node;
pub use options::{Budget, Options, Terms};

use scheme::info::{
    AccessKind, Allocator, Isolation, Need, ReleaseTime, Scheme, SchemeInfo, Sizes,
};
use scheme::registry::{self, ClientFamily, ClientParts, NodeFamily};
use scheme::{CHUNKS_MAX, ClientScheme, Error, NodeScheme, NodeSettings, Offer};
use verbs::Nic;
use verbs::direct::DirectNic;

/// Scheme `onesidedmw`: chains of work requests that the memory node's NIC executes.
pub const ONESIDEDMW: Scheme = &SchemeInfo {
    name: "onesidedmw",
    source: "OneSidedMW §3 to §5",
    allocator: Allocator::Nic,
    isolation: Isolation::QpWindows,
    sizes: Sizes::Chunk,
    access: AccessKind::OneSided,
    leases: false,
    release: ReleaseTime::BeforeReturn,
    needs: &[Need::Chains, Need::Type2Windows, Need::BigEndianAtomics],
    chunk_bytes: None,
    chunks_max: CHUNKS_MAX,
    options: &["separation", "budget"],
    unsafe_because: None,
};

/// Scheme `onesidedmw-paper`: `onesidedmw` with the allocation chain of figure 5 taken literally,
/// for comparison. The memory node's CPU posts executed WQEs again.
pub const ONESIDEDMW_PAPER: Scheme = &SchemeInfo {
    name: "onesidedmw-paper",
    source: "OneSidedMW §4.3, figure 5",
    // The tail is counted with 24 bits.
    chunks_max: CHUNKS_MAX / 2,
    options: &["budget"],
    unsafe_because: Some(
        "an allocation from an empty queue loses a chunk that is freed next; a client's old key \
         opens a chunk again that the client got again",
    ),
    ..*ONESIDEDMW
};

/// The schemes of this module.
pub const SCHEMES: &[Scheme] = &[ONESIDEDMW, ONESIDEDMW_PAPER];

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

impl<N: DirectNic> NodeFamily<N> for Family {
    fn node(&self, nic: &N, settings: &NodeSettings) -> Result<Box<dyn NodeScheme>, Error> {
        Ok(Box::new(Node::new(nic.clone(), settings.clone())?))
    }
}

impl<N: Nic> ClientFamily<N> for Family {
    fn access_receives(&self, offer: &Offer) -> u32 {
        // Without separation, replies to allocations arrive on the access QPs.
        match Terms::of(offer) {
            Ok(Terms { separation: false, .. }) => offer.credits,
            _ => 0,
        }
    }

    fn client(&self, parts: &ClientParts<'_, N>) -> Result<Box<dyn ClientScheme>, Error> {
        let ClientParts { nic, pd, offer, access, .. } = *parts;
        Ok(Box::new(Client::new(nic, pd, offer, access)?))
    }
}

#[cfg(test)]
mod tests;
