//! The control protocol between a compute node and its memory node: connection set-up and what is
//! rare enough to be left to the CPU. No allocation and no access passes here.
//!
//! ```text
//! compute node                                         memory node
//!   {"service":"pool","version":3}           ->
//!                                            <-        {"id":0,"reply":"welcome","scheme":..}
//!   {"id":1,"request":"admit",..}            ->        makes the peers of the QPs it names
//!                                            <-        {"id":1,"reply":"admitted",..}
//!   {"id":2,"request":"await_memory",..}     ->
//!   {"id":3,"request":"status"}              ->
//!                                            <-        {"id":3,"reply":"status",..}
//!                                            <-        {"id":2,"reply":"memory",..}   (when it is there)
//!   {"id":4,"request":"goodbye"}             ->        its keys die, its chunks come back
//! ```
//!
//! - A message is one JSON object in one datagram of a `SOCK_SEQPACKET` Unix socket, at most
//!   [`MAX_BYTES`].
//! - The first message says which service of the memory node's process the connection is for:
//!   `nic` (an attached function of its NIC, a protocol of its own from then on) or `pool`.
//! - Replies carry their request's `id` and may come in another order.
//! - What cannot be understood is answered by `error`; it never ends the process that reads it.
//!   Unknown fields are ignored; an unknown version is refused by name.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::remote::RoceEnd;
use crate::remote::token::Nonce;
use crate::scheme::{Admission, Admitted, NodeStatus};
use crate::settings::{ControlMode, SchemeKind, Settings};

/// Version of this protocol, and of what compute nodes read and write in a memory node by themselves.
pub const VERSION: u32 = 3;
/// The most bytes of a message.
pub const MAX_BYTES: usize = rnic::port::shm::wire::MESSAGE_MAX;

/// The first message on a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opening {
    /// `nic` or `pool`.
    pub service: String,
    /// Version of that service's protocol; `nic` states it in its own first request.
    #[serde(default)]
    pub version: u32,
    /// From another host: that who connects has the token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proof: Option<String>,
}

impl Opening {
    /// The opening of a connection to the pool.
    pub fn pool() -> Self {
        Self { service: "pool".into(), version: VERSION, proof: None }
    }
}

/// A request with its number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Numbered<T> {
    /// Chosen by who asks; 0 is the opening's.
    pub id: u64,
    /// The request or reply.
    #[serde(flatten)]
    pub body: T,
}

/// What a compute node asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Request {
    /// Make the peers of my QPs and count me among your compute nodes.
    Admit(Admission),
    /// Answer when there are free chunks, or when the time is over.
    AwaitMemory {
        /// How long, in milliseconds.
        timeout_ms: u64,
    },
    /// What is the state of the memory node?
    Status,
    /// My management QPs are in Reset: re-establish your side.
    ResetManagement {
        /// From another host: drawn for what they begin with.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        salt: Option<Nonce>,
    },
    /// Do my management QPs take requests at your side? Asked by who waits long for an answer to one.
    ManagementState,
    /// An access QP of mine is in Reset: re-establish your side.
    ResetAccess {
        /// The QP group.
        group: u16,
        /// The QP in the group, by its place in the admission.
        lane: u8,
        /// From another host: drawn for what it begins with.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        salt: Option<Nonce>,
    },
    /// Is every chunk exactly once free or owned?
    Audit,
    /// I leave: take back what I own.
    Goodbye,
}

/// What the memory node answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reply {
    /// To the opening.
    Welcome(Welcome),
    /// To `admit`.
    Admitted(Admitted),
    /// To `await_memory`.
    Memory {
        /// True: there are free chunks. False: the time is over.
        available: bool,
    },
    /// To `status`.
    Status(Box<Status>),
    /// To `reset_management`: the peers, in the scheme's order.
    Management {
        /// QP numbers.
        peers: Vec<u32>,
    },
    /// To `management_state`.
    ManagementState {
        /// False: what was asked over them is not answered any more.
        open: bool,
    },
    /// To `reset_access`.
    Access {
        /// QP number.
        peer: u32,
    },
    /// To `audit` and `goodbye`.
    Done,
    /// To `reset_management` of a compute node that is over a budget.
    OverBudget {
        /// Which budget, and what to do.
        why: String,
        /// Ask again after so many milliseconds.
        retry_after_ms: u64,
    },
    /// To `admit`: no place is left for this compute node.
    Full {
        /// Which limit was reached.
        why: String,
    },
    /// The request was refused, or not understood.
    Error {
        /// Why.
        why: String,
    },
}

