//! Errors of a store.

use crate::blocks::NoBlock;
use crate::layout::Malformed;
use crate::place::Address;
use crate::reach::Stopped;

/// An error of a store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The allocator has no block.
    #[error(transparent)]
    NoBlock(#[from] NoBlock),
    /// Remote memory cannot be reached.
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// A memory node that is gone was accessed again, although its blocks count as lost.
    #[error(
        "accessing memory node {node} again after the memory node was gone: {why}; open the store \
         again, and report this error"
    )]
    GoneAgain {
        /// Number of the memory node in places.
        node: u8,
        /// The error of the connection.
        why: String,
    },
    /// Remote memory has bytes that the store cannot have written.
    #[error(
        "reading remote memory at {at}: {what}; another program has written there, or the memory \
         node is faulty: restore the data from a file"
    )]
    Malformed {
        /// Address of the bytes.
        at: Address,
        /// The defect.
        what: Malformed,
    },
    /// Another owner has opened the store.
    #[error("changing the store: another process has opened the store since; stop this one")]
    Deposed,
    /// Remote memory differs from its mirror, although no other owner has opened the store.
    #[error(
        "changing the slot at {0}: the slot differs from its mirror; a program other than the \
         owner writes to the store's memory: open the store again"
    )]
    Diverged(Address),
    /// A change was interrupted, so the mirror may be older than remote memory.
    #[error("using the store: a change was interrupted earlier; open the store again")]
    Interrupted,
    /// The key is too long.
    #[error("writing a key of {bytes} bytes: at most {most} bytes are possible; use a shorter key")]
    KeyTooLong {
        /// Bytes of the key.
        bytes: usize,
        /// The maximum.
        most: usize,
    },
    /// The value is too long.
    #[error("writing a value of {0} bytes: at most 512 MiB are possible; split the value")]
    ValueTooLong(usize),
    /// A call that needs to be the only client has found another one.
    #[error(
        "collecting blocks of a shared store: client {0} has not ended; let all other clients leave"
    )]
    NotAlone(u32),
    /// An operation of a shared store has waited for other clients too long.
    #[error(
        "using a shared store: another client changed or locked {word} before each of {attempts} \
         attempts: try again; if that client has crashed during a split with a plain lock, use \
         leases"
    )]
    Contended {
        /// The kind of the word.
        word: &'static str,
        /// Number of attempts.
        attempts: u32,
    },
    /// Unlinked blocks fill the memory, because a client does not pass their epoch.
    #[error(
        "splitting a subtable: {0} bytes of unlinked blocks wait for the epochs of other clients; \
         strike clients that have left, and let idle clients tick"
    )]
    HeldBack(u64),
    /// The block of epochs has no line left.
    #[error("opening a shared store: all {0} clients are there; let one leave or strike one")]
    TooManyClients(usize),
    /// The directory cannot grow.
    #[error(
        "inserting a key: the directory has its maximum depth; use larger chunks or more partitions"
    )]
    TooDeep,
    /// The number of a database is too high.
    #[error("using database {0}: a store has the databases 0 to 15")]
    NoDatabase(u8),
    /// A setting is impossible.
    #[error("opening a store: {0}")]
    Setting(&'static str),
}

impl Error {
    /// The error of an operation that has made all its attempts at the key's subtable.
    pub(crate) const fn contended(attempts: u32) -> Self {
        Self::Contended { word: "the key's subtable", attempts }
    }

    pub(crate) fn malformed(at: Address) -> impl Fn(Malformed) -> Self {
        move |what| Self::Malformed { at, what }
    }
}
