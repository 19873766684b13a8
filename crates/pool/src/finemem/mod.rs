//! FineMem: the client allocates by itself, with READ and CAS on a bitmap tree in the memory node.
//!
//! ```text
//! compute node                                     memory node's memory
//!   allocate   CAS header ─────────────────────────► span or section: commits bits and log
//!              READ log, READ header, CAS log ─────► full log of the block
//!              READ capability ◄──────────────────── its key: the window is already bound
//!   access     READ, WRITE, atomics under that key, on its access QPs
//!   free       CAS capability ─────────────────────► quarantined
//!                                         scan (CPU): rebind, clear, new key, clear bits
//! ```
//!
//! - Scheme `premmap-onesided` is the same with a free array in place of the tree ([`mod@array`]).
//! - [`header`], [`log`] and [`layout`] define the words; [`tree`] has the operations on them.
//! - The metadata is accessible to each client's management QP through a type-2 window that is
//!   bound to that QP. A process that has only access QPs cannot reach the metadata, whatever key
//!   it guesses.
//! - Windows over the blocks are of type 1, because the QP that will use a block is not yet known
//!   when its window is bound. If the NIC has guarded windows, each window checks the owner in the
//!   block's full log. Otherwise only 8 bits of key tag protect a block from other clients' access
//!   QPs (OneSidedMW §2.3), as in `rpc-mw-1`.
//! - A client is trusted with the metadata (FineMem §4.3): it is a service that allocates for the
//!   applications of its compute node.
//! - A freed block is not reallocated before its old key is dead and it has been cleared. Scheme
//!   `finemem-paper` reallocates at once, as published; it is unsafe, and exists for comparison
//!   (`release`).

mod allocation_view;
pub mod array;
mod audit;
pub mod block;
mod client;
mod effort;
mod function;
pub mod header;
mod keys;
pub mod layout;
pub mod log;
mod map;
mod node;
mod peer;
mod release;
mod scan;
mod table;
pub mod tree;
mod words;

pub use allocation_view::AllocationView;
pub use client::Client;
pub use node::Node;
pub use scan::ReleaseTimes;
