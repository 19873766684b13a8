//! `cargo run --release -p granary-bench --example queue -- PRODUCERS ENTRIES INSERTS
//! [NAME=VALUE]...`: one point of Patronus's figure 10 (line `patronus-mr`, one queue) in virtual
//! time. `PRODUCERS` and `INSERTS` are those of a compute node and of a producer.
//!
//! `NAME=VALUE` changes a parameter of the timing model, for example `node_cpu.register=0`, or the
//! `seed`.

use std::process::ExitCode;

use bench::paper::load::{Load, Work};
use bench::paper::patronus::QueueWork;
use bench::paper::patronus::contenders::{COMPUTE_NODES, CORES, PATRONUS_MR, THREADS};
use bench::paper::simulated::SimulatedCluster;
use bench::paper::testbed::Testbed;
use sim::Params;

/// Lease of the experiment for permissions that are revoked.
const LEASE_US: u64 = 500_000;
/// Chunk of the experiment.
const CHUNK_BYTES: u64 = 64 << 10;

fn main() -> ExitCode {
    match run(&std::env::args().skip(1).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}\nusage: queue PRODUCERS ENTRIES INSERTS [NAME=VALUE]...");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &[String]) -> Result<(), Box<dyn std::error::Error>> {
    let [producers, entries, inserts, changes @ ..] = arguments else {
        return Err("three arguments are needed".into());
    };
    let (producers, entries) = (producers.parse::<u32>()?.max(1), entries.parse()?);
    let (mut params, mut seed) = (Params::patronus(), 1);
    for change in changes {
        let (name, value) = change.split_once('=').ok_or("a change is NAME=VALUE")?;
        match name {
            "seed" => seed = value.parse()?,
            _ => params = params.with(name, value.parse()?)?,
        }
    }
    let threads = producers.min(THREADS);
    let clients = producers / threads;
    let work =
        QueueWork { queues: 1, entries, clients, lease_us: LEASE_US, revokes: PATRONUS_MR.revokes };
    let load = Load {
        chunk_bytes: CHUNK_BYTES,
        cores: CORES,
        compute_nodes: COMPUTE_NODES,
        connections_each: CORES.min(threads),
        threads: threads * u32::from(COMPUTE_NODES),
        shared: true,
        node_options: PATRONUS_MR.options(),
        extension: PATRONUS_MR.extension,
        ..Load::new(PATRONUS_MR.scheme, Work::Queue(work), inserts.parse()?)
    };
    let outcome = SimulatedCluster::new(params, seed).run(&load)?;
    println!("{:.3} million inserts/s", outcome.rate_per_s / 1e6);
    Ok(())
}
