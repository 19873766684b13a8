//! Messages of the attach protocol: JSON, one message in each packet of a `SOCK_SEQPACKET` socket.
//!
//! The client sends requests, and the host sends one response to each. Before the first request the
//! client sends [`SERVICE`], which has no response: it names the requested service, so that a
//! memory node can offer several services on one socket.
//!
//! ```text
//! client                                    host
//! {"service":"nic"}                   ->
//! {"hello":{"version":4,"bytes":8192}} ->
//!   + memfd: the doorbell page
//!                                     <-    {"welcome":{"version":4,"doorbells":1024,
//!                                             "secret":"5f0c..."}}
//!                                           + descriptor: eventfd
//! {"add_memory":{"bytes":4096}}       ->
//!   + memfd
//!                                     <-    {"memory":0}
//! {"verb":{"create_cq":{...}}}        ->
//!                                     <-    {"reply":{"cq":3}}   or   {"error":"..."}
//! ```
//!
//! The client allocates all shared memory, and is charged for it. It sends a memfd
//! (`MFD_ALLOW_SEALING`, ordinary pages) that it has already mapped and fully populated. The host
//! maps the memfd and seals it against shrinking, growing, writing through new mappings, and
//! further seals. From then on no process can take a page away from the NIC (`sharing.rs`).

use serde::{Deserialize, Serialize};
use verbs::SessionSecret;

use super::super::control::{Reply, Verb};

/// The first message of a connection to a NIC.
pub const SERVICE: &str = r#"{"service":"nic"}"#;
/// The version of this protocol.
pub const VERSION: u32 = 4;
/// Maximum bytes of a message.
pub const MESSAGE_MAX: usize = 32 << 10;
/// Maximum descriptors of a message.
pub const DESCRIPTORS_MAX: usize = 2;

/// A request of a client.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Opens the function. Must be the first request, and sent once.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// Size of the doorbell page, whose descriptor accompanies the message.
        #[serde(default)]
        bytes: u64,
    },
    /// Shares memory, whose descriptor accompanies the message. The host maps the whole of it.
    AddMemory {
        /// Its size, a multiple of the page size.
        bytes: u64,
    },
    /// Ends the sharing of memory. Existing regions and queues keep the memory mapped until they
    /// end.
    RemoveMemory {
        /// The memory's number.
        memory: u32,
    },
    /// A control verb.
    Verb(Verb<Span>),
}

/// A part of shared memory.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// The memory's number.
    pub memory: u32,
    /// Offset of the first byte in the memory.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// A response of the host.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// The function is open. Carries the descriptor of the eventfd.
    Welcome {
        /// [`VERSION`].
        version: u32,
        /// Doorbells in the page.
        doorbells: u32,
        /// The session's secret, which is sent to its client only.
        secret: SessionSecret,
    },
    /// Memory is shared under this number.
    Memory(u32),
    /// The verb succeeded.
    Reply(Reply),
    /// The request failed, for this reason.
    Error(String),
}
