//! Costs of FineMem at the memory node, and latency of its steps (FineMem §6.2).
//!
//! The simulation gives the memory node's CPU no computing time. Therefore scans and the recovery
//! of a departed client are measured on a clock only.

use std::path::PathBuf;

use pool::schemes;
use schemes::finemem::layout::Shape;

use super::microbench::{self, Microbench};
use crate::Error;
use crate::paper::experiment::{Canvas, Experiment};
use crate::paper::load::{Load, Work};
use crate::paper::results::Results;
use crate::paper::{Extent, Run, count};
use crate::timestamps::{self, WrapWorkload};
use bench_report::plot::Bars;
use bench_report::record::{Statistic, Unit};

/// §6.2, factor analysis and overhead.
pub const COSTS: Experiment = Experiment {
    name: "costs",
    title: "Latency of single steps, and costs at the memory node (§6.2)",
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

/// Number of compute nodes with which a timestamp wraps around after as many allocations as in the
/// paper, which does not state its number of compute nodes.
const FITTED_NODES: u32 = 3;

/// Interval between scans in nanoseconds.
const SCAN_NS: f64 = 1e8;

fn run(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    steps(run, results)?;
    frees(run, results)?;
    metadata(run, results);
    timestamps(run, results)?;
    if !run.testbed.simulated() {
        recovery(run, results)?;
        scanning(run, results)?;
    }
    run.bar.step();
    Ok(())
}

/// Latency of the READ that fetches a key and of the CAS that flushes a log: one word each, without
/// other load.
fn steps(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    let load = Load::new(schemes::FINEMEM, Work::Words, run.rounds(200));
    let outcome = run.load("READ and CAS of a word", &load)?;
    for (metric, what, latencies, id) in [
        ("read_us", "READ of a word: fetches a key", &outcome.access, "finemem.rkey.added"),
        ("cas_us", "CAS of a word: flushes a log", &outcome.atomic, "finemem.log.added"),
    ] {
        let (statistic, us) = run.typical(latencies);
        let builder = results.record(&run.setting("finemem"), metric, Unit::Us);
        // One verb without other load is a sum of parameters.
        results.derived(format!("{what}, {statistic}"), builder.value(statistic, us), id);
    }
    Ok(())
}

fn frees(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    let threads = match (run.testbed.simulated(), run.extent) {
        (true, Extent::Full) => 512,
        (true, Extent::Quick) => 16,
        (false, _) => 2,
    };
    for contender in microbench::contenders(run).filter(|c| c.name.starts_with("finemem")) {
        let (_, outcome) = microbench::measure(run, contender, &Microbench::of(threads))?;
        let setting = run.setting(contender.name).with("threads", u64::from(threads));
        let builder = results.record(&setting, "free_latency_us", Unit::Us);
        let longest = builder.value(Statistic::Max, outcome.free.max_us());
        let what = format!("{}, {threads} threads: the longest free", contender.name);
        match contender.scheme {
            schemes::FINEMEM => results.bounded(what, longest, "finemem.free.peak"),
            _ => results.add(what, longest),
        }
    }
    Ok(())
}

/// Size of the metadata relative to the memory, by purpose.
fn metadata(run: &Run<'_>, results: &mut Results) {
    let shape = PAPER;
    let bytes = f64::from(shape.chunks) * shape.chunk_bytes as f64;
    let share = |words: u32| 8.0 * f64::from(words) / bytes;
    let headers = shape.sections() + shape.spans();
    let keys = shape.words() - headers - shape.chunks;
    let setting = run.setting("finemem").size(shape.chunk_bytes);
    let record = |ratio: f64| results.record(&setting, "metadata_ratio", Unit::Ratio).mean(ratio);
    // §6.2 counts "an 8B rkey and an 8B redo-log for each 4KB chunk". The headers, and the keys of
    // spans and sections (§4.3), come in addition.
    let published = headers + shape.chunks + shape.chunks + shape.spans() + shape.sections();
    let [total, published, headers, logs, keys] =
        [shape.words(), published, headers, shape.chunks, keys].map(|words| record(share(words)));
    let what =
        "metadata over memory, chunks of 4 KiB: headers, logs, keys of chunks, spans and sections";
    results.derived(what, published, "finemem.metadata.share");
    results.add("our metadata in total: a key for each block of each size", total);
    results.add("part: headers of sections and spans", headers);
    results.add("part: logs, 8 B for each chunk", logs);
    results.add("part: keys, 8 B for each block", keys);
}

/// Number of allocations until a timestamp wraps around. The numbers of held and freed chunks are
/// those of the published benchmark. The paper states the amount of memory, but not the number of
/// compute nodes.
fn timestamps(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    run.bar.say("wrap-around of timestamps");
    let (chunks, held) = if run.extent == Extent::Full { (1 << 18, 1000) } else { (1 << 12, 100) };
    for (scheme, compute_nodes) in [
        (schemes::FINEMEM_PAPER, 1),
        (schemes::FINEMEM_PAPER, FITTED_NODES),
        (schemes::FINEMEM_PAPER, 16),
        (schemes::FINEMEM, 16),
    ] {
        let workload = WrapWorkload { chunks, compute_nodes, held, freed: held / 4 };
        let limit = 200 * u64::from(compute_nodes * workload.freed);
        let setting = run.setting(&scheme.to_string()).with("chunks", chunks);
        let setting = setting.with("compute_nodes", u64::from(compute_nodes));
        let setting = setting.with("held", u64::from(held));
        let builder = results.record(&setting, "until_wrap", Unit::Count);
        let variant = format!("{scheme}, {}", count(compute_nodes, "compute node"));
        let wrap = timestamps::allocations_until_wrap(scheme, &workload, limit)?;
        let Some(allocations) = wrap else {
            let what = format!("{variant}: allocations without a wrap-around of a timestamp");
            results.add(what, builder.mean(limit as f64));
            continue;
        };
        let what = format!("{variant}: allocations until a timestamp wraps around (no timing)");
        let record = builder.mean(allocations as f64);
        match (scheme, compute_nodes, run.extent) {
            (schemes::FINEMEM_PAPER, FITTED_NODES, Extent::Full) => {
                results.fitted(what, record, "finemem.timestamp.wrap");
            }
            _ => results.add(what, record),
        }
    }
    Ok(())
}

/// Speed of reclaiming a departed client's memory.
fn recovery(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    run.bar.say("recovery of a departed client");
    let entries = if run.extent == Extent::Full { 100_000 } else { 3_000 };
    let recovered = crate::recovery::recovery(entries, 4096)?;
    let setting = run.setting("finemem").with("entries", entries);
    let builder = results.record(&setting, "recovery_per_s", Unit::PerSecond);
    let (total, without) = (builder.mean(recovered.rate()), recovered.rate_without_clearing());
    let what = "entries of 4 KiB reclaimed per second, with clearing";
    results.claimed(what, total, "finemem.recovery.rate");
    let setting = setting.with("clearing", false);
    let builder = results.record(&setting, "recovery_per_s", Unit::PerSecond);
    results.add("entries reclaimed per second, without clearing", builder.mean(without));
    let builder = results.record(&setting, "longest_turn_us", Unit::Us);
    let longest = builder.value(Statistic::Max, recovered.longest_poll.as_secs_f64() * 1e6);
    results.add("longest time for which the CPU serves no other client meanwhile", longest);
    Ok(())
}

/// Share of a core for a scan of the capability table every 100 ms, without freed chunks.
fn scanning(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    run.bar.say("scans of the capability table");
    let (chunks, scans) = if run.extent == Extent::Full { (1 << 20, 40) } else { (1 << 10, 2) };
    use schemes::{FINEMEM, FINEMEM_PAPER};
    for (scheme, taken) in [(FINEMEM_PAPER, true), (FINEMEM, true), (FINEMEM, false)] {
        let each_ns = crate::recovery::scan_ns_per_entry(scheme, chunks, scans, taken)?;
        let state = if taken { "all chunks allocated" } else { "no chunk allocated" };
        let setting = run.setting(&scheme.to_string()).with("chunks", chunks).with("taken", taken);
        let builder = results.record(&setting, "look_us", Unit::Us);
        let what = format!("{scheme}: scan of one table entry, {state}");
        results.add(what, builder.mean(each_ns / 1e3));
        let builder = results.record(&setting, "scan_core_ratio", Unit::Ratio);
        // The table has one entry per aligned block: nearly two per chunk.
        let core = builder.mean(each_ns * f64::from(PAPER.entries()) / SCAN_NS);
        let what = format!(
            "{scheme}: share of a core for a scan of 100 GB of 4 KiB chunks every 100 ms, {state}"
        );
        match scheme {
            FINEMEM_PAPER => results.claimed(what, core, "finemem.mncpu"),
            _ => results.add(what, core),
        }
    }
    Ok(())
}

fn draw(results: &Results, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    let value = |metric| results.find(metric, results.typical(), |_| true).unwrap_or_default();
    let bars = Bars::new("Latency that a step adds to an allocation", "latency (us)", ["one word"]);
    let bars = bars.group("READ: a key", [value("read_us")]).group("CAS: a log", [value("cas_us")]);
    Ok(bars.subtitle(canvas.subtitle).write(canvas.directory, canvas.name)?.into())
}
