//! How a thread waits for another one before it sleeps.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::CompletionQueue;

/// How long a thread polls before it offers its CPU to others between two polls.
const SPIN: Duration = Duration::from_micros(20);
/// How long it polls before it should sleep: about what a wake-up costs.
const SLEEP_AFTER: Duration = Duration::from_micros(60);

/// Spin, then yield, then sleep on an event. With one CPU spinning keeps the other side from
/// working: then it yields at once.
#[derive(Debug, Default)]
pub struct Backoff {
    rounds: u32,
    since: Option<Instant>,
    asleep: bool,
}

impl Backoff {
    /// Starts to wait.
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts to wait for completions of a CQ. Where time is virtual it is time to sleep at once.
    pub fn on<C: CompletionQueue>() -> Self {
        Self { asleep: C::VIRTUAL, ..Self::default() }
    }

    /// Waits a moment; false: it is time to sleep on an event.
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
            rustix::thread::sched_yield();
        } else {
            std::hint::spin_loop();
        }
        true
    }
}

/// Whether this process had one CPU only when it first waited.
fn has_one_cpu() -> bool {
    static ONE: OnceLock<bool> = OnceLock::new();
    *ONE.get_or_init(rnic::port::has_one_cpu)
}
