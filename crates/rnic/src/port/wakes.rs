//! Wake-ups of threads that sleep on a word in a client's memory, and the thread that makes them.
//!
//! A wake-up is `FUTEX_WAKE`. The kernel walks all threads that sleep in the word's hash bucket,
//! including those that sleep on other words. A client that parks threads in the bucket of its CQ's
//! record makes each wake-up of that CQ as long as it likes: 4 us without parked threads, 116 us with
//! 2,000 of them and 280 us with 5,000 (medians of CPU time, Linux 6.18 on two virtual CPUs).
//!
//! ```text
//!                 wake-ups of a trusted function               FUTEX_WAKE
//!  NIC thread ──────────────────────────────────────────────────────────────> sleepers
//!      │          of a function that is doubted                    ^
//!      └───────────────────────> waker thread (`waker.rs`) ────────┘
//! ```
//!
//! - The CPU time of a function's wake-ups decides; [`Doubt`] has the rule. The waker thread costs an
//!   honest client one switch between threads for each wake-up, and the NIC thread nothing.
//! - A NIC without a waker thread makes all wake-ups itself and measures none: all its clients are
//!   threads of its own process.
//! - Functions take turns, and a round of the NIC makes no further wake-up after [`ROUND`].

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use rustix::thread::futex;
use rustix::time::{ClockId, clock_gettime};

use super::waker::Line;
use crate::ids::FunctionId;
use crate::memory::DmaMemory;

/// The most wake-ups that one [`Wakes::run`] makes; the others come with the next call. System calls
/// are the dearest work that a client can give to the NIC thread.
const WAKES: usize = 4;
/// A run that has taken this long makes no further wake-up.
const ROUND: Duration = Duration::from_micros(20);
/// The most threads that one wake-up wakes. One thread sleeps on a CQ, as a rule; thousands that sleep
/// there must not keep the NIC thread busy.
const SLEEPERS: u32 = 4;

/// A wake-up that takes this long is slow. An ordinary one took 6 us of CPU time in 99 of 100 cases.
pub(super) const SLOW: Duration = Duration::from_micros(30);
/// Quick wake-ups after which a new function is trusted.
const PROOF: u32 = 64;
/// A slow wake-up costs its function one quick wake-up of doubt for each such span that it took. Slow
/// wake-ups therefore at most double the time that the NIC thread spends on wake-ups.
const EARNED: Duration = Duration::from_micros(5);
/// The longest doubt, in wake-ups.
const DOUBT_MAX: u128 = 1 << 16;

/// Whether a function's wake-ups are doubted, and which thread makes them.
///
/// - The wake-ups of a trusted function are timed by the wall clock, which is read without a system
///   call and also counts the time in which another thread had the CPU. A slow wake-up makes the
///   function doubted.
/// - The wake-ups of a doubted function are timed by the CPU time of their thread. A slow one sends
///   the function to the waker thread; each quick one takes 1 off the doubt. At 0 the function is
///   trusted.
/// - A function of another process begins at the waker thread, so that a client gains nothing by
///   attaching anew.
pub(super) struct Doubt {
    left: AtomicU32,
    aside: AtomicBool,
}

impl Doubt {
    /// The doubt of a new function: none, or the whole of [`PROOF`].
    fn new(is_trusted: bool) -> Self {
        let left = if is_trusted { 0 } else { PROOF };
        Self { left: AtomicU32::new(left), aside: AtomicBool::new(!is_trusted) }
    }

    /// Whether the waker thread makes the function's wake-ups.
    pub fn is_aside(&self) -> bool {
        self.aside.load(Ordering::Relaxed)
    }

    fn is_trusted(&self) -> bool {
        self.left.load(Ordering::Relaxed) == 0
    }

    /// Counts a wake-up of a trusted function that took `wall` by the wall clock.
    fn lasted(&self, wall: Duration) {
        if wall >= SLOW {
            self.left.store(doubt_after(wall), Ordering::Relaxed);
        }
    }

    /// Counts a wake-up of a doubted function that took `cpu` of its thread's CPU time.
    pub fn took(&self, cpu: Duration) {
        let left = self.left.load(Ordering::Relaxed);
        if cpu >= SLOW {
            self.left.store(left.max(doubt_after(cpu)), Ordering::Relaxed);
            self.aside.store(true, Ordering::Relaxed);
            return;
        }
        self.left.store(left.saturating_sub(1), Ordering::Relaxed);
        if left <= 1 {
            self.aside.store(false, Ordering::Relaxed);
        }
    }
}

fn doubt_after(time: Duration) -> u32 {
    (time.as_nanos() / EARNED.as_nanos()).clamp(PROOF.into(), DOUBT_MAX) as u32
}

/// The clocks and the system call of wake-ups; tests replace them.
#[derive(Clone, Copy)]
pub(super) struct Environment {
    /// Wall clock, in ns.
    pub wall: fn() -> u64,
    /// CPU time of the calling thread, in ns.
    pub cpu: fn() -> u64,
    /// Wakes up to [`SLEEPERS`] threads.
    pub wake: fn(&AtomicU32),
}

