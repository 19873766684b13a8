//! A barrier for the threads of a measurement.
//!
//! Waiting is a future, so that the same barrier works under virtual time and on a clock.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// State of a barrier.
#[derive(Default)]
struct State {
    members: u32,
    arrived: u32,
    /// Number of completed waits; distinguishes one wait from the next.
    generation: u64,
    waiting: Vec<Waker>,
}

/// One thread's handle of a barrier. Dropping it removes the thread from the barrier.
pub struct BarrierMember(Arc<Mutex<State>>);

/// Creates a barrier and returns the handles of its `count` threads.
pub fn members(count: u32) -> Vec<BarrierMember> {
    let state = Arc::new(Mutex::new(State { members: count, ..State::default() }));
    (0..count).map(|_| BarrierMember(state.clone())).collect()
}

impl State {
    /// Releases the waiting threads if all members have arrived.
    fn release_if_complete(&mut self) {
        if self.arrived >= self.members {
            self.arrived = 0;
            self.generation += 1;
            self.waiting.drain(..).for_each(Waker::wake);
        }
    }
}

impl BarrierMember {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all members have arrived.
    pub async fn wait(&self) {
        let generation = {
            let mut state = self.state();
            let generation = state.generation;
            state.arrived += 1;
            state.release_if_complete();
            generation
        };
        poll_fn(|context| {
            let mut state = self.state();
            if state.generation != generation {
                return Poll::Ready(());
            }
            state.waiting.push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl Drop for BarrierMember {
    fn drop(&mut self) {
        let mut state = self.state();
        state.members -= 1;
        state.release_if_complete();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;

    use verbs::executor::block_on;

    use super::*;

    #[test]
    fn barrier_waits_for_all_but_dropped_members() {
        let arrived = AtomicU32::new(0);
        thread::scope(|scope| {
            for (at, member) in members(4).into_iter().enumerate() {
                let arrived = &arrived;
                scope.spawn(move || {
                    for round in 1..=3 {
                        if at == 3 && round == 2 {
                            return;
                        }
                        arrived.fetch_add(1, Ordering::SeqCst);
                        block_on(member.wait());
                        let expected = if round == 1 { 4 } else { 4 + 3 * (round - 1) };
                        assert!(arrived.load(Ordering::SeqCst) >= expected);
                    }
                });
            }
        });
    }
}
