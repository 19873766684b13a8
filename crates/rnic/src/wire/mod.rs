//! RoCEv2 without I/O: packets, and what a connection to a QP of another NIC remembers.
//!
//! ```text
//!   datagram ──> engine: QP ──> ICRC or tag ──> Packet::parse ──┬─> Responder: requests
//!                                                               └─> Requester: answers
//!   outbox  ──> Outbox::seal (the port) ──> datagram
//!     ^
//!     └── Packet::encode_headers <── engine, in the QP's turns <── what the two say is next
//! ```
//!
//! Nothing here knows of sockets, threads, clocks, memory or keys. Packets are the payload of UDP datagrams
//! to port [`UDP_PORT`]; the port has the addresses, so it makes and checks the ICRC. Tags need no
//! addresses: the engine makes and checks them.

pub(crate) mod dialogue;
pub(crate) mod guesses;
pub mod icrc;
pub mod mac;
mod outbox;
mod pace;
pub mod packet;
mod peer;
mod psn;
pub(crate) mod requester;
pub(crate) mod responder;
mod stats;

pub use mac::{PairSecret, Side};
pub(crate) use outbox::{ALIGNED, Ending, LONG_BURST};
pub use outbox::{Burst, Envelope, Outbox, Outgoing};
pub use packet::{Malformed, Packet};
pub use peer::{PathMtu, PeerAddress, RemotePeer};
pub use stats::WireStats;

/// The UDP port of RoCEv2, assigned by IANA.
pub const UDP_PORT: u16 = 4791;
