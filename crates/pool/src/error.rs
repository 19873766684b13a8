//! What can go wrong between a compute node and its memory node.

use std::time::Duration;

use fabric::Status;

/// An error of the pool.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The memory node has no free chunk now.
    #[error(
        "allocating {bytes} bytes: the memory node has no free chunk; wait for it or free some"
    )]
    OutOfMemory {
        /// Bytes asked for.
        bytes: u64,
    },
    /// A chunk was named that this compute node does not own.
    #[error("freeing chunk {entry}: it is not yours, or was freed already; nothing was changed")]
    NotYours {
        /// The chunk's index in the memory node's table.
        entry: u32,
    },
    /// An access reaches beyond its grant.
    #[error("{op} of {len} bytes at offset {offset}: the grant has {grant_len} bytes")]
    OutOfRange {
        /// The operation.
        op: &'static str,
        /// Offset asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes of the grant.
        grant_len: u64,
    },
    /// The memory node does not answer any more, or refuses this connection.
    #[error("{attempt}: the memory node is gone: {why}; connect again, what it held is lost")]
    Gone {
        /// What was attempted.
        attempt: String,
        /// How that was noticed.
        why: String,
    },
    /// The memory node ended the connection before it admitted this compute node: nothing was said
    /// for too long, or there was no room for the connection. Nothing was held yet.
    #[error(
        "being admitted: the memory node ended the connection before it answered: {why}; this \
         process was stopped for too long, or the memory node has as many connections as it \
         takes, or has just ended: see `granary status`, and connect again"
    )]
    NotAdmitted {
        /// How that was noticed.
        why: String,
    },
    /// The memory node has no place for this compute node. Nothing was held yet.
    #[error(
        "{attempt}: the memory node is full: {why}; wait until compute nodes have left, or start \
         it with more places (granary serve --clients)"
    )]
    Full {
        /// What was attempted.
        attempt: String,
        /// Which limit was reached.
        why: String,
    },
    /// The memory node refused an operation on its memory: the key is dead or not for this QP.
    #[error("{op}: refused by the memory node's NIC: {status}")]
    Access {
        /// The operation.
        op: &'static str,
        /// The completion's status.
        status: Status,
    },
    /// A management QP went into the error state while a request was in flight.
    #[error(
        "{attempt}: the management QP broke ({status}); it is re-established by reset and connect"
    )]
    ManagementBroken {
        /// What was attempted.
        attempt: String,
        /// The completion's status.
        status: Status,
    },
    /// The compute node is over a budget: its management connection was ended, or would be. Its
    /// grants stay usable.
    #[error("{attempt}: over budget: {why}; grants stay usable{}", after(retry_after))]
    OverBudget {
        /// What was attempted.
        attempt: String,
        /// Which budget, and what to do.
        why: String,
        /// How long the memory node refuses to re-establish the connection; zero: it was not ended.
        retry_after: Duration,
    },
    /// A grant or a buffer of another connection: of a memory node that was restarted, or of
    /// this one before it was connected again.
    #[error(
        "{op}: this {what} is of another connection to a memory node; what it was for is lost, \
         allocate anew"
    )]
    Stale {
        /// What was attempted.
        op: &'static str,
        /// `grant` or `buffer`.
        what: &'static str,
    },
    /// A setting that cannot be.
    #[error("{setting} = {value}: {why}")]
    Setting {
        /// Name of the setting.
        setting: &'static str,
        /// Its value.
        value: String,
        /// What it must be.
        why: String,
    },
    /// The memory node refused a request on the control connection.
    #[error("{attempt}: refused: {why}")]
    Refused {
        /// What was attempted.
        attempt: String,
        /// Its reason.
        why: String,
    },
    /// A message of the control connection could not be understood.
    #[error("{attempt}: the other side sent something that is not understood: {why}")]
    Protocol {
        /// What was attempted.
        attempt: String,
        /// What was wrong.
        why: String,
    },
    /// A verb failed.
    #[error(transparent)]
    Verbs(fabric::Error),
    /// The system refused something.
    #[error("{attempt}: {source}")]
    System {
        /// What was attempted.
        attempt: String,
        /// The system's error.
        source: std::io::Error,
    },
}

impl From<fabric::Error> for Error {
    fn from(e: fabric::Error) -> Self {
        match e {
            // The NIC of a memory node runs in its process.
            fabric::Error::Gone { attempt, why } => Error::Gone { attempt, why },
            e => Error::Verbs(e),
        }
    }
}

fn after(retry_after: &Duration) -> String {
    match retry_after.is_zero() {
        true => String::new(),
        false => format!(", and it may be asked again in {:.1} s", retry_after.as_secs_f64()),
    }
}
