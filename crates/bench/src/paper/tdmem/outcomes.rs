//! Results by point and round, and their records.

use super::{Part, Plan, Point, System};
use crate::paper::programs::rounds::Rounds;
use crate::paper::programs::{Measured, Program, workload};
use crate::paper::results::Results;
use bench_report::record::{Setting, Statistic, Unit};
use units::PAGE_BYTES;

/// Results of all points.
#[derive(Clone, Debug)]
pub struct Outcomes {
    pub(super) plan: Plan,
    rounds: Rounds<Point, Measured>,
}

fn seconds(measured: &Measured) -> Option<f64> {
    Some(measured.seconds)
}

impl Outcomes {
    pub(super) fn new(plan: &Plan) -> Self {
        Self { plan: plan.clone(), rounds: Rounds::default() }
    }

    /// Adds the outcome of a run. All runs of a program have the same checksum.
    pub(super) fn add(&mut self, point: Point, round: u32, outcome: Result<Measured, String>) {
        self.rounds.add(point, round, outcome, |other| other.program == point.program);
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

    /// Median over the rounds of the time of the computation.
    pub(super) fn seconds(&self, point: &Point) -> Option<f64> {
        self.rounds.median(point, seconds)
    }

    /// Performance over that of another point in the same round: the quotient of the times.
    pub(super) fn performance(&self, point: &Point, base: &Point) -> Option<f64> {
        self.rounds.median_over(base, point, seconds)
    }

    /// Performance over the plain run.
    pub(super) fn over_plain(&self, point: &Point) -> Option<f64> {
        self.performance(point, &point.of(System::Plain))
    }

    /// Share of the performance that a point lacks against Fastswap.
    pub(super) fn loss(&self, point: &Point) -> Option<f64> {
        Some(1.0 - self.performance(point, &point.of(System::Fastswap))?)
    }

    /// Bandwidth of the triads in MB/s.
    pub(super) fn bandwidth(&self, point: &Point) -> Option<f64> {
        let bytes = workload::triad_bytes(Program::Triad.bytes(self.plan.memory));
        Some(bytes as f64 / self.seconds(point)? / 1e6)
    }

    /// Time of a page of sequential loads in microseconds.
    pub(super) fn page_us(&self, point: &Point) -> Option<f64> {
        let pages = Program::Sequential.bytes(self.plan.memory) / PAGE_BYTES as u64;
        Some(self.seconds(point)? * 1e6 / pages as f64)
    }

    /// Geometric mean of the performance over plain, of workloads that have a result on all
    /// systems. Otherwise the systems would be compared by different workloads.
    pub(super) fn geomean(&self, workloads: &[(Program, u32)], system: System) -> Option<f64> {
        let of = |(program, share): (Program, u32), system| {
            self.over_plain(&Point::new(Part::Programs, program, share, system))
        };
        let is_whole = |workload| System::REMOTE.iter().all(|s| of(workload, *s).is_some());
        let whole = workloads.iter().filter(|workload| is_whole(**workload));
        let logs: Vec<f64> = whole.filter_map(|w| of(*w, system)).map(f64::ln).collect();
        let mean = logs.iter().sum::<f64>() / logs.len() as f64;
        (!logs.is_empty()).then(|| mean.exp())
    }

    /// All numbers as records.
    pub fn results(&self) -> Results {
        let mut all = Results::default();
        for point in self.rounds.points() {
            let mut results = Results::new(point.part.experiment().name, None);
            let setting = self.setting(&point);
            let sealed = point.system.unsealed() != point.system;
            let over_unsealed = || self.performance(&point, &point.of(point.system.unsealed()));
            let numbers = match point.part {
                Part::Crypt => continue,
                Part::Sequential => [
                    ("page_us", Unit::Us, self.page_us(&point)),
                    ("over_plain_ratio", Unit::Ratio, over_unsealed().filter(|_| sealed)),
                ],
                Part::Stream => [
                    ("triad_mb_per_s", Unit::MbPerSecond, self.bandwidth(&point)),
                    ("loss_ratio", Unit::Ratio, self.loss(&point)),
                ],
                Part::Programs => [
                    ("time_s", Unit::Seconds, self.seconds(&point)),
                    ("performance_ratio", Unit::Ratio, self.over_plain(&point)),
                ],
            };
            for (metric, unit, value) in numbers {
                if let Some(value) = value {
                    let record = results.record(&setting, metric, unit);
                    results.add(point.text(), record.value(Statistic::P50, value));
                }
            }
            all.rows.extend(results.rows);
        }
        all
    }

    fn setting(&self, point: &Point) -> Setting {
        Setting::new()
            .with("program", point.program.name())
            .with("system", point.system.name())
            .size(point.program.bytes(self.plan.memory))
            .with("local_percent", u64::from(point.share))
    }
}
