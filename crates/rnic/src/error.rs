//! Errors of control verbs.
//!
//! Failed work requests produce completions with a [`verbs::cqe::Syndrome`], not these errors.

use std::fmt;
use verbs::{Cqn, FunctionId, KeyIndex, Pdn, QpChange, QpState, Qpn, Srqn};

/// An object of the NIC, as an error names it.
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

/// The reason why a control verb was rejected. A rejected verb has changed nothing.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// The object does not exist, or no longer exists.
    #[error("there is no {0}; it was never created or has been destroyed")]
    Unknown(Object),
    /// The object belongs to another function.
    #[error(
        "{object} belongs to another function than {caller:?}; name an object of the calling \
         function"
    )]
    Foreign {
        /// The named object.
        object: Object,
        /// The calling function.
        caller: FunctionId,
    },
    /// The system gave no random number for the number of a new object.
    #[error("cannot draw a random number for {what}: {errno}; permit the system call getrandom")]
    Random {
        /// The objects that have random numbers.
        what: &'static str,
        /// The system's error.
        errno: rustix::io::Errno,
    },
    /// Other objects depend on the object.
    #[error("{object} is still used by {users} {by}; destroy or unbind those first")]
    InUse {
        /// The object to destroy or change.
        object: Object,
        /// Number of its users.
        users: u32,
        /// Kind of its users.
        by: &'static str,
    },
    /// The region has an engine, so it cannot be changed.
    #[error(
        "key index {0} is that of a region behind an engine, which cannot be changed; deregister \
         it and register another region"
    )]
    HasEngine(KeyIndex),
    /// A limit of the function or of the NIC is reached.
    #[error("no more {what}: the limit is {limit}; free some or raise the limit")]
    Limit {
        /// The exhausted resource.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// An argument is invalid on every NIC.
    #[error("{what} is {value}, but must be {must}")]
    Argument {
        /// The argument.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The condition that it violates.
        must: &'static str,
    },
    /// A memory range is smaller than the object needs.
    #[error("{what} needs {need} bytes of memory, but {have} bytes were given")]
    TooSmall {
        /// The object that needs the memory.
        what: &'static str,
        /// Bytes needed.
        need: u64,
        /// Bytes given.
        have: u64,
    },
    /// The state machine of queue pairs has no such transition (IBTA vol. 1, §10.3.1).
    #[error("QP {qpn} is in {from:?}, where {change:?} is not possible")]
    Transition {
        /// The queue pair.
        qpn: Qpn,
        /// Its current state.
        from: QpState,
        /// The requested change.
        change: QpChange,
    },
    /// The verb requires a managed queue.
    #[error("the {queue} queue of QP {qpn} is not managed; create it with `managed` set")]
    NotManaged {
        /// The queue pair.
        qpn: Qpn,
        /// `send` or `receive`.
        queue: &'static str,
    },
    /// This NIC has no connection to other NICs.
    #[error(
        "QP {qpn} cannot be connected to another NIC: this NIC has no wire; create it with \
         `Limits::wire` set, or connect QPs of this NIC"
    )]
    NoWire {
        /// The queue pair.
        qpn: Qpn,
    },
    /// Another QP of this NIC is already connected to that peer.
    #[error(
        "QP {peer} at {address} is already the peer of QP {by} of this NIC; reset that QP first"
    )]
    PeerTaken {
        /// Address of the peer.
        address: std::net::SocketAddr,
        /// QP number of the peer.
        peer: Qpn,
        /// The QP of this NIC that is connected to the peer.
        by: Qpn,
    },
    /// No packet can be sent between these two addresses.
    #[error(
        "packets cannot be sent from {local} to {address}; give two unicast addresses of the same \
         family, and a port"
    )]
    Address {
        /// Address of the peer.
        address: std::net::SocketAddr,
        /// Local address.
        local: std::net::IpAddr,
    },
    /// The right is reserved for the physical function.
    #[error("{what} is reserved for the physical function, but the caller is {caller:?}")]
    NotPermitted {
        /// The requested object or operation.
        what: &'static str,
        /// The calling function.
        caller: FunctionId,
    },
}
