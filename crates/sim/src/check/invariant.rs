//! The invariants.

use std::fmt;

/// An invariant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Invariant {
    /// No chunk has two owners, and no client can access a chunk of another client.
    Owners,
    /// No access takes effect outside its owner's chunk, or after the chunk's release.
    Accesses,
    /// A released chunk becomes inaccessible, then clear, then free. A scheme may reply to the free
    /// earlier; the chunk must not be free then.
    Releases,
    /// No client sees contents that another client left.
    Contents,
    /// No key is granted twice.
    Keys,
    /// The free queue holds each free entry once, and permits do not exceed entries.
    FreeQueue,
    /// A departed client is forgotten in bounded time, and its chunks are free and clear by then.
    Forgotten,
    /// Every request ends, in success or in a named error that has a cause.
    Answers,
    /// Clients can perform client operations, and no operation that is reserved to the NIC's owner.
    Privilege,
    /// The memory node keeps running, whatever clients do, and no program panics.
    GoesOn,
}

impl Invariant {
    /// Returns the name of the invariant.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Owners => "owners",
            Self::Accesses => "accesses",
            Self::Releases => "releases",
            Self::Contents => "contents",
            Self::Keys => "keys",
            Self::FreeQueue => "free queue",
            Self::Forgotten => "forgotten",
            Self::Answers => "answers",
            Self::Privilege => "privilege",
            Self::GoesOn => "goes on",
        }
    }
}

/// A violation of an invariant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// The violated invariant.
    pub invariant: Invariant,
    /// Description with client, operation and chunk.
    pub why: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}] {}", self.invariant.name(), self.why)
    }
}
