//! Small executors that poll the completion queues of their futures on the calling thread.
//!
//! Futures on completions work under any executor. These need no other thread: [`block_on`] runs
//! one future to its end. An event loop runs many, as [`Tasks`], and sleeps in [`park`].

mod ready;
mod tasks;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::backoff::Backoff;
use crate::completion::IDLE;
use crate::completion::reactor::{
    Entered, Reactor, ThreadWaker, idle_for, put_back, reactors_of_loop, take_reactors,
};

pub use tasks::{EventFd, TaskId, Tasks};

/// Runs `future` to completion on this thread. Polls while progress is likely soon, then sleeps.
///
/// Panics if called from a future that already runs under `block_on`.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let _entered = Entered::enter();
    let me = ThreadWaker::current();
    let waker = Waker::from(me.clone());
    let mut cx = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        me.clear_notification();
        if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
            return output;
        }
        let reactors = take_reactors();
        let mut backoff = Backoff::new();
        while !me.is_notified() {
            let polled: usize = reactors.iter().map(|r| r.poll()).sum();
            if polled > 0 || reactors.iter().any(|r| r.offer_cpu()) && me.is_notified() {
                continue;
            }
            if !backoff.snooze() {
                sleep(&me, &reactors);
            }
        }
        put_back(reactors);
    }
}

/// Sleeps until the thread's waker has been called.
fn sleep(me: &Arc<ThreadWaker>, reactors: &[Arc<dyn Reactor>]) {
    if let [reactor] = reactors {
        // If the NIC is gone, its futures have been woken and report the error.
        let _ = reactor.clone().sleep_until(&|| me.is_notified());
        return;
    }
    // Because a thread can sleep on one CQ only, driver threads poll the CQs.
    for reactor in reactors {
        reactor.clone().ensure_driver();
    }
    while !me.is_notified() {
        std::thread::park();
    }
}

/// Returns the waker of the calling thread, which ends a [`park`] there.
pub fn thread_waker() -> Waker {
    ThreadWaker::current().into()
}

/// Waits until `poll` has polled a completion, the thread's waker has been called, or `timeout` has
/// passed. Returns the number of completions.
///
/// For event loops: `poll` polls the CQs of the loop. The call polls while progress is likely soon,
/// then sleeps on the CQ that this thread's [`Tasks`] wait for. If they wait for several CQs, the
/// thread sleeps on the one with the most waiters, and driver threads poll the others.
///
/// A completion that another thread polls ends the call if it wakes one of this thread's tasks,
/// their alarm is [`thread_waker`], and the call is made in [`Tasks::sleep`]. With virtual time
/// there is nothing to sleep on.
pub fn park(timeout: Duration, poll: impl Fn() -> usize) -> usize {
    let me = ThreadWaker::current();
    let started = Instant::now();
    let reactors = reactors_of_loop();
    let mut backoff = Backoff::new();
    loop {
        let mut polled = poll();
        if polled == 0 && reactors.iter().any(|r| r.offer_cpu()) {
            polled = poll();
        }
        let left = timeout.saturating_sub(started.elapsed());
        if polled > 0 || me.clear_notification() || left.is_zero() {
            return polled;
        }
        if backoff.snooze() {
            continue;
        }
        polled = sleep_once(&me, &reactors, left);
        if idle_for(IDLE) {
            reactors.iter().for_each(|r| r.idle());
        }
        if polled > 0 {
            return polled;
        }
    }
}

/// Sleeps once, for at most `timeout`, and returns the number of completions polled then.
fn sleep_once(me: &Arc<ThreadWaker>, reactors: &[Arc<dyn Reactor>], timeout: Duration) -> usize {
    let Some(most) = reactors.iter().max_by_key(|r| r.watchers()) else {
        if !me.is_notified() {
            std::thread::park_timeout(timeout);
        }
        return 0;
    };
    for other in reactors.iter().filter(|r| !Arc::ptr_eq(r, most)) {
        other.clone().ensure_driver();
    }
    // If the NIC is gone, its futures have been woken and report the error.
    most.clone().sleep_once(timeout, &|| me.is_notified()).unwrap_or(0)
}