/// What a memory node says of itself before a compute node makes its QPs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Version of the protocol that it speaks.
    pub version: u32,
    /// The allocation scheme.
    pub scheme: SchemeKind,
    /// How its CPU learns of requests.
    pub control: ControlMode,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Chunks in all.
    #[serde(default)]
    pub chunks: u64,
    /// Windows of a group, the guard included.
    pub group_size: u32,
    /// Functions of the memory node's NIC that windows are in. A group has access QPs for each of them; those of the
    /// first come first.
    #[serde(default = "one")]
    pub functions: u32,
    /// Requests of one kind that a compute node may have in flight.
    pub credits: u32,
    /// QP groups that a compute node may have.
    pub groups_max: u32,
    /// Which start of the memory node this is: a random number. What was granted before a restart is
    /// of no use after it.
    #[serde(default)]
    pub incarnation: u64,
    /// Chunks that a compute node may hold, if that is limited.
    #[serde(default)]
    pub budget_chunks: Option<u64>,
    /// See [`crate::Settings::separation`].
    #[serde(default = "yes")]
    pub separation: bool,
    /// See [`crate::Settings::contention_control`].
    #[serde(default = "yes")]
    pub contention_control: bool,
    /// No place is left for a compute node of this connection now: which limit was reached. It can
    /// still ask.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub full: Option<String>,
    /// To another host: what the memory node's NIC is reached by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roce: Option<RoceEnd>,
    /// To another host: that the memory node has the token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proof: Option<String>,
    /// To another host: the packets of its QPs, and those that they get, have tags.
    #[serde(default)]
    pub authenticated: bool,
}

impl Welcome {
    /// What a memory node with these settings says, whose windows are in so many functions of its NIC; nothing yet of
    /// other hosts.
    pub fn of(settings: &Settings, functions: u32, incarnation: u64) -> Self {
        let s = settings;
        Self {
            version: VERSION,
            scheme: s.scheme,
            control: s.control,
            chunk_bytes: s.chunk_bytes,
            chunks: s.chunks(),
            group_size: s.group_size,
            functions,
            credits: s.credits,
            groups_max: s.groups_max,
            incarnation,
            budget_chunks: s.budget.chunks,
            separation: s.separation,
            contention_control: s.contention_control,
            full: None,
            roce: None,
            proof: None,
            authenticated: false,
        }
    }
}

fn yes() -> bool {
    true
}

fn one() -> u32 {
    1
}

/// The state of a memory node. CPU times are nanoseconds since it started; the NIC's thread plays
/// the hardware and is never counted as the memory node's CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The scheme's part.
    #[serde(flatten)]
    pub node: NodeStatus,
    /// Bytes donated.
    pub donated_bytes: u64,
    /// Bytes of chunks that are not free.
    #[serde(default)]
    pub held_bytes: u64,
    /// Bytes of free chunks that keep their RAM, at most ([`crate::Settings::kept_bytes`]).
    #[serde(default)]
    pub kept_bytes: u64,
    /// RAM that the memory node's process has for itself: chunks, metadata, tables of the NIC, the
    /// program's own. Memory that its clients share with it is not among it.
    #[serde(default)]
    pub resident_bytes: u64,
    /// Milliseconds since it started.
    pub uptime_ms: u64,
    /// CPU time of the control threads: this is the memory node's CPU.
    pub control_cpu_ns: u64,
    /// How often a control thread woke up.
    pub control_wakeups: u64,
    /// CPU time of the thread that plays the NIC.
    pub nic_cpu_ns: u64,
    /// How often the NIC thread woke up.
    pub nic_wakeups: u64,
    /// Work-queue elements that the NIC executed.
    pub nic_wqes: u64,
    /// The ports that the NIC serves: `shm`, or `shm and roce`.
    pub nic: String,
    /// What went wrong without ending the memory node.
    #[serde(default)]
    pub trouble: Trouble,
    /// Packets of other hosts that the NIC has dropped.
    #[serde(default)]
    pub dropped: Dropped,
}

