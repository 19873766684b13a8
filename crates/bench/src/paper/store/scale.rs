//! Stores over the number of threads, up to 48 on each of 6 compute nodes, with inserts only
//! (OneSidedMW §6.1.2, figure 7).

use pool::schemes;
use units::Size;

use super::{
    BLOCK_BYTES, Contender, Measured, ONESIDEDMW, ONESIDEDMW_PAPER, Point, RPC_MW_2, STATIC_BYTES,
    STATIC_MR, of, show,
};
use crate::Error;
use crate::kv::workload::Workload;
use crate::paper::experiment::Experiment;
use crate::paper::results::Results;
use crate::paper::{Extent, Run};
use bench_report::record::Unit;

/// Figure 7.
pub const EXPERIMENT: Experiment = Experiment {
    name: "kv-scale",
    title: "Key-value store over the number of threads (§6.1.2, figure 7)",
    claims: &[
        "osmw.scale.8k",
        "osmw.scale.4k",
        "rpcmw.scale.4k",
        "osmw.scale.over.rpcmw",
        "osmw.scale.p99.lower",
        "rpcmw.scale.unlimited",
    ],
    steps: |run| threads(run).len() * lines(run).count(),
    run,
    draw: show::scale,
};

/// Compute nodes.
const NODES: u16 = 6;
/// Threads of all compute nodes.
const THREADS: &[u32] = &[6, 24, 48, 96, 144, 192, 240, 288];
const THREADS_QUICK: &[u32] = &[24, 288];
/// Threads on this machine.
const THREADS_HERE: &[u32] = &[1, 2, 4];
/// Operations of all threads together, per point.
const OPERATIONS: u32 = 60_000;
/// Most operations of one thread.
const OPERATIONS_MAX: u32 = 2_000;
/// Least operations of one thread: with fewer, the first chunk of each thread, which is there
/// before the measurement, raises the throughput.
const OPERATIONS_MIN: u32 = 100;
/// Cores of the paper's memory node (§6): the upper limit of its "unlimited" cores.
const ALL_CORES: u32 = 24;

const UNLIMITED: Contender =
    Contender { cores: ALL_CORES, ..of("rpc-mw-2, 24 cores", schemes::RPC_MW_2) };

/// A line of the figure: a scheme with a size of chunks.
const LINES: &[(Contender, u64)] = &[
    (STATIC_MR, STATIC_BYTES),
    (ONESIDEDMW, 8 << 10),
    (ONESIDEDMW, 4 << 10),
    (ONESIDEDMW_PAPER, 8 << 10),
    (ONESIDEDMW_PAPER, 4 << 10),
    (RPC_MW_2, 8 << 10),
    (RPC_MW_2, 4 << 10),
    (UNLIMITED, 8 << 10),
    (UNLIMITED, 4 << 10),
];

fn threads(run: &Run<'_>) -> &'static [u32] {
    match (run.testbed.simulated(), run.extent) {
        (true, Extent::Full) => THREADS,
        (true, Extent::Quick) => THREADS_QUICK,
        (false, Extent::Full) => THREADS_HERE,
        (false, Extent::Quick) => &THREADS_HERE[..2],
    }
}

fn lines(run: &Run<'_>) -> impl Iterator<Item = (Contender, u64)> + use<> {
    let simulated = run.testbed.simulated();
    LINES.iter().copied().filter(move |(contender, _)| simulated || contender.runs_here())
}

/// The measurements of a line, one for each number of threads.
struct Line {
    contender: Contender,
    chunk_bytes: u64,
    points: Vec<Measured>,
}

impl Line {
    /// The highest throughput over the numbers of threads.
    fn peak(&self) -> f64 {
        self.points.iter().map(|point| point.rate_per_s).fold(0.0, f64::max)
    }
}

/// Measures all lines.
///
/// # Errors
/// Errors of the testbed.
fn run(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    let mut measured = Vec::new();
    for (contender, chunk_bytes) in lines(run) {
        let mut points = Vec::new();
        for &threads in threads(run) {
            let operations = (OPERATIONS / threads).min(OPERATIONS_MAX);
            let point = Point {
                contender,
                workload: Workload::FillSync,
                block_bytes: BLOCK_BYTES,
                chunk_bytes,
                compute_nodes: NODES,
                threads,
                operations: run.rounds(operations).max(OPERATIONS_MIN),
                deletes: false,
            };
            let of_threads = crate::paper::count(threads, "thread");
            let what = format!("{}, {}, {of_threads}", contender.name, Size(chunk_bytes));
            points.push(point.measure(run, results, &what)?);
        }
        measured.push(Line { contender, chunk_bytes, points });
    }
    let line = |contender: Contender, chunk: u64| {
        measured.iter().find(|l| l.contender == contender && l.chunk_bytes == chunk)
    };
    let mut ratio = |what: &str, value: f64, id: &str| {
        let setting = run.setting("all").with("what", what);
        let record = results.record(&setting, "peak_ratio", Unit::Ratio).mean(value);
        match id {
            // The paper states an upper bound.
            "rpcmw.scale.unlimited" => results.bounded(what, record, id),
            _ => results.claimed(what, record, id),
        }
    };
    let peak = |contender, chunk| line(contender, chunk).map_or(f64::NAN, Line::peak);
    let base = peak(STATIC_MR, STATIC_BYTES);
    let (eight, four) = (peak(ONESIDEDMW, 8 << 10), peak(ONESIDEDMW, 4 << 10));
    ratio("onesidedmw over static-mr, 8KiB: peak", eight / base, "osmw.scale.8k");
    ratio("onesidedmw over static-mr, 4KiB: peak", four / base, "osmw.scale.4k");
    if let (Some(eight), Some(four)) =
        (line(ONESIDEDMW_PAPER, 8 << 10), line(ONESIDEDMW_PAPER, 4 << 10))
    {
        let (eight, four) = (eight.peak() / base, four.peak() / base);
        ratio("onesidedmw-paper over static-mr, 8KiB: peak", eight, "osmw.scale.8k");
        ratio("onesidedmw-paper over static-mr, 4KiB: peak", four, "osmw.scale.4k");
    }
    let (rpc_eight, rpc_four) = (peak(RPC_MW_2, 8 << 10), peak(RPC_MW_2, 4 << 10));
    ratio("rpc-mw over static-mr, 4KiB: peak", rpc_four / base, "rpcmw.scale.4k");
    let over = (eight / rpc_eight).max(four / rpc_four);
    ratio("onesidedmw over rpc-mw: peak, at most", over, "osmw.scale.over.rpcmw");
    let lower = [4 << 10, 8 << 10].into_iter().filter_map(|chunk| {
        let (ours, rpc) = (line(ONESIDEDMW, chunk)?, line(RPC_MW_2, chunk)?);
        let pairs = ours.points.iter().zip(&rpc.points);
        pairs.map(|(ours, rpc)| 1.0 - ours.p99_us / rpc.p99_us).reduce(f64::max)
    });
    let lower = lower.fold(0.0, f64::max);
    ratio("onesidedmw: p99 lower than rpc-mw's, at most", lower, "osmw.scale.p99.lower");
    if let (Some(more), Some(most)) = (line(UNLIMITED, 4 << 10), line(UNLIMITED, 8 << 10)) {
        let unlimited = (more.peak() / four).max(most.peak() / eight);
        let what = "rpc-mw, 24 cores over onesidedmw: peak, at most";
        ratio(what, unlimited, "rpcmw.scale.unlimited");
    }
    Ok(())
}
