//! Futures on completions.
//!
//! A [`Completer`] owns a CQ: every work request that completes there is submitted through it. Each
//! gets a slot and a [`Pending`], which is a future, and which a thread can [`Completer::wait`] for.
//! Whoever polls the CQ puts the completions into their slots and wakes who waits there; no thread
//! of its own is needed, as long as those who wait are threads or run under
//! [`block_on`](crate::executor::block_on). For other executors a thread is started that polls when
//! nobody else does.
//!
//! ```text
//! submit ──claim slot──> post_send(id = slot) ──> NIC ──> CQ ──poll──> slot ──> Pending
//! ```
//!
//! A `Pending` that is dropped early is given up, not cancelled: the NIC will still read or write the
//! buffers of the work request. They must stay registered until the completion has arrived, or
//! until the queue pair is in the error state or reset; the slot stays reserved for as long.

mod slab;
mod sleep;

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Waker};
use std::thread::Thread;
use std::time::Duration;

use slab::{Filled, Slab, SlotId};
use sleep::Sleepers;
pub(crate) use sleep::ThreadWaker;

use crate::backoff::Backoff;
use crate::{Completion, CompletionQueue, Error, executor};

/// Completions taken at a time.
const BATCH: usize = 16;

/// A CQ whose completions go to who waits for them.
pub struct Completer<C: CompletionQueue>(Arc<Inner<C>>);

struct Inner<C> {
    cq: C,
    slab: Slab,
    sleepers: Sleepers,
    /// Slots with a waker.
    watched: AtomicUsize,
    /// Why the NIC is given up.
    gone: OnceLock<String>,
    /// The thread that polls for executors that are not ours.
    driver: OnceLock<Thread>,
    /// See [`Completer::when_idle`].
    idle: OnceLock<WhenIdle>,
}

/// What is called while no completion comes.
pub type WhenIdle = Arc<dyn Fn() + Send + Sync>;

/// Something that completes futures when it is polled.
pub(crate) trait Reactor: Send + Sync {
    /// Polls once; how many completions there were.
    fn turn(&self) -> usize;
    /// Yields this thread's CPU to the NIC if that runs there.
    fn offer_cpu(&self) -> bool;
    /// Whether a future waits.
    fn is_watched(&self) -> bool;
    /// Sleeps on the CQ.
    fn wait(&self, timeout: Duration, done: &dyn Fn() -> bool) -> Result<(), Error>;
    /// Nothing has come for a while.
    fn idle(&self);
    /// Wakes who sleeps on the CQ.
    fn wake_leader(&self);
    /// Polls, and sleeps when there is nothing, until `done`.
    fn sleep_until(self: Arc<Self>, done: &dyn Fn() -> bool) -> Result<(), Error>;
    /// Has a thread poll while futures wait.
    fn ensure_driver(self: Arc<Self>);
}

/// An operation that was posted.
///
/// Ends with its completion, whose status may be an error of the operation; or with
/// [`Error::Gone`] if the NIC is.
#[must_use = "an operation that nobody waits for may still move data"]
pub struct Pending<C: CompletionQueue> {
    completer: Arc<Inner<C>>,
    /// `None` when the completion has been taken.
    slot: Option<SlotId>,
}

impl<C: CompletionQueue> Clone for Completer<C> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<C: CompletionQueue> Completer<C> {
    /// Takes over `cq`: nobody else may poll it from now on.
    pub fn new(cq: C) -> Self {
        Self(Arc::new(Inner {
            cq,
            slab: Slab::new(),
            sleepers: Sleepers::default(),
            watched: AtomicUsize::new(0),
            gone: OnceLock::new(),
            driver: OnceLock::new(),
            idle: OnceLock::new(),
        }))
    }

    /// The CQ, to make queue pairs with.
    pub fn cq(&self) -> &C {
        &self.0.cq
    }

