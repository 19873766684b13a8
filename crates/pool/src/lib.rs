//! The memory pool: memory nodes donate RAM, compute nodes allocate it in chunks and reach it with
//! one-sided operations.
//!
//! Crate [`scheme`] defines the interface of an allocation scheme on both sides; crate [`schemes`]
//! has the schemes. All code is written against the verbs; [`edge`] alone chooses the NIC.
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
//!
//! A [`Grant`] is the right to use a chunk:
//!
//! ```
//! # let settings = pool::Settings { donate_bytes: 8 << 20, ..pool::Settings::default() };
//! # let pool = pool::Pool::embedded(settings)?;
//! let grant = pool.allocate_blocking()?;
//! assert_eq!(grant.len, pool.chunk_bytes());
//! assert_eq!(grant.keys().len(), usize::from(pool.lanes()));
//!
//! // After the free, the keys of every copy are dead.
//! pool.free_blocking(grant)?;
//! let refused = pool.write_blocking(&grant, 0, b"late");
//! assert!(matches!(refused, Err(pool::Error::Access { .. })));
//! # Ok::<(), pool::Error>(())
//! ```

mod address;
pub mod client;
mod cpu;
pub mod edge;
pub mod join;
pub mod metrics;
mod multi;
pub mod nic;
mod node;
pub mod protocol;
pub mod remote;
mod service;
mod settings;
pub mod socket;

/// The cipher of a [`SealedPool`].
pub use seal::Cipher;

pub use scheme::{
    CasStats, ClientId, ConnectReply, ConnectRequest, DomainToken, Error, Grant, GroupId, Lane,
    LeaseTerms, NodeStatus, Object, Opens, Others, Permission, Right, Scheme, SchemeInfo, Sharing,
};
pub use schemes::onesidedmw::Budget;
pub use schemes::rpc::ControlMode;
/// The contract of an allocation scheme, and the schemes.
pub use {scheme, schemes};

pub use address::{Address, LocalNic, Remote};
pub use client::control::ControlPlane;
pub use client::lend::{BorrowedLanes, Direction, Finished, LaneTransfer, LentLanes};
pub use client::{
    Batch, Buffer, ChunkMemory, EmbeddedNode, Operation, Options, Pool, PoolStats, SealedBlock,
    SealedError, SealedPool, Step, Transfer,
};
pub use edge::{BorrowedMemory, DefaultNic, map_frames};
pub use multi::{MultiPool, NodeIndex, PlacedGrant, Placement};
pub use node::{MemoryNode, NodeThreads};
pub use protocol::ChunkPart;
pub use remote::{Listen, RemoteAddress, Token};
pub use service::{NicService, Service};
pub use settings::Settings;
pub use socket::Endpoint;
