//! Allocation by many (FineMem §6.2): table 2, figures 1(b), 9 and 10.

use std::path::PathBuf;

use pool::SchemeKind;

use crate::Error;
use crate::paper::churn::{Churn, Pace};
use crate::paper::experiment::{Canvas, Experiment};
use crate::paper::finding::Findings;
use crate::paper::load::{Load, Outcome, Work};
use crate::paper::picture::{Series, lines};
use crate::paper::{Extent, Run, count};
use crate::plot::Axis;
use crate::record::{Setting, Statistic, Unit};
use crate::size::Size;

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
    draw: |findings, canvas| {
        crate::paper::picture::bars(
            findings,
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
    title: "Allocation of 4 KiB against the number of threads (§6.2, figure 10, left)",
    claims: &[],
    steps: |run| contenders(run).count() * threads(run).len(),
    run: |run, findings| against_threads(run, findings, HALF),
    draw: |findings, canvas| draw_threads(findings, canvas, "Allocation of 4 KiB in pieces"),
};

/// Figure 1(b).
pub const ALL_AT_ONCE: Experiment = Experiment {
    name: "threadtest",
    title: "Threads that allocate and free all, over and over (§2.2, figure 1(b))",
    claims: &[],
    steps: |run| contenders(run).count() * threads(run).len(),
    run: |run, findings| against_threads(run, findings, WHOLE),
    draw: |findings, canvas| draw_threads(findings, canvas, "Allocation of 4 KiB in empty memory"),
};

/// Figure 9.
pub const SIZES: Experiment = Experiment {
    name: "sizes",
    title: "Allocation against the size (§6.2, figure 9); 128 threads where it is simulated",
    claims: &[],
    steps: |run| contenders(run).count() * sizes(run).len(),
    run: against_sizes,
    draw: draw_sizes,
};

/// Who allocates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contender {
    /// Its name in tables and pictures.
    pub name: &'static str,
    /// Its scheme.
    pub scheme: SchemeKind,
    /// See [`Load::contention_control`].
    pub contention_control: bool,
    /// What else takes its threads' time.
    pub pace: Option<Pace>,
}

impl Contender {
    /// The scheme as it is.
    pub const fn new(name: &'static str, scheme: SchemeKind) -> Self {
        Self { name, scheme, contention_control: true, pace: None }
    }

    /// As in the paper's tables of a crowd, where it is simulated: through a service, by a benchmark that does something
    /// else besides, and an array that is CASed word by word. What is not told of them is fitted: see [`Pace::FINEMEM`]
    /// and [`pool::Settings::contention_control`].
    pub fn as_published(&self, run: &Run<'_>) -> Self {
        if !run.place.simulated() {
            return *self;
        }
        let is_tree = self.scheme != SchemeKind::PremmapOneSided;
        let contention_control = self.contention_control && is_tree;
        Self { contention_control, pace: Some(Pace::FINEMEM), ..*self }
    }
}

/// FineMem and its baselines.
const CONTENDERS: &[Contender] = &[
    Contender::new("finemem", SchemeKind::FineMem),
    Contender::new("finemem-paper", SchemeKind::FineMemPaper),
    Contender::new("premmap-onesided", SchemeKind::PremmapOneSided),
    Contender::new("premmap-rpc", SchemeKind::PremmapRpc),
    Contender::new("ondemand-rpc", SchemeKind::OnDemandRpc),
];

