//! Data path by RPC: the memory node's CPU executes READs, WRITEs and atomics on objects, after a
//! check of the compute node, the object and the range. A baseline of Patronus (§7, "using RPC in
//! the data path", as in AIFM and Redy).
//!
//! ```text
//! compute node                         memory node
//!  management QP ──SEND request──────> worker ─> table: objects, owners, domains
//!                <──SEND reply────────   │
//!                                        └─────> donated memory: a copy, or an atomic
//! ```
//!
//! | module | content |
//! | --- | --- |
//! | `message` | requests and replies |
//! | `table` | objects, and the check of each access, without NIC |
//! | `worker` | a core of the memory node |
//! | `node`, `connection` | the memory node and its compute nodes |
//! | `client` | the compute node |
//!
//! No compute node has a key of the donated memory: an access that the check refuses has no effect
//! on the QP, so that there is nothing to re-establish. Objects and domains are as in scheme
//! `patronus`. Permissions are local to the compute node: an acquisition sends no request, excludes
//! nothing and never ends. The published code copies without a check; that form does not exist
//! here.
//!
//! A grant names its object: [`ObjectId::address`] has the entry, the key has the generation.
//!
//! [`ObjectId::address`]: message::ObjectId::address

mod client;
mod connection;
pub mod message;
mod node;
mod options;
pub mod table;
#[cfg(test)]
mod tests;
mod worker;

pub use client::Client;
pub use node::Node;
pub use options::{DataOffer, Options};

use scheme::info::{AccessKind, Allocator, Isolation, Need, ReleaseTime, SchemeInfo, Sizes};
use scheme::registry::{self, ClientFamily, ClientParts, NodeFamily};
use scheme::{ClientScheme, Error, NodeScheme, NodeSettings, Scheme};
use verbs::Nic;

use self::message::HEADER_BYTES;

/// Scheme `rpc-data`: the memory node's CPU executes each access.
pub const RPC_DATA: Scheme = &SchemeInfo {
    name: "rpc-data",
    source: "Patronus §7 (RPC)",
    allocator: Allocator::NodeCpu,
    isolation: Isolation::NodeCpu,
    sizes: Sizes::Blocks,
    access: AccessKind::ByRpc,
    leases: false,
    release: ReleaseTime::BeforeReturn,
    needs: &[Need::Inline(HEADER_BYTES as u32)],
    chunk_bytes: None,
    chunks_max: scheme::CHUNKS_MAX,
    options: Options::NAMES,
    unsafe_because: None,
};

/// Registers the scheme.
pub struct Family;

impl registry::Family for Family {
    fn schemes(&self) -> &'static [Scheme] {
        &[RPC_DATA]
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
