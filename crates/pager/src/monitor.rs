//! The monitor: a thread that says on standard error why a program stands still or is slow.
//!
//! - A memory node does not answer: a fault, an allocation or a write-back has waited for the pool
//!   for `GRANARY_WAIT_S`. The threads that wait cannot say so themselves.
//! - The run thrashes: faults take longer than the program itself runs, for pages that were taken
//!   out a short time ago. The line names a bound under which nine of ten of these pages would have
//!   stayed. The program's CPU time is the measure, because other programs do not change it.
//! - The keeper of forked children is stopped, which the monitor kills ([`crate::fork::keeper`]): a
//!   child may have no thread that looks.
//!
//! The monitor looks once a second. It takes no part in faults, and never waits for the pool.

use crate::fork::keeper;
use crate::pager::Pager;
use crate::pages::returns::Returns;
use crate::stats::Counter;
use crate::sys::{self, PAGE_BYTES};
use crate::{credentials, descriptor};

const SECOND_NS: u64 = 1_000_000_000;
/// Interval at which the monitor looks.
const LOOK_MS: u64 = 1000;
/// Longest interval that counts: a stopped process does not wait for the pool.
const LOOK_NS_MAX: u64 = 2 * SECOND_NS;
/// Time over which faults are compared with the program's own time.
const WINDOW_NS: u64 = 10 * SECOND_NS;
/// Least share of this time in faults, as a divisor: a program that is idle does not thrash.
const FAULTS_MIN: u64 = 8;

impl Pager {
    /// Runs the monitor's loop.
    pub(crate) fn monitor(&self) {
        let (mut silence, mut thrashing) = (Silence::default(), Thrashing::default());
        let mut keeper = keeper::Watch::default();
        let limit_ns = u64::from(self.config.wait_s) * SECOND_NS;
        loop {
            let pause_ms = if keeper.look() { keeper::LOOK_MS as u64 } else { LOOK_MS };
            sys::futex_wait(&self.monitor_wakes, 0, Some(pause_ms));
            let now = sys::now_ns();
            match silence.look(now, self.pages.backing.oldest_call_ns(), limit_ns) {
                Some(Heard::Nothing { seconds }) => sys::say(&format!(
                    "process {} ({}) waits for the pool: the memory node {} has not answered for \
                     {seconds} s, and may be stopped, overloaded or unreachable (see `granary \
                     status`); the process goes on when it answers, and ends after {} s without an \
                     answer (GRANARY_ANSWER_S)",
                    descriptor::program(),
                    sys::program_name_text(),
                    self.config.pool,
                    self.config.answer_s
                )),
                Some(Heard::Again { seconds }) => sys::say(&format!(
                    "the memory node {} answers again, after {seconds} s; process {} goes on",
                    self.config.pool,
                    descriptor::program()
                )),
                None => {}
            }
            let spent = || Spent {
                fault_ns: self.stats().get(Counter::FaultNs),
                program_ns: sys::process_cpu_ns().saturating_sub(credentials::threads_cpu_ns()),
                pages_in: self.stats().get(Counter::PagesIn),
            };
            let returns = || self.pages.take_returns();
            if let Some(found) = thrashing.look(now, spent, self.limit(), returns) {
                self.report_thrashing(&found);
            }
        }
    }

    fn report_thrashing(&self, found: &Found) {
        let more = found.missing_pages * PAGE_BYTES as u64;
        let local = self.config.local_bytes;
        // A part of the bound is for frames and the shelf.
        let enough = local + more + more / 8;
        let option = if self.config.shares_bound { "--local" } else { "--local-each" };
        sys::say(&format!(
            "process {} ({}) thrashes: page faults took {} % of its time in the last {} s, for \
             pages that had left its {} MiB of local memory a short time before; {option} {}MiB \
             would keep most of them",
            descriptor::program(),
            sys::program_name_text(),
            found.percent,
            WINDOW_NS / SECOND_NS,
            local >> 20,
            enough.div_ceil(1 << 20)
        ));
    }
}

/// A change that the monitor reports about the pool.
#[derive(Debug, PartialEq, Eq)]
enum Heard {
    Nothing { seconds: u64 },
    Again { seconds: u64 },
}

/// The oldest call to the pool that has not returned, and for how long.
#[derive(Default)]
struct Silence {
    /// Start of the call, in ns; 0: none.
    call_ns: u64,
    looked_ns: u64,
    spent_ns: u64,
    is_told: bool,
}

impl Silence {
    fn look(&mut self, now_ns: u64, oldest_ns: Option<u64>, limit_ns: u64) -> Option<Heard> {
        let step = now_ns.saturating_sub(self.looked_ns).min(LOOK_NS_MAX);
        self.looked_ns = now_ns;
        let oldest_ns = oldest_ns.unwrap_or(0);
        if oldest_ns != self.call_ns || oldest_ns == 0 {
            let seconds = self.spent_ns / SECOND_NS;
            (self.call_ns, self.spent_ns) = (oldest_ns, 0);
            return std::mem::take(&mut self.is_told).then_some(Heard::Again { seconds });
        }
        self.spent_ns += step;
        if self.spent_ns < limit_ns || std::mem::replace(&mut self.is_told, true) {
            return None;
        }
        Some(Heard::Nothing { seconds: self.spent_ns / SECOND_NS })
    }
}

