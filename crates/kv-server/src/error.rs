//! Errors of the start and of the operation, for the operator.

/// Any error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A parameter has an impossible value.
    #[error("setting the parameter {name}: {why}; correct the value")]
    Parameter {
        /// The parameter, with file and line if there is one.
        name: String,
        /// The reason.
        why: String,
    },
    /// An address cannot be listened at.
    #[error("listening at {address}: {cause}; choose another address or port")]
    Listen {
        /// The address.
        address: String,
        /// The cause.
        #[source]
        cause: std::io::Error,
    },
    /// The certificates cannot be used.
    #[error("setting up TLS: {0}; correct tls-cert-file, tls-key-file or tls-ca-cert-file")]
    Tls(String),
    /// The list of users is wrong.
    #[error("reading the users: {0}; correct the rules or aclfile")]
    Users(String),
    /// No address is listened at.
    #[error(
        "starting the server: no port and no unixsocket is set; set port, tls-port or unixsocket"
    )]
    NoAddress,
    /// The system refused a call.
    #[error("{attempt}: {cause}; raise the limits of the system or lower io-threads")]
    System {
        /// The attempt.
        attempt: &'static str,
        /// The cause.
        #[source]
        cause: std::io::Error,
    },
    /// The system refused an event.
    #[error(transparent)]
    Event(#[from] verbs::Error),
    /// The scheme of the pool is not for stores.
    #[error(
        "creating the store: the scheme of the pool has no chunks that a store can divide; use a \
         memory node with another scheme, for example onesidedmw"
    )]
    Scheme,
    /// The heap of the store cannot be made.
    #[error(transparent)]
    Heap(#[from] heap::Error),
    /// The store cannot be made.
    #[error(transparent)]
    Store(#[from] kv::Error),
    /// The server has ended because of an error.
    #[error("running the server: {0}")]
    Ended(String),
}
