//! The control protocol between a compute node and its memory node: connection set-up and rare
//! operations that the CPU executes. Allocations and accesses do not use it.
//!
//! ```text
//! compute node                                         memory node
//!   {"service":"pool","version":3}           ->
//!                                            <-        {"id":0,"reply":"welcome","scheme":..}
//!   {"id":1,"request":"admit",..}            ->        creates the peers of the listed QPs
//!                                            <-        {"id":1,"reply":"admitted",..}
//!   {"id":2,"request":"await_memory",..}     ->
//!   {"id":3,"request":"status"}              ->
//!                                            <-        {"id":3,"reply":"status",..}
//!                (once a chunk is free)      <-        {"id":2,"reply":"memory",..}
//!   {"id":4,"request":"goodbye"}             ->        revokes its keys, reclaims its chunks
//! ```
//!
//! - A message is one JSON object in one datagram of a `SOCK_SEQPACKET` Unix socket, at most
//!   [`MAX_BYTES`].
//! - The first message selects the service of the memory node's process: `nic` (an attached
//!   function of its NIC, which uses a protocol of its own from then on), `pool`, or `chunks` (the
//!   memory of the chunks as files, from a private memory node only: one reply, then the end).
//! - A reply carries the `id` of its request. Replies may arrive in another order than requests.
//! - A message that cannot be decoded is answered with `error` and never ends the process that
//!   reads it. Unknown fields are ignored; an unknown version is refused, and the reply names it.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Error;
use crate::remote::token::Nonce;
use crate::remote::{RoceEnd, domain};
use crate::settings::Settings;
use scheme::options::Terms;
use scheme::{ConnectReply, ConnectRequest, DomainToken, NodeSettings, NodeStatus, Offer};
use verbs::SessionSecret;

/// Version of this protocol and of the layouts that compute nodes access directly in a memory node.
pub const VERSION: u32 = 3;
/// Maximum size of a message in bytes.
pub const MAX_BYTES: usize = crate::socket::MESSAGE_MAX;

/// The first message on a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opening {
    /// `nic`, `pool` or `chunks`.
    pub service: String,
    /// Version of the service's protocol. The `nic` service sends it in its first request instead.
    #[serde(default)]
    pub version: u32,
    /// Proof that the client has the token. Only from another host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proof: Option<String>,
}

impl Opening {
    /// The opening of a connection to the pool.
    pub fn pool() -> Self {
        Self { service: "pool".into(), version: VERSION, proof: None }
    }

    /// The opening of a connection that asks for the chunk memory.
    pub fn chunks() -> Self {
        Self { service: "chunks".into(), version: VERSION, proof: None }
    }
}

/// A request with its number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Numbered<T> {
    /// Chosen by the sender of the request; 0 is reserved for the opening.
    pub id: u64,
    /// The request or reply.
    #[serde(flatten)]
    pub body: T,
}

/// A request of a compute node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Request {
    /// Create the peers of the listed QPs and register the sender as a compute node.
    Admit(Box<Admission>),
    /// Answer once a chunk is free, or after the timeout.
    AwaitMemory {
        /// Timeout in milliseconds.
        timeout_ms: u64,
    },
    /// Return the state of the memory node.
    Status,
    /// The sender's management QPs are in Reset: re-establish the memory node's side.
    ResetManagement {
        /// Salt for the initial state of the QPs. Only from another host.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        salt: Option<Nonce>,
    },
    /// Return whether the memory node's sides of the management QPs execute requests. Sent when an
    /// answer on these QPs is overdue.
    ManagementState,
    /// An access QP of the sender is in Reset: re-establish the memory node's side.
    ResetAccess {
        /// The QP group.
        group: u16,
        /// Index of the QP in its group, as in the admission.
        lane: u8,
        /// Salt for the initial state of the QP. Only from another host.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        salt: Option<Nonce>,
    },
    /// Check that every chunk is exactly once free or owned.
    Audit,
    /// The sender leaves: reclaim its chunks.
    Goodbye,
}

