//! A futex word on which a client's threads sleep, and the probation of the client's function.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use rustix::thread::futex;
use rustix::time::{ClockId, clock_gettime};

use verbs::{DmaMemory, FunctionId};

/// Maximum threads that one wake-up wakes. Usually one thread sleeps on a CQ; thousands of sleeping
/// threads must not keep the NIC thread busy.
const THREADS_PER_WAKE: u32 = 4;

/// Duration from which a wake-up is slow. An ordinary one took 6 us of CPU time in 99 of 100 cases.
pub(super) const SLOW: Duration = Duration::from_micros(30);
/// Quick wake-ups after which a new function is trusted.
pub(super) const PROBATION_MIN: u32 = 64;
/// A slow wake-up prolongs its function's probation by one quick wake-up for each such span that it
/// took. Slow wake-ups therefore at most double the time that the NIC thread spends on wake-ups.
pub(super) const PROBATION_UNIT: Duration = Duration::from_micros(5);
/// The longest probation, in wake-ups.
const PROBATION_MAX: u128 = 1 << 16;

/// Probation of a function: whether its wake-ups are trusted, and which thread makes them.
///
/// - The wake-ups of a trusted function are timed by the wall clock, which is read without a system
///   call and also counts the time in which another thread had the CPU. A slow wake-up puts the
///   function on probation.
/// - The wake-ups of a function on probation are timed by the CPU time of the waking thread. A slow
///   one offloads the function to the waker thread; each quick one shortens the probation by 1. At
///   0 the function is trusted and the NIC thread makes its wake-ups.
/// - A function of another process starts offloaded, so that a client gains nothing by attaching
///   again.
pub(super) struct Probation {
    left: AtomicU32,
    offloaded: AtomicBool,
}

impl Probation {
    /// The state of a new function: trusted, or offloaded for [`PROBATION_MIN`] wake-ups.
    pub fn new(is_trusted: bool) -> Self {
        let left = if is_trusted { 0 } else { PROBATION_MIN };
        Self { left: AtomicU32::new(left), offloaded: AtomicBool::new(!is_trusted) }
    }

    /// Whether the waker thread makes the function's wake-ups.
    pub fn is_offloaded(&self) -> bool {
        self.offloaded.load(Ordering::Relaxed)
    }

    pub fn is_trusted(&self) -> bool {
        self.left.load(Ordering::Relaxed) == 0
    }

    /// Records a wake-up of a trusted function that took `wall` by the wall clock.
    pub fn on_trusted_wake(&self, wall: Duration) {
        if wall >= SLOW {
            self.left.store(probation_after(wall), Ordering::Relaxed);
        }
    }

    /// Records a wake-up of a function on probation that took `cpu` of the waking thread's CPU
    /// time.
    pub fn on_measured_wake(&self, cpu: Duration) {
        let left = self.left.load(Ordering::Relaxed);
        if cpu >= SLOW {
            self.left.store(left.max(probation_after(cpu)), Ordering::Relaxed);
            self.offloaded.store(true, Ordering::Relaxed);
            return;
        }
        self.left.store(left.saturating_sub(1), Ordering::Relaxed);
        if left <= 1 {
            self.offloaded.store(false, Ordering::Relaxed);
        }
    }
}

fn probation_after(time: Duration) -> u32 {
    (time.as_nanos() / PROBATION_UNIT.as_nanos()).clamp(PROBATION_MIN.into(), PROBATION_MAX) as u32
}

/// The clocks and the system call that wake-ups use; tests replace them.
#[derive(Clone, Copy)]
pub(super) struct Environment {
    /// Wall clock, in ns.
    pub wall: fn() -> u64,
    /// CPU time of the calling thread, in ns.
    pub cpu: fn() -> u64,
    /// Wakes up to [`THREADS_PER_WAKE`] threads.
    pub wake: fn(&AtomicU32),
}

impl Environment {
    /// The clocks and the futex call of the system.
    pub const SYSTEM: Self = Self {
        wall: || nanoseconds(ClockId::Monotonic),
        cpu: || nanoseconds(ClockId::ThreadCPUTime),
        // The futex lies in a client's memory: a failure harms that client only.
        wake: |word| _ = futex::wake(word, futex::Flags::empty(), THREADS_PER_WAKE),
    };
}

fn nanoseconds(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// A futex word in a client's memory, on which threads of that client sleep.
pub(super) struct Sleeper {
    pub function: FunctionId,
    pub word: DmaMemory,
    /// A wake-up is queued. Cleared before the system call, so that a later completion queues
    /// another.
    pub queued: AtomicBool,
    pub probation: Arc<Probation>,
}

impl Sleeper {
    /// Wakes the threads that sleep on the word. Returns the time by which `clock` advanced
    /// meanwhile.
    pub fn wake(&self, env: &Environment, clock: fn() -> u64) -> Duration {
        self.queued.swap(false, Ordering::AcqRel);
        let start = clock();
        (env.wake)(self.word.word32(0));
        Duration::from_nanos(clock().saturating_sub(start))
    }

    /// Wakes the threads that sleep on the word, and charges the calling thread's CPU time to the
    /// function.
    pub fn wake_measured(&self, env: &Environment) -> Duration {
        let time = self.wake(env, env.cpu);
        self.probation.on_measured_wake(time);
        time
    }
}
