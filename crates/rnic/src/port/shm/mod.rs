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
//! - `sharing.rs` defines the conditions under which the NIC accepts a client's memory.
//! - [`protocol`] defines the messages; [`socket`] transfers them together with their descriptors.
//!
//! The data path needs neither a lock nor a system call while both sides are awake. `page.rs`
//! describes the doorbell page, by which the sides wake each other.

mod client;
mod deferred_close;
mod doorbell;
mod doorbell_scanner;
mod driver;
mod host;
mod idle;
mod lend;
mod nic_thread;
mod page;
pub mod peer;
pub mod protocol;
mod session;
mod sharing;
pub mod socket;
#[cfg(test)]
mod tests;

/// Offsets of the words of a doorbell page, for tests that access them directly
/// ([`Attached::raw`]).
pub mod raw {
    pub use super::page::{DOORBELLS, EVENTS, SLEEPING, WAITER, WHERE};
}

pub use client::{Attached, Raw};
pub use doorbell::MappedDoorbell;
pub use host::{Host, HostStats, LocalFunction, ThinFile};
pub use lend::{ARENA_MAX, BorrowedFunction, BorrowedMemory, LendableMemory, map_shared};
pub use peer::Peer;
pub use session::{Session, SessionLimits};
