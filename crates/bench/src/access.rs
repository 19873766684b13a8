//! READ and WRITE: latency, rate and bandwidth of one-sided access over sizes and queue depths.
//!
//! Every data path (the pool on some NIC, the bare hand-off of [`crate::handoff`]) is measured into
//! an [`Outcome`] and reported under the same metrics, so that the results can be compared
//! directly:
//!
//! | metric | definition |
//! | --- | --- |
//! | `read_latency_us`, `write_latency_us` | from the post to the completion |
//! | `read_rate_per_s`, `write_rate_per_s` | completions per second |
//! | `read_bandwidth_gb_per_s`, `write_bandwidth_gb_per_s` | bytes of completed operations per second |

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::Error;
use bench_report::histogram::Latencies;
use bench_report::plot::{Axis, Lines};
use bench_report::record::{
    BASELINE_NIC, BASELINE_SCHEME, Record, Setting, Statistic, Unit, series,
};
use bench_report::table::{Pivot, Table};

/// Name of the experiment.
pub const EXPERIMENT: &str = "access";

/// Sizes in bytes that are measured by default: 8 B to 1 MiB.
pub const SIZES: [usize; 9] =
    [8, 64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];

/// Queue depths that are measured by default: a single operation, and a full queue.
pub const IN_FLIGHT: [usize; 2] = [1, 64];

/// Direction of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the memory node to the client.
    Read,
    /// From the client to the memory node.
    Write,
}

impl Direction {
    /// Both directions.
    pub const ALL: [Self; 2] = [Self::Read, Self::Write];

    /// Prefix of the metrics of this direction.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }

    fn metric(self, what: &str) -> String {
        format!("{}_{what}", self.name())
    }
}

/// Parameters of one measurement.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Direction of the data.
    pub direction: Direction,
    /// Bytes of each operation, above zero.
    pub size: usize,
    /// Operations in flight, above zero.
    pub in_flight: usize,
    /// Bytes at the memory node that the operations cycle through, at least `size`.
    pub region: usize,
    /// Duration without the warm-up.
    pub duration: Duration,
}

impl Spec {
    /// Distance in bytes between the slots of two operations: whole cache lines.
    pub fn stride(&self) -> usize {
        self.size.next_multiple_of(64)
    }

    /// The setting of this measurement's records.
    pub fn setting(&self, scheme: &str, nic: &str) -> Setting {
        Setting::new()
            .scheme(scheme)
            .nic(nic)
            .clients(1)
            .size(self.size as u64)
            .in_flight(self.in_flight as u64)
    }
}

/// Results of one measurement.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Latencies: of every operation with one in flight, of a sample with more in flight. Two
    /// clock readings per operation would dominate the time of small operations.
    pub latencies: Latencies,
    /// Completed operations.
    pub operations: u64,
    /// Time in which the operations completed.
    pub elapsed: Duration,
}

impl Outcome {
    /// Adds another round of the same measurement.
    pub fn merge(&mut self, other: &Self) {
        self.latencies.merge(&other.latencies);
        self.operations += other.operations;
        self.elapsed += other.elapsed;
    }

    /// The records of a measurement.
    pub fn records(&self, spec: &Spec, setting: &Setting) -> Vec<Record> {
        self.records_of(EXPERIMENT, spec.direction.name(), spec.size, setting)
    }

    /// The records of another experiment, with operations named `operation` of `size` bytes.
    pub fn records_of(
        &self,
        experiment: &str,
        operation: &str,
        size: usize,
        setting: &Setting,
    ) -> Vec<Record> {
        let metric = |what: &str, unit| {
            Record::of(experiment, setting, &format!("{operation}_{what}"), unit)
        };
        let rate = self.operations as f64 / self.elapsed.as_secs_f64();
        let mut records = self.latencies.records(&metric("latency_us", Unit::Us));
        records.push(metric("rate_per_s", Unit::PerSecond).mean(rate));
        let bandwidth = rate * size as f64 / 1e9;
        records.push(metric("bandwidth_gb_per_s", Unit::GbPerSecond).mean(bandwidth));
        records
    }
}