impl Environment {
    /// The system's.
    pub const SYSTEM: Self = Self {
        wall: || nanoseconds(ClockId::Monotonic),
        cpu: || nanoseconds(ClockId::ThreadCPUTime),
        // A futex in a client's memory: a failure costs that client alone.
        wake: |word| _ = futex::wake(word, futex::Flags::empty(), SLEEPERS),
    };
}

fn nanoseconds(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// A word that threads of a function's client sleep on.
pub(super) struct Sleeper {
    pub function: FunctionId,
    word: DmaMemory,
    /// A wake-up is queued. Cleared before the system call, so that a later completion queues another.
    queued: AtomicBool,
    pub doubt: Arc<Doubt>,
}

impl Sleeper {
    /// Wakes the threads that sleep on the word; gives the time that `clock` advanced meanwhile.
    fn wake(&self, env: &Environment, clock: fn() -> u64) -> Duration {
        self.queued.swap(false, Ordering::AcqRel);
        let start = clock();
        (env.wake)(self.word.word32(0));
        Duration::from_nanos(clock().saturating_sub(start))
    }

    /// Wakes the threads that sleep on the word, timed by the calling thread's CPU time.
    pub fn wake_measured(&self, env: &Environment) -> Duration {
        let time = self.wake(env, env.cpu);
        self.doubt.took(time);
        time
    }
}

/// The wake-ups that are to be made.
pub(super) struct Wakes {
    clients: HashMap<FunctionId, Client>,
    /// Functions with wake-ups to come.
    turns: VecDeque<FunctionId>,
    /// The way to the waker thread, if there is one.
    line: Option<Line>,
    env: Environment,
}

struct Client {
    doubt: Arc<Doubt>,
    pending: VecDeque<Arc<Sleeper>>,
}

impl Client {
    fn new(is_trusted: bool) -> Self {
        Self { doubt: Arc::new(Doubt::new(is_trusted)), pending: VecDeque::new() }
    }
}

impl Wakes {
    /// An empty queue of a NIC without a waker thread.
    pub fn new(env: Environment) -> Self {
        Self { clients: HashMap::new(), turns: VecDeque::new(), line: None, env }
    }

    /// Connects the waker thread, which makes the wake-ups of doubted functions from now on.
    pub fn set_line(&mut self, line: Line) {
        self.line = Some(line);
    }

    /// Adds a function of another process, whose wake-ups are doubted at first.
    pub fn doubt(&mut self, function: FunctionId) {
        self.clients.insert(function, Client::new(false));
    }

    /// The word that threads of `function`'s client sleep on.
    pub fn sleeper(&mut self, function: FunctionId, word: DmaMemory) -> Arc<Sleeper> {
        let client = self.clients.entry(function).or_insert_with(|| Client::new(true));
        let (queued, doubt) = (AtomicBool::new(false), client.doubt.clone());
        Arc::new(Sleeper { function, word, queued, doubt })
    }

    /// Queues a wake-up of the threads that sleep on a word.
    pub fn queue(&mut self, sleeper: &Arc<Sleeper>) {
        // A queued wake-up serves this completion, too.
        if sleeper.queued.swap(true, Ordering::AcqRel) {
            return;
        }
        let Some(client) = self.clients.get_mut(&sleeper.function) else { return };
        if client.pending.is_empty() {
            self.turns.push_back(sleeper.function);
        }
        client.pending.push_back(sleeper.clone());
    }

    /// Whether there are wake-ups to be made.
    pub fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// Makes some of the wake-ups, or has the waker thread make them.
    #[cold]
    pub fn run(&mut self) {
        let mut spent = Duration::ZERO;
        for _ in 0..WAKES {
            let Some(function) = self.turns.pop_front() else { return };
            let Some(client) = self.clients.get_mut(&function) else { continue };
            let Some(sleeper) = client.pending.pop_front() else { continue };
            match &self.line {
                None => _ = sleeper.wake(&self.env, || 0),
                Some(line) if client.doubt.is_aside() => {
                    if !line.offer(&sleeper) {
                        // The waker thread holds the lock of its list at this moment.
                        client.pending.push_front(sleeper);
                        self.turns.push_front(function);
                        return;
                    }
                }
                Some(_) if client.doubt.is_trusted() => {
                    let time = sleeper.wake(&self.env, self.env.wall);
                    client.doubt.lasted(time);
                    spent += time;
                }
                Some(_) => spent += sleeper.wake_measured(&self.env),
            }
            if !client.pending.is_empty() {
                self.turns.push_back(function);
            }
            if spent >= ROUND {
                return;
            }
        }
    }

    /// Forgets a function.
    pub fn remove(&mut self, function: FunctionId) {
        self.clients.remove(&function);
        self.turns.retain(|turn| *turn != function);
    }
}

#[cfg(test)]
#[path = "wakes_tests.rs"]
mod tests;
