//! OneSidedMW (NSDI'26): its experiments on allocation and access.

use sim::Params;

use super::experiment::{Experiment, Paper};
use super::{chain_queues, latency, picture, registration, scalability};

/// The paper.
pub static PAPER: Paper = Paper {
    name: "onesidedmw",
    title: "OneSidedMW (NSDI'26)",
    cluster: "the paper's cluster (ConnectX-5, one memory node, up to 6 compute nodes) under virtual time",
    params: Params::connectx5,
    experiments: &[ALLOCATION, ACCESS, CHAIN_QUEUES, registration::EXPERIMENT, SCALABILITY],
    note,
    measured: "This machine is no cluster: a thread plays the memory node's NIC, and there is no \
               network. More threads than cores wait for turns of the scheduler, so that with 8 and \
               24 the order of the schemes says something and the times say little.",
};

/// Figure 10(b).
pub const ALLOCATION: Experiment = Experiment {
    name: "allocation",
    title: "Latency of allocation (§6.3, figure 10(b))",
    claims: &["osmw.alloc.latency.1", "osmw.alloc.latency.24", "rpcmw.alloc.latency.24"],
    steps: latency::allocation_steps,
    run: latency::allocation,
    draw: |findings, canvas| {
        // Registration takes a hundred times longer than all others.
        let shown = |name: &str| !name.contains("-mr ");
        picture::bars(findings, "alloc_latency_us", "Allocation", shown, canvas)
    },
};

/// Figure 10(a).
pub const ACCESS: Experiment = Experiment {
    name: "access",
    title: "Latency of access to 4 KiB (§6.3, figure 10(a))",
    claims: &["odrp.access.latency", "odrp.access.ratio.24", "separation.access.latency"],
    steps: latency::access_steps,
    run: latency::access,
    draw: |findings, canvas| {
        picture::bars(findings, "access_latency_us", "Access to 4 KiB", |_| true, canvas)
    },
};

/// §3.2.
pub const CHAIN_QUEUES: Experiment = Experiment {
    name: "chain-queues",
    title: "READ against the number of QPs that carry chains (§3.2)",
    claims: &["offload.read.overhead.96qp"],
    steps: chain_queues::steps,
    run: chain_queues::run,
    draw: picture::chain_queues,
};

/// In the form of figure 7.
pub const SCALABILITY: Experiment = Experiment {
    name: "scalability",
    title: "Allocation against the number of clients (in the form of figure 7)",
    claims: &[],
    steps: scalability::steps,
    run: scalability::run,
    draw: picture::scalability,
};

/// Why a claim is off by more than a tenth.
fn note(id: &str) -> Option<&'static str> {
    Some(match id {
        "osmw.alloc.latency.1" => {
            "A READ or an atomic of a chain waits for host memory on hardware; the model has the 0.54 us that \
             RedN gives for any WQE of a chain."
        }
        "osmw.alloc.latency.24" => {
            "Our chain re-arms itself: about 16 work requests, where the paper's takes about 10 and its CPU posts \
             them anew; with 24 threads the NIC's units are the bottleneck."
        }
        "odrp.access.latency" | "odrp.access.ratio.24" => {
            "Our ODRP reads by a chain of 6 work requests, made as short as can be, and in the model a READ of a \
             chain does not wait for host memory."
        }
        "separation.access.latency" => {
            "Without separation each thread's access QP has a chain here, and its Free QP, 48 in all; how many the \
             paper's has is not stated, and 0.894 is what 96 do."
        }
        _ => return None,
    })
}
