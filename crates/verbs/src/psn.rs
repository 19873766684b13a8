//! Arithmetic of packet sequence numbers: 24 bits with wrap around (IBTA vol. 1, §9.7).
//!
//! Two PSNs are ordered by their distance modulo 2^24: `b` is later than `a` if `b - a` is less
//! than 2^23. A connection never has 2^23 packets in flight.

use crate::Psn;

/// Half of the PSN space.
const HALF: u32 = 1 << 23;

impl Psn {
    /// The PSN `n` packets later.
    #[inline]
    pub const fn plus(self, n: u32) -> Psn {
        Psn::new(self.raw().wrapping_add(n))
    }

    /// Distance from `earlier` to this PSN in packets, from 0 to 2^24 - 1.
    #[inline]
    pub const fn since(self, earlier: Psn) -> u32 {
        self.raw().wrapping_sub(earlier.raw()) & Psn::MAX
    }

    /// True if this is earlier than `other`.
    #[inline]
    pub const fn is_before(self, other: Psn) -> bool {
        self.since(other) >= HALF
    }

    /// The later of two PSNs.
    #[inline]
    pub fn later(self, other: Psn) -> Psn {
        if self.is_before(other) { other } else { self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn psn_arithmetic_wraps_around() {
        let last = Psn::new(Psn::MAX);
        assert_eq!(last.plus(1), Psn::new(0));
        assert_eq!(Psn::new(0).since(last), 1);
        assert_eq!(last.since(Psn::new(0)), Psn::MAX);
        assert!(last.is_before(Psn::new(0)) && !Psn::new(0).is_before(last));
        assert!(!last.is_before(last));
        assert_eq!(last.later(Psn::new(3)), Psn::new(3));
        assert_eq!(Psn::new(3).later(last), Psn::new(3));
    }

    #[test]
    fn psn_ahead_by_less_than_half_is_later() {
        for a in [0, 1, HALF - 1, HALF, HALF + 1, Psn::MAX] {
            let a = Psn::new(a);
            assert!(a.is_before(a.plus(1)) && a.is_before(a.plus(HALF - 1)));
            assert!(a.plus(HALF).is_before(a) && a.plus(Psn::MAX).is_before(a));
        }
    }
}
