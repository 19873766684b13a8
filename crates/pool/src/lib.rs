//! The memory pool: memory nodes donate RAM, compute nodes allocate it in chunks and reach it with
//! one-sided operations.
//!
//! [`scheme`] says what an allocation scheme is, on both sides; each scheme has a module of its
//! own. Nothing here names a NIC: all of it is written against `fabric`'s verbs.

mod any;
pub mod client;
mod cpu;
mod credits;
mod error;
mod events;
mod node;
pub mod onesidedmw;
pub mod protocol;
pub mod rpc_mw;
pub mod scheme;
mod service;
mod settings;
mod socket;

pub use any::{AnyClient, AnyNode};
pub use client::control::{ControlPlane, Embedded};
pub use client::{Batch, Buffer, Operation, Options, Pool, PoolStats, Transfer};
pub use error::Error;
pub use node::{MemoryNode, Turner};
pub use scheme::{Admission, Admitted, ClientId, Grant, GroupId, Lane, NodeStatus};
pub use service::Service;
pub use settings::{ControlMode, SchemeKind, Settings};
pub use socket::Endpoint;
