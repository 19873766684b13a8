//! READ and CAS of the memory node's CPU on its own metadata.
//!
//! The words are big-endian. CPU and NIC change the same words, so the NIC's atomics must be atomic to the
//! CPU's too (`IBV_ATOMIC_GLOB`); those of the software NIC are. On one that is not coherent in that way these
//! would be verbs over a QP of the memory node with itself.

use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};

use fabric::DmaMemory;

use super::layout::Word;
use super::tree::Verbs;

/// The metadata as the memory node's CPU sees it.
pub(super) struct Words(pub DmaMemory);

impl Words {
    /// A word.
    pub fn load(&self, at: Word) -> u64 {
        self.0.load_be64(at.0 as usize * 8)
    }

    /// Sets a word that nobody else changes.
    pub fn store(&self, at: Word, value: u64) {
        self.0.store_be64(at.0 as usize * 8, value);
    }

    /// Puts `new` into a word if it is `expected`; what it was.
    pub fn swap(&self, at: Word, expected: u64, new: u64) -> u64 {
        let word = self.0.word64(at.0 as usize * 8);
        let (expected, new) = (expected.to_be(), new.to_be());
        let found = word.compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire);
        u64::from_be(found.unwrap_or_else(|found| found))
    }
}

impl Verbs for Words {
    type Error = Infallible;

    async fn read(&self, at: Word, out: &mut [u64]) -> Result<(), Infallible> {
        for (i, word) in out.iter_mut().enumerate() {
            *word = self.load(Word(at.0 + i as u32));
        }
        Ok(())
    }

    async fn cas(&self, at: Word, expected: u64, new: u64) -> Result<u64, Infallible> {
        Ok(self.swap(at, expected, new))
    }
}

/// Runs what only works on [`Words`], which never waits.
pub(super) fn now<T>(future: impl Future<Output = Result<T, Infallible>>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(value)) => value,
        Poll::Ready(Err(never)) => match never {},
        Poll::Pending => unreachable!("words in memory are there at once"),
    }
}
