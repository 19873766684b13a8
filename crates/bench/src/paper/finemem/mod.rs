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
    Some(match id {
        "finemem.alloc.512.mean" => {
            "The paper's goes through its allocation service, which adds 2 to 10 us (§6.2) and is not here. The rest hangs on how \
             far atomics are apart (nic.atomic, 20 ns, from memory): with 33 ns the mean is 39.0 us and the 99th percentile 105."
        }
        "premmap.alloc.512.mean" | "premmap.alloc.512.p99" | "premmap.cas.mean" => {
            "The array's search in a crowd is decided by who is ahead of whom. The same load with one thing changed: 5.5 CASes and \
             39 us if it CASes without a READ before, 351 and 2,579 us if it then waits for its key; the paper's lie in between."
        }
        "finemem.twolayer.saving" | "finemem.contention.saving" => {
            "Without contention control users still begin to search far from each other here, which the paper does not tell of its \
             tree; most of what is saved is then the layers'. If all begin at the first chunk, the tree alone is slower than the array."
        }
        "finemem.timestamp.wrap" => {
            "It is 64 rounds of what all compute nodes free in one, 250 each with the published benchmark's setting: 17,000 for one of \
             them, 51,000 for three. The text does not say how many there were."
        }
        "patronus.bind" => "One number of ours stands beside two papers'; FineMem's is 1.34 us.",
        _ => return None,
    })
}
