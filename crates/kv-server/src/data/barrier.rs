//! A barrier between commands: many run at once, or one alone.
//!
//! Commands on single keys are ordered by the tickets of the store. FLUSHALL, SWAPDB, the begin of
//! a save and transactions with such commands concern all keys, so they run alone.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

/// Counters of threads share no cache line.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Counter(AtomicUsize);

/// Threads with a counter of their own.
const COUNTERS: usize = 32;

/// The barrier.
#[derive(Debug, Default)]
pub(crate) struct Barrier {
    inside: [Counter; COUNTERS],
    is_closed: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
}

/// A command that runs beside others.
pub(crate) struct Shared<'a> {
    barrier: &'a Barrier,
    counter: usize,
}

/// A command that runs alone.
pub(crate) struct Alone<'a>(&'a Barrier);

impl Barrier {
    /// Waits until no command runs alone.
    pub async fn enter(&self, thread: usize) -> Shared<'_> {
        poll_fn(|cx| {
            if let Some(shared) = self.try_enter(thread) {
                return Poll::Ready(shared);
            }
            self.register(cx);
            // The barrier may have opened before the waker was registered.
            match self.try_enter(thread) {
                Some(shared) => Poll::Ready(shared),
                None => Poll::Pending,
            }
        })
        .await
    }

    fn try_enter(&self, thread: usize) -> Option<Shared<'_>> {
        // A try that is taken back wakes all that wait, this task too, which would then spin.
        if self.is_closed.load(Ordering::SeqCst) {
            return None;
        }
        let counter = thread % COUNTERS;
        self.inside[counter].0.fetch_add(1, Ordering::SeqCst);
        let shared = Shared { barrier: self, counter };
        (!self.is_closed.load(Ordering::SeqCst)).then_some(shared)
    }

    /// Waits until no other command runs, and keeps others waiting.
    pub async fn close(&self) -> Alone<'_> {
        let take = || !self.is_closed.swap(true, Ordering::SeqCst);
        self.wait(take).await;
        let alone = Alone(self);
        let count = |own: &Counter| own.0.load(Ordering::SeqCst);
        self.wait(|| self.inside.iter().all(|own| count(own) == 0)).await;
        alone
    }

    async fn wait(&self, is_done: impl Fn() -> bool) {
        poll_fn(|cx| {
            if is_done() {
                return Poll::Ready(());
            }
            self.register(cx);
            if is_done() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    fn register(&self, cx: &Context<'_>) {
        let mut waiting = self.waiting.lock();
        if !waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
            waiting.push(cx.waker().clone());
        }
    }

    fn wake(&self) {
        let waiting = std::mem::take(&mut *self.waiting.lock());
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Shared<'_> {
    fn drop(&mut self) {
        self.barrier.inside[self.counter].0.fetch_sub(1, Ordering::SeqCst);
        if self.barrier.is_closed.load(Ordering::SeqCst) {
            self.barrier.wake();
        }
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.is_closed.store(false, Ordering::SeqCst);
        self.0.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::Wake;

    use super::*;

    /// Counts wake-ups.
    #[derive(Default)]
    struct Bell(AtomicUsize);

    impl Wake for Bell {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn is_ready<F: Future>(future: std::pin::Pin<&mut F>) -> bool {
        future.poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn command_alone_waits_for_others_and_holds_new_ones_back() {
        let barrier = Barrier::default();
        let one = barrier.try_enter(0);
        let two = barrier.try_enter(40);
        assert!(one.is_some() && two.is_some());
        let mut alone = Box::pin(barrier.close());
        assert!(!is_ready(alone.as_mut()));
        let bell = Arc::new(Bell::default());
        let mut late = pin!(barrier.enter(3));
        assert!(late.as_mut().poll(&mut Context::from_waker(&bell.clone().into())).is_pending());
        assert_eq!(bell.0.load(Ordering::SeqCst), 0, "a task that waits does not wake itself");
        drop(one);
        let last = Arc::new(Bell::default());
        assert!(alone.as_mut().poll(&mut Context::from_waker(&last.clone().into())).is_pending());
        drop(two);
        assert_eq!(last.0.load(Ordering::SeqCst), 1, "the last other command wakes the task");
        let mut cx = Context::from_waker(Waker::noop());
        let Poll::Ready(alone) = alone.as_mut().poll(&mut cx) else {
            panic!("no command runs any more");
        };
        assert!(!is_ready(pin!(barrier.enter(3))));
        assert!(!is_ready(pin!(barrier.close())));
        let bell = Arc::new(Bell::default());
        assert!(late.as_mut().poll(&mut Context::from_waker(&bell.clone().into())).is_pending());
        drop(alone);
        assert_eq!(bell.0.load(Ordering::SeqCst), 1, "the end wakes the task");
        assert!(is_ready(pin!(barrier.enter(3))));
    }
}
