//! Tasks of one thread: a slab of futures of one type, and the set of those that are ready.
//!
//! A waker sets a bit, from any thread, and signals the event of the thread only while the thread
//! sleeps. A wake-up takes no lock, and no memory after the task was started.

use std::future::Future;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Wake, Waker};

use rustix::event::{EventfdFlags, eventfd};

/// Maximum number of tasks of a thread.
pub(crate) const TASKS_MAX: usize = 1 << 16;

const BITS: usize = 64;
const WORDS: usize = TASKS_MAX / BITS;

/// The set of ready tasks of a thread.
#[derive(Debug)]
pub(crate) struct Ready {
    /// One bit for each task.
    words: Box<[AtomicU64]>,
    /// One bit for each word that is not zero.
    summary: Box<[AtomicU64]>,
    /// The thread itself has something to do.
    poked: AtomicBool,
    asleep: AtomicBool,
    event: OwnedFd,
}

impl Ready {
    pub fn new() -> rustix::io::Result<Arc<Self>> {
        let zeros = |count| (0..count).map(|_| AtomicU64::new(0)).collect();
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let (words, summary) = (zeros(WORDS), zeros(WORDS / BITS));
        let (poked, asleep) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Arc::new(Self { words, summary, poked, asleep, event }))
    }

    /// The event that is readable after a wake-up of the sleeping thread.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Marks a task as ready. The thread itself calls this, so the thread does not sleep.
    pub fn mark(&self, index: usize) {
        let word = index / BITS;
        self.words[word].fetch_or(1 << (index % BITS), Ordering::AcqRel);
        self.summary[word / BITS].fetch_or(1 << (word % BITS), Ordering::AcqRel);
    }

    /// Makes the thread look at its inbox.
    pub fn poke(&self) {
        self.poked.store(true, Ordering::Release);
        self.signal();
    }

    /// Returns whether the thread was poked.
    pub fn take_poke(&self) -> bool {
        self.poked.load(Ordering::Relaxed) && self.poked.swap(false, Ordering::AcqRel)
    }

    /// Ends the sleep of the thread.
    pub fn signal(&self) {
        // SeqCst: either this load sees that the thread sleeps, or the thread sees the bit.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::AcqRel) {
            // The counter of the event cannot overflow: one addition for each sleep.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Returns whether a task is ready, or the thread was poked.
    pub fn is_any(&self) -> bool {
        self.poked.load(Ordering::Relaxed)
            || self.summary.iter().any(|word| word.load(Ordering::Relaxed) != 0)
    }

    /// Announces that the thread is about to sleep. Returns false if a task is ready.
    pub fn begin_sleep(&self) -> bool {
        self.asleep.store(true, Ordering::Relaxed);
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.is_any() {
            self.end_sleep();
            return false;
        }
        true
    }

    /// Announces that the thread has woken.
    pub fn end_sleep(&self) {
        if !self.asleep.swap(false, Ordering::AcqRel) {
            let mut count = [0; 8];
            // Empty if another thread has not written yet; then the next sleep is short.
            let _ = rustix::io::read(&self.event, &mut count);
        }
    }
}

struct TaskWaker {
    index: usize,
    ready: Arc<Ready>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ready.mark(self.index);
        self.ready.signal();
    }
}

struct Slot<F> {
    future: Pin<Box<Option<F>>>,
    waker: Waker,
}

/// The futures of a thread. The memory of a future that ended is used again.
pub(crate) struct Tasks<F> {
    slots: Vec<Slot<F>>,
    free: Vec<usize>,
    ready: Arc<Ready>,
}

impl<F: Future<Output = ()>> Tasks<F> {
    pub fn new(ready: Arc<Ready>) -> Self {
        Self { slots: Vec::new(), free: Vec::new(), ready }
    }

