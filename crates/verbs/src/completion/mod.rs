//! Futures on completions.
//!
//! A [`Completer`] owns a CQ. Every work request that completes there is submitted through the
//! completer and gets a slot and a [`Pending`]. A `Pending` is a future; a thread can also
//! [`Completer::wait`] for it. Any thread that polls the CQ puts the completions into their slots
//! and wakes the waiters of those slots. The completer needs no thread of its own while the waiters
//! are threads or futures under [`block_on`](crate::executor::block_on). For futures under other
//! executors it starts a driver thread, which polls while no other thread does.
//!
//! ```text
//! submit ──claim slot──> post_send(id = slot) ──> NIC ──> CQ ──poll──> slot ──> Pending
//! ```
//!
//! Dropping a `Pending` early abandons the operation but does not cancel it: the NIC still reads or
//! writes the buffers of the work request. The buffers must stay registered until the completion
//! has arrived or the queue pair is in the error state or reset. The slot stays reserved until
//! then.
//!
//! A wait may have a time limit ([`Completer::set_limit`]): then it ends with
//! [`Error::Unanswered`], and the operation is in flight as before.

pub(crate) mod reactor;
mod silence;
mod slab;
mod sleep;

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Waker};
use std::thread::Thread;
use std::time::Duration;

use reactor::{Reactor, ThreadWaker};
use silence::Silence;
use slab::{Filled, Slab, SlotId};
use sleep::Sleepers;

use crate::backoff::Backoff;
use crate::{Completion, CompletionQueue, Error, Status};

/// Maximum length of a list whose requests carry their positions ([`id_at`]).
pub const LIST_MAX: usize = slab::POSITIONS as usize;

/// Returns the id, of an operation with `id`, for the request at `position` of its list.
///
/// `id` is that of [`Completer::submit`], and `position` is below [`LIST_MAX`].
#[inline]
pub fn id_at(id: u64, position: usize) -> u64 {
    SlotId(id).at(position as u32).0
}

/// Returns the position, in its list, of the request that ended the operation.
#[inline]
pub fn position(completion: &Completion) -> usize {
    SlotId(completion.id).position() as usize
}

/// Maximum number of completions taken by one poll.
const BATCH: usize = 16;

/// See [`Completer::IDLE`].
pub(crate) const IDLE: Duration = sleep::SLEEP_MAX;

/// A CQ whose completions are handed to the waiters of their operations.
pub struct Completer<C: CompletionQueue>(Arc<Inner<C>>);

struct Inner<C> {
    cq: C,
    slab: Slab,
    sleepers: Sleepers,
    silence: Silence,
    /// Number of slots with a waker.
    watched: AtomicUsize,
    /// Why the NIC is considered gone.
    gone: OnceLock<String>,
    /// The driver thread, which polls for futures under other executors.
    driver: OnceLock<Thread>,
    /// See [`Completer::when_idle`].
    idle: OnceLock<WhenIdle>,
    /// See [`Completer::when_failed`].
    failed: OnceLock<WhenFailed>,
}

/// A callback that runs while no completion arrives.
pub type WhenIdle = Arc<dyn Fn() + Send + Sync>;

/// A callback for the completion of a request that failed.
pub type WhenFailed = Arc<dyn Fn(&Completion) + Send + Sync>;

/// A posted operation.
///
/// It ends with its completion, whose status may be an error of the operation, or with
/// [`Error::Gone`] if the NIC is gone. A wait for it may also end with [`Error::Unanswered`]; then
/// it can be waited for again.
#[must_use = "an operation that is dropped may still move data"]
pub struct Pending<C: CompletionQueue> {
    completer: Arc<Inner<C>>,
    /// `None` once the completion has been taken.
    slot: Option<SlotId>,
    /// Period in which it was posted.
    since: u32,
    /// Waits for it have no time limit.
    is_endless: bool,
}

impl<C: CompletionQueue> Clone for Completer<C> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<C: CompletionQueue> Completer<C> {
    /// Takes ownership of `cq`: from now on only the completer may poll it.
    pub fn new(cq: C) -> Self {
        Self(Arc::new(Inner {
            cq,
            slab: Slab::new(),
            sleepers: Sleepers::default(),
            silence: Silence::default(),
            watched: AtomicUsize::new(0),
            gone: OnceLock::new(),
            driver: OnceLock::new(),
            idle: OnceLock::new(),
            failed: OnceLock::new(),
        }))
    }

