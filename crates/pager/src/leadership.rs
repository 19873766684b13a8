//! Leader and followers: of several handler threads, one reads the events.
//!
//! A userfaultfd wakes all threads that wait in read(2) for its events, so only the *leader* reads.
//! If the leader reads more than one fault, it hands the leadership over before it serves them, and
//! a *follower* reads the faults that occur meanwhile. With one faulting thread, the leader reads
//! one fault at a time and keeps the leadership: no follower is ever woken.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::sys;

/// Futex values.
const TAKEN: u32 = 0;
const VACANT: u32 = 1;

/// The right to read events. At most one thread has it.
#[derive(Debug)]
pub(crate) struct Leadership {
    state: AtomicU32,
}

impl Default for Leadership {
    fn default() -> Self {
        Self { state: AtomicU32::new(VACANT) }
    }
}

impl Leadership {
    /// Waits until the leadership is vacant, and takes it.
    pub fn take(&self) {
        while self.state.swap(TAKEN, Ordering::Acquire) == TAKEN {
            sys::futex_wait(&self.state, TAKEN, None);
        }
    }

    /// Gives the leadership to a thread that waits for it, or to the next one that asks.
    pub fn hand_over(&self) {
        self.state.store(VACANT, Ordering::Release);
        sys::futex_wake(&self.state);
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
}
