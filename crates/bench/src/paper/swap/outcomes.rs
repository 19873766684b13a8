//! Results by point and round, and their records.

use super::{Plan, Point, Swapped, Variant};
use crate::paper::programs::rounds::{Checked, Rounds};
use crate::paper::results::Results;
use bench_report::record::{Setting, Statistic, Unit};

impl Checked for Swapped {
    fn checksum(&self) -> u64 {
        self.program.checksum
    }
}

/// A measured quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quantity {
    Time,
    NodeCpu,
    NodePeak,
    NodeNic,
    Utilization,
    FaultTime,
    Allocations,
}

impl Quantity {
    const ALL: [Self; 7] = [
        Self::Time,
        Self::NodeCpu,
        Self::NodePeak,
        Self::NodeNic,
        Self::Utilization,
        Self::FaultTime,
        Self::Allocations,
    ];

    pub(super) fn of(self, swapped: &Swapped) -> Option<f64> {
        let far = swapped.far.as_ref();
        match self {
            Self::Time => Some(swapped.program.whole_seconds),
            Self::NodeCpu => Some(far?.cpu_seconds),
            Self::NodePeak => Some(far?.cpu_peak),
            Self::NodeNic => Some(far?.nic_seconds),
            Self::Utilization => far?.utilization,
            Self::FaultTime => far?.fault_us,
            Self::Allocations => Some(far?.allocations as f64),
        }
    }

    /// The metric of its records.
    fn metric(self) -> (&'static str, Unit) {
        match self {
            Self::Time => ("time_s", Unit::Seconds),
            Self::NodeCpu => ("node_cpu_s", Unit::Seconds),
            Self::NodePeak => ("node_cpu_peak_ratio", Unit::Ratio),
            Self::NodeNic => ("node_nic_s", Unit::Seconds),
            Self::Utilization => ("utilization_ratio", Unit::Ratio),
            Self::FaultTime => ("fault_us", Unit::Us),
            Self::Allocations => ("allocations", Unit::Count),
        }
    }
}

/// Results of all points.
#[derive(Clone, Debug)]
pub struct Outcomes {
    pub(super) plan: Plan,
    rounds: Rounds<Point, Swapped>,
}

impl Outcomes {
    pub(super) fn new(plan: &Plan) -> Self {
        Self { plan: plan.clone(), rounds: Rounds::default() }
    }

    /// Adds the outcome of a run. All runs of a program with the same data have the same checksum.
    pub(super) fn add(&mut self, point: Point, round: u32, outcome: Result<Swapped, String>) {
        let is_same = |other: &Point| (other.program, other.bytes) == (point.program, point.bytes);
        self.rounds.add(point, round, outcome, is_same);
    }

    pub(super) fn is_missing(&self, point: &Point) -> bool {
        self.rounds.is_missing(point)
    }

    /// Returns true if a program gave a wrong result.
    pub fn has_wrong_result(&self) -> bool {
        self.rounds.has_wrong_result()
    }

    /// One line for each missing result.
    pub fn missing(&self) -> Vec<String> {
        let missing = self.rounds.missing();
        missing.map(|(point, why)| format!("No result of {}: {why}", point.text())).collect()
    }

    /// Median of a quantity over the rounds.
    pub(super) fn median(&self, quantity: Quantity, point: &Point) -> Option<f64> {
        self.rounds.median(point, |swapped| quantity.of(swapped))
    }

    /// Median of a quantity over that of another variant, in the same round.
    pub(super) fn ratio(&self, quantity: Quantity, point: &Point, base: &Point) -> Option<f64> {
        self.rounds.median_over(point, base, |swapped| quantity.of(swapped))
    }

    /// Execution time over that of the plain run.
    pub(super) fn slowdown(&self, point: &Point) -> Option<f64> {
        let plain = self.plan.point(point.program, point.share, Variant::Plain);
        self.ratio(Quantity::Time, point, &plain)
    }

    /// Execution time of a task over that of one task with `static-mr`, as in figure 9.
    pub(super) fn task_slowdown(&self, point: &Point) -> Option<f64> {
        self.ratio(Quantity::Time, point, &self.plan.task_point(1, Variant::StaticMr))
    }

    /// All numbers as records.
    pub fn results(&self) -> Results {
        let mut results = Results::new(super::EXPERIMENT.name, None);
        for point in self.rounds.points() {
            let setting = self.setting(&point);
            for quantity in Quantity::ALL {
                let (metric, unit) = quantity.metric();
                if let Some(value) = self.median(quantity, &point) {
                    let record = results.record(&setting, metric, unit);
                    results.add(point.text(), record.value(Statistic::P50, value));
                }
            }
            let (metric, ratio) = match self.plan.is_task(&point) {
                true => ("time_over_one_task_ratio", self.task_slowdown(&point)),
                false => ("time_over_plain_ratio", self.slowdown(&point)),
            };
            if let Some(ratio) = ratio {
                let record = results.record(&setting, metric, Unit::Ratio);
                results.add(point.text(), record.value(Statistic::P50, ratio));
            }
        }
        results
    }

    fn setting(&self, point: &Point) -> Setting {
        let setting = Setting::new()
            .with("program", point.program.name())
            .scheme(point.variant.name())
            .size(point.bytes)
            .with("tasks", u64::from(point.tasks))
            .with("local_percent", u64::from(point.share));
        match point.variant.scheme(self.plan.memory) {
            Some((_, chunk_bytes)) => setting.nic("shm").with("chunk", chunk_bytes),
            None => setting,
        }
    }
}
