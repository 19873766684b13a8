//! The interface of an allocation scheme.
//!
//! A scheme has two sides. On the memory node a [`NodeScheme`] admits compute nodes: it creates the
//! QPs that are the peers of theirs, and does the work that the scheme assigns to the CPU. On the
//! compute node a [`ClientScheme`] allocates and frees chunks with verbs alone.
//!
//! *Released* means the same in every scheme: every key of the chunk is dead, no admitted access
//! is pending, the chunk is cleared, in that order; only then may it be allocated again.

//!
//! | module | content |
//! | --- | --- |
//! | [`info`] | facts about a scheme, as data |
//! | [`node`], [`client`] | the two sides of a scheme |
//! | [`lease`] | objects, permissions and leases |
//! | [`registry`] | registration of schemes |
//! | [`connect`], [`options`] | messages of a connection, settings and terms of a scheme |
//! | [`request_queue`] | the requests of a client over a management QP |
//! | [`mailbox`] | the same, with replies in any order |
//! | [`client_table`] | the clients of a memory node |
//! | [`conformance`] | checks that every scheme passes |

pub mod client;
pub mod client_table;
pub mod conformance;
pub mod connect;
pub mod credits;
mod error;
mod grant;
mod ids;
pub mod index;
pub mod info;
pub mod lease;
pub mod mailbox;
pub mod node;
pub mod options;
pub mod registry;
pub mod request_queue;
pub mod route;
mod settings;
pub mod status;
pub mod wakeup;

pub use client::{
    Access, Answer, Atomic, ClientScheme, PageAccess, RpcAccess, check_whole_page, too_large,
    unknown,
};
pub use connect::{ConnectReply, ConnectRequest, DomainToken, Offer, bulletin};
pub use error::Error;
pub use grant::{ConnectionEpoch, Grant};
pub use ids::{ClientId, GroupId, Lane, MAX_GROUP, QPS_MAX, QpSet};
pub use info::{Scheme, SchemeInfo};
pub use lease::{
    CompareAndSwap, LeaseScheme, LeaseTerms, Object, Opens, Others, Permission, Right, Sharing,
};
pub use node::{Cpu, CpuEvents, NodeScheme, Worker};
pub use route::Start;
pub use settings::{CHUNKS_MAX, NodeSettings, require};
pub use status::{BudgetStatus, CasStats, Counter, LeaseStatus, NodeStatus, Use};
