//! `granary bench kv`: key-value stores, and servers of other projects, under the same workloads.

use std::fmt;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::Context;
use bench::kv::protocol::Protocol;
use bench::kv::server::Server;
use bench::kv::store::{self, Shape, StoreTarget};
use bench::kv::workload::{Keys, Plan, Workload};
use bench::kv::{self, Outcome, Target};
use bench_report::record::Setting;
use pool::scheme::info::AccessKind;
use pool::{Address, EmbeddedNode, Pool, Scheme, schemes};
use units::Size;

use super::BenchOutput;
use crate::UsageError;
use crate::node::NodeProcess;
use crate::options::{Donation, NicName, PoolAddress, TokenFile};

/// Measure key-value stores and servers: latency, rate, round trips and memory
///
/// Measures the library: a store in this process, over a private memory node on each NIC, or over
/// a running one. With --resp and --memcached, drives servers instead (granary kv, Redis, Valkey,
/// memcached) with the same workloads, so that one client measures all of them. In each round each
/// store or server runs all workloads once. Keys that a workload needs are written before it, and
/// keys that must not be there are deleted before it; neither is measured.
///
/// Workloads: fillsync inserts each key once, in random order; fillrandom writes keys drawn at
/// random; overwrite writes keys that are there; readrandom reads keys drawn at random;
/// deleterandom deletes 90% of the keys. ycsb-a has 50% updates, ycsb-b 5% updates, ycsb-c reads
/// only; ycsb-d has 5% inserts and reads the newest keys; ycsb-f has 50% reads that are followed by
/// a write. There is no ycsb-e: it scans ranges of keys, and a hash index keeps no order of keys.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Kv {
    /// Workloads, separated by commas: fillsync, fillrandom, overwrite, readrandom, ycsb-a, ycsb-b,
    /// ycsb-c, ycsb-d, ycsb-f, deleterandom
    #[arg(long, value_name = "NAMES", value_delimiter = ',',
          default_values_t = Workload::ALL.map(Named))]
    workloads: Vec<Named>,

    /// Number of keys
    #[arg(long, value_name = "NUMBER", default_value_t = kv::KEYS,
          value_parser = clap::value_parser!(u64).range(1..=KEYS_MAX))]
    keys: u64,

    /// Operations of each workload but fillsync and deleterandom [default: the number of keys]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..=KEYS_MAX))]
    operations: Option<u64>,

    /// Bytes of a value, beside a key of 16 bytes: one measurement per size, separated by commas
    #[arg(
        long,
        value_name = "SIZES",
        value_delimiter = ',',
        default_values_t = kv::SIZES.map(Size)
    )]
    sizes: Vec<Size>,

    /// NICs of the stores, separated by commas [default: inline,shm; without --resp, --memcached]
    #[arg(long, value_name = "NICS", value_enum, value_delimiter = ',')]
    nic: Vec<NicName>,

    /// Measure a store over a running memory node instead: shm:PATH or roce://HOST[:PORT]
    #[arg(long, value_name = "POOL", conflicts_with_all = ["nic", "schemes", "chunk"])]
    pool: Option<PoolAddress>,

    #[command(flatten)]
    token: TokenFile,

    /// Schemes of the stores, as in granary serve --scheme, separated by commas
    #[arg(long, value_name = "SCHEMES", value_delimiter = ',', value_parser = schemes::find,
          default_values_t = [schemes::ONESIDEDMW])]
    schemes: Vec<Scheme>,

    /// Size of a chunk of the stores' memory nodes: a power of two
    #[arg(long, value_name = "SIZE", default_value_t = Size(store::CHUNK_BYTES))]
    chunk: Size,

    /// Threads that share a store: one measurement per number, separated by commas. They also
    /// divide the connections to a server
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', default_values_t = [1],
          value_parser = clap::value_parser!(u32).range(1..=THREADS_MAX))]
    threads: Vec<u32>,

    /// Forms of the stores' operations, separated by commas: published has the round trips of the
    /// paper, fused those that the order of a queue pair allows
    #[arg(long, value_name = "FORMS", value_enum, value_delimiter = ',',
          default_values_t = [FormName::Fused])]
    forms: Vec<FormName>,

    /// Where operations read the index, separated by commas. Form published always reads the
    /// remote index
    #[arg(long, value_name = "PLACES", value_enum, value_delimiter = ',',
          default_values_t = [IndexName::Mirrored])]
    index: Vec<IndexName>,

    /// Memory of this process for values that were read, as granary kv --cache: one measurement per
    /// size, separated by commas; 0 is none. Stores of form published or with a remote index have
    /// no such memory
    #[arg(long, value_name = "SIZES", value_delimiter = ',', default_values_t = [Size(0)])]
    cache: Vec<Size>,

    /// Drive servers that speak the protocol of Redis, separated by commas. The keys of the
    /// workloads are written and deleted there
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    resp: Vec<String>,

    /// Drive servers that speak memcached's text protocol, separated by commas
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    memcached: Vec<String>,

    /// Connections to a server
    #[arg(long, value_name = "NUMBER", default_value_t = 50,
          value_parser = clap::value_parser!(u32).range(1..=CONNECTIONS_MAX))]
    connections: u32,

    /// Requests that a connection writes at once: one measurement per number, separated by commas
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', default_values_t = [1],
          value_parser = clap::value_parser!(u32).range(1..=PIPELINE_MAX))]
    pipeline: Vec<u32>,

    /// The servers have the keys of these workloads already, from an earlier run with the same
    /// --keys and --sizes
    #[arg(long)]
    loaded: bool,

    /// Rounds over which the measurements are interleaved
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,

    /// Seed of all random choices
    #[arg(long, default_value_t = 1)]
    seed: u64,

    #[command(flatten)]
    output: BenchOutput<()>,
}

