//! OneSidedMW: allocation and release as work-request chains that the memory node's NIC executes
//! (OneSidedMW §3 to §5).
//!
//! ```text
//!  compute node                         memory node
//!  ------------                         -----------
//!  Alloc QP  == SEND qpns, reply ====>  Alloc QP   RQ: scatters the arguments into the chain
//!            <== WRITE_IMM grant =====             SQ: the reply, then RECV_EN (the credit)
//!                                       worker W ==loopback==> W'   the allocation chain
//!  Free QP   == SEND entry, reply ===>  Free QP    likewise
//!            <== WRITE_IMM status ====
//!                                       worker F ==loopback==> F'   the free chain
//!  Access QPs == READ WRITE CAS FAA =>  Access QPs (one window of each group for each)
//! ```
//!
//! - [`layout`]: the table, the free queue and the steering table, byte by byte.
//! - [`program`]: writes WQEs into a ring whose instances re-arm themselves.
//! - [`alloc_chain`], [`free_chain`]: the two chains.
//! - [`node`]: the memory node's side, with `connection` (what it has for one compute node), `repair`
//!   and `in_flight` (chains that stopped, connections that are closed), `reclaim` (compute nodes that
//!   are gone) and `budget`; [`client`]: the compute node's side.
//!
//! Where this differs from the paper's figure 5, and why:
//! - An empty queue is an answer. A counter of permits steers the chain through a table, so that
//!   the head never passes a slot that is not filled and nothing has to be repaired.
//! - A slot is taken by one masked CAS that swaps a zero in; entries are pushed by a SEND into a
//!   shared receive queue whose order is the tail. (FAA on a tail, then a WRITE, shows allocators
//!   empty slots although the pool is not empty.)
//! - The worker queues are loopback pairs, because FAA and READ on the memory node's own memory
//!   cannot run on a QP whose peer is the compute node.
//! - The guard window is bound to the free worker F, to which no compute node can post: the proof
//!   of ownership is its unbinding with the QP check.
//! - The reply is a WRITE with immediate, so that the compute node can sleep until it comes; a free
//!   has a reply too.
//! - Chunks are cleared before they are free again.

pub mod alloc_chain;
mod audit;
mod budget;
pub mod client;
mod connection;
pub mod free_chain;
mod in_flight;
pub mod node;
mod reclaim;
mod repair;

pub use crate::chain::{layout, program};
pub use client::Client;
pub use node::Node;

#[cfg(test)]
mod tests;
