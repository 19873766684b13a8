//! The way to remote memory: ordered lists of verbs, and rights to ranges.

use std::future::Future;

use smallvec::SmallVec;

use crate::place::Address;

/// A range of remote memory to which an operation needs a right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Address of the first byte.
    pub start: Address,
    /// Length in bytes.
    pub bytes: u32,
    /// True if the operation changes the range.
    pub writes: bool,
    /// True if no other client may have a right to the range meanwhile.
    pub exclusive: bool,
}

/// A verb on remote memory.
#[derive(Debug)]
pub enum Step<'a> {
    /// Reads bytes.
    Read {
        /// Address of the first byte.
        at: Address,
        /// Where the bytes go.
        into: &'a mut [u8],
    },
    /// Writes bytes.
    Write {
        /// Address of the first byte.
        at: Address,
        /// The bytes.
        from: &'a [u8],
    },
    /// Compares the big-endian word at `at` with `expected`, and replaces an equal word by `new`.
    Cas {
        /// Address of the word: a multiple of 8.
        at: Address,
        /// The word that is replaced.
        expected: u64,
        /// The word afterwards.
        new: u64,
        /// Receives the word before.
        old: &'a mut u64,
    },
    /// Adds to the big-endian word at `at`.
    Add {
        /// Address of the word: a multiple of 8.
        at: Address,
        /// The amount.
        amount: u64,
        /// Receives the word before.
        old: &'a mut u64,
    },
}

impl Step<'_> {
    /// Address of the verb's first byte.
    pub fn at(&self) -> Address {
        match self {
            Self::Read { at, .. }
            | Self::Write { at, .. }
            | Self::Cas { at, .. }
            | Self::Add { at, .. } => *at,
        }
    }

    /// Bytes that the verb reads or writes.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Read { into, .. } => into.len(),
            Self::Write { from, .. } => from.len(),
            Self::Cas { .. } | Self::Add { .. } => 8,
        }
    }

    /// True for a verb that must not take effect twice.
    pub(crate) fn is_atomic(&self) -> bool {
        matches!(self, Self::Cas { .. } | Self::Add { .. })
    }

    /// The same verb, for a shorter time.
    pub(crate) fn reborrow(&mut self) -> Step<'_> {
        match self {
            Step::Read { at, into } => Step::Read { at: *at, into },
            Step::Write { at, from } => Step::Write { at: *at, from },
            Step::Cas { at, expected, new, old } => {
                Step::Cas { at: *at, expected: *expected, new: *new, old }
            }
            Step::Add { at, amount, old } => Step::Add { at: *at, amount: *amount, old },
        }
    }
}

/// The reason that a list of verbs stopped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Stopped {
    /// The memory node refused an access: another compute node owns the memory now.
    #[error("accessing remote memory: access refused: {0}; open the store again")]
    Refused(String),
    /// A memory node that has only blocks of values is gone. [`Blocks::is_gone`] holds for its
    /// places from now on.
    ///
    /// [`Blocks::is_gone`]: crate::blocks::Blocks::is_gone
    #[error("accessing a value: memory node {node} is gone, with the values on it: {why}")]
    Gone {
        /// Number of the memory node in places.
        node: u8,
        /// The error of the connection.
        why: String,
    },
    /// The connection broke. A verb that was posted may or may not have taken effect.
    #[error("accessing remote memory: the connection broke: {0}; connect and open the store again")]
    Lost(String),
    /// The memory was freed, in memory that knows its blocks. Nothing that is posted together with
    /// the access has to be repeated but READs and WRITEs.
    #[error("accessing remote memory: the memory was freed: {0}; open the store again")]
    Freed(String),
    /// Another client changes the generation of an object in the table of names again and again.
    #[error(
        "accessing remote memory: another client changed the generation of object {entry} before \
         each of {attempts} attempts; end the client that does so for ever, and try again"
    )]
    Renamed {
        /// The object's entry in the memory node's table.
        entry: u32,
        /// Number of attempts.
        attempts: usize,
    },
    /// Another client has an exclusive right to the memory, and did not give it back in time.
    #[error("accessing remote memory: another client has an exclusive right; try again")]
    Busy,
}

/// Reaches remote memory for an index.
///
/// The index knows no keys of regions and no allocation scheme: it names memory by address. An
/// implementation over a pool finds the grant of an address ([`pooled`](crate::pooled)), or
/// acquires, extends and revokes permissions ([`leased`](crate::leased)).
///
/// The futures need not be `Send`: a store runs on threads that run to completion.
pub trait Reach {
    /// A right to a range, until [`Reach::close`].
    type Right;

    /// Acquires the right to `range`. Ready at once where a right needs no message. Waits until
    /// other clients have no right that conflicts with an exclusive one.
    ///
    /// Memory in which any client may access anything gives all rights at once, also exclusive ones
    /// to several clients. So an exclusive right saves work, and no algorithm may rely on it.
    ///
    /// # Errors
    /// [`Stopped::Busy`] if other clients have kept a right for too long.
    fn open(&self, range: Range) -> impl Future<Output = Result<Self::Right, Stopped>>;

    /// Returns a right.
    fn close(&self, right: Self::Right) -> impl Future<Output = ()>;

    /// Executes `steps` and waits once for all of them.
    ///
    /// Two steps whose addresses are [ordered](Reach::ordered) take effect in the order of the
    /// list: an implementation fences a WRITE behind a READ or an atomic. Other steps have no
    /// order. After an error, each step may or may not have taken effect.
    fn run(&self, steps: &mut [Step<'_>]) -> impl Future<Output = Result<(), Stopped>>;

    /// A word that the memory node overwrites after this compute node's connection has ended: no
    /// verb of the compute node takes effect afterwards. The clients of a shared index find out by
    /// a READ that one of them has ended. `None`: the memory has no such word.
    fn life(&self) -> Option<Address> {
        None
    }

    /// True if verbs on the two addresses take effect in the order in which they are posted,
    /// because both use one QP.
    fn ordered(&self, a: Address, b: Address) -> bool;
}

/// Executes `steps` in one round trip, with a right to the range of each.
pub(crate) async fn run_with_rights<R: Reach>(
    reach: &R,
    steps: &mut [Step<'_>],
) -> Result<(), Stopped> {
    let mut rights = SmallVec::<[R::Right; 6]>::new();
    let mut result = Ok(());
    for step in steps.iter() {
        match reach.open(range_of(step)).await {
            Ok(right) => rights.push(right),
            Err(stopped) => {
                result = Err(stopped);
                break;
            }
        }
    }
    if result.is_ok() {
        result = reach.run(steps).await;
    }
    for right in rights {
        reach.close(right).await;
    }
    result
}

/// The range that a verb needs a right to.
pub(crate) fn range_of(step: &Step<'_>) -> Range {
    let writes = !matches!(step, Step::Read { .. });
    Range { start: step.at(), bytes: step.bytes() as u32, writes, exclusive: false }
}
