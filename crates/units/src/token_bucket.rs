//! A token bucket: limits the rate of an operation and allows bursts.
//!
//! The bucket is stored as one point in time: the time at which the bucket will be full again. A
//! user may take more tokens than are available, and then has to wait until a token is available.

use std::time::Duration;

/// A token bucket. All times are relative to one origin, which the caller chooses.
#[derive(Clone, Copy, Debug)]
pub struct TokenBucket {
    /// Time at which the bucket will be full again.
    earned: Duration,
    /// Time to earn one token.
    each: Duration,
    /// Time in which a full bucket is earned.
    kept: Duration,
}

impl TokenBucket {
    /// Creates a full bucket of `burst` tokens, which earns one token per `each`.
    pub fn new(burst: u32, each: Duration, now: Duration) -> Self {
        Self { earned: now, each, kept: each * burst }
    }

    /// Returns the time until the next token is available, or `None` if one is available now.
    pub fn wait(&self, now: Duration) -> Option<Duration> {
        self.earned.checked_sub(now + self.kept).filter(|left| !left.is_zero())
    }

    /// Takes `tokens`, which may exceed the available number.
    pub fn take(&mut self, tokens: u32, now: Duration) {
        self.earned = self.earned.max(now) + self.each * tokens;
    }

    /// True if the bucket is full.
    pub fn is_full(&self, now: Duration) -> bool {
        self.earned <= now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EACH: Duration = Duration::from_millis(1);

    /// Takes `tokens` whenever a token is available, for `for_ms`; returns the number of times.
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
    fn full_bucket_allows_a_burst_and_then_the_rate() {
        let start = Duration::from_secs(1000);
        let mut pace = TokenBucket::new(16, EACH, start);
        assert!(pace.is_full(start));
        assert_eq!(served(&mut pace, start, 1, 1), 17);
        assert!(!pace.is_full(start + EACH));
        assert_eq!(served(&mut pace, start + EACH, 1000, 1), 1000);
        // Unused tokens accumulate, up to the burst.
        let later = start + Duration::from_secs(60);
        assert!(pace.is_full(later));
        assert_eq!(served(&mut pace, later, 1, 1), 17);
    }

    #[test]
    fn tokens_per_operation_lower_the_rate() {
        let start = Duration::from_secs(1000);
        let mut pace = TokenBucket::new(16, EACH, start);
        pace.take(64, start);
        assert_eq!(pace.wait(start), Some(48 * EACH));
        let late = start + 48 * EACH;
        assert_eq!(pace.wait(late), None);
        assert_eq!(served(&mut pace, late, 1000, 4), 250);
    }
}
