//! Pictures of stores.

use std::path::PathBuf;

use crate::Error;
use crate::paper::experiment::Canvas;
use crate::paper::results::Results;
use bench_report::plot::{Axis, Lines};
use bench_report::record::{Record, Statistic};
use units::Size;

/// A picture: a metric with its axis.
struct Picture {
    metric: &'static str,
    statistic: Statistic,
    label: &'static str,
    rest: &'static str,
    is_log: bool,
}

const RATE: Picture = Picture {
    metric: "rate_per_s",
    statistic: Statistic::Mean,
    label: "operations per second",
    rest: "rate",
    is_log: false,
};
const P99: Picture = Picture {
    metric: "latency_us",
    statistic: Statistic::P99,
    label: "99th percentile of the latency (us)",
    rest: "p99",
    is_log: true,
};
const CPU: Picture = Picture {
    metric: "node_cpu_ratio",
    statistic: Statistic::Mean,
    label: "memory node's CPU (cores)",
    rest: "cpu",
    is_log: false,
};
const RETURNED: Picture = Picture {
    metric: "returned_ratio",
    statistic: Statistic::Mean,
    label: "share of the memory given back",
    rest: "returned",
    is_log: false,
};

fn text(record: &Record, key: &str) -> String {
    record.setting.get(key).map(ToString::to_string).unwrap_or_default()
}

fn number(record: &Record, key: &str) -> u64 {
    record.setting.number(key).unwrap_or_default() as u64
}

/// Draws one picture with a line for each name.
fn draw(
    records: &[&Record],
    picture: &Picture,
    title: &str,
    x: Axis,
    across: &str,
    name: impl Fn(&Record) -> String,
    canvas: &Canvas<'_>,
) -> Result<Vec<PathBuf>, Error> {
    let y = if picture.is_log { Axis::log(picture.label) } else { Axis::linear(picture.label) };
    let mut lines = Lines::new(title, x, y).subtitle(canvas.subtitle);
    let mut all: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    let shown = |r: &&&Record| r.metric == picture.metric && r.statistic == picture.statistic;
    for record in records.iter().filter(shown) {
        let Some(at) = record.setting.number(across) else { continue };
        let (name, point) = (name(record), (at, record.value));
        match all.iter_mut().find(|(other, _)| *other == name) {
            Some((_, points)) => points.push(point),
            None => all.push((name, vec![point])),
        }
    }
    for (name, points) in all {
        lines = match name.starts_with("onesidedmw") {
            true => lines.line(&name, points),
            false => lines.baseline(&name, points),
        };
    }
    Ok(lines.write(canvas.directory, &canvas.file(picture.rest))?.into())
}

/// The pictures of figure 6: one of each metric for each workload and size of blocks. Static-MR,
/// whose chunks are far larger, is a point at its own size.
///
/// # Errors
/// As [`bench_report::plot`].
pub fn sizes(results: &Results, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    let records: Vec<&Record> =
        results.records().filter(|r| r.setting.get("workload").is_some()).collect();
    let mut groups: Vec<(String, u64)> = Vec::new();
    for record in &records {
        let group = (text(record, "workload"), number(record, "block"));
        if !groups.contains(&group) {
            groups.push(group);
        }
    }
    let mut files = Vec::new();
    for (workload, block) in groups {
        let of = |r: &&&Record| {
            text(r, "workload") == workload
                && number(r, "block") == block
                && r.setting.get("over").is_none()
        };
        let records: Vec<&Record> = records.iter().filter(of).copied().collect();
        let title = format!("{workload}, blocks of {}", Size(block));
        let name = canvas.file(&format!("{workload}-{block}"));
        let canvas = Canvas { name: &name, ..*canvas };
        for picture in [&RATE, &P99, &CPU, &RETURNED] {
            let x = Axis::bytes("size of a chunk");
            let scheme = |r: &Record| text(r, "scheme");
            files.extend(draw(&records, picture, &title, x, "chunk", scheme, &canvas)?);
        }
    }
    Ok(files)
}

/// The pictures of figure 7.
///
/// # Errors
/// As [`bench_report::plot`].
pub fn scale(results: &Results, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    let records: Vec<&Record> = results.records().collect();
    let mut files = Vec::new();
    for picture in [&RATE, &P99, &CPU] {
        let x = Axis::linear("threads");
        let name = |r: &Record| format!("{}, {}", text(r, "scheme"), Size(number(r, "chunk")));
        let title = "Inserts, blocks of 1KiB";
        files.extend(draw(&records, picture, title, x, "threads", name, canvas)?);
    }
    Ok(files)
}
