//! Factor analysis (FineMem §6.2, figure 11): savings of the two-layer bitmap and of contention
//! control over an array of chunks, for one thread and for many.
//!
//! Our variants all include the costs of keys, logs and the service; the paper adds these one by
//! one. [`super::costs`] measures the costs of keys and logs.

use std::path::PathBuf;

use pool::schemes;

use super::microbench::{self, Contender, Microbench};
use crate::Error;
use crate::paper::experiment::{Canvas, Experiment};
use crate::paper::results::Results;
use crate::paper::{Extent, Run, count, picture};
use bench_report::record::{Setting, Unit};

/// Figure 11.
pub const FACTORS: Experiment = Experiment {
    name: "factors",
    title: "Savings of the tree over an array of chunks (§6.2, figure 11)",
    claims: &["finemem.twolayer.saving", "finemem.contention.saving", "finemem.total.saving"],
    steps: |run| 3 * threads(run).len(),
    run,
    draw: |results: &Results, canvas: &Canvas<'_>| -> Result<Vec<PathBuf>, Error> {
        picture::bars(results, "alloc_latency_us", "Allocation of 4 KiB", |_| true, canvas)
    },
};

const ARRAY: Contender = Contender::new("premmap-onesided", schemes::PREMMAP_ONESIDED);
/// The published variant. Its steps are sequential, like those of the array.
const TREE: Contender = Contender::new("finemem-paper", schemes::FINEMEM_PAPER);
const TREE_ALONE: Contender = Contender {
    name: "finemem-paper without contention control",
    contention_control: false,
    ..TREE
};

/// Numbers of threads: the paper's general case and its heavy workload.
fn threads(run: &Run<'_>) -> [u32; 2] {
    match (run.testbed.simulated(), run.extent) {
        (true, Extent::Full) => [1, 512],
        (true, Extent::Quick) => [1, 64],
        (false, _) => [1, 8],
    }
}

fn run(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    for threads in threads(run) {
        let mut latencies_us = [0.0; 3];
        for (contender, us) in [ARRAY, TREE_ALONE, TREE].iter().zip(&mut latencies_us) {
            let contender = &contender.as_published(run);
            let (_, outcome) = microbench::measure(run, contender, &Microbench::of(threads))?;
            let setting = run.setting(contender.name).with("threads", u64::from(threads));
            let builder = results.record(&setting, "alloc_latency_us", Unit::Us);
            let statistic;
            (statistic, *us) = run.typical(&outcome.allocate);
            let what = format!("{}, {}: {statistic}", contender.name, count(threads, "thread"));
            results.add(what, builder.value(statistic, *us));
        }
        // All savings are fractions of the array's latency, because the paper's first two add up
        // to the third.
        let [array, alone, tree] = latencies_us;
        for (contender, saved, what, id) in [
            (TREE_ALONE, array - alone, "the two-layer bitmap saves", "finemem.twolayer.saving"),
            (TREE, alone - tree, "contention control saves besides", "finemem.contention.saving"),
            (TREE, array - tree, "both save", "finemem.total.saving"),
        ] {
            let setting = Setting::new().scheme(contender.name).with("over", ARRAY.name);
            let setting = setting.with("of", what).with("threads", u64::from(threads));
            let saved = results.record(&setting, "saved_ratio", Unit::Ratio).mean(saved / array);
            let what = format!("{}: {what}, of the array's latency", count(threads, "thread"));
            match threads {
                // The start of a search without contention control was fitted to these claims, and
                // the latencies of array and tree to table 2, so their ratio is no evidence either.
                512 => results.fitted(what, saved, id),
                _ => results.add(what, saved),
            }
        }
    }
    Ok(())
}
