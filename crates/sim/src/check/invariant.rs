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
    /// Every access that takes effect lies in a permission of its client: range and right.
    Permissions,
    /// While an exclusive permission is open, no other permission opens a byte of its range.
    Exclusive,
    /// No key opens memory after its permission has ended.
    Dead,
    /// No permission is open longer than the longest lease, whatever clients write.
    Bounded,
    /// A request that waits is granted or refused in time, first come, first served.
    Granted,
    /// While a request waits, the permissions it waits for are not extended.
    Notified,
    /// A lease does not end before its honest holder believes so.
    Belief,
    /// Memory of an object is used again only when nothing opens it and it is zero.
    Released,
    /// Windows, slots, objects and memory add up, and nothing is left after all clients have gone.
    Accounts,
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
            Self::Permissions => "permissions",
            Self::Exclusive => "exclusive",
            Self::Dead => "dead",
            Self::Bounded => "bounded",
            Self::Granted => "granted",
            Self::Notified => "notified",
            Self::Belief => "belief",
            Self::Released => "released",
            Self::Accounts => "accounts",
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
