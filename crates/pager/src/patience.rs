//! Limits of waits: for other threads of the process, for the kernel, and for the pool.
//!
//! A retry that only another thread can end has a [`Patience`]. Without progress for
//! `GRANARY_WAIT_S` the process ends with a sentence. Two kinds of time do not count: that of a
//! stopped process, and that in which a thread of the pager waits for the pool ([`Calls`]). A
//! memory node that does not answer is no fault of the process, and [`crate::monitor`] reports it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::config::{EXIT_PAGER, WAIT_S};
use crate::{descriptor, sys};

/// Limit of a wait for the pager's threads, in seconds.
static LIMIT_S: AtomicU32 = AtomicU32::new(WAIT_S);
/// Longest time between two attempts that counts, in ns: a stopped process makes none.
const STEP_NS: u64 = 100_000_000;
/// Calls to the pool that are watched at a time. Each thread of the pager has at most one.
const CALLS_MAX: usize = 32;

/// Sets the limit (`GRANARY_WAIT_S`).
pub(crate) fn set_limit(seconds: u32) {
    LIMIT_S.store(seconds, Ordering::Relaxed);
}

/// Returns the limit, in seconds.
pub(crate) fn limit_s() -> u32 {
    LIMIT_S.load(Ordering::Relaxed)
}

/// The time of failed attempts in a row.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    spent_ns: u64,
    last_ns: u64,
    /// Count of other threads' progress at the last attempt.
    progress: u32,
}

impl Patience {
    /// Counts a failed attempt. Returns true if attempts have failed for longer than `limit_ns`
    /// since the last change of `progress`.
    pub(crate) fn is_over(&mut self, now_ns: u64, limit_ns: u64, progress: u32) -> bool {
        let step = now_ns.saturating_sub(self.last_ns).min(STEP_NS);
        if self.last_ns == 0 || progress != self.progress {
            self.spent_ns = 0;
        } else {
            self.spent_ns += step;
        }
        (self.last_ns, self.progress) = (now_ns.max(1), progress);
        self.spent_ns > limit_ns
    }
}

/// Ends the process after a wait of `limit_s` seconds for the reason `why`.
pub(crate) fn end(why: &str, limit_s: u32) -> ! {
    sys::die(
        EXIT_PAGER,
        &format!(
            "process {} ({}): {why} for {limit_s} s, so the process ends now (status \
             {EXIT_PAGER}); see /proc/{0}/task/*/status for a thread that is stopped, or set \
             GRANARY_WAIT_S to more seconds",
            descriptor::program(),
            sys::program_name_text()
        ),
    )
}

/// Start of each call to the pool that has not returned, in ns; 0 in a free entry.
#[derive(Debug)]
pub(crate) struct Calls([AtomicU64; CALLS_MAX]);

impl Default for Calls {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; CALLS_MAX])
    }
}

/// A call that has not returned; `None` if there is no entry for it.
struct Call<'a>(Option<&'a AtomicU64>);

impl Calls {
    /// Runs a call that may wait for the pool.
    pub(crate) fn run<T>(&self, call: impl FnOnce() -> T) -> T {
        let _call = self.begin(sys::now_ns());
        call()
    }

    /// Returns the start of the oldest call that has not returned, in ns.
    pub(crate) fn oldest_ns(&self) -> Option<u64> {
        let starts = self.0.iter().map(|call| call.load(Ordering::Acquire));
        starts.filter(|start| *start > 0).min()
    }

    fn begin(&self, now_ns: u64) -> Call<'_> {
        let take = |call: &&AtomicU64| {
            call.compare_exchange(0, now_ns.max(1), Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        Call(self.0.iter().find(take))
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|call| call.store(0, Ordering::Release));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn patience_ends_after_the_limit_without_progress() {
        let mut patience = Patience::default();
        // A failed attempt each 50 ms, after the first one.
        let mut is_over =
            |at: u64, progress| patience.is_over(SECOND + at * SECOND / 20, 2 * SECOND, progress);
        assert!((0..=40).all(|at| !is_over(at, 7)) && is_over(41, 7));
        assert!(!is_over(42, 8), "another thread made progress");
        assert!((43..=82).all(|at| !is_over(at, 8)) && is_over(83, 8));
        assert!(!is_over(84, 9) && !is_over(90_000, 9), "the process was stopped");
        assert!(!Patience::default().is_over(90 * SECOND, 0, 0), "the first attempt");
    }

    #[test]
    fn oldest_call_is_found_until_it_returns() {
        let calls = Calls::default();
        assert_eq!(calls.oldest_ns(), None);
        let first = calls.begin(3);
        let rest: Vec<_> = (4..).take(CALLS_MAX + 2).map(|now| calls.begin(now)).collect();
        assert_eq!(calls.oldest_ns(), Some(3));
        drop(first);
        assert_eq!(calls.oldest_ns(), Some(4));
        drop(rest);
        assert_eq!(calls.oldest_ns(), None);
        assert!(calls.run(|| calls.oldest_ns()).is_some());
    }
}
