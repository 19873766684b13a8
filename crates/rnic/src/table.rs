//! Objects by number, such that a number is not given out again soon.
//!
//! ```text
//!  23                 bits 0
//! +--------------------+----------------+
//! | times the slot was |  slot          |
//! | given out (mod)    |                |
//! +--------------------+----------------+
//! ```
//!
//! Freed slots wait in a queue, and each comes back with its next number: between two objects of one
//! number lie 2^24 / slots reuses of its slot, and as many times [`QUARANTINE`] other objects, unless
//! the table is nearly full. Numbers are sparse: index nothing by them.
//!
//! In a scattered table both parts are random: each slot has low bits of its own that were drawn
//! for it, and its first number is drawn from those with these low bits. All that is said above
//! holds for it too.

use std::collections::VecDeque;

/// A table of `T` with 24-bit numbers.
pub(crate) struct Table<T> {
    slots: Vec<Slot<T>>,
    /// Slots that were given out before.
    free: VecDeque<u32>,
    bits: u32,
    live: u32,
    scatter: Option<Scatter>,
}

/// Where the numbers of a scattered table come from.
struct Scatter {
    random: fn() -> u32,
    /// The slot of numbers with these low bits; the first one, which is never used, if there is
    /// none.
    slots: Box<[u32]>,
}

struct Slot<T> {
    /// The number of the object, or of the next one.
    number: u32,
    /// The generations have wrapped: numbers of this slot come the second time.
    wrapped: bool,
    value: Option<T>,
}

const NUMBER_BITS: u32 = 24;
/// "None" where QPs are named.
const NUMBER_MAX: u32 = (1 << NUMBER_BITS) - 1;
/// Freed slots that are looked at for a number that may be given out again.
const TRIES: usize = 64;
/// Fresh slots are taken until this many freed ones wait.
const QUARANTINE: usize = 4096;
/// Numbers below this are never given out: IBTA reserves QPs 0 and 1, and small ones are likely
/// mistakes.
const FIRST: u32 = 16;

impl<T> Table<T> {
    /// A table of up to `max` objects (rounded up to a power of two with the reserved ones).
    pub fn new(max: u32) -> Self {
        let bits = (max.saturating_add(FIRST)).next_power_of_two().trailing_zeros();
        let bits = bits.min(NUMBER_BITS - 4);
        let slots = (0..FIRST).map(|number| Slot { number, wrapped: false, value: None }).collect();
        Self { slots, free: VecDeque::new(), bits, live: 0, scatter: None }
    }

    /// A table like that, with numbers that cannot be guessed.
    pub fn scattered(max: u32, random: fn() -> u32) -> Self {
        let mut table = Self::new(max);
        let slots = vec![0; 1 << table.bits].into();
        table.scatter = Some(Scatter { random, slots });
        table
    }

    /// Where an object with this number would be.
    #[inline]
    fn slot_of(&self, number: u32) -> usize {
        let low = (number & ((1 << self.bits) - 1)) as usize;
        match &self.scatter {
            None => low,
            Some(scatter) => scatter.slots[low] as usize,
        }
    }

    /// The first number of the next slot.
    fn fresh_number(&mut self) -> u32 {
        let slot = self.slots.len() as u32;
        let Some(scatter) = &mut self.scatter else { return slot };
        let mask = (1 << self.bits) - 1;
        let (mut low, mut tries) = ((scatter.random)() & mask, 0);
        while low < FIRST || scatter.slots[low as usize] != 0 {
            // In a table that is nearly full the next free one will do.
            low = if tries < TRIES { (scatter.random)() } else { low + 1 } & mask;
            tries += 1;
        }
        scatter.slots[low as usize] = slot;
        let number = ((scatter.random)() << self.bits | low) & NUMBER_MAX;
        if number == NUMBER_MAX { low } else { number }
    }

    /// Objects now.
    #[cfg_attr(not(test), expect(dead_code, reason = "for tests of what is left over"))]
    pub fn len(&self) -> u32 {
        self.live
    }

    /// The most objects.
    pub fn capacity(&self) -> u32 {
        (1 << self.bits) - FIRST
    }

    /// Makes an object from its number. A number that was in use long ago is given out again only if
    /// `reusable` says so. `None` if the table is full, or none of the slots that waited longest has a
    /// number to give.
    pub fn insert(
        &mut self,
        reusable: impl Fn(u32) -> bool,
        make: impl FnOnce(u32) -> T,
    ) -> Option<u32> {
        let fresh = self.slots.len() < 1 << self.bits;
        let old = if fresh && self.free.len() < QUARANTINE { 0 } else { self.free.len() };
        for _ in 0..old.min(TRIES) {
            let at = self.free.pop_front().expect("counted");
            let slot = &mut self.slots[at as usize];
            for _ in 0..1 << (NUMBER_BITS - self.bits) {
                if !slot.wrapped || reusable(slot.number) {
                    slot.value = Some(make(slot.number));
                    self.live += 1;
                    return Some(slot.number);
                }
                slot.advance(self.bits);
            }
            self.free.push_back(at);
        }
        fresh.then(|| {
            let number = self.fresh_number();
            self.slots.push(Slot { number, wrapped: false, value: Some(make(number)) });
            self.live += 1;
            number
        })
    }

