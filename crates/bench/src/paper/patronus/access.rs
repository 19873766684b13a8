//! Random access, with a permission for every three accesses (Patronus §7.1, figure 5).

use std::path::PathBuf;

use super::contenders::{
    Contender, PAPER, PATRONUS, PATRONUS_2, PATRONUS_MR, RPC_DATA, THREADS, UNPROTECTED,
    add_latency, clients, measure, on, setting,
};
use super::work::{Cycle, LeaseWork, Lifecycle};
use crate::Error;
use crate::paper::experiment::{Canvas, Experiment};
use crate::paper::picture::{Series, lines};
use crate::paper::results::Results;
use crate::paper::{Run, count};
use bench_report::plot::Axis;
use bench_report::record::{Statistic, Unit};

/// Figure 5.
pub const EXPERIMENT: Experiment = Experiment {
    name: "access",
    title: "Random access, three times with each permission (§7.1, figure 5)",
    claims: &[],
    steps: |run| on(run, CONTENDERS).len() * clients(run).len() * SIZES.len(),
    run,
    draw,
};

const CONTENDERS: &[Contender] = &[
    UNPROTECTED,
    RPC_DATA,
    PAPER.expiring("patronus-paper, expiring"),
    PATRONUS,
    PATRONUS.expiring("patronus, expiring"),
    PATRONUS_2,
    PATRONUS_MR,
];

/// Bytes of an access. The paper shows 64.
const SIZES: &[u64] = &[64, 4096];
/// Accesses with one permission.
const ACCESSES: u32 = 3;
/// Lease of permissions that are revoked. The paper does not state it. With regions, a request
/// of the most clients waits for tens of milliseconds.
const LONG_US: u64 = 500_000;
/// Lease of permissions that expire (§7). With more clients than threads it is longer in
/// proportion, as their requests wait for longer.
const SHORT_US: u64 = 100;

fn run(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    for &bytes in SIZES {
        for contender in on(run, CONTENDERS) {
            for &clients in clients(run) {
                point(run, results, contender, clients, bytes)?;
            }
        }
    }
    Ok(())
}

fn point(
    run: &Run<'_>,
    results: &mut Results,
    contender: &Contender,
    clients: u32,
    bytes: u64,
) -> Result<(), Error> {
    let lifecycle =
        Lifecycle { permissions: 1, accesses: ACCESSES, extensions: 0, revokes: contender.revokes };
    let work = LeaseWork {
        cycle: Cycle::Lifecycle(lifecycle),
        clients: 1,
        bytes,
        lease_us: match contender.revokes {
            true => LONG_US,
            false => SHORT_US * u64::from(clients.div_ceil(THREADS)),
        },
    };
    let outcome = measure(run, contender, clients, work)?;
    let setting = setting(run, contender, clients).size(bytes);
    let what = format!("{}, {}, {bytes} bytes", contender.name, count(clients, "client"));
    let rate = results.record(&setting, "access_rate_per_s", Unit::PerSecond);
    let rate = rate.mean(outcome.rate_per_s * f64::from(ACCESSES));
    results.add(format!("{what}: accesses"), rate);
    let whole = (&*format!("{what}: permission and accesses"), "cycle_latency_us");
    add_latency(run, results, &setting, whole, &outcome.lease.cycle);
    Ok(())
}

fn draw(results: &Results, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    for &bytes in SIZES {
        let mut shown = results.clone();
        shown.rows.retain(|row| row.record.setting.number("size") == Some(bytes as f64));
        for (metric, statistic, what) in [
            ("access_rate_per_s", Statistic::Mean, "rate"),
            ("cycle_latency_us", results.typical(), "latency"),
        ] {
            let series = Series { metric, statistic, across: "clients", ours: "patronus" };
            let title = format!("Three accesses of {bytes} bytes with a permission");
            let name = canvas.file(&format!("{what}-{bytes}"));
            let canvas = Canvas { name: &name, ..*canvas };
            let x = Axis::log("clients of each compute node");
            files.extend(lines(&shown, &series, &title, x, &canvas)?);
        }
    }
    Ok(files)
}
