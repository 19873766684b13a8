//! The concurrent queue over producers and over the size of a segment (Patronus §7.3.2, figure 10).

use std::path::PathBuf;

use pool::schemes;

use super::contenders::{
    COMPUTE_NODES, CORES, Choice, Contender, PATRONUS, PATRONUS_2, PATRONUS_MR, THREADS,
    add_latency, clients, setting,
};
use super::queue_work::QueueWork;
use crate::Error;
use crate::paper::experiment::{Canvas, Experiment};
use crate::paper::load::{Load, Work};
use crate::paper::picture::{Series, lines};
use crate::paper::results::Results;
use crate::paper::{Extent, Run, count};
use bench_report::plot::Axis;
use bench_report::record::{Statistic, Unit};

/// Figure 10.
pub const EXPERIMENT: Experiment = Experiment {
    name: "queue",
    title: "Concurrent queue: inserts by producers and by segment size (§7.3.2, figure 10)",
    claims: &["patronus.over.mr", "patronus.over.mr.low", "patronus.queue.mr.share"],
    steps: |run| contenders(run).len() * points(run).len(),
    run,
    draw,
};

/// Patronus as published. Its headers take a share of memory, which is 128 GB in the paper.
const PAPER: Contender = Contender::of("patronus-paper", schemes::PATRONUS_PAPER)
    .with("patronus-paper", &[("headers_ppm", Choice::Number(100_000))]);
const UNPROTECTED: Contender = Contender::of("unprotected", schemes::UNPROTECTED);
const RPC_DATA: Contender = Contender::of("rpc-data", schemes::RPC_DATA);

const CONTENDERS: &[Contender] = &[
    UNPROTECTED.expiring("unprotected"),
    PATRONUS.expiring("patronus"),
    PATRONUS_2.expiring("patronus-2"),
    PAPER.expiring("patronus-paper"),
    PATRONUS_MR,
    RPC_DATA.expiring("rpc-data"),
];

/// Entries of a segment (§7.3.2).
const ENTRIES: u64 = 1024;
/// Entries of a segment that are compared.
const SIZES: &[u64] = &[64, 128, 256, 512, 1024];
/// Numbers of queues.
const QUEUES: &[u32] = &[1, 4];
/// Producers of a compute node in the comparison of sizes. The paper does not state them.
const PRODUCERS: u32 = THREADS;
const PRODUCERS_HERE: u32 = 1;
/// Chunk of the memory node: room for a segment of 1024 entries.
const CHUNK_BYTES: u64 = 64 << 10;
/// Lease (§7.3.2).
const LEASE_US: u64 = 100;
/// Lease on this machine: a wake-up of a thread takes longer than a lease of the paper.
const LEASE_HERE_US: u64 = 10_000;
/// Lease of permissions that are revoked: with regions, a request waits for tens of milliseconds.
const LONG_US: u64 = 500_000;
/// Inserts of all producers together, per point.
const INSERTS: u32 = 120_000;
const INSERTS_MAX: u32 = 4_000;
const INSERTS_MIN: u32 = 40;

/// A point of the figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Point {
    /// Producers of a compute node.
    producers: u32,
    queues: u32,
    entries: u64,
}

/// The points of each line: over producers, then over sizes.
fn points(run: &Run<'_>) -> Vec<Point> {
    let mut points = Vec::new();
    for &queues in QUEUES {
        let over = clients(run).iter();
        points.extend(over.map(|&producers| Point { producers, queues, entries: ENTRIES }));
    }
    let sizes = match run.extent {
        Extent::Full => SIZES.to_vec(),
        Extent::Quick => vec![SIZES[0], ENTRIES],
    };
    let over = sizes.into_iter().map(|entries| Point { entries, ..compared(run) });
    points.extend(over.filter(|point| !points.contains(point)).collect::<Vec<_>>());
    points
}

/// The point whose size of a segment is varied.
fn compared(run: &Run<'_>) -> Point {
    let producers = if run.testbed.simulated() { PRODUCERS } else { PRODUCERS_HERE };
    Point { producers, queues: 1, entries: ENTRIES }
}

