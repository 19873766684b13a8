//! The bound of the loops that repeat a CAS.
//!
//! Among clients that keep the protocol, a CAS fails because the CAS of another client took effect,
//! so that one of them makes progress in each turn. A hostile client with a management QP can
//! change a word before each CAS of another one, for ever. Therefore an operation counts its failed
//! CASes, and ends with an error after [`REPEATS_MAX`].
//!
//! The count is that of the whole operation, not that of a word: an operation changes several words
//! in nested loops, and with a count for each word their bounds would multiply.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::blocks::ChunkIndex;
use crate::finemem::block::Place;

/// Failed CASes after which an operation ends with an error.
///
/// In simulations with 512 clients and contention control, an operation has 25 failed CASes at
/// most. Without contention control, the CAS of one of 512 clients succeeds in each turn, and the
/// chance of 65,536 failures in a row is 2^-184.
pub const REPEATS_MAX: u32 = 1 << 16;

/// A word that another client changed before a CAS.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Changed {
    /// The header of a span or section.
    Header(Place),
    /// The full log of a chunk.
    Log(ChunkIndex),
}

impl fmt::Display for Changed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header(Place::Span(span)) => write!(f, "the header of span {span}"),
            Self::Header(Place::Section(section)) => write!(f, "the header of section {section}"),
            Self::Log(chunk) => write!(f, "the log of chunk {chunk}"),
        }
    }
}

/// Failed CASes of an operation.
#[derive(Default)]
pub struct Repeats(AtomicU32);

impl Repeats {
    /// Counts a failed CAS. Returns false if the operation is to end.
    pub fn may_repeat(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed) + 1 < REPEATS_MAX
    }

    /// Starts the count of another operation.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}
