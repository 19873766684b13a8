//! How the users of one CQ sleep.
//!
//! Of the threads that wait for completions of a CQ one leads: it sleeps on the CQ, and hands
//! every completion that it polls to whom it belongs. The others park until theirs is there. When the
//! leader has what it waited for, it unparks one of them, which leads from then on.
//!
//! A leader whose completion is polled by a thread that does not sleep at all is woken through the
//! CQ: [`CompletionQueue::wait_unless`] makes that certain.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Wake;
use std::thread::Thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Reactor;
use crate::Error;

/// The longest sleep in one go. Nothing depends on waking up then: it bounds what a defect of a
/// NIC can do. (In tests it is so long that a lost wake-up is noticed.)
pub(super) const SLEEP_MAX: Duration = Duration::from_millis(if cfg!(test) { 20_000 } else { 100 });

thread_local! {
    static ME: Arc<ThreadWaker> = Arc::new(ThreadWaker {
        thread: std::thread::current(),
        notified: AtomicBool::new(false),
        leads: Mutex::new(None),
    });
}

/// Wakes one thread, wherever it sleeps.
pub(crate) struct ThreadWaker {
    thread: Thread,
    notified: AtomicBool,
    /// What the thread leads: it may sleep on its CQ.
    leads: Mutex<Option<Arc<dyn Reactor>>>,
}

impl ThreadWaker {
    /// This thread's.
    pub fn current() -> Arc<ThreadWaker> {
        ME.with(Arc::clone)
    }

    /// Forgets earlier wake-ups; true if there was one.
    pub fn take_notice(&self) -> bool {
        self.notified.swap(false, Ordering::SeqCst)
    }

    /// Whether there was a wake-up.
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

/// Who leads, and who is parked.
#[derive(Default)]
pub(super) struct Sleepers {
    lead: Mutex<()>,
    parked: Mutex<Vec<Thread>>,
}

impl Sleepers {
    /// Sleeps until `done`, polling for all while it leads. Whoever makes `done` true wakes this
    /// thread through its [`ThreadWaker`].
    pub fn sleep_until(
        &self,
        reactor: &Arc<dyn Reactor>,
        done: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        let me = ThreadWaker::current();
        let mut must_lead = false;
        while !done() {
            if let Some(lead) = self.lead.try_lock() {
                *me.leads.lock() = Some(reactor.clone());
                let result = lead_until(reactor, done);
                *me.leads.lock() = None;
                drop(lead);
                self.hand_over();
                return result;
            }
            self.parked.lock().push(me.thread.clone());
            // A leader that left before it could see this thread has left the lead free.
            if self.lead.is_locked() && !done() {
                std::thread::park_timeout(SLEEP_MAX);
            }
            let mut parked = self.parked.lock();
            match parked.iter().position(|t| t.id() == me.thread.id()) {
                Some(at) => drop(parked.swap_remove(at)),
                None => must_lead = true,
            }
        }
        if must_lead {
            // Was chosen to lead, and does not need to.
            self.hand_over();
        }
        Ok(())
    }

    /// Lets another one lead.
    fn hand_over(&self) {
        let next = self.parked.lock().pop();
        if let Some(thread) = next {
            thread.unpark();
        }
    }
}

fn lead_until(reactor: &Arc<dyn Reactor>, done: &dyn Fn() -> bool) -> Result<(), Error> {
    while !done() {
        let asleep = Instant::now();
        reactor.wait(SLEEP_MAX, done)?;
        if reactor.turn() > 0 {
            continue;
        }
        if asleep.elapsed() >= SLEEP_MAX {
            reactor.idle();
        } else {
            // Another thread may be polling just now: let it.
            std::thread::yield_now();
        }
    }
    Ok(())
}
