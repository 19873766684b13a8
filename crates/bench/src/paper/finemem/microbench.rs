//! FineMem's microbenchmark with many threads (§6.2): table 2, figures 1(b), 9 and 10.

use std::path::PathBuf;

use pool::{Scheme, schemes};

use crate::Error;
use crate::paper::churn::{Churn, Delays};
use crate::paper::experiment::{Canvas, Experiment};
use crate::paper::load::{Load, Work};
use crate::paper::measure::Outcome;
use crate::paper::picture::{Series, lines};
use crate::paper::results::Results;
use crate::paper::{Extent, Run, count};
use bench_report::plot::Axis;
use bench_report::record::{Setting, Statistic, Unit};
use units::Size;

/// Table 2.
pub const TABLE_2: Experiment = Experiment {
    name: "crowd",
    title: "Allocation of 4 KiB by 512 threads (§6.2, table 2)",
    claims: &[
        "finemem.alloc.512.mean",
        "finemem.alloc.512.p99",
        "finemem.cas.mean",
        "premmap.alloc.512.mean",
        "premmap.alloc.512.p99",
        "premmap.cas.mean",
    ],
    steps: |run| contenders(run).count(),
    run: table_2,
    draw: |results, canvas| {
        crate::paper::picture::bars(
            results,
            "alloc_latency_us",
            "Allocation of 4 KiB",
            |_| true,
            canvas,
        )
    },
};

/// Figure 10, left.
pub const THREADS: Experiment = Experiment {
    name: "threads",
    title: "Allocation of 4 KiB over the number of threads (§6.2, figure 10, left)",
    claims: &[],
    steps: |run| contenders(run).count() * threads(run).len(),
    run: |run, results| against_threads(run, results, HALF),
    draw: |results, canvas| draw_threads(results, canvas, "Allocation of 4 KiB, fragmented memory"),
};

/// Figure 1(b).
pub const ALL_AT_ONCE: Experiment = Experiment {
    name: "threadtest",
    title: "Threads that repeatedly allocate and free all of their memory (§2.2, figure 1(b))",
    claims: &[],
    steps: |run| contenders(run).count() * threads(run).len(),
    run: |run, results| against_threads(run, results, WHOLE),
    draw: |results, canvas| draw_threads(results, canvas, "Allocation of 4 KiB, empty memory"),
};

/// Figure 9.
pub const SIZES: Experiment = Experiment {
    name: "sizes",
    title: "Allocation over the size (§6.2, figure 9); 128 threads if simulated",
    claims: &[],
    steps: |run| contenders(run).count() * sizes(run).len(),
    run: against_sizes,
    draw: draw_sizes,
};

/// An allocator that the figure compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contender {
    /// Name in tables and pictures.
    pub name: &'static str,
    /// Allocation scheme.
    pub scheme: Scheme,
    /// See [`Load::contention_control`].
    pub contention_control: bool,
    /// Delays of the threads outside the memory node.
    pub delays: Option<Delays>,
}

impl Contender {
    /// A scheme with its default settings.
    pub const fn new(name: &'static str, scheme: Scheme) -> Self {
        Self { name, scheme, contention_control: true, delays: None }
    }

    /// This contender under the conditions of the paper's tables with many threads, if simulated:
    /// allocations go through a service, the benchmark has think time, and an array is CASed word
    /// by word. Parameters that the paper does not state are fitted: see [`Delays::FINEMEM`] and
    /// [`schemes::finemem::Options::contention_control`].
    pub fn as_published(&self, run: &Run<'_>) -> Self {
        if !run.testbed.simulated() {
            return *self;
        }
        let is_tree = self.scheme != schemes::PREMMAP_ONESIDED;
        let contention_control = self.contention_control && is_tree;
        Self { contention_control, delays: Some(Delays::FINEMEM), ..*self }
    }
}

/// FineMem and its baselines.
const CONTENDERS: &[Contender] = &[
    Contender::new("finemem", schemes::FINEMEM),
    Contender::new("finemem-paper", schemes::FINEMEM_PAPER),
    Contender::new("premmap-onesided", schemes::PREMMAP_ONESIDED),
    Contender::new("premmap-rpc", schemes::PREMMAP_RPC),
    Contender::new("ondemand-rpc", schemes::ONDEMAND_RPC),
];

