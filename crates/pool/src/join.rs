//! Several requests in flight at a time, on one thread.
//!
//! With [`block_on`](verbs::executor::block_on) a thread waits for many requests together, instead
//! of for one round trip after another.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

/// Runs futures to their ends, at most `width` of them at a time, and returns their outputs in the
/// order in which they ended. At each wake-up all running futures are polled, so `width` bounds the
/// CPU time of a wake-up.
pub async fn join<F: Future>(futures: impl IntoIterator<Item = F>, width: usize) -> Vec<F::Output> {
    let mut waiting = futures.into_iter().fuse();
    let mut running: VecDeque<Pin<Box<F>>> = VecDeque::with_capacity(width);
    let mut outputs = Vec::with_capacity(waiting.size_hint().0);
    poll_fn(move |cx| {
        for _ in 0..running.len() {
            let Some(mut future) = running.pop_front() else { break };
            match future.as_mut().poll(cx) {
                Poll::Ready(output) => outputs.push(output),
                Poll::Pending => running.push_back(future),
            }
        }
        while running.len() < width
            && let Some(future) = waiting.next()
        {
            let mut future = Box::pin(future);
            match future.as_mut().poll(cx) {
                Poll::Ready(output) => outputs.push(output),
                Poll::Pending => running.push_back(future),
            }
        }
        match running.is_empty() {
            true => Poll::Ready(std::mem::take(&mut outputs)),
            false => Poll::Pending,
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};
    use std::task::{Context, Waker};

    #[test]
    fn futures_run_together_up_to_the_width() {
        let (running, most) = (Cell::new(0), Cell::new(0));
        let open = RefCell::new([false; 7]);
        let future = |index: usize| {
            let mut is_started = false;
            let (running, most, open) = (&running, &most, &open);
            poll_fn(move |_| {
                if !std::mem::replace(&mut is_started, true) {
                    running.set(running.get() + 1);
                    most.set(most.get().max(running.get()));
                }
                if !open.borrow()[index] {
                    return Poll::Pending;
                }
                running.set(running.get() - 1);
                Poll::Ready(index)
            })
        };
        let mut joined = Box::pin(join((0..7).map(future), 3));
        let mut cx = Context::from_waker(Waker::noop());
        for index in [2, 1, 3, 0, 6, 4] {
            assert_eq!(joined.as_mut().poll(&mut cx), Poll::Pending);
            open.borrow_mut()[index] = true;
        }
        assert_eq!(joined.as_mut().poll(&mut cx), Poll::Pending);
        open.borrow_mut()[5] = true;
        let Poll::Ready(mut done) = joined.as_mut().poll(&mut cx) else { panic!("all are open") };
        done.sort_unstable();
        assert_eq!((done, most.get()), (vec![0, 1, 2, 3, 4, 5, 6], 3));
    }
}
