//! The memory pool: memory nodes donate RAM, compute nodes allocate it in chunks and reach it with
//! one-sided operations.
//!
//! [`scheme`] says what an allocation scheme is, on both sides; each scheme has a module of its
//! own. Nothing here but the service names a NIC: all of it is written against `fabric`'s verbs.
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
mod any;
pub mod budget;
pub mod chain;
pub mod client;
mod cpu;
mod credits;
mod error;
mod events;
pub mod finemem;
mod node;
pub mod odrp;
pub mod onesidedmw;
mod pools;
pub mod protocol;
pub mod remote;
pub mod rpc;
pub mod scheme;
mod service;
mod settings;
mod socket;

pub use address::{Address, LocalNic, Remote};
pub use any::{AnyClient, AnyNode};
pub use budget::Budget;
pub use client::control::ControlPlane;
pub use client::{Batch, Buffer, Embedded, Operation, Options, Pool, PoolStats, Transfer};
pub use error::Error;
pub use node::{MemoryNode, Turner};
pub use pools::{NodeIndex, Placed, Placement, Pools};
pub use remote::{Listen, RemoteAddress, Token};
pub use scheme::{Admission, Admitted, ClientId, Effort, Grant, GroupId, Lane, NodeStatus};
pub use service::{NicService, Service};
pub use settings::{ControlMode, SchemeKind, Settings};
pub use socket::Endpoint;
