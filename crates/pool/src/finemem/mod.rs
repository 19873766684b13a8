//! FineMem: the compute node allocates by itself, with READ and CAS on a bitmap tree in the memory node.
//!
//! ```text
//! compute node                                     memory node's memory
//!   allocate   CAS header ─────────────────────────► span or section: bits and temporary log, committed
//!              READ log, READ header, CAS log ─────► full log of the block
//!              READ capability ◄──────────────────── its key: a window was bound ahead
//!   access     READ, WRITE, atomics under that key, on its access QPs
//!   free       CAS capability ─────────────────────► quarantined
//!                                                    scan (CPU): rebind, clear, new key, bits cleared
//! ```
//!
//! - Scheme `premmap-onesided` is the same with a free array in the tree's place ([`array`]).
//! - [`header`], [`log`] and [`layout`] are the words, [`tree`] is what is done with them.
//! - The metadata is opened to the management QP of each compute node by a type-2 window that is bound to
//!   that QP. Who runs on a compute node and has access QPs only cannot reach it, whatever he guesses.
//! - Windows over the blocks are of type 1, since nobody knows who will use one when it is bound. Where the NIC has
//!   guarded windows, each asks the full log whose its block is; elsewhere a key is 8 bits of tag away from each
//!   compute node's access QPs (OneSidedMW §2.3), as in `rpc-mw-1`.
//! - A compute node is trusted with the metadata (FineMem §4.3): it is a service that allocates for the
//!   applications there.
//! - A block that is freed is given to nobody before its old key is dead and it is cleared. Scheme `finemem-paper`
//!   frees at once, as published; it is unsafe, and there to be compared with (`release`).

pub mod array;
mod audit;
mod books;
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

pub use books::Books;
pub use client::Client;
pub use node::Node;
pub use scan::ReleaseTimes;
