//! Patronus (FAST'23): memory, and the right to use it, are separate. Compute nodes acquire
//! permissions for objects, extend them with one CAS, and lose them when their leases end.
//!
//! ```text
//! compute node                         memory node
//!  management QP ──SEND request──────> worker ─> book: objects, permissions, waiters, deadlines
//!                <──SEND reply──────── worker <─ effects: open, close, clear, reply
//!                ──CAS (type-2 MW)───> lifetime words of this compute node
//!  access QPs    ──READ, WRITE, CAS──> objects, through type-1 MWs in this compute node's PD
//!  spare QPs     ──(after a refusal)─> the same
//! ```
//!
//! | module | content |
//! | --- | --- |
//! | `message` | requests, replies, lifetime words |
//! | `book` | the manager's state machine, without NIC and clock |
//! | `door` | what opens a range: windows or regions |
//! | `lifetimes` | the lifetime words of a compute node |
//! | `worker` | a core of the memory node: requests, binds, replies |
//! | `header`, `headers` | headers of permissions, in the published form |
//! | `node`, `connection` | the memory node and its compute nodes |
//! | `client` | the compute node |
//!
//! Each compute node has a protection domain of its own, with its QPs, a region with local rights
//! over all memory, and its windows. A window of type 1 is valid on every QP of its PD and on no
//! other QP: the compute node may switch to a spare QP (Patronus §5.5), and one rebind may close a
//! permission and open another one (MW handover, §5.4), but no other compute node can use a key,
//! whatever it guesses. (Patronus has one PD for all; its tags have 8 bits.)
//!
//! [`Pool::allocate`] in this scheme is an exclusive permission without a lease, which lives as
//! long as its owner.
//!
//! [`Pool::allocate`]: https://docs.rs/granary-pool

pub mod book;
mod client;
mod connection;
mod door;
mod header;
mod headers;
mod lifetimes;
pub mod message;
mod node;
mod options;
#[cfg(test)]
mod tests;
mod view;
mod worker;

pub use client::{Client, UnprotectedClient};
pub use node::Node;
pub use options::{
    ClientOptions, Extension, LeaseOffer, Options, TableTerms, Techniques, UnprotectedTerms,
};
pub use view::LeaseView;

use scheme::info::{AccessKind, Allocator, Isolation, Need, ReleaseTime, SchemeInfo, Sizes};
use scheme::registry::{self, ClientFamily, ClientParts, NodeFamily};
use scheme::{ClientScheme, Error, NodeScheme, NodeSettings, Scheme};
use verbs::Nic;

use self::door::DoorKind;
use self::message::REPLY_BYTES;

/// Scheme `patronus`: permissions with leases, opened by type-1 windows in a PD of each compute
/// node.
pub const PATRONUS: Scheme = &SchemeInfo {
    name: "patronus",
    source: "Patronus",
    allocator: Allocator::NodeCpu,
    isolation: Isolation::OwnWindows,
    sizes: Sizes::Blocks,
    access: AccessKind::OneSided,
    leases: true,
    release: ReleaseTime::BeforeReturn,
    needs: &[
        Need::Type1Windows,
        Need::Type2Windows,
        Need::BigEndianAtomics,
        Need::GlobalAtomics,
        Need::Inline(REPLY_BYTES as u32),
    ],
    chunk_bytes: None,
    chunks_max: scheme::CHUNKS_MAX,
    options: Options::NAMES,
    unsafe_because: None,
};

/// Scheme `patronus-2`: as `patronus`, with type-2 windows. A window cannot be handed over, and is
/// valid on one QP, so that there are no spare QPs.
pub const PATRONUS_2: Scheme = &SchemeInfo {
    name: "patronus-2",
    isolation: Isolation::QpWindows,
    needs: &[
        Need::Type2Windows,
        Need::BigEndianAtomics,
        Need::GlobalAtomics,
        Need::Inline(REPLY_BYTES as u32),
    ],
    ..*PATRONUS
};

/// Scheme `patronus-mr`: as `patronus`, with a region for each permission.
pub const PATRONUS_MR: Scheme = &SchemeInfo {
    name: "patronus-mr",
    source: "Patronus §3.3",
    isolation: Isolation::Regions,
    needs: PATRONUS_2.needs,
    ..*PATRONUS
};

/// Scheme `patronus-paper`: the form that was published, with one PD for all compute nodes, headers
/// that windows open, and every object open to every compute node. For comparison.
pub const PATRONUS_PAPER: Scheme = &SchemeInfo {
    name: "patronus-paper",
    source: "Patronus §4 to §5",
    isolation: Isolation::SharedWindows,
    release: ReleaseTime::AfterReuse,
    options: Options::PUBLISHED_NAMES,
    unsafe_because: Some(
        "each compute node may acquire and free every object, keys follow from earlier keys, and \
         freed memory is not cleared",
    ),
    ..*PATRONUS
};

/// Scheme `unprotected`: the objects of `patronus`, in one region to which each compute node has
/// the key. Acquisitions, extensions and revocations are calls of functions. For comparison.
pub const UNPROTECTED: Scheme = &SchemeInfo {
    name: "unprotected",
    source: "Patronus §7, Unprot",
    isolation: Isolation::SharedRegion,
    release: ReleaseTime::Never,
    needs: &[Need::Inline(REPLY_BYTES as u32)],
    options: Options::UNPROTECTED_NAMES,
    unsafe_because: Some("each compute node has the key to all memory of the pool"),
    ..*PATRONUS
};

/// The schemes of this module.
pub const SCHEMES: &[Scheme] = &[PATRONUS, PATRONUS_2, PATRONUS_MR, PATRONUS_PAPER, UNPROTECTED];

/// The door of a scheme of this module.
fn door_of(scheme: Scheme) -> DoorKind {
    match scheme {
        PATRONUS_2 => DoorKind::QpWindows,
        PATRONUS_MR => DoorKind::Region,
        PATRONUS_PAPER => DoorKind::Manager,
        UNPROTECTED => DoorKind::Unprotected,
        _ => DoorKind::Window,
    }
}

/// Registers the schemes.
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
        let ClientParts { nic, pd, offer, options, .. } = *parts;
        let client = Client::new(nic, pd, offer)?.with_options(options)?;
        match offer.scheme == UNPROTECTED.name {
            true => Ok(Box::new(UnprotectedClient::new(client))),
            false => Ok(Box::new(client)),
        }
    }
}
