//! The `roce` port: connects the NIC to other hosts by RoCEv2 over a UDP socket.
//!
//! ```text
//!            UDP socket                      NIC thread
//!  kernel ──recvmmsg, GRO──> check ICRC ──> Engine::receive ─┐
//!                                                            ├─ Engine::poll
//!  kernel <─sendmmsg, GSO── seal with ICRC <── Outbox <──────┘
//! ```
//!
//! Any NIC with a thread ([`super::shm::Host`]) can have this port. Its QPs then connect to QPs of
//! other NICs as well as to QPs of the same NIC. The socket never blocks. A packet that the kernel
//! does not accept is lost, as on a network, and the transport retransmits it.
//!
//! # Strength of the ICRC check
//! The ICRC covers the identification field of the IPv4 header, which a UDP socket does not report
//! to the receiver. So over IPv4 the difference between the received ICRC and the ICRC for
//! identification 0 must be the effect of some identification
//! ([`crate::wire::icrc::check_unidentified`]). One in 65,536 damaged packets passes this check,
//! instead of one in 2^32. Over IPv6, which has no such field, the whole ICRC is checked.

mod batch;
mod coalesce;
mod udp;

pub use udp::RoceSocket;
