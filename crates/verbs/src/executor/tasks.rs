//! Futures of one type, polled by an event loop.

use std::future::Future;
use std::iter;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use rustix::event::{EventfdFlags, eventfd};

use super::ready;
use crate::Error;
use crate::completion::reactor::Entered;

/// Tasks of a word.
const WORD: usize = u64::BITS as usize;

/// Number of a task. The number of a task that has ended is used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct TaskId(u32);

impl TaskId {
    /// Returns the number, for a table of the caller that is indexed by tasks.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A slab of futures of one type, for an event loop.
///
/// The waker of a task sets a bit. Only if the loop sleeps ([`Tasks::sleep`]) does it ring the
/// alarm: a waker of the caller, for example [`thread_waker`](super::thread_waker) for a loop that
/// sleeps in a pool's `park`, or [`EventFd`] for one that sleeps in `epoll`. A task that ends
/// leaves its place and its waker to the next one, so that tasks cost no allocation once the slab
/// has grown to their number.
///
/// Futures on completions that run here need no other thread, if the loop polls their CQs. A future
/// must not call [`block_on`](super::block_on).
///
/// ```
/// use verbs::executor::{Tasks, thread_waker};
///
/// let mut tasks = Tasks::new(thread_waker());
/// let ids = [1, 2].map(|n| tasks.spawn(async move { n * n }));
/// let mut results = Vec::new();
/// tasks.run(|id, n| results.push((id, n)));
/// assert_eq!(results, [(ids[0], 1), (ids[1], 4)]);
/// assert_eq!((tasks.len(), tasks.sleep(|| "slept")), (0, Some("slept")));
/// ```
pub struct Tasks<F: Future> {
    places: Vec<Place<F>>,
    /// Places without a future.
    free: Vec<u32>,
    /// Ready bits, one word for 64 places.
    words: Vec<Arc<AtomicU64>>,
    alarm: Arc<Alarm>,
}

struct Place<F> {
    future: Pin<Box<Option<F>>>,
    waker: Waker,
}

struct Alarm {
    /// 1 while the loop sleeps and no waker has rung.
    asleep: AtomicU64,
    waker: Waker,
}

struct TaskWaker {
    word: Arc<AtomicU64>,
    bit: u64,
    alarm: Arc<Alarm>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if ready::mark(&*self.word, self.bit, &self.alarm.asleep) {
            self.alarm.waker.wake_by_ref();
        }
    }
}

impl<F: Future> Tasks<F> {
    /// Creates a slab without tasks. `alarm` ends the sleep of the loop.
    pub fn new(alarm: Waker) -> Self {
        let alarm = Arc::new(Alarm { asleep: AtomicU64::new(0), waker: alarm });
        Self { places: Vec::new(), free: Vec::new(), words: Vec::new(), alarm }
    }

    /// Adds a task. The next [`Tasks::run`] polls it.
    pub fn spawn(&mut self, future: F) -> TaskId {
        if self.free.is_empty() {
            self.grow();
        }
        let id = self.free.pop().expect("a place made just now");
        let at = id as usize;
        self.places[at].future.set(Some(future));
        self.words[at / WORD].fetch_or(1 << (at % WORD), Ordering::AcqRel);
        TaskId(id)
    }

    /// Adds the places of one word.
    #[cold]
    fn grow(&mut self) {
        let word = Arc::new(AtomicU64::new(0));
        let first = self.places.len();
        for bit in 0..WORD {
            let (word, alarm) = (word.clone(), self.alarm.clone());
            let waker = Waker::from(Arc::new(TaskWaker { word, bit: 1 << bit, alarm }));
            self.places.push(Place { future: Box::pin(None), waker });
        }
        self.words.push(word);
        self.free.reserve(self.places.len());
        self.free.extend((first..self.places.len()).rev().map(|at| at as u32));
    }

