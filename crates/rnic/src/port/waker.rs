//! The waker thread: makes the wake-ups of functions whose wake-ups are doubted (`wakes.rs`).
//!
//! One thread serves all these functions. Of the functions with queued wake-ups, the one whose wake-ups
//! have taken the least CPU time comes next: an honest client waits for one slow wake-up at most, not
//! for all of another's. Functions that had a slow wake-up have a tenth of a core together: beside a
//! thread that works all the time, a victim on two cores did 0.13 of its rounds.
//!
//! The NIC thread never waits for the lock of the list. It wakes the thread through an eventfd that no
//! client has, so that no client can make that wake-up slow.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::error::Error;
use super::wakes::{Environment, SLOW, Sleeper};
use crate::ids::FunctionId;

/// After a slow wake-up no slow function has another one for so many times as long as it took.
const REST: u64 = 9;

/// The waker thread; ends when this is dropped.
pub(super) struct Waker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The NIC thread's way to the waker thread.
pub(super) struct Line(Arc<Shared>);

struct Shared {
    list: Mutex<List>,
    /// The eventfd that the thread sleeps on.
    bell: OwnedFd,
}

/// The wake-ups to be made.
#[derive(Default)]
pub(super) struct List {
    functions: HashMap<FunctionId, Queue>,
    /// CPU time, in ns, of the function served last. A function without a wake-up for long begins there.
    floor: u64,
    /// Time, in ns of the wall clock, before which no slow function has a wake-up.
    slow_from: u64,
    is_asleep: bool,
    stop: bool,
}

#[derive(Default)]
struct Queue {
    /// CPU time that the function's wake-ups have taken, in ns.
    spent: u64,
    /// The function had a slow wake-up, and has not proved itself since.
    is_slow: bool,
    pending: VecDeque<Arc<Sleeper>>,
}

/// The work that a list has for the waker thread.
pub(super) enum Next {
    Wake(Arc<Sleeper>),
    /// Nothing before this time, in ns of the wall clock.
    At(u64),
    Nothing,
}

impl List {
    pub fn push(&mut self, sleeper: Arc<Sleeper>) {
        let queue = self.functions.entry(sleeper.function).or_default();
        if queue.pending.is_empty() {
            queue.spent = queue.spent.max(self.floor);
        }
        queue.pending.push_back(sleeper);
    }

    /// Takes the next wake-up from the list, at the time `now`.
    pub fn pop(&mut self, now: u64) -> Next {
        let may_be_slow = self.slow_from <= now;
        let waiting = self.functions.values_mut().filter(|queue| !queue.pending.is_empty());
        let Some(next) = waiting.min_by_key(|queue| (queue.is_slow && !may_be_slow, queue.spent))
        else {
            return Next::Nothing;
        };
        if next.is_slow && !may_be_slow {
            return Next::At(self.slow_from);
        }
        self.floor = next.spent;
        next.pending.pop_front().map_or(Next::Nothing, Next::Wake)
    }

    /// Charges a wake-up that took `time` of the CPU and ended at the time `now`.
    pub fn took(&mut self, sleeper: &Sleeper, time: Duration, now: u64) {
        let ns = time.as_nanos() as u64;
        // A slow wake-up is one whether or not its function is there any more.
        if time >= SLOW {
            self.slow_from = now + REST * ns;
        }
        if let Some(queue) = self.functions.get_mut(&sleeper.function) {
            queue.spent += ns;
            queue.is_slow = time >= SLOW || queue.is_slow && sleeper.doubt.is_aside();
        }
    }

    pub fn forget(&mut self, function: FunctionId) {
        self.functions.remove(&function);
    }
}

impl Waker {
    /// Starts the thread.
    pub fn start(env: Environment) -> Result<Self, Error> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let bell = eventfd(0, flags).map_err(Error::system("making an eventfd"))?;
        let shared = Arc::new(Shared { list: Mutex::default(), bell });
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new()
            .name("granary-waker".to_string())
            .spawn(move || of_thread.run(&env))
            .map_err(|source| Error::System { attempt: "starting the waker thread", source })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The NIC thread's way to the waker thread.
    pub fn line(&self) -> Line {
        Line(self.shared.clone())
    }

    /// The waker thread's handle.
    pub fn thread(&self) -> &JoinHandle<()> {
        self.thread.as_ref().expect("set until dropped")
    }

    /// Forgets a function that has ended.
    pub fn forget(&self, function: FunctionId) {
        self.shared.list.lock().forget(function);
    }
}

