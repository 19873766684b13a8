//! Allocation on several memory nodes (FineMem §6.2, figure 10, right).

use std::path::PathBuf;

use super::crowd::{self, Crowd, contenders};
use crate::Error;
use crate::paper::experiment::{Canvas, Experiment};
use crate::paper::finding::Findings;
use crate::paper::{Extent, Run, count};
use crate::plot::Axis;

/// Figure 10, right.
pub const MEMORY_NODES: Experiment = Experiment {
    name: "memory-nodes",
    title: "Allocation of 4 KiB against the number of memory nodes (§6.2, figure 10, right)",
    claims: &[],
    steps: |run| contenders(run).count() * memory_nodes(run).len(),
    run,
    draw,
};

fn memory_nodes(run: &Run<'_>) -> &'static [u16] {
    match (run.place.simulated(), run.extent) {
        (true, Extent::Full) => &[1, 2, 4, 8],
        (true, Extent::Quick) | (false, _) => &[1, 2],
    }
}

/// The text names no number of threads. All of them, as in table 2: a memory node is not a bottleneck for less.
fn threads(run: &Run<'_>) -> u32 {
    match (run.place.simulated(), run.extent) {
        (true, Extent::Full) => 512,
        (true, Extent::Quick) => 32,
        (false, _) => 8,
    }
}

fn run(run: &Run<'_>, findings: &mut Findings) -> Result<(), Error> {
    for contender in contenders(run) {
        for &memory_nodes in memory_nodes(run) {
            let crowd = Crowd { memory_nodes, ..Crowd::of(threads(run)) };
            let (churn, outcome) = crowd::measure(run, contender, &crowd)?;
            let setting = crowd::setting(run, contender, crowd.threads, &churn);
            let setting = setting.with("memory_nodes", u64::from(memory_nodes));
            let what = count(memory_nodes.into(), "memory node");
            crowd::add(run, findings, &setting, &what, &outcome);
        }
    }
    Ok(())
}

fn draw(findings: &Findings, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    let title = "Allocation of 4 KiB in pieces, memory nodes in turn";
    crowd::draw(findings, canvas, "memory_nodes", title, Axis::log("memory nodes"))
}
