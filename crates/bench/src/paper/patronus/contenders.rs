//! The lines of the figures, and the loads of their points.

use pool::schemes::patronus::Extension;
use pool::{Scheme, schemes};
use serde_json::Value;

use super::work::LeaseWork;
use crate::Error;
use crate::paper::load::{Load, Work};
use crate::paper::measure::Outcome;
use crate::paper::results::Results;
use crate::paper::{Extent, Run, count};
use bench_report::histogram::Latencies;
use bench_report::record::{Setting, Statistic, Unit};

/// Compute nodes (§7).
pub const COMPUTE_NODES: u16 = 3;
/// Cores of the memory node that serve requests (§7).
pub const CORES: u32 = 4;
/// Threads of a compute node; more clients are coroutines of the threads (§7).
pub const THREADS: u32 = 32;
/// Clients of a compute node.
pub const CLIENTS: &[u32] = &[1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
const CLIENTS_QUICK: &[u32] = &[1, 32];
/// Clients on this machine: coroutines of one thread.
const CLIENTS_HERE: &[u32] = &[1, 4, 16];
/// Requests and accesses of all clients together, per point.
const REQUESTS: u32 = 120_000;
/// Bounds of the cycles of a client.
const CYCLES_MAX: u32 = 2_000;
const CYCLES_MIN: u32 = 20;

/// A line of a figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Contender {
    /// Name in tables and pictures.
    pub name: &'static str,
    /// The scheme.
    pub scheme: Scheme,
    /// Further settings of the memory node.
    pub settings: &'static [(&'static str, Choice)],
    /// How leases are extended.
    pub extension: Extension,
    /// True: the clients revoke their permissions. False: the leases end them.
    pub revokes: bool,
}

/// The value of a setting of the memory node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// On or off.
    Switch(bool),
    /// A number.
    Number(u64),
}

impl Contender {
    /// A scheme with its default settings, whose permissions the clients revoke.
    pub const fn of(name: &'static str, scheme: Scheme) -> Self {
        Self { name, scheme, settings: &[], extension: Extension::Cas, revokes: true }
    }

    /// This contender under another name, with permissions that their leases end.
    pub const fn expiring(self, name: &'static str) -> Self {
        Self { name, revokes: false, ..self }
    }

    /// This contender, with extensions by RPC.
    pub const fn by_rpc(self) -> Self {
        Self { extension: Extension::Rpc, ..self }
    }

    /// This contender under another name.
    pub const fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }

    /// This contender under another name, with further settings of the memory node.
    pub const fn with(
        self,
        name: &'static str,
        settings: &'static [(&'static str, Choice)],
    ) -> Self {
        Self { name, settings, ..self }
    }

    /// The further settings of the memory node, for [`Load::node_options`].
    pub fn options(&self) -> Vec<(&'static str, Value)> {
        let value = |choice| match choice {
            Choice::Switch(on) => Value::from(on),
            Choice::Number(number) => Value::from(number),
        };
        self.settings.iter().map(|&(name, choice)| (name, value(choice))).collect()
    }

    /// True if the contender runs on this machine: an unsafe scheme is simulated only.
    pub fn runs_here(&self) -> bool {
        self.scheme.unsafe_because.is_none()
    }
}

/// Headers of the published form: so many that no permission lacks one.
const HEADERS: (&str, Choice) = ("headers_ppm", Choice::Number(100_000));

/// The published form with all techniques, and with the clients' own revocations.
pub const PAPER: Contender =
    Contender { settings: &[HEADERS], ..Contender::of("patronus-paper", schemes::PATRONUS_PAPER) };
/// Without the techniques that save window operations (table 4).
pub const BASELINE: Contender = PAPER.with(
    "patronus-paper, baseline",
    &[
        HEADERS,
        ("delay", Choice::Switch(false)),
        ("contiguity", Choice::Switch(false)),
        ("handover", Choice::Switch(false)),
    ],
);
/// With delayed unbinding only.
pub const DELAY: Contender = PAPER.with(
    "patronus-paper, + delay",
    &[HEADERS, ("contiguity", Choice::Switch(false)), ("handover", Choice::Switch(false))],
);
/// With contiguity of header and object, too.
pub const CONTIGUITY: Contender =
    PAPER.with("patronus-paper, + contiguity", &[HEADERS, ("handover", Choice::Switch(false))]);
