//! The OpenMetrics text page, encoded by the crate `prometheus-client`.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::{Registry, Unit as PageUnit};

use crate::samples::Number;
use crate::{Kind, PREFIX, Sample, Samples, Unit, Value};

/// The label set of samples without labels, and of their missing exemplars.
type NoLabels = [(&'static str, &'static str); 0];

/// Encodes samples as an OpenMetrics page.
///
/// # Errors
/// Only if the encoder fails, which does not happen for a page in memory.
pub fn page(samples: Samples) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix(PREFIX);
    registry.register_collector(Box::new(Page(samples)));
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct Page(Samples);

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let samples: Vec<&Sample> = self.0.iter().collect();
        let is_family = |a: &&Sample, b: &&Sample| {
            // Two metrics may differ only in their units, as a count and a length do.
            (a.metric.name, a.metric.unit) == (b.metric.name, b.metric.unit)
        };
        for family in samples.chunk_by(is_family) {
            let metric = family[0].metric;
            let unit = match metric.unit {
                Unit::Count => None,
                Unit::Bytes => Some(PageUnit::Bytes),
                Unit::Nanoseconds | Unit::Milliseconds => Some(PageUnit::Seconds),
            };
            let kind = match metric.kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
                Kind::Histogram => MetricType::Histogram,
            };
            let mut described =
                encoder.encode_descriptor(metric.name, metric.help, unit.as_ref(), kind)?;
            for sample in family {
                match (&metric.label, &sample.label) {
                    (Some(label), Some(value)) => {
                        let labels = [(label.name, value.as_str())];
                        encode(sample, &mut described.encode_family(&labels)?)?;
                    }
                    _ => encode(sample, &mut described)?,
                }
            }
        }
        Ok(())
    }
}

fn encode(sample: &Sample, to: &mut MetricEncoder<'_>) -> fmt::Result {
    const NONE: Option<&Exemplar<NoLabels, u64>> = None;
    let real = |stored| match sample.reported(stored) {
        Number::Whole(number) => number as f64,
        Number::Real(number) => number,
    };
    match (&sample.value, sample.metric.kind) {
        (Value::Histogram(values), _) => {
            let bounds = values.buckets.iter().map(|(bound, count)| (real(*bound), *count));
            let last = (f64::INFINITY, values.beyond);
            let buckets: Vec<_> = bounds.chain([last]).collect();
            to.encode_histogram::<NoLabels>(real(values.sum), values.count(), &buckets, None)
        }
        (Value::Number(stored), Kind::Counter) => match sample.reported(*stored) {
            Number::Whole(number) => to.encode_counter(&number, NONE),
            Number::Real(number) => to.encode_counter(&number, NONE),
        },
        (Value::Number(stored), _) => match sample.reported(*stored) {
            // The encoder refuses larger integers.
            Number::Whole(number) => match i64::try_from(number) {
                Ok(number) => to.encode_gauge(&number),
                Err(_) => to.encode_gauge(&(number as f64)),
            },
            Number::Real(number) => to.encode_gauge(&number),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Histogram, Metric, counter, gauge, histogram};

    #[test]
    fn page_has_types_units_labels_and_cumulative_buckets() {
        const METRICS: &[Metric] = &[
            counter("t_calls", "Calls.").per("kind", &["a", "b"]),
            gauge("t_size", "Size.").in_unit(Unit::Bytes),
            histogram("t_time", "Time.").in_unit(Unit::Nanoseconds),
        ];
        let mut samples = Samples::default();
        samples.push(&METRICS[0], &[3, 0]);
        samples.push(&METRICS[1], &(1u64 << 60));
        let buckets = vec![(1_000, 2), (2_000, 1)];
        let values = Histogram { sum: 9_000, buckets, beyond: 1 };
        samples.add(&METRICS[2], None, Value::Histogram(values));
        let expected = "\
# HELP granary_t_calls Calls.
# TYPE granary_t_calls counter
granary_t_calls_total{kind=\"a\"} 3
granary_t_calls_total{kind=\"b\"} 0
# HELP granary_t_size_bytes Size.
# TYPE granary_t_size_bytes gauge
# UNIT granary_t_size_bytes bytes
granary_t_size_bytes 1152921504606846976
# HELP granary_t_time_seconds Time.
# TYPE granary_t_time_seconds histogram
# UNIT granary_t_time_seconds seconds
granary_t_time_seconds_sum 0.000009
granary_t_time_seconds_count 4
granary_t_time_seconds_bucket{le=\"0.000001\"} 2
granary_t_time_seconds_bucket{le=\"0.000002\"} 3
granary_t_time_seconds_bucket{le=\"+Inf\"} 4
# EOF
";
        assert_eq!(page(samples).unwrap(), expected);
    }

    #[test]
    fn metrics_that_differ_only_in_their_unit_are_two_families() {
        const METRICS: &[Metric] =
            &[counter("t_maps", "Maps."), counter("t_maps", "Length.").in_unit(Unit::Bytes)];
        let mut samples = Samples::default();
        samples.push(&METRICS[0], &1u64);
        samples.push(&METRICS[1], &4096u64);
        let expected = "\
# HELP granary_t_maps Maps.
# TYPE granary_t_maps counter
granary_t_maps_total 1
# HELP granary_t_maps_bytes Length.
# TYPE granary_t_maps_bytes counter
# UNIT granary_t_maps_bytes bytes
granary_t_maps_bytes_total 4096
# EOF
";
        assert_eq!(page(samples).unwrap(), expected);
    }
}