/// Duration of the warm-up, in which caches, page tables and the cores' frequency settle.
const WARM_UP: Duration = Duration::from_millis(20);

/// Clock and counters of a measurement. Operations during the warm-up do not count.
pub(crate) struct Meter {
    duration: Duration,
    start: Instant,
    /// End of the warm-up.
    warm: Instant,
    /// Operations that had completed at the end of the warm-up; `None` during the warm-up.
    first: Option<u64>,
    outcome: Outcome,
}

impl Meter {
    /// Starts the warm-up now.
    pub fn start(duration: Duration) -> Self {
        let start = Instant::now();
        let (warm, outcome) = (start + WARM_UP, Outcome::default());
        Self { duration, start, warm, first: None, outcome }
    }

    /// Start of the warm-up, or of the counted part once the warm-up is over.
    pub fn started(&self) -> Instant {
        self.start
    }

    /// Records that the `done`th operation has completed now; it was posted at `since`. Returns the
    /// current time, or `None` if the measurement is over.
    pub fn completed(&mut self, since: Instant, done: u64) -> Option<Instant> {
        self.completed_each(since, done, 1)
    }

    /// Like [`Meter::completed`], for `each` consecutive operations of which the first was posted
    /// at `since`.
    pub fn completed_each(&mut self, since: Instant, done: u64, each: u32) -> Option<Instant> {
        let now = Instant::now();
        let Some(first) = self.first else {
            if now >= self.warm {
                self.first = Some(done);
                self.start = now;
            }
            return Some(now);
        };
        self.outcome.latencies.record((now - since) / each);
        if now < self.start + self.duration {
            return Some(now);
        }
        self.outcome.operations = done - first;
        self.outcome.elapsed = now - self.start;
        None
    }

    /// The results.
    pub fn outcome(self) -> Outcome {
        self.outcome
    }
}

/// The tables of a run: one per direction and depth, with the ratio to the bare hand-off.
pub fn tables(records: &[Record]) -> Vec<(String, Table)> {
    let mut tables = Vec::new();
    for direction in Direction::ALL {
        for (depth, records) in by_depth(records) {
            let latency = direction.metric("latency_us");
            let rate = direction.metric("rate_per_s");
            let bare = Setting::new().scheme(BASELINE_SCHEME).nic(BASELINE_NIC);
            let pivot = Pivot::rows(["size", "scheme", "nic", "clients"])
                .column(&latency, Statistic::P50)
                .column(&latency, Statistic::P99)
                .column(&rate, Statistic::Mean)
                .column(&direction.metric("bandwidth_gb_per_s"), Statistic::Mean);
            let pivot = if depth == 1.0 {
                pivot.ratio(&latency, Statistic::P50, &bare)
            } else {
                pivot.ratio(&rate, Statistic::Mean, &bare)
            };
            let title = format!("{}, {depth} in flight", direction.name().to_uppercase());
            tables.push((title, pivot.table(&records)));
        }
    }
    tables
}

/// Writes the pictures of a run, one per direction and depth: latency with one operation in
/// flight, bandwidth with more.
///
/// # Errors
/// As [`Lines::write`].
pub fn pictures(records: &[Record], directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    for direction in Direction::ALL {
        for (depth, records) in by_depth(records) {
            let (metric, statistic, label, name) = if depth == 1.0 {
                (direction.metric("latency_us"), Statistic::P50, "median latency (us)", "latency")
            } else {
                let metric = direction.metric("bandwidth_gb_per_s");
                (metric, Statistic::Mean, "bandwidth (GB/s)", "bandwidth")
            };
            let title = format!("{}, {depth} in flight", direction.name().to_uppercase());
            let mut lines =
                Lines::new(&title, Axis::bytes("size of one operation"), Axis::log(label));
            let mut drawn = false;
            let named = ["scheme", "nic"];
            let shown = |part: &str| part != BASELINE_NIC;
            let series = series(&records, &metric, statistic, "size", &named, shown);
            for (scheme, points) in series {
                drawn = true;
                lines = if scheme.starts_with(BASELINE_SCHEME) {
                    lines.baseline(&scheme, points)
                } else {
                    lines.line(&scheme, points)
                };
            }
            if drawn {
                let name = format!("{EXPERIMENT}-{}-{name}-{depth}", direction.name());
                files.extend(lines.write(directory, &name)?);
            }
        }
    }
    Ok(files)
}

