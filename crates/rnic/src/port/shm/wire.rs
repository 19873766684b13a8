//! The messages of the attach protocol, as JSON, one to a packet of a `SOCK_SEQPACKET` socket.
//!
//! The client speaks first and each request has one response. Before the first request it names the
//! service that it wants, so that a memory node can have one socket for all: [`SERVICE`], which has
//! no response of its own.
//!
//! ```text
//! client                                    host
//! {"service":"nic"}                   ->
//! {"hello":{"version":3,"bytes":8192}} ->
//!   + memfd: the doorbell page
//!                                     <-    {"welcome":{"version":3,"doorbells":1024}}
//!                                           + descriptor: eventfd
//! {"add_memory":{"bytes":4096}}       ->
//!   + memfd
//!                                     <-    {"memory":0}
//! {"verb":{"create_cq":{...}}}        ->
//!                                     <-    {"reply":{"cq":3}}   or   {"error":"..."}
//! ```
//!
//! All memory is the client's, made and paid for by it. It sends a memfd (`MFD_ALLOW_SEALING`, of
//! ordinary pages) that it has mapped already and whose pages are all there; the host maps it and seals
//! it, against shrinking, growing, writing through new mappings, and more seals. From then on nobody
//! can take a page away from the NIC.

use serde::{Deserialize, Serialize};

use super::super::control::{Reply, Verb};

/// The first message of a connection to a NIC.
pub const SERVICE: &str = r#"{"service":"nic"}"#;
/// The version of this protocol.
pub const VERSION: u32 = 3;
/// The most bytes of a message.
pub const MESSAGE_MAX: usize = 32 << 10;
/// The most descriptors of a message.
pub const DESCRIPTORS_MAX: usize = 2;

/// What a client asks.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Opens the function: the first request, and only that.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// Size of the doorbell page, which comes as a descriptor.
        #[serde(default)]
        bytes: u64,
    },
    /// Shares memory, which comes as a descriptor and is mapped whole.
    AddMemory {
        /// Its size, a multiple of the page size.
        bytes: u64,
    },
    /// Ends the sharing of memory. Regions and queues in it keep it for as long as they live.
    RemoveMemory {
        /// Which.
        memory: u32,
    },
    /// A control verb.
    Verb(Verb<Span>),
}

/// A part of shared memory.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// Which memory.
    pub memory: u32,
    /// Its first byte there.
    pub offset: u64,
    /// Its bytes.
    pub bytes: u64,
}

/// What the host answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// The function is open. Carries the descriptor of the eventfd.
    Welcome {
        /// [`VERSION`].
        version: u32,
        /// Doorbells in the page.
        doorbells: u32,
    },
    /// Memory is shared under this number.
    Memory(u32),
    /// The verb was done.
    Reply(Reply),
    /// It was not done.
    Error(String),
}
