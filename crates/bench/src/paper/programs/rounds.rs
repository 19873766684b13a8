//! Results of programs by point and round.

use std::collections::BTreeMap;

/// Begin of the reason of a missing result whose checksum is wrong.
const WRONG: &str = "wrong result";

/// A result with the checksum of its program.
pub trait Checked {
    /// Checksum of the program's result.
    fn checksum(&self) -> u64;
}

/// Results by point and round, and the reasons of missing results.
#[derive(Clone, Debug)]
pub struct Rounds<P, M> {
    measured: BTreeMap<P, BTreeMap<u32, M>>,
    missing: BTreeMap<P, String>,
}

impl<P, M> Default for Rounds<P, M> {
    /// No results.
    fn default() -> Self {
        Self { measured: BTreeMap::new(), missing: BTreeMap::new() }
    }
}

impl<P: Ord + Copy, M: Checked> Rounds<P, M> {
    /// Adds the outcome of a run. A checksum that differs from that of the first result of a point
    /// with the same computation makes the result wrong.
    pub fn add(
        &mut self,
        point: P,
        round: u32,
        outcome: Result<M, String>,
        is_same: impl Fn(&P) -> bool,
    ) {
        let measured = match outcome {
            Ok(measured) => measured,
            Err(why) => {
                self.missing.insert(point, why);
                return;
            }
        };
        let mut same = self.measured.iter().filter(|(other, _)| is_same(other));
        let first = same.find_map(|(_, rounds)| rounds.values().next()).map(Checked::checksum);
        if let Some(first) = first.filter(|first| *first != measured.checksum()) {
            let checksum = measured.checksum();
            let why =
                format!("{WRONG}: checksum {checksum:x} instead of {first:x}; report this bug");
            self.missing.insert(point, why);
            return;
        }
        self.measured.entry(point).or_default().insert(round, measured);
    }

    /// Returns true if a point has no result.
    pub fn is_missing(&self, point: &P) -> bool {
        self.missing.contains_key(point)
    }

    /// Points without a result, with the reasons.
    pub fn missing(&self) -> impl Iterator<Item = (P, &str)> {
        self.missing.iter().map(|(point, why)| (*point, why.as_str()))
    }

    /// Returns true if a program gave a wrong result.
    pub fn has_wrong_result(&self) -> bool {
        self.missing.values().any(|why| why.starts_with(WRONG))
    }

    /// Points with a result.
    pub fn points(&self) -> impl Iterator<Item = P> {
        self.measured.keys().copied()
    }

    /// Median of a value over the rounds.
    pub fn median(&self, point: &P, value: impl Fn(&M) -> Option<f64>) -> Option<f64> {
        median(self.measured.get(point)?.values().filter_map(value).collect())
    }

    /// Median over the rounds of a value divided by that of another point in the same round.
    pub fn median_over(
        &self,
        point: &P,
        base: &P,
        value: impl Fn(&M) -> Option<f64>,
    ) -> Option<f64> {
        let (rounds, bases) = (self.measured.get(point)?, self.measured.get(base)?);
        let quotient = |(round, measured): (&u32, &M)| {
            let base = value(bases.get(round)?).filter(|base| *base > 0.0)?;
            Some(value(measured)? / base)
        };
        median(rounds.iter().filter_map(quotient).collect())
    }
}

/// The median; `None` without values.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        len if len % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Result(f64, u64);

    impl Checked for Result {
        fn checksum(&self) -> u64 {
            self.1
        }
    }

    fn value(result: &Result) -> Option<f64> {
        Some(result.0)
    }

    #[test]
    fn quotient_has_both_numbers_from_the_same_round() {
        let mut rounds = Rounds::default();
        for (round, (one, two)) in [(1.0, 2.0), (10.0, 20.0), (100.0, 700.0)].iter().enumerate() {
            rounds.add('a', round as u32, Ok(Result(*one, 7)), |_| true);
            rounds.add('b', round as u32, Ok(Result(*two, 7)), |_| true);
        }
        assert_eq!(rounds.median(&'b', value), Some(20.0));
        assert_eq!(rounds.median_over(&'b', &'a', value), Some(2.0));
        assert_eq!(rounds.median(&'c', value), None);
        assert_eq!(median(vec![4.0, 1.0]), Some(2.5));
    }

    #[test]
    fn other_checksum_of_the_same_computation_is_wrong() {
        let mut rounds = Rounds::default();
        rounds.add(('a', 1), 0, Ok(Result(1.0, 7)), |other| other.0 == 'a');
        rounds.add(('b', 1), 0, Ok(Result(1.0, 8)), |other| other.0 == 'b');
        assert!(!rounds.has_wrong_result());
        rounds.add(('a', 2), 0, Ok(Result(1.0, 8)), |other| other.0 == 'a');
        assert!(rounds.has_wrong_result() && rounds.is_missing(&('a', 2)));
        assert_eq!(rounds.median(&('a', 2), value), None);
        let (point, why) = rounds.missing().next().unwrap();
        assert_eq!(point, ('a', 2));
        assert!(why.contains("checksum 8 instead of 7"), "{why}");
    }
}
