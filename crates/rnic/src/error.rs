//! Why a control verb was refused.
//!
//! Errors of work requests are not here: they are completions with a [`crate::cqe::Syndrome`].

use crate::ids::{Cqn, FunctionId, KeyIndex, Pdn, Qpn, Srqn};
use crate::verbs::{QpChange, QpState};
use std::fmt;

/// An object of the NIC, as errors name it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Object {
    /// A function.
    Function(FunctionId),
    /// A protection domain.
    Pd(Pdn),
    /// A memory region or window.
    Key(KeyIndex),
    /// A completion queue.
    Cq(Cqn),
    /// A shared receive queue.
    Srq(Srqn),
    /// A queue pair.
    Qp(Qpn),
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Object::Function(id) => write!(f, "function {}", id.0),
            Object::Pd(n) => write!(f, "PD {n}"),
            Object::Key(n) => write!(f, "key index {n}"),
            Object::Cq(n) => write!(f, "CQ {n}"),
            Object::Srq(n) => write!(f, "SRQ {n}"),
            Object::Qp(n) => write!(f, "QP {n}"),
        }
    }
}

/// A control verb that was refused. Nothing was changed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// No such object, or no longer.
    #[error("there is no {0}; it was never made or has been destroyed")]
    Unknown(Object),
    /// The object belongs to another function.
    #[error("{object} belongs to another function than {caller:?}; use objects of one's own")]
    Foreign {
        /// What was named.
        object: Object,
        /// Who named it.
        caller: FunctionId,
    },
    /// Others depend on the object.
    #[error("{object} is still used by {users} {by}; destroy or unbind those first")]
    InUse {
        /// What should have ended.
        object: Object,
        /// How many users it has.
        users: u32,
        /// What they are.
        by: &'static str,
    },
    /// A limit of the function or of the NIC is reached.
    #[error("no more {what}: the limit is {limit}; free some or raise the limit")]
    Limit {
        /// What there is no more of.
        what: &'static str,
        /// How many there may be.
        limit: u64,
    },
    /// An argument that no NIC could accept.
    #[error("{what} is {value}, but must be {must}")]
    Argument {
        /// Which argument.
        what: &'static str,
        /// What it was.
        value: u64,
        /// What it must be.
        must: &'static str,
    },
    /// Memory too small for what it should hold.
    #[error("{what} needs {need} bytes of memory, but {have} were given")]
    TooSmall {
        /// What it should hold.
        what: &'static str,
        /// Bytes that it needs.
        need: u64,
        /// Bytes that there are.
        have: u64,
    },
    /// A transition that the state machine of queue pairs does not have (IBTA vol. 1, §10.3.1).
    #[error("QP {qpn} is in {from:?}, where {change:?} is not possible")]
    Transition {
        /// The queue pair.
        qpn: Qpn,
        /// Where it is.
        from: QpState,
        /// What was to change.
        change: QpChange,
    },
    /// The verb needs a managed queue.
    #[error("the {queue} queue of QP {qpn} is not a managed one; make it with `managed` set")]
    NotManaged {
        /// The queue pair.
        qpn: Qpn,
        /// `send` or `receive`.
        queue: &'static str,
    },
    /// This NIC cannot talk to others.
    #[error(
        "QP {qpn} cannot be connected to another NIC: this one has no wire; make it with \
         `Limits::wire` set, or connect QPs of this NIC"
    )]
    NoWire {
        /// The queue pair.
        qpn: Qpn,
    },
    /// Another QP of this NIC is connected to that QP.
    #[error("QP {peer} at {address} is the peer of QP {by} here; reset that one first")]
    PeerTaken {
        /// Where the peer is.
        address: std::net::SocketAddr,
        /// The peer.
        peer: Qpn,
        /// Who is connected to it.
        by: Qpn,
    },
    /// Addresses between which no packet can go.
    #[error(
        "no packet goes from {local} to {address}; name two single addresses of the same kind, and a port"
    )]
    Address {
        /// The peer's.
        address: std::net::SocketAddr,
        /// One's own.
        local: std::net::IpAddr,
    },
    /// A right that only the physical function has.
    #[error("{what} is for the physical function only, and the caller is {caller:?}")]
    NotPermitted {
        /// What was wanted.
        what: &'static str,
        /// Who wanted it.
        caller: FunctionId,
    },
}
