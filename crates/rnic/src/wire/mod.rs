//! RoCEv2 without I/O: packets, and what a connection to a QP of another host remembers.
//!
//! ```text
//!   datagram ──> icrc::check (the port) ──> Packet::parse ──> engine ──┬─> responder: requests
//!                                                                      └─> requester: answers
//!   outbox  <── icrc::seal (the port) <── Packet::encode  <── engine, in the QP's turns
//! ```
//!
//! Nothing here knows of sockets, threads or clocks. Packets are the payload of UDP datagrams to port
//! [`UDP_PORT`]; the port has the addresses, so it makes and checks the ICRC.

pub mod icrc;
pub mod packet;
mod peer;
mod psn;

pub use packet::{Malformed, Packet};
pub use peer::{PathMtu, PeerAddress, RemotePeer};

/// The UDP port of RoCEv2, assigned by IANA.
pub const UDP_PORT: u16 = 4791;
