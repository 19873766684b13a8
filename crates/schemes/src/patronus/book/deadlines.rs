//! Moments, and the queue of deadlines.
//!
//! A permission that is open has the end of its lease as its deadline; one that waits has the end
//! of its wait. An extension changes only the lifetime word: the deadline in the queue may be too
//! early, and then moves when it is due. (Patronus polls a hash table of all permissions.)

use std::collections::BTreeSet;
use std::time::Duration;

use super::permissions::Key;

/// A moment by the clock of the memory node, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Moment(u64);

impl Moment {
    /// The deadline of a permission without a lease.
    pub const NEVER: Self = Self(u64::MAX);

    /// The moment `micros` later.
    pub fn after(self, micros: u64) -> Self {
        Self(self.0.saturating_add(micros.saturating_mul(1000)))
    }

    /// Microseconds since `earlier`, rounded down.
    pub fn micros_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0) / 1000
    }
}

impl From<Duration> for Moment {
    fn from(at: Duration) -> Self {
        Self(u64::try_from(at.as_nanos()).unwrap_or(u64::MAX))
    }
}

impl From<Moment> for Duration {
    fn from(at: Moment) -> Self {
        Self::from_nanos(at.0)
    }
}

/// The deadlines of permissions, at most one of each.
#[derive(Default)]
#[cfg_attr(test, derive(Clone))]
pub struct Deadlines(BTreeSet<(Moment, Key)>);

impl Deadlines {
    /// Adds the deadline of a permission.
    pub fn add(&mut self, at: Moment, key: Key) {
        if at != Moment::NEVER {
            self.0.insert((at, key));
        }
    }

    /// Removes a deadline that was added.
    pub fn remove(&mut self, at: Moment, key: Key) {
        self.0.remove(&(at, key));
    }

    /// The earliest deadline.
    pub fn first(&self) -> Option<Moment> {
        self.0.first().map(|(at, _)| *at)
    }

    /// Removes the earliest deadline if it is not after `now`.
    pub fn pop_due(&mut self, now: Moment) -> Option<Key> {
        if self.first()? > now {
            return None;
        }
        self.0.pop_first().map(|(_, key)| key)
    }

    /// All deadlines.
    pub fn iter(&self) -> impl Iterator<Item = (Moment, Key)> {
        self.0.iter().copied()
    }

    /// Number of deadlines.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}
