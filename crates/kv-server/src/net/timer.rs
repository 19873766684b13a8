//! Timers of a thread: wakers that are called when their time has come.

use std::cell::{Cell, RefCell};
use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::task::Waker;

struct Timer {
    due_ns: u64,
    number: u64,
    waker: Waker,
}

impl PartialEq for Timer {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Timer {}

impl PartialOrd for Timer {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The earliest timer is the greatest.
impl Ord for Timer {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.due_ns, other.number).cmp(&(self.due_ns, self.number))
    }
}

/// The timers of a thread.
#[derive(Default)]
pub(crate) struct Timers {
    heap: RefCell<BinaryHeap<Timer>>,
    next: Cell<u64>,
}

impl Timers {
    /// Calls `waker` at `due_ns` of the thread's monotonic clock, or later.
    pub fn add(&self, due_ns: u64, waker: Waker) {
        let number = self.next.get();
        self.next.set(number + 1);
        self.heap.borrow_mut().push(Timer { due_ns, number, waker });
    }

    /// When the earliest timer is due.
    pub fn earliest(&self) -> Option<u64> {
        self.heap.borrow().peek().map(|timer| timer.due_ns)
    }

    /// Calls the wakers that are due.
    pub fn fire(&self, now_ns: u64) {
        while self.earliest().is_some_and(|due| due <= now_ns) {
            let timer = self.heap.borrow_mut().pop();
            if let Some(timer) = timer {
                timer.waker.wake();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    #[test]
    fn timers_fire_in_the_order_of_their_times() {
        let (timers, count) = (Timers::default(), Arc::new(Count::default()));
        for due in [30, 10, 20, 10] {
            timers.add(due, count.clone().into());
        }
        for (now, fired, next) in
            [(9, 0, Some(10)), (10, 2, Some(20)), (25, 3, Some(30)), (30, 4, None)]
        {
            timers.fire(now);
            assert_eq!((count.0.load(Relaxed), timers.earliest()), (fired, next));
        }
    }
}
