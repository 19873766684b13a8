//! RACE with permissions for each access (Patronus §7.3.1, figure 9).
//!
//! Each client is a thread with a connection of its own. The paper has coroutines above 32 clients,
//! but not where it measures latencies.

use std::path::PathBuf;

use ::kv::SplitLock;
use pool::schemes;

use super::contenders::{
    COMPUTE_NODES, CORES, Contender, PAPER, PATRONUS, PATRONUS_MR, RPC_DATA, UNPROTECTED,
    add_latency, on, setting,
};
use super::index_work::{IndexWork, Task};
use crate::Error;
use crate::paper::experiment::{Canvas, Experiment};
use crate::paper::load::{Load, Work};
use crate::paper::picture::{Series, lines};
use crate::paper::results::Results;
use crate::paper::{Extent, Run, count};
use bench_report::plot::Axis;
use bench_report::record::{Statistic, Unit};

/// Figure 9.
pub const EXPERIMENT: Experiment = Experiment {
    name: "hash",
    title: "RACE: throughput by workload, and latency of reads (§7.3.1, figure 9)",
    claims: &[
        "patronus.hash.read.added",
        "patronus.hash.read.added.us",
        "patronus.overhead.low",
        "patronus.overhead.high",
    ],
    steps: |run| on(run, CONTENDERS).len() * clients(run).len() * WORKLOADS.len(),
    run,
    draw,
};

/// The lines. `unprotected` is the base of the claims, and the paper's numbers stand beside
/// `patronus-paper`.
const CONTENDERS: &[Contender] = &[
    UNPROTECTED.expiring("unprotected"),
    PATRONUS.expiring("patronus"),
    PAPER.expiring("patronus-paper"),
    PATRONUS_MR,
    RPC_DATA,
];

/// A workload: its name, and percent of reads.
const WORKLOADS: &[(&str, u64)] = &[("read-only", 100), ("mixed", 50), ("write-only", 0)];

const CLIENTS: &[u32] = &[1, 2, 4, 8, 16, 32, 64, 128];
const CLIENTS_QUICK: &[u32] = &[1, 8];
const CLIENTS_HERE: &[u32] = &[1, 2];

/// Bytes of a chunk. An object of 16 KiB with the published form's hole of 32 B takes a slot of
/// 20 KiB, and slots are at most a quarter of a chunk.
pub const CHUNK_BYTES: u64 = 256 << 10;
/// Keys of the index. The paper does not state the number.
const KEYS: u32 = 10_000;
/// Bytes of a block (§7.3.1).
const BLOCK_BYTES: u32 = 4096;
/// Groups of a subtable: 16 KiB.
const GROUPS: u16 = 85;
/// Lease (§7.3.1).
const LEASE_US: u64 = 100;
/// Lease from [`MANY`] clients on, whose requests may wait for longer than [`LEASE_US`].
const LEASE_MANY_US: u64 = 1_000;
/// Clients of a compute node that make the lease longer.
const MANY: u32 = 64;
/// Lease of permissions that are revoked: no request waits for longer.
const LONG_US: u64 = 20_000;
/// The same from [`MANY`] clients on, where requests wait for registrations of 20 us.
const LONG_MANY_US: u64 = 500_000;
/// Lease of a split while keys are loaded.
const SPLIT_LEASE_US: u64 = 20_000;
/// Operations of all clients together, per point.
const OPERATIONS: u32 = 40_000;
const OPERATIONS_MAX: u32 = 2_000;
const OPERATIONS_MIN: u32 = 20;
/// Median latency of reads without protection in the paper: +4 us are +29 % (§7.3.1). The paper
/// does not state the load, so ours is the one whose latency is next to this.
const BASE_US: f64 = 13.8;