/// A reply of the memory node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reply {
    /// Reply to the opening.
    Welcome(NodeHello),
    /// Reply to `admit`.
    Admitted(ConnectReply),
    /// Reply to `await_memory`.
    Memory {
        /// True: a chunk is free. False: the timeout has passed.
        available: bool,
    },
    /// Reply to `status`.
    Status(Box<Status>),
    /// Reply to `reset_management`: the peers, in the scheme's order.
    Management {
        /// QP numbers.
        peers: Vec<u32>,
    },
    /// Reply to `management_state`.
    ManagementState {
        /// False: pending requests on the management QPs will not be answered.
        open: bool,
    },
    /// Reply to `reset_access`.
    Access {
        /// QP number.
        peer: u32,
    },
    /// Reply to the opening of service `chunks`. The files of these parts come with it, in the same
    /// order.
    Chunks {
        /// Parts of the chunk memory.
        parts: Vec<ChunkPart>,
    },
    /// Reply to `audit` and `goodbye`.
    Done,
    /// Reply to `reset_management` of a compute node that is over a budget.
    OverBudget {
        /// The budget, and how to stay within it.
        why: String,
        /// Milliseconds after which the request may be repeated.
        retry_after_ms: u64,
    },
    /// Reply to `admit` when no slot is free for this compute node.
    Full {
        /// The limit that was reached.
        why: String,
    },
    /// The request was refused or could not be decoded.
    Error {
        /// The reason.
        why: String,
    },
}

/// A part of the memory of chunks, which is a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkPart {
    /// Address of its first byte, as grants name it.
    pub address: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// A request to be admitted, with the parts that concern the path to the compute node's QPs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admission {
    /// The scheme's part.
    #[serde(flatten)]
    pub connect: ConnectRequest,
    /// Secret of the NIC session that owns these QPs. Only from a compute node on the memory node's
    /// host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<SessionSecret>,
    /// Port and MTU of the compute node's NIC. Only from another host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roce: Option<RoceEnd>,
    /// Salt from which the initial state of the QPs is derived. Only from another host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub salt: Option<Nonce>,
    /// Token of the compute node's domain. Only from a compute node on the memory node's host.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "domain")]
    pub domain: Option<DomainToken>,
    /// Proof that the compute node has the token of its domain. Only from another host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain_proof: Option<String>,
}

/// First reply of a memory node, sent before the compute node creates its QPs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeHello {
    /// Protocol version of the memory node.
    pub version: u32,
    /// The scheme's part.
    #[serde(flatten)]
    pub offer: Offer,
    /// Random number of this start of the memory node. Because a restart invalidates all grants, a
    /// changed number identifies stale ones.
    #[serde(default)]
    pub incarnation: u64,
    /// The limit that currently leaves no free slot for another compute node. The compute node may
    /// still send other requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub full: Option<String>,
    /// Port and MTU of the memory node's NIC. Only to another host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roce: Option<RoceEnd>,
    /// Proof that the memory node has the token. Only to another host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proof: Option<String>,
    /// True if the packets of both ends carry authentication tags. Only to another host.
    #[serde(default)]
    pub authenticated: bool,
    /// [`Settings::client_timeout`](crate::Settings::client_timeout) of the memory node. Only to
    /// another host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_timeout_ms: Option<u64>,
}

impl NodeHello {
    /// Time for which each end of the connection may be unreachable for the other.
    pub fn client_timeout(&self) -> Duration {
        self.client_timeout_ms.map_or(Settings::CLIENT_TIMEOUT, Duration::from_millis)
    }

    /// The reply of a memory node with these settings, whose windows are in `functions` functions
    /// of its NIC, without the fields for other hosts.
    pub fn of(settings: &NodeSettings, functions: u32, incarnation: u64, own: Terms) -> Self {
        let mut terms = version_3_terms();
        terms.extend(own);
        Self {
            version: VERSION,
            offer: Offer::new(settings, functions, terms),
            incarnation,
            full: None,
            roce: None,
            proof: None,
            authenticated: false,
            client_timeout_ms: None,
        }
    }
}

