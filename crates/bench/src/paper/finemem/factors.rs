//! Factor analysis (FineMem §6.2, figure 11): what the two-layer bitmap and contention control save over an array of
//! chunks, for one thread and for a crowd.
//!
//! Ours pays for keys and logs in every case; the paper adds them one by one. `costs` has what each of them takes.

use std::path::PathBuf;

use pool::SchemeKind;

use super::crowd::{self, Contender};
use crate::Error;
use crate::paper::experiment::{Canvas, Experiment};
use crate::paper::finding::Findings;
use crate::paper::{Extent, Run, count, picture};
use crate::record::{Setting, Unit};

/// Figure 11.
pub const FACTORS: Experiment = Experiment {
    name: "factors",
    title: "What the tree saves over an array of chunks (§6.2, figure 11)",
    claims: &["finemem.total.saving"],
    steps: |run| 2 * crowds(run).len(),
    run,
    draw: |findings: &Findings, canvas: &Canvas<'_>| -> Result<Vec<PathBuf>, Error> {
        picture::bars(findings, "alloc_latency_us", "Allocation of 4 KiB", |_| true, canvas)
    },
};

const ARRAY: Contender =
    Contender { name: "premmap-onesided", scheme: SchemeKind::PremmapOneSided };
const TREE: Contender = Contender { name: "finemem", scheme: SchemeKind::FineMem };

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
        let mut all = Vec::new();
        for contender in [ARRAY, TREE] {
            let (_, outcome) = crowd::measure(run, &contender, threads, 4096, 0.5)?;
            let setting = run.setting(contender.name).with("threads", u64::from(threads));
            let of = findings.record(&setting, "alloc_latency_us", Unit::Us);
            let (statistic, us) = run.typical(&outcome.allocate);
            let what = format!("{}, {}: {statistic}", contender.name, count(threads, "thread"));
            findings.add(what, of.value(statistic, us));
            all.push(us);
        }
        let setting = Setting::new().scheme(TREE.name).with("over", ARRAY.name);
        let setting = setting.with("threads", u64::from(threads));
        let saved = findings.record(&setting, "saved_ratio", Unit::Ratio);
        let saved = saved.mean(1.0 - all[1] / all[0]);
        let what = format!("{}: the tree saves of the array's latency", count(threads, "thread"));
        match threads {
            512 => findings.claimed(what, saved, "finemem.total.saving"),
            _ => findings.add(what, saved),
        }
    }
    Ok(())
}
