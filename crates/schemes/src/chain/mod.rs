//! Parts that the chain-based schemes (OneSidedMW, ODRP) share: self-re-arming programs, the free
//! queue, and the memory node's queues for one client.
//!
//! - [`program`]: writes WQEs into a ring whose instances re-arm themselves.
//! - [`layout`]: the table, the free queue and the steering table, byte by byte.
//! - [`push_queue`]: returns an entry to the free queue.
//! - [`queues`]: the queues of one request kind of one client.
//! - [`in_flight`]: the resources that a stopped chain holds.
//! - [`reclaimer`]: the CPU's loopback QP, which releases entries in place of a chain.
//! - [`availability`]: broadcasts "empty" and "available again" to the clients.

pub mod availability;
pub mod in_flight;
pub mod layout;
pub mod program;
pub mod push_queue;
pub mod queues;
pub mod reclaimer;

/// Immediate data of every reply. Unused: the reply is in the memory that the WRITE fills.
pub const REPLY_IMM: u32 = 0;