const EXAMPLES: &str = "\
Examples:
  granary bench kv
  granary bench kv --nic inline --forms published,fused --index remote,mirrored --keys 20000
  granary bench kv --schemes onesidedmw,finemem,static-mr --workloads fillsync,deleterandom
  granary bench kv --nic shm,roce --threads 1,2 --sizes 64,1KiB,16KiB
  granary bench kv --workloads ycsb-b,ycsb-c --cache 0,16MiB,256MiB
  granary bench kv --pool roce://memory-1 --token-file ~/granary.token
  granary bench kv --resp localhost:6379 --memcached localhost:11211 --pipeline 1,16
  granary bench kv --workloads fillsync,deleterandom --json > kv.jsonl";

/// Name of the command in usage errors.
const COMMAND: &str = "bench kv";
/// Largest accepted number of keys and of operations.
const KEYS_MAX: u64 = 1 << 32;
/// Largest accepted number of threads.
const THREADS_MAX: i64 = 64;
/// Largest accepted number of connections.
const CONNECTIONS_MAX: i64 = 10_000;
/// Largest accepted pipeline.
const PIPELINE_MAX: i64 = 10_000;
/// Largest accepted value: the limit of a store.
const VALUE_BYTES_MAX: u64 = 512 << 20;

/// A workload on the command line.
#[derive(Clone, Copy, Debug)]
struct Named(Workload);

impl FromStr for Named {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        if name == "ycsb-e" {
            let why = "scans ranges of keys, and a hash index keeps no order of keys";
            return Err(format!("ycsb-e {why}; choose another workload"));
        }
        let found = Workload::ALL.into_iter().find(|workload| workload.name() == name);
        found.map(Self).ok_or_else(|| {
            format!("must be one of {}", Workload::ALL.map(Workload::name).join(", "))
        })
    }
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0.name())
    }
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum FormName {
    /// The steps and round trips of the paper
    Published,
    /// Block and slot in one round trip
    Fused,
}

impl fmt::Display for FormName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(if *self == Self::Fused { "fused" } else { "published" })
    }
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum IndexName {
    /// In a copy in this process
    Mirrored,
    /// In the memory node
    Remote,
}

impl fmt::Display for IndexName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(if *self == Self::Mirrored { "mirrored" } else { "remote" })
    }
}

/// A store or a server, with the size of values.
struct Contender {
    system: System,
    threads: u32,
    value_bytes: u64,
}

