//! Allocation on several memory nodes (FineMem §6.2, figure 10, right).

use std::path::PathBuf;

use super::microbench::{self, Microbench, contenders};
use crate::Error;
use crate::paper::experiment::{Canvas, Experiment};
use crate::paper::results::Results;
use crate::paper::{Extent, Run, count};
use bench_report::plot::Axis;

/// Figure 10, right.
pub const MEMORY_NODES: Experiment = Experiment {
    name: "memory-nodes",
    title: "Allocation of 4 KiB over the number of memory nodes (§6.2, figure 10, right)",
    claims: &[],
    steps: |run| contenders(run).count() * memory_nodes(run).len(),
    run,
    draw,
};

fn memory_nodes(run: &Run<'_>) -> &'static [u16] {
    match (run.testbed.simulated(), run.extent) {
        (true, Extent::Full) => &[1, 2, 4, 8],
        (true, Extent::Quick) | (false, _) => &[1, 2],
    }
}

/// Number of threads. The paper does not state it; as in table 2, because a memory node is not a
/// bottleneck for fewer threads.
fn threads(run: &Run<'_>) -> u32 {
    match (run.testbed.simulated(), run.extent) {
        (true, Extent::Full) => 512,
        (true, Extent::Quick) => 32,
        (false, _) => 8,
    }
}

fn run(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    for contender in contenders(run) {
        for &memory_nodes in memory_nodes(run) {
            let microbench = Microbench { memory_nodes, ..Microbench::of(threads(run)) };
            let (churn, outcome) = microbench::measure(run, contender, &microbench)?;
            let setting = microbench::setting(run, contender, microbench.threads, &churn);
            let setting = setting.with("memory_nodes", u64::from(memory_nodes));
            let what = count(memory_nodes.into(), "memory node");
            microbench::add(run, results, &setting, &what, &outcome);
        }
    }
    Ok(())
}

fn draw(results: &Results, canvas: &Canvas<'_>) -> Result<Vec<PathBuf>, Error> {
    let title = "Allocation of 4 KiB, fragmented memory, round-robin over memory nodes";
    microbench::draw(results, canvas, "memory_nodes", title, Axis::log("memory nodes"))
}