impl Drop for Waker {
    fn drop(&mut self) {
        self.shared.list.lock().stop = true;
        self.shared.ring();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been reported where it happened.
            let _ = thread.join();
        }
    }
}

impl Line {
    /// Leaves a wake-up to the waker thread. False if another thread holds the list's lock.
    pub fn offer(&self, sleeper: &Arc<Sleeper>) -> bool {
        let Some(mut list) = self.0.list.try_lock() else { return false };
        list.push(sleeper.clone());
        let is_asleep = std::mem::take(&mut list.is_asleep);
        drop(list);
        if is_asleep {
            self.0.ring();
        }
        true
    }
}

impl Shared {
    fn ring(&self) {
        // The thread reads the counter after each sleep, so that it is never full.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// Waits until the NIC thread rings, at most until the time `until`.
    fn sleep(&self, now: u64, until: Option<u64>) {
        let rest = until.map(|until| {
            let rest = Duration::from_nanos(until.saturating_sub(now));
            Timespec { tv_sec: rest.as_secs() as i64, tv_nsec: rest.subsec_nanos() as i64 }
        });
        let mut bell = [PollFd::new(&self.bell, PollFlags::IN)];
        // Woken too early, the thread looks at the list and comes here again.
        let _ = poll(&mut bell, rest.as_ref());
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
    }

    fn run(&self, env: &Environment) {
        loop {
            let now = (env.wall)();
            let mut list = self.list.lock();
            if list.stop {
                return;
            }
            let next = list.pop(now);
            list.is_asleep = !matches!(next, Next::Wake(_));
            drop(list);
            match next {
                Next::Wake(sleeper) => {
                    let time = sleeper.wake_measured(env);
                    let now = (env.wall)();
                    self.list.lock().took(&sleeper, time, now);
                }
                Next::At(until) => self.sleep(now, Some(until)),
                Next::Nothing => self.sleep(now, None),
            }
        }
    }
}

#[cfg(test)]
impl Line {
    /// A list that no thread serves: tests play the waker thread.
    pub fn unserved() -> Self {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        Self(Arc::new(Shared { list: Mutex::default(), bell }))
    }

    /// Another way to the same list.
    pub fn again(&self) -> Self {
        Self(self.0.clone())
    }

    /// Calls `change` with the list locked.
    pub fn list<R>(&self, change: impl FnOnce(&mut List) -> R) -> R {
        change(&mut self.0.list.lock())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::wakes::Wakes;
    use super::*;
    use crate::memory::DmaMemory;

    const F: FunctionId = FunctionId(1);

    fn sleeper() -> Arc<Sleeper> {
        let mut wakes = Wakes::new(Environment::SYSTEM);
        wakes.doubt(F);
        wakes.sleeper(F, DmaMemory::anonymous(4).unwrap())
    }

    #[test]
    fn the_waker_thread_makes_what_comes_while_it_sleeps_and_ends_when_it_is_dropped() {
        let waker = Waker::start(Environment::SYSTEM).unwrap();
        let (line, sleeper) = (waker.line(), sleeper());
        let until = Instant::now() + Duration::from_secs(20);
        let wait = |done: &dyn Fn() -> bool| {
            while !done() {
                assert!(Instant::now() < until, "it does not come to that");
                std::thread::yield_now();
            }
        };
        for _ in 0..3 {
            wait(&|| line.list(|list| list.is_asleep));
            wait(&|| line.offer(&sleeper));
            let is_empty = |list: &mut List| list.functions[&F].pending.is_empty();
            wait(&|| line.list(|list| is_empty(list)));
        }
        let shared = waker.shared.clone();
        drop((waker, line));
        assert_eq!(Arc::strong_count(&shared), 1, "the thread has it yet");
    }

    #[test]
    fn the_bell_of_the_waker_thread_does_not_block_and_is_closed_in_other_programs() {
        let waker = Waker::start(Environment::SYSTEM).unwrap();
        let bell = &waker.shared.bell;
        let flags = rustix::fs::fcntl_getfl(bell).unwrap();
        assert!(flags.contains(rustix::fs::OFlags::NONBLOCK));
        let flags = rustix::io::fcntl_getfd(bell).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }

    #[test]
    fn a_function_that_has_ended_has_no_wake_ups_at_the_waker_thread() {
        let line = Line::unserved();
        let waker = Waker { shared: line.again().0, thread: None };
        assert!(line.offer(&sleeper()));
        waker.forget(FunctionId(2));
        assert!(line.list(|list| list.functions.contains_key(&F)));
        waker.forget(F);
        assert!(line.list(|list| list.functions.is_empty()));
    }
}