/// Fields that version 3 of this protocol has in the terms of every scheme.
fn version_3_terms() -> Terms {
    [
        ("control", Value::from("event")),
        ("budget_chunks", Value::Null),
        ("separation", Value::from(true)),
        ("contention_control", Value::from(true)),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .collect()
}

/// The state of a memory node. CPU times are nanoseconds since its start. The NIC thread stands for
/// hardware, so its time is never part of the memory node's CPU time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The scheme's part.
    #[serde(flatten)]
    pub node: NodeStatus,
    /// Bytes donated to the pool.
    pub donated_bytes: u64,
    /// Bytes of chunks that are not free.
    #[serde(default)]
    pub held_bytes: u64,
    /// Upper limit, in bytes, of free chunks that stay resident ([`crate::Settings::kept_bytes`]).
    #[serde(default)]
    pub kept_bytes: u64,
    /// Memory private to the memory node's process: chunks, metadata, NIC tables, its own heap.
    /// Memory that clients share with it is excluded.
    #[serde(default)]
    pub resident_bytes: u64,
    /// Milliseconds since the start.
    pub uptime_ms: u64,
    /// CPU time of the control threads, which is the memory node's CPU time.
    pub control_cpu_ns: u64,
    /// Wake-ups of the control threads.
    pub control_wakeups: u64,
    /// CPU time of the NIC thread.
    pub nic_cpu_ns: u64,
    /// Wake-ups of the NIC thread.
    pub nic_wakeups: u64,
    /// Scheduling of the NIC thread, and the reason why it is not a better one; empty if no better
    /// one was asked for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub nic_scheduling: String,
    /// 1 if CPU-bound threads can delay the NIC thread: SCHED_RR was not granted or not asked for.
    #[serde(default)]
    pub nic_ordinary: u64,
    /// Work-queue elements that the NIC executed.
    pub nic_wqes: u64,
    /// Ports of the NIC: `shm`, or `shm and roce`.
    pub nic: String,
    /// Errors that did not stop the memory node.
    #[serde(default)]
    pub trouble: Trouble,
    /// Packets from other hosts that the NIC dropped.
    #[serde(default)]
    pub dropped: Dropped,
    /// Counters of the NIC by their full names: see [`Status::samples`].
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub nic_counters: BTreeMap<String, u64>,
}

/// Packets from other hosts that the NIC dropped, by reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Dropped {
    /// The destination QP does not exist.
    pub unknown_qp: u64,
    /// The source address is not that of the QP's peer.
    pub strangers: u64,
    /// The authentication tag is missing or wrong.
    pub forged: u64,
    /// The tag is correct but the packet is too old: a replay.
    pub outdated: u64,
    /// The destination QP has received too many packets with wrong tags.
    pub guessed: u64,
    /// The packet is corrupt or is no RoCEv2 packet.
    pub spoilt: u64,
}

/// Errors since the start of a memory node that cost one connection or some time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trouble {
    /// Connections that were closed because a system call for them failed.
    pub connections: u64,
    /// Failed attempts to accept a connection for lack of descriptors or memory. Each was repeated.
    pub accepts: u64,
    /// Departed compute nodes that are not retired yet because the NIC refused it. They keep their
    /// chunks, and the memory node tries again.
    pub unretired: u64,
    /// The most recent of these errors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<String>,
}

impl Status {
    /// Memory figures of this process, a memory node with these settings, and its scheme's state.
    /// The remaining fields are zero.
    pub(crate) fn of(settings: &Settings, node: NodeStatus) -> Self {
        let held_bytes = node.chunks.saturating_sub(node.free) * node.chunk_bytes;
        Self {
            donated_bytes: settings.chunks() * settings.chunk_bytes,
            held_bytes,
            kept_bytes: settings.kept_bytes() as u64,
            resident_bytes: crate::cpu::resident_bytes(),
            node,
            ..Self::default()
        }
    }
}

