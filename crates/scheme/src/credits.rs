//! Credits: slots for requests in flight. A compute node has as many as the memory node has chain
//! instances (or posted receives), and waits for a reply when all are in use.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use crate::index::{IndexRange, Slot};

/// A set of slots. At most one request holds a slot at a time.
pub struct Credits {
    state: Mutex<State>,
}

struct State {
    free: Vec<Slot>,
    waiting: VecDeque<Waker>,
}

/// A slot that a request holds; dropping it releases the slot.
pub struct Credit<'a> {
    of: &'a Credits,
    slot: Slot,
}

impl Credits {
    /// `count` slots, numbered from 0.
    pub fn new(count: u32) -> Self {
        let free = (Slot::new(0)..Slot::new(count)).iter().rev().collect();
        Self { state: Mutex::new(State { free, waiting: VecDeque::new() }) }
    }

    /// Takes a slot if one is free.
    pub fn try_take(&self) -> Option<Credit<'_>> {
        let slot = self.state.lock().free.pop()?;
        Some(Credit { of: self, slot })
    }

    /// Takes a slot; waits until one is free.
    pub fn take(&self) -> Take<'_> {
        Take(self)
    }
}

impl Credit<'_> {
    /// The slot.
    pub fn slot(&self) -> Slot {
        self.slot
    }
}

impl Drop for Credit<'_> {
    fn drop(&mut self) {
        let waiting = {
            let mut state = self.of.state.lock();
            state.free.push(self.slot);
            // Wakes all waiting tasks: if only one were woken and its future had been dropped, the
            // wake-up would be lost.
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// Future that resolves to a [`Credit`].
pub struct Take<'a>(&'a Credits);

impl<'a> Future for Take<'a> {
    type Output = Credit<'a>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Credit<'a>> {
        let mut state = self.0.state.lock();
        match state.free.pop() {
            Some(slot) => Poll::Ready(Credit { of: self.0, slot }),
            None => {
                state.waiting.push_back(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

    struct Count(AtomicU32);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn credit_take_waits_for_the_last_slot() {
        let credits = Credits::new(1);
        let count = Arc::new(Count(AtomicU32::new(0)));
        let waker = Waker::from(count.clone());
        let cx = &mut Context::from_waker(&waker);
        let Poll::Ready(first) = Pin::new(&mut credits.take()).poll(cx) else { panic!("no slot") };
        let mut second = credits.take();
        assert!(Pin::new(&mut second).poll(cx).is_pending());
        drop(first);
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert!(Pin::new(&mut second).poll(cx).is_ready());
    }
}
