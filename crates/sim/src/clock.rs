//! Clocks of nodes, which differ from virtual time in rate and offset, and which stop or leap.
//!
//! Programs read the clock of their node. Events, timers and the timing model use virtual time, so
//! a clock changes nothing but the decisions of programs that read it.

use crate::time::Time;

/// A node's monotonic clock. By default it shows virtual time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Clock {
    /// Virtual time from which the clock runs on; it stands still before.
    since: Time,
    /// Time that the clock shows at `since`.
    shown: Time,
    /// Difference of its rate from that of virtual time, in parts per million.
    drift_ppm: i32,
}

const MILLION: i128 = 1_000_000;

impl Clock {
    /// Creates a clock that shows `offset` when virtual time begins. Panics unless it runs forward.
    pub fn new(drift_ppm: i32, offset: Time) -> Self {
        assert!(i128::from(drift_ppm) > -MILLION, "a clock runs forward");
        Self { since: Time::ZERO, shown: offset, drift_ppm }
    }

    /// Returns the time that the clock shows at virtual time `now`.
    pub fn read(&self, now: Time) -> Time {
        let elapsed = now.since(self.since);
        if self.drift_ppm == 0 {
            return self.shown + elapsed;
        }
        let scaled = i128::from(elapsed.0) * (MILLION + i128::from(self.drift_ppm)) / MILLION;
        self.shown + Time(u64::try_from(scaled).unwrap_or(u64::MAX))
    }

    /// Advances the clock by `by` at once, as when a virtual machine resumes and takes over the
    /// time of its host.
    pub fn leap(&mut self, by: Time) {
        self.shown += by;
    }

    /// Stops the clock from `now` for `length`, as when a virtual machine is paused and does not
    /// learn of it.
    pub fn stop(&mut self, now: Time, length: Time) {
        let shown = self.read(now);
        // A clock that stands still already goes on after the later of the two ends.
        let until = (now + length).max(self.since);
        (self.since, self.shown) = (until, shown);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn default_clock_shows_virtual_time() {
        for now in [0, 1, 999, 1 << 60].map(Time) {
            assert_eq!(Clock::default().read(now), now);
        }
    }

    #[test]
    fn rate_and_offset_differ() {
        let hour = Time::us(3_600_000_000);
        assert_eq!(Clock::new(10_000, hour).read(Time::us(100)), hour + Time::us(101));
        assert_eq!(Clock::new(-10_000, hour).read(Time::us(100)), hour + Time::us(99));
        assert_eq!(Clock::new(0, hour).read(Time(1)), hour + Time(1));
    }

    #[test]
    fn clock_stops_and_leaps() {
        let mut clock = Clock::new(0, Time::us(5));
        clock.stop(Time::us(10), Time::us(100));
        assert_eq!(clock.read(Time::us(10)), Time::us(15));
        assert_eq!(clock.read(Time::us(110)), Time::us(15), "it stands still");
        assert_eq!(clock.read(Time::us(111)), Time::us(16));
        clock.leap(Time::us(7));
        assert_eq!(clock.read(Time::us(111)), Time::us(23));
        // The second stop begins within the first and ends before it.
        clock.stop(Time::us(120), Time::us(50));
        clock.stop(Time::us(130), Time::us(10));
        assert_eq!(clock.read(Time::us(170)), Time::us(32));
        assert_eq!(clock.read(Time::us(171)), Time::us(33));
    }

    proptest! {
        /// A clock never goes back.
        #[test]
        fn clock_is_monotonic(
            drift in -500_000..500_000_i32,
            steps in prop::collection::vec((0..3_u8, 0..1_000_000_u64, 0..1_000_000_u64), 1..40),
        ) {
            let mut clock = Clock::new(drift, Time(3));
            let (mut now, mut last) = (Time::ZERO, clock.read(Time::ZERO));
            for (what, after, length) in steps {
                now += Time(after);
                match what {
                    0 => clock.leap(Time(length)),
                    1 => clock.stop(now, Time(length)),
                    _ => {}
                }
                let shown = clock.read(now);
                prop_assert!(shown >= last);
                last = shown;
            }
        }
    }
}