    /// Polls each task that is ready, once, and passes the results of those that have ended to
    /// `done`. Returns the number of polls. `done` must not block.
    pub fn run(&mut self, mut done: impl FnMut(TaskId, F::Output)) -> usize {
        let mut polls = 0;
        let _entered = Entered::enter_loop();
        for at in 0..self.words.len() {
            for bit in bits(self.words[at].load(Ordering::Acquire)) {
                // Cleared first: a wake-up from now on makes the task ready again.
                self.words[at].fetch_and(!(1 << bit), Ordering::AcqRel);
                polls += self.poll(at * WORD + bit, &mut done) as usize;
            }
        }
        polls
    }

    /// Polls a task. Returns false if the place is free, because a waker of an earlier task was
    /// called late.
    fn poll(&mut self, at: usize, done: &mut impl FnMut(TaskId, F::Output)) -> bool {
        let Place { future, waker } = &mut self.places[at];
        let Some(task) = future.as_mut().as_pin_mut() else { return false };
        if let Poll::Ready(output) = task.poll(&mut Context::from_waker(waker)) {
            future.set(None);
            self.free.push(at as u32);
            done(TaskId(at as u32), output);
        }
        true
    }

    /// Calls `sleep`, unless a task is ready. A task that becomes ready from now on rings the alarm
    /// once.
    pub fn sleep<R>(&mut self, sleep: impl FnOnce() -> R) -> Option<R> {
        let asleep = &self.alarm.asleep;
        if !ready::may_sleep(asleep, self.words.iter().map(|word| &**word)) {
            return None;
        }
        let result = sleep();
        asleep.store(0, Ordering::Release);
        Some(result)
    }

    /// Returns the number of tasks that have not ended.
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Returns whether all tasks have ended.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Returns the numbers of the bits that are set.
fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    iter::from_fn(move || {
        let bit = word.trailing_zeros();
        word &= word.wrapping_sub(1);
        (bit < u64::BITS).then_some(bit as usize)
    })
}

/// An eventfd that wakes a loop which sleeps in `epoll` or `poll`.
#[derive(Debug)]
pub struct EventFd(Arc<Signal>);

#[derive(Debug)]
struct Signal(OwnedFd);

