//! Latencies: an HDR histogram of nanoseconds, and its reduction to records.
//!
//! The histogram keeps three significant digits from 1 ns to 100 s. A longer latency counts as
//! 100 s, so that no latency is missing from the maximum and the percentiles.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::record::{Record, RecordBuilder, Statistic};

/// Longest latency of the histogram, in nanoseconds.
const LATENCY_NS_MAX: u64 = 100_000_000_000;

/// A histogram of latencies. Serialized as a list of pairs: nanoseconds, and the number of
/// latencies with that value.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

impl Serialize for Latencies {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let steps = self.0.iter_recorded();
        serializer.collect_seq(steps.map(|s| (s.value_iterated_to(), s.count_at_value())))
    }
}

impl<'de> Deserialize<'de> for Latencies {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut latencies = Self::new();
        for (ns, count) in Vec::<(u64, u64)>::deserialize(deserializer)? {
            latencies.0.saturating_record_n(ns.min(LATENCY_NS_MAX), count);
        }
        Ok(latencies)
    }
}

impl Default for Latencies {
    fn default() -> Self {
        Self::new()
    }
}

impl Latencies {
    /// An empty histogram.
    pub fn new() -> Self {
        Self(
            Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3)
                .expect("1 ns to 100 s with three digits is a valid range"),
        )
    }

    /// Adds one latency.
    pub fn record(&mut self, latency: Duration) {
        self.record_ns(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds one latency in nanoseconds.
    pub fn record_ns(&mut self, latency_ns: u64) {
        self.0.saturating_record(latency_ns.min(LATENCY_NS_MAX));
    }

    /// Adds all latencies of another histogram, e.g. of another client.
    pub fn merge(&mut self, other: &Latencies) {
        self.0.add(&other.0).expect("both histograms have the same bounds");
    }

    /// Number of recorded latencies.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The mean in microseconds.
    pub fn mean_us(&self) -> f64 {
        self.0.mean() / 1e3
    }

    /// The latency in microseconds that a share (0 to 1) of all latencies does not exceed.
    pub fn quantile_us(&self, share: f64) -> f64 {
        assert!((0.0..=1.0).contains(&share), "a quantile is between 0 and 1, not {share}");
        self.0.value_at_quantile(share) as f64 / 1e3
    }

    /// The largest in microseconds.
    pub fn max_us(&self) -> f64 {
        self.0.max() as f64 / 1e3
    }

    /// Mean, median, 99th percentile and maximum as records. The builder's unit must be
    /// microseconds; an empty histogram gives no record.
    pub fn records(&self, builder: &RecordBuilder) -> Vec<Record> {
        if self.count() == 0 {
            return Vec::new();
        }
        vec![
            builder.value(Statistic::Mean, self.mean_us()),
            builder.value(Statistic::P50, self.quantile_us(0.5)),
            builder.value(Statistic::P99, self.quantile_us(0.99)),
            builder.value(Statistic::Max, self.max_us()),
        ]
    }

    /// The cumulative distribution: pairs of a latency in microseconds and the share of latencies
    /// up to that value, ascending, one pair per occurring value.
    pub fn cdf(&self) -> Vec<(f64, f64)> {
        let total = self.count() as f64;
        let mut seen = 0;
        self.0
            .iter_recorded()
            .map(|step| {
                seen += step.count_since_last_iteration();
                (step.value_iterated_to() as f64 / 1e3, seen as f64 / total)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::record::{Setting, Unit};

    #[test]
    fn records_match_a_known_distribution() {
        let mut latencies = Latencies::new();
        for us in 1..=1000 {
            latencies.record(Duration::from_micros(us));
        }
        let builder = Record::of("x", &Setting::new(), "read_latency_us", Unit::Us);
        let records = latencies.records(&builder);
        let expected = [
            (Statistic::Mean, 500.5),
            (Statistic::P50, 500.0),
            (Statistic::P99, 990.0),
            (Statistic::Max, 1000.0),
        ];
        assert_eq!(records.len(), expected.len());
        for (record, (statistic, value)) in records.iter().zip(expected) {
            assert_eq!(record.statistic, statistic);
            let off = (record.value - value).abs() / value;
            assert!(off < 2e-3, "{statistic}: {} is not {value}", record.value);
        }
    }

    #[test]
    fn empty_histogram_has_no_records() {
        let builder = Record::of("x", &Setting::new(), "read_latency_us", Unit::Us);
        assert!(Latencies::new().records(&builder).is_empty());
        assert!(Latencies::new().cdf().is_empty());
    }

    #[test]
    fn overlong_latency_counts_as_the_longest() {
        let mut latencies = Latencies::new();
        latencies.record(Duration::MAX);
        assert_eq!(latencies.count(), 1);
        assert!(latencies.max_us() >= LATENCY_NS_MAX as f64 / 1e3);
    }

    proptest! {
        #[test]
        fn merged_histograms_equal_one_histogram(
            a in prop::collection::vec(1u64..10_000_000, 1..50),
            b in prop::collection::vec(1u64..10_000_000, 1..50),
        ) {
            let mut parts = [Latencies::new(), Latencies::new()];
            let mut whole = Latencies::new();
            for (part, values) in parts.iter_mut().zip([&a, &b]) {
                for &ns in values {
                    part.record_ns(ns);
                    whole.record_ns(ns);
                }
            }
            let [mut first, second] = parts;
            first.merge(&second);
            prop_assert_eq!(first.cdf(), whole.cdf());
            let text = serde_json::to_string(&whole).unwrap();
            let read: Latencies = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(read.cdf(), whole.cdf());
            let cdf = whole.cdf();
            prop_assert!(cdf.is_sorted_by(|x, y| x.0 < y.0 && x.1 < y.1));
            prop_assert_eq!(cdf.last().unwrap().1, 1.0);
        }
    }
}
