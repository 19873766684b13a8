//! Pictures of results, in the form of the papers' figures.

use std::path::PathBuf;

use super::experiment::Canvas;
use super::results::Results;
use crate::Error;
use bench_report::plot::{Axis, Bars, Lines};
use bench_report::record::{Record, Statistic};

/// Draws groups of bars: one group per scheme, one bar per number of threads.
///
/// # Errors
/// As [`bench_report::plot`].
pub fn bars(
    results: &Results,
    metric: &str,
    title: &str,
    shown: impl Fn(&str) -> bool,
    canvas: &Canvas<'_>,
) -> Result<Vec<PathBuf>, Error> {
    let typical = results.typical();
    let records: Vec<&Record> = results
        .records()
        .filter(|r| r.metric == metric && r.statistic == typical)
        .filter(|r| r.setting.get("pause").is_none() && r.setting.get("between").is_none())
        .collect();
    let mut threads: Vec<u64> = Vec::new();
    let mut schemes: Vec<String> = Vec::new();
    for record in &records {
        let scheme = text(record, "scheme");
        if shown(&scheme) && !schemes.contains(&scheme) {
            schemes.push(scheme);
        }
        let count = record.setting.number("threads").unwrap_or(1.0) as u64;
        if !threads.contains(&count) {
            threads.push(count);
        }
    }
    let labels: Vec<String> = threads
        .iter()
        .map(|n| if *n == 1 { "1 thread".into() } else { format!("{n} threads") })
        .collect();
    let mut bars = Bars::new(title, &label(typical, "latency"), labels.iter().map(String::as_str));
    for scheme in &schemes {
        let value = |count: &u64| {
            let found = records.iter().find(|r| {
                text(r, "scheme") == *scheme && r.setting.number("threads") == Some(*count as f64)
            });
            found.map_or(0.0, |r| r.value)
        };
        bars = bars.group(scheme, threads.iter().map(value));
    }
    Ok(bars.subtitle(canvas.subtitle).write(canvas.directory, canvas.name)?.into())
}

/// Draws READ latency over the number of QPs that carry chains.
///
/// # Errors
/// As [`bench_report::plot`].
pub fn chain_queues(results: &Results, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    let x = Axis::linear("queue pairs of the memory node that carry chains");
    let typical = results.typical();
    let lines = Lines::new("READ of 4 KiB", x, Axis::linear(&label(typical, "latency")));
    let points = points(results.records(), "read_latency_us", typical, "chain_queues");
    let lines = lines.subtitle(canvas.subtitle).line("READ", points);
    Ok(lines.write(canvas.directory, canvas.name)?.into())
}

/// Draws the time of registration over the size.
///
/// # Errors
/// As [`bench_report::plot`].
pub fn registration(results: &Results, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    let bytes = Axis::bytes("size of the region");
    let typical = results.typical();
    let lines = Lines::new("Registration of memory", bytes, Axis::log(&label(typical, "time")));
    let points = points(results.records(), "register_us", typical, "size");
    let bind = results.find("bind_us", typical, |_| true).unwrap_or_default();
    let lines = lines.line("register a region", points).paper("bind a window of 4 MiB", bind);
    Ok(lines.subtitle(canvas.subtitle).write(canvas.directory, canvas.name)?.into())
}

/// The quantity that a picture of lines shows.
#[derive(Clone, Copy, Debug)]
pub struct Series {
    /// The metric.
    pub metric: &'static str,
    /// The statistic of the metric.
    pub statistic: Statistic,
    /// The key of the setting on the x axis.
    pub across: &'static str,
    /// Prefix of the names of our own schemes, which have solid lines.
    pub ours: &'static str,
}

/// Draws one line per scheme over the values of a setting.
///
/// # Errors
/// As [`bench_report::plot`].
pub fn lines(
    results: &Results,
    series: &Series,
    title: &str,
    x: Axis,
    canvas: &Canvas<'_>,
) -> Result<Vec<PathBuf>, Error> {
    let Series { metric, statistic, across, ours } = *series;
    let y = Axis::log(&match metric {
        "alloc_rate_per_s" => "allocations per second".to_owned(),
        _ if metric.ends_with("_per_s") => "operations per second".to_owned(),
        _ => label(statistic, "latency"),
    });
    let mut lines = Lines::new(title, x, y);
    for scheme in &schemes(results) {
        let records = results.records().filter(|r| text(r, "scheme") == *scheme);
        let points = points(records, metric, statistic, across);
        lines = match scheme.starts_with(ours) {
            true => lines.line(scheme, points),
            false => lines.baseline(scheme, points),
        };
    }
    Ok(lines.subtitle(canvas.subtitle).write(canvas.directory, canvas.name)?.into())
}

/// Draws throughput and P99 over the number of clients.
///
/// # Errors
/// As [`bench_report::plot`].
pub fn scalability(results: &Results, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    for (metric, statistic, title, rest) in [
        ("alloc_rate_per_s", Statistic::Mean, "Allocations, each with its free", "rate"),
        ("alloc_latency_us", Statistic::P99, "Allocation, 99th percentile", "p99"),
    ] {
        let series = Series { metric, statistic, across: "clients", ours: "onesidedmw" };
        let name = canvas.file(rest);
        let canvas = Canvas { name: &name, ..*canvas };
        files.extend(lines(results, &series, title, Axis::linear("clients"), &canvas)?);
    }
    Ok(files)
}

fn schemes(results: &Results) -> Vec<String> {
    let mut schemes: Vec<String> = Vec::new();
    for record in results.records() {
        let scheme = text(record, "scheme");
        if !schemes.contains(&scheme) {
            schemes.push(scheme);
        }
    }
    schemes
}

fn label(statistic: Statistic, what: &str) -> String {
    let which = match statistic {
        Statistic::Mean => "mean",
        Statistic::P99 => "99th percentile of the",
        _ => "median",
    };
    format!("{which} {what} (us)")
}

fn points<'a>(
    records: impl Iterator<Item = &'a Record>,
    metric: &str,
    statistic: Statistic,
    across: &str,
) -> Vec<(f64, f64)> {
    records
        .filter(|r| r.metric == metric && r.statistic == statistic)
        .filter_map(|r| Some((r.setting.number(across)?, r.value)))
        .collect()
}

fn text(record: &Record, key: &str) -> String {
    record.setting.get(key).map(ToString::to_string).unwrap_or_default()
}
