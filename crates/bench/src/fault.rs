//! Page faults: what a program sees when it touches a page that is not here.
//!
//! The pager and bare userfaultfd (see [`crate::bare_fault`]) are measured into the same
//! [`Outcome`] and reported under the same metrics:
//!
//! | pattern | metric | of |
//! | --- | --- | --- |
//! | `random` | `fault_latency_us` | one touch that faults, as the touching thread sees it |
//! | both | `page_time_us` | the run's time over the pages that were touched |

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::bare;
use crate::histogram::Latencies;
use crate::plot::Bars;
use crate::record::{Record, Setting, Statistic, Unit};
use crate::table::{Pivot, Table};

/// Name of the experiment.
pub const EXPERIMENT: &str = "fault";
/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// The order in which pages are touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// Each page once in a shuffled order, then again.
    Random,
    /// Ascending, then from the start again.
    Sequential,
}

impl Pattern {
    /// Both.
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

/// One measurement: what is touched, for how long.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// The order of touches.
    pub pattern: Pattern,
    /// Bytes that the touches go over.
    pub memory: usize,
    /// Bytes of it that are here at a time.
    pub local: usize,
    /// For how long, once it is warm.
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

/// What came out of one measurement.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Latencies of the touches that fault; empty where most touches do not.
    pub latencies: Latencies,
    /// Pages that were touched.
    pub pages: u64,
    /// In this time.
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
        let of = |metric| Record::of(EXPERIMENT, setting, metric, Unit::Us);
        let mut records = self.latencies.records(&of("fault_latency_us"));
        if self.pages > 0 {
            let page_us = self.elapsed.as_secs_f64() * 1e6 / self.pages as f64;
            records.push(of("page_time_us").mean(page_us));
        }
        records
    }
}

/// The tables of a run: one for each pattern, with the ratio to bare userfaultfd.
pub fn tables(records: &[Record]) -> Vec<(String, Table)> {
    let bare = Setting::new().scheme(bare::SCHEME).nic(bare::NIC);
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
        ("Time for each page".to_owned(), both.table(records)),
    ]
}

/// Writes the picture of a run: the time for each page by pattern and scheme.
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
        "time for each page (us)",
        schemes.iter().map(String::as_str),
    );
    for pattern in Pattern::ALL.map(|pattern| pattern.to_string()) {
        let of = |scheme: &String| {
            let found = shown.iter().find(|record| {
                text(record, "pattern").as_ref() == Some(&pattern)
                    && text(record, "scheme").as_ref() == Some(scheme)
            });
            found.map(|record| record.value)
        };
        // A pattern that only some were measured with would be a group with gaps.
        if let Some(values) = schemes.iter().map(of).collect::<Option<Vec<f64>>>() {
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
    fn tables_have_the_ratio_to_bare() {
        let tables = tables(&run());
        for (title, table) in &tables {
            let text = table.to_string();
            let ours = text.lines().find(|line| line.contains("onesidedmw")).unwrap();
            assert!(ours.ends_with("1.25"), "{title}\n{text}");
        }
        assert!(!tables[0].1.to_string().contains("sequential"), "{}", tables[0].1);
    }

    #[test]
    fn one_picture() {
        let directory = tempfile::tempdir().unwrap();
        assert!(pictures(&[], directory.path()).unwrap().is_empty());
        let files = pictures(&run(), directory.path()).unwrap();
        let svg = std::fs::read_to_string(&files[0]).unwrap();
        for text in ["random", "sequential", "bare", "onesidedmw"] {
            assert!(svg.contains(text), "{text} is missing");
        }
    }
}
