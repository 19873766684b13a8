//! A key-value index in disaggregated memory.
//!
//! A [`Store`] keeps index and values in the memory of memory nodes, and reaches both with
//! one-sided READ, WRITE and CAS only. The index is RACE hashing (Zuo et al., USENIX ATC 2021): an
//! extendible directory of subtables, two hash choices, and overflow buckets that two main buckets
//! share.
//!
//! ```
//! use kv::environment::System;
//! use kv::pooled::PoolMemory;
//! use kv::{SetOptions, Settings, Store};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let settings = pool::Settings { donate_bytes: 8 << 20, ..Default::default() };
//! let pool = pool::Pool::embedded(settings)?;
//! let memory = PoolMemory::new(pool, 0, heap::Settings::default())?;
//! let store = Store::create_blocking(memory.clone(), memory, System, Settings::default())?;
//!
//! store.set_blocking(0, b"key", b"value", SetOptions::default())?;
//! assert_eq!(store.get_blocking(0, b"key")?.as_deref(), Some(&b"value"[..]));
//! # Ok(())
//! # }
//! ```
//!
//! # Environment
//!
//! The store has no thread, no socket and no clock. Its type parameters are its environment:
//! [`Reach`](reach::Reach) executes lists of verbs, [`Blocks`](blocks::Blocks) allocates,
//! [`Environment`](environment::Environment) has time and randomness. [`pooled`] has the first two
//! over a pool, [`memory`] over the memory of the process, with crashes and interleavings by seed.
//! The caller's background task calls [`Store::sweep`], [`Store::merge`], [`Store::compact`] and
//! [`Blocks::tend`](blocks::Blocks::tend).
//!
//! # Several compute nodes
//!
//! A [`Store`] is the only owner of its index. A [`SharedStore`] is one of several clients that
//! change one index at once. They need a pool of scheme `shared-region`, in which every compute
//! node reaches all memory, and a [`RegionKeeper`](pooled::RegionKeeper), which owns the chunks.
//!
//! ```
//! use kv::environment::System;
//! use kv::pooled::{RegionKeeper, SharedPoolStore, WholePool};
//! use kv::{SetOptions, SharedSettings};
//! use pool::{EmbeddedNode, GroupId, Options, Pool};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let scheme = pool::schemes::find("shared-region")?;
//! let settings = pool::Settings {
//!     donate_bytes: 8 << 20,
//!     chunk_bytes: 64 << 10,
//!     scheme,
//!     ..Default::default()
//! };
//! let node = EmbeddedNode::start(&settings)?.into();
//! let connect = || Pool::embedded_in(&node, Options::default());
//! let keeper = RegionKeeper::start_blocking(connect()?, 0, 100)?;
//! let client = || -> Result<SharedPoolStore, Box<dyn std::error::Error>> {
//!     let memory = WholePool::new_blocking(connect()?, 0, GroupId(0))?;
//!     let settings = SharedSettings::default();
//!     Ok(SharedPoolStore::join_blocking(memory, System, settings, keeper.region())?)
//! };
//! let (one, two) = (client()?, client()?);
//!
//! one.set_blocking(0, b"key", b"value", SetOptions::default())?;
//! assert_eq!(two.get_blocking(0, b"key")?.as_deref(), Some(&b"value"[..]));
//! # Ok(())
//! # }
//! ```
//!
//! # Parts
//!
//! | module | content |
//! | --- | --- |
//! | [`layout`], [`hash`], [`place`] | bytes in remote memory, hash of keys, names of memory |
//! | [`reach`], [`blocks`], [`environment`] | what the store needs |
//! | `store` | the operations |
//! | `table`, `search`, `uses` | what a compute node knows of a subtable; buckets of a key; uses of keys |
//! | `shared` | the operations on an index that several compute nodes change |
//! | [`region`] | the allocator that these compute nodes share |
//! | [`leased`] | their index in objects of a scheme with leases |
//! | [`check`] | runs of both modes by seed, checked for linearizability |
//! | `ticket`, `gate` | order of operations on a key; writers and splits of a subtable |

#![forbid(unsafe_code)]

pub mod blocks;
pub mod check;
pub mod environment;
mod error;
mod gate;
pub mod hash;
pub mod layout;
pub mod leased;
pub mod memory;
pub mod place;
pub mod pooled;
pub mod reach;
pub mod region;
mod search;
mod shared;
mod store;
mod table;
mod ticket;
mod uses;

pub use error::Error;
pub use layout::block::VALUE_MAX;
pub use shared::{SharedSettings, SharedStore, SplitLock};
pub use store::*;
