//! What can go wrong with a verb.

/// An error of a verb that was called. (What goes wrong with posted work comes as the
/// [`Status`](crate::Status) of its completion.)
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A send or receive queue has no room: completions must be polled first.
    #[error("posting to {queue}: all its {capacity} entries are in use; poll completions first")]
    QueueFull {
        /// Which queue.
        queue: String,
        /// Entries it has.
        capacity: u32,
    },
    /// A queue pair takes no such work in its state.
    #[error("posting to {queue}, which is in {state:?}; connect it first")]
    NotReady {
        /// Which queue.
        queue: String,
        /// The queue pair's state.
        state: crate::QpState,
    },
    /// A work request does not fit a WQE.
    #[error("posting a work request: {what}")]
    BadRequest {
        /// What is wrong with it.
        what: String,
    },
    /// The NIC refused a control verb.
    #[error("{verb}: the NIC refused: {why}")]
    Refused {
        /// The verb.
        verb: &'static str,
        /// Its reason.
        why: String,
    },
    /// The system refused memory, a descriptor or a thread.
    #[error("{attempt}: {source}")]
    System {
        /// What was attempted.
        attempt: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The process that runs the NIC does not answer any more.
    #[error(
        "{attempt}: the process that runs the NIC is gone: {why}; start it again and reconnect"
    )]
    Gone {
        /// What was attempted.
        attempt: String,
        /// How that was noticed.
        why: String,
    },
    /// The NIC cannot do what was asked.
    #[error("{attempt}: this NIC does not support it: {why}")]
    Unsupported {
        /// What was attempted.
        attempt: String,
        /// Why not.
        why: String,
    },
}
