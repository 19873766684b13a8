//! The memory pool: memory nodes donate RAM, compute nodes allocate it in chunks and reach it with
//! one-sided operations.
//!
//! [`scheme`] defines the interface of an allocation scheme on both sides; each scheme has a module
//! of its own. All code is written against the verbs; [`edge`] alone chooses the NIC.
//!
//! ```
//! use pool::{Pool, Settings};
//!
//! let pool = Pool::embedded(Settings { donate_bytes: 8 << 20, ..Settings::default() })?;
//! let grant = pool.allocate_blocking()?;
//! pool.write_blocking(&grant, 4096, b"hello")?;
//! let mut out = [0; 5];
//! pool.read_blocking(&grant, 4096, &mut out)?;
//! assert_eq!(&out, b"hello");
//! assert_eq!(pool.fetch_and_add_blocking(&grant, 0, 1)?, 0);
//! pool.free_blocking(grant)?;
//! # Ok::<(), pool::Error>(())
//! ```

mod address;
pub mod blocks;
pub mod budget;
pub mod chain;
pub mod client;
pub mod client_table;
pub mod conformance;
mod cpu;
mod credits;
pub mod edge;
mod error;
pub mod finemem;
pub mod index;
pub mod info;
pub mod metrics;
mod multi;
pub mod nic;
mod node;
pub mod odrp;
pub mod onesidedmw;
pub mod options;
pub mod protocol;
pub mod registry;
pub mod remote;
pub mod request_queue;
pub mod rpc;
pub mod scheme;
pub mod schemes;
mod service;
mod settings;
mod socket;
pub mod wakeup;

pub use address::{Address, LocalNic, Remote};
pub use budget::Budget;
pub use client::control::ControlPlane;
pub use client::{Batch, Buffer, EmbeddedNode, Operation, Options, Pool, PoolStats, Transfer};
pub use edge::DefaultNic;
pub use error::Error;
pub use info::{Scheme, SchemeInfo};
pub use multi::{MultiPool, NodeIndex, PlacedGrant, Placement};
pub use node::{MemoryNode, NodeThreads};
pub use remote::{Listen, RemoteAddress, Token};
pub use rpc::ControlMode;
pub use scheme::{
    CasStats, ClientId, ConnectReply, ConnectRequest, Grant, GroupId, Lane, NodeStatus,
};
pub use service::{NicService, Service};
pub use settings::Settings;
pub use socket::Endpoint;
