//! Interruption by a refused access, with and without spare QPs (Patronus §7.2.5, table 5).
//!
//! ```text
//! post          error reported     QP replaced or re-established     next access succeeds
//!  │<── detection ──>│<────────────────── interruption ─────────────────>│
//! ```
//!
//! The paper's sums leave the detection out. Both are here. The detection is seen with a spare QP,
//! whose promotion is an exchange of an index.

use std::path::PathBuf;
use std::pin::Pin;

use pool::join::join;
use pool::{Error as PoolError, LeaseTerms};

use super::contenders::{Choice, Contender, PATRONUS, on};
use super::outcome::{FaultTimes, LeaseOutcome};
use super::work::{Cycle, LeaseWork, Subject};
use crate::Error;
use crate::paper::Run;
use crate::paper::experiment::{Canvas, Experiment};
use crate::paper::load::{Load, Work};
use crate::paper::measure::Thread;
use crate::paper::results::Results;
use bench_report::histogram::Latencies;
use bench_report::plot::Bars;
use bench_report::record::Unit;

/// Table 5.
pub const EXPERIMENT: Experiment = Experiment {
    name: "spare",
    title: "Interruption by a refused access (§7.2.5, table 5)",
    claims: &[
        "patronus.fault.reported",
        "patronus.fault.with_spare",
        "patronus.fault.without_spare",
        "patronus.fault.recover",
    ],
    steps: |run| on(run, CONTENDERS).len(),
    run,
    draw,
};

const WITH: Contender = PATRONUS.named("with a spare QP");
const WITHOUT: Contender = PATRONUS.with("without a spare QP", &[("spares", Choice::Number(0))]);
const CONTENDERS: &[Contender] = &[WITH, WITHOUT];

const BYTES: u64 = 64;
/// Lease: longer than a round.
const LEASE_US: u64 = 500_000;
const ROUNDS: u32 = 50;

/// Interruptions of the calling thread and of accesses behind the refused one.
const METRICS: [(&str, &str); 2] =
    [("interruption_us", "interruption"), ("neighbour_us", "access behind the refused one")];

fn run(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    let work = LeaseWork { cycle: Cycle::Refused, clients: 1, bytes: BYTES, lease_us: LEASE_US };
    let mut measured = Vec::new();
    for contender in on(run, CONTENDERS) {
        let load = Load {
            node_options: contender.options(),
            chunk_bytes: LeaseWork::CHUNK_BYTES,
            ..Load::new(contender.scheme, Work::Lease(work), run.rounds(ROUNDS))
        };
        measured.push(run.load(contender.name, &load)?.lease.fault.unwrap_or_default());
    }
    let [with, without] = &measured[..] else { return Ok(()) };
    let typical = |latencies: &Latencies| run.typical(latencies).1;
    let (statistic, reported) = run.typical(&with.error);
    let value = |contender: &Contender, metric: &str, us: f64, results: &Results| {
        let setting = run.setting("patronus").with("case", contender.name);
        results.record(&setting, metric, Unit::Us).value(statistic, us)
    };
    let record = value(&WITH, "reported_us", reported, results);
    results.claimed("from an illegal access to its error", record, "patronus.fault.reported");
    // The detection, and the access itself, are no part of the interruption.
    let interruption =
        |times: &FaultTimes| (typical(&times.next) - reported - typical(&times.access)).max(0.0);
    let [metric, neighbour_metric] = METRICS;
    let notify = typical(&without.notify);
    for (contender, times) in [(&WITH, with), (&WITHOUT, without)] {
        let name = contender.name;
        let record = value(contender, metric.0, interruption(times), results);
        let what = format!("{name}: interruption, without the detection");
        match *contender == WITH {
            true => results.bounded(what, record, "patronus.fault.with_spare"),
            false => results.derived(what, record, "patronus.fault.without_spare"),
        }
        let record = value(contender, "next_us", typical(&times.next), results);
        results.add(format!("{name}: until the next access has succeeded"), record);
        let record = value(contender, neighbour_metric.0, typical(&times.neighbour), results);
        results.add(format!("{name}: {}, on the same QP", neighbour_metric.1), record);
    }
    let record = value(&WITHOUT, "notify_us", notify, results);
    // The paper's 8 us are those of an RPC over RDMA.
    results.add("a request on the control connection, which is TCP", record);
    let recover = (interruption(without) - notify).max(0.0);
    let record = value(&WITHOUT, "recover_us", recover, results);
    let what = "without a spare QP: interruption less this request";
    // In the simulation: changes of QPs, each of `node_cpu.modify_qp`.
    results.derived(what, record, "patronus.fault.recover");
    Ok(())
}

