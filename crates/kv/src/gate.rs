//! A gate: any number of tasks inside, or one task that has closed the gate.
//!
//! The gate is a lock for tasks. A task that waits registers its waker, and no lock of a thread is
//! held across an await.

use std::future::poll_fn;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

/// A gate.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    inside: u32,
    closed: bool,
    waiting: Vec<Waker>,
}

impl State {
    fn wait<T>(&mut self, cx: &Context<'_>) -> Poll<T> {
        if !self.waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
            self.waiting.push(cx.waker().clone());
        }
        Poll::Pending
    }
}

impl Gate {
    /// Enters, or returns false if the gate is closed. [`Gate::leave`] must follow.
    pub fn try_enter(&self) -> bool {
        let mut state = self.state.lock();
        state.inside += u32::from(!state.closed);
        !state.closed
    }

    /// Waits until the gate is open, and enters. [`Gate::leave`] must follow.
    pub async fn enter(&self) {
        poll_fn(|cx| {
            let mut state = self.state.lock();
            if state.closed {
                return state.wait(cx);
            }
            state.inside += 1;
            Poll::Ready(())
        })
        .await;
    }

    /// Waits until the gate is open, without entering.
    pub async fn opened(&self) {
        self.enter().await;
        self.leave();
    }

    /// Leaves.
    pub fn leave(&self) {
        let mut state = self.state.lock();
        state.inside -= 1;
        if state.inside == 0 && state.closed {
            wake(state);
        }
    }

    /// Closes the gate and waits until no task is inside. The gate opens when the value is dropped.
    pub async fn close(&self) -> Closed<'_> {
        poll_fn(|cx| {
            let mut state = self.state.lock();
            if state.closed {
                return state.wait(cx);
            }
            state.closed = true;
            Poll::Ready(())
        })
        .await;
        let closed = Closed { gate: self };
        poll_fn(|cx| {
            let mut state = self.state.lock();
            if state.inside > 0 { state.wait(cx) } else { Poll::Ready(()) }
        })
        .await;
        closed
    }
}

/// Wakes all waiting tasks, outside the lock.
fn wake(mut state: parking_lot::MutexGuard<'_, State>) {
    let mut waiting = std::mem::take(&mut state.waiting);
    drop(state);
    waiting.drain(..).for_each(Waker::wake);
}

/// A closed gate, with no task inside.
#[derive(Debug)]
pub(crate) struct Closed<'a> {
    gate: &'a Gate,
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        let mut state = self.gate.state.lock();
        state.closed = false;
        wake(state);
    }
}