fn clients(run: &Run<'_>) -> &'static [u32] {
    match (run.testbed.simulated(), run.extent) {
        (true, Extent::Full) => CLIENTS,
        (true, Extent::Quick) => CLIENTS_QUICK,
        (false, Extent::Full) => CLIENTS_HERE,
        (false, Extent::Quick) => &CLIENTS_HERE[..1],
    }
}

/// A measured point.
struct Point {
    contender: &'static Contender,
    workload: &'static str,
    clients: u32,
    rate_per_s: f64,
    /// Median latency of reads.
    read_us: f64,
}

fn run(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    let mut points = Vec::new();
    for &(workload, read_percent) in WORKLOADS {
        for contender in on(run, CONTENDERS) {
            for &clients in clients(run) {
                let task = Task::Operate { read_percent };
                points.push(point(run, results, contender, clients, (workload, task))?);
            }
        }
    }
    claims(run, results, &points);
    Ok(())
}

/// Unit of the entries of objects in the contender's scheme.
pub fn entry_unit(contender: &Contender) -> u32 {
    // A page for each object, so that places have room for the addresses.
    if contender.scheme == schemes::UNPROTECTED { 256 } else { 1 }
}

/// The lock that saves the work of two splits at once. Without leases, permissions exclude nothing.
fn lock(contender: &Contender) -> SplitLock {
    if contender.scheme.leases { SplitLock::Exclusive } else { SplitLock::Plain }
}

fn lease_us(run: &Run<'_>, contender: &Contender, clients: u32) -> u64 {
    match (contender.revokes, run.testbed.simulated()) {
        (true, _) if clients >= MANY => LONG_MANY_US,
        (true, _) => LONG_US,
        // A wake-up of a thread takes longer than a lease of the paper.
        (false, false) => 10 * LEASE_MANY_US,
        (false, true) if clients >= MANY => LEASE_MANY_US,
        (false, true) => LEASE_US,
    }
}

fn point(
    run: &Run<'_>,
    results: &mut Results,
    contender: &'static Contender,
    clients: u32,
    (workload, task): (&'static str, Task),
) -> Result<Point, Error> {
    let work = IndexWork {
        task,
        keys: run.rounds(KEYS).into(),
        block_bytes: BLOCK_BYTES,
        groups: GROUPS,
        entry_unit: entry_unit(contender),
        lease_us: lease_us(run, contender, clients),
        revokes: contender.revokes,
        lock: lock(contender),
        split_lease_us: SPLIT_LEASE_US.max(lease_us(run, contender, clients)),
    };
    let compute_nodes = if run.testbed.simulated() { COMPUTE_NODES } else { 1 };
    let threads = clients * u32::from(compute_nodes);
    let operations = run.rounds((OPERATIONS / threads).min(OPERATIONS_MAX)).max(OPERATIONS_MIN);
    let load = Load {
        chunk_bytes: CHUNK_BYTES,
        cores: CORES,
        compute_nodes,
        threads,
        node_options: contender.options(),
        ..Load::new(contender.scheme, Work::Index(work), operations)
    };
    let what = format!("{}, {workload}, {}", contender.name, count(clients, "client"));
    let outcome = run.load(&what, &load)?;
    let setting = setting(run, contender, clients).with("workload", workload);
    let rate = results.record(&setting, "rate_per_s", Unit::PerSecond);
    results.add(format!("{what}: operations"), rate.mean(outcome.rate_per_s));
    for (kind, metric, latencies) in [
        ("read", "read_latency_us", &outcome.index.read),
        ("write", "write_latency_us", &outcome.index.write),
    ] {
        if latencies.count() > 0 {
            let whole = format!("{what}: {kind}");
            add_latency(run, results, &setting, (&whole, metric), latencies);
        }
    }
    let refused = results.record(&setting, "refused", Unit::Count);
    let refused = refused.mean(outcome.index.refused as f64);
    results.add(format!("{what}: accesses that the NIC refused"), refused);
    let median = outcome.index.read.quantile_us(0.5);
    if workload == "read-only" {
        let record = results.record(&setting, "read_latency_us", Unit::Us);
        results.add(format!("{what}: read, median"), record.value(Statistic::P50, median));
    }
    let rate_per_s = outcome.rate_per_s;
    Ok(Point { contender, workload, clients, rate_per_s, read_us: median })
}

/// Compares the lines with and without protection, if both are there.
fn claims(run: &Run<'_>, results: &mut Results, points: &[Point]) {
    let of = |name: &'static str| points.iter().filter(move |point| point.contender.name == name);
    let base = of(UNPROTECTED.name).filter(|point| point.workload == "read-only");
    let off = |point: &&Point| (point.read_us - BASE_US).abs();
    let Some(base) = base.min_by(|a, b| off(a).total_cmp(&off(b))) else { return };
    let same = |a: &Point, b: &Point| (a.workload, a.clients) == (b.workload, b.clients);
    for name in [PAPER.name, PATRONUS.name] {
        if let Some(point) = of(name).find(|point| same(point, base)) {
            let setting = run.setting(name).clients(base.clients.into());
            let over = UNPROTECTED.name;
            let what = format!("{name} over {over}, {}", count(base.clients, "client"));
            let record = results.record(&setting, "read_ratio", Unit::Ratio);
            let record = record.value(Statistic::P50, point.read_us / base.read_us);
            results.claimed(format!("{what}: read, median"), record, "patronus.hash.read.added");
            let record = results.record(&setting, "read_added_us", Unit::Us);
            let record = record.value(Statistic::P50, point.read_us - base.read_us);
            let what = format!("{what}: read, median, added");
            results.claimed(what, record, "patronus.hash.read.added.us");
        }
        let overheads = of(name).filter_map(|point| {
            let base = of(UNPROTECTED.name).find(|base| same(point, base))?;
            Some(1.0 - point.rate_per_s / base.rate_per_s)
        });
        let overheads: Vec<f64> = overheads.collect();
        let least = overheads.iter().copied().reduce(f64::min);
        let most = overheads.iter().copied().reduce(f64::max);
        for (what, metric, value, id) in [
            ("least", "overhead_least_ratio", least, "patronus.overhead.low"),
            ("most", "overhead_most_ratio", most, "patronus.overhead.high"),
        ] {
            if let Some(value) = value {
                let record = results.record(&run.setting(name), metric, Unit::Ratio);
                let (what, record) =
                    (format!("{name}: throughput lost, {what}"), record.mean(value));
                match id {
                    // The paper's least is no bound, which a larger loss would meet.
                    "patronus.overhead.low" => results.claimed(what, record, id),
                    _ => results.bounded(what, record, id),
                }
            }
        }
    }
}

fn draw(results: &Results, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    let x = "clients of each compute node";
    for (workload, _) in WORKLOADS {
        let mut shown = results.clone();
        let is = |value: &str| value == *workload;
        shown.rows.retain(|row| {
            row.record.setting.get("workload").is_some_and(|value| is(&value.to_string()))
        });
        let (metric, statistic) = ("rate_per_s", Statistic::Mean);
        let series = Series { metric, statistic, across: "clients", ours: "patronus" };
        let name = canvas.file(workload);
        let title = format!("RACE, {workload}, blocks of 4 KiB");
        files.extend(lines(
            &shown,
            &series,
            &title,
            Axis::log(x),
            &Canvas { name: &name, ..*canvas },
        )?);
        if *workload == "read-only" {
            let (metric, statistic) = ("read_latency_us", Statistic::P50);
            let series = Series { metric, statistic, ..series };
            let name = canvas.file("read-latency");
            let title = "RACE, reads of 4 KiB";
            files.extend(lines(
                &shown,
                &series,
                title,
                Axis::log(x),
                &Canvas { name: &name, ..*canvas },
            )?);
        }
    }
    Ok(files)
}
