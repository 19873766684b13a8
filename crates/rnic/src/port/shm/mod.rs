//! The `shm` port: the NIC is a thread, and processes attach to it.
//!
//! ```text
//!  process of the NIC                                         another process
//!  ┌───────────────────────────────────────────┐              ┌──────────────────────┐
//!  │ NIC thread: Engine                        │   memfd      │                      │
//!  │   scans doorbells <───────────────────────┼── page ──────┼── MappedDoorbell     │
//!  │   fetches WQEs, moves data, writes CQEs <─┼── memfds ────┼── rings, buffers     │
//!  │   sleeps on eventfds <────────────────────┼── eventfd ───┼── wakes it           │
//!  │        ▲ mailbox                          │              │                      │
//!  │ LocalFunction     Session <── caller's ───┼── socket ────┼── Attached           │
//!  │                               event loop  │              │                      │
//!  └───────────────────────────────────────────┘              └──────────────────────┘
//! ```
//!
//! - [`Host`] owns the NIC thread. The functions of its own process are [`LocalFunction`]s.
//! - [`Session`] is the host's side of an attached process: requests in, replies out, no socket.
//! - [`Attached`] is the other process's side.
//! - `sharing.rs` says under which conditions a client's memory becomes the NIC's as well.
//! - [`wire`] are the messages, [`socket`] moves them and the descriptors with them.
//!
//! The data path needs neither lock nor system call as long as both sides are awake; see the
//! doorbell page (`doorbell.rs`) for how they wake each other.

mod aside;
mod bells;
mod client;
mod doorbell;
mod host;
mod nic_thread;
pub mod peer;
mod seat;
mod session;
mod sharing;
pub mod socket;
#[cfg(test)]
mod tests;
pub mod wire;

/// Where the words of a doorbell page lie, for tests that write them raw ([`Attached::raw`]).
pub mod raw {
    pub use super::doorbell::{DOORBELLS, EVENTS, SLEEPING, WAITER, WHERE};
}

pub use client::{Attached, Raw};
pub use doorbell::MappedDoorbell;
pub use host::{Host, HostStats, LocalFunction};
pub use peer::Peer;
pub use session::{Session, SessionLimits};
pub use wire::Secret;
