//! RDMA verbs as a trait.
//!
//! All code above the NIC is written once, against [`Nic`] and its objects: it posts work requests,
//! polls completions, and waits for single completions ([`completion`]). The NIC is chosen in one
//! place, where a program starts.
//!
//! The verbs follow libibverbs and have its names. [`direct`] adds what `mlx5dv` adds: queues whose
//! rings the owner can see and program, in the ConnectX layouts. [`conformance`] is a test suite
//! that every NIC passes.

mod attributes;
mod backoff;
mod caps;
pub mod completion;
pub mod conformance;
pub mod direct;
mod error;
mod events;
pub mod executor;
mod ids;
pub mod memory;
mod nic;
mod peer;
mod psn;
mod region_engine;
mod session;
mod wc;
mod work;

pub use attributes::{CqAttr, MwKind, QpChange, QpInfo, QpState, ReceiveAttr, SrqInfo};
pub use backoff::Backoff;
pub use caps::{Caps, DeviceInfo, Feature};
pub use direct::wqe::{Remote, Sge};
pub use direct::{cqe, wqe};
pub use error::Error;
pub use events::{AsyncEvent, Events};
pub use ids::{Access, Cqn, FunctionId, Key, KeyIndex, Pdn, Psn, Qpn, Srqn};
pub use memory::{DmaMemory, PrefetchFor, Zeros};
pub use nic::{
    COARSE_LAG, CompletionQueue, Guards, MemoryRegion, MemoryWindow, Nic, QpAttr, QueuePair,
    Receive, ReceiveQueue, Rereg,
};
pub use peer::{PairSecret, PathMtu, PeerAddress, RemotePeer, SecretSide};
pub use region_engine::RegionEngine;
pub use session::SessionSecret;
pub use wc::{Completion, CompletionKind, Status, WcOpcode};
pub use work::{Bind, Data, Op, ReceiveRequest, SendFlags, WorkRequest};
