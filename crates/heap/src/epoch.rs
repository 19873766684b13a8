//! Epochs: the time after which no reader can know a block that was freed.
//!
//! A reader holds a [`Guard`] while it uses places that it has read. Each guard belongs to the
//! epoch in which it was made. Epoch `e + 1` begins only when no guard of epoch `e - 1` is left. A
//! block that is unlinked in epoch `e` may be known to readers of epoch `e` and older ones, and all
//! of them have ended when epoch `e + 2` has begun.
//!
//! Guards are counted, not listed: a thread that serves many commands at once holds a guard for
//! each command, and drops them in any order. A *lane* has three counters, one for each epoch
//! modulo three, in a cache line of its own. Each thread uses a lane of its own by convention; two
//! threads in one lane are correct too. Making and dropping a guard takes no lock and never waits
//! for another thread.
//!
//! # Memory order
//!
//! A reader increments the counter of the epoch that it has loaded, executes a fence, and loads
//! the epoch again; if it has changed, the reader starts again. A thread that begins an epoch loads
//! the epoch, executes a fence, and loads the counters. So either the reader sees the new epoch, or
//! the other thread sees the reader's count. The fence of [`Epochs::retire`] stands between the
//! unlinking of a block and the load of the epoch: a reader that loads a later epoch sees that
//! the block is unlinked. Module `tests` checks both with a model checker.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// An atomic word. A model checker can replace the machine's memory.
trait Word {
    fn new(value: u64) -> Self;
    fn load(&self, order: Ordering) -> u64;
    fn add(&self, order: Ordering);
    fn subtract(&self, order: Ordering);
    /// Replaces `from` by `to`; an error has the value found.
    fn replace(&self, from: u64, to: u64) -> Result<u64, u64>;
    /// A fence between such words.
    fn fence();
}

impl Word for AtomicU64 {
    #[inline]
    fn new(value: u64) -> Self {
        Self::new(value)
    }

    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    #[inline]
    fn add(&self, order: Ordering) {
        self.fetch_add(1, order);
    }

    #[inline]
    fn subtract(&self, order: Ordering) {
        self.fetch_sub(1, order);
    }

    #[inline]
    fn replace(&self, from: u64, to: u64) -> Result<u64, u64> {
        self.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire)
    }

    #[inline]
    fn fence() {
        fence(Ordering::SeqCst);
    }
}

/// Epochs whose guards can exist at a time: the current one and the one before it. The third
/// counter is that of the epoch that comes next.
const COUNTERS: u64 = 3;

/// Two cache lines, because x86 fetches pairs of lines.
#[repr(align(128))]
struct Apart<T>(T);

struct Clock<W> {
    now: Apart<W>,
    lanes: Box<[Apart<[W; COUNTERS as usize]>]>,
}

impl<W: Word> Clock<W> {
    fn new(lanes: usize) -> Self {
        let lane = || Apart([W::new(0), W::new(0), W::new(0)]);
        let lanes = (0..lanes.max(1)).map(|_| lane()).collect();
        // Not 0, so that the epoch before the first is a number.
        Self { now: Apart(W::new(1)), lanes }
    }

    #[inline]
    fn counter(&self, lane: usize, epoch: u64) -> &W {
        &self.lanes[lane].0[(epoch % COUNTERS) as usize]
    }

    /// Counts a guard. Returns its epoch.
    #[inline]
    fn pin(&self, lane: usize) -> u64 {
        let mut epoch = self.now.0.load(Ordering::Acquire);
        loop {
            self.counter(lane, epoch).add(Ordering::Relaxed);
            W::fence();
            let again = self.now.0.load(Ordering::Acquire);
            if again == epoch {
                return epoch;
            }
            self.counter(lane, epoch).subtract(Ordering::Release);
            epoch = again;
        }
    }

    #[inline]
    fn unpin(&self, lane: usize, epoch: u64) {
        self.counter(lane, epoch).subtract(Ordering::Release);
    }

    #[inline]
    fn retire(&self) -> u64 {
        W::fence();
        self.now.0.load(Ordering::Relaxed)
    }

    fn advance(&self) -> u64 {
        let now = self.now.0.load(Ordering::Acquire);
        W::fence();
        let has_guards = |lane| self.counter(lane, now - 1).load(Ordering::Acquire) > 0;
        if (0..self.lanes.len()).any(has_guards) {
            return now;
        }
        match self.now.0.replace(now, now + 1) {
            Ok(_) => now + 1,
            Err(newer) => newer,
        }
    }
}

/// The epochs of a heap.
///
/// ```
/// let epochs = heap::Epochs::new(1);
/// let guard = epochs.pin(0);
/// let unlinked = epochs.retire();
/// epochs.advance();
/// assert!(!epochs.has_passed(unlinked), "the guard's owner may know the block");
/// drop(guard);
/// epochs.advance();
/// assert!(epochs.has_passed(unlinked));
/// ```
pub struct Epochs(Clock<AtomicU64>);

impl Epochs {
    /// Epochs with `lanes` lanes, at least one.
    pub fn new(lanes: usize) -> Self {
        Self(Clock::new(lanes))
    }

    /// Makes a guard in lane `lane`, taken modulo the number of lanes.
    #[inline]
    pub fn pin(&self, lane: usize) -> Guard<&Self> {
        Guard::new(self, lane)
    }

    /// Like [`Epochs::pin`], with a guard that borrows nothing.
    pub fn pin_owned(self: &Arc<Self>, lane: usize) -> Guard<Arc<Self>> {
        Guard::new(self.clone(), lane)
    }

    /// The current epoch.
    #[inline]
    pub fn now(&self) -> u64 {
        self.0.now.0.load(Ordering::Acquire)
    }

    /// Begins the next epoch, unless a guard of the last epoch is left. Returns the current epoch.
    pub fn advance(&self) -> u64 {
        self.0.advance()
    }

    /// Begins two epochs if no guard prevents that. All blocks retired before have then passed.
    pub(crate) fn advance_twice(&self) {
        self.advance();
        self.advance();
    }

    /// The epoch of a block that the caller has unlinked before this call.
    #[inline]
    pub fn retire(&self) -> u64 {
        self.0.retire()
    }

    /// True if no guard can know a block that was unlinked in `epoch`.
    #[inline]
    pub fn has_passed(&self, epoch: u64) -> bool {
        epoch + 2 <= self.now()
    }
}

impl AsRef<Epochs> for Epochs {
    fn as_ref(&self) -> &Self {
        self
    }
}

/// Keeps all blocks that are linked when the guard is made from being used again.
///
/// A guard that is never dropped keeps all blocks that are freed later in limbo.
#[must_use = "the guard ends when it is dropped"]
pub struct Guard<E: AsRef<Epochs>> {
    epochs: E,
    lane: usize,
    epoch: u64,
}

impl<E: AsRef<Epochs>> Guard<E> {
    #[inline]
    fn new(epochs: E, lane: usize) -> Self {
        let clock = &epochs.as_ref().0;
        let lanes = clock.lanes.len();
        let lane = if lane < lanes { lane } else { lane % lanes };
        let epoch = clock.pin(lane);
        Self { epochs, lane, epoch }
    }

    /// The epoch of the guard.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}

impl<E: AsRef<Epochs>> Drop for Guard<E> {
    #[inline]
    fn drop(&mut self) {
        self.epochs.as_ref().0.unpin(self.lane, self.epoch);
    }
}

#[cfg(test)]
mod tests;
