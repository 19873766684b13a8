//! A token bucket: bounds how often something happens, with room for a burst.
//!
//! The bucket is kept as one point in time: when the tokens that were taken so far will have been
//! earned. A user that has taken more than there were waits until then.

use std::time::Duration;

/// A token bucket. Times count from a moment of the caller's choice, the same for all calls.
#[derive(Clone, Copy, Debug)]
pub struct TokenBucket {
    /// The tokens that were taken are earned by then, plus `kept`.
    earned: Duration,
    /// Time in which one token is earned.
    each: Duration,
    /// Time for which tokens are kept.
    kept: Duration,
}

impl TokenBucket {
    /// A full bucket of `burst` tokens, which earns one in `each`.
    pub fn new(burst: u32, each: Duration, now: Duration) -> Self {
        Self { earned: now, each, kept: each * burst }
    }

    /// How long the next token is to be waited for, if there is none now.
    pub fn wait(&self, now: Duration) -> Option<Duration> {
        self.earned.checked_sub(now + self.kept).filter(|left| !left.is_zero())
    }

    /// Takes `tokens`, which may be more than there are.
    pub fn take(&mut self, tokens: u32, now: Duration) {
        self.earned = self.earned.max(now) + self.each * tokens;
    }

    /// True if the bucket is as full as it gets.
    pub fn is_full(&self, now: Duration) -> bool {
        self.earned <= now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EACH: Duration = Duration::from_millis(1);

    /// Serves who asks at once, always, for this long; how often.
    fn served(pace: &mut TokenBucket, start: Duration, for_ms: u64, tokens: u32) -> u32 {
        let (mut now, mut count) = (start, 0);
        while now < start + EACH * for_ms as u32 {
            match pace.wait(now) {
                Some(left) => now += left,
                None => {
                    pace.take(tokens, now);
                    count += 1;
                }
            }
        }
        count
    }

    #[test]
    fn a_burst_comes_at_once_and_then_one_at_a_time() {
        let start = Duration::from_secs(1000);
        let mut pace = TokenBucket::new(16, EACH, start);
        assert!(pace.is_full(start));
        assert_eq!(served(&mut pace, start, 1, 1), 17);
        assert!(!pace.is_full(start + EACH));
        assert_eq!(served(&mut pace, start + EACH, 1000, 1), 1000);
        // What is not taken is kept, up to the burst.
        let later = start + Duration::from_secs(60);
        assert!(pace.is_full(later));
        assert_eq!(served(&mut pace, later, 1, 1), 17);
    }

    #[test]
    fn what_costs_more_is_served_more_rarely() {
        let start = Duration::from_secs(1000);
        let mut pace = TokenBucket::new(16, EACH, start);
        pace.take(64, start);
        assert_eq!(pace.wait(start), Some(48 * EACH));
        let late = start + 48 * EACH;
        assert_eq!(pace.wait(late), None);
        assert_eq!(served(&mut pace, late, 1000, 4), 250);
    }
}
