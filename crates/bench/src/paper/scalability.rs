//! Throughput and tail latency of allocation against the number of clients, up to 48 on each of 6 compute
//! nodes: the form of the paper's scalability figure (OneSidedMW §6.1.2), which has a key-value store.

use pool::SchemeKind;

use super::finding::Findings;
use super::load::{ACCESS_BYTES, Load, Work};
use super::{Extent, Run};
use crate::Error;
use crate::record::{Statistic, Unit};

/// Compute nodes.
const NODES: u16 = 6;
/// Clients of all of them.
pub const CLIENTS: &[u32] = &[1, 6, 12, 24, 48, 96, 144, 192, 240, 288];
const CLIENTS_QUICK: &[u32] = &[1, 24, 96];
/// Clients on this machine.
const CLIENTS_HERE: &[u32] = &[1, 2, 4, 8, 16];
/// Operations, allocations and frees, of all clients of a point.
const OPERATIONS: u32 = 100_000;
/// The least rounds of a client.
const ROUNDS_MIN: u32 = 40;

/// Who allocates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contender {
    /// Its name in tables and pictures.
    pub name: &'static str,
    scheme: SchemeKind,
    chunk_bytes: u64,
    cores: u32,
}

/// Cores of the paper's memory node (§6): what its "unlimited" can be at most.
const ALL_CORES: u32 = 24;

const fn of(name: &'static str, scheme: SchemeKind, cores: u32) -> Contender {
    Contender { name, scheme, chunk_bytes: ACCESS_BYTES, cores }
}

/// The schemes.
pub const CONTENDERS: &[Contender] = &[
    of("onesidedmw", SchemeKind::OneSidedMw, 1),
    of("rpc-mw-2", SchemeKind::RpcMw2, 1),
    of("rpc-mw-2, 24 cores", SchemeKind::RpcMw2, ALL_CORES),
    of("rpc-mw-1", SchemeKind::RpcMw1, 1),
    of("odrp", SchemeKind::Odrp, 1),
    Contender { name: "fine-mr 1 MB", scheme: SchemeKind::FineMr, chunk_bytes: 1 << 20, cores: 1 },
];

fn clients(run: &Run<'_>) -> &'static [u32] {
    match (run.place.simulated(), run.extent) {
        (true, Extent::Full) => CLIENTS,
        (true, Extent::Quick) => CLIENTS_QUICK,
        (false, Extent::Full) => CLIENTS_HERE,
        (false, Extent::Quick) => &CLIENTS_HERE[..2],
    }
}

fn contenders(run: &Run<'_>) -> impl Iterator<Item = &'static Contender> + use<> {
    // A machine has the cores that it has.
    let simulated = run.place.simulated();
    CONTENDERS.iter().filter(move |c| simulated || c.cores == 1)
}

/// Steps of [`run`].
pub fn steps(run: &Run<'_>) -> usize {
    clients(run).len() * contenders(run).count()
}

/// Each client allocates a chunk and frees it, over and over.
///
/// # Errors
/// As what runs.
pub fn run(run: &Run<'_>, findings: &mut Findings) -> Result<(), Error> {
    for Contender { name, scheme, chunk_bytes, cores } in contenders(run) {
        for &clients in clients(run) {
            let rounds = (OPERATIONS / 2 / clients).clamp(ROUNDS_MIN, 2000);
            let load = Load {
                chunk_bytes: *chunk_bytes,
                cores: *cores,
                compute_nodes: NODES,
                threads: clients,
                ..Load::new(*scheme, Work::AllocateFree, run.rounds(rounds))
            };
            let outcome = run.load(&format!("{name}, {clients} clients"), &load)?;
            let setting = run.setting(name).clients(clients.into());
            let rate = findings.record(&setting, "alloc_rate_per_s", Unit::PerSecond);
            let rate = rate.mean(outcome.rate_per_s);
            let of_clients = super::count(clients, "client");
            findings.add(format!("{name}, {of_clients}: allocations, each with its free"), rate);
            let of = findings.record(&setting, "alloc_latency_us", Unit::Us);
            let p99 = of.value(Statistic::P99, outcome.allocate.quantile_us(0.99));
            findings.add(format!("{name}, {of_clients}: allocation, p99"), p99);
        }
    }
    Ok(())
}
