//! Sleeping threads of one CQ, organized as leader and followers.
//!
//! Of the threads that wait for completions of a CQ, one is the leader: it sleeps on the CQ and
//! hands each completion that it polls to the operation's waiter. The followers are parked until
//! their own completion has arrived. When the leader's own completion has arrived, it unparks a
//! follower, which becomes the leader.
//!
//! If a thread outside the group polls the leader's completion, it wakes the leader through the CQ.
//! [`CompletionQueue::wait_unless`](crate::CompletionQueue::wait_unless) guarantees that this
//! wake-up is not lost.

use std::sync::Arc;
use std::thread::Thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::reactor::{Reactor, ThreadWaker};
use crate::Error;

/// Maximum length of one sleep. Correctness does not depend on it: the bound limits the damage of a
/// NIC that loses a wake-up. (In tests it is long enough that a lost wake-up fails the test.)
pub(super) const SLEEP_MAX: Duration = Duration::from_millis(if cfg!(test) { 20_000 } else { 100 });

/// The leader's lock and the parked followers.
#[derive(Default)]
pub(super) struct Sleepers {
    lead: Mutex<()>,
    parked: Mutex<Vec<Thread>>,
}

impl Sleepers {
    /// Sleeps until `done` returns true, and polls for all waiters while this thread leads.
    ///
    /// A thread that makes `done` true must wake this thread through its [`ThreadWaker`].
    pub fn sleep_until(
        &self,
        reactor: &Arc<dyn Reactor>,
        done: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        let me = ThreadWaker::current();
        let mut must_lead = false;
        while !done() {
            if let Some(lead) = self.lead.try_lock() {
                me.set_leads(Some(reactor.clone()));
                let result = lead_until(reactor, done);
                me.set_leads(None);
                drop(lead);
                self.wake_next_leader();
                return result;
            }
            must_lead |= self.follow(&me, SLEEP_MAX, done);
        }
        if must_lead {
            // This thread was chosen as the leader but no longer waits.
            self.wake_next_leader();
        }
        Ok(())
    }

    /// Sleeps once, for at most `timeout`, unless `done` returns true. A thread that leads polls
    /// then, and returns the number of completions.
    pub fn sleep_once(
        &self,
        reactor: &Arc<dyn Reactor>,
        timeout: Duration,
        done: &dyn Fn() -> bool,
    ) -> Result<usize, Error> {
        let me = ThreadWaker::current();
        let Some(lead) = self.lead.try_lock() else {
            if self.follow(&me, timeout, done) {
                // The caller may not come back.
                self.wake_next_leader();
            }
            return Ok(0);
        };
        me.set_leads(Some(reactor.clone()));
        let slept = reactor.wait(timeout.min(SLEEP_MAX), done);
        let polled = reactor.poll();
        me.set_leads(None);
        drop(lead);
        self.wake_next_leader();
        slept.map(|()| polled)
    }

    /// Parks this thread as a follower, for at most `timeout`. Returns true if the thread was
    /// chosen as the next leader.
    fn follow(&self, me: &ThreadWaker, timeout: Duration, done: &dyn Fn() -> bool) -> bool {
        self.parked.lock().push(me.thread().clone());
        // If the leader left before it could see this thread in the list, the lock is free.
        if self.lead.is_locked() && !done() {
            std::thread::park_timeout(timeout);
        }
        let mut parked = self.parked.lock();
        let own = parked.iter().position(|t| t.id() == me.thread().id());
        own.map(|at| drop(parked.swap_remove(at))).is_none()
    }

    /// Unparks a follower, which becomes the leader.
    fn wake_next_leader(&self) {
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
        if reactor.poll() > 0 {
            continue;
        }
        if asleep.elapsed() >= SLEEP_MAX {
            reactor.idle();
        } else {
            // Another thread may be polling just now: let it run.
            std::thread::yield_now();
        }
    }
    Ok(())
}
