//! Stores over the size of a chunk, with 24 threads on one compute node (OneSidedMW §6.1.1,
//! figure 6).

use units::Size;

use super::{
    BLOCK_BYTES, Contender, Measured, ONESIDEDMW, ONESIDEDMW_PAPER, Point, RPC_MW_1, RPC_MW_2,
    STATIC_BYTES, STATIC_MR, show,
};
use crate::Error;
use crate::kv::workload::Workload;
use crate::paper::experiment::Experiment;
use crate::paper::results::Results;
use crate::paper::{Extent, Run};
use bench_report::record::{Record, Unit};

/// Figure 6.
pub const EXPERIMENT: Experiment = Experiment {
    name: "kv",
    title: "Key-value store over the size of a chunk (§6.1.1, figure 6)",
    claims: &[
        "osmw.kv.throughput.4k",
        "osmw.kv.throughput.2k",
        "osmw.kv.dealloc.4k",
        "osmw.kv.dealloc.2k",
        "osmw.memory.8k",
        "rpcmw2.kv.insert.2k",
        "rpcmw2.kv.mixed.2k",
        "osmw.kv.over.rpcmw",
        "osmw.kv.p99.added",
        "rpcmw.kv.p99.saturated",
        "rpcmw.kv.p99.unsaturated",
    ],
    steps,
    run,
    draw: show::sizes,
};

/// Threads of the paper's compute node.
const THREADS: u32 = 24;
/// Threads on this machine.
const THREADS_HERE: u32 = 2;
/// Operations of each thread: 48,000 of all together, where the paper has 1,000,000.
const OPERATIONS: u32 = 2_000;
/// Least operations of each thread: with fewer, the first chunk of each thread, which is there
/// before the measurement, raises the throughput.
const OPERATIONS_MIN: u32 = 400;
/// Sizes of blocks.
const BLOCKS: &[u64] = &[256, BLOCK_BYTES];
/// Sizes of chunks.
const CHUNKS: &[u64] = &[512, 1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10];
const CHUNKS_QUICK: &[u64] = &[2 << 10, 4 << 10, 8 << 10, 32 << 10];
/// The schemes beside Static-MR.
const FINE: &[Contender] = &[ONESIDEDMW, ONESIDEDMW_PAPER, RPC_MW_1, RPC_MW_2];
/// The workloads.
const WORKLOADS: [Workload; 2] = [Workload::FillSync, Workload::Mixed];

