//! Start positions of a user's searches, chosen so that users rarely collide.
//!
//! Users that start at neighbouring positions collide once the first of them has used up its free
//! chunks. They then continue together, and each CAS makes the CAS of the other users fail.
//! Therefore users are spread over all sections, stay where they find memory, and start the next
//! search elsewhere after a collision.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::finemem::block::SPANS;
use crate::finemem::block::SpanOffset;
use crate::finemem::header::User;

/// Start position of the next search (see the module documentation).
pub(super) struct StartPosition {
    /// High half: position among the sections, as a fraction of 2^32. Low half: the first span, and
    /// the stride from span to span.
    place: AtomicU64,
    /// Collisions occurred at the last position.
    has_collision: AtomicBool,
}

/// 2^64 divided by the golden ratio: its multiples are spread evenly, for any number of them.
const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;
/// Number of start positions of users without contention control. FineMem does not state it; this
/// number is fitted to the paper's figure for the two-layer bitmap alone (§6.2, figure 11).
const SHARED_POSITIONS: u16 = 44;
/// Bit position of the stride in the low half.
const STRIDE_AT: u32 = 4;

impl StartPosition {
    /// Initial position of a user.
    pub fn for_user(user: User) -> Self {
        let user = u64::from(user.raw());
        let apart = user.wrapping_mul(GOLDEN_RATIO);
        let stride = (apart >> 32) & (0xf << STRIDE_AT);
        let place = (apart >> 32 << 32) | stride | (user % u64::from(SPANS));
        Self { place: AtomicU64::new(place), has_collision: AtomicBool::new(false) }
    }

    /// Initial position of a user without contention control, shared with many users.
    pub fn shared(user: User) -> Self {
        let number = user.raw() % SHARED_POSITIONS + 1;
        Self::for_user(User::new(number).expect("a user number is larger than any shared position"))
    }

    /// The position, scaled to an index below `places`.
    pub fn scaled_to(&self, places: u32) -> u32 {
        (((self.place.load(Ordering::Relaxed) >> 32) * u64::from(places)) >> 32) as u32
    }

    /// The spans of a section, in a user-specific order: users that collide at one span do not
    /// collide at the next.
    pub fn spans(&self) -> impl Iterator<Item = SpanOffset> + use<> {
        let place = self.place.load(Ordering::Relaxed);
        let (first, stride) = (place as u32 % SPANS, ((place >> STRIDE_AT) as u32 % SPANS) | 1);
        (0..SPANS).map(move |i| SpanOffset::new((first + i * stride) % SPANS))
    }

    /// Starts the next search at index `at` of `places`.
    pub fn set_start(&self, at: u32, places: u32) {
        let share = (u64::from(at) << 32).div_ceil(u64::from(places));
        let low = self.place.load(Ordering::Relaxed) as u32;
        self.place.store(share << 32 | u64::from(low), Ordering::Relaxed);
    }

    /// Starts the next search at another, pseudo-random position.
    pub fn relocate(&self) {
        // SplitMix64: pseudo-random, and reproducible.
        let mut x = self.place.load(Ordering::Relaxed).wrapping_add(GOLDEN_RATIO);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        self.place.store(x ^ (x >> 31), Ordering::Relaxed);
    }

    /// Records a collision, and continues the search at another position.
    pub fn record_collision(&self) {
        self.relocate();
        self.has_collision.store(true, Ordering::Relaxed);
    }

    /// True if a collision has occurred since the last [`Self::take_collision`].
    pub fn has_collision(&self) -> bool {
        self.has_collision.load(Ordering::Relaxed)
    }

    /// True if a collision has occurred; clears the flag.
    pub fn take_collision(&self) -> bool {
        self.has_collision.swap(false, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_start_apart_and_stay_where_set() {
        let users = (1..=24).map(|n| StartPosition::for_user(User::new(n).unwrap()));
        let mut places: Vec<_> = users.map(|begin| begin.scaled_to(24)).collect();
        places.sort_unstable();
        places.dedup();
        assert!(places.len() > 16, "24 users begin at {places:?} of 24 places");
        for places in [1, 2, 3, 24, 91, 102_400, u32::MAX >> 5] {
            let begin = StartPosition::for_user(User::new(77).unwrap());
            for at in [0, 1, places / 2, places - 1].map(|at| at.min(places - 1)) {
                begin.set_start(at, places);
                assert_eq!(begin.scaled_to(places), at, "of {places}");
            }
        }
    }

    #[test]
    fn crowded_users_share_few_start_positions() {
        let begins = |begin: fn(User) -> StartPosition| {
            let users = (1..=400).map(|n| begin(User::new(n).unwrap()).scaled_to(1 << 20));
            users.collect::<std::collections::BTreeSet<_>>().len()
        };
        assert_eq!(begins(StartPosition::shared), usize::from(SHARED_POSITIONS));
        assert!(begins(StartPosition::for_user) > 390);
    }

    #[test]
    fn collision_moves_the_start_position_once() {
        let begin = StartPosition::for_user(User::new(1).unwrap());
        let before = begin.scaled_to(1 << 20);
        assert!(!begin.take_collision());
        begin.record_collision();
        assert!(begin.take_collision() && !begin.take_collision());
        assert_ne!(begin.scaled_to(1 << 20), before);
    }
}
