//! The waker thread: makes the wake-ups of functions that are on probation (`sleeper.rs`).
//!
//! One thread serves all these functions. Of the functions with queued wake-ups, the thread serves
//! the one whose wake-ups have used the least CPU time. So an honest client waits for at most one
//! slow wake-up, not for all wake-ups of another client. Functions that had a slow wake-up share a
//! tenth of a core: with a waker thread that worked all the time, a victim on two cores fell to
//! 0.13 of its throughput.
//!
//! The NIC thread never waits for the lock of the list. It wakes the waker thread through an
//! eventfd to which no client has access, so that no client can make that wake-up slow.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::error::Error;
use super::sleeper::{Environment, SLOW, Sleeper};
use units::scheduling::Scheduling;
use verbs::FunctionId;

/// After a slow wake-up, slow functions pause for this multiple of its duration.
const PAUSE_FACTOR: u64 = 9;

/// Owner of the waker thread. Dropping it ends the thread.
pub(super) struct Waker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The NIC thread's handle on the list of the waker thread.
pub(super) struct WakerQueue(Arc<Shared>);

struct Shared {
    list: Mutex<WakeList>,
    /// The eventfd that the thread sleeps on.
    notifier: OwnedFd,
}

/// The pending wake-ups of the waker thread.
#[derive(Default)]
pub(super) struct WakeList {
    functions: HashMap<FunctionId, Queue>,
    /// CPU time, in ns, of the function that was served last. A function that becomes active starts
    /// at least there, so that idle time gives it no credit.
    floor: u64,
    /// Time, in ns of the wall clock, before which no slow function is served.
    slow_from: u64,
    is_asleep: bool,
    stop: bool,
}

#[derive(Default)]
struct Queue {
    /// CPU time that the function's wake-ups have used, in ns.
    spent: u64,
    /// The function had a slow wake-up and has not become trusted since.
    is_slow: bool,
    pending: VecDeque<Arc<Sleeper>>,
}

/// The next action of the waker thread.
pub(super) enum Next {
    /// Make this wake-up.
    Wake(Arc<Sleeper>),
    /// Wait until this time, in ns of the wall clock: only slow functions have wake-ups.
    At(u64),
    /// The list is empty.
    Nothing,
}

impl WakeList {
    pub fn push(&mut self, sleeper: Arc<Sleeper>) {
        let queue = self.functions.entry(sleeper.function).or_default();
        if queue.pending.is_empty() {
            queue.spent = queue.spent.max(self.floor);
        }
        queue.pending.push_back(sleeper);
    }

    /// Removes the next wake-up from the list at the time `now`.
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

    /// Charges the function of `sleeper` for a wake-up that used `time` of CPU time and ended at
    /// `now`.
    pub fn charge(&mut self, sleeper: &Sleeper, time: Duration, now: u64) {
        let ns = time.as_nanos() as u64;
        // The pause applies to all slow functions, also after this function was removed.
        if time >= SLOW {
            self.slow_from = now + PAUSE_FACTOR * ns;
        }
        if let Some(queue) = self.functions.get_mut(&sleeper.function) {
            queue.spent += ns;
            queue.is_slow = time >= SLOW || queue.is_slow && sleeper.probation.is_offloaded();
        }
    }

    pub fn forget(&mut self, function: FunctionId) {
        self.functions.remove(&function);
    }
}

impl Waker {
    /// Starts the thread. `is_urgent`: asks for a better scheduling than that of ordinary threads.
    pub fn start(env: Environment, is_urgent: bool) -> Result<Self, Error> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let notifier = eventfd(0, flags).map_err(Error::system("making an eventfd"))?;
        let shared = Arc::new(Shared { list: Mutex::default(), notifier });
        let for_thread = shared.clone();
        let thread = std::thread::Builder::new()
            .name("granary-waker".to_string())
            .spawn(move || {
                // The thread sleeps nine tenths of the time if its wake-ups are slow.
                if is_urgent {
                    Scheduling::ask();
                }
                for_thread.run(&env);
            })
            .map_err(|source| Error::System { attempt: "starting the waker thread", source })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// A handle on the waker thread's list, for the NIC thread.
    pub fn queue(&self) -> WakerQueue {
        WakerQueue(self.shared.clone())
    }

    /// The join handle of the waker thread.
    pub fn thread(&self) -> &JoinHandle<()> {
        self.thread.as_ref().expect("set until dropped")
    }

    /// Removes the pending wake-ups of a function that has ended.
    pub fn forget(&self, function: FunctionId) {
        self.shared.list.lock().forget(function);
    }
}