/// Who takes part here.
pub fn contenders(_run: &Run<'_>) -> impl Iterator<Item = &'static Contender> {
    CONTENDERS.iter()
}

/// Compute nodes.
pub const NODES: u16 = 16;
const PAGE: u64 = 4096;
/// What is freed of what is held.
const HALF: f64 = 0.5;
const WHOLE: f64 = 1.0;
/// Threads of figure 9. The text names none; 16 nodes of 8 threads, as in the traces.
const THREADS_OF_SIZES: u32 = 128;
/// Blocks that a thread holds, at most, where the paper's has 70,000; and all of them together in an array: a search
/// through it by so many, from its start, takes round trips by the square.
const HELD: u32 = 60;
const HELD_QUICK: u32 = 16;
const HELD_MIN: u32 = 4;
const BLOCKS: u64 = 8192;
const BLOCKS_AS_PUBLISHED: u64 = 16384;
/// Bytes that are held in all, as far as [`HELD_MIN`] allows: under virtual time, and on this machine.
const BYTES: u64 = 1 << 30;
const BYTES_HERE: u64 = 128 << 20;
const EPOCHS: u32 = 2;
/// Between frees and allocations: twice what scans are apart at most; where time passes and nothing is measured, enough
/// for one.
const REST_MS: u64 = 200;
const REST_QUICK_MS: u64 = 10;

fn threads(run: &Run<'_>) -> &'static [u32] {
    match (run.place.simulated(), run.extent) {
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

/// The crowd of table 2, in this place.
fn crowd(run: &Run<'_>) -> u32 {
    match (run.place.simulated(), run.extent) {
        (true, Extent::Full) => 512,
        (true, Extent::Quick) => 64,
        (false, _) => 8,
    }
}

/// Threads that run the microbenchmark.
#[derive(Clone, Copy, Debug)]
pub struct Crowd {
    /// How many there are.
    pub threads: u32,
    /// Memory nodes that they allocate on, in turn.
    pub memory_nodes: u16,
    /// Bytes of a block.
    pub bytes: u64,
    /// What is freed of what is held.
    pub freed: f64,
}

impl Crowd {
    /// So many threads that allocate and free 4 KiB in pieces on one memory node.
    pub const fn of(threads: u32) -> Self {
        Self { threads, memory_nodes: 1, bytes: PAGE, freed: HALF }
    }
}

/// One measurement of the microbenchmark. Each thread has a connection to each memory node, as each has a worker of the
/// allocation service (§4.3); a connection has what it knows of the headers for itself.
///
/// # Errors
/// As what runs.
pub fn measure(
    run: &Run<'_>,
    contender: &Contender,
    crowd: &Crowd,
) -> Result<(Churn, Outcome), Error> {
    let Crowd { threads, memory_nodes, bytes, freed } = *crowd;
    let simulated = run.place.simulated();
    let all = if simulated { BYTES } else { BYTES_HERE };
    let blocks = match contender.scheme {
        SchemeKind::PremmapOneSided if contender.pace.is_some() => {
            (all / bytes).min(BLOCKS_AS_PUBLISHED)
        }
        SchemeKind::PremmapOneSided => (all / bytes).min(BLOCKS),
        _ => all / bytes,
    };
    let held_max = if run.extent == Extent::Full { HELD } else { HELD_QUICK };
    let held = (blocks / u64::from(threads)).clamp(HELD_MIN.into(), held_max.into()) as u32;
    let freed = ((f64::from(held) * freed) as u32).max(1);
    let rest_ms = if simulated || run.extent == Extent::Full { REST_MS } else { REST_QUICK_MS };
    let churn = Churn { bytes, held, freed, rest_ms, pace: contender.pace };
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

/// The setting of a row.
pub fn setting(run: &Run<'_>, contender: &Contender, threads: u32, churn: &Churn) -> Setting {
    let setting = run.setting(contender.name).with("threads", u64::from(threads));
    churn.setting(setting)
}

/// The claims of a scheme's row, if there are any: mean and 99th percentile, and CASes.
fn claims_of(scheme: SchemeKind) -> Option<[&'static str; 3]> {
    match scheme {
        // The published form: its steps one after the other.
        SchemeKind::FineMemPaper => {
            Some(["finemem.alloc.512.mean", "finemem.alloc.512.p99", "finemem.cas.mean"])
        }
        SchemeKind::PremmapOneSided => {
            Some(["premmap.alloc.512.mean", "premmap.alloc.512.p99", "premmap.cas.mean"])
        }
        _ => None,
    }
}

fn table_2(run: &Run<'_>, findings: &mut Findings) -> Result<(), Error> {
    let threads = crowd(run);
    for contender in contenders(run).map(|contender| contender.as_published(run)) {
        let contender = &contender;
        let (churn, outcome) = measure(run, contender, &Crowd::of(threads))?;
        let setting = setting(run, contender, threads, &churn);
        let of = findings.record(&setting, "alloc_latency_us", Unit::Us);
        let (statistic, us) = run.typical(&outcome.allocate);
        let p99 = of.value(Statistic::P99, outcome.allocate.quantile_us(0.99));
        let mut all = vec![
            (format!("allocation, {statistic}"), of.value(statistic, us)),
            ("allocation, p99".into(), p99),
        ];
        if contender.scheme.is_by_cas() {
            // The paper's "retries" are what its text calls CAS operations: the one that succeeds among them.
            let of = findings.record(&setting, "cas", Unit::Count);
            let most = of.value(Statistic::Max, 1.0 + outcome.retries.most as f64);
            let mean = of.mean(1.0 + outcome.retries.mean());
            all.push(("CASes until one takes a block, mean".into(), mean));
            all.push(("CASes until one takes a block, most".into(), most));
        }
        let claims = claims_of(contender.scheme).filter(|_| threads == 512);
        for (at, (what, record)) in all.into_iter().enumerate() {
            let what = format!("{}, {}: {what}", contender.name, count(threads, "thread"));
            match claims.as_ref().and_then(|ids| ids.get(at)) {
                // The benchmark's pace and the array's form were chosen so that these come near.
                Some(id) if contender.scheme == SchemeKind::PremmapOneSided => {
                    findings.fitted(what, record, id);
                }
                Some(id) => findings.claimed(what, record, id),
                None => findings.add(what, record),
            }
        }
    }
    Ok(())
}

fn against_threads(run: &Run<'_>, findings: &mut Findings, freed: f64) -> Result<(), Error> {
    for contender in contenders(run) {
        for &threads in threads(run) {
            let crowd = Crowd { freed, ..Crowd::of(threads) };
            let (churn, outcome) = measure(run, contender, &crowd)?;
            let setting = setting(run, contender, threads, &churn);
            add(run, findings, &setting, &count(threads, "thread"), &outcome);
        }
    }
    Ok(())
}

fn against_sizes(run: &Run<'_>, findings: &mut Findings) -> Result<(), Error> {
    let threads = match (run.place.simulated(), run.extent) {
        (true, Extent::Full) => THREADS_OF_SIZES,
        (true, Extent::Quick) => 16,
        (false, _) => 2,
    };
    for contender in contenders(run) {
        for &bytes in sizes(run) {
            let crowd = Crowd { bytes, ..Crowd::of(threads) };
            let (churn, outcome) = measure(run, contender, &crowd)?;
            let setting = setting(run, contender, threads, &churn);
            add(run, findings, &setting, &Size(bytes).to_string(), &outcome);
        }
    }
    Ok(())
}

/// Adds what a row's threads measured.
pub fn add(
    run: &Run<'_>,
    findings: &mut Findings,
    setting: &Setting,
    what: &str,
    outcome: &Outcome,
) {
    let name = setting.get("scheme").map(ToString::to_string).unwrap_or_default();
    for (metric, verb, all) in [
        ("alloc_latency_us", "allocation", &outcome.allocate),
        ("free_latency_us", "free", &outcome.free),
    ] {
        let of = findings.record(setting, metric, Unit::Us);
        let (statistic, us) = run.typical(all);
        findings.add(format!("{name}, {what}: {verb}, {statistic}"), of.value(statistic, us));
        if metric == "alloc_latency_us" {
            let p99 = of.value(Statistic::P99, all.quantile_us(0.99));
            findings.add(format!("{name}, {what}: {verb}, p99"), p99);
        }
    }
}

fn draw_threads(
    findings: &Findings,
    canvas: &Canvas<'_>,
    title: &str,
) -> Result<Vec<PathBuf>, Error> {
    draw(findings, canvas, "threads", title, Axis::log("threads"))
}

fn draw_sizes(findings: &Findings, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    draw(findings, canvas, "size", "Allocation in pieces", Axis::bytes("size of a block"))
}

/// Draws latencies of allocations against a part of their settings.
pub fn draw(
    findings: &Findings,
    canvas: &Canvas<'_>,
    across: &'static str,
    title: &str,
    axis: Axis,
) -> Result<Vec<PathBuf>, Error> {
    let statistic = findings.typical();
    let series = Series { metric: "alloc_latency_us", statistic, across, ours: "finemem" };
    lines(findings, &series, title, axis, canvas)
}
