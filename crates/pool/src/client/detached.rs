//! Requests that run to completion even if their future is dropped.
//!
//! A request to allocate or free cannot be cancelled once it is sent. If its future is dropped
//! then, a thread polls it to completion. Otherwise a chunk could be allocated without an owner, or
//! a late reply could be written to the slot of another request.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::thread;

use verbs::CompletionQueue;
use verbs::executor::block_on;

/// A future that, once polled, always runs to completion. `undo` receives the result if the future
/// was dropped.
pub(super) struct Detached<T: Send + 'static> {
    parts: Option<Parts<T>>,
    started: bool,
    /// True if a thread may complete the future: false under virtual time.
    threads: bool,
}

struct Parts<T> {
    future: Pin<Box<dyn Future<Output = T> + Send>>,
    undo: Box<dyn FnOnce(T) + Send>,
}

impl<T: Send> Detached<T> {
    /// Wraps `future`, whose completions come from a CQ of type `C`.
    pub fn new<C: CompletionQueue>(
        future: impl Future<Output = T> + Send + 'static,
        undo: impl FnOnce(T) + Send + 'static,
    ) -> Self {
        let parts = Parts { future: Box::pin(future), undo: Box::new(undo) };
        Self { parts: Some(parts), started: false, threads: !C::VIRTUAL }
    }
}

impl<T: Send> Future for Detached<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        self.started = true;
        let parts = self.parts.as_mut().expect("a future that ended is not polled again");
        let Poll::Ready(result) = parts.future.as_mut().poll(cx) else { return Poll::Pending };
        self.parts = None;
        Poll::Ready(result)
    }
}

impl<T: Send + 'static> Drop for Detached<T> {
    fn drop(&mut self) {
        let Some(Parts { future, undo }) =
            self.parts.take().filter(|_| self.started && self.threads)
        else {
            return;
        };
        let finish = move || undo(block_on(future));
        // If no thread can be started, the request ends here: the memory node reclaims the chunk
        // when the connection closes.
        let _ = thread::Builder::new().name("granary-finish".into()).spawn(finish);
    }
}

#[cfg(test)]
mod tests {
    use rnic::nic::SoftCq;
    use std::future::{pending, ready};
    use std::sync::mpsc;
    use std::task::Waker;
    use std::time::Duration;

    use super::*;

    /// Pending at the first poll, then ready.
    fn later<T: Send + 'static>(value: T) -> impl Future<Output = T> + Send {
        let mut polled = false;
        let mut value = Some(value);
        std::future::poll_fn(move |cx| {
            if std::mem::replace(&mut polled, true) {
                return Poll::Ready(value.take().expect("polled to its end once"));
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
    }

    #[test]
    fn detached_result_goes_to_the_caller_or_to_undo() {
        let (undone, results) = mpsc::channel();
        let undo = |undone: &mpsc::Sender<u32>| {
            let undone = undone.clone();
            move |n| undone.send(n).expect("the test receives it")
        };
        assert_eq!(block_on(Detached::new::<SoftCq>(later(1), undo(&undone))), 1);
        drop(Detached::new::<SoftCq>(ready(2), undo(&undone)));
        drop(Detached::new::<SoftCq>(pending::<u32>(), undo(&undone)));
        let mut third = Detached::new::<SoftCq>(later(3), undo(&undone));
        let cx = &mut Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut third).poll(cx).is_pending());
        drop(third);
        assert_eq!(results.recv_timeout(Duration::from_secs(10)), Ok(3));
        drop(undone);
        assert!(results.recv().is_err(), "another result was undone");
    }
}