/// Lets the memory node's NIC refuse accesses, and times what follows.
///
/// # Errors
/// Errors of the pool; [`PoolError::Protocol`] if the NIC does not refuse an access.
pub(super) fn refused<T: Thread>(
    subject: &Subject<'_, T>,
    rounds: u32,
) -> Result<LeaseOutcome, Error> {
    let (thread, pool, bytes) = (subject.thread, subject.thread.pool(), subject.work.bytes);
    let terms = LeaseTerms::shared_write(subject.work.lease());
    let mut fault = FaultTimes::default();
    let [mut one, mut other] = [vec![0; bytes as usize], vec![0; bytes as usize]];
    for _ in 0..rounds {
        let permission =
            thread.wait(pool.acquire_in(thread.group(), &subject.objects[0], &terms))?;
        let grant = permission.grant();
        // The range directly behind that of the permission.
        let mut forged = grant;
        forged.addr += grant.len;
        let refusal = |result| match result {
            Err(PoolError::Access { .. }) => Ok(thread.now_ns()),
            result => Err(PoolError::Protocol {
                attempt: "measuring refused accesses".into(),
                why: format!("a READ beyond the permission ended with {result:?}"),
            }),
        };
        let start = thread.now_ns();
        thread.wait(pool.read(&grant, 0, &mut one))?;
        let accessed = thread.now_ns();
        pool.node_status()?;
        fault.access.record_ns(accessed - start);
        fault.notify.record_ns(thread.now_ns() - accessed);

        let start = thread.now_ns();
        let refused_at = refusal(thread.wait(pool.read(&forged, 0, &mut one)))?;
        thread.wait(pool.read(&grant, 0, &mut one))?;
        fault.error.record_ns(refused_at - start);
        fault.next.record_ns(thread.now_ns() - start);
        while pool.restore_spares() {}

        let start = thread.now_ns();
        type Access<'a> = Pin<Box<dyn Future<Output = Result<u64, PoolError>> + 'a>>;
        let accesses: [Access<'_>; 2] = [
            Box::pin(async { refusal(pool.read(&forged, 0, &mut one).await).map(|_| 0) }),
            Box::pin(async {
                pool.read(&grant, 0, &mut other).await?;
                Ok(thread.now_ns())
            }),
        ];
        let ends = thread.wait(join(accesses, 2)).into_iter().collect::<Result<Vec<_>, _>>()?;
        let neighbour = ends.into_iter().max().expect("two accesses");
        fault.neighbour.record_ns(neighbour - start);
        while pool.restore_spares() {}
        thread.wait(pool.revoke(&permission))?;
    }
    Ok(LeaseOutcome { fault: Some(fault), ..LeaseOutcome::default() })
}

fn draw(results: &Results, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    let names = METRICS.map(|(_, what)| what);
    let mut bars = Bars::new("A refused access", "time (us)", names);
    for contender in CONTENDERS {
        let value = |metric| {
            let is = |s: &bench_report::record::Setting| {
                s.get("case").is_some_and(|case| case.to_string() == contender.name)
            };
            results.find(metric, results.typical(), is).unwrap_or_default()
        };
        bars = bars.group(contender.name, METRICS.map(|(metric, _)| value(metric)));
    }
    Ok(bars.subtitle(canvas.subtitle).write(canvas.directory, canvas.name)?.into())
}
