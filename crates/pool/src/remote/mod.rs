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
//!
//! What is said on the connection is neither encrypted nor protected against change on the way, and the
//! packets of RoCEv2 are not either: who can read and forge packets between the hosts can read and change
//! what is in the pool. The token keeps out those who cannot. TLS takes the place of the plain stream
//! in [`link`] and [`frames`]; nothing above them knows the difference.

pub mod address;
pub mod frames;
pub mod link;
pub mod listener;
pub mod route;
pub mod token;

pub use address::RemoteAddress;
pub use listener::{Listen, RemoteListener};
pub use route::{RoceEnd, Route};
pub use token::Token;
