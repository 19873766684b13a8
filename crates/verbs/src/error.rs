//! Errors of verbs.

/// An error of a verb call. (Errors of posted work are reported as the [`Status`](crate::Status) of
/// the completion.)
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A send or receive queue is full. The caller must poll completions first.
    #[error("posting to {queue}: all its {capacity} entries are in use; poll completions first")]
    QueueFull {
        /// The queue.
        queue: String,
        /// Number of entries of the queue.
        capacity: u32,
    },
    /// A queue pair's state does not allow the posted work.
    #[error("posting to {queue}, which is in {state:?}; connect it first")]
    NotReady {
        /// The queue.
        queue: String,
        /// The queue pair's state.
        state: crate::QpState,
    },
    /// A work request cannot be encoded as a WQE.
    #[error("posting a work request: {what}")]
    BadRequest {
        /// The defect of the request.
        what: String,
    },
    /// The NIC refused a control verb.
    #[error("{verb}: the NIC refused: {why}")]
    Refused {
        /// The verb.
        verb: &'static str,
        /// The NIC's reason.
        why: String,
    },
    /// The system refused memory, a descriptor or a thread.
    #[error("{attempt}: {source}")]
    System {
        /// The attempted action.
        attempt: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The process that runs the NIC no longer answers.
    #[error(
        "{attempt}: the process that runs the NIC is gone: {why}; start it again and reconnect"
    )]
    Gone {
        /// The attempted action.
        attempt: String,
        /// How the loss was detected.
        why: String,
    },
    /// The NIC or the peer has not answered for a time limit, and may answer later.
    #[error(
        "{attempt}: {peer} has not answered for {} s: its process, or that of the NIC, is stopped, \
         or the network is cut; continue the process, and try again", waited.as_secs_f64()
    )]
    Unanswered {
        /// The attempted action, which may still take effect.
        attempt: String,
        /// Name of the peer.
        peer: String,
        /// The time limit.
        waited: std::time::Duration,
    },
    /// The NIC does not support the requested action.
    #[error("{attempt}: this NIC does not support it: {why}")]
    Unsupported {
        /// The attempted action.
        attempt: String,
        /// The reason.
        why: String,
    },
}
