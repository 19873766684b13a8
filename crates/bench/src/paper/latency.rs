//! Latency of allocation and of access, with 1 thread and with 24 on one compute node (OneSidedMW §6.3,
//! figure 10).

use pool::SchemeKind;

use super::finding::Findings;
use super::load::{ACCESS_BYTES, Load, Outcome, Work};
use super::{Extent, Run};
use crate::Error;
use crate::record::{Setting, Statistic, Unit};

/// Threads on the paper's compute node.
pub const THREADS: [u32; 2] = [1, 24];
/// Threads on this machine, which has fewer cores than the paper's compute node.
pub const THREADS_HERE: [u32; 4] = [1, 2, 8, 24];

/// Who allocates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contender {
    /// Its name in tables and pictures.
    pub name: &'static str,
    /// Its scheme.
    pub scheme: SchemeKind,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
}

const PAGE: u64 = ACCESS_BYTES;

/// Figure 10(b), and the schemes that the paper's other figures have.
pub const ALLOCATORS: &[Contender] = &[
    Contender { name: "onesidedmw", scheme: SchemeKind::OneSidedMw, chunk_bytes: PAGE },
    Contender { name: "rpc-mw-1", scheme: SchemeKind::RpcMw1, chunk_bytes: PAGE },
    Contender { name: "rpc-mw-2", scheme: SchemeKind::RpcMw2, chunk_bytes: PAGE },
    Contender { name: "odrp", scheme: SchemeKind::Odrp, chunk_bytes: PAGE },
    Contender { name: "fine-mr 1 MB", scheme: SchemeKind::FineMr, chunk_bytes: 1 << 20 },
    Contender { name: "fine-mr 4 MB", scheme: SchemeKind::FineMr, chunk_bytes: 4 << 20 },
    Contender { name: "static-mr 16 MB", scheme: SchemeKind::StaticMr, chunk_bytes: 16 << 20 },
];

/// Measured rounds of each thread.
const ROUNDS: u32 = 400;
/// Rounds where a chunk is large: the memory node's memory is a chunk for each.
const ROUNDS_LARGE: u32 = 12;

/// Bytes that this machine is asked for: what its threads had is cleared when they end.
const BYTES_HERE: u64 = 256 << 20;

/// Rounds that so many bytes allow.
fn rounds_here(chunk_bytes: u64, threads: u32) -> u32 {
    ((BYTES_HERE / chunk_bytes / u64::from(threads)) as u32).clamp(1, ROUNDS_LARGE)
}

/// Threads, in this place.
fn threads(run: &Run<'_>) -> &'static [u32] {
    match (run.place.simulated(), run.extent) {
        (true, _) => &THREADS,
        (false, Extent::Full) => &THREADS_HERE,
        (false, Extent::Quick) => &THREADS_HERE[..2],
    }
}

/// Steps of [`allocation`].
pub fn allocation_steps(run: &Run<'_>) -> usize {
    ALLOCATORS.len() * threads(run).len()
}

/// Each thread allocates a chunk and reads a page of it; nothing is freed meanwhile. Each has a connection,
/// and so an Alloc QP, of its own: requests of one Alloc QP are served one by one.
///
/// # Errors
/// As what runs.
pub fn allocation(run: &Run<'_>, findings: &mut Findings) -> Result<(), Error> {
    for contender in ALLOCATORS {
        let Contender { name, scheme, chunk_bytes } = *contender;
        for &threads in threads(run) {
            let rounds = match (chunk_bytes > PAGE, run.place.simulated()) {
                (false, _) => ROUNDS,
                (true, true) => ROUNDS_LARGE,
                (true, false) => rounds_here(chunk_bytes, threads),
            };
            let load = Load {
                chunk_bytes,
                threads,
                ..Load::new(scheme, Work::AllocateAccess, run.rounds(rounds))
            };
            let outcome = run.load(&format!("{name}, {threads} threads"), &load)?;
            allocation_findings(run, findings, name, threads, &outcome);
        }
    }
    Ok(())
}

fn allocation_findings(
    run: &Run<'_>,
    findings: &mut Findings,
    name: &str,
    threads: u32,
    outcome: &Outcome,
) {
    let setting = run.setting(name).with("threads", u64::from(threads));
    let of = findings.record(&setting, "alloc_latency_us", Unit::Us);
    let (statistic, us) = run.typical(&outcome.allocate);
    let what = format!("{name}, {}: allocation, {statistic}", count(threads));
    let typical = of.value(statistic, us);
    match (name, threads) {
        ("onesidedmw", 1) => findings.claimed(what, typical, "osmw.alloc.latency.1"),
        ("onesidedmw", 24) => findings.claimed(what, typical, "osmw.alloc.latency.24"),
        // The text says RPC-MW; 10(b) has both types, which allocate alike: the one that it defends.
        ("rpc-mw-2", 24) => findings.claimed(what, typical, "rpcmw.alloc.latency.24"),
        _ => findings.add(what, typical),
    }
    let p99 = of.value(Statistic::P99, outcome.allocate.quantile_us(0.99));
    findings.add(format!("{name}, {}: allocation, p99", count(threads)), p99);
    let access = findings.record(&setting, "access_latency_us", Unit::Us);
    let (statistic, us) = run.typical(&outcome.access);
    let what = format!("{name}, {}: access after it, {statistic}", count(threads));
    findings.add(what, access.value(statistic, us));
}

/// How a page is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accessor {
    /// Its name in tables and pictures.
    pub name: &'static str,
    scheme: SchemeKind,
    /// All threads share one connection, and so its management QPs.
    shared: bool,
    /// The scheme has management QPs of their own.
    separation: bool,
}

