//! Sleep and wake-up between threads of the pager, and between a process and the assist.
//!
//! A thread that sleeps announces this first, so that other threads make a system call only for a
//! thread that sleeps. The announcement and the event are a store-buffer pair: each side stores its
//! own word, executes a sequentially consistent fence, and loads the other side's word. At least
//! one side sees the other's store, so no wake-up is lost.
//!
//! The words are a trait, so that a model checker can replace the machine's memory and its futexes.

use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::sys;

/// A 32-bit word on which threads sleep.
pub(crate) trait Futex {
    /// Loads the word.
    fn load(&self, order: Ordering) -> u32;
    /// Stores `value`.
    fn store(&self, value: u32, order: Ordering);
    /// Stores `value` if the word is `before`, with [`Ordering::Acquire`]. Returns true if it was.
    fn replace(&self, before: u32, value: u32) -> bool;
    /// Adds one.
    fn increment(&self, order: Ordering);
    /// A sequentially consistent fence between such words.
    fn fence();
    /// Sleeps until a wake-up, unless the word differs from `value`. Returns early at times.
    fn sleep(&self, value: u32);
    /// Wakes one thread of this process that sleeps on the word.
    fn wake_one(&self);
}

impl Futex for AtomicU32 {
    #[inline]
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }

    #[inline]
    fn store(&self, value: u32, order: Ordering) {
        self.store(value, order);
    }

    #[inline]
    fn replace(&self, before: u32, value: u32) -> bool {
        self.compare_exchange(before, value, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline]
    fn increment(&self, order: Ordering) {
        self.fetch_add(1, order);
    }

    #[inline]
    fn fence() {
        fence(Ordering::SeqCst);
    }

    fn sleep(&self, value: u32) {
        sys::futex_wait(self, value, None);
    }

    fn wake_one(&self) {
        sys::futex_wake(self);
    }
}

/// Value of the announcement of a thread that sleeps or is about to.
const SLEEPS: u32 = 1;

/// Announces that the calling thread is about to sleep. The thread looks for the event once more
/// afterwards.
pub(crate) fn announce<F: Futex>(sleeps: &F) {
    sleeps.store(SLEEPS, Ordering::Relaxed);
    F::fence();
}

/// Returns true if a thread has announced that it sleeps. Called after the store of the event for
/// which the thread waits.
pub(crate) fn is_announced<F: Futex>(sleeps: &F) -> bool {
    F::fence();
    sleeps.load(Ordering::Relaxed) != 0
}

/// Announces that the calling thread is about to sleep on `event`. Returns false if the event has
/// happened since `seen` was loaded. In both cases [`end_sleep`] follows.
pub(crate) fn may_sleep<F: Futex>(sleeps: &F, event: &F, seen: u32) -> bool {
    announce(sleeps);
    event.load(Ordering::Acquire) == seen
}

/// Revokes an announcement.
pub(crate) fn end_sleep<F: Futex>(sleeps: &F) {
    sleeps.store(0, Ordering::Relaxed);
}

/// Notes that the event has happened. Returns true if the caller must wake the sleeping thread.
pub(crate) fn must_wake<F: Futex>(sleeps: &F, event: &F) -> bool {
    event.increment(Ordering::Release);
    is_announced(sleeps)
}

/// Checks every order of a model with at most three preemptions, or four in a full test run
/// (`GRANARY_TEST_FULL`). Each further preemption multiplies the orders by about eight.
#[cfg(test)]
pub(crate) fn check(model: fn()) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = match std::env::var_os("GRANARY_TEST_FULL") {
        None => Some(3),
        Some(_) => Some(4),
    };
    builder.check(model);
}

#[cfg(test)]
pub(crate) mod model {
    use super::*;
    use loom::sync::{Arc, Condvar, Mutex};
    use std::collections::VecDeque;

    /// A futex of the model checker. `FENCES` selects whether its fences have an effect.
    pub(crate) struct Modelled<const FENCES: bool> {
        word: loom::sync::atomic::AtomicU32,
        sleepers: Mutex<VecDeque<Arc<Sleeper>>>,
    }

    /// A thread that sleeps, and whether it was woken. Each has a condition variable of its own:
    /// loom's `notify_one` may choose a thread that does not wait any more.
    struct Sleeper(Mutex<bool>, Condvar);

    impl<const FENCES: bool> Modelled<FENCES> {
        pub(crate) fn new(value: u32) -> Self {
            let word = loom::sync::atomic::AtomicU32::new(value);
            Self { word, sleepers: Mutex::default() }
        }
    }

    impl<const FENCES: bool> Futex for Modelled<FENCES> {
        fn load(&self, order: Ordering) -> u32 {
            self.word.load(order)
        }

        fn store(&self, value: u32, order: Ordering) {
            self.word.store(value, order);
        }

        fn replace(&self, before: u32, value: u32) -> bool {
            let order = (Ordering::Acquire, Ordering::Relaxed);
            self.word.compare_exchange(before, value, order.0, order.1).is_ok()
        }

        fn increment(&self, order: Ordering) {
            self.word.fetch_add(1, order);
        }

        fn fence() {
            if FENCES {
                loom::sync::atomic::fence(Ordering::SeqCst);
            }
        }

        fn sleep(&self, value: u32) {
            let mut sleepers = self.sleepers.lock().unwrap();
            if self.word.load(Ordering::SeqCst) != value {
                return;
            }
            let sleeper = Arc::new(Sleeper(Mutex::new(false), Condvar::new()));
            sleepers.push_back(sleeper.clone());
            drop(sleepers);
            let mut is_woken = sleeper.0.lock().unwrap();
            while !*is_woken {
                is_woken = sleeper.1.wait(is_woken).unwrap();
            }
        }

        fn wake_one(&self) {
            let Some(sleeper) = self.sleepers.lock().unwrap().pop_front() else { return };
            *sleeper.0.lock().unwrap() = true;
            sleeper.1.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::model::Modelled;
    use super::*;

    /// A thread gives the worker two pieces of work, while the worker sleeps whenever it finds
    /// none.
    fn worker<const FENCES: bool>() {
        // The announcement, the event, and the pieces of work.
        let shared = || Modelled::<FENCES>::new(0);
        let shared = loom::sync::Arc::new((shared(), shared(), shared()));
        let giver = loom::thread::spawn({
            let shared = shared.clone();
            move || {
                let (sleeps, event, work) = &*shared;
                for piece in 1..=2 {
                    work.store(piece, Ordering::Release);
                    if must_wake(sleeps, event) {
                        event.wake_one();
                    }
                }
            }
        });
        let (sleeps, event, work) = &*shared;
        loop {
            let seen = event.load(Ordering::Acquire);
            if work.load(Ordering::Acquire) == 2 {
                break;
            }
            if may_sleep(sleeps, event, seen) {
                event.sleep(seen);
            }
            end_sleep(sleeps);
        }
        giver.join().unwrap();
    }

    #[test]
    fn no_work_is_left_with_a_sleeping_worker() {
        check(worker::<true>);
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn without_fences_a_wake_up_is_lost() {
        check(worker::<false>);
    }
}
