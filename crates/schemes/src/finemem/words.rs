//! READ and CAS by the memory node's CPU on its own metadata.
//!
//! The words are big-endian. CPU and NIC change the same words, so the NIC's atomics must be atomic
//! with respect to the CPU (`IBV_ATOMIC_GLOB`), as those of the software NIC are. On a NIC without
//! this property, these operations would have to be verbs over a loopback QP of the memory node.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use scheme::Error;
use verbs::{DmaMemory, PrefetchFor};

use super::layout::Word;
use super::tree::{Changed, Repeats, Verbs};

/// The metadata, accessed by the memory node's CPU.
pub(super) struct Words {
    memory: DmaMemory,
    /// Remaining steps of background work before it is aborted.
    left: AtomicU64,
    /// Failed CASes of the present turn.
    repeats: Repeats,
}

/// Error: the memory node's background work was aborted between two steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Aborted;

impl From<Aborted> for Error {
    fn from(_: Aborted) -> Self {
        let attempt = "the memory node's background work".into();
        Self::Refused { attempt, why: "it was aborted, and will restart".into() }
    }
}

/// Value of `left` for which the work is not aborted.
const NEVER: u64 = u64::MAX;

impl Words {
    /// The words in `memory`.
    pub fn new(memory: DmaMemory) -> Self {
        Self { memory, left: AtomicU64::new(NEVER), repeats: Repeats::default() }
    }

    /// The memory of the words.
    pub fn memory(&self) -> &DmaMemory {
        &self.memory
    }

    /// Aborts background work after `steps` more steps.
    pub fn abort_after(&self, steps: u64) {
        self.left.store(steps.min(NEVER - 1), Ordering::Relaxed);
    }

    /// Begins a turn of background work.
    pub fn begin_turn(&self) {
        self.repeats.reset();
    }

    /// Counts a step, before it changes anything; fails if the work is to be aborted.
    pub fn step(&self) -> Result<(), Aborted> {
        match self.left.load(Ordering::Relaxed) {
            NEVER => Ok(()),
            0 => Err(Aborted),
            left => {
                self.left.store(left - 1, Ordering::Relaxed);
                Ok(())
            }
        }
    }

    /// True once after each abort.
    pub fn take_abort(&self) -> bool {
        self.left.compare_exchange(0, NEVER, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Loads a word.
    pub fn load(&self, at: Word) -> u64 {
        self.memory.load_be64(at.offset())
    }

    /// Copies words without atomicity: a word that changes meanwhile may be mixed from two states.
    pub fn copy(&self, at: Word, out: &mut [u8]) {
        self.memory.read(at.offset(), out);
    }

    /// Starts to prefetch `count` words, within the bounds of the memory.
    pub fn prefetch(&self, at: Word, count: usize) {
        let (from, end) = (at.offset(), self.memory.len());
        (from..end.min(from + 8 * count))
            .step_by(64)
            .for_each(|at| self.memory.prefetch(at, PrefetchFor::Read));
    }

    /// Stores a word that has no other writer.
    pub fn store(&self, at: Word, value: u64) {
        self.memory.store_be64(at.offset(), value);
    }

    /// Replaces a word by `new` if it is `expected`; returns the previous value.
    pub fn swap(&self, at: Word, expected: u64, new: u64) -> u64 {
        let word = self.memory.word64(at.offset());
        let (expected, new) = (expected.to_be(), new.to_be());
        let found = word.compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire);
        u64::from_be(found.unwrap_or_else(|found| found))
    }
}

impl Verbs for Words {
    type Error = Aborted;

    /// Aborts a turn in which clients change the words again and again. The pass begins again in a
    /// later turn, so that such clients hold up neither the memory node's thread nor its other
    /// work.
    fn repeat(&self, _: Changed) -> Result<(), Aborted> {
        if self.repeats.may_repeat() {
            return Ok(());
        }
        self.left.store(0, Ordering::Relaxed);
        Err(Aborted)
    }

    async fn read(&self, at: Word, out: &mut [u64]) -> Result<(), Aborted> {
        (0..).zip(out).for_each(|(i, word)| *word = self.load(at.plus(i)));
        Ok(())
    }

    async fn cas(&self, at: Word, expected: u64, new: u64) -> Result<u64, Aborted> {
        self.step()?;
        Ok(self.swap(at, expected, new))
    }
}

/// Runs a future that only uses [`Words`], which never waits.
pub(super) fn now<T>(future: impl Future<Output = Result<T, Aborted>>) -> Result<T, Aborted> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => unreachable!("operations on words in memory never wait"),
    }
}
