//! Throughput and tail latency of allocation over the number of clients, up to 48 on each of 6
//! compute nodes. This is the form of the paper's scalability figure (OneSidedMW §6.1.2), whose
//! workload is a key-value store.

use pool::{Scheme, schemes};

use super::load::{ACCESS_BYTES, Load, Work};
use super::results::Results;
use super::{Extent, Run};
use crate::Error;
use bench_report::record::{Statistic, Unit};

/// Compute nodes.
const NODES: u16 = 6;
/// Numbers of clients, over all compute nodes.
pub const CLIENTS: &[u32] = &[1, 6, 12, 24, 48, 96, 144, 192, 240, 288];
const CLIENTS_QUICK: &[u32] = &[1, 24, 96];
/// Clients on this machine.
const CLIENTS_HERE: &[u32] = &[1, 2, 4, 8, 16];
/// Operations (allocations and frees) of all clients together, per point.
const OPERATIONS: u32 = 100_000;
/// Minimum of rounds per client.
const ROUNDS_MIN: u32 = 40;

/// A compared scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contender {
    /// Name in tables and pictures.
    pub name: &'static str,
    scheme: Scheme,
    chunk_bytes: u64,
    cores: u32,
}

/// Cores of the paper's memory node (§6): the upper limit of its "unlimited" cores.
const ALL_CORES: u32 = 24;

const fn of(name: &'static str, scheme: Scheme, cores: u32) -> Contender {
    Contender { name, scheme, chunk_bytes: ACCESS_BYTES, cores }
}

/// The schemes.
pub const CONTENDERS: &[Contender] = &[
    of("onesidedmw", schemes::ONESIDEDMW, 1),
    of("rpc-mw-2", schemes::RPC_MW_2, 1),
    of("rpc-mw-2, 24 cores", schemes::RPC_MW_2, ALL_CORES),
    of("rpc-mw-1", schemes::RPC_MW_1, 1),
    of("odrp", schemes::ODRP, 1),
    Contender { name: "fine-mr 1 MB", scheme: schemes::FINE_MR, chunk_bytes: 1 << 20, cores: 1 },
];

fn clients(run: &Run<'_>) -> &'static [u32] {
    match (run.testbed.simulated(), run.extent) {
        (true, Extent::Full) => CLIENTS,
        (true, Extent::Quick) => CLIENTS_QUICK,
        (false, Extent::Full) => CLIENTS_HERE,
        (false, Extent::Quick) => &CLIENTS_HERE[..2],
    }
}

fn contenders(run: &Run<'_>) -> impl Iterator<Item = &'static Contender> + use<> {
    // This machine has too few cores for the variant with 24.
    let simulated = run.testbed.simulated();
    CONTENDERS.iter().filter(move |c| simulated || c.cores == 1)
}

/// Number of steps of [`run`].
pub fn steps(run: &Run<'_>) -> usize {
    clients(run).len() * contenders(run).count()
}

/// Each client allocates a chunk and frees it in a loop.
///
/// # Errors
/// Errors of the testbed.
pub fn run(run: &Run<'_>, results: &mut Results) -> Result<(), Error> {
    for Contender { name, scheme, chunk_bytes, cores } in contenders(run) {
        for &clients in clients(run) {
            let rounds = (OPERATIONS / 2 / clients).clamp(ROUNDS_MIN, 2000);
            let load = Load {
                chunk_bytes: *chunk_bytes,
                cores: *cores,
                compute_nodes: NODES,
                threads: clients,
                ..Load::new(scheme, Work::AllocateFree, run.rounds(rounds))
            };
            let outcome = run.load(&format!("{name}, {clients} clients"), &load)?;
            let setting = run.setting(name).clients(clients.into());
            let rate = results.record(&setting, "alloc_rate_per_s", Unit::PerSecond);
            let rate = rate.mean(outcome.rate_per_s);
            let of_clients = super::count(clients, "client");
            results.add(format!("{name}, {of_clients}: allocations, each with its free"), rate);
            let builder = results.record(&setting, "alloc_latency_us", Unit::Us);
            let p99 = builder.value(Statistic::P99, outcome.allocate.quantile_us(0.99));
            results.add(format!("{name}, {of_clients}: allocation, p99"), p99);
        }
    }
    Ok(())
}
