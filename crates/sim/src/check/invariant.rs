//! What must hold, by name.

use std::fmt;

/// Something that must hold.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Invariant {
    /// No chunk has two owners, and nobody can reach another's.
    Owners,
    /// No access takes effect outside its owner's chunk, or after its release.
    Accesses,
    /// What is released is out of reach, then clear, then free; what is answered before is not free.
    Releases,
    /// Nobody sees what another has left.
    Contents,
    /// No key is granted twice.
    Keys,
    /// The free queue holds each free entry once, and there are no more permits than entries.
    FreeQueue,
    /// Whoever goes is forgotten in bounded time, and all that it had is free and clear then.
    Forgotten,
    /// Every request ends, in success or in a named error that has a cause.
    Answers,
    /// Clients do what clients may do, and nothing of what only the NIC's owner may.
    Privilege,
    /// The memory node goes on, whatever clients do; no program of ours panics.
    GoesOn,
}

impl Invariant {
    /// Its name.
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

/// What was wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// What did not hold.
    pub invariant: Invariant,
    /// Who, what, where.
    pub why: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}] {}", self.invariant.name(), self.why)
    }
}
