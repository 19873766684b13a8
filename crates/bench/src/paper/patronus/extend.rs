//! Extension of leases (Patronus §7.2.2, figure 7).
//!
//! A lifecycle is a permission with eight extensions and its revocation. Without extensions, it is
//! nine permissions with their revocations, as in the public benchmark
//! (`bench_patronus_extend.cpp`).

use std::path::PathBuf;

use super::contenders::{Contender, PAPER, PATRONUS, add_latency, clients, measure, setting};
use super::work::{Cycle, LeaseWork, Lifecycle};
use crate::Error;
use crate::paper::experiment::{Canvas, Experiment};
use crate::paper::picture::{Series, lines};
use crate::paper::results::Results;
use crate::paper::{Run, count};
use bench_report::plot::Axis;
use bench_report::record::{Statistic, Unit};

/// Figure 7.
pub const EXPERIMENT: Experiment = Experiment {
    name: "extend",
    title: "Lifecycles with 8 extensions (§7.2.2, figure 7)",
    claims: &["patronus.reacquire.rate", "patronus.extend.gain"],
    steps: |run| 3 * schemes(run).len() * clients(run).len(),
    run,
    draw,
};

/// A scheme with its three lines.
struct Lines {
    reacquire: Contender,
    by_rpc: Contender,
    by_cas: Contender,
}

const PUBLISHED: Lines = Lines {
    reacquire: PAPER.named("patronus-paper, re-acquire"),
    by_rpc: PAPER.named("patronus-paper, by RPC").by_rpc(),
    by_cas: PAPER.named("patronus-paper, by CAS"),
};
const OURS: Lines = Lines {
    reacquire: PATRONUS.named("patronus, re-acquire"),
    by_rpc: PATRONUS.named("patronus, by RPC").by_rpc(),
    by_cas: PATRONUS.named("patronus, by CAS"),
};

/// The lines of the published form, whose rates the claims are about, and ours.
fn schemes(run: &Run<'_>) -> Vec<&'static Lines> {
    [&PUBLISHED, &OURS]
        .into_iter()
        .filter(|lines| run.testbed.simulated() || lines.by_cas.runs_here())
        .collect()
}

/// Extensions of a lifecycle (§7.2.2).
const EXTENSIONS: u32 = 8;
/// Lease of a permission, and time by which each extension asks for more: longer than a request of
/// the most clients waits.
const LEASE_US: u64 = 10_000;

fn run(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    for (at, Lines { reacquire, by_rpc, by_cas }) in schemes(run).into_iter().enumerate() {
        let [base, by_rpc, by_cas] = [
            peak(run, results, reacquire, false)?,
            peak(run, results, by_rpc, true)?,
            peak(run, results, by_cas, true)?,
        ];
        let name = reacquire.scheme.name;
        let record = |results: &Results, metric, unit, value| {
            results.record(&run.setting(name), metric, unit).mean(value)
        };
        let rate = record(results, "peak_rate_per_s", Unit::PerSecond, base);
        let gain = record(results, "gain_ratio", Unit::Ratio, by_cas / base);
        let rpc_gain = record(results, "rpc_gain_ratio", Unit::Ratio, by_rpc / base);
        let rate_of = format!("{name}, re-acquire: lifecycles, at most");
        let gain_of = format!("{name}: by CAS over re-acquire, at most");
        match at {
            0 => {
                results.claimed(rate_of, rate, "patronus.reacquire.rate");
                results.claimed(gain_of, gain, "patronus.extend.gain");
            }
            _ => {
                results.add(rate_of, rate);
                results.add(gain_of, gain);
            }
        }
        results.add(format!("{name}: by RPC over re-acquire, at most"), rpc_gain);
    }
    Ok(())
}

/// Measures a line; returns the highest rate over the numbers of clients.
fn peak(
    run: &Run<'_>,
    results: &mut Results,
    contender: &Contender,
    extends: bool,
) -> Result<f64, Error> {
    let lifecycle = Lifecycle {
        permissions: if extends { 1 } else { 1 + EXTENSIONS },
        accesses: 0,
        extensions: if extends { EXTENSIONS } else { 0 },
        revokes: true,
    };
    let cycle = Cycle::Lifecycle(lifecycle);
    let work = LeaseWork { cycle, clients: 1, bytes: 64, lease_us: LEASE_US };
    let mut peak = 0.0_f64;
    for &clients in clients(run) {
        let outcome = measure(run, contender, clients, work)?;
        let setting = setting(run, contender, clients);
        let what = format!("{}, {}", contender.name, count(clients, "client"));
        let rate = results.record(&setting, "cycle_rate_per_s", Unit::PerSecond);
        results.add(format!("{what}: lifecycles"), rate.mean(outcome.rate_per_s));
        let whole = (&*format!("{what}: lifecycle"), "cycle_latency_us");
        add_latency(run, results, &setting, whole, &outcome.lease.cycle);
        peak = peak.max(outcome.rate_per_s);
    }
    Ok(peak)
}

fn draw(results: &Results, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    for (metric, statistic, rest) in [
        ("cycle_rate_per_s", Statistic::Mean, "rate"),
        ("cycle_latency_us", results.typical(), "latency"),
    ] {
        let series = Series { metric, statistic, across: "clients", ours: "patronus," };
        let name = canvas.file(rest);
        let canvas = Canvas { name: &name, ..*canvas };
        let x = Axis::log("clients of each compute node");
        files.extend(lines(results, &series, "Lifecycles with 8 extensions", x, &canvas)?);
    }
    Ok(files)
}
