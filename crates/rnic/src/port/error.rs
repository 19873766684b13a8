//! Errors between a function and its NIC.

use std::io;

/// An error of a port.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The NIC rejected a verb.
    #[error("the NIC rejected the request: {0}")]
    Verb(#[from] crate::error::Error),
    /// The NIC of another process rejected a request.
    #[error("the NIC rejected the request: {why}")]
    Refused {
        /// Its reason.
        why: String,
    },
    /// A message that is not part of the attach protocol, or not allowed in the current state.
    #[error("the message violates the attach protocol: {what}")]
    Protocol {
        /// The violation.
        what: String,
    },
    /// Memory that a NIC in another process cannot access.
    #[error(
        "{len} bytes at {addr:#x} were not allocated by this function's `alloc_dma`: the NIC \
         cannot access them"
    )]
    NotDma {
        /// First address.
        addr: u64,
        /// Bytes.
        len: usize,
    },
    /// A system call failed.
    #[error("{attempt}: {source}")]
    System {
        /// The action that failed.
        attempt: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The process that runs the NIC has not responded in time, and may respond later.
    #[error("the NIC has not responded for {} s", waited.as_secs())]
    Unanswered {
        /// The time limit.
        waited: std::time::Duration,
    },
    /// The thread or process that runs the NIC has ended.
    #[error("the NIC is gone: {why}")]
    Gone {
        /// How the end was detected.
        why: String,
    },
}

impl Error {
    /// Returns a function that wraps an errno of the action `attempt` in [`Error::System`].
    pub(crate) fn system(attempt: &'static str) -> impl Fn(rustix::io::Errno) -> Error {
        move |errno| Error::System { attempt, source: errno.into() }
    }
}
