//! State that the tasks of one thread share: clock, timers, buffers, counters.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::net::timer::Timers;
use crate::server::Server;
use crate::stats::Stats;

/// Buffers that wait for their next use.
const BUFFERS_MAX: usize = 64;
/// Bytes of a buffer that is kept.
const BUFFER_BYTES_MAX: usize = 64 << 10;

/// A thread of the server.
pub struct Worker {
    /// Number of the thread.
    pub index: usize,
    /// The server.
    pub server: Arc<Server>,
    pub(crate) timers: Timers,
    start: Instant,
    now_ms: Cell<u64>,
    now_ns: Cell<u64>,
    buffers: RefCell<Vec<Vec<u8>>>,
    /// Tasks that wait for a socket, a timer or another connection, and not for the store.
    resting: Cell<usize>,
    /// Bytes of requests and replies that were freed since [`Worker::take_freed`].
    freed: Cell<usize>,
    limits: RefCell<Vec<Option<Limit>>>,
    free_limits: RefCell<Vec<usize>>,
}

/// The time limit of a task that waits for the store.
struct Limit {
    due_ns: u64,
    is_over: bool,
    waker: Waker,
}

impl Worker {
    pub(crate) fn new(index: usize, server: Arc<Server>) -> Self {
        let worker = Self {
            index,
            server,
            timers: Timers::default(),
            start: Instant::now(),
            now_ms: Cell::new(0),
            now_ns: Cell::new(0),
            buffers: RefCell::default(),
            resting: Cell::new(0),
            freed: Cell::new(0),
            limits: RefCell::default(),
            free_limits: RefCell::default(),
        };
        worker.tick();
        worker
    }

    /// Reads the clocks. The event loop does so once for each wave.
    pub(crate) fn tick(&self) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.now_ms.set(since.as_millis() as u64);
        self.now_ns.set(self.elapsed_ns());
    }

    /// Milliseconds since 1970, as of the begin of the wave.
    pub fn now_ms(&self) -> u64 {
        self.now_ms.get()
    }

    /// Monotonic time in nanoseconds, as of the begin of the wave.
    pub fn now_ns(&self) -> u64 {
        self.now_ns.get()
    }

    /// Monotonic time in nanoseconds, now.
    pub fn elapsed_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// The counters of the thread.
    pub fn stats(&self) -> &Stats {
        &self.server.threads[self.index].stats
    }

    /// Waits for a time, or until the server ends.
    pub async fn wait(&self, time: Duration) {
        let due = self.elapsed_ns().saturating_add(time.as_nanos() as u64);
        let mut is_added = false;
        let _rest = self.rest();
        poll_fn(|cx| {
            if self.elapsed_ns() >= due || self.server.is_ending() {
                return Poll::Ready(());
            }
            if !is_added {
                self.timers.add(due, cx.waker().clone());
                is_added = true;
            }
            Poll::Pending
        })
        .await;
    }

    /// Runs `work` to its end. Drops `work` and returns `None` if it waits for `limit` and nothing
    /// wakes it meanwhile: each answer of the store is a wake-up. The limit is exact to
    /// the interval of [`Worker::end_late`].
    pub(crate) async fn within<T>(
        &self,
        limit: Duration,
        work: impl Future<Output = T>,
    ) -> Option<T> {
        let mut work = pin!(work);
        let mut place = LimitPlace { worker: self, index: None };
        poll_fn(|cx| {
            if let Poll::Ready(result) = work.as_mut().poll(cx) {
                return Poll::Ready(Some(result));
            }
            let due_ns = self.now_ns().saturating_add(limit.as_nanos() as u64);
            if place.renew(due_ns, cx) { Poll::Pending } else { Poll::Ready(None) }
        })
        .await
    }

    /// Ends the work of [`Worker::within`] whose limit is over. The event loop calls this function
    /// ten times a second.
    pub(crate) fn end_late(&self) {
        let now_ns = self.now_ns();
        let mut late = Vec::new();
        for limit in self.limits.borrow_mut().iter_mut().flatten() {
            if limit.due_ns <= now_ns && !limit.is_over {
                limit.is_over = true;
                late.push(limit.waker.clone());
            }
        }
        late.into_iter().for_each(Waker::wake);
    }

    /// Lets the other tasks of the thread run.
    pub async fn yield_now(&self) {
        let mut is_first = true;
        poll_fn(|cx| {
            if !std::mem::take(&mut is_first) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    /// Tells the event loop, until the value is dropped, that the task does not wait for the store.
    pub(crate) fn rest(&self) -> Rest<'_> {
        self.resting.set(self.resting.get() + 1);
        Rest(self)
    }

    /// Number of tasks that do not wait for the store.
    pub(crate) fn resting(&self) -> usize {
        self.resting.get()
    }

    /// Notes that memory for requests or replies was freed.
    pub(crate) fn note_freed(&self, bytes: usize) {
        self.freed.set(self.freed.get() + bytes);
    }

    /// Returns whether at least `least` bytes were freed since the last call that returned true.
    pub(crate) fn take_freed(&self, least: usize) -> bool {
        let is_much = self.freed.get() >= least;
        if is_much {
            self.freed.set(0);
        }
        is_much
    }

    /// An empty buffer.
    pub(crate) fn take_buffer(&self) -> Vec<u8> {
        self.buffers.borrow_mut().pop().unwrap_or_default()
    }

    /// Keeps the memory of a buffer for the next use.
    pub(crate) fn give_buffer(&self, mut buffer: Vec<u8>) {
        let mut buffers = self.buffers.borrow_mut();
        let is_kept = (1..=BUFFER_BYTES_MAX).contains(&buffer.capacity());
        if is_kept && buffers.len() < BUFFERS_MAX {
            buffer.clear();
            buffers.push(buffer);
        }
    }
}

/// The place of a time limit among those of its thread.
struct LimitPlace<'a> {
    worker: &'a Worker,
    index: Option<usize>,
}

impl LimitPlace<'_> {
    /// Begins the time again. Returns false if the limit is over.
    fn renew(&mut self, due_ns: u64, cx: &Context<'_>) -> bool {
        let mut limits = self.worker.limits.borrow_mut();
        let index = *self.index.get_or_insert_with(|| {
            self.worker.free_limits.borrow_mut().pop().unwrap_or_else(|| {
                limits.push(None);
                limits.len() - 1
            })
        });
        match &mut limits[index] {
            Some(limit) => {
                limit.due_ns = due_ns;
                if !limit.waker.will_wake(cx.waker()) {
                    limit.waker = cx.waker().clone();
                }
                !limit.is_over
            }
            none => {
                *none = Some(Limit { due_ns, is_over: false, waker: cx.waker().clone() });
                true
            }
        }
    }
}

impl Drop for LimitPlace<'_> {
    fn drop(&mut self) {
        if let Some(index) = self.index {
            self.worker.limits.borrow_mut()[index] = None;
            self.worker.free_limits.borrow_mut().push(index);
        }
    }
}

/// A task that does not wait for the store.
pub(crate) struct Rest<'a>(&'a Worker);

impl Drop for Rest<'_> {
    fn drop(&mut self) {
        self.0.resting.set(self.0.resting.get() - 1);
    }
}