/// Packets of other hosts that the NIC has dropped, by reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Dropped {
    /// For queue pairs that there are not.
    pub unknown_qp: u64,
    /// From another address than that of the queue pair's peer.
    pub strangers: u64,
    /// Without the tag of their connection.
    pub forged: u64,
    /// With the right tag, and too old: recorded, and sent again.
    pub outdated: u64,
    /// For queue pairs at which a sender without a key has guessed too often.
    pub guessed: u64,
    /// Spoilt on the way, or no packets of RoCEv2.
    pub spoilt: u64,
}

/// What has gone wrong at a memory node since it started, and cost one connection or some time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trouble {
    /// Connections that were ended because a system call for them failed.
    pub connections: u64,
    /// How often no connection could be accepted, for want of descriptors or memory. It was tried
    /// again.
    pub accepts: u64,
    /// Compute nodes that have gone and could not be retired yet: the NIC refused it. Their chunks
    /// stay theirs, and it is tried again.
    pub unretired: u64,
    /// The last of these errors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<String>,
}

impl Status {
    /// The memory of a memory node with these settings, which is in this process, and what the
    /// scheme says of it; the rest is zero.
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
        let why = format!("the message has {} bytes, at most {MAX_BYTES} fit", bytes.len());
        return Err(Error::Protocol { attempt: attempt.into(), why });
    }
    Ok(bytes)
}

/// Decodes a message; what is wrong with it otherwise.
pub fn decode<T: DeserializeOwned>(attempt: &str, bytes: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(bytes)
        .map_err(|e| Error::Protocol { attempt: attempt.into(), why: e.to_string() })
}

/// The number of a request that cannot be decoded otherwise, so that the refusal names it.
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
        let admission = Admission {
            management: vec![1, 2],
            groups: vec![vec![3, 4], vec![5, 6]],
            bulletin_addr: u64::MAX,
            bulletin_rkey: 0x1234_5678,
            ..Admission::default()
        };
        round_trip(Numbered { id: 1, body: Request::Admit(admission) });
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
    }

    #[test]
    fn the_wire_form_is_as_documented() {
        let bytes = encode("test", &Numbered { id: 3, body: Request::Status }).unwrap();
        assert_eq!(bytes, br#"{"id":3,"request":"status"}"#);
        let opening = encode("test", &Opening::pool()).unwrap();
        assert_eq!(opening, br#"{"service":"pool","version":3}"#);
    }

    #[test]
    fn what_is_not_understood_is_an_error_that_says_so() {
        let unknown = br#"{"id":9,"request":"reboot"}"#;
        let e = decode::<Numbered<Request>>("reading", unknown).unwrap_err().to_string();
        assert!(e.contains("reboot"), "{e}");
        assert_eq!(id_of(unknown), 9);
        assert_eq!(id_of(b"\xff"), 0);
    }

    #[test]
    fn the_largest_admission_fits() {
        use crate::scheme::MAX_GROUP;
        let group = vec![0xff_ffff; MAX_GROUP];
        let admission = Admission {
            management: vec![0xff_ffff; 2],
            groups: vec![group; Settings::GROUPS_MAX as usize],
            bulletin_addr: u64::MAX,
            bulletin_rkey: u32::MAX,
            ..Admission::default()
        };
        encode("test", &Numbered { id: u64::MAX, body: Request::Admit(admission) }).unwrap();
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
            let message = Numbered { id: 1, body: Request::ResetAccess { group, lane: 0, salt: None } };
            let mut bytes = encode("test", &message).unwrap();
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = decode::<Numbered<Request>>("test", &bytes);
        }
    }
}
