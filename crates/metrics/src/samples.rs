//! Values of metrics at one time, and their forms: text, JSON, and plain numbers for a protocol.

use std::collections::BTreeMap;

use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::{Kind, Metric};

/// A value with its declaration.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The declaration.
    pub metric: &'static Metric,
    /// The value of the metric's label, if it has one.
    pub label: Option<String>,
    /// The value, in the unit in which it is stored.
    pub value: Value,
}

/// A value in the unit in which it is stored.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Of a counter or gauge.
    Number(u64),
    /// Of a histogram.
    Histogram(Histogram),
}

/// A distribution.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// Sum of all values.
    pub sum: u64,
    /// Upper bound and number of values of each bucket, in rising order. Larger values are in
    /// `beyond`.
    pub buckets: Vec<(u64, u64)>,
    /// Number of values above the last bucket.
    pub beyond: u64,
}

impl Histogram {
    /// Number of values.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|(_, count)| count).sum::<u64>() + self.beyond
    }
}

/// A number of a report.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// In the stored unit.
    Whole(u64),
    /// Converted from the stored unit.
    Real(f64),
}

impl Sample {
    /// A stored number in the unit of reports.
    pub(crate) fn reported(&self, stored: u64) -> Number {
        match self.metric.unit.divisor() {
            1 => Number::Whole(stored),
            divisor => Number::Real(stored as f64 / divisor as f64),
        }
    }

    /// The full name with the label.
    pub fn key(&self) -> String {
        let name = self.metric.full_name();
        match (&self.metric.label, &self.label) {
            (Some(label), Some(value)) => format!("{name}{{{}=\"{value}\"}}", label.name),
            _ => name,
        }
    }

    /// The entries of this sample in a report: one, or two for a histogram.
    fn entries(&self) -> Vec<(String, Number)> {
        match &self.value {
            Value::Number(stored) => vec![(self.key(), self.reported(*stored))],
            Value::Histogram(values) => vec![
                (format!("{}_count", self.key()), Number::Whole(values.count())),
                (format!("{}_sum", self.key()), self.reported(values.sum)),
            ],
        }
    }
}

/// Values of metrics, in the order of the report. Serialises as an object of names and numbers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Samples(Vec<Sample>);

impl Samples {
    /// Adds the value of a field.
    pub fn push(&mut self, metric: &'static Metric, field: &(impl Measured + ?Sized)) {
        field.measure(metric, self);
    }

    /// Adds a sample.
    pub fn add(&mut self, metric: &'static Metric, label: Option<String>, value: Value) {
        self.0.push(Sample { metric, label, value });
    }

    /// Adds the samples of another report.
    pub fn extend(&mut self, others: Self) {
        self.0.extend(others.0);
    }

    /// All samples.
    pub fn iter(&self) -> impl Iterator<Item = &Sample> {
        self.0.iter()
    }

    /// Numbers by full name, for a protocol. Histograms are left out.
    pub fn numbers(&self) -> BTreeMap<String, u64> {
        let number = |sample: &Sample| match sample.value {
            Value::Number(number) => Some((sample.key(), number)),
            Value::Histogram(_) => None,
        };
        self.0.iter().filter_map(number).collect()
    }

    /// Adds numbers from [`Samples::numbers`] of another process, for the metrics that `declared`
    /// contains. Other names are ignored: the process has another release.
    pub fn add_numbers(&mut self, declared: &'static [Metric], numbers: &BTreeMap<String, u64>) {
        for metric in declared.iter().filter(|metric| metric.kind != Kind::Histogram) {
            let name = metric.full_name();
            let Some(label) = &metric.label else {
                if let Some(number) = numbers.get(&name) {
                    self.add(metric, None, Value::Number(*number));
                }
                continue;
            };
            let start = format!("{name}{{{}=\"", label.name);
            for (key, number) in numbers.range(start.clone()..) {
                let Some(rest) = key.strip_prefix(&start) else { break };
                let value = rest.trim_end_matches("\"}").to_owned();
                self.add(metric, Some(value), Value::Number(*number));
            }
        }
    }

