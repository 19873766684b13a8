//! Latency of allocation and of access with 1 and 24 threads on one compute node (OneSidedMW §6.3,
//! figure 10).

use pool::{Scheme, schemes};

use super::load::{ACCESS_BYTES, Load, Work};
use super::measure::Outcome;
use super::results::Results;
use super::{Extent, Run};
use crate::Error;
use bench_report::record::{Setting, Statistic, Unit};

/// Threads on the paper's compute node.
pub const THREADS: [u32; 2] = [1, 24];
/// Threads on this machine, which has fewer cores than the paper's compute node.
pub const THREADS_HERE: [u32; 4] = [1, 2, 8, 24];

/// A compared scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contender {
    /// Name in tables and pictures.
    pub name: &'static str,
    /// Allocation scheme.
    pub scheme: Scheme,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
}

const PAGE: u64 = ACCESS_BYTES;

/// The schemes of figure 10(b) and of the paper's other figures.
pub const ALLOCATORS: &[Contender] = &[
    Contender { name: "onesidedmw", scheme: schemes::ONESIDEDMW, chunk_bytes: PAGE },
    Contender { name: "rpc-mw-1", scheme: schemes::RPC_MW_1, chunk_bytes: PAGE },
    Contender { name: "rpc-mw-2", scheme: schemes::RPC_MW_2, chunk_bytes: PAGE },
    Contender { name: "odrp", scheme: schemes::ODRP, chunk_bytes: PAGE },
    Contender { name: "fine-mr 1 MB", scheme: schemes::FINE_MR, chunk_bytes: 1 << 20 },
    Contender { name: "fine-mr 4 MB", scheme: schemes::FINE_MR, chunk_bytes: 4 << 20 },
    Contender { name: "static-mr 16 MB", scheme: schemes::STATIC_MR, chunk_bytes: 16 << 20 },
];

/// Measured rounds of each thread.
const ROUNDS: u32 = 400;
/// Measured rounds with large chunks. Each round needs a chunk of the memory node's memory.
const ROUNDS_LARGE: u32 = 12;

/// Limit of the memory in bytes on this machine; the node clears it when the threads end.
const BYTES_HERE: u64 = 256 << 20;

/// Rounds with large chunks that [`BYTES_HERE`] allows.
fn rounds_here(chunk_bytes: u64, threads: u32) -> u32 {
    ((BYTES_HERE / chunk_bytes / u64::from(threads)) as u32).clamp(1, ROUNDS_LARGE)
}

