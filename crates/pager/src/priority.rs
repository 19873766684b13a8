//! Scheduling of the handler of page faults: before CPU-bound threads of other programs, without
//! starving them.
//!
//! A thread that faults waits for the handler, so the handler must not wait for a turn of the
//! scheduler ([`units::scheduling`]). The handler sleeps after each fault. If faults of several
//! threads keep it busy for nearly all of a window of time, it steps down to an ordinary thread for
//! the next window.

use units::scheduling::{Class, Granted, Scheduling};

/// Length of a window.
const WINDOW_NS: u64 = 20_000_000;
/// Busy time in a window from which the handler steps down.
const BUSY_NS: u64 = WINDOW_NS / 10 * 9;

/// The scheduling of a thread for which faulting threads wait: a handler, the assist, or the page
/// server of forked children. The default is an ordinary thread.
#[derive(Default)]
pub(crate) struct HandlerPriority {
    scheduling: Scheduling,
    window_start_ns: u64,
    busy_ns: u64,
}

impl HandlerPriority {
    /// Asks for a better scheduling of the calling thread.
    pub fn ask() -> Self {
        Self { scheduling: Scheduling::ask(), window_start_ns: 0, busy_ns: 0 }
    }

    /// Returns the class that the system granted.
    pub fn granted(&self) -> &Granted {
        self.scheduling.granted()
    }

    /// True if the system has granted SCHED_RR.
    pub fn is_granted(&self) -> bool {
        self.granted().class == Class::RealTime
    }

    /// Records a fault that was served from `start_ns` to `end_ns`.
    pub fn served(&mut self, start_ns: u64, end_ns: u64) {
        self.busy_ns += end_ns - start_ns;
        if end_ns - self.window_start_ns < WINDOW_NS {
            return;
        }
        // After a pause, the first window that ends is longer and was mostly idle.
        match self.busy_ns >= BUSY_NS && end_ns - self.window_start_ns < 2 * WINDOW_NS {
            true => self.scheduling.step_down(),
            false => self.scheduling.step_up(),
        }
        (self.window_start_ns, self.busy_ns) = (end_ns, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Serves faults for `time_ns` from `now` on, each of `busy` ns in 10,000 ns.
    fn serve(priority: &mut HandlerPriority, now: u64, time_ns: u64, busy: u64) -> u64 {
        for start in (now..now + time_ns).step_by(10_000) {
            priority.served(start, start + busy);
        }
        now + time_ns
    }

    #[test]
    fn handler_that_is_always_busy_steps_down_for_a_while() {
        let check = || {
            let mut priority = HandlerPriority::ask();
            let granted = priority.is_granted();
            let now = serve(&mut priority, 1 << 40, 50_000_000, 8_000);
            assert_eq!(priority.scheduling.is_real_time(), granted);
            let now = serve(&mut priority, now, 50_000_000, 9_900);
            assert!(!priority.scheduling.is_real_time());
            let now = serve(&mut priority, now, 50_000_000, 5_000);
            assert_eq!(priority.scheduling.is_real_time(), granted);
            serve(&mut priority, now + 1_000_000_000, 10_000, 9_900);
            assert_eq!(priority.scheduling.is_real_time(), granted);
        };
        std::thread::spawn(check).join().unwrap();
    }
}