    /// One line for each number that is not zero: its name and its value.
    pub fn lines(&self) -> Vec<String> {
        let entries = self.0.iter().flat_map(Sample::entries);
        let line = |(name, number)| match number {
            Number::Whole(0) => None,
            Number::Whole(number) => Some(format!("{name} {number}")),
            Number::Real(number) => (number != 0.0).then(|| format!("{name} {number:.3}")),
        };
        entries.filter_map(line).collect()
    }
}

impl Serialize for Samples {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (name, number) in self.0.iter().flat_map(Sample::entries) {
            match number {
                Number::Whole(number) => map.serialize_entry(&name, &number)?,
                Number::Real(number) => map.serialize_entry(&name, &number)?,
            }
        }
        map.end()
    }
}

/// A type of a field that has a metric.
pub trait Measured {
    /// Adds the value as a sample or several.
    fn measure(&self, metric: &'static Metric, to: &mut Samples);
}

impl Measured for u64 {
    fn measure(&self, metric: &'static Metric, to: &mut Samples) {
        to.add(metric, None, Value::Number(*self));
    }
}

impl Measured for u32 {
    fn measure(&self, metric: &'static Metric, to: &mut Samples) {
        u64::from(*self).measure(metric, to);
    }
}

/// No sample if there is no value.
impl<T: Measured> Measured for Option<T> {
    fn measure(&self, metric: &'static Metric, to: &mut Samples) {
        if let Some(value) = self {
            value.measure(metric, to);
        }
    }
}

/// One sample for each named element, and one for the sum of the others.
impl<const N: usize> Measured for [u64; N] {
    fn measure(&self, metric: &'static Metric, to: &mut Samples) {
        let values = metric.label.map_or(&[][..], |label| label.values);
        let name = |index: usize| values.get(index).copied().unwrap_or_default();
        let mut other = None;
        for (index, number) in self.iter().enumerate() {
            match name(index) {
                "" => *other.get_or_insert(0) += number,
                name => to.add(metric, Some(name.into()), Value::Number(*number)),
            }
        }
        if let Some(other) = other {
            to.add(metric, Some("other".into()), Value::Number(other));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Declared, Unit, counter, declare, gauge};

    struct Counters {
        time_ns: u64,
        by_kind: [u64; 4],
        limit: Option<u64>,
        _name: String,
    }

    declare! {
        Counters {
            time_ns: counter("t_cpu", "CPU time.").in_unit(Unit::Nanoseconds),
            by_kind: counter("t_calls", "Calls.").per("kind", &["a", "", "b"]),
            limit: gauge("t_limit", "Limit."),
        } except { _name }
    }

    fn samples(limit: Option<u64>) -> Samples {
        let mut samples = Samples::default();
        let by_kind = [1, 2, 3, 4];
        Counters { time_ns: 1_500_000_000, by_kind, limit, _name: String::new() }
            .sample(&mut samples);
        samples
    }

    #[test]
    fn text_and_json_have_converted_values_and_labels() {
        let samples = samples(Some(0));
        assert_eq!(
            samples.lines(),
            [
                "granary_t_cpu_seconds_total 1.500",
                "granary_t_calls_total{kind=\"a\"} 1",
                "granary_t_calls_total{kind=\"b\"} 3",
                "granary_t_calls_total{kind=\"other\"} 6",
            ]
        );
        let json = serde_json::to_value(&samples).unwrap();
        assert_eq!(json["granary_t_cpu_seconds_total"], 1.5);
        assert_eq!(json["granary_t_limit"], 0);
        assert_eq!(json["granary_t_calls_total{kind=\"other\"}"], 6);
    }

    #[test]
    fn numbers_of_another_process_give_the_same_samples() {
        let sent = samples(None);
        let mut received = Samples::default();
        let mut numbers = sent.numbers();
        numbers.insert("granary_of_another_release_total".into(), 1);
        received.add_numbers(Counters::METRICS, &numbers);
        assert_eq!(received, sent);
    }
}