/// The lines on this testbed. The memory node of the line without protection is private to the
/// benchmark.
fn contenders(run: &Run<'_>) -> Vec<&'static Contender> {
    let runs = |contender: &&Contender| {
        run.testbed.simulated() || contender.runs_here() || contender.scheme == UNPROTECTED.scheme
    };
    CONTENDERS.iter().filter(runs).collect()
}

fn load(run: &Run<'_>, contender: &Contender, point: Point) -> Load {
    let is_simulated = run.testbed.simulated();
    let (compute_nodes, threads) = match is_simulated {
        true => (COMPUTE_NODES, point.producers.min(THREADS)),
        false => (1, 1),
    };
    let work = QueueWork {
        queues: point.queues,
        entries: point.entries,
        clients: point.producers / threads,
        lease_us: match (contender.revokes, is_simulated) {
            (true, _) => LONG_US,
            (false, true) => LEASE_US,
            (false, false) => LEASE_HERE_US,
        },
        revokes: contender.revokes,
    };
    let each = INSERTS / (point.producers * u32::from(compute_nodes));
    Load {
        chunk_bytes: CHUNK_BYTES,
        cores: CORES,
        compute_nodes,
        connections_each: CORES.min(threads),
        threads: threads * u32::from(compute_nodes),
        shared: true,
        node_options: contender.options(),
        extension: contender.extension,
        ..Load::new(
            contender.scheme,
            Work::Queue(work),
            run.rounds(each.min(INSERTS_MAX)).max(INSERTS_MIN),
        )
    }
}

/// A measured point: its line and its throughput.
type Measured = (&'static Contender, Point, f64);

fn run(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    let mut measured = Vec::new();
    for contender in contenders(run) {
        for point in points(run) {
            measured.push((contender, point, measure(run, results, contender, point)?));
        }
    }
    ratios(run, results, &measured);
    Ok(())
}

/// Measures a point. Returns its throughput.
fn measure(
    run: &Run<'_>,
    results: &mut Results,
    contender: &Contender,
    point: Point,
) -> Result<f64, Error> {
    let Point { producers, queues, entries } = point;
    let what = format!(
        "{}, {}, {}, {entries} entries",
        contender.name,
        count(producers, "producer"),
        count(queues, "queue")
    );
    let outcome = run.load(&what, &load(run, contender, point))?;
    let setting = setting(run, contender, producers)
        .with("queues", u64::from(queues))
        .with("entries", entries);
    let rate = results.record(&setting, "insert_rate_per_s", Unit::PerSecond);
    results.add(format!("{what}: inserts"), rate.mean(outcome.rate_per_s));
    let insert = (&*format!("{what}: insert"), "insert_latency_us");
    add_latency(run, results, &setting, insert, &outcome.lease.cycle);
    let segments = (outcome.lease.cycle.count() as f64 / entries as f64).max(1.0);
    let permissions = results.record(&setting, "permissions_each", Unit::Count);
    let permissions = permissions.mean(outcome.lease.counts.permissions as f64 / segments);
    results.add(format!("{what}: permissions for each segment"), permissions);
    Ok(outcome.rate_per_s)
}

/// Compares the lines, and the paper's numbers with Patronus as published. On this machine, which
/// does not run that form, they stand beside `patronus`.
fn ratios(run: &Run<'_>, results: &mut Results, measured: &[Measured]) {
    let rate = |name: &str, point: Point| {
        let found = measured.iter().find(|(line, at, _)| line.name == name && *at == point);
        found.map_or(f64::NAN, |(.., rate)| *rate)
    };
    let peak = |name: &str| {
        let all = measured
            .iter()
            .filter(|(line, at, _)| line.name == name && (at.queues, at.entries) == (1, ENTRIES));
        all.map(|(.., rate)| *rate).fold(f64::NAN, f64::max)
    };
    let at = |entries| Point { entries, ..compared(run) };
    let published = if run.testbed.simulated() { "patronus-paper" } else { "patronus" };
    for name in ["patronus", "patronus-paper"] {
        if !measured.iter().any(|(line, ..)| line.name == name) {
            continue;
        }
        let setting = run.setting(name);
        let mut ratio = |what: String, metric: &str, value: f64, id: Option<&str>| {
            let record = results.record(&setting, metric, Unit::Ratio).mean(value);
            match id.filter(|_| name == published) {
                Some(id) => results.claimed(what, record, id),
                None => results.add(what, record),
            }
        };
        for entries in [ENTRIES, SIZES[0]] {
            let value = rate(name, at(entries)) / rate("unprotected", at(entries));
            let what = format!("{name} over unprotected, {entries} entries");
            ratio(what, &format!("over_unprotected_{entries}_ratio"), value, None);
        }
        for (entries, id) in [(SIZES[0], "patronus.over.mr"), (ENTRIES, "patronus.over.mr.low")] {
            let value = rate(name, at(entries)) / rate("patronus-mr", at(entries));
            let what = format!("{name} over patronus-mr, {entries} entries");
            ratio(what, &format!("over_mr_{entries}_ratio"), value, Some(id));
        }
        let value = peak("patronus-mr") / peak(name);
        let what = format!("patronus-mr over {name}: inserts, at most");
        ratio(what, "mr_share_ratio", value, Some("patronus.queue.mr.share"));
    }
}

fn draw(results: &Results, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    let throughput = ("insert_rate_per_s", Statistic::Mean, "rate");
    let latency = ("insert_latency_us", results.typical(), "latency");
    for &queues in QUEUES {
        for (metric, statistic, rest) in [throughput, latency] {
            let shown = shown(results, "entries", ENTRIES, queues);
            let series = Series { metric, statistic, across: "clients", ours: "patronus" };
            let title = format!("Inserts into {}", count(queues, "queue"));
            let name = canvas.file(&format!("{rest}-{queues}"));
            let canvas = Canvas { name: &name, ..*canvas };
            let x = Axis::log("producers of each compute node");
            files.extend(lines(&shown, &series, &title, x, &canvas)?);
        }
    }
    let mut settings = results.records().map(|record| &record.setting);
    let producers = settings
        .find(|setting| setting.number("entries") == Some(SIZES[0] as f64))
        .and_then(|setting| setting.number("clients"));
    let shown = shown(results, "clients", producers.unwrap_or_default() as u64, 1);
    let (metric, statistic, _) = throughput;
    let series = Series { metric, statistic, across: "entries", ours: "patronus" };
    let name = canvas.file("segments");
    let canvas = Canvas { name: &name, ..*canvas };
    let x = Axis::log("entries of a segment");
    files.extend(lines(&shown, &series, "Inserts by size of a segment", x, &canvas)?);
    Ok(files)
}

/// The records of a number of queues and one value of a setting.
fn shown(results: &Results, name: &str, value: u64, queues: u32) -> Results {
    let mut shown = results.clone();
    shown.rows.retain(|row| {
        let setting = &row.record.setting;
        setting.number(name) == Some(value as f64)
            && setting.number("queues") == Some(f64::from(queues))
    });
    shown
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paper::simulated::SimulatedCluster;
    use bench_report::progress::Progress;

    /// A permission is amortized over the entries of a segment.
    #[test]
    fn leases_cost_less_with_larger_segments() {
        let testbed = SimulatedCluster::new((super::super::PAPER.params)(), 1);
        let bar = Progress::Silent.bar("paper", 1);
        let run = Run { testbed: &testbed, extent: Extent::Quick, bar: &bar };
        let mut results = Results::new(EXPERIMENT.name, Some(testbed.params()));
        let mut rate = |name: &str, entries| {
            let contender = CONTENDERS.iter().find(|contender| contender.name == name);
            let point = Point { entries, ..compared(&run) };
            measure(&run, &mut results, contender.expect("a line"), point).unwrap()
        };
        let (large, small) = (rate("patronus", ENTRIES), rate("patronus", SIZES[0]));
        let share = large / rate("unprotected", ENTRIES);
        assert!(share > 0.6, "{share}");
        assert!(small / rate("unprotected", SIZES[0]) < share);
        assert!(large > 2.0 * rate("patronus-mr", ENTRIES));
        assert!(large > 2.0 * rate("rpc-data", ENTRIES));
    }
}
