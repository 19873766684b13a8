//! `tdmem`: pages behind an engine in the memory node's NIC, which checks the owner of each page at
//! each access (TDMEM, §4.3 to §5.4.1).
//!
//! All memory is one region behind an engine ([`verbs::RegionEngine`]). The donee (a compute node)
//! addresses the region directly; the donor's (memory node's) engine translates nothing, and looks
//! the owner up. TDMEM's engine is an FPGA. Here it is an object in the software NIC, which no
//! hardware NIC has.
//!
//! ```text
//!  compute node                              memory node's NIC
//!  QP == WRITE page ======================>  data window of the slot
//!     == WRITE command ===================>  engine: validates, draws a random free page, copies
//!                                            the data window to it, sets the owner, answers
//!     <= READ answer ======================  status, tier, address        (STORE: one doorbell)
//!     <= READ page ========================  engine: is it the peer's page?              (LOAD)
//!     == WRITE command ===================>  engine: clears the page, frees it (INVALIDATE PAGE)
//! ```
//!
//! - [`layout`]: the region: slots, then pages. [`command`]: commands and answers, byte by byte.
//! - [`table`]: owners and free lists. [`engine`]: the engine.
//! - `node`: the memory node's CPU: it admits compute nodes, and clears the pages of departed ones
//!   with commands of its own (`administrator`), because only the engine changes the tables.
//! - [`client`]: the compute node: it keeps the translation table (`translation`), and optionally a
//!   tier of its own memory (`local`).
//!
//! Decisions where the paper is silent, and deviations from it:
//! - An answer names the page that was drawn. Therefore a donee needs no preallocated addresses.
//! - A STORE may name the page that it replaces. The engine frees that page after it has drawn the
//!   new one, so that a page is never stored to its old position. With one command instead of STORE
//!   and INVALIDATE PAGE, a lost connection leaves no page without a name. If no page is free, the
//!   page is overwritten in place: a mapped page stays writable.
//! - A page is cleared before it is free.
//! - An owner has 16 bits, not 8. A page takes 6 bytes at the donor: owner, and place in the free
//!   list.
//! - The data window is a staging copy: the address is not known before the command is executed.
//! - INVALIDATE AREA is executed in slices. Each answer names the first page of the next slice.

mod administrator;
pub mod client;
pub mod command;
mod connection;
pub mod engine;
pub mod layout;
mod local;
pub mod node;
mod options;
mod random;
pub mod table;
#[cfg(test)]
mod tests;
mod translation;

pub use client::Client;
pub use node::Node;
pub use options::{ClientOptions, Options, Region, TierSizes};
pub use random::Random;

use std::fmt;

use scheme::info::{
    AccessKind, Allocator, Isolation, Need, ReleaseTime, Scheme, SchemeInfo, Sizes,
};
use scheme::registry::{self, ClientFamily, ClientParts, NodeFamily};
use scheme::{CHUNKS_MAX, ClientScheme, Error, NodeScheme, NodeSettings};
use serde::{Deserialize, Serialize};
use verbs::Nic;

use self::command::COMMAND_BYTES;

/// Scheme `tdmem`: pages of 4 KiB behind an engine in the NIC, which draws a random free page for
/// each store and checks the owner at each access.
pub const TDMEM: Scheme = &SchemeInfo {
    name: "tdmem",
    source: "TDMEM §4.3 to §5.4.1",
    allocator: Allocator::Nic,
    isolation: Isolation::PageOwners,
    sizes: Sizes::Chunk,
    access: AccessKind::Pages,
    leases: false,
    release: ReleaseTime::BeforeReturn,
    needs: &[Need::RegionEngines, Need::Inline(COMMAND_BYTES as u32)],
    chunk_bytes: Some(PAGE_BYTES as u64),
    chunks_max: CHUNKS_MAX,
    options: &["tiers", "seed"],
    unsafe_because: None,
};

/// The schemes of this module.
pub const SCHEMES: &[Scheme] = &[TDMEM];

/// Registers the schemes of this module.
pub struct Family;

impl registry::Family for Family {
    fn schemes(&self) -> &'static [Scheme] {
        SCHEMES
    }

    fn check(&self, settings: &NodeSettings) -> Result<(), Error> {
        Options::of(settings)?.fast_pages(settings).map(drop)
    }
}

impl<N: Nic> NodeFamily<N> for Family {
    fn node(&self, nic: &N, settings: &NodeSettings) -> Result<Box<dyn NodeScheme>, Error> {
        Ok(Box::new(Node::new(nic.clone(), settings.clone())?))
    }
}

impl<N: Nic> ClientFamily<N> for Family {
    fn client(&self, parts: &ClientParts<'_, N>) -> Result<Box<dyn ClientScheme>, Error> {
        let ClientParts { nic, pd, offer, options, .. } = *parts;
        Ok(Box::new(Client::new(nic, pd, offer, options)?))
    }
}

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// A memory tier (TDMEM §5.1). In software, all tiers are DRAM.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Tier {
    /// Memory of the compute node (the paper's donee-HBM).
    Local = 0,
    /// Memory of the memory node's NIC (donor-HBM).
    Fast = 1,
    /// Main memory of the memory node (donor-DRAM).
    Dram = 2,
}

impl Tier {
    /// The tiers of the memory node, fastest first.
    pub const DONOR: [Tier; 2] = [Tier::Fast, Tier::Dram];

    /// The tier with this number.
    pub fn from_raw(number: u8) -> Option<Self> {
        [Self::Local, Self::Fast, Self::Dram].into_iter().find(|tier| *tier as u8 == number)
    }

    /// Name in reports and on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Fast => "fast",
            Self::Dram => "dram",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
