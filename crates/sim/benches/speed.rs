//! Speed of the simulator: verbs and operations per second of CPU time.
//!
//! `cargo bench -p granary-sim`

use std::sync::Arc;
use std::time::Instant;

use pool::{Options, Settings, schemes};
use scheme::GroupId;
use sim::{Cluster, ClusterSpec, NodeId, Params, Time, fiber};

/// Clients of one point of the papers' scalability figures: 6 compute nodes of 48 threads.
const CLIENTS: u32 = 288;
const NODES: u16 = 6;

fn main() {
    if std::env::args().any(|a| a == "--profile") {
        run("allocate and free", 0, 170);
        return run("with 20 READs", 20, 170);
    }
    for (name, reads) in [("allocate and free", 0), ("allocate, 20 READs of 64 B, free", 20)] {
        for rounds in [50_000 / CLIENTS, 500_000 / CLIENTS] {
            run(name, reads, rounds);
        }
    }
}

fn run(name: &str, reads: u32, rounds: u32) {
    let settings = Settings {
        donate_bytes: 4 << 20,
        chunk_bytes: 4096,
        group_size: 2,
        credits: 2,
        groups_max: 1,
        clients_max: CLIENTS,
        scheme: schemes::ONESIDEDMW,
        ..Settings::default()
    };
    let spec = ClusterSpec {
        params: Arc::new(Params::connectx5()),
        seed: 1,
        shuffled: false,
        compute_nodes: NODES,
        memory_nodes: 1,
        settings,
    };
    let begin = Instant::now();
    let mut cluster = Cluster::new(&spec).expect("a cluster");
    let options = Options { groups: Some(1), send_blocks: 16, ..Options::default() };
    let processes: Vec<_> = (0..CLIENTS)
        .map(|i| {
            let node = NodeId(1 + (i % NODES as u32) as u16);
            cluster.connect(node, options.clone()).expect("a process")
        })
        .collect();
    cluster.start();
    let made = begin.elapsed();
    let start = cpu_seconds();
    let fibers: Vec<_> = processes
        .iter()
        .enumerate()
        .map(|(i, p)| {
            let pool = p.pool.clone();
            cluster.sim.spawn(format!("client {i}"), Time::us(1), move || {
                let mut some = [0; 64];
                for _ in 0..rounds {
                    let grant = fiber::block_on(pool.allocate_in(GroupId(0))).expect("a chunk");
                    for _ in 0..reads {
                        fiber::block_on(pool.read(&grant, 0, &mut some)).expect("readable");
                    }
                    fiber::block_on(pool.free(grant)).expect("it is freed");
                }
            })
        })
        .collect();
    cluster.sim.run_to_end(&fibers).expect("they end");
    let took = cpu_seconds() - start;
    let counters = cluster.sim.counters();
    let operations = (CLIENTS * rounds * (2 + reads)) as f64;
    println!(
        "{name}, {CLIENTS} clients x {rounds}: made in {:.2} s; {operations} operations, {} verbs, \
         {} events in {took:.2} s: {:.2} M verbs/s, {:.0} operations/s; {:.1} MB resident",
        made.as_secs_f64(),
        counters.verbs,
        counters.events,
        counters.verbs as f64 / took / 1e6,
        operations / took,
        resident_mb(),
    );
}

/// Returns the CPU time of this thread, which excludes other programs on the machine.
fn cpu_seconds() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}

fn resident_mb() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap_or("0 kB");
    line.trim().trim_end_matches(" kB").parse().unwrap_or(0.0) / 1e3
}
