//! How recently or how often keys were used: eight bits a slot, and nothing in remote memory.

use crate::layout::table::Shape;

/// The note that is taken of the uses of a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Measure {
    /// The time of the last use, in units of some 8 s, for the last 17 minutes at least.
    #[default]
    Recency,
    /// A logarithmic count of uses that decays by 1 a minute, as Redis's LFU.
    Frequency,
}

impl Measure {
    /// Milliseconds of a unit of time, as a power of two.
    const fn shift(self) -> u32 {
        match self {
            Self::Recency => 13,
            Self::Frequency => 16,
        }
    }
}

/// Value of a use at the time of the last renewal.
const NOW: u8 = 128;
/// Units after which the values are renewed, so that they fit eight bits.
const RENEWAL: u64 = 100;
/// Count of a new key, so that a new key is not evicted before it is used.
const COUNT_OF_NEW: u8 = 5;
/// Uses for the first increment are 1, then 10 more for each increment.
const COUNT_FACTOR: u64 = 10;

/// The uses of the keys of one subtable.
///
/// With [`Measure::Recency`] a value is the time of the last use minus the time of the last renewal
/// plus 128. A renewal subtracts the time since the last one from all values. So values stay within
/// eight bits, and old values end at 0.
#[derive(Clone, Debug)]
pub(crate) struct Uses {
    values: Box<[u8]>,
    renewed: u64,
}

impl Uses {
    pub fn new(shape: Shape) -> Self {
        Self { values: vec![0; shape.slots()].into_boxed_slice(), renewed: 0 }
    }

    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Notes a use at `now` milliseconds. `random` decides whether a count increases.
    pub fn used(&mut self, slot: usize, is_new: bool, measure: Measure, now: u64, random: u64) {
        self.renew(measure, now);
        let value = &mut self.values[slot];
        match measure {
            Measure::Recency => {
                let since = (now >> measure.shift()).saturating_sub(self.renewed);
                *value = NOW + since.min(RENEWAL) as u8;
            }
            Measure::Frequency if is_new => *value = COUNT_OF_NEW,
            Measure::Frequency => {
                let above = u64::from(value.saturating_sub(COUNT_OF_NEW));
                let increases = random.is_multiple_of(above * COUNT_FACTOR + 1);
                *value = value.saturating_add(increases.into());
            }
        }
    }

    fn renew(&mut self, measure: Measure, now: u64) {
        let now = now >> measure.shift();
        let limit = if measure == Measure::Recency { RENEWAL } else { 1 };
        let elapsed = now.saturating_sub(self.renewed);
        if elapsed < limit {
            return;
        }
        self.renewed = now;
        let less = elapsed.min(255) as u8;
        self.values.iter_mut().for_each(|value| *value = value.saturating_sub(less));
    }

    /// The worth of a key at `now`: the key with the least worth is evicted first. Comparable
    /// between subtables.
    pub fn worth(&self, slot: usize, measure: Measure, now: u64) -> i64 {
        let since = (now >> measure.shift()).saturating_sub(self.renewed) as i64;
        i64::from(self.values[slot]) - since
    }

    /// Returns the seconds since the last use of a key, or its count.
    pub fn told(&self, slot: usize, measure: Measure, now: u64) -> u64 {
        let worth = self.worth(slot, measure, now);
        match measure {
            Measure::Recency => {
                let units = (i64::from(NOW) - worth).max(0) as u64;
                (units << measure.shift()) / 1000
            }
            Measure::Frequency => worth.max(0) as u64,
        }
    }

    /// Sets what [`told`](Self::told) returns. A time before the range of `Recency` is cut.
    pub fn tell(&mut self, slot: usize, told: u64, measure: Measure, now: u64) {
        self.renew(measure, now);
        self.values[slot] = match measure {
            Measure::Recency => {
                let since = (now >> measure.shift()).saturating_sub(self.renewed);
                let units = told.saturating_mul(1000).div_ceil(1 << measure.shift());
                (u64::from(NOW) + since.min(RENEWAL)).saturating_sub(units) as u8
            }
            Measure::Frequency => told.min(255) as u8,
        };
    }

    /// Copies the value of a slot of another subtable.
    pub fn copy(&mut self, to: usize, other: &Self, from: usize) {
        let newer = self.renewed.max(other.renewed);
        let less = |renewed: u64| (newer - renewed).min(255) as u8;
        let (mine, theirs) = (less(self.renewed), less(other.renewed));
        if mine > 0 {
            self.values.iter_mut().for_each(|value| *value = value.saturating_sub(mine));
        }
        self.renewed = newer;
        self.values[to] = other.values[from].saturating_sub(theirs);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses() -> Uses {
        Uses::new(Shape::new(1, 4096).expect("a shape"))
    }

    #[test]
    fn key_used_later_is_worth_more_at_any_time() {
        for later in [1, 50, 99, 100, 101, 5000] {
            let mut uses = uses();
            let begin = 1 << 40;
            let end = begin + (later << 13);
            uses.used(0, true, Measure::Recency, begin, 0);
            uses.used(1, true, Measure::Recency, end, 0);
            let worth = |slot| uses.worth(slot, Measure::Recency, end);
            assert!(worth(0) < worth(1), "{later} units");
        }
    }

    #[test]
    fn worth_is_comparable_between_subtables() {
        let (mut one, mut two) = (uses(), uses());
        let begin = 1 << 40;
        one.used(0, true, Measure::Recency, begin, 0);
        two.used(0, true, Measure::Recency, begin + (70 << 13), 0);
        two.used(1, true, Measure::Recency, begin + (105 << 13), 0);
        one.used(1, true, Measure::Recency, begin + (106 << 13), 0);
        let now = begin + (110 << 13);
        let worth = |uses: &Uses, slot| uses.worth(slot, Measure::Recency, now);
        assert!(worth(&one, 0) < worth(&two, 0));
        assert!(worth(&two, 0) < worth(&two, 1));
        assert!(worth(&two, 1) < worth(&one, 1));
        one.copy(5, &two, 1);
        assert_eq!(worth(&one, 5), worth(&two, 1));
    }

    #[test]
    fn uses_that_were_set_are_told() {
        let mut uses = uses();
        let now = (1 << 40) + (70 << 13);
        uses.used(1, true, Measure::Recency, 1 << 40, 0);
        for (seconds, told) in [(0, 0), (8, 8), (9, 16), (1000, 1007), (u64::MAX, 1622)] {
            uses.tell(0, seconds, Measure::Recency, now);
            assert_eq!(uses.told(0, Measure::Recency, now), told, "{seconds} s");
        }
        for (count, told) in [(0, 0), (100, 100), (255, 255), (256, 255)] {
            uses.tell(0, count, Measure::Frequency, now);
            assert_eq!(uses.told(0, Measure::Frequency, now), told);
        }
    }

    #[test]
    fn count_grows_with_uses_and_decays() {
        let mut uses = uses();
        let begin = 1 << 40;
        let mut random = crate::memory::Seeded::new(3);
        for slot in [0, 1] {
            uses.used(slot, true, Measure::Frequency, begin, 0);
        }
        for _ in 0..1000 {
            uses.used(0, false, Measure::Frequency, begin, random.draw());
        }
        let worth = |uses: &Uses, slot| uses.worth(slot, Measure::Frequency, begin);
        assert_eq!(worth(&uses, 1), 5);
        assert!((12..30).contains(&worth(&uses, 0)), "{}", worth(&uses, 0));
        uses.used(2, true, Measure::Frequency, begin + (100 << 16), 0);
        assert_eq!(uses.values[0], 0);
    }
}
