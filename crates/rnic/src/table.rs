//! Tables of objects with 24-bit numbers, which are not reused soon.
//!
//! ```text
//!  23                 bits 0
//! +--------------------+----------------+
//! | uses of the slot   |  slot          |
//! | so far (modulo)    |                |
//! +--------------------+----------------+
//! ```
//!
//! Freed slots wait in a queue, and each is reused under its next number. Before a number is
//! reused, its slot is reused 2^24 / slots times, and before each reuse of the slot [`QUARANTINE`]
//! other objects are freed, unless the table is nearly full. Numbers are sparse: never use them as
//! array indices.
//!
//! In a scattered table both parts are random: each slot has low bits that were drawn for it, and
//! the slot's first number is drawn among the numbers with these low bits. The statements above
//! hold for scattered tables too.

use rustix::io::Errno;
use std::collections::VecDeque;

/// A table of `T` with 24-bit numbers.
pub(crate) struct Table<T> {
    slots: Vec<Slot<T>>,
    /// Slots that were freed.
    free: VecDeque<u32>,
    bits: u32,
    live: u32,
    scatter: Option<Scatter>,
}

/// Random assignment of numbers in a scattered table.
struct Scatter {
    random: RandomSource,
    /// Slot by the low bits of the number. Low bits without a slot map to slot 0, which is never
    /// used.
    slots: Box<[u32]>,
}

struct Slot<T> {
    /// Number of the current object, or of the slot's next object.
    number: u32,
    /// The upper part has wrapped around: numbers of this slot repeat.
    wrapped: bool,
    value: Option<T>,
}

const NUMBER_BITS: u32 = 24;
/// Reserved value: "no QP".
const NUMBER_MAX: u32 = (1 << NUMBER_BITS) - 1;
/// Maximum number of freed slots to examine for a reusable number.
const TRIES: usize = 64;
/// Number of freed slots that are kept back while unused slots remain.
const QUARANTINE: usize = 4096;
/// Source of random numbers.
pub(crate) type RandomSource = fn() -> Result<u32, Errno>;

/// The reason why a table takes no further object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum InsertError {
    /// The table is full.
    Full,
    /// No random number could be drawn.
    Random(Errno),
}

/// First usable number. IBTA reserves QPs 0 and 1, and small numbers are likely mistakes.
const FIRST: u32 = 16;

impl<T> Table<T> {
    /// Creates a table of up to `max` objects (rounded up to a power of two, including the reserved
    /// numbers).
    pub fn new(max: u32) -> Self {
        let bits = (max.saturating_add(FIRST)).next_power_of_two().trailing_zeros();
        let bits = bits.min(NUMBER_BITS - 4);
        let slots = (0..FIRST).map(|number| Slot { number, wrapped: false, value: None }).collect();
        Self { slots, free: VecDeque::new(), bits, live: 0, scatter: None }
    }

    /// Creates a table whose numbers are unpredictable.
    pub fn scattered(max: u32, random: RandomSource) -> Self {
        let mut table = Self::new(max);
        let slots = vec![0; 1 << table.bits].into();
        table.scatter = Some(Scatter { random, slots });
        table
    }

    /// Index of the slot that an object with this number would have.
    #[inline]
    fn slot_of(&self, number: u32) -> usize {
        let low = (number & ((1 << self.bits) - 1)) as usize;
        match &self.scatter {
            None => low,
            Some(scatter) => scatter.slots[low] as usize,
        }
    }

    /// Draws the first number of the next slot.
    fn fresh_number(&mut self) -> Result<u32, Errno> {
        let slot = self.slots.len() as u32;
        let Some(scatter) = &mut self.scatter else { return Ok(slot) };
        let mask = (1 << self.bits) - 1;
        let (mut low, mut tries) = ((scatter.random)()? & mask, 0);
        while low < FIRST || scatter.slots[low as usize] != 0 {
            // In a nearly full table, the next free value is taken.
            low = if tries < TRIES { (scatter.random)()? } else { low + 1 } & mask;
            tries += 1;
        }
        let number = ((scatter.random)()? << self.bits | low) & NUMBER_MAX;
        scatter.slots[low as usize] = slot;
        Ok(if number == NUMBER_MAX { low } else { number })
    }

    /// Number of objects.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests count leftover objects"))]
    pub fn len(&self) -> u32 {
        self.live
    }

    /// Maximum number of objects.
    pub fn capacity(&self) -> u32 {
        (1 << self.bits) - FIRST
    }

