//! Waits of requests at the resources of the timing model: their number, mean, median and maximum.

use crate::time::Time;

/// Steps of the histogram for each power of two.
const STEPS: u64 = 8;
const STEP_BITS: u32 = STEPS.trailing_zeros();

/// Waits of requests at one resource, in a histogram whose steps are an eighth of a power of two.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    number: u64,
    total: u64,
    most: Time,
    /// Working time of the resource.
    busy: Time,
    steps: Vec<u64>,
}

impl Waits {
    /// Adds a request that waits for `wait` and then occupies the resource for `length`.
    pub(crate) fn add(&mut self, wait: Time, length: Time) {
        self.number += 1;
        self.total += wait.0;
        self.most = self.most.max(wait);
        self.busy += length;
        let step = step_of(wait.0);
        if step >= self.steps.len() {
            self.steps.resize(step + 1, 0);
        }
        self.steps[step] += 1;
    }

    /// Returns the number of requests.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the working time of the resource, all of its units together.
    pub fn busy(&self) -> Time {
        self.busy
    }

    /// Returns the mean wait.
    pub fn mean(&self) -> Time {
        Time(self.total.checked_div(self.number).unwrap_or(0))
    }

    /// Returns the longest wait.
    pub fn most(&self) -> Time {
        self.most
    }

    /// Returns a wait that a share (0 to 1) of all requests does not exceed, rounded up to a step.
    pub fn quantile(&self, share: f64) -> Time {
        let rank = (share * self.number as f64).ceil() as u64;
        let mut below = 0;
        for (step, number) in self.steps.iter().enumerate() {
            below += number;
            if below >= rank.max(1) {
                return Time(end_of(step)).min(self.most);
            }
        }
        Time::ZERO
    }

    /// Adds the waits of another resource of the same kind.
    pub fn join(&mut self, other: &Self) {
        self.number += other.number;
        self.total += other.total;
        self.most = self.most.max(other.most);
        self.busy += other.busy;
        self.steps.resize(self.steps.len().max(other.steps.len()), 0);
        for (step, number) in self.steps.iter_mut().zip(&other.steps) {
            *step += number;
        }
    }
}

/// Returns the step of a number of picoseconds.
fn step_of(ps: u64) -> usize {
    let power = ps.max(1).ilog2();
    match power.checked_sub(STEP_BITS) {
        None => ps as usize,
        Some(shift) => ((u64::from(shift) + 1) * STEPS + ((ps >> shift) - STEPS)) as usize,
    }
}

/// Returns the largest number of a step.
fn end_of(step: usize) -> u64 {
    let (shift, at) = (step as u64 / STEPS, step as u64 % STEPS);
    match shift.checked_sub(1) {
        None => at,
        Some(shift) => ((STEPS + at + 1) << shift) - 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_in_order_and_contain_their_numbers() {
        for ps in (0..5_000).chain([1 << 40, (1 << 40) + 1, u64::MAX >> 1]) {
            let step = step_of(ps);
            assert!(end_of(step) >= ps, "{ps}");
            assert!(step == 0 || end_of(step - 1) < ps, "{ps}");
            assert!(end_of(step) - ps <= ps / STEPS, "{ps}");
        }
    }

    #[test]
    fn mean_median_and_maximum_are_those_of_all_waits() {
        let (mut one, mut other) = (Waits::default(), Waits::default());
        [0, 0, 0, 80].iter().for_each(|ps| one.add(Time(*ps), Time(5)));
        other.add(Time(120), Time(5));
        one.join(&other);
        assert_eq!((one.number(), one.mean(), one.most()), (5, Time(40), Time(120)));
        assert_eq!((one.quantile(0.5), one.quantile(1.0)), (Time::ZERO, Time(120)));
        assert_eq!(one.busy(), Time(25));
        assert_eq!(Waits::default().quantile(0.5), Time::ZERO);
    }
}