/// Blocks of a workload: the paper states numbers of the mix for 1 KiB only.
fn blocks(run: &Run<'_>, workload: Workload) -> &'static [u64] {
    match (workload, run.extent) {
        (Workload::FillSync, Extent::Full) => BLOCKS,
        _ => &BLOCKS[1..],
    }
}

/// Chunks that hold at least two blocks, so that not every insert allocates.
fn chunks(run: &Run<'_>, block: u64) -> impl Iterator<Item = u64> {
    let all = if run.extent == Extent::Full { CHUNKS } else { CHUNKS_QUICK };
    all.iter().copied().filter(move |chunk| *chunk >= 2 * block)
}

fn fine(run: &Run<'_>) -> impl Iterator<Item = Contender> {
    let simulated = run.testbed.simulated();
    FINE.iter().copied().filter(move |contender| simulated || contender.runs_here())
}

fn groups(run: &Run<'_>) -> Vec<(Workload, u64)> {
    let of = |workload| blocks(run, workload).iter().map(move |block| (workload, *block));
    WORKLOADS.into_iter().flat_map(of).collect()
}

fn steps(run: &Run<'_>) -> usize {
    let groups = groups(run);
    groups.iter().map(|(_, block)| 1 + fine(run).count() * chunks(run, *block).count()).sum()
}

/// Numbers of a scheme at a size of chunks.
type Fine = (Contender, u64, Measured);

/// Measures all points, one group of a workload and a size of blocks after the other.
///
/// # Errors
/// Errors of the testbed.
fn run(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    let mut over_rpc = Vec::new();
    for (workload, block_bytes) in groups(run) {
        let point = |contender, chunk_bytes| Point {
            contender,
            workload,
            block_bytes,
            chunk_bytes,
            compute_nodes: 1,
            threads: if run.testbed.simulated() { THREADS } else { THREADS_HERE },
            operations: run.rounds(OPERATIONS).max(OPERATIONS_MIN),
            deletes: true,
        };
        let group = format!("{}, blocks of {}", workload.name(), Size(block_bytes));
        let what = format!("{group}, static-mr");
        let base = point(STATIC_MR, STATIC_BYTES).measure(run, results, &what)?;
        let mut fine: Vec<Fine> = Vec::new();
        for chunk_bytes in chunks(run, block_bytes) {
            for contender in self::fine(run) {
                let what = format!("{group}, {}, {}", contender.name, Size(chunk_bytes));
                let point = point(contender, chunk_bytes);
                let measured = point.measure(run, results, &what)?;
                ratios(run, results, &what, &point, &base, &measured);
                fine.push((contender, chunk_bytes, measured));
            }
        }
        for (_, chunk, ours) in fine.iter().filter(|(c, ..)| *c == ONESIDEDMW) {
            let rpc = fine.iter().filter(|(c, other, _)| !c.is_onesidedmw() && other == chunk);
            over_rpc.extend(rpc.map(|(_, _, rpc)| ours.rate_per_s / rpc.rate_per_s));
        }
        if workload == Workload::FillSync && block_bytes == BLOCK_BYTES {
            tails(run, results, &base, &fine);
        }
    }
    let setting = run.setting(ONESIDEDMW.name).with("over", "rpc-mw");
    let most = over_rpc.into_iter().fold(0.0, f64::max);
    let record = results.record(&setting, "rate_ratio", Unit::Ratio).mean(most);
    results.claimed("onesidedmw over rpc-mw: operations, at most", record, "osmw.kv.over.rpcmw");
    Ok(())
}

/// Adds the ratios of a point to Static-MR, with the paper's numbers.
fn ratios(
    run: &Run<'_>,
    results: &mut Results,
    what: &str,
    point: &Point,
    base: &Measured,
    measured: &Measured,
) {
    let setting = point.setting(run).with("over", STATIC_MR.name);
    let rate = results.record(&setting, "rate_ratio", Unit::Ratio);
    let rate = rate.mean(measured.rate_per_s / base.rate_per_s);
    let over = format!("{what}: operations over static-mr");
    let returned = results.record(&point.setting(run), "returned_ratio", Unit::Ratio);
    let returned = returned.mean(measured.returned_ratio);
    let deleted = format!("{what}: memory given back");
    let is_kib = point.block_bytes == BLOCK_BYTES;
    let fills = is_kib && point.workload == Workload::FillSync;
    match (point.contender.name, point.chunk_bytes) {
        ("onesidedmw", 4096) if fills => results.claimed(over, rate, "osmw.kv.throughput.4k"),
        ("onesidedmw", 2048) if fills => results.claimed(over, rate, "osmw.kv.throughput.2k"),
        ("rpc-mw-2", 2048) if fills => results.fitted(over, rate, "rpcmw2.kv.insert.2k"),
        ("rpc-mw-2", 2048) if is_kib => results.fitted(over, rate, "rpcmw2.kv.mixed.2k"),
        _ => results.add(over, rate),
    }
    // These claims follow from the workload, so a measurement on another machine says no more.
    let claim = match (point.contender.name, point.chunk_bytes) {
        ("onesidedmw", 2048) => Some("osmw.kv.dealloc.2k"),
        ("onesidedmw", 4096) => Some("osmw.kv.dealloc.4k"),
        ("onesidedmw", 8192) => Some("osmw.memory.8k"),
        _ => None,
    };
    match claim.filter(|_| fills && run.testbed.simulated()) {
        Some(id) => results.claimed(deleted, returned, id),
        None => results.add(deleted, returned),
    }
}

/// Adds what the paper says of the 99th percentile.
fn tails(run: &Run<'_>, results: &mut Results, base: &Measured, fine: &[Fine]) {
    let ours = |chunk: u64| {
        let found = fine.iter().find(|(c, other, _)| *c == ONESIDEDMW && *other == chunk);
        found.map_or(f64::NAN, |(.., measured)| measured.p99_us)
    };
    let extreme = |all: &mut dyn Iterator<Item = f64>| all.fold(0.0, f64::max);
    for contender in self::fine(run).filter(Contender::is_onesidedmw) {
        let added = fine.iter().filter(|(c, ..)| *c == contender);
        let added = extreme(&mut added.map(|(.., measured)| measured.p99_us - base.p99_us));
        let setting = run.setting(contender.name).with("over", STATIC_MR.name);
        let record: Record = results.record(&setting, "latency_added_us", Unit::Us).mean(added);
        let what = format!("{}: added to static-mr's p99, at most", contender.name);
        results.claimed(what, record, "osmw.kv.p99.added");
    }

    let rpc = || fine.iter().filter(|(c, ..)| !c.is_onesidedmw());
    let setting = run.setting("rpc-mw").with("over", ONESIDEDMW.name);
    let saturated = extreme(&mut rpc().map(|(_, chunk, rpc)| rpc.p99_us / ours(*chunk)));
    let record = results.record(&setting, "latency_ratio", Unit::Ratio);
    let what = "rpc-mw over onesidedmw: p99, memory node's CPU saturated, at most";
    results.claimed(what, record.mean(saturated), "rpcmw.kv.p99.saturated");
    // With the largest chunks the fewest inserts allocate.
    let largest = fine.iter().map(|(_, chunk, _)| *chunk).max().unwrap_or_default();
    let least = rpc().find(|(c, chunk, _)| *c == RPC_MW_2 && *chunk == largest);
    let least = least.map_or(0.0, |(_, chunk, rpc)| rpc.p99_us / ours(*chunk));
    let setting = setting.with("chunk", largest);
    let record = results.record(&setting, "latency_ratio", Unit::Ratio);
    let what = format!("rpc-mw-2 over onesidedmw: p99, chunks of {}", Size(largest));
    results.claimed(what, record.mean(least), "rpcmw.kv.p99.unsaturated");
}