#[derive(Clone)]
enum System {
    /// A store over a private memory node.
    Store {
        nic: NicName,
        scheme: Scheme,
        shape: Shape,
    },
    /// A store over a running memory node.
    Running {
        address: Address,
        shape: Shape,
    },
    Server(Server),
}

/// A target that is ready, with its private memory node.
struct Opened {
    target: Box<dyn Target>,
    setting: Setting,
    _node: Option<NodeProcess>,
}

impl Kv {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let contenders = self.contenders()?;
        let mut report = self.output.begin()?;
        let steps = contenders.len() * self.workloads.len() * self.rounds as usize;
        let bar = self.output.progress().bar("kv", steps as u64);
        let there = if self.loaded { Keys::All } else { Keys::None };
        let mut outcomes = vec![vec![Outcome::default(); self.workloads.len()]; contenders.len()];
        let mut settings = vec![Setting::new(); contenders.len()];
        for round in 0..self.rounds {
            for (at, contender) in contenders.iter().enumerate() {
                let plans = self.plans(contender, round);
                let mut opened = self.open(contender)?;
                let name = contender.name();
                bar.say(&name);
                kv::run_all(&mut *opened.target, &plans, there, |workload, outcome| {
                    outcomes[at][workload].merge(&outcome);
                    bar.step();
                })
                .with_context(|| format!("measure {name}"))?;
                settings[at] = opened.setting;
            }
        }
        drop(bar);
        for (outcomes, setting) in outcomes.iter().zip(&settings) {
            for (Named(workload), outcome) in self.workloads.iter().zip(outcomes) {
                let keys = Setting::new().with("workload", workload.name());
                let setting =
                    setting.iter().fold(keys, |keys, (key, value)| keys.with(key, value.clone()));
                report.extend(outcome.records(*workload, &setting))?;
            }
        }
        let tables = kv::tables(report.records());
        self.output.conclude(&mut report, tables, |report, directory| {
            kv::pictures(report.records(), directory)
        })
    }

    fn operations(&self) -> u64 {
        self.operations.unwrap_or(self.keys)
    }

    /// The workloads of a round. The seed differs between rounds.
    fn plans(&self, contender: &Contender, round: u32) -> Vec<Plan> {
        let (keys, operations) = (self.keys, self.operations());
        let seed = self.seed.wrapping_add(u64::from(round) << 40);
        let plan = |Named(workload): &Named| {
            Plan::new(*workload, keys, operations, contender.value_bytes as usize, seed)
        };
        self.workloads.iter().map(plan).collect()
    }

    /// All stores and servers, in the order of the options.
    fn contenders(&self) -> Result<Vec<Contender>, UsageError> {
        let usage = |text| UsageError(text, COMMAND);
        let mut systems = Vec::new();
        let has_servers = !self.resp.is_empty() || !self.memcached.is_empty();
        let nics: &[NicName] = match (self.nic.is_empty(), has_servers || self.pool.is_some()) {
            (true, true) => &[],
            (true, false) => &[NicName::Inline, NicName::Shm],
            (false, _) => &self.nic,
        };
        for shape in self.shapes() {
            for &scheme in &self.schemes {
                if scheme.access != AccessKind::OneSided {
                    let why = match scheme.access {
                        AccessKind::Pages => {
                            "transfers whole pages, and a store has shorter blocks"
                        }
                        _ => "has grants without addresses, by which a store names its blocks",
                    };
                    return Err(usage(format!("--schemes {scheme}: the scheme {why}")));
                }
                let chunk = Donation { memory: self.chunk, chunk: Some(self.chunk) };
                chunk.check(scheme, COMMAND)?;
                for &nic in nics {
                    systems.push(System::Store { nic, scheme, shape });
                }
            }
            if let Some(pool) = &self.pool {
                let token = self.token.token_file.as_deref();
                let address = pool.clone().with_token(token, COMMAND)?.node(COMMAND)?.clone();
                systems.push(System::Running { address, shape });
            }
        }
        for &depth in &self.pipeline {
            let servers = self.resp.iter().map(|address| (Protocol::Resp, address));
            let memcached = self.memcached.iter().map(|address| (Protocol::Memcached, address));
            for (protocol, address) in servers.chain(memcached) {
                let address = address.clone();
                let (connections, threads) = (self.connections, 1);
                let server = Server { protocol, address, connections, depth, threads };
                systems.push(System::Server(server));
            }
        }
        if self.loaded && systems.iter().any(|system| !matches!(system, System::Server(_))) {
            let why = "a store of this process is new; name servers with --resp or --memcached";
            return Err(usage(format!("--loaded: {why}")));
        }
        let has_cache = systems.iter().any(|system| match system {
            System::Store { shape, .. } | System::Running { shape, .. } => shape.cache_bytes > 0,
            System::Server(_) => false,
        });
        if let Some(size) = self.cache.iter().find(|size| size.bytes() > 0)
            && !has_cache
        {
            let why = "no measured store has a value cache; measure a store with --forms fused and \
                       --index mirrored";
            return Err(usage(format!("--cache {size}: {why}")));
        }
        let mut contenders = Vec::new();
        for system in &systems {
            for &threads in &self.threads {
                for size in &self.sizes {
                    let value_bytes = size.bytes();
                    if value_bytes > VALUE_BYTES_MAX {
                        let most = Size(VALUE_BYTES_MAX);
                        return Err(usage(format!("--sizes {size}: must be at most {most}")));
                    }
                    contenders.push(Contender { system: system.clone(), threads, value_bytes });
                }
            }
        }
        Ok(contenders)
    }

    /// The forms of stores, each once.
    fn shapes(&self) -> Vec<Shape> {
        let mut shapes: Vec<Shape> = Vec::new();
        for form in &self.forms {
            for index in &self.index {
                let mirror = *form == FormName::Fused && *index == IndexName::Mirrored;
                let form = match form {
                    FormName::Published => ::kv::Form::Published,
                    FormName::Fused => ::kv::Form::Fused,
                };
                for cache in &self.cache {
                    let cache_bytes = if mirror { cache.bytes() } else { 0 };
                    let shape = Shape { form, mirror, cache_bytes };
                    if !shapes.contains(&shape) {
                        shapes.push(shape);
                    }
                }
            }
        }
        shapes
    }

    fn open(&self, contender: &Contender) -> anyhow::Result<Opened> {
        let Contender { system, threads, value_bytes } = contender;
        let (pool, node, nic, shape) = match system {
            System::Server(server) => {
                let server = Server { threads: *threads, ..server.clone() };
                let setting = Setting::new()
                    .scheme(server.protocol.name())
                    .nic(&format!("tcp {}", server.address))
                    .clients(server.connections.into())
                    .with("threads", u64::from(*threads))
                    .size(*value_bytes)
                    .in_flight(server.depth.into());
                return Ok(Opened { target: Box::new(server), setting, _node: None });
            }
            System::Store { nic, scheme, shape } => {
                let (keys, operations) = (self.keys, self.operations());
                let keys_max = |Named(workload): &Named| workload.keys_max(keys, operations);
                let keys_max = self.workloads.iter().map(keys_max).max().unwrap_or(keys);
                let settings = store::settings(scheme, self.chunk.bytes(), keys_max, *value_bytes);
                let options = store::options(*threads);
                let (pool, node) = match nic {
                    NicName::Inline => {
                        let node = Arc::new(EmbeddedNode::start(&settings)?);
                        (Pool::embedded_in(&node, options)?, None)
                    }
                    NicName::Shm | NicName::Roce => {
                        let node = NodeProcess::start_on(&settings, *nic)?;
                        (node.address().connect(options)?, Some(node))
                    }
                };
                (pool, node, nic.name(), shape)
            }
            System::Running { address, shape } => {
                let pool = address.connect(store::options(*threads))?;
                let nic = pool.nic().function().port_name();
                (pool, None, nic, shape)
            }
        };
        let setting = Setting::new()
            .scheme(pool.scheme().name)
            .nic(nic)
            .with("form", shape.form_name())
            .with("index", shape.index_name());
        let setting = match shape.cache_bytes {
            0 => setting,
            bytes => setting.with("cache", bytes),
        };
        let setting = setting.with("threads", u64::from(*threads)).size(*value_bytes);
        let target = Box::new(StoreTarget::new(pool, *shape, *threads)?);
        Ok(Opened { target, setting, _node: node })
    }
}

