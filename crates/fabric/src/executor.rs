//! A small executor: one future on the calling thread, which polls the completion queues that it
//! waits for.
//!
//! Futures on completions work under any executor; under this one no other thread is needed.

use std::cell::RefCell;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::backoff::Backoff;
use crate::completion::{Reactor, ThreadWaker};

thread_local! {
    /// What the future that this thread runs waits for; `None` outside of [`block_on`].
    static DRIVEN: RefCell<Option<Vec<Arc<dyn Reactor>>>> = const { RefCell::new(None) };
}

/// Runs `future` to its end on this thread: polls while something may happen soon, then sleeps.
///
/// Panics if called by a future that runs under it.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let _entered = Entered::enter();
    let me = ThreadWaker::current();
    let waker = Waker::from(me.clone());
    let mut cx = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        me.take_notice();
        if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
            return output;
        }
        let reactors = take_reactors();
        let mut backoff = Backoff::new();
        while !me.is_notified() {
            let polled: usize = reactors.iter().map(|r| r.turn()).sum();
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

/// Sleeps until the waker has been called.
fn sleep(me: &Arc<ThreadWaker>, reactors: &[Arc<dyn Reactor>]) {
    if let [reactor] = reactors {
        // A NIC that is gone has woken the futures that wait for it.
        let _ = reactor.clone().sleep_until(&|| me.is_notified());
        return;
    }
    // A thread can sleep on one CQ only.
    for reactor in reactors {
        reactor.clone().ensure_driver();
    }
    while !me.is_notified() {
        std::thread::park();
    }
}

/// Has `reactor` polled for a future that has just registered its waker.
pub(crate) fn drive<R: Reactor + 'static>(reactor: Arc<R>) {
    let reactor: Arc<dyn Reactor> = reactor;
    let here = DRIVEN.with_borrow_mut(|driven| match driven {
        None => false,
        Some(list) => {
            if !list.iter().any(|r| Arc::ptr_eq(r, &reactor)) {
                list.push(reactor.clone());
            }
            true
        }
    });
    if !here {
        reactor.ensure_driver();
    }
}

/// The reactors that futures of this thread wait for.
fn take_reactors() -> Vec<Arc<dyn Reactor>> {
    let mut list = DRIVEN.replace(Some(Vec::new())).expect("within block_on");
    list.retain(|r| r.is_watched());
    list
}

fn put_back(mut list: Vec<Arc<dyn Reactor>>) {
    DRIVEN.with_borrow_mut(|driven| {
        let driven = driven.as_mut().expect("within block_on");
        // What a waker has added meanwhile.
        list.append(driven);
        *driven = list;
    });
}

/// This thread runs a future.
struct Entered;

impl Entered {
    fn enter() -> Self {
        DRIVEN.with_borrow_mut(|driven| {
            assert!(driven.is_none(), "block_on within block_on");
            *driven = Some(Vec::new());
        });
        Entered
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        DRIVEN.set(None);
    }
}