/// Numbers of threads on this testbed.
fn threads(run: &Run<'_>) -> &'static [u32] {
    match (run.testbed.simulated(), run.extent) {
        (true, _) => &THREADS,
        (false, Extent::Full) => &THREADS_HERE,
        (false, Extent::Quick) => &THREADS_HERE[..2],
    }
}

/// Number of steps of [`allocation`].
pub fn allocation_steps(run: &Run<'_>) -> usize {
    ALLOCATORS.len() * threads(run).len()
}

/// Each thread allocates chunks and reads a page of each; chunks are not freed during the
/// measurement. Each thread has a connection of its own, and so its own Alloc QP, because the
/// requests of one Alloc QP are served one at a time.
///
/// # Errors
/// Errors of the testbed.
pub fn allocation(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    for contender in ALLOCATORS {
        let Contender { name, scheme, chunk_bytes } = *contender;
        for &threads in threads(run) {
            let rounds = match (chunk_bytes > PAGE, run.testbed.simulated()) {
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
            add_allocation(run, results, name, threads, &outcome);
        }
    }
    Ok(())
}

fn add_allocation(
    run: &Run<'_>,
    results: &mut Results,
    name: &str,
    threads: u32,
    outcome: &Outcome,
) {
    let setting = run.setting(name).with("threads", u64::from(threads));
    let builder = results.record(&setting, "alloc_latency_us", Unit::Us);
    let (statistic, us) = run.typical(&outcome.allocate);
    let what = format!("{name}, {}: allocation, {statistic}", count(threads));
    let typical = builder.value(statistic, us);
    match (name, threads) {
        ("onesidedmw", 1) => results.claimed(what, typical, "osmw.alloc.latency.1"),
        ("onesidedmw", 24) => results.claimed(what, typical, "osmw.alloc.latency.24"),
        // The paper's text says RPC-MW; figure 10(b) has both window types, which allocate alike.
        // The claim is compared with type 2, which the paper recommends.
        ("rpc-mw-2", 24) => results.claimed(what, typical, "rpcmw.alloc.latency.24"),
        _ => results.add(what, typical),
    }
    let p99 = builder.value(Statistic::P99, outcome.allocate.quantile_us(0.99));
    results.add(format!("{name}, {}: allocation, p99", count(threads)), p99);
    let access = results.record(&setting, "access_latency_us", Unit::Us);
    let (statistic, us) = run.typical(&outcome.access);
    let what = format!("{name}, {}: access after allocation, {statistic}", count(threads));
    results.add(what, access.value(statistic, us));
}

/// A compared method of access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accessor {
    /// Name in tables and pictures.
    pub name: &'static str,
    scheme: Scheme,
    /// All threads share one connection, and so its management QPs.
    shared: bool,
    /// The scheme uses separate QPs for management.
    separation: bool,
}

const fn accessor(name: &'static str, scheme: Scheme) -> Accessor {
    Accessor { name, scheme, shared: false, separation: true }
}

/// Figure 10(a).
pub const ACCESSORS: &[Accessor] = &[
    accessor("one-sided", schemes::STATIC_MR),
    accessor("rpc-mw-2", schemes::RPC_MW_2),
    accessor("odrp", schemes::ODRP),
    Accessor { separation: false, ..accessor("onesidedmw", schemes::ONESIDEDMW) },
    Accessor { shared: true, ..accessor("onesidedmw (+Sep)", schemes::ONESIDEDMW) },
];

/// Mean pause in microseconds between two accesses of a thread. The paper's threads allocate
/// between accesses, which takes this long (§6.3). Without a pause 24 threads saturate the link,
/// and the queueing delay dominates.
fn pause_us(threads: u32) -> f64 {
    if threads == 1 { 10.7 } else { 22.5 }
}

/// Number of steps of [`access`].
pub fn access_steps(run: &Run<'_>) -> usize {
    (ACCESSORS.len() + 3) * threads(run).len()
}

/// Each thread reads a page of its own chunk and pauses. Further measurements access a page after
/// each allocation, and without pauses.
///
/// Without separation, each thread's access QP carries the chain that allocates, and each thread
/// has a Free QP of its own. With separation (+Sep), all threads share one Alloc and one Free QP,
/// and each has an access QP of its own.
///
/// # Errors
/// Errors of the testbed.
pub fn access(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    for &threads in threads(run) {
        let mut latencies: Vec<(&str, f64)> = Vec::new();
        for Accessor { name, scheme, shared, separation } in ACCESSORS {
            let work = Work::Access { pause_us: pause_us(threads) };
            let rounds = run.rounds(2 * ROUNDS);
            let (shared, separation) = (*shared, *separation);
            let load = Load { threads, shared, separation, ..Load::new(scheme, work, rounds) };
            let outcome = run.load(&format!("{name}, {threads} threads"), &load)?;
            let setting = run.setting(name).with("threads", u64::from(threads));
            let builder = results.record(&setting, "access_latency_us", Unit::Us);
            let (statistic, us) = run.typical(&outcome.access);
            let what = format!("{name}, {}: access, {statistic}", count(threads));
            results.add(what, builder.value(statistic, us));
            latencies.push((name, us));
        }
        let us = |name| latencies.iter().find(|(n, _)| *n == name).map_or(0.0, |(_, us)| *us);
        let (sep, without) = ("onesidedmw (+Sep)", "onesidedmw");
        let setting = run.setting(sep).with("over", without).with("threads", u64::from(threads));
        let record = results.record(&setting, "access_latency_ratio", Unit::Ratio);
        let record = record.mean(us(sep) / us(without));
        let what = format!("{sep} over {without}, {}: access", count(threads));
        match threads {
            24 => results.claimed(what, record, "separation.access.latency"),
            _ => results.add(what, record),
        }
        access_between_allocations(run, results, threads)?;
        back_to_back(run, results, threads)?;
    }
    Ok(())
}

/// Access in the loop that the paper describes for both halves of its figure: allocate, access
/// (§6.3). "one-sided" is the access of RPC-MW: connections are not shared, and no chains run.
fn access_between_allocations(
    run: &Run<'_>,
    results: &mut Results,
    threads: u32,
) -> Result<(), Error> {
    let mut latencies = Vec::new();
    for (name, scheme) in [("one-sided", schemes::RPC_MW_2), ("odrp", schemes::ODRP)] {
        let rounds = run.rounds(ROUNDS);
        let load = Load { threads, ..Load::new(scheme, Work::AllocateAccess, rounds) };
        let outcome = run.load(&format!("{name}, {threads} threads"), &load)?;
        let setting = run.setting(name).with("threads", u64::from(threads));
        let setting = setting.with("between", "allocations");
        let builder = results.record(&setting, "access_latency_us", Unit::Us);
        let (statistic, us) = run.typical(&outcome.access);
        let what = format!("{name}, {}: access between allocations, {statistic}", count(threads));
        match (name, threads) {
            ("odrp", 24) => {
                results.claimed(what, builder.value(statistic, us), "odrp.access.latency")
            }
            _ => results.add(what, builder.value(statistic, us)),
        }
        latencies.push(us);
    }
    let setting = run.setting("odrp").with("over", "one-sided").with("threads", u64::from(threads));
    let ratio = results.record(&setting, "access_latency_ratio", Unit::Ratio);
    let ratio = ratio.mean(latencies[1] / latencies[0]);
    let what = format!("odrp over one-sided, {}: access between allocations", count(threads));
    match threads {
        24 => results.claimed(what, ratio, "odrp.access.ratio.24"),
        _ => results.add(what, ratio),
    }
    Ok(())
}

/// One-sided access without a pause, which measures the capacity of the link.
fn back_to_back(run: &Run<'_>, results: &mut Results, threads: u32) -> Result<(), Error> {
    let rounds = run.rounds(2 * ROUNDS);
    let work = Work::Access { pause_us: 0.0 };
    let load = Load { threads, ..Load::new(schemes::STATIC_MR, work, rounds) };
    let outcome = run.load(&format!("back to back, {threads} threads"), &load)?;
    let setting: Setting = run.setting("one-sided");
    let setting = setting.with("threads", u64::from(threads)).with("pause", false);
    let builder = results.record(&setting, "access_latency_us", Unit::Us);
    let (statistic, us) = run.typical(&outcome.access);
    let what = format!("one-sided, {}: access, back to back, {statistic}", count(threads));
    results.add(what, builder.value(statistic, us));
    Ok(())
}

fn count(threads: u32) -> String {
    super::count(threads, "thread")
}