    /// Takes a free slot, if there is one, with the waker of its next task.
    pub fn reserve(&mut self) -> Option<(usize, Waker)> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.slots.len() == TASKS_MAX => return None,
            None => {
                let index = self.slots.len();
                let waker = Waker::from(Arc::new(TaskWaker { index, ready: self.ready.clone() }));
                self.slots.push(Slot { future: Box::pin(None), waker });
                index
            }
        };
        Some((index, self.slots[index].waker.clone()))
    }

    /// Starts a task in a slot of [`Tasks::reserve`]. The task is ready.
    pub fn start(&mut self, index: usize, future: F) {
        self.slots[index].future.set(Some(future));
        self.ready.mark(index);
    }

    /// Polls each task that is ready once. Calls `ended` for each task that has ended.
    ///
    /// A task that becomes ready meanwhile belongs to the next wave. Returns the number of polls.
    pub fn run_wave(&mut self, mut ended: impl FnMut(usize)) -> usize {
        let mut polled = 0;
        for group in 0..self.ready.summary.len() {
            let mut words = take(&self.ready.summary[group]);
            while let Some(bit) = pop(&mut words) {
                let word = group * BITS + bit;
                let mut tasks = take(&self.ready.words[word]);
                while let Some(bit) = pop(&mut tasks) {
                    polled += usize::from(self.poll(word * BITS + bit, &mut ended));
                }
            }
        }
        polled
    }

    /// Marks all tasks as ready.
    pub fn mark_all(&self) {
        (0..self.slots.len()).for_each(|index| self.ready.mark(index));
    }

    /// Number of tasks.
    pub fn count(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    fn poll(&mut self, index: usize, ended: &mut impl FnMut(usize)) -> bool {
        let Some(slot) = self.slots.get_mut(index) else { return false };
        let Some(future) = slot.future.as_mut().as_pin_mut() else { return false };
        if future.poll(&mut Context::from_waker(&slot.waker)).is_ready() {
            slot.future.set(None);
            self.free.push(index);
            ended(index);
        }
        true
    }
}

fn take(word: &AtomicU64) -> u64 {
    match word.load(Ordering::Relaxed) {
        0 => 0,
        _ => word.swap(0, Ordering::AcqRel),
    }
}

/// Removes the lowest bit.
fn pop(word: &mut u64) -> Option<usize> {
    let bit = word.trailing_zeros() as usize;
    (*word != 0).then(|| {
        *word &= *word - 1;
        bit
    })
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::future::poll_fn;
    use std::rc::Rc;
    use std::task::Poll;

    use super::*;

    /// A task that ends at its poll number `polls`, and notes each poll.
    async fn count(name: usize, polls: usize, log: Rc<RefCell<Vec<usize>>>) {
        let mut left = polls;
        poll_fn(|_| {
            log.borrow_mut().push(name);
            left -= 1;
            if left == 0 { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    #[test]
    fn only_ready_tasks_are_polled_once_a_wave() {
        let (ready, log) = (Ready::new().unwrap(), Rc::new(RefCell::new(Vec::new())));
        let mut tasks = Tasks::new(ready.clone());
        let mut wakers = Vec::new();
        for name in 0..200 {
            let (index, waker) = tasks.reserve().unwrap();
            assert_eq!(index, name);
            tasks.start(index, count(name, 2, log.clone()));
            wakers.push(waker);
        }
        let mut ended = Vec::new();
        assert_eq!(tasks.run_wave(|index| ended.push(index)), 200);
        assert_eq!(tasks.run_wave(|index| ended.push(index)), 0);
        assert!(ended.is_empty() && !ready.is_any());
        log.borrow_mut().clear();
        for index in [130, 3, 130] {
            wakers[index].wake_by_ref();
        }
        assert!(ready.is_any());
        assert_eq!(tasks.run_wave(|index| ended.push(index)), 2);
        assert_eq!(*log.borrow(), [3, 130]);
        assert_eq!(ended, [3, 130]);
        // A wake-up of a task that has ended is no poll, and its slot is used again.
        wakers[3].wake_by_ref();
        assert_eq!(tasks.run_wave(|_| panic!("nothing runs")), 0);
        assert_eq!(tasks.reserve().unwrap().0, 130);
    }

    #[test]
    fn sleeping_thread_is_woken_by_another_thread() {
        let ready = Ready::new().unwrap();
        let mut tasks = Tasks::new(ready.clone());
        let (index, waker) = tasks.reserve().unwrap();
        tasks.start(index, count(0, usize::MAX, Rc::default()));
        assert!(!ready.begin_sleep(), "a task is ready");
        assert_eq!(tasks.run_wave(|_| ()), 1);
        for _ in 0..1000 {
            assert!(ready.begin_sleep());
            let waker = waker.clone();
            let other = std::thread::spawn(move || waker.wake());
            let mut fds = [rustix::event::PollFd::new(&ready.event, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut fds, None).unwrap();
            ready.end_sleep();
            other.join().unwrap();
            assert_eq!(tasks.run_wave(|_| ()), 1);
        }
    }
}
