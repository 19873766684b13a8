//! Where a user's searches begin, so that users do not all meet.
//!
//! Those who begin next to each other meet as soon as the first of them has used up what is there, and then go on
//! together, each CAS of one failing those of all others. So users are spread over all sections, stay where they
//! find memory, and who has met others begins his next search somewhere else.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::finemem::header::{SPANS, User};

/// See the module.
pub(super) struct Begin {
    /// The high half says where among the sections, as a share of 2^32; the low one at which span, and in
    /// which steps from there.
    place: AtomicU64,
    /// Others were met where it began.
    is_crowded: AtomicBool,
}

/// 2^64 over the golden ratio: its multiples lie far apart, however many of them there are.
const APART: u64 = 0x9e37_79b9_7f4a_7c15;
/// Places where users begin who do not keep out of each other's way. FineMem does not say where they do; so many are
/// fitted to what it says that the two-layer bitmap alone saves (§6.2, figure 11).
const CROWDED: u16 = 44;
/// Where the step from span to span is in the low half.
const STRIDE_AT: u32 = 4;

impl Begin {
    /// Where a user begins that knows nothing.
    pub fn of(user: User) -> Self {
        let user = u64::from(user.raw());
        let apart = user.wrapping_mul(APART);
        let stride = (apart >> 32) & (0xf << STRIDE_AT);
        let place = (apart >> 32 << 32) | stride | (user % u64::from(SPANS));
        Self { place: AtomicU64::new(place), is_crowded: AtomicBool::new(false) }
    }

    /// Where a user begins that does so where many others do.
    pub fn crowded(user: User) -> Self {
        Self::of(User::new(user.raw() % CROWDED + 1).expect("a number that is not 0 and small"))
    }

    /// One of so many places.
    pub fn among(&self, places: u32) -> u32 {
        (((self.place.load(Ordering::Relaxed) >> 32) * u64::from(places)) >> 32) as u32
    }

    /// The spans of a section, in an order that others do not have: who meets at one does not meet at the next.
    pub fn spans(&self) -> impl Iterator<Item = u32> + use<> {
        let place = self.place.load(Ordering::Relaxed);
        let (first, stride) = (place as u32 % SPANS, ((place >> STRIDE_AT) as u32 % SPANS) | 1);
        (0..SPANS).map(move |i| (first + i * stride) % SPANS)
    }

    /// The next search begins at this one of so many places.
    pub fn stay(&self, at: u32, places: u32) {
        let share = (u64::from(at) << 32).div_ceil(u64::from(places));
        let low = self.place.load(Ordering::Relaxed) as u32;
        self.place.store(share << 32 | u64::from(low), Ordering::Relaxed);
    }

    /// The next search begins elsewhere.
    pub fn move_on(&self) {
        // SplitMix64: where it leads is as good as random, and the same in each run.
        let mut x = self.place.load(Ordering::Relaxed).wrapping_add(APART);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        self.place.store(x ^ (x >> 31), Ordering::Relaxed);
    }

    /// Others were met: the search goes on elsewhere.
    pub fn meet(&self) {
        self.move_on();
        self.is_crowded.store(true, Ordering::Relaxed);
    }

    /// Whether others were met, and nobody has asked since.
    pub fn is_crowded(&self) -> bool {
        self.is_crowded.load(Ordering::Relaxed)
    }

    /// Whether others were met; asked once.
    pub fn has_met(&self) -> bool {
        self.is_crowded.swap(false, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_begin_apart_and_stay_where_they_are_told() {
        let users = (1..=24).map(|n| Begin::of(User::new(n).unwrap()));
        let mut places: Vec<_> = users.map(|begin| begin.among(24)).collect();
        places.sort_unstable();
        places.dedup();
        assert!(places.len() > 16, "24 users begin at {places:?} of 24 places");
        for places in [1, 2, 3, 24, 91, 102_400, u32::MAX >> 5] {
            let begin = Begin::of(User::new(77).unwrap());
            for at in [0, 1, places / 2, places - 1].map(|at| at.min(places - 1)) {
                begin.stay(at, places);
                assert_eq!(begin.among(places), at, "of {places}");
            }
        }
    }

    #[test]
    fn who_begins_where_others_do_is_one_of_many_there() {
        let begins = |begin: fn(User) -> Begin| {
            let users = (1..=400).map(|n| begin(User::new(n).unwrap()).among(1 << 20));
            users.collect::<std::collections::BTreeSet<_>>().len()
        };
        assert_eq!(begins(Begin::crowded), usize::from(CROWDED));
        assert!(begins(Begin::of) > 390);
    }

    #[test]
    fn who_has_met_others_begins_elsewhere_once() {
        let begin = Begin::of(User::new(1).unwrap());
        let before = begin.among(1 << 20);
        assert!(!begin.has_met());
        begin.meet();
        assert!(begin.has_met() && !begin.has_met());
        assert_ne!(begin.among(1 << 20), before);
    }
}
