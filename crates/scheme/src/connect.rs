//! Messages of a connection: the offer of a memory node, the request of a client and its reply.

use std::fmt;

use serde::{Deserialize, Serialize};
use verbs::{PeerAddress, Qpn};

use crate::options::Terms;
use crate::route::{Route, Start};
use crate::settings::NodeSettings;

/// The part of a memory node's first message that concerns its scheme.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Name of the allocation scheme.
    pub scheme: String,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Number of chunks.
    #[serde(default)]
    pub chunks: u64,
    /// Windows of a group, including the guard.
    pub group_size: u32,
    /// Functions of the memory node's NIC that contain windows. A group has access QPs for each
    /// function, those of the first function first.
    #[serde(default = "one")]
    pub functions: u32,
    /// Spare QPs of each lane ([`NodeScheme::spares`](crate::NodeScheme::spares)).
    #[serde(default)]
    pub spares: u32,
    /// Requests of each kind that a client may have in flight.
    pub credits: u32,
    /// Maximum number of QP groups of a client.
    pub groups_max: u32,
    /// Terms that the scheme tells its clients.
    #[serde(flatten)]
    pub terms: Terms,
}

impl Offer {
    /// The offer of a memory node whose windows are in `functions` functions of its NIC, without
    /// spare QPs.
    pub fn new(settings: &NodeSettings, functions: u32, terms: Terms) -> Self {
        Self {
            scheme: settings.scheme.name.to_owned(),
            chunk_bytes: settings.chunk_bytes,
            chunks: settings.chunks,
            group_size: settings.group_size,
            functions,
            spares: 0,
            credits: settings.credits,
            groups_max: settings.groups_max,
            terms,
        }
    }
}

fn one() -> u32 {
    1
}

/// Secret that the members of a domain share. Compute nodes with the same token may acquire each
/// other's objects ([`Others`](crate::Others)).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DomainToken(pub [u8; 32]);

impl fmt::Debug for DomainToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DomainToken(..)")
    }
}

/// A compute node's request to be admitted. It lists the numbers of the compute node's QPs, which
/// exist but are not connected yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectRequest {
    /// Management QPs, in the order that the scheme defines.
    pub management: Vec<u32>,
    /// Access QPs of each QP group: one per lane for the first function of the memory node's NIC,
    /// then one per lane for the next function, and so on.
    pub groups: Vec<Vec<u32>>,
    /// Address of the compute node's bulletin ([`bulletin`]), which the memory node writes.
    pub bulletin_addr: u64,
    /// Remote key of the bulletin.
    pub bulletin_rkey: u32,
    /// Token of the compute node's domain, proved by the compute node. The memory node fills it in.
    #[serde(skip)]
    pub domain: Option<DomainToken>,
    /// Network path to the compute node's QPs on another host. The memory node fills it in.
    #[serde(skip)]
    pub route: Option<Route>,
    /// Initial state of the QPs of a compute node on another host. The memory node fills it in.
    #[serde(skip)]
    pub start: Start,
}

impl ConnectRequest {
    /// Address of the compute node's QP `qpn`, as the memory node's QPs must name it.
    pub fn peer(&self, qpn: u32) -> PeerAddress {
        let qpn = Qpn::new(qpn);
        self.route.map_or(qpn.into(), |route| route.peer(qpn, self.start))
    }
}

/// The memory node's answer to a [`ConnectRequest`]: the peers of the listed QPs, in the same
/// order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectReply {
    /// The compute node's number.
    pub client: u32,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Windows of a group, including the guard.
    pub group_size: u32,
    /// Requests of each kind that the compute node may have in flight.
    pub credits: u32,
    /// Peers of the management QPs.
    pub management: Vec<u32>,
    /// Peers of the access QPs.
    pub groups: Vec<Vec<u32>>,
    /// Address of the first chunk ([`NodeScheme::first_chunk`](crate::NodeScheme::first_chunk)).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_chunk: Option<u64>,
    /// Terms that the scheme tells this client.
    #[serde(flatten)]
    pub terms: Terms,
}

/// The bulletin: 8 bytes in the compute node's memory. The memory node's CPU writes them when its
/// free queue runs empty and when memory becomes available again (OneSidedMW §4.3, "detecting empty
/// free MW queue").
///
/// ```text
/// +0 state (be32): 0 available, 1 empty   +4 generation (be32): counts the changes
/// ```
pub mod bulletin {
    /// Free chunks exist.
    pub const AVAILABLE: u32 = 0;
    /// No chunk is free.
    pub const EMPTY: u32 = 1;
    /// Size of the bulletin in bytes.
    pub const BYTES: usize = 8;
}
