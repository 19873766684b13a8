//! The thread that re-establishes broken QPs of virtual QPs.
//!
//! A promotion takes a spare QP, and leaves a broken QP, whose re-establishment takes a round trip
//! of the control connection. No access waits for that round trip, so a thread makes it. The thread
//! starts with the first promotion of the pool, and sleeps until the next one.
//!
//! The thread has no share in the pool except while it re-establishes one QP. A pool that is
//! dropped meanwhile ends when that QP is done. The drop waits for nothing.

use std::sync::{Arc, OnceLock, Weak};
use std::thread;

use parking_lot::{Condvar, Mutex};
use verbs::Nic;

use super::inner::Inner;

/// Handle of the thread, in the state that the clones of a pool share.
pub(super) struct Restorer<N: Nic> {
    pool: OnceLock<Weak<Inner<N>>>,
    signal: Arc<Signal>,
}

#[derive(Default)]
struct Signal {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    is_started: bool,
    /// There may be a broken QP.
    is_wanted: bool,
    is_ended: bool,
}

impl<N: Nic> Default for Restorer<N> {
    fn default() -> Self {
        Self { pool: OnceLock::new(), signal: Arc::default() }
    }
}

impl<N: Nic> Restorer<N> {
    /// Names the pool whose QPs are re-established.
    pub fn set_pool(&self, pool: Weak<Inner<N>>) {
        let _ = self.pool.set(pool);
    }

    /// Has the thread re-establish all broken QPs. Does not wait.
    pub fn wake(&self) {
        let Some(pool) = self.pool.get() else { return };
        let mut state = self.signal.state.lock();
        state.is_wanted = true;
        if !state.is_started {
            let (pool, signal) = (pool.clone(), self.signal.clone());
            let thread = thread::Builder::new().name("granary-spares".into());
            // If no thread can be started, the QPs stay broken until the next promotion. When all
            // are, they are reset in place.
            state.is_started = thread.spawn(move || run(&pool, &signal)).is_ok();
        }
        drop(state);
        self.signal.changed.notify_one();
    }
}

impl<N: Nic> Drop for Restorer<N> {
    fn drop(&mut self) {
        self.signal.state.lock().is_ended = true;
        self.signal.changed.notify_one();
    }
}

fn run<N: Nic>(pool: &Weak<Inner<N>>, signal: &Signal) {
    loop {
        let mut state = signal.state.lock();
        signal.changed.wait_while(&mut state, |state| !state.is_wanted && !state.is_ended);
        if state.is_ended {
            return;
        }
        state.is_wanted = false;
        drop(state);
        // A QP that cannot be re-established stays broken until the next promotion.
        while pool.upgrade().is_some_and(|pool| pool.restore_one()) {}
    }
}
