//! Acquisition of permissions by technique (Patronus §7.2.1, figure 6 and table 4).

use std::path::PathBuf;

use super::contenders::{
    BASELINE, CONTIGUITY, CORES, Contender, DELAY, PAPER, PATRONUS, PATRONUS_2, PATRONUS_MR,
    THREADS, add_latency, measure, on, setting,
};
use super::work::{Cycle, LeaseWork, Lifecycle};
use crate::Error;
use crate::paper::experiment::{Canvas, Experiment};
use crate::paper::results::Results;
use crate::paper::{Extent, Run};
use bench_report::plot::Bars;
use bench_report::record::{Setting, Statistic, Unit};

/// Figure 6 and table 4.
pub const EXPERIMENT: Experiment = Experiment {
    name: "acquire",
    title: "Acquisition of permissions by technique (§7.2.1, figure 6, table 4)",
    claims: &["patronus.permission.rate"],
    steps: |run| on(run, CONTENDERS).len() + 1,
    run,
    draw,
};

/// The techniques of table 4, then the schemes of this repository.
const CONTENDERS: &[Contender] = &[
    BASELINE,
    DELAY,
    CONTIGUITY,
    PAPER.named("patronus-paper, + handover"),
    PAPER.expiring("patronus-paper, + expiry"),
    PATRONUS,
    PATRONUS.expiring("patronus, expiring"),
    PATRONUS_2,
    PATRONUS_MR,
];

/// A request without an effect: the limit of the network and of the CPU.
const BARE: Contender = Contender::of("bare RPC", PATRONUS.scheme);

/// Bytes of a permission.
const BYTES: u64 = 64;
/// Lease of permissions that expire (§7).
const LEASE_US: u64 = 100;
/// Lease of permissions that are revoked: none ends before its revocation.
const LONG_US: u64 = 500_000;

/// Clients of a compute node: enough to saturate the memory node's cores. The paper does not state
/// the number.
fn clients(run: &Run<'_>) -> u32 {
    match (run.testbed.simulated(), run.extent) {
        (true, Extent::Full) => THREADS,
        (true, Extent::Quick) => THREADS / 2,
        (false, _) => 16,
    }
}

fn run(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    let clients = clients(run);
    for contender in on(run, CONTENDERS) {
        let revokes = contender.revokes;
        let lifecycle = Lifecycle { permissions: 1, accesses: 0, extensions: 0, revokes };
        let lease_us = if revokes { LONG_US } else { LEASE_US };
        let cycle = Cycle::Lifecycle(lifecycle);
        let work = LeaseWork { cycle, clients: 1, bytes: BYTES, lease_us };
        let outcome = measure(run, contender, clients, work)?;
        let (setting, name) = (setting(run, contender, clients), contender.name);
        let rate = results.record(&setting, "permission_rate_per_s", Unit::PerSecond);
        results.add(format!("{name}: permissions"), rate.mean(outcome.rate_per_s));
        // All techniques. The claim is a bound, so that two schemes may be compared with it.
        if !contender.revokes {
            let cores = if run.testbed.simulated() { CORES } else { 1 };
            let rate = results.record(&setting, "core_rate_per_s", Unit::PerSecond);
            let rate = rate.mean(outcome.rate_per_s / f64::from(cores));
            let what = format!("{name}: permissions of each core");
            results.bounded(what, rate, "patronus.permission.rate");
        }
        let whole = (&*format!("{name}: acquisition"), "acquire_latency_us");
        add_latency(run, results, &setting, whole, &outcome.lease.acquire);
        let counts = outcome.lease.counts;
        for (metric, what, each) in [
            ("windows", "window operations", counts.windows_each()),
            ("requests", "requests", counts.requests_each()),
        ] {
            let record = results.record(&setting, metric, Unit::Count).mean(each);
            results.add(format!("{name}: {what} for each permission"), record);
        }
    }
    let work = LeaseWork { cycle: Cycle::Request, clients: 1, bytes: BYTES, lease_us: LONG_US };
    let outcome = measure(run, &BARE, clients, work)?;
    let setting = setting(run, &BARE, clients);
    let rate = results.record(&setting, "permission_rate_per_s", Unit::PerSecond);
    results.add("bare RPC: requests", rate.mean(outcome.rate_per_s));
    let whole = ("bare RPC", "acquire_latency_us");
    add_latency(run, results, &setting, whole, &outcome.lease.cycle);
    Ok(())
}

fn draw(results: &Results, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    let names: Vec<&str> = CONTENDERS.iter().map(|c| c.name).chain([BARE.name]).collect();
    let mut files = Vec::new();
    for (metric, statistic, label, rest) in [
        ("permission_rate_per_s", Statistic::Mean, "permissions per second", "rate"),
        ("acquire_latency_us", results.typical(), "latency of an acquisition (us)", "latency"),
    ] {
        let mut bars = Bars::new("Acquisition of permissions", label, ["saturated"]);
        for name in &names {
            let is = |s: &Setting| s.get("scheme").is_some_and(|x| x.to_string() == *name);
            // Unsafe schemes do not run on this machine.
            if let Some(value) = results.find(metric, statistic, is) {
                bars = bars.group(name, [value]);
            }
        }
        let bars = bars.subtitle(canvas.subtitle);
        files.extend(bars.write(canvas.directory, &canvas.file(rest))?);
    }
    Ok(files)
}
