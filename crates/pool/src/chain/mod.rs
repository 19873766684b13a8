//! What schemes by chains share: programs that re-arm themselves, the free queue and how it is worked
//! on, and what the memory node has for a compute node's requests.
//!
//! - [`program`]: writes WQEs into a ring whose instances re-arm themselves.
//! - [`layout`]: the table, the free queue and the steering table, byte by byte.
//! - [`push`]: how an entry comes back into the free queue.
//! - [`direction`]: the queues of one kind of request of one compute node.
//! - [`reclaimer`]: what the CPU posts in a chain's place.
//! - [`notice`]: telling compute nodes of empty and of available again.

pub mod direction;
pub mod layout;
pub mod notice;
pub mod program;
pub mod push;
pub mod reclaimer;

/// Immediate data of every reply: nothing is in it, the reply's memory has the answer.
pub const REPLY_IMM: u32 = 0;