    /// Posts an operation: `post` posts one or several work requests that complete to this CQ, all
    /// with the id that it is given and the last one signaled. The operation ends with the first
    /// completion: that of the last one, or that of the first that failed.
    #[inline]
    pub fn submit(&self, post: impl FnOnce(u64) -> Result<(), Error>) -> Result<Pending<C>, Error> {
        self.0.check_gone()?;
        let slot = self.0.slab.claim().ok_or_else(|| Error::BadRequest {
            what: "too many operations whose completions were not waited for".to_string(),
        })?;
        match post(slot.0) {
            Ok(()) => Ok(Pending { completer: self.0.clone(), slot: Some(slot) }),
            Err(e) => {
                self.0.slab.unclaim(slot);
                Err(e)
            }
        }
    }

    /// Waits for an operation: polls for a while, then sleeps until the completion is there.
    #[inline]
    pub fn wait(&self, mut pending: Pending<C>) -> Result<Completion, Error> {
        assert!(Arc::ptr_eq(&self.0, &pending.completer), "an operation of another completer");
        let mut backoff = Backoff::on::<C>();
        loop {
            if let Some(completion) = pending.take() {
                return Ok(completion);
            }
            if self.0.turn() > 0 || self.0.cq.offer_cpu() && self.0.turn() > 0 {
                continue;
            }
            if !backoff.snooze() {
                return self.wait_asleep(pending);
            }
        }
    }

    #[cold]
    fn wait_asleep(&self, mut pending: Pending<C>) -> Result<Completion, Error> {
        let inner = &self.0;
        let slot = pending.slot.expect("a pending operation");
        if C::VIRTUAL {
            return self.wait_virtually(pending);
        }
        let waker = Waker::from(ThreadWaker::current());
        if inner.watch(slot, &waker) {
            let done = || inner.slab.is_done(slot) || inner.gone.get().is_some();
            inner.clone().sleep_until(&done)?;
        }
        match pending.take() {
            Some(completion) => Ok(completion),
            None => inner.check_gone().and(Err(Error::Gone {
                attempt: "waiting for a completion".to_string(),
                why: "unknown".to_string(),
            })),
        }
    }

    fn wait_virtually(&self, mut pending: Pending<C>) -> Result<Completion, Error> {
        loop {
            if let Some(completion) = pending.take() {
                return Ok(completion);
            }
            if self.0.turn() == 0 {
                self.0.cq.wait_unless(Duration::MAX, &|| false)?;
            }
        }
    }

    /// Has `look` called about every [`Completer::IDLE`] while somebody sleeps and no completion comes: for
    /// those whose completions depend on more than the NIC. It is called by a thread that completes for all,
    /// so it must not wait. Only the first one counts. (Under virtual time nothing is called.)
    pub fn when_idle(&self, look: WhenIdle) {
        let _ = self.0.idle.set(look);
    }

    /// How long nothing comes before [`Completer::when_idle`] is heard.
    pub const IDLE: Duration = sleep::SLEEP_MAX;

    /// Polls once, for whoever waits; how many completions there were.
    #[inline]
    pub fn turn(&self) -> usize {
        self.0.turn()
    }
}

impl<C: CompletionQueue> Inner<C> {
    #[inline]
    fn check_gone(&self) -> Result<(), Error> {
        match self.gone.get() {
            None => Ok(()),
            Some(why) => {
                Err(Error::Gone { attempt: "an operation on a NIC".to_string(), why: why.clone() })
            }
        }
    }

    #[inline]
    fn turn(&self) -> usize {
        let mut batch = [Completion::EMPTY; BATCH];
        let count = self.cq.poll(&mut batch);
        for completion in &batch[..count] {
            if let Filled::Watched(waker) = self.slab.fill(SlotId(completion.id), completion) {
                self.watched.fetch_sub(1, Ordering::SeqCst);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
        }
        count
    }

    /// Leaves a waker; false if the completion is there already.
    fn watch(&self, slot: SlotId, waker: &Waker) -> bool {
        // Counted before, so that it never is less than there are.
        self.watched.fetch_add(1, Ordering::SeqCst);
        let (waits, newly) = self.slab.watch(slot, waker);
        if !newly {
            self.watched.fetch_sub(1, Ordering::SeqCst);
        }
        waits
    }

    /// The NIC is gone: all who wait must learn it.
    fn give_up(&self, why: &Error) {
        let why = match why {
            Error::Gone { why, .. } => why.clone(),
            e => e.to_string(),
        };
        if self.gone.set(why).is_ok() {
            self.slab.wake_all();
        }
    }
}

impl<C: CompletionQueue> Reactor for Inner<C> {
    fn turn(&self) -> usize {
        Inner::turn(self)
    }