/// The contenders of a run.
pub fn contenders(_run: &Run<'_>) -> impl Iterator<Item = &'static Contender> {
    CONTENDERS.iter()
}

/// Compute nodes.
pub const NODES: u16 = 16;
const PAGE: u64 = 4096;
/// Fraction of the held blocks that is freed in an epoch.
const HALF: f64 = 0.5;
const WHOLE: f64 = 1.0;
/// Threads of figure 9. The paper does not state the number; 16 nodes with 8 threads each, as for
/// the traces.
const THREADS_OF_SIZES: u32 = 128;
/// Limit of the blocks that a thread holds; the paper's threads hold 70,000.
const HELD: u32 = 60;
const HELD_QUICK: u32 = 16;
const HELD_MIN: u32 = 4;
/// Limit of the blocks that all threads hold in an array. All threads search the array from its
/// start, so the number of round trips grows with the square of the blocks.
const BLOCKS: u64 = 8192;
const BLOCKS_AS_PUBLISHED: u64 = 16384;
/// Limit of the bytes that all threads hold, unless [`HELD_MIN`] requires more: under virtual time,
/// and on this machine.
const BYTES: u64 = 1 << 30;
const BYTES_HERE: u64 = 128 << 20;
const EPOCHS: u32 = 2;
/// Pause between frees and allocations: twice the longest interval between scans. A quick run on
/// this machine has a pause for a single scan.
const PAUSE_MS: u64 = 200;
const PAUSE_QUICK_MS: u64 = 10;

fn threads(run: &Run<'_>) -> &'static [u32] {
    match (run.testbed.simulated(), run.extent) {
        (true, Extent::Full) => &[1, 16, 32, 64, 128, 256, 512],
        (true, Extent::Quick) => &[1, 32],
        (false, Extent::Full) => &[1, 2, 8],
        (false, Extent::Quick) => &[1, 2],
    }
}

fn sizes(run: &Run<'_>) -> &'static [u64] {
    match run.extent {
        Extent::Full => &[PAGE, PAGE << 2, PAGE << 4, PAGE << 6, PAGE << 8, PAGE << 9],
        Extent::Quick => &[PAGE, PAGE << 4, PAGE << 9],
    }
}

/// Number of threads of table 2 on this testbed.
fn table_2_threads(run: &Run<'_>) -> u32 {
    match (run.testbed.simulated(), run.extent) {
        (true, Extent::Full) => 512,
        (true, Extent::Quick) => 64,
        (false, _) => 8,
    }
}

/// Parameters of one run of the microbenchmark.
#[derive(Clone, Copy, Debug)]
pub struct Microbench {
    /// Number of threads.
    pub threads: u32,
    /// Memory nodes; the threads allocate on them round-robin.
    pub memory_nodes: u16,
    /// Bytes of a block.
    pub bytes: u64,
    /// Fraction of the held blocks that is freed in an epoch.
    pub freed: f64,
}

impl Microbench {
    /// Threads that hold blocks of 4 KiB on one memory node and free half of them in an epoch.
    pub const fn of(threads: u32) -> Self {
        Self { threads, memory_nodes: 1, bytes: PAGE, freed: HALF }
    }
}

/// Runs the microbenchmark once. Each thread has a connection to each memory node, because in the
/// paper each thread has a worker of the allocation service (§4.3). Connections do not share their
/// knowledge of the headers.
///
/// # Errors
/// Errors of the testbed.
pub fn measure(
    run: &Run<'_>,
    contender: &Contender,
    microbench: &Microbench,
) -> Result<(Churn, Outcome), Error> {
    let Microbench { threads, memory_nodes, bytes, freed } = *microbench;
    let simulated = run.testbed.simulated();
    let total_bytes = if simulated { BYTES } else { BYTES_HERE };
    let blocks = match contender.scheme {
        schemes::PREMMAP_ONESIDED if contender.delays.is_some() => {
            (total_bytes / bytes).min(BLOCKS_AS_PUBLISHED)
        }
        schemes::PREMMAP_ONESIDED => (total_bytes / bytes).min(BLOCKS),
        _ => total_bytes / bytes,
    };
    let held_max = if run.extent == Extent::Full { HELD } else { HELD_QUICK };
    let held = (blocks / u64::from(threads)).clamp(HELD_MIN.into(), held_max.into()) as u32;
    let freed = ((f64::from(held) * freed) as u32).max(1);
    let pause_ms = if simulated || run.extent == Extent::Full { PAUSE_MS } else { PAUSE_QUICK_MS };
    let churn = Churn { bytes, held, freed, pause_ms, delays: contender.delays };
    let epochs = if run.extent == Extent::Full { EPOCHS } else { 1 };
    let load = Load {
        compute_nodes: NODES.min(threads as u16),
        memory_nodes,
        threads,
        contention_control: contender.contention_control,
        ..Load::new(contender.scheme, Work::Churn(churn), epochs)
    };
    let mut what = format!("{}, {}, {}", contender.name, count(threads, "thread"), Size(bytes));
    if memory_nodes > 1 {
        what += &format!(", {memory_nodes} memory nodes");
    }
    Ok((churn, run.load(&what, &load)?))
}

/// The setting of a row's records.
pub fn setting(run: &Run<'_>, contender: &Contender, threads: u32, churn: &Churn) -> Setting {
    let setting = run.setting(contender.name).with("threads", u64::from(threads));
    churn.setting(setting)
}

/// The claims of a scheme's row of table 2, if any: mean, 99th percentile, and CASes.
fn claims_of(scheme: Scheme) -> Option<[&'static str; 3]> {
    match scheme {
        // The published variant, which executes its steps one after the other.
        schemes::FINEMEM_PAPER => {
            Some(["finemem.alloc.512.mean", "finemem.alloc.512.p99", "finemem.cas.mean"])
        }
        schemes::PREMMAP_ONESIDED => {
            Some(["premmap.alloc.512.mean", "premmap.alloc.512.p99", "premmap.cas.mean"])
        }
        _ => None,
    }
}

fn table_2(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    let threads = table_2_threads(run);
    for contender in contenders(run).map(|contender| contender.as_published(run)) {
        let contender = &contender;
        let (churn, outcome) = measure(run, contender, &Microbench::of(threads))?;
        let setting = setting(run, contender, threads, &churn);
        let builder = results.record(&setting, "alloc_latency_us", Unit::Us);
        let (statistic, us) = run.typical(&outcome.allocate);
        let p99 = builder.value(Statistic::P99, outcome.allocate.quantile_us(0.99));
        let mut rows = vec![
            (format!("allocation, {statistic}"), builder.value(statistic, us)),
            ("allocation, p99".into(), p99),
        ];
        if contender.scheme.is_by_cas() {
            // The paper's table says "retries", its text "CAS operations": the successful CAS
            // counts.
            let builder = results.record(&setting, "cas", Unit::Count);
            let max = builder.value(Statistic::Max, 1.0 + outcome.retries.max as f64);
            let mean = builder.mean(1.0 + outcome.retries.mean());
            rows.push(("CASes per allocation, mean".into(), mean));
            rows.push(("CASes per allocation, max".into(), max));
        }
        let claims = claims_of(contender.scheme).filter(|_| threads == 512);
        for (at, (what, record)) in rows.into_iter().enumerate() {
            let what = format!("{}, {}: {what}", contender.name, count(threads, "thread"));
            match claims.as_ref().and_then(|ids| ids.get(at)) {
                // The delays of the benchmark and the form of the array are fitted to these.
                Some(id) if contender.scheme == schemes::PREMMAP_ONESIDED => {
                    results.fitted(what, record, id);
                }
                Some(id) => results.claimed(what, record, id),
                None => results.add(what, record),
            }
        }
    }
    Ok(())
}

fn against_threads(run: &Run<'_>, results: &mut Results, freed: f64) -> Result<(), Error> {
    for contender in contenders(run) {
        for &threads in threads(run) {
            let microbench = Microbench { freed, ..Microbench::of(threads) };
            let (churn, outcome) = measure(run, contender, &microbench)?;
            let setting = setting(run, contender, threads, &churn);
            add(run, results, &setting, &count(threads, "thread"), &outcome);
        }
    }
    Ok(())
}

fn against_sizes(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    let threads = match (run.testbed.simulated(), run.extent) {
        (true, Extent::Full) => THREADS_OF_SIZES,
        (true, Extent::Quick) => 16,
        (false, _) => 2,
    };
    for contender in contenders(run) {
        for &bytes in sizes(run) {
            let microbench = Microbench { bytes, ..Microbench::of(threads) };
            let (churn, outcome) = measure(run, contender, &microbench)?;
            let setting = setting(run, contender, threads, &churn);
            add(run, results, &setting, &Size(bytes).to_string(), &outcome);
        }
    }
    Ok(())
}

/// Adds the latencies of one measurement.
pub fn add(run: &Run<'_>, results: &mut Results, setting: &Setting, what: &str, outcome: &Outcome) {
    let name = setting.get("scheme").map(ToString::to_string).unwrap_or_default();
    for (metric, verb, latencies) in [
        ("alloc_latency_us", "allocation", &outcome.allocate),
        ("free_latency_us", "free", &outcome.free),
    ] {
        let builder = results.record(setting, metric, Unit::Us);
        let (statistic, us) = run.typical(latencies);
        results.add(format!("{name}, {what}: {verb}, {statistic}"), builder.value(statistic, us));
        if metric == "alloc_latency_us" {
            let p99 = builder.value(Statistic::P99, latencies.quantile_us(0.99));
            results.add(format!("{name}, {what}: {verb}, p99"), p99);
        }
    }
}

fn draw_threads(
    results: &Results,
    canvas: &Canvas<'_>,
    title: &str,
) -> Result<Vec<PathBuf>, Error> {
    draw(results, canvas, "threads", title, Axis::log("threads"))
}

fn draw_sizes(results: &Results, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    draw(results, canvas, "size", "Allocation, fragmented memory", Axis::bytes("size of a block"))
}

/// Draws latencies of allocations over a key of their settings.
pub fn draw(
    results: &Results,
    canvas: &Canvas<'_>,
    across: &'static str,
    title: &str,
    axis: Axis,
) -> Result<Vec<PathBuf>, Error> {
    let statistic = results.typical();
    let series = Series { metric: "alloc_latency_us", statistic, across, ours: "finemem" };
    lines(results, &series, title, axis, canvas)
}