    /// Returns the CQ, for creating queue pairs.
    pub fn cq(&self) -> &C {
        &self.0.cq
    }

    /// Posts an operation with `post`.
    ///
    /// `post` posts one or several work requests that complete to this CQ. All carry the given id,
    /// or [`id_at`] their position in the list, and the last one is signaled. The operation ends
    /// with its first completion: the last request's, or that of the first request that failed.
    #[inline]
    pub fn submit(&self, post: impl FnOnce(u64) -> Result<(), Error>) -> Result<Pending<C>, Error> {
        self.submit_as(false, post)
    }

    /// Like [`Completer::submit`], for an operation that ends when the peer's program acts, such as
    /// a receive: waits for it have no time limit.
    #[inline]
    pub fn submit_endless(
        &self,
        post: impl FnOnce(u64) -> Result<(), Error>,
    ) -> Result<Pending<C>, Error> {
        self.submit_as(true, post)
    }

    #[inline]
    fn submit_as(
        &self,
        is_endless: bool,
        post: impl FnOnce(u64) -> Result<(), Error>,
    ) -> Result<Pending<C>, Error> {
        self.0.check_gone()?;
        let slot = self.0.slab.claim().ok_or_else(|| Error::BadRequest {
            what: "too many operations are in flight; wait for their completions first".to_string(),
        })?;
        let since = self.0.silence.now();
        match post(slot.0) {
            Ok(()) => {
                let completer = self.0.clone();
                Ok(Pending { completer, slot: Some(slot), since, is_endless })
            }
            Err(e) => {
                self.0.slab.unclaim(slot);
                Err(e)
            }
        }
    }

    /// Waits for an operation: polls for a while, then sleeps until the completion has arrived.
    /// Abandons the operation if the wait ends otherwise.
    #[inline]
    pub fn wait(&self, mut pending: Pending<C>) -> Result<Completion, Error> {
        self.wait_for(&mut pending)
    }

    /// Like [`Completer::wait`], without abandoning the operation.
    #[inline]
    pub fn wait_for(&self, pending: &mut Pending<C>) -> Result<Completion, Error> {
        assert!(
            Arc::ptr_eq(&self.0, &pending.completer),
            "the operation belongs to another completer"
        );
        let mut backoff = Backoff::on::<C>();
        loop {
            if let Some(completion) = pending.take() {
                return Ok(completion);
            }
            if self.0.poll() > 0 || self.0.cq.offer_cpu() && self.0.poll() > 0 {
                continue;
            }
            if !backoff.snooze() {
                return self.wait_asleep(pending);
            }
        }
    }

    #[cold]
    fn wait_asleep(&self, pending: &mut Pending<C>) -> Result<Completion, Error> {
        let inner = &self.0;
        let slot = pending.slot.expect("a pending operation");
        if C::VIRTUAL {
            return self.wait_virtually(pending);
        }
        let waker = Waker::from(ThreadWaker::current());
        if inner.watch(slot, &waker) {
            let ended = || inner.slab.is_done(slot) || inner.gone.get().is_some();
            inner.clone().sleep_until(&|| ended() || pending.is_late())?;
        }
        match pending.take() {
            Some(completion) => Ok(completion),
            None => inner.check_gone().and(Err(inner.silence.error())),
        }
    }

    fn wait_virtually(&self, pending: &mut Pending<C>) -> Result<Completion, Error> {
        loop {
            if let Some(completion) = pending.take() {
                return Ok(completion);
            }
            if self.0.poll() == 0 {
                self.0.cq.wait_unless(Duration::MAX, &|| false)?;
            }
        }
    }

    /// Sets the time limit of all waits, at least one second, and the peer's name for
    /// [`Error::Unanswered`].
    ///
    /// A wait ends if, for this time, it waited and no completion arrived here. Only the first name
    /// is kept. With virtual time no wait ends so.
    pub fn set_limit(&self, limit: Duration, peer: &str) {
        if !C::VIRTUAL {
            self.0.silence.set_limit(limit, peer);
        }
    }

