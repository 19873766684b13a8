//! READ and CAS of the memory node's CPU on its own metadata.
//!
//! The words are big-endian. CPU and NIC change the same words, so the NIC's atomics must be atomic to the
//! CPU's too (`IBV_ATOMIC_GLOB`); those of the software NIC are. On one that is not coherent in that way these
//! would be verbs over a QP of the memory node with itself.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use fabric::{DmaMemory, For};

use super::layout::Word;
use super::tree::Verbs;
use crate::Error;

/// The metadata as the memory node's CPU sees it.
pub(super) struct Words {
    memory: DmaMemory,
    /// Steps of background work until it is broken off.
    left: AtomicU64,
}

/// The memory node's background work was broken off between two steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BrokenOff;

impl From<BrokenOff> for Error {
    fn from(_: BrokenOff) -> Self {
        let attempt = "the memory node's background work".into();
        Self::Refused { attempt, why: "it was broken off, and begins anew".into() }
    }
}

/// It goes on as long as there is something to do.
const NEVER: u64 = u64::MAX;

impl Words {
    /// The words in `memory`.
    pub fn new(memory: DmaMemory) -> Self {
        Self { memory, left: AtomicU64::new(NEVER) }
    }

    /// Where they are.
    pub fn memory(&self) -> &DmaMemory {
        &self.memory
    }

    /// Has background work broken off after so many more steps.
    pub fn break_off_after(&self, steps: u64) {
        self.left.store(steps.min(NEVER - 1), Ordering::Relaxed);
    }

    /// A step that changes something follows.
    pub fn step(&self) -> Result<(), BrokenOff> {
        match self.left.load(Ordering::Relaxed) {
            NEVER => Ok(()),
            0 => Err(BrokenOff),
            left => {
                self.left.store(left - 1, Ordering::Relaxed);
                Ok(())
            }
        }
    }

    /// True if it was broken off, once for each time.
    pub fn was_broken_off(&self) -> bool {
        self.left.compare_exchange(0, NEVER, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// A word.
    pub fn load(&self, at: Word) -> u64 {
        self.memory.load_be64(at.0 as usize * 8)
    }

    /// Copies words as they lie there. One that changes meanwhile may be half of what it was.
    pub fn copy(&self, at: Word, out: &mut [u8]) {
        self.memory.read(at.0 as usize * 8, out);
    }

    /// Begins to bring `count` words near, as far as they are there.
    pub fn prefetch(&self, at: Word, count: usize) {
        let (from, end) = (at.0 as usize * 8, self.memory.len());
        (from..end.min(from + 8 * count))
            .step_by(64)
            .for_each(|at| self.memory.prefetch(at, For::Read));
    }

    /// Sets a word that nobody else changes.
    pub fn store(&self, at: Word, value: u64) {
        self.memory.store_be64(at.0 as usize * 8, value);
    }

    /// Puts `new` into a word if it is `expected`; what it was.
    pub fn swap(&self, at: Word, expected: u64, new: u64) -> u64 {
        let word = self.memory.word64(at.0 as usize * 8);
        let (expected, new) = (expected.to_be(), new.to_be());
        let found = word.compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire);
        u64::from_be(found.unwrap_or_else(|found| found))
    }
}

impl Verbs for Words {
    type Error = BrokenOff;

    async fn read(&self, at: Word, out: &mut [u64]) -> Result<(), BrokenOff> {
        for (i, word) in out.iter_mut().enumerate() {
            *word = self.load(Word(at.0 + i as u32));
        }
        Ok(())
    }

    async fn cas(&self, at: Word, expected: u64, new: u64) -> Result<u64, BrokenOff> {
        self.step()?;
        Ok(self.swap(at, expected, new))
    }
}

/// Runs what only works on [`Words`], which never waits.
pub(super) fn now<T>(future: impl Future<Output = Result<T, BrokenOff>>) -> Result<T, BrokenOff> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => unreachable!("words in memory are there at once"),
    }
}