/// Name of a store's form in progress and errors.
fn name_of(shape: &Shape) -> String {
    let name = format!("{}, {} index", shape.form_name(), shape.index_name());
    match shape.cache_bytes {
        0 => name,
        bytes => format!("{name}, cache {}", Size(bytes)),
    }
}

impl Contender {
    fn name(&self) -> String {
        let Self { system, threads, value_bytes } = self;
        let size = Size(*value_bytes);
        match system {
            System::Store { nic, scheme, shape } => {
                format!("{scheme} on {}, {}, {threads} threads, {size}", nic.name(), name_of(shape))
            }
            System::Running { address, shape } => {
                format!("{address}, {}, {threads} threads, {size}", name_of(shape))
            }
            System::Server(server) => format!(
                "{} at {}, pipeline {}, {size}",
                server.protocol.name(),
                server.address,
                server.depth
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        kv: Kv,
    }

    fn parse(words: &[&str]) -> Result<Kv, String> {
        let line = Line::try_parse_from([&["kv"], words].concat());
        line.map(|line| line.kv).map_err(|error| error.to_string())
    }

    fn names(words: &[&str]) -> Vec<String> {
        let contenders = parse(words).unwrap().contenders().unwrap();
        contenders.iter().map(Contender::name).collect()
    }

    #[test]
    fn stores_are_measured_unless_servers_are_named() {
        assert_eq!(
            names(&[]),
            [
                "onesidedmw on inline, fused, mirrored index, 1 threads, 1KiB",
                "onesidedmw on shm, fused, mirrored index, 1 threads, 1KiB"
            ]
        );
        assert_eq!(
            names(&["--resp", "a:1", "--memcached", "b:2", "--pipeline", "1,16"]),
            [
                "resp at a:1, pipeline 1, 1KiB",
                "memcached at b:2, pipeline 1, 1KiB",
                "resp at a:1, pipeline 16, 1KiB",
                "memcached at b:2, pipeline 16, 1KiB"
            ]
        );
        assert_eq!(names(&["--resp", "a:1", "--nic", "shm"]).len(), 2);
    }

    #[test]
    fn published_form_has_no_mirror() {
        let forms = ["--nic", "inline", "--forms", "published,fused", "--index", "remote,mirrored"];
        assert_eq!(names(&forms).len(), 3);
    }

    #[test]
    fn only_mirrored_stores_have_a_value_cache() {
        let line = ["--nic", "inline", "--cache", "0,64MiB", "--index", "remote,mirrored"];
        assert_eq!(
            names(&line),
            [
                "onesidedmw on inline, fused, remote index, 1 threads, 1KiB",
                "onesidedmw on inline, fused, mirrored index, 1 threads, 1KiB",
                "onesidedmw on inline, fused, mirrored index, cache 64MiB, 1 threads, 1KiB"
            ]
        );
        for others in [["--index", "remote"], ["--forms", "published"], ["--resp", "a:1"]] {
            let line = [&["--cache", "64MiB"], &others[..]].concat();
            let error = parse(&line).unwrap().contenders().err().unwrap();
            assert!(error.to_string().contains("no measured store"), "{error}");
        }
    }

    #[test]
    fn impossible_measurements_are_refused() {
        let error = parse(&["--workloads", "ycsb-e"]).unwrap_err();
        assert!(error.contains("a hash index keeps no order of keys"), "{error}");
        assert!(parse(&["--workloads", "ycsb-z"]).unwrap_err().contains("fillsync"));
        assert!(parse(&["--schemes", "odrp"]).unwrap().contenders().is_err());
        assert!(parse(&["--chunk", "3000"]).unwrap().contenders().is_err());
        assert!(parse(&["--loaded"]).unwrap().contenders().is_err());
        assert!(parse(&["--sizes", "1GiB"]).unwrap().contenders().is_err());
        assert!(parse(&["--keys", "0"]).is_err());
    }
}