const fn accessor(name: &'static str, scheme: SchemeKind) -> Accessor {
    Accessor { name, scheme, shared: false, separation: true }
}

/// Figure 10(a).
pub const ACCESSORS: &[Accessor] = &[
    accessor("one-sided", SchemeKind::StaticMr),
    accessor("rpc-mw-2", SchemeKind::RpcMw2),
    accessor("odrp", SchemeKind::Odrp),
    Accessor { separation: false, ..accessor("onesidedmw", SchemeKind::OneSidedMw) },
    Accessor { shared: true, ..accessor("onesidedmw (+Sep)", SchemeKind::OneSidedMw) },
];

/// The pause between two accesses of a thread: the paper's threads allocate there, which takes them so
/// long (§6.3). Without it 24 threads saturate the link, and every access waits for that.
fn pause_us(threads: u32) -> f64 {
    if threads == 1 { 10.7 } else { 22.5 }
}

/// Steps of [`access`].
pub fn access_steps(run: &Run<'_>) -> usize {
    (ACCESSORS.len() + 3) * threads(run).len()
}

/// Each thread reads a page of its own chunk, and pauses; then once more between allocations.
///
/// Without separation each thread's access QP carries the chain that allocates, and it has a Free QP of its own; with
/// it (+Sep) all share one Alloc and one Free QP, and only their access QPs are their own.
///
/// # Errors
/// As what runs.
pub fn access(run: &Run<'_>, findings: &mut Findings) -> Result<(), Error> {
    for &threads in threads(run) {
        let mut all: Vec<(&str, f64)> = Vec::new();
        for Accessor { name, scheme, shared, separation } in ACCESSORS {
            let work = Work::Access { pause_us: pause_us(threads) };
            let rounds = run.rounds(2 * ROUNDS);
            let (shared, separation) = (*shared, *separation);
            let load = Load { threads, shared, separation, ..Load::new(*scheme, work, rounds) };
            let outcome = run.load(&format!("{name}, {threads} threads"), &load)?;
            let setting = run.setting(name).with("threads", u64::from(threads));
            let of = findings.record(&setting, "access_latency_us", Unit::Us);
            let (statistic, us) = run.typical(&outcome.access);
            let what = format!("{name}, {}: access, {statistic}", count(threads));
            findings.add(what, of.value(statistic, us));
            all.push((name, us));
        }
        let us = |name| all.iter().find(|(n, _)| *n == name).map_or(0.0, |(_, us)| *us);
        let (sep, without) = ("onesidedmw (+Sep)", "onesidedmw");
        let setting = run.setting(sep).with("over", without).with("threads", u64::from(threads));
        let record = findings.record(&setting, "access_latency_ratio", Unit::Ratio);
        let record = record.mean(us(sep) / us(without));
        let what = format!("{sep} over {without}, {}: access", count(threads));
        match threads {
            24 => findings.claimed(what, record, "separation.access.latency"),
            _ => findings.add(what, record),
        }
        access_between_allocations(run, findings, threads)?;
        back_to_back(run, findings, threads)?;
    }
    Ok(())
}

/// Access in the loop that the paper describes for both halves of its figure: allocate, access (§6.3).
/// One-sided is RPC-MW's access: a connection is not shared, and no chain stands in the way.
fn access_between_allocations(
    run: &Run<'_>,
    findings: &mut Findings,
    threads: u32,
) -> Result<(), Error> {
    let mut all = Vec::new();
    for (name, scheme) in [("one-sided", SchemeKind::RpcMw2), ("odrp", SchemeKind::Odrp)] {
        let rounds = run.rounds(ROUNDS);
        let load = Load { threads, ..Load::new(scheme, Work::AllocateAccess, rounds) };
        let outcome = run.load(&format!("{name}, {threads} threads"), &load)?;
        let setting = run.setting(name).with("threads", u64::from(threads));
        let setting = setting.with("between", "allocations");
        let of = findings.record(&setting, "access_latency_us", Unit::Us);
        let (statistic, us) = run.typical(&outcome.access);
        let what = format!("{name}, {}: access between allocations, {statistic}", count(threads));
        match (name, threads) {
            ("odrp", 24) => findings.claimed(what, of.value(statistic, us), "odrp.access.latency"),
            _ => findings.add(what, of.value(statistic, us)),
        }
        all.push(us);
    }
    let setting = run.setting("odrp").with("over", "one-sided").with("threads", u64::from(threads));
    let ratio = findings.record(&setting, "access_latency_ratio", Unit::Ratio);
    let ratio = ratio.mean(all[1] / all[0]);
    let what = format!("odrp over one-sided, {}: access between allocations", count(threads));
    match threads {
        24 => findings.claimed(what, ratio, "odrp.access.ratio.24"),
        _ => findings.add(what, ratio),
    }
    Ok(())
}

/// One-sided access without a pause: what the link bears.
fn back_to_back(run: &Run<'_>, findings: &mut Findings, threads: u32) -> Result<(), Error> {
    let rounds = run.rounds(2 * ROUNDS);
    let work = Work::Access { pause_us: 0.0 };
    let load = Load { threads, ..Load::new(SchemeKind::StaticMr, work, rounds) };
    let outcome = run.load(&format!("back to back, {threads} threads"), &load)?;
    let setting: Setting = run.setting("one-sided");
    let setting = setting.with("threads", u64::from(threads)).with("pause", false);
    let of = findings.record(&setting, "access_latency_us", Unit::Us);
    let (statistic, us) = run.typical(&outcome.access);
    let what = format!("one-sided, {}: access, back to back, {statistic}", count(threads));
    findings.add(what, of.value(statistic, us));
    Ok(())
}

fn count(threads: u32) -> String {
    super::count(threads, "thread")
}
