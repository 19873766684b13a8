//! `cargo run --release -p granary-bench --example index -- LINE CLIENTS READ_PERCENT OPERATIONS
//! [NAME=VALUE]...`: one point of Patronus's figure 9 in virtual time, with the waits at each
//! resource of the memory node.
//!
//! `LINE` is `unprotected`, `patronus` or `patronus-paper`. `NAME=VALUE` changes a parameter of the
//! timing model, for example `node_cpu.alloc_window=0`, the `seed`, or `lease_us`.

use std::process::ExitCode;

use bench::paper::load::{Load, Work};
use bench::paper::patronus::contenders::{
    COMPUTE_NODES, CORES, Contender, PAPER, PATRONUS, UNPROTECTED,
};
use bench::paper::patronus::{IndexWork, Task, hash};
use bench::paper::simulated::SimulatedCluster;
use bench::paper::testbed::Testbed;
use kv::SplitLock;
use sim::Params;

fn main() -> ExitCode {
    match run(&std::env::args().skip(1).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}\nusage: index LINE CLIENTS READ_PERCENT OPERATIONS [NAME=VALUE]...");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &[String]) -> Result<(), Box<dyn std::error::Error>> {
    let [line, clients, read_percent, operations, changes @ ..] = arguments else {
        return Err("four arguments are needed".into());
    };
    let lines: [Contender; 3] = [UNPROTECTED, PATRONUS, PAPER].map(|c| c.expiring(c.name));
    let contender = lines.iter().find(|c| c.name == line).ok_or("no such line")?;
    let (clients, read_percent) = (clients.parse::<u32>()?, read_percent.parse()?);
    let (mut params, mut seed) = (Params::patronus(), 1);
    // The leases of the experiment.
    let mut lease_us = if clients >= 64 { 1_000 } else { 100 };
    for change in changes {
        let (name, value) = change.split_once('=').ok_or("a change is NAME=VALUE")?;
        match name {
            "seed" => seed = value.parse()?,
            "lease_us" => lease_us = value.parse()?,
            _ => params = params.with(name, value.parse()?)?,
        }
    }
    let protected = contender.name != UNPROTECTED.name;
    let work = IndexWork {
        task: Task::Operate { read_percent },
        keys: 10_000,
        block_bytes: 4096,
        groups: 85,
        entry_unit: hash::entry_unit(contender),
        lease_us,
        revokes: contender.revokes,
        lock: if protected { SplitLock::Exclusive } else { SplitLock::Plain },
        split_lease_us: lease_us.max(20_000),
    };
    let load = Load {
        chunk_bytes: hash::CHUNK_BYTES,
        cores: CORES,
        compute_nodes: COMPUTE_NODES,
        threads: clients * u32::from(COMPUTE_NODES),
        node_options: contender.options(),
        ..Load::new(contender.scheme, Work::Index(work), operations.parse()?)
    };
    let cluster = SimulatedCluster::new(params, seed);
    let outcome = cluster.run(&load)?;
    println!("{:.0} thousand operations/s", outcome.rate_per_s / 1e3);
    for (kind, latencies) in [("read", &outcome.index.read), ("write", &outcome.index.write)] {
        if latencies.count() > 0 {
            let (mean, p50) = (latencies.mean_us(), latencies.quantile_us(0.5));
            let p99 = latencies.quantile_us(0.99);
            println!("{kind}: mean {mean:.1} us, median {p50:.1}, 99th percentile {p99:.1}");
        }
    }
    for resource in cluster.resources().iter().filter(|r| r.nodes == "memory node") {
        let waits = &resource.waits;
        println!(
            "{}: {} requests, busy {:.1} us, wait {:.3} us, longest {:.1} us",
            resource.name,
            waits.number(),
            waits.busy().as_us(),
            waits.mean().as_us(),
            waits.most().as_us(),
        );
    }
    Ok(())
}
