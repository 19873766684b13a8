//! Clients that load RACE while one of them crashes in a split (Patronus §7.2.3, figure 8 (a)).
//!
//! The published client crashes right after it has locked the subtable, when nothing has to be
//! repaired. Here the client of the figure crashes within the split, and further runs crash after
//! each verb of one. The lock is a word of the subtable's header (vanilla), or an exclusive
//! permission.
//!
//! The paper does not state the rate of inserts. Here keys come at equal intervals, so that the
//! load takes 360 epochs without a crash.

use std::path::PathBuf;

use super::contenders::{COMPUTE_NODES, CORES, Contender, PATRONUS, UNPROTECTED};
use super::hash::{CHUNK_BYTES, entry_unit};
use super::index_work::{IndexWork, Task};
use crate::Error;
use crate::paper::experiment::{Canvas, Experiment};
use crate::paper::load::{Load, Work};
use crate::paper::results::Results;
use crate::paper::{Extent, Run, picture};
use ::kv::SplitLock;
use bench_report::plot::Axis;
use bench_report::record::{Statistic, Unit};

/// Figure 8 (a).
pub const EXPERIMENT: Experiment = Experiment {
    name: "resize-crash",
    title: "Load of RACE while a client crashes in a split (§7.2.3, figure 8 (a))",
    claims: &[],
    steps: |run| lines(run).count() + verbs(run).count(),
    run,
    draw,
};

/// A line of the figure.
struct Line {
    contender: Contender,
    lock: SplitLock,
}

const LINES: &[Line] = &[
    Line { contender: UNPROTECTED.named("vanilla"), lock: SplitLock::Plain },
    Line { contender: PATRONUS, lock: SplitLock::Exclusive },
];

