//! Between hosts: the control connection over TCP, beside RoCEv2 for the data.
//!
//! ```text
//! compute node                                   memory node, --listen ADDRESS:PORT
//!   TCP   greeting, then the control protocol of the Unix socket        PORT
//!   UDP   RoCEv2: allocation, access, free                              PORT, 4791 unless told
//! ```
//!
//! | module | what it has |
//! | --- | --- |
//! | [`address`] | `roce://HOST:PORT`, and what becomes of it |
//! | [`token`] | the secret that both ends share, and how each proves that it has it |
//! | [`frames`] | messages in a stream of bytes |
//! | [`link`] | a compute node's end of a control connection, local or between hosts |
//! | [`listener`] | where a memory node listens for other hosts |
//! | [`route`] | how a QP reaches its peer on another host |
//! | [`secret`] | what QPs of two hosts begin with: PSNs, and keys that authenticate their packets |
//!
//! The control connection is neither encrypted nor protected against change on the way. Packets of
//! RoCEv2 are not encrypted; each has a tag that only the two ends can make. A third party that
//! reads packets between the hosts reads what is in the pool; one that forges packets changes
//! nothing, unless it can also read the control connection and there is no token. TLS is to take
//! the place of the plain stream in [`link`] and [`frames`]; nothing above them depends on the
//! stream.

pub mod address;
pub mod frames;
pub mod link;
pub mod listener;
pub mod route;
pub mod secret;
pub mod token;

pub use address::RemoteAddress;
pub use listener::{Listen, RemoteListener};
pub use route::{RoceEnd, Route, Start};
pub use secret::ConnectionSecret;
pub use token::Token;
