//! Page faults: latency of touching a page that is not resident.
//!
//! The pager and bare userfaultfd (see [`crate::uffd_baseline`]) are measured into the same
//! [`Outcome`] and reported under the same metrics:
//!
//! | pattern | metric | definition |
//! | --- | --- | --- |
//! | `random` | `fault_latency_us` | latency of one faulting touch in the touching thread |
//! | both | `page_time_us` | elapsed time divided by the number of touched pages |

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Error;
use bench_report::histogram::Latencies;
use bench_report::plot::Bars;
use bench_report::record::{BASELINE_NIC, BASELINE_SCHEME, Record, Setting, Statistic, Unit};
use bench_report::table::{Pivot, Table};
use units::PAGE_BYTES;

/// Name of the experiment.
pub const EXPERIMENT: &str = "fault";

/// The order in which pages are touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// All pages in a shuffled order, repeatedly.
    Random,
    /// All pages in ascending order, repeatedly.
    Sequential,
}

impl Pattern {
    /// Both patterns.
    pub const ALL: [Self; 2] = [Self::Random, Self::Sequential];
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Random => "random",
            Self::Sequential => "sequential",
        })
    }
}

/// Parameters of one measurement.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// The order of touches.
    pub pattern: Pattern,
    /// Bytes of memory that are touched.
    pub memory: usize,
    /// Bytes of that memory that may be resident at a time.
    pub local: usize,
    /// Duration without the warm-up.
    pub duration: Duration,
}

impl Spec {
    /// The setting of this measurement's records.
    pub fn setting(&self, scheme: &str, nic: &str) -> Setting {
        Setting::new()
            .scheme(scheme)
            .nic(nic)
            .pattern(&self.pattern.to_string())
            .size(PAGE_BYTES as u64)
            .with("memory", self.memory as u64)
            .with("local", self.local as u64)
    }
}

/// Results of one measurement.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Latencies of the touches; empty for the sequential pattern, in which most touches do not
    /// fault.
    pub latencies: Latencies,
    /// Touched pages.
    pub pages: u64,
    /// Time in which the pages were touched.
    pub elapsed: Duration,
}

impl Outcome {
    /// Adds another round of the same measurement.
    pub fn merge(&mut self, other: &Self) {
        self.latencies.merge(&other.latencies);
        self.pages += other.pages;
        self.elapsed += other.elapsed;
    }

    /// The records of a measurement.
    pub fn records(&self, setting: &Setting) -> Vec<Record> {
        let record = |metric| Record::of(EXPERIMENT, setting, metric, Unit::Us);
        let mut records = self.latencies.records(&record("fault_latency_us"));
        if self.pages > 0 {
            let page_us = self.elapsed.as_secs_f64() * 1e6 / self.pages as f64;
            records.push(record("page_time_us").mean(page_us));
        }
        records
    }
}

/// The tables of a run, with the ratio to bare userfaultfd: latencies of random faults, and time
/// per page of both patterns.
pub fn tables(records: &[Record]) -> Vec<(String, Table)> {
    let bare = Setting::new().scheme(BASELINE_SCHEME).nic(BASELINE_NIC);
    let pivot = || Pivot::rows(["pattern", "scheme", "nic", "memory", "local"]);
    let random = pivot()
        .column("fault_latency_us", Statistic::P50)
        .column("fault_latency_us", Statistic::P99)
        .ratio("fault_latency_us", Statistic::P50, &bare);
    let both = pivot().column("page_time_us", Statistic::Mean).ratio(
        "page_time_us",
        Statistic::Mean,
        &bare,
    );
    vec![
        ("Faults".to_owned(), random.table(records)),
        ("Time per page".to_owned(), both.table(records)),
    ]
}

/// Writes the picture of a run: the time per page by pattern and scheme.
///
/// # Errors
/// As [`Bars::write`].
pub fn pictures(records: &[Record], directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let shown: Vec<&Record> = records.iter().filter(|r| r.metric == "page_time_us").collect();
    let text = |record: &Record, key: &str| record.setting.get(key).map(ToString::to_string);
    let mut schemes: Vec<String> = Vec::new();
    for scheme in shown.iter().filter_map(|record| text(record, "scheme")) {
        if !schemes.contains(&scheme) {
            schemes.push(scheme);
        }
    }
    let mut bars = Bars::new(
        "Paging, 4 KiB at a time",
        "time per page (us)",
        schemes.iter().map(String::as_str),
    );
    for pattern in Pattern::ALL.map(|pattern| pattern.to_string()) {
        let value = |scheme: &String| {
            let found = shown.iter().find(|record| {
                text(record, "pattern").as_ref() == Some(&pattern)
                    && text(record, "scheme").as_ref() == Some(scheme)
            });
            found.map(|record| record.value)
        };
        // A group of bars needs a value of every scheme.
        if let Some(values) = schemes.iter().map(value).collect::<Option<Vec<f64>>>() {
            bars = bars.group(&pattern, values);
        }
    }
    if shown.is_empty() {
        return Ok(Vec::new());
    }
    Ok(bars.write(directory, EXPERIMENT)?.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> Vec<Record> {
        let mut records = Vec::new();
        for pattern in Pattern::ALL {
            let duration = Duration::from_millis(10);
            let spec = Spec { pattern, memory: 64 << 20, local: 16 << 20, duration };
            for (scheme, nic, latency_us) in [("bare", "none", 8), ("onesidedmw", "shm", 10)] {
                let mut latencies = Latencies::new();
                if pattern == Pattern::Random {
                    latencies.record(Duration::from_micros(latency_us));
                }
                let elapsed = Duration::from_micros(latency_us * 1000);
                let outcome = Outcome { latencies, pages: 1000, elapsed };
                records.extend(outcome.records(&spec.setting(scheme, nic)));
            }
        }
        records
    }

    #[test]
    fn tables_have_the_ratio_to_the_baseline() {
        let tables = tables(&run());
        for (title, table) in &tables {
            let text = table.to_string();
            let ours = text.lines().find(|line| line.contains("onesidedmw")).unwrap();
            assert!(ours.ends_with("1.25"), "{title}\n{text}");
        }
        assert!(!tables[0].1.to_string().contains("sequential"), "{}", tables[0].1);
    }

    #[test]
    fn picture_shows_patterns_and_schemes() {
        let directory = tempfile::tempdir().unwrap();
        assert!(pictures(&[], directory.path()).unwrap().is_empty());
        let files = pictures(&run(), directory.path()).unwrap();
        let svg = std::fs::read_to_string(&files[0]).unwrap();
        for text in ["random", "sequential", "bare", "onesidedmw"] {
            assert!(svg.contains(text), "{text} is missing");
        }
    }
}
