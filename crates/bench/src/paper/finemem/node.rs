//! What FineMem costs the memory node, and what its steps add (FineMem §6.2).
//!
//! What the memory node's CPU computes takes no time in the simulation: how long a scan takes and how fast a compute
//! node's memory is taken back is measured on a clock only.

use std::path::PathBuf;

use pool::SchemeKind;
use pool::finemem::layout::Shape;

use super::crowd::{self, Crowd};
use crate::Error;
use crate::paper::experiment::{Canvas, Experiment};
use crate::paper::finding::Findings;
use crate::paper::load::{Load, Work};
use crate::paper::{Extent, Run, count};
use crate::plot::Bars;
use crate::record::{Statistic, Unit};
use crate::timestamps::{self, Churning};

/// §6.2, factor analysis and overhead.
pub const COSTS: Experiment = Experiment {
    name: "costs",
    title: "What its steps add, and what it costs the memory node (§6.2)",
    claims: &[
        "finemem.rkey.added",
        "finemem.log.added",
        "finemem.free.peak",
        "finemem.metadata.share",
        "finemem.recovery.rate",
        "finemem.timestamp.wrap",
        "finemem.mncpu",
    ],
    steps: |_| 4,
    run,
    draw,
};

/// The paper's memory: 100 GB of chunks of 4 KiB.
const PAPER: Shape = Shape { chunks: 25 << 20, chunk_bytes: 4096 };

/// Compute nodes that free so much in a round that timestamps last as long as the paper's: it does not say how many it had.
const FITTED_NODES: u32 = 3;

/// Scans are as far apart.
const SCAN_NS: f64 = 1e8;

fn run(run: &Run<'_>, findings: &mut Findings) -> Result<(), Error> {
    steps(run, findings)?;
    frees(run, findings)?;
    metadata(run, findings);
    timestamps(run, findings)?;
    if !run.place.simulated() {
        recovery(run, findings)?;
        scanning(run, findings)?;
    }
    run.bar.step();
    Ok(())
}

/// The READ that fetches a key, and the CAS that flushes a log: of one word, with nothing else in the way.
fn steps(run: &Run<'_>, findings: &mut Findings) -> Result<(), Error> {
    let load = Load::new(SchemeKind::FineMem, Work::Words, run.rounds(200));
    let outcome = run.load("READ and CAS of a word", &load)?;
    for (metric, what, all, id) in [
        ("read_us", "a READ of a word: fetches a key", &outcome.access, "finemem.rkey.added"),
        ("cas_us", "a CAS of a word: flushes a log", &outcome.atomic, "finemem.log.added"),
    ] {
        let (statistic, us) = run.typical(all);
        let of = findings.record(&run.setting("finemem"), metric, Unit::Us);
        findings.claimed(format!("{what}, {statistic}"), of.value(statistic, us), id);
    }
    Ok(())
}

fn frees(run: &Run<'_>, findings: &mut Findings) -> Result<(), Error> {
    let threads = match (run.place.simulated(), run.extent) {
        (true, Extent::Full) => 512,
        (true, Extent::Quick) => 16,
        (false, _) => 2,
    };
    for contender in crowd::contenders(run).filter(|c| c.name.starts_with("finemem")) {
        let (_, outcome) = crowd::measure(run, contender, &Crowd::of(threads))?;
        let setting = run.setting(contender.name).with("threads", u64::from(threads));
        let of = findings.record(&setting, "free_latency_us", Unit::Us);
        let most = of.value(Statistic::Max, outcome.free.max_us());
        let what = format!("{}, {threads} threads: the longest free", contender.name);
        match contender.scheme {
            SchemeKind::FineMem => findings.bounded(what, most, "finemem.free.peak"),
            _ => findings.add(what, most),
        }
    }
    Ok(())
}

/// What the metadata has of the memory, by what it is for.
fn metadata(run: &Run<'_>, findings: &mut Findings) {
    let shape = PAPER;
    let bytes = f64::from(shape.chunks) * shape.chunk_bytes as f64;
    let share = |words: u32| 8.0 * f64::from(words) / bytes;
    let headers = shape.sections() + shape.spans();
    let keys = shape.words() - headers - shape.chunks;
    let setting = run.setting("finemem").size(shape.chunk_bytes);
    let record = |of: f64| findings.record(&setting, "metadata_ratio", Unit::Ratio).mean(of);
    // §6.2: "an 8B rkey and an 8B redo-log for each 4KB chunk", which is all but the headers, and the keys of spans and
    // sections (§4.3).
    let published = headers + shape.chunks + shape.chunks + shape.spans() + shape.sections();
    let [all, published, headers, logs, keys] =
        [shape.words(), published, headers, shape.chunks, keys].map(|words| record(share(words)));
    let what =
        "metadata over memory, chunks of 4 KiB: headers, logs, keys of chunks, spans and sections";
    findings.claimed(what, published, "finemem.metadata.share");
    findings.add("all of ours: a key for each block of each size", all);
    findings.add("of it headers of sections and spans", headers);
    findings.add("of it logs: 8 B for each chunk", logs);
    findings.add("of it keys: 8 B for each block", keys);
}

