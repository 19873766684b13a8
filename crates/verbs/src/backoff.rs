//! Backoff of a thread that waits for another thread, before it sleeps.

use std::cell::Cell;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::CompletionQueue;

/// Time for which a thread spins between polls before it yields its CPU between polls.
const SPIN: Duration = Duration::from_micros(20);
/// Time for which a thread polls before it should sleep: about the cost of a wake-up.
const SLEEP_AFTER: Duration = Duration::from_micros(60);

/// Duration of a yield from which another thread wanted the CPU.
const LONG_YIELD: Duration = Duration::from_micros(500);
/// Number of waits without a yield after a long yield.
const WAITS_AFTER_LONG_YIELD: u32 = 1000;

thread_local! {
    /// Waits of this thread that sleep where they would yield.
    static WITHOUT_YIELD: Cell<u32> = const { Cell::new(0) };
}

/// Spins, then yields, then tells the caller to sleep on an event.
///
/// On a single CPU it yields at once, because spinning would keep the other side from running. If
/// CPU-bound threads share the CPU, the next waits sleep instead: a thread that yields is scheduled
/// behind them, one that wakes before them.
#[derive(Debug, Default)]
pub struct Backoff {
    rounds: u32,
    since: Option<Instant>,
    asleep: bool,
}

impl Backoff {
    /// Starts a wait.
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts a wait for completions of a CQ. With virtual time the caller should sleep at once.
    pub fn on<C: CompletionQueue>() -> Self {
        Self { asleep: C::VIRTUAL, ..Self::default() }
    }

    /// Waits a moment. Returns false when it is time to sleep on an event.
    #[inline]
    pub fn snooze(&mut self) -> bool {
        if self.asleep {
            return false;
        }
        self.rounds += 1;
        if self.rounds < 64 && !has_one_cpu() {
            std::hint::spin_loop();
            return true;
        }
        self.snooze_longer()
    }

    fn snooze_longer(&mut self) -> bool {
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        if waited >= SLEEP_AFTER {
            return false;
        }
        if waited >= SPIN || has_one_cpu() {
            return may_yield(rustix::thread::sched_yield);
        } else {
            std::hint::spin_loop();
        }
        true
    }
}

/// Yields by `call`, or returns false if yields have been long lately.
fn may_yield(call: impl FnOnce()) -> bool {
    let left = WITHOUT_YIELD.get();
    if left > 0 {
        WITHOUT_YIELD.set(left - 1);
        return false;
    }
    let before = Instant::now();
    call();
    if before.elapsed() >= LONG_YIELD {
        WITHOUT_YIELD.set(WAITS_AFTER_LONG_YIELD);
    }
    true
}

/// Returns whether this process had a single CPU when it first waited.
fn has_one_cpu() -> bool {
    static ONE: OnceLock<bool> = OnceLock::new();
    *ONE.get_or_init(units::cpus::has_one_cpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_yield_makes_the_next_waits_sleep() {
        assert!(may_yield(|| ()) && may_yield(|| ()));
        assert!(may_yield(|| std::thread::sleep(LONG_YIELD)));
        for _ in 0..WAITS_AFTER_LONG_YIELD {
            assert!(!may_yield(|| panic!("a yield")));
        }
        assert!(may_yield(|| ()));
    }
}
