//! Leader and followers: of several handler threads, one reads the events.
//!
//! A userfaultfd wakes all threads that wait in read(2) for its events, so only the *leader* reads.
//! If the leader reads more than one fault, it hands the leadership over before it serves them, and
//! a *follower* reads the faults that occur meanwhile. With one faulting thread, the leader reads
//! one fault at a time and keeps the leadership: no follower is ever woken.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::wake::Futex;

/// Futex values.
const TAKEN: u32 = 0;
const VACANT: u32 = 1;

/// The right to read events. At most one thread has it.
#[derive(Debug)]
pub(crate) struct Leadership<F: Futex = AtomicU32> {
    state: F,
}

impl Default for Leadership {
    fn default() -> Self {
        Self { state: AtomicU32::new(VACANT) }
    }
}

impl<F: Futex> Leadership<F> {
    /// Waits until the leadership is vacant, and takes it.
    pub fn take(&self) {
        while !self.state.replace(VACANT, TAKEN) {
            self.state.sleep(TAKEN);
        }
    }

    /// Gives the leadership to a thread that waits for it, or to the next one that asks.
    pub fn hand_over(&self) {
        self.state.store(VACANT, Ordering::Release);
        self.state.wake_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn one_thread_leads_at_a_time() {
        const THREADS: u32 = 4;
        const ROUNDS: u32 = 2000;
        let leadership = Arc::new(Leadership::default());
        let leaders = Arc::new(AtomicU32::new(0));
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                let (leadership, leaders) = (leadership.clone(), leaders.clone());
                std::thread::spawn(move || {
                    for _ in 0..ROUNDS {
                        leadership.take();
                        assert_eq!(leaders.fetch_add(1, Ordering::Relaxed), 0);
                        leaders.fetch_sub(1, Ordering::Relaxed);
                        leadership.hand_over();
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    /// Three threads lead once each, in every order of their loads and stores that C11 allows.
    #[test]
    fn each_thread_leads_in_every_order() {
        use crate::wake::model::Modelled;
        type Shared = (Leadership<Modelled<true>>, loom::cell::UnsafeCell<u32>);
        crate::wake::check(|| {
            let leadership = Leadership { state: Modelled::new(VACANT) };
            // Loom reports two threads that access the cell at once.
            let shared = loom::sync::Arc::new((leadership, loom::cell::UnsafeCell::new(0)));
            let lead = |(leadership, led): &Shared| {
                leadership.take();
                // SAFETY: only the leader accesses the cell, and loom checks this.
                led.with_mut(|led| unsafe { *led += 1 });
                leadership.hand_over();
            };
            let others = [(); 2].map(|()| {
                let shared = shared.clone();
                loom::thread::spawn(move || lead(&shared))
            });
            lead(&shared);
            others.into_iter().for_each(|thread| thread.join().unwrap());
            // SAFETY: the other threads have ended.
            assert_eq!(shared.1.with(|led| unsafe { *led }), 3);
        });
    }
}
