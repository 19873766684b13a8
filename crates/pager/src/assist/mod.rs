//! The assist: a process in the role of the SmartNIC of SAMS ("Path Separation").
//!
//! ```text
//!   paged process (host)                    assist, one for each run
//!  +--------------------------+  ring     +--------------------------+
//!  | handler: demand READs    |           | session of each host     |
//!  |   inner transport -------|---------------------------------------> memory node
//!  | prefetch, write-back  ---|---------> |   mover -----------------|--> memory node
//!  |   frames <---------------|-----------|                          |
//!  +--------------------------+  memfds   +--------------------------+
//! ```
//!
//! Each paged process of `granary run --assist process` has a *session*: a [`ring`] of page lists,
//! and a [`mover`] that moves the pages between the host's frames and the memory node. The
//! synchronous path of a fault stays in the host.
//!
//! | module | responsibility |
//! | --- | --- |
//! | [`ring`] | layout of the ring, validation of requests, sleep of both sides |
//! | `protocol`, `socket` | set-up of a session by packets with descriptors |
//! | [`link`] | the host's end of a session |
//! | [`transport`] | the host's transport: posts requests, and repeats them when the assist ends |
//! | [`mover`] | ways to move pages |
//! | `session`, [`server`] | the assist's process |
//!
//! The death of the assist costs speed only. The assist trusts no host: it validates each request,
//! and ends the session of a host that violates the layout. Other sessions go on.

pub mod link;
pub mod mover;
pub mod protocol;
pub mod ring;
pub mod server;
mod session;
mod socket;
pub mod transport;

#[cfg(test)]
mod tests;
