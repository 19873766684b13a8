//! A small executor that runs one future on the calling thread and polls its completion queues.
//!
//! Futures on completions work under any executor. This one needs no other thread.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::backoff::Backoff;
use crate::completion::reactor::{Entered, Reactor, ThreadWaker, put_back, take_reactors};

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
