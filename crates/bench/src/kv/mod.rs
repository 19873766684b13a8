//! Key-value stores: latency, rate, round trips and memory of stores and servers under the same
//! workloads.
//!
//! ```text
//!   workload.rs, zipf.rs    requests of a lane
//!      │
//!      ▼
//!   Target ── store.rs      a store of this process, with threads as lanes
//!       └──── server.rs     a server, with connections as lanes
//!               └── protocol/ RESP and memcached's text protocol
//!      │ Outcome
//!      ▼
//!   records, tables and pictures (this file)
//! ```
//!
//! | metric | definition |
//! | --- | --- |
//! | `latency_us` | of each operation; with a pipeline, from the write of its batch to its reply |
//! | `read_latency_us`, `insert_…`, `update_…`, `modify_…`, `delete_…` | the same, of one kind of request |
//! | `rate_per_s` | operations per second |
//! | `round_trips` | waits for remote memory, per operation |
//! | `miss_ratio` | reads and deletions of a key that was not there, over all reads and deletions |
//! | `cache_hit_ratio` | values read from the value cache, over all values read |
//! | `held_bytes` | bytes of the chunks held after the workload |
//! | `held_over_payload_ratio` | `held_bytes` over the bytes of all keys and values |
//! | `returned_ratio` | after `deleterandom`: chunks given back, over the chunks held before |

pub mod protocol;
pub mod server;
pub mod store;
pub mod workload;
pub mod zipf;

use std::path::{Path, PathBuf};
use std::time::Duration;

use self::workload::{KEY_BYTES, Keys, Kind, Plan, Workload};
use crate::Error;
use bench_report::histogram::Latencies;
use bench_report::plot::{Axis, Lines};
use bench_report::record::{Record, Setting, Statistic, Unit, series};
use bench_report::table::{Pivot, Table};

/// Name of the experiment.
pub const EXPERIMENT: &str = "kv";
/// Sizes of values in bytes that are measured by default.
pub const SIZES: [u64; 1] = [1 << 10];
/// Number of keys by default.
pub const KEYS: u64 = 100_000;

/// A system under a workload.
pub trait Target {
    /// Runs the workload once.
    ///
    /// # Errors
    /// Errors of the store or of the server.
    fn run(&mut self, plan: &Plan) -> Result<Outcome, Error>;

    /// Deletes the keys with numbers below `keys`.
    ///
    /// # Errors
    /// As [`Target::run`].
    fn clear(&mut self, keys: u64, plan: &Plan) -> Result<(), Error>;
}

/// Runs workloads on a target, one after the other. `there`: the keys of the target at first. Keys
/// that a workload needs are written before it, and keys that must not be there are deleted before
/// it; neither is measured.
///
/// # Errors
/// As [`Target::run`].
pub fn run_all(
    target: &mut dyn Target,
    plans: &[Plan],
    mut there: Keys,
    mut each: impl FnMut(usize, Outcome),
) -> Result<(), Error> {
    let mut most = if there == Keys::None { 0 } else { plans.first().map_or(0, |p| p.keys) };
    for (at, plan) in plans.iter().enumerate() {
        let needed = plan.workload.needs();
        // Keys that ycsb-d has added make the data larger than the next workload expects.
        if there != needed || most > plan.keys {
            if there != Keys::None && (needed == Keys::None || most > plan.keys) {
                target.clear(most, plan)?;
                most = 0;
            }
            if needed == Keys::All {
                target.run(&plan.loading())?;
            }
        }
        each(at, target.run(plan)?);
        there = plan.workload.leaves();
        most = most.max(plan.workload.keys_max(plan.keys, plan.operations));
    }
    Ok(())
}

/// Bytes by use, around a workload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Bytes of the chunks held before.
    pub held_before: u64,
    /// Bytes of the chunks held after.
    pub held_after: u64,
    /// Bytes of all keys and values after.
    pub payload: u64,
}

/// Reads of values of a store with a value cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheReads {
    /// Values that the cache had.
    pub hits: u64,
    /// Values that were read in remote memory.
    pub misses: u64,
}

/// Results of one or more rounds of a workload.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    latencies: [Latencies; Kind::ALL.len()],
    /// Completed operations.
    pub operations: u64,
    /// Reads and deletions that found no key.
    pub misses: u64,
    /// Time in which the operations completed.
    pub elapsed: Duration,
    /// Waits for remote memory. `None` of a server.
    pub round_trips: Option<u64>,
    /// Reads of values. `None` without a value cache.
    pub cache: Option<CacheReads>,
    /// Memory of the last round. `None` of a server.
    pub memory: Option<Memory>,
}

impl Outcome {
    /// Adds an operation.
    pub fn record(&mut self, kind: Kind, latency: Duration) {
        self.latencies[kind as usize].record(latency);
        self.operations += 1;
    }

    /// Latencies of one kind of request.
    pub fn latencies(&self, kind: Kind) -> &Latencies {
        &self.latencies[kind as usize]
    }

