//! READ and WRITE: what a client sees of one-sided access, over sizes and depths.
//!
//! Every way of moving bytes (the pool on some NIC, the bare hand-off of [`crate::bare`]) is
//! measured into an [`Outcome`] and reported under the same metrics, so that a ratio between
//! two of them in one run needs no translation:
//!
//! | metric | of |
//! | --- | --- |
//! | `read_latency_us`, `write_latency_us` | from the post to the completion |
//! | `read_rate_per_s`, `write_rate_per_s` | completions over the run's time |
//! | `read_bandwidth_gb_per_s`, `write_bandwidth_gb_per_s` | their bytes over the run's time |

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::bare;
use crate::histogram::Latencies;
use crate::plot::{Axis, Lines};
use crate::record::{Record, Setting, Statistic, Unit, series};
use crate::table::{Pivot, Table};

/// Name of the experiment.
pub const EXPERIMENT: &str = "access";

/// Sizes in bytes that are measured by default: 8 B to 1 MiB.
pub const SIZES: [usize; 9] =
    [8, 64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];

/// Depths that are measured by default: one operation at a time, and as many as fill a queue.
pub const IN_FLIGHT: [usize; 2] = [1, 64];

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the memory node to the client.
    Read,
    /// From the client to the memory node.
    Write,
}

impl Direction {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Read, Self::Write];

    /// How metrics of this direction begin.
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

/// One measurement: what is done, for how long.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Which way the bytes go.
    pub direction: Direction,
    /// Bytes of each operation, above zero.
    pub size: usize,
    /// Operations outstanding at a time, above zero.
    pub in_flight: usize,
    /// Bytes at the memory node over which the operations go round, at least `size`.
    pub region: usize,
    /// For how long, once it is warm.
    pub duration: Duration,
}

impl Spec {
    /// Bytes from one operation's place to the next one's: whole cache lines.
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

/// What came out of one measurement.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Latencies: of each operation one at a time, of a sample with more in flight (reading
    /// the clock twice for each one would be most of the time).
    pub latencies: Latencies,
    /// Operations that completed.
    pub operations: u64,
    /// In this time.
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

    /// The records of `operation`s of `size` bytes in another experiment.
    pub fn records_of(
        &self,
        experiment: &str,
        operation: &str,
        size: usize,
        setting: &Setting,
    ) -> Vec<Record> {
        let of = |what: &str, unit| {
            Record::of(experiment, setting, &format!("{operation}_{what}"), unit)
        };
        let rate = self.operations as f64 / self.elapsed.as_secs_f64();
        let mut records = self.latencies.records(&of("latency_us", Unit::Us));
        records.push(of("rate_per_s", Unit::PerSecond).mean(rate));
        let bandwidth = rate * size as f64 / 1e9;
        records.push(of("bandwidth_gb_per_s", Unit::GbPerSecond).mean(bandwidth));
        records
    }
}

/// Before the clock counts: caches, page tables and the cores' frequency settle.
const WARM_UP: Duration = Duration::from_millis(20);

/// The clock of a measurement: nothing counts until it is warm.
pub(crate) struct Meter {
    duration: Duration,
    start: Instant,
    warm: Instant,
    /// Operations that had completed when it was warm.
    first: Option<u64>,
    outcome: Outcome,
}

impl Meter {
    /// A clock that starts now.
    pub fn start(duration: Duration) -> Self {
        let start = Instant::now();
        let (warm, outcome) = (start + WARM_UP, Outcome::default());
        Self { duration, start, warm, first: None, outcome }
    }

    /// When it started, or began to count.
    pub fn started(&self) -> Instant {
        self.start
    }

    /// `done` operations have completed in all, just now one that was posted at `since`.
    /// Returns the time, or none if the measurement is over.
    pub fn completed(&mut self, since: Instant, done: u64) -> Option<Instant> {
        self.completed_each(since, done, 1)
    }

    /// Like [`Meter::completed`], where `each` operations, one after the other, began at `since`.
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

    /// What was measured.
    pub fn outcome(self) -> Outcome {
        self.outcome
    }
}

/// The tables of a run: one for each direction and depth, with the ratio to the bare hand-off.
pub fn tables(records: &[Record]) -> Vec<(String, Table)> {
    let mut tables = Vec::new();
    for direction in Direction::ALL {
        for (depth, records) in by_depth(records) {
            let latency = direction.metric("latency_us");
            let rate = direction.metric("rate_per_s");
            let bare = Setting::new().scheme(bare::SCHEME).nic(bare::NIC);
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

/// Writes the pictures of a run, one for each direction and depth: the latency of one
/// operation at a time, the bandwidth of more.
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
            let shown = |part: &str| part != bare::NIC;
            let series = series(&records, &metric, statistic, "size", &named, shown);
            for (scheme, points) in series {
                drawn = true;
                lines = if scheme.starts_with(bare::SCHEME) {
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

/// The records of each depth, ascending.
fn by_depth(records: &[Record]) -> Vec<(f64, Vec<Record>)> {
    let mut depths: Vec<f64> =
        records.iter().filter_map(|record| record.setting.number("in_flight")).collect();
    depths.sort_by(f64::total_cmp);
    depths.dedup();
    let of = |depth: f64| {
        let of_depth = |r: &&Record| r.setting.number("in_flight") == Some(depth);
        (depth, records.iter().filter(of_depth).cloned().collect())
    };
    depths.into_iter().map(of).collect()
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
        let of = |metric: &str, size: f64| {
            let found = records
                .iter()
                .find(|r| r.metric == metric && r.setting.number("size") == Some(size));
            found.unwrap().value
        };
        assert_eq!(of("read_rate_per_s", 8.0), 2000.0);
        assert_eq!(of("read_bandwidth_gb_per_s", 4096.0), 2000.0 * 4096.0 / 1e9);
    }

    #[test]
    fn a_table_for_each_depth_with_the_ratio_to_bare() {
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
    fn pictures_of_what_was_measured_only() {
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