/// The lines that run on this testbed.
fn lines(run: &Run<'_>) -> impl Iterator<Item = &'static Line> + use<> {
    let simulated = run.testbed.simulated();
    LINES.iter().filter(move |line| simulated || line.contender.runs_here())
}

/// Microseconds of an epoch. The paper's axis has no unit; its public code samples every 100 us.
const EPOCH_US: u64 = 100;
/// Epoch of the crash (§7.2.3).
const CRASH: u64 = 240;
/// Epochs from the first key to the last one.
const SPAN: u64 = 360;
/// Epochs after which blocked clients give up.
const END: u64 = 480;
/// Epochs between two points of a line.
const STEP: usize = 20;
/// Verbs between the lock and the crash of the figure: in the middle of the freezing of slots.
const WITHIN: u64 = 100;
/// Groups of a subtable: 4 KiB.
const GROUPS: u16 = 21;
/// Lease of each permission (§7.3.1).
const LEASE_US: u64 = 100;
/// Lease of a split, which reads a header of each block of the subtable.
const SPLIT_LEASE_US: u64 = 2_000;
/// Keys of the figure. With 12,000 keys, the clients of `patronus` fall behind. With this number,
/// subtables are split after the epoch of the crash.
const KEYS: u32 = 9_000;
/// Keys of a quick run, which has a quarter of the clients.
const KEYS_QUICK: u32 = 4_000;
/// Times of this machine over those of the cluster, whose requests take a tenth.
const SCALE_HERE: u64 = 10;
/// Leases on this machine, where the wake-up of a thread may take milliseconds.
const LEASE_HERE_US: u64 = 10_000;
const SPLIT_LEASE_HERE_US: u64 = 50_000;
/// Keys of the figure on this machine, before the factor of [`Run`]'s rounds: two threads insert
/// them in the time of the figure.
const KEYS_HERE: u32 = 2_000;

/// Verbs of a split of a subtable of one group, with some to spare.
const VERBS: u64 = 96;

/// Numbers of verbs after which a client crashes, in runs of their own.
fn verbs(run: &Run<'_>) -> impl Iterator<Item = u64> + use<> {
    let step = if run.extent == Extent::Quick { 12 } else { 1 };
    (0..VERBS).step_by(step)
}

/// The leases of a permission and of a split, in microseconds.
fn leases_us(run: &Run<'_>) -> (u64, u64) {
    match run.testbed.simulated() {
        true => (LEASE_US, SPLIT_LEASE_US),
        false => (LEASE_HERE_US, SPLIT_LEASE_HERE_US),
    }
}

/// The keys of the figure.
fn keys(run: &Run<'_>) -> u32 {
    match (run.testbed.simulated(), run.extent) {
        (true, Extent::Full) => KEYS,
        (true, Extent::Quick) => KEYS_QUICK,
        (false, _) => run.rounds(KEYS_HERE),
    }
}

/// Times of the testbed over those of the cluster.
fn scale(run: &Run<'_>) -> u64 {
    if run.testbed.simulated() { 1 } else { SCALE_HERE }
}

fn load(run: &Run<'_>, line: &Line, work: IndexWork) -> Load {
    let (compute_nodes, each) = match (run.testbed.simulated(), run.extent) {
        (true, Extent::Full) => (COMPUTE_NODES, 16),
        (true, Extent::Quick) => (COMPUTE_NODES, 4),
        (false, _) => (2, 1),
    };
    Load {
        chunk_bytes: CHUNK_BYTES,
        cores: CORES,
        compute_nodes,
        threads: each * u32::from(compute_nodes),
        node_options: line.contender.options(),
        ..Load::new(line.contender.scheme, Work::Index(work), 1)
    }
}

fn run(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    for line in lines(run) {
        figure(run, results, line)?;
    }
    every_verb(run, results)
}

/// Measures a line of the figure.
fn figure(run: &Run<'_>, results: &mut Results, line: &Line) -> Result<(), Error> {
    let (epoch_us, (lease_us, split_lease_us)) = (scale(run) * EPOCH_US, leases_us(run));
    let work = IndexWork {
        task: Task::Insert {
            span_us: SPAN * epoch_us,
            crash_us: CRASH * epoch_us,
            verbs: WITHIN,
            end_us: END * epoch_us,
        },
        keys: keys(run).into(),
        block_bytes: 64,
        groups: GROUPS,
        entry_unit: entry_unit(&line.contender),
        lease_us,
        revokes: false,
        lock: line.lock,
        split_lease_us,
    };
    let name = line.contender.name;
    let outcome = run.load(name, &load(run, line, work))?.index;
    // The key of the client that crashed is never inserted.
    let keys = work.keys - outcome.crashes;
    for epoch in (0..=END).step_by(STEP) {
        let setting = run.setting(name).with("epoch", epoch);
        let record = results.record(&setting, "load_ratio", Unit::Ratio);
        let share = outcome.inserted(epoch * epoch_us) as f64 / keys as f64;
        results.add(format!("{name}, epoch {epoch}: load"), record.mean(share));
    }
    let record = results.record(&run.setting(name), "crashes", Unit::Count);
    results.add(format!("{name}: clients that crashed"), record.mean(outcome.crashes as f64));
    Ok(())
}

/// Crashes a client after each verb of a split of a small subtable.
fn every_verb(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    let line = &LINES[1];
    let (scale, (lease_us, split_lease_us)) = (scale(run), leases_us(run));
    let (mut least, mut crashes) = (f64::INFINITY, 0);
    for verbs in verbs(run) {
        let work = IndexWork {
            task: Task::Insert {
                span_us: scale * 2_000,
                crash_us: scale * 200,
                verbs,
                end_us: scale * 40_000,
            },
            keys: 120,
            block_bytes: 64,
            groups: 1,
            entry_unit: entry_unit(&line.contender),
            lease_us,
            revokes: false,
            lock: line.lock,
            split_lease_us,
        };
        let what = format!("crash after {verbs} verbs");
        let outcome = run.load(&what, &load(run, line, work))?.index;
        let keys = work.keys - outcome.crashes;
        least = least.min(outcome.inserted(u64::MAX) as f64 / keys as f64);
        crashes += outcome.crashes;
    }
    let setting = run.setting("patronus").with("crash", "each verb");
    let record = results.record(&setting, "least_load_ratio", Unit::Ratio);
    let record = record.mean(least);
    results.add("patronus, a crash after each verb of a split: load in the end, least", record);
    let record = results.record(&setting, "crashes", Unit::Count).mean(crashes as f64);
    results.add("patronus, a crash after each verb of a split: crashes", record);
    Ok(())
}

fn draw(results: &Results, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    let series = picture::Series {
        metric: "load_ratio",
        statistic: Statistic::Mean,
        across: "epoch",
        ours: "patronus",
    };
    let x = Axis::linear("epoch of 100 us");
    picture::lines(results, &series, "Load of RACE; a client crashes at epoch 240", x, canvas)
}