/// Memory without protection; permissions cost nothing.
pub const UNPROTECTED: Contender = Contender::of("unprotected", schemes::UNPROTECTED);
/// Data by RPC: the memory node's CPU executes each access, and permissions cost nothing.
pub const RPC_DATA: Contender = Contender::of("rpc-data", schemes::RPC_DATA);
/// Scheme `patronus`: type-1 windows in a protection domain of each compute node.
pub const PATRONUS: Contender = Contender::of("patronus", schemes::PATRONUS);
/// The same with type-2 windows.
pub const PATRONUS_2: Contender = Contender::of("patronus-2", schemes::PATRONUS_2);
/// The same with regions: "MR" of the paper.
pub const PATRONUS_MR: Contender = Contender::of("patronus-mr", schemes::PATRONUS_MR);

/// The contenders of `all` that run on this testbed.
pub fn on(run: &Run<'_>, all: &'static [Contender]) -> Vec<&'static Contender> {
    all.iter().filter(|c| run.testbed.simulated() || c.runs_here()).collect()
}

/// Numbers of clients of a compute node on this testbed.
pub fn clients(run: &Run<'_>) -> &'static [u32] {
    match (run.testbed.simulated(), run.extent) {
        (true, Extent::Full) => CLIENTS,
        (true, Extent::Quick) => CLIENTS_QUICK,
        (false, Extent::Full) => CLIENTS_HERE,
        (false, Extent::Quick) => &CLIENTS_HERE[..2],
    }
}

/// The load of `clients` clients on each compute node. On this machine, the clients are coroutines
/// of one thread.
///
/// A compute node has a connection to each core of the memory node, as a core serves connections
/// as a whole.
pub fn load(run: &Run<'_>, contender: &Contender, clients: u32, work: LeaseWork) -> Load {
    let (compute_nodes, threads) = match run.testbed.simulated() {
        true => (COMPUTE_NODES, clients.min(THREADS)),
        false => (1, 1),
    };
    let work = LeaseWork { clients: clients / threads, ..work };
    let cycles = REQUESTS / (work.requests() * clients * u32::from(compute_nodes));
    let rounds = run.rounds(cycles.min(CYCLES_MAX)).max(CYCLES_MIN);
    Load {
        chunk_bytes: LeaseWork::CHUNK_BYTES,
        cores: CORES,
        compute_nodes,
        connections_each: CORES.min(threads),
        threads: threads * u32::from(compute_nodes),
        shared: true,
        node_options: contender.options(),
        extension: contender.extension,
        ..Load::new(contender.scheme, Work::Lease(work), rounds)
    }
}

/// Measures one point.
///
/// # Errors
/// Errors of the testbed.
pub fn measure(
    run: &Run<'_>,
    contender: &Contender,
    clients: u32,
    work: LeaseWork,
) -> Result<Outcome, Error> {
    let what = format!("{}, {}", contender.name, count(clients, "client"));
    run.load(&what, &load(run, contender, clients, work))
}

/// Setting of the records of a point.
pub fn setting(run: &Run<'_>, contender: &Contender, clients: u32) -> Setting {
    run.setting(contender.name).clients(clients.into())
}

/// Adds the typical latency and the 99th percentile.
pub fn add_latency(
    run: &Run<'_>,
    results: &mut Results,
    setting: &Setting,
    (what, metric): (&str, &str),
    latencies: &Latencies,
) {
    let (statistic, us) = run.typical(latencies);
    let builder = results.record(setting, metric, Unit::Us);
    results.add(format!("{what}, {statistic}"), builder.value(statistic, us));
    let p99 = builder.value(Statistic::P99, latencies.quantile_us(0.99));
    results.add(format!("{what}, p99"), p99);
}