/// The records of each depth, in ascending order of depths.
fn by_depth(records: &[Record]) -> Vec<(f64, Vec<Record>)> {
    let mut depths: Vec<f64> =
        records.iter().filter_map(|record| record.setting.number("in_flight")).collect();
    depths.sort_by(f64::total_cmp);
    depths.dedup();
    let group = |depth: f64| {
        let has_depth = |r: &&Record| r.setting.number("in_flight") == Some(depth);
        (depth, records.iter().filter(has_depth).cloned().collect())
    };
    depths.into_iter().map(group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(latency_us: u64, operations: u64) -> Outcome {
        let mut latencies = Latencies::new();
        latencies.record(Duration::from_micros(latency_us));
        Outcome { latencies, operations, elapsed: Duration::from_secs(2) }
    }

    fn run() -> Vec<Record> {
        let mut records = Vec::new();
        for in_flight in IN_FLIGHT {
            for size in [8, 4096] {
                let spec = Spec {
                    direction: Direction::Read,
                    size,
                    in_flight,
                    region: 1 << 20,
                    duration: Duration::from_secs(2),
                };
                let bare = spec.setting("bare", "none");
                let ours = spec.setting("onesidedmw", "shm");
                records.extend(outcome(2, 4000).records(&spec, &bare));
                records.extend(outcome(3, 1000).records(&spec, &ours));
            }
        }
        records
    }

    #[test]
    fn rate_and_bandwidth_are_over_the_elapsed_time() {
        let records = run();
        let value = |metric: &str, size: f64| {
            let found = records
                .iter()
                .find(|r| r.metric == metric && r.setting.number("size") == Some(size));
            found.unwrap().value
        };
        assert_eq!(value("read_rate_per_s", 8.0), 2000.0);
        assert_eq!(value("read_bandwidth_gb_per_s", 4096.0), 2000.0 * 4096.0 / 1e9);
    }

    #[test]
    fn tables_per_depth_have_the_ratio_to_the_baseline() {
        let tables: Vec<_> =
            tables(&run()).into_iter().filter(|(_, table)| !table.is_empty()).collect();
        let titles: Vec<&str> = tables.iter().map(|(title, _)| title.as_str()).collect();
        assert_eq!(titles, ["READ, 1 in flight", "READ, 64 in flight"]);
        let last_column = |at: usize, row: usize| {
            let text = tables[at].1.to_string();
            text.lines().nth(3 + row).unwrap().split_whitespace().last().unwrap().to_owned()
        };
        assert_eq!((last_column(0, 0), last_column(0, 1)), ("1.00".into(), "1.50".into()));
        assert_eq!((last_column(1, 0), last_column(1, 1)), ("1.00".into(), "0.250".into()));
    }

    #[test]
    fn pictures_are_drawn_for_measured_directions_only() {
        let directory = tempfile::tempdir().unwrap();
        let files = pictures(&run(), directory.path()).unwrap();
        let names: Vec<_> =
            files.iter().map(|f| f.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(
            names,
            [
                "access-read-latency-1.svg",
                "access-read-latency-1.png",
                "access-read-bandwidth-64.svg",
                "access-read-bandwidth-64.png"
            ]
        );
    }
}
