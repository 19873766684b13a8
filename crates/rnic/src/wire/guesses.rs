//! What PSNs that do not fit cost the peer of a connection whose packets are not authenticated.
//!
//! Such a connection takes any packet with the peer's address and the expected PSN. A sender that
//! forges packets has to guess the PSN, and a token bucket bounds how often it may:
//!
//! ```text
//! PSN               bucket full     bucket not full     bucket empty
//! expected          taken           taken               taken
//! near that         taken           one token           the QP takes nothing until
//! elsewhere         one token       one token             there is a token again
//! ```
//!
//! *Near* is where the retransmissions and lost packets of an honest peer lie. An honest peer
//! spends a token only where a READ of more than [`NEAR`] packets was lost. With [`BURST`] tokens,
//! and one more in [`EACH`], a forger needs 19 days on average to hit one of the 2^24 PSNs.

use std::time::Duration;

use crate::bucket::TokenBucket;
use crate::ids::Psn;

/// Guesses at once.
const BURST: u32 = 256;
/// Time in which one more guess is free.
const EACH: Duration = Duration::from_millis(100);
/// PSNs before and behind the expected one that are near it: 128 MiB with the largest path MTU.
const NEAR: u32 = 1 << 15;

/// How a packet's PSN stands to what is expected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fit {
    Expected,
    Near,
    Far,
}

impl Fit {
    /// Of `psn` where `next` is expected.
    #[inline]
    pub fn of(psn: Psn, next: Psn) -> Self {
        let ahead = psn.since(next);
        match ahead {
            0 => Fit::Expected,
            _ if ahead.wrapping_add(NEAR) & Psn::MAX < 2 * NEAR => Fit::Near,
            _ => Fit::Far,
        }
    }
}

/// The guesses of one connection's peer.
pub(crate) struct Guesses {
    bucket: TokenBucket,
    /// The bucket was found empty: nothing is taken until there is a token.
    shut: bool,
}

impl Guesses {
    pub fn new(now_ns: u64) -> Self {
        Self { bucket: TokenBucket::new(BURST, EACH, Duration::from_nanos(now_ns)), shut: false }
    }

    /// True if a packet is to be dropped before it is looked at.
    #[inline]
    pub fn is_shut(&mut self, now_ns: u64) -> bool {
        if self.shut {
            self.shut = self.bucket.wait(Duration::from_nanos(now_ns)).is_some();
        }
        self.shut
    }

    /// Takes a token for a packet that fits so, if it costs one.
    #[inline]
    pub fn charge(&mut self, fit: Fit, now_ns: u64) {
        let now = Duration::from_nanos(now_ns);
        if fit == Fit::Expected || fit == Fit::Near && self.bucket.is_full(now) {
            return;
        }
        self.bucket.take(1, now);
        self.shut = self.bucket.wait(now).is_some();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn what_is_near_is_so_on_either_side_and_across_the_end_of_the_circle() {
        for next in [0, 1, NEAR, 0x80_0000, Psn::MAX].map(Psn::new) {
            let fit = |ahead: u32| Fit::of(next.plus(ahead), next);
            assert_eq!(fit(0), Fit::Expected);
            assert_eq!([1, NEAR - 1].map(fit), [Fit::Near; 2]);
            assert_eq!([0u32.wrapping_sub(1), 0u32.wrapping_sub(NEAR)].map(fit), [Fit::Near; 2]);
            let far = [NEAR, 1 << 23, 0u32.wrapping_sub(NEAR + 1)];
            assert_eq!(far.map(fit), [Fit::Far; 3]);
        }
    }

    /// Offers one packet every microsecond; how many of them may go on.
    fn admitted(guesses: &mut Guesses, fit: Fit, from_ns: u64, for_ns: u64) -> u32 {
        let times = (from_ns..from_ns + for_ns).step_by(1000);
        let mut take = |now| {
            let is_taken = !guesses.is_shut(now);
            if is_taken {
                guesses.charge(fit, now);
            }
            is_taken
        };
        times.filter(|&now| take(now)).count() as u32
    }

    #[test]
    fn guesses_have_a_rate() {
        let mut guesses = Guesses::new(0);
        assert_eq!(admitted(&mut guesses, Fit::Far, 0, SECOND / 20), BURST + 1);
        assert_eq!(admitted(&mut guesses, Fit::Far, SECOND / 20, 10 * SECOND), 100);
    }

    #[test]
    fn an_honest_peer_loses_and_repeats_as_much_as_it_likes() {
        let mut guesses = Guesses::new(0);
        for fit in [Fit::Near, Fit::Expected] {
            assert_eq!(admitted(&mut guesses, fit, 0, SECOND), 1_000_000);
        }
    }

    /// A sweep comes by the expected PSN too: near it a guess must cost as much as elsewhere.
    #[test]
    fn after_guesses_what_is_near_costs_too() {
        let mut guesses = Guesses::new(0);
        admitted(&mut guesses, Fit::Far, 0, SECOND / 20);
        assert_eq!(admitted(&mut guesses, Fit::Near, SECOND / 20, 10 * SECOND), 100);
        // Until the bucket is full again.
        assert_eq!(admitted(&mut guesses, Fit::Near, 60 * SECOND, SECOND), 1_000_000);
    }

    #[test]
    fn a_qp_that_is_shut_takes_nothing_until_there_is_a_token() {
        let mut guesses = Guesses::new(0);
        admitted(&mut guesses, Fit::Far, 0, SECOND / 20);
        assert!(guesses.is_shut(SECOND / 20));
        assert!(!guesses.is_shut(SECOND / 20 + EACH.as_nanos() as u64));
    }
}
