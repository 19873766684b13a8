//! The messages of the attach protocol, as JSON, one to a packet of a `SOCK_SEQPACKET` socket.
//!
//! The client speaks first and each request has one response. Before the first request it names the
//! service that it wants, so that a memory node can have one socket for all: [`SERVICE`], which has
//! no response of its own.
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
//! All memory is the client's, made and paid for by it. It sends a memfd (`MFD_ALLOW_SEALING`, of
//! ordinary pages) that it has mapped already and whose pages are all there; the host maps it and seals
//! it, against shrinking, growing, writing through new mappings, and more seals. From then on nobody
//! can take a page away from the NIC.

use std::fmt;

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};

use super::super::control::{Reply, Verb};

/// The first message of a connection to a NIC.
pub const SERVICE: &str = r#"{"service":"nic"}"#;
/// The version of this protocol.
pub const VERSION: u32 = 4;
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
        /// The session's secret, which only its client hears.
        secret: Secret,
    },
    /// Memory is shared under this number.
    Memory(u32),
    /// The verb was done.
    Reply(Reply),
    /// It was not done.
    Error(String),
}

/// A session's secret: 128 random bits, 32 hexadecimal digits in messages.
///
/// A client proves with it, over another connection to the host's process, that the session is its own.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Secret(u128);

impl Secret {
    /// A new one.
    pub fn random() -> Result<Self, Errno> {
        let mut bytes = [0; 16];
        match getrandom(&mut bytes[..], GetRandomFlags::empty()) {
            Ok(16) => Ok(Self(u128::from_ne_bytes(bytes))),
            // Up to 256 bytes come whole.
            Ok(_) | Err(Errno::INTR) => Self::random(),
            Err(e) => Err(e),
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl From<Secret> for String {
    fn from(secret: Secret) -> Self {
        format!("{:032x}", secret.0)
    }
}

impl TryFrom<String> for Secret {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let bits = u128::from_str_radix(&text, 16).ok().filter(|_| digits);
        bits.map(Self).ok_or("a session's secret has 32 hexadecimal digits")
    }
}