/// Encodes a message. Fails if it is longer than [`MAX_BYTES`].
pub fn encode<T: Serialize>(attempt: &str, message: &T) -> Result<Vec<u8>, Error> {
    let bytes = serde_json::to_vec(message)
        .map_err(|e| Error::Protocol { attempt: attempt.into(), why: e.to_string() })?;
    if bytes.len() > MAX_BYTES {
        let why = format!("the message has {} bytes; the maximum is {MAX_BYTES}", bytes.len());
        return Err(Error::Protocol { attempt: attempt.into(), why });
    }
    Ok(bytes)
}

/// Decodes a message. The error names `attempt` and the cause.
pub fn decode<T: DeserializeOwned>(attempt: &str, bytes: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(bytes).map_err(|e| Error::Protocol {
        attempt: attempt.into(),
        why: format!("invalid message: {e}; use the same release on both sides"),
    })
}

/// The `id` of a request that cannot be decoded otherwise, so that the refusal can name it.
pub fn id_of(bytes: &[u8]) -> u64 {
    #[derive(Deserialize)]
    struct Id {
        id: u64,
    }
    serde_json::from_slice::<Id>(bytes).map_or(0, |i| i.id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn round_trip<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(message: T) {
        let bytes = encode("test", &message).unwrap();
        assert_eq!(decode::<T>("test", &bytes).unwrap(), message);
    }

    #[test]
    fn messages_are_read_back() {
        round_trip(Opening::pool());
        let admission = ConnectRequest {
            management: vec![1, 2],
            groups: vec![vec![3, 4], vec![5, 6]],
            bulletin_addr: u64::MAX,
            bulletin_rkey: 0x1234_5678,
            ..ConnectRequest::default()
        };
        let admission = Admission { connect: admission, ..Admission::default() };
        let body = Request::Admit(Box::new(admission));
        round_trip(Numbered { id: 1, body });
        let (domain, proof) = (Some(DomainToken([0xa5; 32])), Some("12".into()));
        let admission = Admission { domain, domain_proof: proof, ..Admission::default() };
        let body = Request::Admit(Box::new(admission));
        assert_eq!(serde_json::to_value(&body).unwrap()["domain"], "a5".repeat(32));
        round_trip(Numbered { id: 1, body });
        round_trip(Numbered { id: u64::MAX, body: Request::AwaitMemory { timeout_ms: 5 } });
        round_trip(Numbered {
            id: 2,
            body: Request::ResetAccess { group: 3, lane: 1, salt: None },
        });
        round_trip(Numbered { id: 3, body: Request::Goodbye });
        round_trip(Numbered { id: 3, body: Request::ManagementState });
        round_trip(Numbered { id: 3, body: Reply::ManagementState { open: false } });
        let status = Status { nic: "shm".into(), nic_cpu_ns: 7, ..Status::default() };
        round_trip(Numbered { id: 4, body: Reply::Status(Box::new(status)) });
        round_trip(Numbered { id: 5, body: Reply::Management { peers: vec![7, 8] } });
        round_trip(Numbered { id: 6, body: Reply::Error { why: "no".into() } });
        let parts = vec![ChunkPart { address: u64::MAX, bytes: 4096 }];
        round_trip(Numbered { id: 0, body: Reply::Chunks { parts } });
    }

    #[test]
    fn the_wire_form_is_as_documented() {
        let bytes = encode("test", &Numbered { id: 3, body: Request::Status }).unwrap();
        assert_eq!(bytes, br#"{"id":3,"request":"status"}"#);
        let opening = encode("test", &Opening::pool()).unwrap();
        assert_eq!(opening, br#"{"service":"pool","version":3}"#);
    }

    #[test]
    fn messages_of_a_scheme_have_their_fields_beside_the_others() {
        let settings = Settings { credits: 8, ..Settings::default() }.node().unwrap();
        let terms = scheme::options::terms(&serde_json::json!({ "budget_chunks": 9 }));
        let hello = Reply::Welcome(NodeHello::of(&settings, 1, 7, terms));
        let expected = serde_json::json!({
            "id": 0, "reply": "welcome", "version": 3, "scheme": "onesidedmw", "control": "event",
            "chunk_bytes": 1 << 20, "chunks": 256, "group_size": 3, "functions": 1, "spares": 0,
            "credits": 8, "groups_max": 64, "incarnation": 7, "budget_chunks": 9,
            "separation": true, "contention_control": true, "authenticated": false,
        });
        let message = Numbered { id: 0, body: hello };
        assert_eq!(serde_json::to_value(&message).unwrap(), expected);
        round_trip(message);
        let roce = Some(RoceEnd { port: 4791, mtu: verbs::PathMtu::Mtu1024 });
        let body = Request::Admit(Box::new(Admission { roce, ..Admission::default() }));
        let admission = serde_json::to_value(&Numbered { id: 1, body }).unwrap();
        let names: Vec<_> = admission.as_object().unwrap().keys().map(String::as_str).collect();
        let fields = ["bulletin_addr", "bulletin_rkey", "groups", "id", "management", "request"];
        assert_eq!(names, [&fields[..], &["roce"]].concat());
    }

    #[test]
    fn admission_may_lack_the_address_of_the_first_chunk() {
        let old = br#"{"id":1,"reply":"admitted","client":4,"chunk_bytes":4096,"group_size":3,
            "credits":8,"management":[7],"groups":[[8,9]]}"#;
        let Reply::Admitted(old) = decode::<Numbered<Reply>>("test", old).unwrap().body else {
            panic!("another reply");
        };
        assert_eq!((old.first_chunk, old.terms.len()), (None, 0));
        let text = |reply: &ConnectReply| serde_json::to_string(reply).unwrap();
        assert!(!text(&old).contains("first_chunk"), "a scheme by pages has none");
        let new = ConnectReply { first_chunk: Some(u64::MAX), ..old };
        assert!(text(&new).contains(r#""first_chunk":18446744073709551615"#));
        round_trip(Numbered { id: 1, body: Reply::Admitted(new) });
    }

    #[test]
    fn decode_error_names_the_unknown_request() {
        let unknown = br#"{"id":9,"request":"reboot"}"#;
        let e = decode::<Numbered<Request>>("reading", unknown).unwrap_err().to_string();
        assert!(e.contains("reboot"), "{e}");
        assert_eq!(id_of(unknown), 9);
        assert_eq!(id_of(b"\xff"), 0);
    }

    #[test]
    fn the_largest_admission_fits() {
        use scheme::MAX_GROUP;
        let group = vec![0xff_ffff; MAX_GROUP];
        let admission = ConnectRequest {
            management: vec![0xff_ffff; 2],
            groups: vec![group; Settings::GROUPS_MAX as usize],
            bulletin_addr: u64::MAX,
            bulletin_rkey: u32::MAX,
            ..ConnectRequest::default()
        };
        let domain = Some(DomainToken([0xff; 32]));
        let admission = Admission { connect: admission, domain, ..Admission::default() };
        encode("test", &Numbered { id: u64::MAX, body: Request::Admit(Box::new(admission)) })
            .unwrap();
    }

    proptest! {
        #[test]
        fn decoding_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode::<Numbered<Request>>("test", &bytes);
            let _ = decode::<Numbered<Reply>>("test", &bytes);
            let _ = decode::<Opening>("test", &bytes);
            let _ = id_of(&bytes);
        }

        #[test]
        fn decoding_damaged_messages_never_panics(
            at in 0usize..80,
            byte in any::<u8>(),
            group in any::<u16>(),
        ) {
            let body = Request::ResetAccess { group, lane: 0, salt: None };
            let message = Numbered { id: 1, body };
            let mut bytes = encode("test", &message).unwrap();
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = decode::<Numbered<Request>>("test", &bytes);
        }
    }
}
