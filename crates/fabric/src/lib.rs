//! RDMA verbs as a trait.
//!
//! All code above the NIC is written once, against [`Nic`] and its objects: it posts work requests,
//! polls completions, and waits for single completions ([`completion`]). The NIC is chosen in one
//! place, where a program starts.
//!
//! The verbs follow libibverbs and have its names. [`direct`] adds what `mlx5dv` adds: queues whose
//! rings the owner can see and program.

mod backoff;
pub mod completion;
pub mod conformance;
pub mod direct;
mod error;
pub mod executor;
pub mod interposed;
pub mod soft;
pub mod verbs;
mod wc;
mod work;

pub use backoff::Backoff;
pub use error::Error;
pub use rnic::ids::{Access, Cqn, Key, KeyIndex, Psn, Qpn};
pub use rnic::memory::{DmaMemory, PrefetchFor, Zeros};
pub use rnic::verbs::{AsyncEvent, MwKind, SrqInfo};
pub use rnic::wire::{PairSecret, PathMtu, PeerAddress, RemotePeer, Side as SecretSide};
pub use rnic::wqe::{self, Remote, Sge};
pub use verbs::{
    Caps, CompletionQueue, CqAttr, DeviceInfo, Events, Feature, Guards, MemoryRegion, MemoryWindow,
    Nic, QpAttr, QpChange, QpInfo, QpState, QueuePair, Receive, ReceiveAttr, ReceiveQueue, Rereg,
};
pub use wc::{Completion, CompletionKind, Status, WcOpcode};
pub use work::{Bind, Data, Op, ReceiveRequest, SendFlags, WorkRequest};
