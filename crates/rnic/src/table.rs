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

use std::collections::VecDeque;

/// A table of `T` with 24-bit numbers.
pub(crate) struct Table<T> {
    slots: Vec<Slot<T>>,
    free: VecDeque<u32>,
    bits: u32,
    live: u32,
}

struct Slot<T> {
    /// The number of the object, or of the next one.
    number: u32,
    /// The generations have wrapped: numbers of this slot come the second time.
    wrapped: bool,
    value: Option<T>,
}

const NUMBER_BITS: u32 = 24;
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
        Self { slots, free: VecDeque::new(), bits, live: 0 }
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
            let number = self.slots.len() as u32;
            self.slots.push(Slot { number, wrapped: false, value: Some(make(number)) });
            self.live += 1;
            number
        })
    }

    /// The object of this number.
    #[inline]
    pub fn get(&self, number: u32) -> Option<&T> {
        let slot = self.slots.get((number & ((1 << self.bits) - 1)) as usize)?;
        if slot.number != number {
            return None;
        }
        slot.value.as_ref()
    }

    /// The object of this number, to be changed.
    #[inline]
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        let slot = self.slots.get_mut((number & ((1 << self.bits) - 1)) as usize)?;
        if slot.number != number {
            return None;
        }
        slot.value.as_mut()
    }

    /// Takes the object out; its number is unknown from now on.
    pub fn remove(&mut self, number: u32) -> Option<T> {
        self.get(number)?;
        let at = number & ((1 << self.bits) - 1);
        let slot = &mut self.slots[at as usize];
        let value = slot.value.take();
        slot.advance(self.bits);
        self.free.push_back(at);
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
        // The all-ones number means "none" where QPs are named.
        if next >= (1 << NUMBER_BITS) - 1 {
            self.wrapped = true;
        }
        self.number = next % (1 << NUMBER_BITS);
        if self.number == (1 << NUMBER_BITS) - 1 {
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
