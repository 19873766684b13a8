//! Applications with requests of mixed sizes (FineMem §6.3): their request sizes (figure 13) and
//! their allocation latencies (figure 14).

use std::path::PathBuf;

use super::microbench::{NODES, contenders};
use crate::Error;
use crate::paper::experiment::{Canvas, Experiment};
use crate::paper::load::{Load, Work};
use crate::paper::results::Results;
use crate::paper::traces::{HELD_BYTES, Replay, TRACES, Trace};
use crate::paper::{Extent, Run};
use bench_report::plot::Bars;
use bench_report::record::{Setting, Statistic, Unit};
use units::Size;

/// Figure 14.
pub const TRACES_REPLAYED: Experiment = Experiment {
    name: "traces",
    title: "Requests of mixed sizes from traces (§6.3, figures 13 and 14); each thread frees its \
            oldest block when it holds 4 MiB",
    claims: &[],
    steps: |run| contenders(run).count() * traces(run).len(),
    run: replay,
    draw,
};

const PAGE: u64 = 4096;

fn traces(run: &Run<'_>) -> &'static [Trace] {
    match run.extent {
        Extent::Full => &TRACES,
        Extent::Quick => &TRACES[2..4],
    }
}

fn replay(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    for trace in traces(run) {
        sizes(results, trace);
    }
    let (threads, requests) = match (run.testbed.simulated(), run.extent) {
        // 16 nodes of 8 threads (§6.3).
        (true, Extent::Full) => (128, 50),
        (true, Extent::Quick) => (16, 20),
        (false, Extent::Full) => (2, 1000),
        (false, Extent::Quick) => (2, 20),
    };
    for contender in contenders(run) {
        let name = contender.name;
        for trace in traces(run) {
            let load = Load {
                compute_nodes: NODES.min(threads as u16),
                threads,
                ..Load::new(contender.scheme, Work::Replay(Replay { trace, requests }), 1)
            };
            let outcome = run.load(&format!("{name}, {}", trace.name), &load)?;
            let setting = run.setting(name).with("trace", trace.name);
            let setting = setting.with("threads", u64::from(threads)).with("held", HELD_BYTES);
            let builder = results.record(&setting, "alloc_latency_us", Unit::Us);
            let (statistic, us) = run.typical(&outcome.allocate);
            let what = |quantity: &str| format!("{name}, {}: {quantity}", trace.name);
            results.add(what(&format!("allocation, {statistic}")), builder.value(statistic, us));
            let p99 = builder.value(Statistic::P99, outcome.allocate.quantile_us(0.99));
            results.add(what("allocation, p99"), p99);
            let late = results.record(&setting, "late_us", Unit::Us);
            let late = late.value(Statistic::Max, outcome.late.max_us());
            results.add(what("delay of the last thread behind its trace"), late);
        }
    }
    Ok(())
}

/// Figure 13. The request sizes depend on the trace alone, not on the scheme.
fn sizes(results: &mut Results, trace: &Trace) {
    let orders = trace.orders();
    let total: u64 = orders.iter().sum();
    let setting = Setting::new().with("trace", trace.name);
    for (order, count) in orders.iter().enumerate().filter(|(_, count)| **count > 0) {
        let size = PAGE << order;
        let setting = setting.clone().size(size);
        let record = results.record(&setting, "requests_ratio", Unit::Ratio);
        let record = record.mean(*count as f64 / total as f64);
        results.add(format!("{}, requests for {}", trace.name, Size(size)), record);
    }
}

fn draw(results: &Results, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    let text = |setting: &Setting, key: &str| setting.get(key).map(ToString::to_string);
    let mut names: Vec<String> = Vec::new();
    let mut schemes: Vec<String> = Vec::new();
    for record in results.records() {
        for (key, known) in [("trace", &mut names), ("scheme", &mut schemes)] {
            if let Some(name) = text(&record.setting, key).filter(|name| !known.contains(name)) {
                known.push(name);
            }
        }
    }
    let value = |metric: &str, statistic, fits: &dyn Fn(&Setting) -> bool| {
        results.find(metric, statistic, fits).unwrap_or(0.0)
    };
    let mut files = Vec::new();
    for (statistic, rest, which) in [
        (results.typical(), "latency", "typical"),
        (Statistic::P99, "p99", "99th percentile of the"),
    ] {
        let title = "Allocations of mixed sizes (figure 14)";
        let label = format!("{which} latency (us)");
        let mut bars = Bars::new(title, &label, schemes.iter().map(String::as_str));
        for name in &names {
            let latency = |scheme: &String| {
                value("alloc_latency_us", statistic, &|s| {
                    text(s, "trace").as_ref() == Some(name)
                        && text(s, "scheme").as_ref() == Some(scheme)
                })
            };
            bars = bars.group(name, schemes.iter().map(latency));
        }
        let bars = bars.subtitle(canvas.subtitle);
        files.extend(bars.write(canvas.directory, &canvas.file(rest))?);
    }
    let labels = ["4 KiB", "8 to 32 KiB", "64 KiB to 1 MiB", "2 MiB"];
    let mut bars =
        Bars::new("Request sizes of the traces (figure 13)", "share of requests", labels);
    for name in &names {
        let share = |from: u64, to: u64| -> f64 {
            let within = |s: &Setting| {
                text(s, "trace").as_ref() == Some(name)
                    && s.number("size").is_some_and(|b| b >= from as f64 && b <= to as f64)
            };
            let ratios = results.records().filter(|r| r.metric == "requests_ratio");
            ratios.filter(|r| within(&r.setting)).map(|r| r.value).sum()
        };
        let shares = [
            share(PAGE, PAGE),
            share(PAGE << 1, PAGE << 3),
            share(PAGE << 4, PAGE << 8),
            share(PAGE << 9, PAGE << 9),
        ];
        bars = bars.group(name, shares);
    }
    let bars = bars.subtitle("from the traces alone");
    files.extend(bars.write(canvas.directory, &canvas.file("sizes"))?);
    Ok(files)
}
