//! Virtual time, in picoseconds: a byte takes 80 ps on a link of 100 Gb/s.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

/// A moment or a length of time, in whole picoseconds, so that sums are the same on every machine.
/// 2^64 ps are 213 days.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Time(pub u64);

impl Time {
    /// The start of the simulation.
    pub const ZERO: Time = Time(0);
    /// A time that is never reached.
    pub const NEVER: Time = Time(u64::MAX);

    /// Converts nanoseconds, rounded to a picosecond.
    pub fn ns(ns: f64) -> Self {
        Self((ns * 1e3).round() as u64)
    }

    /// Converts microseconds.
    pub const fn us(us: u64) -> Self {
        Self(us * 1_000_000)
    }

    /// Returns whole nanoseconds.
    pub const fn as_ns(self) -> u64 {
        self.0 / 1_000
    }

    /// Returns microseconds.
    pub fn as_us(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// Returns seconds.
    pub fn as_s(self) -> f64 {
        self.0 as f64 / 1e12
    }

    /// Returns the time from `earlier` to `self`, or 0 if `earlier` is later.
    pub const fn since(self, earlier: Time) -> Time {
        Time(self.0.saturating_sub(earlier.0))
    }
}

impl From<Duration> for Time {
    fn from(d: Duration) -> Self {
        Self(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX).saturating_mul(1_000))
    }
}

impl Add for Time {
    type Output = Time;
    fn add(self, other: Time) -> Time {
        Time(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Time {
    fn add_assign(&mut self, other: Time) {
        *self = *self + other;
    }
}

impl Sub for Time {
    type Output = Time;
    fn sub(self, other: Time) -> Time {
        Time(self.0 - other.0)
    }
}

/// Formats as microseconds with all digits: `12.345678 us`.
impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06} us", self.0 / 1_000_000, self.0 % 1_000_000)
    }
}
