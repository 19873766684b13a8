//! The time limit of waits for completions.
//!
//! A NIC whose process is stopped gives no completion and no error. The waits are counted in
//! periods of [`IDLE`] in which a thread waited and no completion arrived, and not by the clock:
//! the time in which this process itself is stopped is none of them.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::IDLE;
use crate::Error;

/// Shortest limit, in periods. A busy machine delays a NIC as a stopped one does, only for less.
const PERIODS_MIN: u32 = 10;

/// The waits of one CQ without a completion.
#[derive(Default)]
pub(super) struct Silence {
    /// Periods after which waits end; 0: never.
    limit: AtomicU32,
    /// Periods since the CQ was created.
    now: AtomicU32,
    /// The last periods without a completion, in a row.
    quiet: AtomicU32,
    /// The peer has left a question of the owner without an answer for too long.
    is_peer_silent: AtomicBool,
    /// Name of the peer, for errors.
    peer: OnceLock<String>,
    counted: Mutex<Option<Instant>>,
}

impl Silence {
    /// Sets the limit, at least one second, and the name of the peer.
    pub fn set_limit(&self, limit: Duration, peer: &str) {
        let periods = limit.as_millis().div_ceil(IDLE.as_millis());
        let periods = u32::try_from(periods).unwrap_or(u32::MAX).max(PERIODS_MIN);
        let _ = self.peer.set(peer.to_owned());
        self.limit.store(periods, Ordering::Relaxed);
    }

    /// The limit; `None` if there is none.
    pub fn limit(&self) -> Option<Duration> {
        let periods = self.limit.load(Ordering::Relaxed);
        (periods > 0).then(|| IDLE * periods)
    }

    /// Notes whether the peer has left a question without an answer for too long.
    pub fn set_peer_silent(&self, is_silent: bool) {
        self.is_peer_silent.store(is_silent, Ordering::Relaxed);
    }

    /// Notes a completion.
    #[inline]
    pub fn end(&self) {
        if self.quiet.load(Ordering::Relaxed) > 0 {
            self.quiet.store(0, Ordering::Relaxed);
        }
    }

    /// The present period.
    #[inline]
    pub fn now(&self) -> u32 {
        self.now.load(Ordering::Relaxed)
    }

    /// Counts a period in which a thread waited in vain. Returns false if another thread has
    /// counted the period.
    pub fn count(&self) -> bool {
        let Some(mut counted) = self.counted.try_lock() else { return false };
        let now = Instant::now();
        if counted.is_some_and(|at| now.duration_since(at) < IDLE) {
            return false;
        }
        *counted = Some(now);
        self.now.fetch_add(1, Ordering::Relaxed);
        self.quiet.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// True if waits that are old enough end now.
    pub fn is_over(&self) -> bool {
        let limit = self.limit.load(Ordering::Relaxed);
        let is_quiet = self.quiet.load(Ordering::Relaxed) >= limit;
        limit > 0 && (is_quiet || self.is_peer_silent.load(Ordering::Relaxed))
    }

    /// True if the peer is silent, and a wait for its program that began in the period `since`
    /// ends now.
    pub fn is_peer_late(&self, since: u32) -> bool {
        let limit = self.limit.load(Ordering::Relaxed);
        let is_silent = limit > 0 && self.is_peer_silent.load(Ordering::Relaxed);
        is_silent && self.now().wrapping_sub(since) >= limit
    }

    /// True if a wait that began in the period `since` ends now.
    #[inline]
    pub fn is_over_since(&self, since: u32) -> bool {
        self.is_over() && self.now().wrapping_sub(since) >= self.limit.load(Ordering::Relaxed)
    }

    /// The error of a wait that has ended.
    #[cold]
    pub fn error(&self) -> Error {
        Error::Unanswered {
            attempt: "waiting for a completion".to_owned(),
            peer: self.peer.get().cloned().unwrap_or_else(|| "the peer".to_owned()),
            waited: self.limit().unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets `count` periods go by.
    fn pass(silence: &Silence, count: u32) {
        for _ in 0..count {
            *silence.counted.lock() = None;
            assert!(silence.count());
        }
    }

    #[test]
    fn waits_end_after_the_limit_and_not_before() {
        let silence = Silence::default();
        pass(&silence, 100);
        assert!(!silence.is_over_since(0), "no limit is set");
        silence.end();
        silence.set_limit(IDLE * 20, "a node");
        let first = silence.now();
        pass(&silence, 19);
        let second = silence.now();
        assert!(!silence.is_over_since(first));
        pass(&silence, 1);
        assert!(silence.is_over_since(first) && !silence.is_over_since(second));
        pass(&silence, 18);
        assert!(!silence.is_over_since(second));
        pass(&silence, 1);
        assert!(silence.is_over_since(second));
        silence.end();
        assert!(!silence.is_over_since(first), "a completion has arrived");
        let text = silence.error().to_string();
        assert!(text.contains("a node has not answered for"), "{text}");
    }

    #[test]
    fn completions_do_not_hide_a_silent_peer() {
        let silence = Silence::default();
        silence.set_limit(IDLE * 10, "a node");
        pass(&silence, 10);
        silence.end();
        assert!(!silence.is_over_since(0));
        silence.set_peer_silent(true);
        assert!(silence.is_over_since(0) && !silence.is_over_since(1));
        silence.set_peer_silent(false);
        assert!(!silence.is_over_since(0));
    }

    #[test]
    fn period_is_counted_once() {
        let silence = Silence::default();
        assert!(silence.count());
        assert!(!silence.count(), "another thread within the same period");
        assert_eq!(silence.now(), 1);
    }

    #[test]
    fn shortest_limit_is_ten_periods() {
        let silence = Silence::default();
        assert_eq!(silence.limit(), None);
        silence.set_limit(Duration::from_millis(1), "a node");
        assert_eq!(silence.limit(), Some(IDLE * PERIODS_MIN));
    }
}
