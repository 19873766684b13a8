//! Errors of a compute node and of its memory node.

use std::time::Duration;

use verbs::Status;

use crate::index::EntryId;

/// An error of the pool.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No chunk of the memory node is free.
    #[error(
        "allocating {bytes} bytes: the memory node has no free chunk; free one, or wait until one \
         is freed"
    )]
    OutOfMemory {
        /// Bytes requested.
        bytes: u64,
    },
    /// The compute node freed a chunk that it does not own.
    #[error(
        "freeing chunk {entry}: this compute node does not own it (any more); nothing was changed"
    )]
    NotYours {
        /// The chunk's entry in the memory node's table.
        entry: EntryId,
    },
    /// The access exceeds the bounds of its grant.
    #[error(
        "{op} of {len} bytes at offset {offset}: outside the grant, which has {grant_len} bytes"
    )]
    OutOfRange {
        /// The operation.
        op: &'static str,
        /// Offset requested.
        offset: u64,
        /// Bytes requested.
        len: u64,
        /// Bytes of the grant.
        grant_len: u64,
    },
    /// The memory node exited or closed this connection.
    #[error("{attempt}: the memory node is gone: {why}; its contents are lost: reconnect")]
    Gone {
        /// The operation that failed.
        attempt: String,
        /// The symptom.
        why: String,
    },
    /// No connection to a memory node was made. Nothing was stored there by this attempt.
    #[error("{attempt}: {why}")]
    Unreachable {
        /// The operation that failed, with the address.
        attempt: String,
        /// The symptom, and the next step.
        why: String,
    },
    /// The memory node does not answer. Its memory is as it was if the memory node goes on.
    ///
    /// An operation in flight may take effect later, as long as the memory node has not executed a
    /// later one of the same QP: a WRITE may arrive late, and a READ may write to its buffer late.
    /// `Pool::reestablish` ends all operations in flight.
    #[error("{attempt}: {why}")]
    Unanswered {
        /// The operation that failed.
        attempt: String,
        /// The symptom, and the next step.
        why: String,
    },
    /// The memory node closed the connection before it admitted this compute node: the connection
    /// was idle for too long, or the limit of connections was reached. No memory was allocated on
    /// it.
    #[error(
        "connection closed before admission: {why}; the handshake timed out \
         (`granary serve --silence-ms`), the limit of connections is reached, or the memory node \
         exited: see `granary status`, and reconnect"
    )]
    NotAdmitted {
        /// The symptom.
        why: String,
    },
    /// The memory node has no free slot for this compute node. No memory was allocated on the
    /// connection.
    #[error(
        "{attempt}: the memory node is full: {why}; wait until compute nodes have left, or start \
         it with more client slots (granary serve --clients)"
    )]
    Full {
        /// The operation that failed.
        attempt: String,
        /// The limit that was reached.
        why: String,
    },
    /// Each attempt at a request was undone by a change of another client, or by another request of
    /// this one.
    ///
    /// The number of attempts is far beyond those that fail beside clients that keep the protocol.
    /// Blocks that the request had taken, or not freed, go back before the next allocation of this
    /// compute node; at the latest, the memory node takes them back when this compute node has
    /// ended.
    #[error("{attempt}: no success in {attempts} attempts: {why}")]
    Contended {
        /// The operation that failed.
        attempt: String,
        /// Number of attempts.
        attempts: u32,
        /// The change that undid the attempts, and the next step.
        why: String,
    },
    /// The memory node's NIC refused an access: the key is dead, or is bound to another QP.
    #[error("{op}: refused by the memory node's NIC: {status}")]
    Access {
        /// The operation.
        op: &'static str,
        /// The completion's status.
        status: Status,
    },
    /// An ordered list of accesses ended early. The first `done` steps took effect, and their
    /// results were delivered.
    #[error(
        "{op}, step {done} of a list of {steps} (counted from 0): {status}; the steps before it \
         took effect, {}", rest(*status)
    )]
    List {
        /// Number of steps that took effect: the index of the step that failed.
        done: usize,
        /// Number of steps of the list.
        steps: usize,
        /// The operation that failed.
        op: &'static str,
        /// The completion's status. After [`Status::Flushed`] and [`Status::RetryExceeded`] each
        /// step from `done` on may have taken effect or not; after any other status none has.
        status: Status,
    },
    /// A management QP went into the error state while a request was in flight.
    #[error(
        "{attempt}: the management QP broke ({status}); reset and reconnect it before the next \
         request"
    )]
    ManagementBroken {
        /// The operation that failed.
        attempt: String,
        /// The completion's status.
        status: Status,
    },
    /// The compute node exceeded a budget: the memory node closed its management connection, or
    /// would close it. Its grants stay usable.
    #[error("{attempt}: over budget: {why}; grants stay usable{}", after(retry_after))]
    OverBudget {
        /// The operation that failed.
        attempt: String,
        /// The budget, and how to stay within it.
        why: String,
        /// Time for which the memory node refuses to re-establish the connection. Zero: it was not
        /// closed.
        retry_after: Duration,
    },
    /// A grant or a buffer from another connection: the memory node was restarted, or this compute
    /// node reconnected.
    #[error(
        "{op}: this {what} belongs to another connection to a memory node and is lost; allocate \
         a new one"
    )]
    Stale {
        /// The operation that failed.
        op: &'static str,
        /// `grant` or `buffer`.
        what: &'static str,
    },
    /// The lease of a permission has ended. Nothing was posted, or the memory node's NIC refused
    /// the access.
    #[error("{op}: the lease of this permission has ended; acquire the object again")]
    Expired {
        /// The operation that failed.
        op: &'static str,
    },
    /// A lease cannot be extended: another compute node waits for the object, the object is being
    /// freed, or the longest lease is reached.
    #[error(
        "extending a permission: not possible: another compute node waits for the object, the \
         object is being freed, or the longest lease is reached; {} us are left: finish within \
         them, and acquire the object again", left.as_micros()
    )]
    NotExtendable {
        /// Time left.
        left: Duration,
    },
    /// Conflicting permissions did not end in time.
    #[error(
        "acquiring object {entry}: busy: conflicting permissions of other holders did not end \
         within {} us; wait longer (LeaseTerms::wait) or try again", waited.as_micros()
    )]
    Busy {
        /// The object's entry in the memory node's table.
        entry: u32,
        /// Time that the request waited.
        waited: Duration,
    },
    /// The object does not exist, or this compute node may not do this with it. The memory node
    /// does not tell which, so that nothing can be learnt about foreign objects.
    #[error(
        "{attempt} {entry}: no such object for this compute node: it was freed, belongs to another \
         start of the memory node or to another domain, is shorter than the range, or does not \
         allow others this right"
    )]
    NoSuchObject {
        /// The operation that failed.
        attempt: &'static str,
        /// The object's entry in the memory node's table.
        entry: u32,
    },
    /// The permission belongs to another compute node.
    #[error("{attempt}: this permission belongs to another compute node; nothing was changed")]
    NotYourPermission {
        /// The operation that failed.
        attempt: &'static str,
    },
    /// The permission is for reading only.
    #[error("{op}: this permission is for reading only; acquire one with Right::Write")]
    NotPermitted {
        /// The operation that failed.
        op: &'static str,
    },
    /// A limit of the memory node was reached.
    #[error("{attempt}: the limit of {limit} {what} of a compute node or domain is reached")]
    TooMany {
        /// The operation that failed.
        attempt: &'static str,
        /// The things that are limited.
        what: &'static str,
        /// Their limit.
        limit: u64,
    },
    /// A setting has an invalid value.
    #[error("{setting} = {value}: {why}")]
    Setting {
        /// Name of the setting.
        setting: &'static str,
        /// Its value.
        value: String,
        /// The values allowed.
        why: String,
    },
    /// The memory node refused a request on the control connection.
    #[error("{attempt}: refused: {why}")]
    Refused {
        /// The operation that failed.
        attempt: String,
        /// The memory node's reason.
        why: String,
    },
    /// The memory node or the compute node found data that violates the protocol or an invariant.
    #[error("{attempt}: {why}")]
    Protocol {
        /// The operation that failed.
        attempt: String,
        /// The reason.
        why: String,
    },
    /// A verb failed.
    #[error(transparent)]
    Verbs(verbs::Error),
    /// A system call failed.
    #[error("{attempt}: {source}")]
    System {
        /// The operation that failed.
        attempt: String,
        /// The error of the system call.
        source: std::io::Error,
    },
}

impl From<verbs::Error> for Error {
    fn from(e: verbs::Error) -> Self {
        match e {
            // The NIC of a memory node runs in the memory node's process, so both exit together.
            verbs::Error::Gone { attempt, why } => Error::Gone { attempt, why },
            verbs::Error::Unanswered { attempt, peer, waited } => Error::Unanswered {
                attempt,
                why: format!(
                    "{peer} has not answered for {} s: its process, or that of the NIC, is \
                     stopped, or the network is cut; its memory is as it was: continue the \
                     process, and try again (whether this operation takes effect is not known)",
                    waited.as_secs_f64()
                ),
            },
            e => Error::Verbs(e),
        }
    }
}

/// Fate of the steps of a list from the failed one on.
fn rest(status: Status) -> &'static str {
    match status {
        Status::Flushed | Status::RetryExceeded => {
            "the others may have: read what they write before the list is repeated"
        }
        _ => "the others did not",
    }
}

fn after(retry_after: &Duration) -> String {
    match retry_after.is_zero() {
        true => String::new(),
        false => format!("; retry in {:.1} s", retry_after.as_secs_f64()),
    }
}