    /// Notes that the peer leaves a question without an answer, for the time limit at least, or
    /// answers again. Waits that are older than the limit end then, whatever else completes.
    pub fn set_peer_silent(&self, is_silent: bool) {
        self.0.silence.set_peer_silent(is_silent);
    }

    /// Polls to free room in a full send queue, or sleeps for a short time. `waited` counts the
    /// time in vain, and begins at 0.
    ///
    /// # Errors
    /// [`Error::Unanswered`] after the time limit, and [`Error::Gone`].
    #[cold]
    pub fn make_room(&self, waited: &mut Duration) -> Result<(), Error> {
        const TURN: Duration = Duration::from_millis(100);
        if self.0.poll() > 0 {
            *waited = Duration::ZERO;
            return Ok(());
        }
        // Another thread is polling, or the NIC has exited, which `wait` reports.
        if !self.0.cq.wait(TURN)? && !C::VIRTUAL {
            *waited += TURN;
        }
        match self.0.silence.limit().is_some_and(|limit| *waited >= limit) {
            true => Err(self.0.silence.error()),
            false => Ok(()),
        }
    }

    /// Sets a callback that runs about every [`Completer::IDLE`] while a thread sleeps and no
    /// completion arrives.
    ///
    /// For callers whose completions depend on more than the NIC. The callback must not block,
    /// because it runs on a thread that polls for all waiters. Only the first callback is kept.
    /// With virtual time it never runs.
    pub fn when_idle(&self, callback: WhenIdle) {
        let _ = self.0.idle.set(callback);
    }

    /// Sets a callback for each completion with an error other than [`Status::Flushed`]: it tells
    /// why later requests on the same queue pair are flushed.
    ///
    /// It runs before the waiter of that completion is woken, on a thread that polls for all
    /// waiters, so it must not block. It also runs for operations that were abandoned. Only the
    /// first callback is kept.
    pub fn when_failed(&self, callback: WhenFailed) {
        let _ = self.0.failed.set(callback);
    }

    /// Time without a completion before the callback of [`Completer::when_idle`] runs.
    pub const IDLE: Duration = IDLE;

    /// Polls once on behalf of all waiters and returns the number of completions.
    #[inline]
    pub fn poll(&self) -> usize {
        self.0.poll()
    }

    /// Returns the completer without the type of its NIC.
    pub fn source(&self) -> Source {
        Source(self.0.clone())
    }
}

/// A [`Completer`] of any NIC: a source of completions for an event loop.
#[derive(Clone)]
pub struct Source(Arc<dyn Reactor>);

impl Source {
    /// Polls once on behalf of all waiters and returns the number of completions.
    #[inline]
    pub fn poll(&self) -> usize {
        self.0.poll()
    }

