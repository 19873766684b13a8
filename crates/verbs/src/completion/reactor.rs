//! Reactors, which complete futures when they are polled, and the wakers of waiting threads.
//!
//! Both sides use this module: `completion` implements reactors, and
//! [`executor`](crate::executor) polls them.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Wake;
use std::thread::Thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::Error;

/// A source of completions that completes futures when it is polled.
pub(crate) trait Reactor: Send + Sync {
    /// Polls once and returns the number of completions.
    fn poll(&self) -> usize;
    /// Yields this thread's CPU to the NIC if the NIC needs it to run.
    fn offer_cpu(&self) -> bool;
    /// Returns the number of waiting futures and threads.
    fn watchers(&self) -> usize;
    /// Sleeps on the CQ.
    fn wait(&self, timeout: Duration, done: &dyn Fn() -> bool) -> Result<(), Error>;
    /// Runs the idle callback after a time without completions.
    fn idle(&self);
    /// Wakes the thread that sleeps on the CQ.
    fn wake_leader(&self);
    /// Polls until `done` returns true, and sleeps while there is nothing to poll.
    fn sleep_until(self: Arc<Self>, done: &dyn Fn() -> bool) -> Result<(), Error>;
    /// Sleeps once, for at most `timeout`, unless `done` returns true. Returns the number of
    /// completions polled then.
    fn sleep_once(
        self: Arc<Self>,
        timeout: Duration,
        done: &dyn Fn() -> bool,
    ) -> Result<usize, Error>;
    /// Ensures that a driver thread polls while futures wait.
    fn ensure_driver(self: Arc<Self>);
}

thread_local! {
    /// The reactors that this thread's futures wait for; `None` while the thread polls none of its
    /// own futures ([`block_on`](crate::executor::block_on), [`Tasks`](crate::executor::Tasks)).
    static DRIVEN: RefCell<Option<Vec<Arc<dyn Reactor>>>> = const { RefCell::new(None) };
    /// The reactors of this thread's tasks, between two rounds.
    static LOOP: RefCell<Vec<Arc<dyn Reactor>>> = const { RefCell::new(Vec::new()) };
    /// Time at which the idle callbacks of [`LOOP`] ran last.
    static IDLE_AT: Cell<Option<Instant>> = const { Cell::new(None) };
    /// The waker of this thread.
    static ME: Arc<ThreadWaker> = Arc::new(ThreadWaker {
        thread: std::thread::current(),
        notified: AtomicBool::new(false),
        leads: Mutex::new(None),
    });
}

/// Ensures that `reactor` is polled for a future that has just registered its waker.
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

/// Takes the reactors that futures of this thread wait for.
pub(crate) fn take_reactors() -> Vec<Arc<dyn Reactor>> {
    let mut list = DRIVEN.replace(Some(Vec::new())).expect("within block_on");
    list.retain(|r| r.watchers() > 0);
    list
}

/// Returns the reactors that tasks of this thread wait for.
pub(crate) fn reactors_of_loop() -> Vec<Arc<dyn Reactor>> {
    LOOP.with_borrow_mut(|list| {
        list.retain(|r| r.watchers() > 0);
        list.clone()
    })
}

/// Returns true, about once in `period`, if this thread's tasks wait for completions.
pub(crate) fn idle_for(period: Duration) -> bool {
    let now = Instant::now();
    let before = IDLE_AT.get();
    let is_over = before.is_some_and(|before| now.duration_since(before) >= period);
    if is_over || before.is_none() {
        IDLE_AT.set(Some(now));
    }
    is_over
}

/// Returns the reactors that [`take_reactors`] took.
pub(crate) fn put_back(mut list: Vec<Arc<dyn Reactor>>) {
    DRIVEN.with_borrow_mut(|driven| {
        let driven = driven.as_mut().expect("within block_on");
        // Reactors that a waker has added meanwhile.
        list.append(driven);
        *driven = list;
    });
}

/// Marks this thread as running futures of its own.
pub(crate) struct Entered {
    /// The futures are tasks, whose reactors are kept for the next round.
    is_loop: bool,
}

impl Entered {
    /// Starts to run a future. Panics if the thread already runs one.
    pub fn enter() -> Self {
        Self::with(Vec::new(), false)
    }

    /// Starts a round of tasks. Panics if the thread already runs a future.
    pub fn enter_loop() -> Self {
        let mut list = LOOP.take();
        list.retain(|r| r.watchers() > 0);
        Self::with(list, true)
    }

    fn with(list: Vec<Arc<dyn Reactor>>, is_loop: bool) -> Self {
        DRIVEN.with_borrow_mut(|driven| {
            assert!(driven.is_none(), "block_on within block_on, or within a task");
            *driven = Some(list);
        });
        Entered { is_loop }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let list = DRIVEN.take();
        if self.is_loop {
            LOOP.set(list.unwrap_or_default());
        }
    }
}

/// Wakes one thread, whether it sleeps on a CQ or is parked.
pub(crate) struct ThreadWaker {
    thread: Thread,
    notified: AtomicBool,
    /// The reactor that the thread leads, if any: the thread may sleep on its CQ.
    leads: Mutex<Option<Arc<dyn Reactor>>>,
}

impl ThreadWaker {
    /// Returns the waker of the current thread.
    pub fn current() -> Arc<ThreadWaker> {
        ME.with(Arc::clone)
    }

    /// Returns the thread.
    pub(super) fn thread(&self) -> &Thread {
        &self.thread
    }

    /// Sets the reactor that the thread leads.
    pub(super) fn set_leads(&self, reactor: Option<Arc<dyn Reactor>>) {
        *self.leads.lock() = reactor;
    }

    /// Clears earlier wake-ups and returns whether there was one.
    pub fn clear_notification(&self) -> bool {
        self.notified.swap(false, Ordering::SeqCst)
    }

    /// Returns whether there was a wake-up.
    pub fn is_notified(&self) -> bool {
        self.notified.load(Ordering::SeqCst)
    }
}

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.notified.store(true, Ordering::SeqCst);
        if std::thread::current().id() == self.thread.id() {
            return;
        }
        if let Some(reactor) = &*self.leads.lock() {
            reactor.wake_leader();
        }
        self.thread.unpark();
    }
}
