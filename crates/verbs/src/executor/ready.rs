//! The handshake between a loop that runs tasks and the wakers of these tasks.
//!
//! | side | stores | then loads |
//! | --- | --- | --- |
//! | a waker | the task's bit | `asleep`: ring the alarm? |
//! | the loop before it sleeps | `asleep` | the bits of all tasks |
//!
//! Each side stores its own word, executes a sequentially consistent fence, and loads the other
//! side's word. At least one side sees the other's store, so no wake-up is lost. The words are
//! generic so that a model checker can replace the machine's memory.

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A 64-bit word that both sides access.
pub trait Word {
    /// Loads the word.
    fn load(&self) -> u64;
    /// Stores `value`.
    fn store(&self, value: u64);
    /// Stores `value` and returns the previous value.
    fn swap(&self, value: u64) -> u64;
    /// Sets bits.
    fn set_bits(&self, bits: u64);
    /// A sequentially consistent fence between such words.
    fn fence();
}

impl Word for AtomicU64 {
    fn load(&self) -> u64 {
        self.load(Ordering::Acquire)
    }

    fn store(&self, value: u64) {
        self.store(value, Ordering::Release)
    }

    fn swap(&self, value: u64) -> u64 {
        self.swap(value, Ordering::AcqRel)
    }

    fn set_bits(&self, bits: u64) {
        self.fetch_or(bits, Ordering::AcqRel);
    }

    fn fence() {
        fence(Ordering::SeqCst)
    }
}

/// Marks a task as ready. Returns true if the caller must ring the alarm, because the loop sleeps
/// and no other waker has rung it.
pub fn mark<W: Word>(word: &W, bit: u64, asleep: &W) -> bool {
    word.set_bits(bit);
    W::fence();
    asleep.load() != 0 && asleep.swap(0) != 0
}

/// Announces that the loop is about to sleep. Returns false, and revokes the announcement, if a
/// task is ready.
pub fn may_sleep<'w, W: Word + 'w>(asleep: &W, words: impl IntoIterator<Item = &'w W>) -> bool {
    asleep.store(1);
    W::fence();
    let is_ready = words.into_iter().any(|word| word.load() != 0);
    if is_ready {
        asleep.store(0);
    }
    !is_ready
}

#[cfg(all(test, not(miri)))]
mod tests {
    use loom::sync::atomic as model;
    use loom::sync::{Arc, Condvar, Mutex};

    use super::*;

    /// A word of the model checker. `FENCES` selects whether its fences have an effect.
    #[derive(Default)]
    struct Modelled<const FENCES: bool>(model::AtomicU64);

    impl<const FENCES: bool> Word for Modelled<FENCES> {
        fn load(&self) -> u64 {
            self.0.load(Ordering::Acquire)
        }
        fn store(&self, value: u64) {
            self.0.store(value, Ordering::Release)
        }
        fn swap(&self, value: u64) -> u64 {
            self.0.swap(value, Ordering::AcqRel)
        }
        fn set_bits(&self, bits: u64) {
            self.0.fetch_or(bits, Ordering::AcqRel);
        }
        fn fence() {
            if FENCES {
                model::fence(Ordering::SeqCst);
            }
        }
    }

    /// An eventfd: `sleep` returns once it was written.
    struct Eventfd(Mutex<bool>, Condvar);

    impl Eventfd {
        fn write(&self) {
            *self.0.lock().expect("a lock of the model") = true;
            self.1.notify_one();
        }

        fn sleep(&self) {
            let mut written = self.0.lock().expect("a lock of the model");
            while !std::mem::take(&mut *written) {
                written = self.1.wait(written).expect("a lock of the model");
            }
        }
    }

    /// Two wakers and a loop that sleeps until it has seen both tasks. Deadlocks if a wake-up is
    /// lost. Checks every interleaving with at most two preemptions. With three, loom 0.7 finds an
    /// execution that C11 forbids: a load after a fence returns the value of a `swap` that precedes
    /// a newer store in the modification order, because the `swap` does not happen before that
    /// store.
    fn wake_two_tasks<const FENCES: bool>() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(2);
        builder.check(|| {
            let words: Arc<[Modelled<FENCES>; 2]> = Arc::default();
            let asleep: Arc<Modelled<FENCES>> = Arc::default();
            let alarm = Arc::new(Eventfd(Mutex::new(false), Condvar::new()));
            let wakers = [0, 1].map(|task| {
                let (words, asleep, alarm) = (words.clone(), asleep.clone(), alarm.clone());
                loom::thread::spawn(move || {
                    if mark(&words[task], 1, &*asleep) {
                        alarm.write();
                    }
                })
            });
            let mut seen = 0;
            while seen < 2 {
                if may_sleep(&*asleep, &*words) {
                    alarm.sleep();
                    asleep.store(0);
                }
                seen += words.iter().filter(|word| word.swap(0) != 0).count();
            }
            for waker in wakers {
                waker.join().expect("a waker");
            }
        });
    }

    #[test]
    fn wakeup_of_a_task_is_not_lost() {
        wake_two_tasks::<true>();
    }

    #[test]
    #[should_panic = "deadlock"]
    fn wakeup_without_fences_is_lost() {
        wake_two_tasks::<false>();
    }
}