    /// Adds the operations of a lane that ran at the same time.
    pub fn join(&mut self, other: &Self) {
        for (mine, other) in self.latencies.iter_mut().zip(&other.latencies) {
            mine.merge(other);
        }
        self.operations += other.operations;
        self.misses += other.misses;
        self.elapsed = self.elapsed.max(other.elapsed);
    }

    /// Adds another round.
    pub fn merge(&mut self, other: &Self) {
        let elapsed = self.elapsed + other.elapsed;
        self.join(other);
        self.elapsed = elapsed;
        let trips = self.round_trips.unwrap_or_default();
        self.round_trips = other.round_trips.map(|others| trips + others);
        let reads = self.cache.unwrap_or_default();
        self.cache = other.cache.map(|others| CacheReads {
            hits: reads.hits + others.hits,
            misses: reads.misses + others.misses,
        });
        self.memory = other.memory;
    }

    /// Operations per second.
    pub fn rate_per_s(&self) -> f64 {
        self.operations as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// The records.
    pub fn records(&self, workload: Workload, setting: &Setting) -> Vec<Record> {
        let metric = |name: &str, unit| Record::of(EXPERIMENT, setting, name, unit);
        let mut records = Vec::new();
        let mut latencies = |name: &str, of: &Latencies| {
            let builder = metric(name, Unit::Us);
            records.extend(of.records(&builder));
            if of.count() > 0 {
                records.push(builder.value(Statistic::P999, of.quantile_us(0.999)));
            }
        };
        let mut all = Latencies::new();
        self.latencies.iter().for_each(|kind| all.merge(kind));
        latencies("latency_us", &all);
        let kinds = Kind::ALL.iter().filter(|kind| self.latencies(**kind).count() > 0);
        if kinds.clone().count() > 1 {
            for kind in kinds {
                latencies(&format!("{}_latency_us", kind.name()), self.latencies(*kind));
            }
        }
        records.push(metric("rate_per_s", Unit::PerSecond).mean(self.rate_per_s()));
        let operations = self.operations.max(1) as f64;
        if let Some(trips) = self.round_trips {
            records.push(metric("round_trips", Unit::Count).mean(trips as f64 / operations));
        }
        let of = |kind| self.latencies(kind).count();
        let looked = of(Kind::Read) + of(Kind::Delete);
        if looked > 0 {
            let misses = self.misses as f64 / looked as f64;
            records.push(metric("miss_ratio", Unit::Ratio).mean(misses));
        }
        if let Some(CacheReads { hits, misses }) = self.cache.filter(|r| r.hits + r.misses > 0) {
            let hits = hits as f64 / (hits + misses) as f64;
            records.push(metric("cache_hit_ratio", Unit::Ratio).mean(hits));
        }
        if let Some(memory) = &self.memory {
            let held = memory.held_after as f64;
            records.push(metric("held_bytes", Unit::Bytes).mean(held));
            let ratio = |name: &str, value| metric(name, Unit::Ratio).mean(value);
            let payload = memory.payload.max(1) as f64;
            records.push(ratio("held_over_payload_ratio", held / payload));
            if workload == Workload::DeleteRandom {
                let returned = 1.0 - held / memory.held_before.max(1) as f64;
                records.push(ratio("returned_ratio", returned));
            }
        }
        records
    }
}

/// Bytes of all keys and values.
pub fn payload_bytes(keys: u64, value_bytes: usize) -> u64 {
    keys * (KEY_BYTES + value_bytes) as u64
}

/// Keys of the setting that make the rows of tables.
const ROWS: [&str; 10] = [
    "workload",
    "scheme",
    "nic",
    "form",
    "index",
    "cache",
    "threads",
    "clients",
    "size",
    "in_flight",
];

/// The tables of a run: all requests, requests by kind of the mixes, memory.
pub fn tables(records: &[Record]) -> Vec<(String, Table)> {
    let all = Pivot::rows(ROWS)
        .column("rate_per_s", Statistic::Mean)
        .column("latency_us", Statistic::P50)
        .column("latency_us", Statistic::P99)
        .column("latency_us", Statistic::P999)
        .column("round_trips", Statistic::Mean)
        .column("miss_ratio", Statistic::Mean)
        .column("cache_hit_ratio", Statistic::Mean);
    let mut kinds = Pivot::rows(ROWS);
    for kind in Kind::ALL {
        let metric = format!("{}_latency_us", kind.name());
        kinds = kinds.column(&metric, Statistic::P50).column(&metric, Statistic::P99);
    }
    let memory = Pivot::rows(ROWS)
        .column("held_bytes", Statistic::Mean)
        .column("held_over_payload_ratio", Statistic::Mean)
        .column("returned_ratio", Statistic::Mean);
    vec![
        ("Operations".into(), all.table(records)),
        ("Latency by kind of request".into(), kinds.table(records)),
        ("Memory after the workload".into(), memory.table(records)),
    ]
}

/// Writes the pictures of a run: rate over the size of a value, one picture per workload. A
/// workload with a single size makes no picture.
///
/// # Errors
/// As [`Lines::write`].
pub fn pictures(records: &[Record], directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    for workload in Workload::ALL {
        let of = |r: &&Record| {
            r.setting.get("workload").is_some_and(|name| name.to_string() == workload.name())
        };
        let records: Vec<Record> = records.iter().filter(of).cloned().collect();
        let named = ["scheme", "nic", "form", "index", "cache", "threads", "clients", "in_flight"];
        let series = series(&records, "rate_per_s", Statistic::Mean, "size", &named, |_| true);
        if series.iter().all(|(_, points)| points.len() < 2) {
            continue;
        }
        let x = Axis::bytes("size of a value");
        let mut lines = Lines::new(workload.name(), x, Axis::log("operations per second"));
        for (name, points) in series {
            lines = lines.line(&name, points);
        }
        files.extend(lines.write(directory, &format!("{EXPERIMENT}-{}", workload.name()))?);
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes the workloads that run, and the keys that are there.
    #[derive(Default)]
    struct Noted(Vec<String>);

    impl Target for Noted {
        fn run(&mut self, plan: &Plan) -> Result<Outcome, Error> {
            self.0.push(plan.workload.name().into());
            Ok(Outcome::default())
        }

        fn clear(&mut self, keys: u64, _: &Plan) -> Result<(), Error> {
            self.0.push(format!("clear {keys}"));
            Ok(())
        }
    }

    fn noted(workloads: &[Workload]) -> Vec<String> {
        let plan = |workload: &Workload| Plan::new(*workload, 10, 5, 1, 1);
        let plans: Vec<Plan> = workloads.iter().map(plan).collect();
        let mut target = Noted::default();
        run_all(&mut target, &plans, Keys::None, |_, _| ()).unwrap();
        target.0
    }

    #[test]
    fn keys_are_there_when_a_workload_needs_them() {
        use Workload::*;
        assert_eq!(noted(&[FillSync, ReadRandom, YcsbA]), ["fillsync", "readrandom", "ycsb-a"]);
        assert_eq!(
            noted(&[FillRandom, DeleteRandom, FillSync]),
            ["fillrandom", "fillsync", "deleterandom", "clear 10", "fillsync"]
        );
        assert_eq!(
            noted(&[YcsbD, YcsbC]),
            ["fillsync", "ycsb-d", "clear 15", "fillsync", "ycsb-c"]
        );
    }

    fn outcome(us: u64) -> Outcome {
        let mut outcome = Outcome { elapsed: Duration::from_secs(1), ..Outcome::default() };
        for _ in 0..1000 {
            outcome.record(Kind::Read, Duration::from_micros(us));
            outcome.record(Kind::Update, Duration::from_micros(2 * us));
        }
        outcome.round_trips = Some(3000);
        outcome.cache = Some(CacheReads { hits: 600, misses: 200 });
        outcome.memory = Some(Memory { held_before: 100, held_after: 30, payload: 20 });
        outcome
    }

    #[test]
    fn records_are_per_operation_and_over_all_rounds() {
        let mut merged = outcome(5);
        merged.merge(&outcome(5));
        let setting = Setting::new().with("workload", "ycsb-a").size(8);
        let records = merged.records(Workload::DeleteRandom, &setting);
        let value = |metric: &str, statistic| {
            let found = records.iter().find(|r| r.metric == metric && r.statistic == statistic);
            found.unwrap_or_else(|| panic!("no {metric}")).value
        };
        assert_eq!(value("rate_per_s", Statistic::Mean), 2000.0);
        assert_eq!(value("round_trips", Statistic::Mean), 1.5);
        assert_eq!(merged.cache, Some(CacheReads { hits: 1200, misses: 400 }));
        assert_eq!(value("cache_hit_ratio", Statistic::Mean), 0.75);
        assert_eq!(value("held_over_payload_ratio", Statistic::Mean), 1.5);
        assert!((value("returned_ratio", Statistic::Mean) - 0.7).abs() < 1e-9);
        assert!((value("read_latency_us", Statistic::P999) - 5.0).abs() < 0.1);
        assert!((value("update_latency_us", Statistic::P50) - 10.0).abs() < 0.1);
        let titles: Vec<String> = tables(&records)
            .into_iter()
            .filter(|(_, table)| !table.is_empty())
            .map(|(title, _)| title)
            .collect();
        assert_eq!(
            titles,
            ["Operations", "Latency by kind of request", "Memory after the workload"]
        );
    }

    #[test]
    fn picture_needs_two_sizes() {
        let directory = tempfile::tempdir().unwrap();
        let mut records = Vec::new();
        for (workload, sizes) in [(Workload::YcsbA, &[8, 64][..]), (Workload::YcsbB, &[8])] {
            for size in sizes {
                let setting = Setting::new().with("workload", workload.name()).size(*size);
                records.extend(outcome(5).records(workload, &setting));
            }
        }
        let files = pictures(&records, directory.path()).unwrap();
        let names: Vec<_> = files.iter().map(|f| f.file_name().unwrap()).collect();
        assert_eq!(names, ["kv-ycsb-a.svg", "kv-ycsb-a.png"]);
    }
}