    fn offer_cpu(&self) -> bool {
        self.cq.offer_cpu()
    }

    fn is_watched(&self) -> bool {
        self.watched.load(Ordering::SeqCst) > 0
    }

    fn wait(&self, timeout: Duration, done: &dyn Fn() -> bool) -> Result<(), Error> {
        self.cq.wait_unless(timeout, done).map(drop).inspect_err(|e| self.give_up(e))
    }

    fn idle(&self) {
        if let Some(look) = self.idle.get() {
            look();
        }
    }

    fn wake_leader(&self) {
        self.cq.wake();
    }

    fn sleep_until(self: Arc<Self>, done: &dyn Fn() -> bool) -> Result<(), Error> {
        let reactor: Arc<dyn Reactor> = self.clone();
        self.sleepers.sleep_until(&reactor, done)
    }

    fn ensure_driver(self: Arc<Self>) {
        let driver = self.driver.get_or_init(|| {
            let completer = Arc::downgrade(&self);
            std::thread::Builder::new()
                .name("granary-cq".to_string())
                .spawn(move || drive(&completer))
                .expect("starting a thread that polls completions")
                .thread()
                .clone()
        });
        driver.unpark();
    }
}

impl<C> Drop for Inner<C> {
    fn drop(&mut self) {
        if let Some(driver) = self.driver.get() {
            driver.unpark();
        }
    }
}

/// Polls for futures, as long as there are any.
fn drive<C: CompletionQueue>(completer: &Weak<Inner<C>>) {
    while let Some(inner) = completer.upgrade() {
        let idle = |i: &Inner<C>| i.watched.load(Ordering::SeqCst) == 0 || i.gone.get().is_some();
        if idle(&inner) {
            drop(inner);
            // Unparked by whoever adds a future, and by the end of the completer.
            std::thread::park();
        } else {
            // A NIC that is gone is reported by the futures.
            let _ = inner.clone().sleep_until(&|| idle(&inner));
        }
    }
}

impl<C: CompletionQueue> Pending<C> {
    /// The completion, if it has been polled.
    #[inline]
    fn take(&mut self) -> Option<Completion> {
        let completion = self.completer.slab.take(self.slot?)?;
        self.slot = None;
        Some(completion)
    }

    /// Waits for it: see [`Completer::wait`].
    #[inline]
    pub fn wait(self) -> Result<Completion, Error> {
        Completer(self.completer.clone()).wait(self)
    }
}

impl<C: CompletionQueue> Future for Pending<C> {
    type Output = Result<Completion, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let slot = self.slot.expect("a future that has ended is not polled again");
        self.completer.turn();
        if let Some(completion) = self.take() {
            return Poll::Ready(Ok(completion));
        }
        if !self.completer.watch(slot, cx.waker()) {
            let completion = self.take().expect("a completion that is there");
            return Poll::Ready(Ok(completion));
        }
        if let Err(e) = self.completer.check_gone() {
            return Poll::Ready(Err(e));
        }
        if C::VIRTUAL {
            self.completer.cq.leave_waker(cx.waker());
        } else {
            executor::drive(self.completer.clone());
        }
        Poll::Pending
    }
}

impl<C: CompletionQueue> Drop for Pending<C> {
    fn drop(&mut self) {
        if let Some(slot) = self.slot
            && self.completer.slab.abandon(slot)
        {
            self.completer.watched.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests;