    /// Sleeps on the CQ until a completion can be polled or `timeout` has passed. May return early.
    ///
    /// # Errors
    /// [`Error::Gone`] if the NIC is gone. The waiters have been woken.
    pub fn wait(&self, timeout: Duration) -> Result<(), Error> {
        self.0.wait(timeout, &|| false)
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
    fn poll(&self) -> usize {
        let mut batch = [Completion::EMPTY; BATCH];
        let count = self.cq.poll(&mut batch);
        if count > 0 {
            self.silence.end();
        }
        for completion in &batch[..count] {
            if completion.status != Status::Success {
                self.failed(completion);
            }
            if let Filled::Watched(waker) = self.slab.fill(SlotId(completion.id), completion) {
                self.watched.fetch_sub(1, Ordering::SeqCst);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
        }
        count
    }

    #[cold]
    fn failed(&self, completion: &Completion) {
        if completion.status != Status::Flushed
            && let Some(callback) = self.failed.get()
        {
            callback(completion);
        }
    }

    /// Registers a waker. Returns false if the completion has already arrived.
    fn watch(&self, slot: SlotId, waker: &Waker) -> bool {
        // Counted before the slot is watched, so that the counter is never too low.
        self.watched.fetch_add(1, Ordering::SeqCst);
        let (waits, newly) = self.slab.watch(slot, waker);
        if !newly {
            self.watched.fetch_sub(1, Ordering::SeqCst);
        }
        waits
    }

    /// Marks the NIC as gone and wakes all waiters.
    fn mark_gone(&self, why: &Error) {
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
    fn poll(&self) -> usize {
        Inner::poll(self)
    }

    fn offer_cpu(&self) -> bool {
        self.cq.offer_cpu()
    }

    fn watchers(&self) -> usize {
        self.watched.load(Ordering::SeqCst)
    }

    fn wait(&self, timeout: Duration, done: &dyn Fn() -> bool) -> Result<(), Error> {
        self.cq.wait_unless(timeout, done).map(drop).inspect_err(|e| self.mark_gone(e))
    }

    fn idle(&self) {
        if !self.silence.count() {
            return;
        }
        if self.silence.is_over() {
            self.slab.wake_all();
        }
        if let Some(callback) = self.idle.get() {
            callback();
        }
    }

    fn wake_leader(&self) {
        self.cq.wake();
    }

    fn sleep_until(self: Arc<Self>, done: &dyn Fn() -> bool) -> Result<(), Error> {
        let reactor: Arc<dyn Reactor> = self.clone();
        self.sleepers.sleep_until(&reactor, done)
    }

    fn sleep_once(
        self: Arc<Self>,
        timeout: Duration,
        done: &dyn Fn() -> bool,
    ) -> Result<usize, Error> {
        let reactor: Arc<dyn Reactor> = self.clone();
        self.sleepers.sleep_once(&reactor, timeout, done)
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

/// Polls while futures wait.
fn drive<C: CompletionQueue>(completer: &Weak<Inner<C>>) {
    while let Some(inner) = completer.upgrade() {
        let idle = |i: &Inner<C>| i.watched.load(Ordering::SeqCst) == 0 || i.gone.get().is_some();
        if idle(&inner) {
            drop(inner);
            // Unparked when a future is added and when the completer is dropped.
            std::thread::park();
        } else {
            // If the NIC is gone, the futures report the error.
            let _ = inner.clone().sleep_until(&|| idle(&inner));
        }
    }
}

impl<C: CompletionQueue> Pending<C> {
    /// Takes the completion if it has been polled.
    #[inline]
    fn take(&mut self) -> Option<Completion> {
        let completion = self.completer.slab.take(self.slot?)?;
        self.slot = None;
        Some(completion)
    }

    /// True if the operation has no completion and a wait for it ends with [`Error::Unanswered`].
    #[inline]
    pub fn is_late(&self) -> bool {
        let inner = &self.completer;
        let is_over = !self.is_endless && inner.silence.is_over_since(self.since);
        is_over && self.slot.is_some_and(|slot| !inner.slab.is_done(slot))
    }

    /// True if the answer of the peer's program to this operation, a SEND, is late: the SEND itself
    /// is late, or the peer is silent ([`Completer::set_peer_silent`]).
    #[inline]
    pub fn is_unanswered(&self) -> bool {
        self.is_late() || self.completer.silence.is_peer_late(self.since)
    }

    /// The error of a wait for this operation that has lasted too long.
    pub fn late(&self) -> Error {
        self.completer.silence.error()
    }

    /// Polls once on behalf of all waiters, and returns the completion if it has arrived. Makes no
    /// system call, and has no time limit.
    ///
    /// # Errors
    /// [`Error::Gone`] if the NIC is gone and the completion will not arrive.
    #[inline]
    pub fn try_wait(&mut self) -> Result<Option<Completion>, Error> {
        self.completer.poll();
        match self.take() {
            Some(completion) => Ok(Some(completion)),
            None => self.completer.check_gone().map(|()| None),
        }
    }

    /// Waits for the operation: see [`Completer::wait`].
    #[inline]
    pub fn wait(self) -> Result<Completion, Error> {
        Completer(self.completer.clone()).wait(self)
    }
}

impl<C: CompletionQueue> Future for Pending<C> {
    type Output = Result<Completion, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let slot = self.slot.expect("a future that has ended is not polled again");
        self.completer.poll();
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
        if self.is_late() {
            return Poll::Ready(Err(self.late()));
        }
        if C::VIRTUAL {
            self.completer.cq.leave_waker(cx.waker());
        } else {
            reactor::drive(self.completer.clone());
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
