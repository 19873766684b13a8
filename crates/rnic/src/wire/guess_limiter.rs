//! Limits PSN guessing on connections whose packets are not authenticated, by a token bucket.
//!
//! Such a connection accepts any packet with the peer's address and the expected PSN. An attacker
//! that forges packets has to guess the PSN, and the bucket bounds the rate of guesses:
//!
//! ```text
//! PSN                     bucket full     bucket not full     bucket empty
//! expected                no token        no token            no token
//! near the expected PSN   no token        one token           the QP drops all packets until there
//! far from it             one token       one token             is a token again
//! ```
//!
//! *Near* covers the retransmissions and lost packets of an honest peer. An honest peer spends a
//! token only if a READ of more than [`NEAR`] packets was lost. With [`BURST`] tokens, and one more
//! in each [`EACH`], an attacker needs 19 days on average to hit one of the 2^24 PSNs.

use std::time::Duration;

use units::TokenBucket;
use verbs::Psn;

/// Capacity of the bucket: guesses at once.
const BURST: u32 = 256;
/// Refill time of one token.
const EACH: Duration = Duration::from_millis(100);
/// Distance of near PSNs before and after the expected one: 128 MiB with the largest path MTU.
const NEAR: u32 = 1 << 15;

/// Relation of a packet's PSN to the expected PSN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PsnFit {
    Expected,
    Near,
    Far,
}

impl PsnFit {
    /// Classifies `psn` where `next` is expected.
    #[inline]
    pub fn of(psn: Psn, next: Psn) -> Self {
        let ahead = psn.since(next);
        match ahead {
            0 => PsnFit::Expected,
            _ if ahead.wrapping_add(NEAR) & Psn::MAX < 2 * NEAR => PsnFit::Near,
            _ => PsnFit::Far,
        }
    }
}

/// The bucket of one connection.
pub(crate) struct GuessLimiter {
    bucket: TokenBucket,
    /// The bucket was empty: all packets are dropped until there is a token.
    exhausted: bool,
}

impl GuessLimiter {
    pub fn new(now_ns: u64) -> Self {
        Self {
            bucket: TokenBucket::new(BURST, EACH, Duration::from_nanos(now_ns)),
            exhausted: false,
        }
    }

    /// Whether a packet must be dropped without examination, because the bucket is empty.
    #[inline]
    pub fn is_exhausted(&mut self, now_ns: u64) -> bool {
        if self.exhausted {
            self.exhausted = self.bucket.wait(Duration::from_nanos(now_ns)).is_some();
        }
        self.exhausted
    }

    /// Takes a token for a packet with this fit, if it costs one.
    #[inline]
    pub fn charge(&mut self, fit: PsnFit, now_ns: u64) {
        let now = Duration::from_nanos(now_ns);
        if fit == PsnFit::Expected || fit == PsnFit::Near && self.bucket.is_full(now) {
            return;
        }
        self.bucket.take(1, now);
        self.exhausted = self.bucket.wait(now).is_some();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn near_psns_lie_on_both_sides_and_across_the_wrap() {
        for next in [0, 1, NEAR, 0x80_0000, Psn::MAX].map(Psn::new) {
            let fit = |ahead: u32| PsnFit::of(next.plus(ahead), next);
            assert_eq!(fit(0), PsnFit::Expected);
            assert_eq!([1, NEAR - 1].map(fit), [PsnFit::Near; 2]);
            assert_eq!([0u32.wrapping_sub(1), 0u32.wrapping_sub(NEAR)].map(fit), [PsnFit::Near; 2]);
            let far = [NEAR, 1 << 23, 0u32.wrapping_sub(NEAR + 1)];
            assert_eq!(far.map(fit), [PsnFit::Far; 3]);
        }
    }

    /// Offers one packet every microsecond. Returns the number of packets that are admitted.
    fn admitted(limiter: &mut GuessLimiter, fit: PsnFit, from_ns: u64, for_ns: u64) -> u32 {
        let times = (from_ns..from_ns + for_ns).step_by(1000);
        let mut take = |now| {
            let is_taken = !limiter.is_exhausted(now);
            if is_taken {
                limiter.charge(fit, now);
            }
            is_taken
        };
        times.filter(|&now| take(now)).count() as u32
    }

    #[test]
    fn far_psn_guesses_are_rate_limited() {
        let mut limiter = GuessLimiter::new(0);
        assert_eq!(admitted(&mut limiter, PsnFit::Far, 0, SECOND / 20), BURST + 1);
        assert_eq!(admitted(&mut limiter, PsnFit::Far, SECOND / 20, 10 * SECOND), 100);
    }

    #[test]
    fn honest_peer_retransmits_without_limit() {
        let mut limiter = GuessLimiter::new(0);
        for fit in [PsnFit::Near, PsnFit::Expected] {
            assert_eq!(admitted(&mut limiter, fit, 0, SECOND), 1_000_000);
        }
    }

    /// A sweep over all PSNs also passes the expected one: during a sweep near guesses must cost as
    /// much as far ones.
    #[test]
    fn near_psns_cost_tokens_after_far_guesses() {
        let mut limiter = GuessLimiter::new(0);
        admitted(&mut limiter, PsnFit::Far, 0, SECOND / 20);
        assert_eq!(admitted(&mut limiter, PsnFit::Near, SECOND / 20, 10 * SECOND), 100);
        // When the bucket is full again, near PSNs cost no token.
        assert_eq!(admitted(&mut limiter, PsnFit::Near, 60 * SECOND, SECOND), 1_000_000);
    }

    #[test]
    fn empty_bucket_drops_packets_until_the_next_token() {
        let mut limiter = GuessLimiter::new(0);
        admitted(&mut limiter, PsnFit::Far, 0, SECOND / 20);
        assert!(limiter.is_exhausted(SECOND / 20));
        assert!(!limiter.is_exhausted(SECOND / 20 + EACH.as_nanos() as u64));
    }
}