    /// Creates an object under a new number. After a wrap-around, a number is reused only if
    /// `reusable` allows it.
    ///
    /// # Errors
    /// [`InsertError::Full`] if the table is full, or if none of the longest-freed slots has a
    /// reusable number.
    pub fn insert(
        &mut self,
        reusable: impl Fn(u32) -> bool,
        make: impl FnOnce(u32) -> T,
    ) -> Result<u32, InsertError> {
        let fresh = self.slots.len() < 1 << self.bits;
        let old = if fresh && self.free.len() < QUARANTINE { 0 } else { self.free.len() };
        for _ in 0..old.min(TRIES) {
            let at = self.free.pop_front().expect("`old` counts the freed slots");
            let slot = &mut self.slots[at as usize];
            for _ in 0..1 << (NUMBER_BITS - self.bits) {
                if !slot.wrapped || reusable(slot.number) {
                    slot.value = Some(make(slot.number));
                    self.live += 1;
                    return Ok(slot.number);
                }
                slot.advance(self.bits);
            }
            self.free.push_back(at);
        }
        if !fresh {
            return Err(InsertError::Full);
        }
        let number = self.fresh_number().map_err(InsertError::Random)?;
        self.slots.push(Slot { number, wrapped: false, value: Some(make(number)) });
        self.live += 1;
        Ok(number)
    }

    /// Returns the object with this number.
    #[inline]
    pub fn get(&self, number: u32) -> Option<&T> {
        let slot = self.slots.get(self.slot_of(number))?;
        if slot.number != number {
            return None;
        }
        slot.value.as_ref()
    }

    /// Returns the object with this number, mutably.
    #[inline]
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        let at = self.slot_of(number);
        let slot = self.slots.get_mut(at)?;
        if slot.number != number {
            return None;
        }
        slot.value.as_mut()
    }

    /// Removes the object. Its number is unknown afterwards.
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

    /// Iterates over numbers and objects.
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
    fn removed_number_is_unknown_and_reused_last() {
        let mut t = Table::new(16);
        assert_eq!(t.capacity(), 16);
        let first = t.insert(|_| true, |n| n).unwrap();
        for _ in 1..16 {
            t.insert(|_| true, |n| n).unwrap();
        }
        assert_eq!(t.insert(|_| true, |n| n), Err(InsertError::Full));
        assert_eq!(t.remove(first), Some(first));
        assert_eq!(t.get(first), None);
        assert_eq!(t.remove(first), None);
        assert_eq!(t.len(), 15);
        let again = t.insert(|_| true, |n| n).unwrap();
        assert_eq!(again, first + 32);
        assert_eq!((t.get(first), t.get(again)), (None, Some(&again)));
    }

    fn random() -> Result<u32, Errno> {
        use std::sync::Mutex;
        static RANDOM: Mutex<units::Random> = Mutex::new(units::Random::new(0));
        Ok(RANDOM.lock().unwrap().bits() as u32)
    }

    #[test]
    fn scattered_table_reports_a_failed_draw() {
        let mut t = Table::scattered(16, || Err(Errno::NOSYS));
        assert_eq!(t.insert(|_| true, |n| n), Err(InsertError::Random(Errno::NOSYS)));
        assert_eq!(t.len(), 0);
    }

    #[test]
    fn scattered_numbers_are_not_consecutive() {
        let mut t = Table::scattered(1000, random);
        let numbers: Vec<u32> =
            (0..t.capacity()).map(|_| t.insert(|_| true, |n| n).unwrap()).collect();
        assert_eq!(t.insert(|_| true, |n| n), Err(InsertError::Full), "full");
        let sorted = std::collections::BTreeSet::from_iter(&numbers);
        assert_eq!(sorted.len(), numbers.len(), "no two are equal");
        let near = |pair: &[u32]| pair[0].abs_diff(pair[1]) < 1000;
        assert!(numbers.windows(2).filter(|pair| near(pair)).count() < 10);
        // All 24 bits are used.
        assert!(numbers.iter().any(|n| *n < 1 << 20) && numbers.iter().any(|n| *n >= 15 << 20));
        for &n in &numbers {
            assert!((16..0xff_ffff).contains(&n));
            assert_eq!(t.get(n), Some(&n));
            assert_eq!(t.get(n ^ 1 << 23), None);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "half a million steps")]
    fn scattered_number_is_reused_after_all_numbers_of_its_slot() {
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
    fn numbers_never_equal_the_reserved_none() {
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
    fn number_in_use_is_skipped_after_the_wrap_around() {
        let mut t = Table::new(16);
        // One slot is reused repeatedly; all other slots stay occupied.
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
