//! What can go wrong between a function and its NIC.

use std::io;

/// An error of a port.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The NIC refused a verb.
    #[error("the NIC refused: {0}")]
    Verb(#[from] crate::error::Error),
    /// The NIC of another process refused a request.
    #[error("the NIC refused: {why}")]
    Refused {
        /// Its reason.
        why: String,
    },
    /// A message that is not of the attach protocol, or one that it does not allow now.
    #[error("the message is not one of the attach protocol: {what}")]
    Protocol {
        /// What is wrong with it.
        what: String,
    },
    /// Memory that a NIC in another process cannot reach.
    #[error("{len} bytes at {addr:#x} are not memory of this function; take it from `alloc_dma`")]
    NotDma {
        /// First address.
        addr: u64,
        /// Bytes.
        len: usize,
    },
    /// The system refused something.
    #[error("{attempt}: {source}")]
    System {
        /// What was attempted.
        attempt: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The thread or process that runs the NIC has ended.
    #[error("the NIC is gone: {why}")]
    Gone {
        /// How that was noticed.
        why: String,
    },
}

impl Error {
    /// Makes a system error of what `attempt` gave.
    pub(crate) fn system(attempt: &'static str) -> impl Fn(rustix::io::Errno) -> Error {
        move |errno| Error::System { attempt, source: errno.into() }
    }
}
