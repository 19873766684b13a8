//! A descriptor that shows completions of a CQ.
//!
//! The NIC wakes the sleepers of a CQ by a futex, which poll(2) cannot wait for. So a thread sleeps
//! on the CQ and writes an eventfd. It sleeps there only while the event is armed.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::event::EventfdFlags;
use verbs::CompletionQueue;

use crate::Error;

/// The descriptor, and the thread that sleeps on the CQ.
pub(super) struct CompletionEvent<C: CompletionQueue> {
    shared: Arc<Shared<C>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared<C> {
    cq: C,
    event: OwnedFd,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    is_armed: bool,
    is_ended: bool,
    /// Why the NIC is considered gone.
    gone: Option<String>,
}

impl<C: CompletionQueue> CompletionEvent<C> {
    pub fn new(cq: C) -> Result<Self, Error> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let event = rustix::event::eventfd(0, flags).map_err(|e| Error::System {
            attempt: "creating an eventfd".into(),
            source: e.into(),
        })?;
        let (state, changed) = (Mutex::default(), Condvar::new());
        Ok(Self { shared: Arc::new(Shared { cq, event, state, changed }), thread: None })
    }

    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }

    /// Makes the descriptor readable at the next completion that is not polled.
    pub fn arm(&mut self) -> Result<(), Error> {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        if let Some(why) = &state.gone {
            let attempt = "waiting for a completion".into();
            return Err(Error::Gone { attempt, why: why.clone() });
        }
        if !state.is_armed {
            // A counter of an earlier event; none if the counter is 0.
            let _ = rustix::io::read(&shared.event, &mut [0; 8]);
        }
        state.is_armed = true;
        drop(state);
        shared.changed.notify_one();
        if self.thread.is_none() {
            let shared = shared.clone();
            let thread = std::thread::Builder::new().name("granary-lent".into());
            let thread = thread.spawn(move || shared.run()).map_err(|source| Error::System {
                attempt: "starting a thread that waits for completions".into(),
                source,
            })?;
            self.thread = Some(thread);
        }
        Ok(())
    }
}

impl<C: CompletionQueue> Shared<C> {
    /// The thread: sleeps on the CQ whenever the event is armed.
    fn run(&self) {
        loop {
            let mut state = self.state.lock();
            self.changed.wait_while(&mut state, |state| !state.is_armed && !state.is_ended);
            if state.is_ended {
                return;
            }
            drop(state);
            let is_ready = self.cq.wait_unless(Duration::MAX, &|| self.state.lock().is_ended);
            let mut state = self.state.lock();
            match is_ready {
                Ok(false) => continue,
                Ok(true) => state.is_armed = false,
                Err(why) => {
                    state.gone = Some(why.to_string());
                    state.is_armed = false;
                }
            }
            // Cannot fail: the counter is 0 while the event is armed.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }
}

impl<C: CompletionQueue> Drop for CompletionEvent<C> {
    fn drop(&mut self) {
        self.shared.state.lock().is_ended = true;
        self.shared.changed.notify_one();
        self.shared.cq.wake();
        if let Some(thread) = self.thread.take() {
            // The thread ends at the latest when its sleep is over.
            let _ = thread.join();
        }
    }
}
