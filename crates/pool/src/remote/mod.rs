//! Connections between hosts: the control connection over TCP, and RoCEv2 for data.
//!
//! ```text
//! compute node                                   memory node, --listen ADDRESS:PORT
//!   TCP   greeting, then the control protocol of the Unix socket        PORT
//!   UDP   RoCEv2: allocation, access, free                              PORT, 4791 by default
//! ```
//!
//! | module | content |
//! | --- | --- |
//! | [`address`] | the address form `roce://HOST:PORT` and its resolution |
//! | [`domain`] | the token of a domain, and its proof |
//! | [`token`] | the shared secret, and its proof by either end |
//! | [`frames`] | framing of messages in a byte stream |
//! | [`link`] | a compute node's end of a control connection, local or between hosts |
//! | [`listener`] | listening for compute nodes on other hosts |
//! | [`route`] | addressing of a QP's peer on another host |
//! | [`secret`] | initial state of QPs between hosts: PSNs, and keys that authenticate packets |
//!
//! The control connection is neither encrypted nor protected against modification. RoCEv2 packets
//! are not encrypted; each carries a tag that only the two ends can compute. A third party that
//! reads the packets between the hosts can read the pool's data. A third party that forges packets
//! changes nothing, unless it can also read the control connection and no token is set. TLS is to
//! replace the plain stream in [`link`] and [`frames`]; no other module depends on the stream.

pub mod address;
pub mod domain;
pub mod frames;
pub mod link;
pub mod listener;
pub mod route;
pub mod secret;
pub mod token;

pub use address::RemoteAddress;
pub use listener::{Listen, RemoteListener};
pub use route::{RoceEnd, Route, Start, roce_end};
pub use secret::ConnectionSecret;
pub use token::Token;