impl Drop for Waker {
    fn drop(&mut self) {
        self.shared.list.lock().stop = true;
        self.shared.notify();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

impl WakerQueue {
    /// Queues a wake-up for the waker thread. Returns false, without waiting, if another thread
    /// holds the list's lock.
    pub fn try_push(&self, sleeper: &Arc<Sleeper>) -> bool {
        let Some(mut list) = self.0.list.try_lock() else { return false };
        list.push(sleeper.clone());
        let is_asleep = std::mem::take(&mut list.is_asleep);
        drop(list);
        if is_asleep {
            self.0.notify();
        }
        true
    }
}

impl Shared {
    fn notify(&self) {
        // The thread reads the counter after each sleep, so the counter never overflows.
        let _ = rustix::io::write(&self.notifier, &1u64.to_ne_bytes());
    }

    /// Sleeps until the NIC thread writes the eventfd, at most until the time `until`.
    fn sleep(&self, now: u64, until: Option<u64>) {
        let rest = until.map(|until| {
            let rest = Duration::from_nanos(until.saturating_sub(now));
            Timespec { tv_sec: rest.as_secs() as i64, tv_nsec: rest.subsec_nanos() as i64 }
        });
        let mut notifier = [PollFd::new(&self.notifier, PollFlags::IN)];
        // After an early return the thread finds no work in the list and sleeps again.
        let _ = poll(&mut notifier, rest.as_ref());
        let _ = rustix::io::read(&self.notifier, &mut [0; 8]);
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
                    self.list.lock().charge(&sleeper, time, now);
                }
                Next::At(until) => self.sleep(now, Some(until)),
                Next::Nothing => self.sleep(now, None),
            }
        }
    }
}

#[cfg(test)]
impl WakerQueue {
    /// A list without a waker thread: the tests take its place.
    pub fn unserved() -> Self {
        let notifier = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        Self(Arc::new(Shared { list: Mutex::default(), notifier }))
    }

    /// A second handle on the same list.
    pub fn second_handle(&self) -> Self {
        Self(self.0.clone())
    }

    /// Calls `change` with the list locked.
    pub fn list<R>(&self, change: impl FnOnce(&mut WakeList) -> R) -> R {
        change(&mut self.0.list.lock())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::wakes::Wakes;
    use super::*;
    use verbs::DmaMemory;

    const F: FunctionId = FunctionId(1);

    fn sleeper() -> Arc<Sleeper> {
        let mut wakes = Wakes::new(Environment::SYSTEM);
        wakes.add_untrusted(F);
        wakes.sleeper(F, DmaMemory::anonymous(4).unwrap())
    }

    #[test]
    fn waker_thread_serves_wakeups_and_ends_on_drop() {
        let waker = Waker::start(Environment::SYSTEM, false).unwrap();
        let (queue, sleeper) = (waker.queue(), sleeper());
        let until = Instant::now() + Duration::from_secs(20);
        let wait = |done: &dyn Fn() -> bool| {
            while !done() {
                assert!(Instant::now() < until, "timed out");
                std::thread::yield_now();
            }
        };
        for _ in 0..3 {
            wait(&|| queue.list(|list| list.is_asleep));
            wait(&|| queue.try_push(&sleeper));
            let is_empty = |list: &mut WakeList| list.functions[&F].pending.is_empty();
            wait(&|| queue.list(|list| is_empty(list)));
        }
        let shared = waker.shared.clone();
        drop((waker, queue));
        assert_eq!(Arc::strong_count(&shared), 1, "the thread still holds the list");
    }

    #[test]
    fn waker_eventfd_is_nonblocking_and_close_on_exec() {
        let waker = Waker::start(Environment::SYSTEM, false).unwrap();
        let notifier = &waker.shared.notifier;
        let flags = rustix::fs::fcntl_getfl(notifier).unwrap();
        assert!(flags.contains(rustix::fs::OFlags::NONBLOCK));
        let flags = rustix::io::fcntl_getfd(notifier).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }

    #[test]
    fn ended_function_has_no_wakeups_at_the_waker_thread() {
        let queue = WakerQueue::unserved();
        let waker = Waker { shared: queue.second_handle().0, thread: None };
        assert!(queue.try_push(&sleeper()));
        waker.forget(FunctionId(2));
        assert!(queue.list(|list| list.functions.contains_key(&F)));
        waker.forget(F);
        assert!(queue.list(|list| list.functions.is_empty()));
    }
}
