//! FineMem (OSDI'25): the paper's experiments on allocation.

pub mod costs;
pub mod factors;
pub mod memory_nodes;
pub mod microbench;
pub mod mixed;

use sim::Params;

use super::experiment::Paper;
use super::registration;

/// The paper.
pub static PAPER: Paper = Paper {
    name: "finemem",
    title: "FineMem (OSDI'25)",
    cluster: "the paper's cluster (ConnectX-6, one memory node, 16 compute nodes) under virtual \
              time",
    params: Params::connectx6,
    experiments: &[
        registration::EXPERIMENT,
        microbench::TABLE_2,
        microbench::THREADS,
        memory_nodes::MEMORY_NODES,
        microbench::ALL_AT_ONCE,
        microbench::SIZES,
        factors::FACTORS,
        costs::COSTS,
        mixed::TRACES_REPLAYED,
    ],
    programs: &[],
    // No claim of the paper is far off or a missed bound.
    note: |_| None,
    measured: "This machine is not a cluster: a thread stands in for the memory node's NIC, and \
               there is no network. With more threads than cores, the times include scheduling \
               delays.",
};