/// A window in which the process thrashed.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    /// Share of faults in the time that faults and the program's own instructions took.
    percent: u64,
    /// Pages that were missing.
    missing_pages: u64,
}

/// Sums since the start of the process.
#[derive(Clone, Copy, Default)]
struct Spent {
    /// Time of faults.
    fault_ns: u64,
    /// CPU time of the program's threads.
    program_ns: u64,
    /// Pages that were read from the pool.
    pages_in: u64,
}

/// The sums at the beginning of a window. Thrashing is found once.
#[derive(Default)]
struct Thrashing {
    began_ns: u64,
    before: Spent,
    is_found: bool,
}

impl Thrashing {
    /// `returns` ends a window of the pages that came back.
    fn look(
        &mut self,
        now_ns: u64,
        spent: impl FnOnce() -> Spent,
        limit_pages: u32,
        returns: impl FnOnce() -> (Returns, u64),
    ) -> Option<Found> {
        let time_ns = now_ns.saturating_sub(self.began_ns);
        if self.is_found || time_ns < WINDOW_NS {
            return None;
        }
        let (now, before, is_first) = (spent(), self.before, self.began_ns == 0);
        let fault_ns = now.fault_ns.saturating_sub(before.fault_ns);
        let program_ns = now.program_ns.saturating_sub(before.program_ns);
        let pages_in = now.pages_in.saturating_sub(before.pages_in);
        (self.began_ns, self.before) = (now_ns, now);
        let (returns, stamp_pages) = returns();
        // A window that is much longer belongs to a process that was stopped.
        if is_first || time_ns > 2 * WINDOW_NS {
            return None;
        }
        if fault_ns < program_ns || fault_ns < time_ns / FAULTS_MIN {
            return None;
        }
        // With a large bound, less than the bound comes back in one window.
        if returns.pages() < u64::from(limit_pages).min(pages_in / 2) {
            return None;
        }
        self.is_found = true;
        let percent = 100 * fault_ns / (fault_ns + program_ns).max(1);
        Some(Found { percent, missing_pages: returns.stamps() * stamp_pages })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_told_once_and_its_end_too() {
        let mut silence = Silence::default();
        let mut at = |second: u64, call: Option<u64>| {
            silence.look((100 + second) * SECOND_NS, call, 5 * SECOND_NS)
        };
        assert_eq!(at(0, None), None);
        // Calls that return in time.
        assert!((1..20).all(|second| at(second, Some(second)).is_none()));
        assert!((20..25).all(|second| at(second, Some(20)).is_none()));
        assert_eq!(at(25, Some(20)), Some(Heard::Nothing { seconds: 5 }));
        assert!((26..30).all(|second| at(second, Some(20)).is_none()));
        assert_eq!(at(30, Some(29)), Some(Heard::Again { seconds: 9 }));
        // The process was stopped for an hour, and then waits for 4 s.
        assert!((3630..3633).all(|second| at(second, Some(29)).is_none()));
        assert_eq!(at(3633, None), None);
    }

    #[test]
    fn thrashing_is_found_once_for_pages_that_come_back_soon() {
        let returns = |pages: u32| {
            let mut returns = Returns::default();
            returns.note(12, 5, pages);
            move || (returns, 100)
        };
        let mut thrashing = Thrashing::default();
        let mut sum = Spent::default();
        // A window's seconds in faults and of the program, the pages read, and of these the ones
        // that came back.
        let mut at = |second: u64, (fault, program): (u64, u64), pages_in: u64, back: u32| {
            sum.fault_ns += fault * SECOND_NS;
            sum.program_ns += program * SECOND_NS;
            sum.pages_in += pages_in;
            thrashing.look((100 + second) * SECOND_NS, || sum, 800, returns(back))
        };
        assert_eq!(at(0, (9, 0), 9000, 5000), None, "the time before the first window");
        assert_eq!(at(5, (3, 0), 3000, 5000), None, "the window has not ended");
        assert_eq!(at(10, (1, 5), 9000, 5000), None, "faults took less than the program");
        assert_eq!(at(20, (1, 0), 9000, 5000), None, "the program was idle");
        assert_eq!(at(30, (9, 1), 9000, 799), None, "less than the bound came back");
        assert_eq!(at(40, (9, 1), 1400, 699), None, "less than half of the pages came back");
        assert_eq!(at(70, (29, 1), 9000, 5000), None, "the process was stopped");
        // Other programs take the rest of the time.
        let found = Found { percent: 75, missing_pages: 800 };
        assert_eq!(at(80, (3, 1), 1400, 700), Some(found));
        assert_eq!(at(90, (9, 1), 9000, 5000), None, "once is enough");
    }
}