impl EventFd {
    /// Creates an eventfd without a signal. It does not block and is closed at `exec`.
    pub fn new() -> Result<Self, Error> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let system = |e: rustix::io::Errno| Error::System {
            attempt: "creating an eventfd for an event loop".into(),
            source: e.into(),
        };
        Ok(Self(Arc::new(Signal(fd.map_err(system)?))))
    }

    /// Returns the waker that signals it: the alarm of [`Tasks::new`].
    pub fn waker(&self) -> Waker {
        Waker::from(self.0.clone())
    }

    /// Takes the signals off it, so that it is no longer readable.
    pub fn clear(&self) {
        // Fails only if there is no signal.
        let _ = rustix::io::read(&self.0.0, &mut [0u8; 8]);
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Fails only if the counter is at its maximum; then it is readable.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::Mutex;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Wakers of the tasks, by task.
    type Wakers = Arc<Mutex<Vec<Option<Waker>>>>;

    /// A future that is pending `rounds` times, and leaves its waker at `at` each time.
    fn pending(wakers: &Wakers, at: usize, rounds: usize) -> impl Future<Output = usize> + use<> {
        let (wakers, mut left) = (wakers.clone(), rounds);
        poll_fn(move |cx| {
            if left == 0 {
                return Poll::Ready(rounds);
            }
            left -= 1;
            wakers.lock().expect("no test panics here")[at] = Some(cx.waker().clone());
            Poll::Pending
        })
    }

    fn wakers(count: usize) -> Wakers {
        Arc::new(Mutex::new(vec![None; count]))
    }

    fn take(wakers: &Wakers, at: usize) -> Option<Waker> {
        wakers.lock().expect("no test panics here")[at].take()
    }

    /// Counts how often it is rung.
    #[derive(Default)]
    struct Bell(AtomicUsize);

    impl Wake for Bell {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn only_ready_tasks_are_polled() {
        let wakers = wakers(200);
        let mut tasks = Tasks::new(Waker::noop().clone());
        for at in 0..200 {
            assert_eq!(tasks.spawn(pending(&wakers, at, 2)).index(), at);
        }
        assert_eq!((tasks.run(|_, _| ()), tasks.run(|_, _| ()), tasks.len()), (200, 0, 200));
        for at in [7, 64, 199, 7] {
            take(&wakers, at).into_iter().for_each(Waker::wake);
        }
        assert_eq!(tasks.run(|_, _| ()), 3);
        let mut ended = Vec::new();
        for at in [64, 7] {
            take(&wakers, at).expect("its second waker").wake();
        }
        assert_eq!(tasks.run(|id, rounds| ended.push((id.index(), rounds))), 2);
        assert_eq!((ended, tasks.len()), (vec![(7, 2), (64, 2)], 198));
    }

    #[test]
    fn places_of_ended_tasks_are_used_again() {
        let wakers = wakers(1);
        let mut tasks = Tasks::new(Waker::noop().clone());
        let first = tasks.spawn(pending(&wakers, 0, 1));
        tasks.run(|_, _| ());
        let late = take(&wakers, 0).expect("a waker");
        late.wake_by_ref();
        assert_eq!(tasks.run(|_, _| ()), 1);
        late.wake_by_ref();
        assert_eq!((tasks.run(|_, _| ()), tasks.is_empty()), (0, true), "a late wake-up");
        for _ in 0..1000 {
            assert_eq!(tasks.spawn(pending(&wakers, 0, 0)), first);
            tasks.run(|_, _| ());
        }
        assert_eq!(tasks.places.len(), WORD);
    }

    #[test]
    fn alarm_rings_once_and_only_during_sleep() {
        let (wakers, bell) = (wakers(2), Arc::new(Bell::default()));
        let mut tasks = Tasks::new(bell.clone().into());
        for at in 0..2 {
            tasks.spawn(pending(&wakers, at, 3));
        }
        assert_eq!(tasks.sleep(|| ()), None, "both are to be polled");
        tasks.run(|_, _| ());
        take(&wakers, 0).expect("a waker").wake();
        assert_eq!((tasks.sleep(|| ()), bell.0.load(Ordering::SeqCst)), (None, 0));
        tasks.run(|_, _| ());
        let both = [0, 1].map(|at| take(&wakers, at).expect("a waker"));
        let rings = tasks.sleep(|| {
            both.into_iter().for_each(Waker::wake);
            bell.0.load(Ordering::SeqCst)
        });
        assert_eq!(rings, Some(1));
        assert_eq!((tasks.run(|_, _| ()), bell.0.load(Ordering::SeqCst)), (2, 1));
    }

    #[test]
    fn eventfd_wakes_a_loop_that_polls_it() {
        use rustix::event::{PollFd, PollFlags, poll};
        let (event, wakers) = (EventFd::new().expect("an eventfd"), wakers(1));
        let mut tasks = Tasks::new(event.waker());
        tasks.spawn(pending(&wakers, 0, 1000));
        let (to_thread, from_loop) = std::sync::mpsc::channel::<Waker>();
        let thread = std::thread::spawn(move || from_loop.into_iter().for_each(Waker::wake));
        let mut ended = 0;
        while !tasks.is_empty() {
            tasks.run(|_, rounds| ended += rounds);
            if let Some(waker) = take(&wakers, 0) {
                to_thread.send(waker).expect("the thread receives it");
            }
            tasks.sleep(|| {
                if ended == 0 {
                    let fds = &mut [PollFd::new(&event, PollFlags::IN)];
                    poll(fds, None).expect("the eventfd is signalled");
                    event.clear();
                }
            });
        }
        assert_eq!(ended, 1000);
        drop(to_thread);
        thread.join().expect("the thread that wakes");
    }
}
