//! The search in two combined buckets.

use crate::hash::mains;
use crate::layout::table::{BUCKET_BYTES, COMBINED_BYTES, SLOTS, combined, main_half};
use crate::layout::word;

/// The buckets of a subtable in which a key can lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buckets {
    /// First bucket of each combined bucket.
    pub first: [u32; 2],
    main: [u32; 2],
    overflow: [u32; 2],
}

impl Buckets {
    pub fn of(upper: u64, groups: u32) -> Self {
        let mains = mains(upper, groups);
        let first = mains.map(combined);
        let main = [0, 1].map(|i| first[i] + main_half(mains[i]) as u32);
        let overflow = [0, 1].map(|i| first[i] + 1 - main_half(mains[i]) as u32);
        Self { first, main, overflow }
    }

    /// The combined bucket that has `bucket`, twice. For a step of a scan.
    pub fn around(bucket: u32) -> Self {
        let first = bucket - u32::from(!bucket.is_multiple_of(3));
        Self { first: [first; 2], main: [bucket; 2], overflow: [bucket; 2] }
    }

    /// The slots, each of them once.
    pub fn slots(self) -> impl Iterator<Item = usize> {
        // Mains of one group share their overflow bucket.
        let fourth = (self.overflow[0] != self.overflow[1]).then_some(self.overflow[1]);
        let buckets = [self.main[0], self.overflow[0], self.main[1]].into_iter().chain(fourth);
        buckets.flat_map(slots_of)
    }

    /// The slot for a new key: in the less loaded combined bucket, in its main bucket first.
    pub fn free(self, is_empty: impl Fn(usize) -> bool) -> Option<usize> {
        let both = |i: usize| [self.main[i], self.overflow[i]].into_iter().flat_map(slots_of);
        let load = [0, 1].map(|i| both(i).filter(|slot| !is_empty(*slot)).count());
        let less = usize::from(load[1] < load[0]);
        both(less).chain(both(1 - less)).find(|slot| is_empty(*slot))
    }
}

pub(crate) fn slots_of(bucket: u32) -> impl Iterator<Item = usize> {
    let start = bucket as usize * SLOTS;
    start..start + SLOTS
}

/// The two combined buckets of a key, as they were read.
pub(crate) struct View {
    pub buckets: Buckets,
    pub bytes: [[u8; COMBINED_BYTES]; 2],
}

impl View {
    pub fn new(buckets: Buckets) -> Self {
        Self { buckets, bytes: [[0; COMBINED_BYTES]; 2] }
    }

    /// The word of slot `slot`, one of [`Buckets::slots`].
    pub fn slot(&self, slot: usize) -> u64 {
        let (bucket, slot) = ((slot / SLOTS) as u32, slot % SLOTS);
        let which = usize::from(bucket.wrapping_sub(self.buckets.first[0]) > 1);
        let half = (bucket - self.buckets.first[which]) as usize;
        word(&self.bytes[which], half * BUCKET_BYTES + 8 * (1 + slot))
    }

    /// The first words of the buckets.
    pub fn bucket_words(&self) -> [u64; 4] {
        let word = |which: usize, half: usize| word(&self.bytes[which], half * BUCKET_BYTES);
        [word(0, 0), word(0, 1), word(1, 0), word(1, 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_of_a_key_are_distinct_and_in_its_combined_buckets() {
        for upper in (0..4000_u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)) {
            for groups in [1, 2, 21] {
                let buckets = Buckets::of(upper, groups);
                let mut slots: Vec<_> = buckets.slots().collect();
                let total = slots.len();
                slots.sort_unstable();
                slots.dedup();
                assert!(slots.len() == total && (total == 21 || total == 28));
                assert!(slots.iter().all(|slot| *slot < 3 * groups as usize * SLOTS));
                let mut view = View::new(buckets);
                for which in 0..2 {
                    for (i, byte) in view.bytes[which].iter_mut().enumerate() {
                        let bucket = buckets.first[which] as usize + i / BUCKET_BYTES;
                        *byte =
                            if i % 8 == 7 { (bucket * 8 + i % BUCKET_BYTES / 8) as u8 } else { 0 };
                    }
                }
                for slot in slots {
                    let (bucket, slot_in) = (slot / SLOTS, slot % SLOTS);
                    assert_eq!(view.slot(slot), ((bucket * 8 + 1 + slot_in) % 256) as u64);
                }
            }
        }
    }

    #[test]
    fn new_key_goes_to_the_less_loaded_bucket() {
        let buckets = Buckets::of(0x0000_0000_0000_ffff, 21);
        assert_eq!(buckets.free(|_| true), Some(0));
        assert_eq!(buckets.free(|slot| slot != 0), Some(62 * SLOTS));
        assert_eq!(buckets.free(|_| false), None);
    }
}
