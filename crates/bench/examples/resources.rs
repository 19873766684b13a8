//! `cargo run --release -p granary-bench --example resources -- SCHEME THREADS OPERATIONS
//! [NAME=VALUE]...`: a store of OneSidedMW's figure 7 (inserts of 1 KiB, chunks of 4 KiB or the
//! regions of static-mr) in virtual time, with the waits at each resource.
//!
//! `NAME=VALUE` changes a parameter of the timing model, for example `nic.atomic=20`. Further names
//! are `seed`, `cores` of the memory node, `nodes` with clients (6), bytes of a `chunk`,
//! `insert_ns`, the CPU time of an insert, and `spread`, the percents by which this time varies.

use std::process::ExitCode;

use bench::kv::workload::Workload;
use bench::paper::load::{Load, Work};
use bench::paper::simulated::SimulatedCluster;
use bench::paper::store::{BLOCK_BYTES, CPU, STATIC_BYTES, StoreWork};
use bench::paper::testbed::Testbed;
use pool::schemes;
use sim::Params;

fn main() -> ExitCode {
    match run(&std::env::args().skip(1).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}\nusage: resources SCHEME THREADS OPERATIONS [NAME=VALUE]...");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &[String]) -> Result<(), Box<dyn std::error::Error>> {
    let [scheme, threads, operations, changes @ ..] = arguments else {
        return Err("three arguments are needed".into());
    };
    let (scheme, threads, operations) =
        (schemes::find(scheme)?, threads.parse::<u32>()?, operations.parse::<u32>()?);
    let (mut params, mut seed, mut cores, mut cpu) = (Params::connectx5(), 1, 1, CPU);
    let (mut compute_nodes, mut chunk_bytes) = (6, 4 << 10);
    for change in changes {
        let (name, value) = change.split_once('=').ok_or("a change is NAME=VALUE")?;
        match name {
            "seed" => seed = value.parse()?,
            "nodes" => compute_nodes = value.parse()?,
            "chunk" => chunk_bytes = value.parse()?,
            "cores" => cores = value.parse()?,
            "insert_ns" => cpu.insert_ns = value.parse()?,
            "spread" => cpu.spread_percent = value.parse()?,
            _ => params = params.with(name, value.parse()?)?,
        }
    }
    let (workload, block_bytes) = (Workload::FillSync, BLOCK_BYTES);
    let work = StoreWork { workload, block_bytes, cpu, deletes: false };
    if scheme == schemes::STATIC_MR {
        chunk_bytes = STATIC_BYTES;
    }
    let load = Load {
        chunk_bytes,
        cores,
        compute_nodes,
        threads,
        ..Load::new(scheme, Work::Store(work), operations)
    };
    let cluster = SimulatedCluster::new(params, seed);
    let outcome = cluster.run(&load)?;
    let insert = &outcome.store.insert;
    println!(
        "{:.3} M inserts/s; an insert takes {:.2} us (median {:.2}, 99th percentile {:.2})",
        outcome.rate_per_s / 1e6,
        insert.mean_us(),
        insert.quantile_us(0.5),
        insert.quantile_us(0.99),
    );
    let all = f64::from(threads) * f64::from(operations);
    println!("| nodes | resource | requests per insert | busy | mean wait, us | p50 | most |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for resource in cluster.resources().iter().filter(|r| r.waits.number() > 0) {
        let (waits, elapsed_s) = (&resource.waits, all / outcome.rate_per_s);
        println!(
            "| {} | {} | {:.2} | {:.3} | {:.3} | {:.3} | {:.3} |",
            resource.nodes,
            resource.name,
            waits.number() as f64 / all,
            waits.busy().as_s() / elapsed_s,
            waits.mean().as_us(),
            waits.quantile(0.5).as_us(),
            waits.most().as_us(),
        );
    }
    Ok(())
}
