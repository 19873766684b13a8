//! State that the tasks of one thread share: clock, timers, buffers, counters.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
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

/// A task that does not wait for the store.
pub(crate) struct Rest<'a>(&'a Worker);

impl Drop for Rest<'_> {
    fn drop(&mut self) {
        self.0.resting.set(self.0.resting.get() - 1);
    }
}
