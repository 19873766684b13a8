//! The `roce` port: the NIC's way to other hosts, RoCEv2 over a UDP socket.
//!
//! ```text
//!            UDP socket                      NIC thread
//!  kernel ──recvmmsg, GRO──> check ICRC ──> Engine::receive ─┐
//!                                                            ├─ Engine::poll
//!  kernel <─sendmmsg, GSO── seal with ICRC <── Outbox <──────┘
//! ```
//!
//! Any NIC with a thread ([`super::shm::Host`]) can have one: then its QPs talk to those of other NICs as well
//! as to its own. The socket never blocks. What the kernel does not take is lost, as on a network, and sent
//! again by the transport.
//!
//! # What of the ICRC is checked
//! It covers the IPv4 header's identification, of which a UDP socket is not told. So over IPv4 the
//! difference between the ICRC that is there and the one for identification 0 must be one that some identification
//! makes ([`crate::wire::icrc::check_unidentified`]): of damaged packets one in 65536 passes, where it would be one in 2^32.
//! Over IPv6, which has no such field, the whole of it is checked.

mod batch;
mod gather;
mod udp;

pub use udp::Wire;
