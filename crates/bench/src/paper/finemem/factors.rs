//! Factor analysis (FineMem §6.2, figure 11): what the two-layer bitmap and contention control save over an array of
//! chunks, for one thread and for a crowd.
//!
//! Ours pays for keys, logs and the service in every case; the paper adds them one by one. `costs` has what keys and logs
//! take.

use std::path::PathBuf;

use pool::SchemeKind;

use super::crowd::{self, Contender, Crowd};
use crate::Error;
use crate::paper::experiment::{Canvas, Experiment};
use crate::paper::finding::Findings;
use crate::paper::{Extent, Run, count, picture};
use crate::record::{Setting, Unit};

/// Figure 11.
pub const FACTORS: Experiment = Experiment {
    name: "factors",
    title: "What the tree saves over an array of chunks (§6.2, figure 11)",
    claims: &["finemem.twolayer.saving", "finemem.contention.saving", "finemem.total.saving"],
    steps: |run| 3 * crowds(run).len(),
    run,
    draw: |findings: &Findings, canvas: &Canvas<'_>| -> Result<Vec<PathBuf>, Error> {
        picture::bars(findings, "alloc_latency_us", "Allocation of 4 KiB", |_| true, canvas)
    },
};

const ARRAY: Contender = Contender::new("premmap-onesided", SchemeKind::PremmapOneSided);
/// The published form, whose steps come one after the other, as those of the array do.
const TREE: Contender = Contender::new("finemem-paper", SchemeKind::FineMemPaper);
const TREE_ALONE: Contender = Contender {
    name: "finemem-paper without contention control",
    contention_control: false,
    ..TREE
};

/// The general case, and heavy workloads.
fn crowds(run: &Run<'_>) -> [u32; 2] {
    match (run.place.simulated(), run.extent) {
        (true, Extent::Full) => [1, 512],
        (true, Extent::Quick) => [1, 64],
        (false, _) => [1, 8],
    }
}

fn run(run: &Run<'_>, findings: &mut Findings) -> Result<(), Error> {
    for threads in crowds(run) {
        let mut all = [0.0; 3];
        for (contender, us) in [ARRAY, TREE_ALONE, TREE].iter().zip(&mut all) {
            let contender = &contender.as_published(run);
            let (_, outcome) = crowd::measure(run, contender, &Crowd::of(threads))?;
            let setting = run.setting(contender.name).with("threads", u64::from(threads));
            let of = findings.record(&setting, "alloc_latency_us", Unit::Us);
            let statistic;
            (statistic, *us) = run.typical(&outcome.allocate);
            let what = format!("{}, {}: {statistic}", contender.name, count(threads, "thread"));
            findings.add(what, of.value(statistic, *us));
        }
        // All are shares of the array's latency: the paper's two add up to the third.
        let [array, alone, tree] = all;
        for (of, saved, what, id) in [
            (TREE_ALONE, array - alone, "the two-layer bitmap saves", "finemem.twolayer.saving"),
            (TREE, alone - tree, "contention control saves besides", "finemem.contention.saving"),
            (TREE, array - tree, "both save", "finemem.total.saving"),
        ] {
            let setting = Setting::new().scheme(of.name).with("over", ARRAY.name).with("of", what);
            let setting = setting.with("threads", u64::from(threads));
            let saved = findings.record(&setting, "saved_ratio", Unit::Ratio).mean(saved / array);
            let what = format!("{}: {what}, of the array's latency", count(threads, "thread"));
            match threads {
                // Where users begin without contention control was chosen so that these come near, and what the array and the
                // tree take so that table 2 does: their ratio is no evidence either.
                512 => findings.fitted(what, saved, id),
                _ => findings.add(what, saved),
            }
        }
    }
    Ok(())
}
