//! FineMem (OSDI'25): its experiments on allocation.

pub mod crowd;
pub mod factors;
pub mod mixed;
pub mod node;
pub mod several;

use sim::Params;

use super::experiment::Paper;
use super::registration;

/// The paper.
pub static PAPER: Paper = Paper {
    name: "finemem",
    title: "FineMem (OSDI'25)",
    cluster: "the paper's cluster (ConnectX-6, one memory node, 16 compute nodes) under virtual time",
    params: Params::connectx6,
    experiments: &[
        registration::EXPERIMENT,
        crowd::TABLE_2,
        crowd::THREADS,
        several::MEMORY_NODES,
        crowd::ALL_AT_ONCE,
        crowd::SIZES,
        factors::FACTORS,
        node::COSTS,
        mixed::TRACES_REPLAYED,
    ],
    note,
    measured: "This machine is no cluster: a thread plays the memory node's NIC, and there is no \
               network. More threads than cores wait for turns of the scheduler.",
};

/// Why a claim is off by more than a tenth.
fn note(id: &str) -> Option<&'static str> {
    (id == "patronus.bind")
        .then_some("One number of ours stands beside two papers'; FineMem's is 1.34 us.")
}