/// How long a timestamp lasts. What the compute nodes hold and free is the published benchmark's own setting; the text says
/// how much memory there is, and not how many allocate.
fn timestamps(run: &Run<'_>, findings: &mut Findings) -> Result<(), Error> {
    run.bar.say("timestamps go around");
    let (chunks, held) = if run.extent == Extent::Full { (1 << 18, 1000) } else { (1 << 12, 100) };
    for (scheme, compute_nodes) in [
        (SchemeKind::FineMemPaper, 1),
        (SchemeKind::FineMemPaper, FITTED_NODES),
        (SchemeKind::FineMemPaper, 16),
        (SchemeKind::FineMem, 16),
    ] {
        let churning = Churning { chunks, compute_nodes, held, freed: held / 4 };
        let most = 200 * u64::from(compute_nodes * churning.freed);
        let setting = run.setting(&scheme.to_string()).with("chunks", chunks);
        let setting = setting.with("compute_nodes", u64::from(compute_nodes));
        let setting = setting.with("held", u64::from(held));
        let of = findings.record(&setting, "until_wrap", Unit::Count);
        let who = format!("{scheme}, {}", count(compute_nodes, "compute node"));
        let Some(allocations) = timestamps::until_one_wraps(scheme, &churning, most)? else {
            let what = format!("{who}: allocations, and no timestamp has gone around");
            findings.add(what, of.mean(most as f64));
            continue;
        };
        let what = format!("{who}: allocations until a timestamp has gone around (nothing timed)");
        let all = of.mean(allocations as f64);
        match (scheme, compute_nodes, run.extent) {
            (SchemeKind::FineMemPaper, FITTED_NODES, Extent::Full) => {
                findings.fitted(what, all, "finemem.timestamp.wrap");
            }
            _ => findings.add(what, all),
        }
    }
    Ok(())
}

/// How fast comes back what a compute node had that has gone.
fn recovery(run: &Run<'_>, findings: &mut Findings) -> Result<(), Error> {
    run.bar.say("a compute node has gone");
    let entries = if run.extent == Extent::Full { 100_000 } else { 3_000 };
    let recovered = crate::recovery::recovery(entries, 4096)?;
    let setting = run.setting("finemem").with("entries", entries);
    let of = findings.record(&setting, "recovery_per_s", Unit::PerSecond);
    let (all, without) = (of.mean(recovered.rate()), recovered.rate_without_clearing());
    let what = "entries taken back a second, 4 KiB each, cleared";
    findings.claimed(what, all, "finemem.recovery.rate");
    let setting = setting.with("clearing", false);
    let of = findings.record(&setting, "recovery_per_s", Unit::PerSecond);
    findings.add("the same without the clearing", of.mean(without));
    let of = findings.record(&setting, "longest_turn_us", Unit::Us);
    let longest = of.value(Statistic::Max, recovered.longest_turn.as_secs_f64() * 1e6);
    findings.add("the longest that its CPU is away for others meanwhile", longest);
    Ok(())
}

/// What of a core it takes to look through the capability table every 100 ms, nothing having been freed.
fn scanning(run: &Run<'_>, findings: &mut Findings) -> Result<(), Error> {
    run.bar.say("scans of the capability table");
    let (chunks, scans) = if run.extent == Extent::Full { (1 << 20, 40) } else { (1 << 10, 2) };
    use SchemeKind::{FineMem, FineMemPaper};
    for (scheme, taken) in [(FineMemPaper, true), (FineMem, true), (FineMem, false)] {
        let each_ns = crate::recovery::look_ns(scheme, chunks, scans, taken)?;
        let state = if taken { "all of them taken" } else { "none of them taken" };
        let setting = run.setting(&scheme.to_string()).with("chunks", chunks).with("taken", taken);
        let of = findings.record(&setting, "look_us", Unit::Us);
        findings.add(format!("{scheme}: an entry of the table, {state}"), of.mean(each_ns / 1e3));
        let of = findings.record(&setting, "scan_core_ratio", Unit::Ratio);
        // Ours has nearly two entries for each chunk: one for each aligned block.
        let core = of.mean(each_ns * f64::from(PAPER.entries()) / SCAN_NS);
        let what = format!(
            "{scheme}: a core's share for scans of 100 GB of 4 KiB chunks every 100 ms, {state}"
        );
        match scheme {
            FineMemPaper => findings.claimed(what, core, "finemem.mncpu"),
            _ => findings.add(what, core),
        }
    }
    Ok(())
}

fn draw(findings: &Findings, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    let of = |metric| findings.find(metric, findings.typical(), |_| true).unwrap_or_default();
    let bars = Bars::new("What a step adds to an allocation", "latency (us)", ["one word"]);
    let bars = bars.group("READ: a key", [of("read_us")]).group("CAS: a log", [of("cas_us")]);
    Ok(bars.subtitle(canvas.subtitle).write(canvas.directory, canvas.name)?.into())
}