    /// The object of this number.
    #[inline]
    pub fn get(&self, number: u32) -> Option<&T> {
        let slot = self.slots.get(self.slot_of(number))?;
        if slot.number != number {
            return None;
        }
        slot.value.as_ref()
    }

    /// The object of this number, to be changed.
    #[inline]
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        let at = self.slot_of(number);
        let slot = self.slots.get_mut(at)?;
        if slot.number != number {
            return None;
        }
        slot.value.as_mut()
    }

    /// Takes the object out; its number is unknown from now on.
    pub fn remove(&mut self, number: u32) -> Option<T> {
        self.get(number)?;
        let at = self.slot_of(number);
        let slot = &mut self.slots[at];
        let value = slot.value.take();
        slot.advance(self.bits);
        self.free.push_back(at as u32);
        self.live -= 1;
        value
    }

    /// Numbers and objects.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.slots.iter().filter_map(|s| s.value.as_ref().map(|v| (s.number, v)))
    }
}

impl<T> Slot<T> {
    fn advance(&mut self, bits: u32) {
        let next = self.number + (1 << bits);
        if next >= NUMBER_MAX {
            self.wrapped = true;
        }
        self.number = next & NUMBER_MAX;
        if self.number == NUMBER_MAX {
            self.number &= (1 << bits) - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_dead_after_removal_and_comes_back_last() {
        let mut t = Table::new(16);
        assert_eq!(t.capacity(), 16);
        let first = t.insert(|_| true, |n| n).unwrap();
        for _ in 1..16 {
            t.insert(|_| true, |n| n).unwrap();
        }
        assert_eq!(t.insert(|_| true, |n| n), None);
        assert_eq!(t.remove(first), Some(first));
        assert_eq!(t.get(first), None);
        assert_eq!(t.remove(first), None);
        assert_eq!(t.len(), 15);
        let again = t.insert(|_| true, |n| n).unwrap();
        assert_eq!(again, first + 32);
        assert_eq!((t.get(first), t.get(again)), (None, Some(&again)));
    }

    /// SplitMix64 of a count.
    fn random() -> u32 {
        use std::sync::atomic::{AtomicU64, Ordering};
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let mut z = COUNT.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) as u32
    }

    #[test]
    fn numbers_of_a_scattered_table_do_not_follow_each_other() {
        let mut t = Table::scattered(1000, random);
        let numbers: Vec<u32> =
            (0..t.capacity()).map(|_| t.insert(|_| true, |n| n).unwrap()).collect();
        assert_eq!(t.insert(|_| true, |n| n), None, "full");
        let sorted = std::collections::BTreeSet::from_iter(&numbers);
        assert_eq!(sorted.len(), numbers.len(), "no two are equal");
        let near = |pair: &[u32]| pair[0].abs_diff(pair[1]) < 1000;
        assert!(numbers.windows(2).filter(|pair| near(pair)).count() < 10);
        // All of the 24 bits are used.
        assert!(numbers.iter().any(|n| *n < 1 << 20) && numbers.iter().any(|n| *n >= 15 << 20));
        for &n in &numbers {
            assert!((16..0xff_ffff).contains(&n));
            assert_eq!(t.get(n), Some(&n));
            assert_eq!(t.get(n ^ 1 << 23), None);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "half a million steps")]
    fn a_number_of_a_scattered_table_comes_back_after_all_others_of_its_slot() {
        let mut t = Table::scattered(16, random);
        for _ in 1..t.capacity() {
            t.insert(|_| true, |n| n).unwrap();
        }
        let first = t.insert(|_| true, |n| n).unwrap();
        let mut n = first;
        for lap in 1..(1 << (24 - 5)) - 1 {
            assert_eq!(t.remove(n), Some(n));
            assert_eq!(t.get(n), None);
            n = t.insert(|_| true, |n| n).unwrap();
            assert_ne!(n, first, "after {lap} others");
            assert_eq!(n & 0x1f, first & 0x1f);
        }
    }

    #[test]
    fn no_number_is_the_one_that_means_none() {
        let mut slot = Slot { number: 0x1f, wrapped: false, value: None::<()> };
        for _ in 0..1 << if cfg!(miri) { 10 } else { 20 } {
            slot.advance(5);
            assert_ne!(slot.number, 0xff_ffff);
            assert_eq!(slot.number & 0x1f, 0x1f);
        }
        assert!(slot.wrapped || cfg!(miri));
    }

    #[test]
    #[cfg_attr(miri, ignore = "half a million steps")]
    fn a_number_in_use_elsewhere_is_skipped_when_the_numbers_wrap() {
        let mut t = Table::new(16);
        // One slot is given out again and again, the others stay full.
        let all: Vec<u32> = (0..16).map(|_| t.insert(|_| true, |n| n).unwrap()).collect();
        let (first, last) = (all[0], all[15]);
        let laps = 1 << (24 - 5);
        let mut n = first;
        for lap in 1..laps + 10 {
            assert_eq!(t.remove(n), Some(n));
            n = t.insert(|n| n != first, |n| n).unwrap();
            let skipped = if lap >= laps { 1 } else { 0 };
            assert_eq!(n, first + (lap + skipped) % laps * 32);
        }
        assert_eq!(t.get(last), Some(&last));
    }
}
