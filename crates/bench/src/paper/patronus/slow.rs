//! Leases and QP polling with clients that hang while they hold exclusive permissions (Patronus
//! §7.2.4, figure 8 (b)).
//!
//! The paper does not state the numbers of objects and clients. Here all clients hang, and there
//! are fewer objects than clients, so that a client that hangs delays others. Polling notices only
//! dead QPs: a client that hangs keeps its permission until it revokes it.

use std::path::PathBuf;

use super::contenders::{COMPUTE_NODES, CORES, Contender, PATRONUS, add_latency, on, setting};
use super::work::{Cycle, LeaseWork};
use crate::Error;
use crate::paper::experiment::{Canvas, Experiment};
use crate::paper::load::{Load, Work};
use crate::paper::picture::{Series, lines};
use crate::paper::results::Results;
use crate::paper::{Extent, Run};
use bench_report::plot::Axis;
use bench_report::record::{Statistic, Unit};

/// Figure 8 (b).
pub const EXPERIMENT: Experiment = Experiment {
    name: "slow-clients",
    title: "Exclusive permissions of clients that hang (§7.2.4, figure 8 (b))",
    claims: &["patronus.lease.over.polling"],
    steps: |run| on(run, CONTENDERS).len() * hangs(run).len(),
    run,
    draw,
};

const LEASE: Contender = PATRONUS.expiring("lease");
const POLLING: Contender = PATRONUS.named("polling");
const CONTENDERS: &[Contender] = &[LEASE, POLLING];

/// Lease (§7.2.4).
const LEASE_US: u64 = 100;
/// Lease of the permissions with polling: it ends none.
const ENDLESS_US: u64 = 1_000_000;
/// Period of QP polling (§7.2.4).
const POLL_US: u64 = LEASE_US;
/// Period on this machine, where the threads that answer for the NIC may not run for as long as a
/// lease.
const POLL_HERE_US: u64 = 1_000_000;
/// Clients for each object.
const CLIENTS_EACH: u32 = 6;
/// Measured cycles of all clients together.
const CYCLES: u32 = 30_000;
/// The same on this machine, before the factor of [`Run`]'s rounds.
const CYCLES_HERE: u32 = 2_000;

/// Times for which clients hang, in microseconds.
fn hangs(run: &Run<'_>) -> &'static [u64] {
    match run.extent {
        Extent::Full => &[0, 50, 100, 200, 400, 600, 800, 1_000],
        Extent::Quick => &[0, 500],
    }
}

/// Clients of a compute node. Each is a thread, because it hangs.
fn clients(run: &Run<'_>) -> u32 {
    match (run.testbed.simulated(), run.extent) {
        (true, Extent::Full) => 512,
        (true, Extent::Quick) => 64,
        (false, _) => 6,
    }
}

fn run(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    let clients = clients(run);
    let simulated = run.testbed.simulated();
    let compute_nodes = if simulated { COMPUTE_NODES } else { 1 };
    let threads = clients * u32::from(compute_nodes);
    let rounds = run.rounds(if simulated { CYCLES } else { CYCLES_HERE } / threads);
    let mut usual = Vec::new();
    for contender in on(run, CONTENDERS) {
        for &hang_us in hangs(run) {
            let revokes = contender.revokes;
            let work = LeaseWork {
                cycle: Cycle::Exclusive { objects: threads / CLIENTS_EACH, hang_us, revokes },
                clients: 1,
                bytes: 64,
                lease_us: if revokes { ENDLESS_US } else { LEASE_US },
            };
            let mut node_options = contender.options();
            if contender.name == POLLING.name {
                let period_us = if simulated { POLL_US } else { POLL_HERE_US };
                node_options.push(("poll_qps_us", period_us.into()));
            }
            let load = Load {
                chunk_bytes: LeaseWork::CHUNK_BYTES,
                cores: CORES,
                compute_nodes,
                connections_each: if simulated { CORES } else { 2 },
                threads,
                shared: true,
                node_options,
                ..Load::new(contender.scheme, Work::Lease(work), rounds)
            };
            let what = format!("{}, clients hang for {hang_us} us", contender.name);
            let outcome = run.load(&what, &load)?;
            let setting = setting(run, contender, clients).with("hang_us", hang_us);
            let rate = results.record(&setting, "permission_rate_per_s", Unit::PerSecond);
            results.add(format!("{what}: permissions"), rate.mean(outcome.rate_per_s));
            let whole = (&*format!("{what}: acquisition"), "acquire_latency_us");
            add_latency(run, results, &setting, whole, &outcome.lease.acquire);
            if hang_us == 0 {
                usual.push(outcome.rate_per_s);
            }
        }
    }
    if let [lease, polling] = usual[..] {
        let record = results.record(&run.setting("all"), "usual_ratio", Unit::Ratio);
        let what = "lease over polling, no client hangs: permissions";
        results.claimed(what, record.mean(lease / polling), "patronus.lease.over.polling");
    }
    Ok(())
}

fn draw(results: &Results, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    let (metric, statistic) = ("permission_rate_per_s", Statistic::Mean);
    let series = Series { metric, statistic, across: "hang_us", ours: "lease" };
    let x = Axis::linear("time for which clients hang (us)");
    lines(results, &series, "Exclusive permissions of clients that hang", x, canvas)
}
