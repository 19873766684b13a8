//! RoCEv2 without I/O: packets, and the state of a connection to a QP of another NIC.
//!
//! ```text
//!   datagram ──> engine: QP ──> ICRC or tag ──> Packet::parse ──┬─> Responder: requests
//!                                                               └─> Requester: responses
//!   outbox  ──> Outbox::seal (the port) ──> datagram
//!     ^
//!     └── Packet::encode_headers <── engine, in the QP's quantum <──┬── Requester::next
//!                                                                   └── Responder::output
//! ```
//!
//! This module uses no sockets, threads, clocks, memory or keys. Packets are the payload of UDP
//! datagrams to port [`UDP_PORT`]. The ICRC covers addresses, so the NIC's port
//! (`crate::port::roce`) computes and checks it. Authentication tags do not cover addresses: the
//! engine computes and checks them.

mod congestion;
pub(crate) mod guess_limiter;
pub mod icrc;
pub mod mac;
mod outbox;
pub mod packet;
mod peer;
pub(crate) mod piggyback;
pub(crate) mod requester;
pub(crate) mod responder;
mod stats;

pub(crate) use outbox::{ALIGNED, Ending, LONG_BURST};
pub use outbox::{Burst, Envelope, Outbox, Outgoing};
pub use packet::{Malformed, Packet};
pub use peer::{check_peer, fitting_mtu};
pub use stats::WireStats;

/// The UDP port of RoCEv2, assigned by IANA.
pub const UDP_PORT: u16 = 4791;
