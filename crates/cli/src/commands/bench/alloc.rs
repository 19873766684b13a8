//! `granary bench alloc`: latency, rate and CPU time of allocation and free.

use std::fmt;
use std::process::{Command, ExitCode};
use std::str::FromStr;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use bench::alloc::{self, Contender, Outcome, SizeSupport, Total};
use pool::{ControlMode, EmbeddedNode, Options, Pool, Scheme, Settings, schemes};
use schemes::rpc;
use units::Size;

use super::BenchOutput;
use crate::UsageError;
use crate::commands::worker::AllocTask;
use crate::node::{CpuTimes, NodeProcess};
use crate::options::{Donation, NicName};
use crate::worker_process::WorkerProcess;

/// Measure allocation and free: chains on the NIC against RPCs to the memory node's CPU
///
/// Measures latency and rate of scheme onesidedmw and, in the same run on the same NIC, of scheme
/// rpc-mw-2, in which the memory node's CPU binds the same memory windows on request. The control
/// thread of rpc-mw-2 either sleeps between requests (event) or polls on a core of its own
/// (polling). --schemes adds other schemes. CPU time is reported separately for the NIC thread,
/// which stands in for the hardware, and for the memory node's control CPU.
/// On shm each client is a process; on inline each client is a thread that also runs the NIC.
/// With --sizes, one table and one picture compare all schemes over allocation size and number of
/// clients. Schemes that allocate several sizes then use chunks of --chunk; the other schemes use
/// chunks of the requested size.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Alloc {
    /// NIC to measure on
    #[arg(long, value_enum, default_value = "shm")]
    nic: NicName,

    /// Concurrent clients: one measurement per number, separated by commas
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',',
          default_values_t = alloc::CLIENTS)]
    clients: Vec<u32>,

    /// Memory that the memory node donates
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    memory: Size,

    /// Size of a chunk, a power of two from 512 bytes to 1GiB; every free writes zeros over it
    #[arg(long, value_name = "SIZE", default_value = "4KiB")]
    chunk: Size,

    /// Compare the schemes over these allocation sizes, separated by commas, instead of
    /// allocating single chunks
    #[arg(long, value_name = "SIZES", value_delimiter = ',')]
    sizes: Vec<Size>,

    /// Schemes to measure, as in granary serve --scheme, separated by commas, or "all". Scheme
    /// odrp allocates a page at its first write, so its allocation includes that write. See
    /// docs/user/choosing.md
    #[arg(long, value_name = "SCHEMES", value_delimiter = ',', default_values_t = Schemes::DEFAULT)]
    schemes: Vec<Schemes>,

    /// How the control thread of RPC schemes waits for requests: event, polling [default: both;
    /// event with --sizes]
    #[arg(long, value_name = "MODES", value_delimiter = ',')]
    control: Vec<ControlMode>,

    /// Cores of the memory node's CPU that serve requests in RPC schemes
    #[arg(long, value_name = "CORES", default_value_t = 1)]
    cores: u32,

    #[command(flatten)]
    output: BenchOutput,
}

const EXAMPLES: &str = "\
Examples:
  granary bench alloc --nic shm
  granary bench alloc --nic inline --clients 1 --chunk 1MiB --memory 64MiB
  granary bench alloc --schemes onesidedmw,rpc-mw-1,fine-mr,static-mr --clients 1
  granary bench alloc --schemes all --sizes 4KiB,64KiB,2MiB --clients 1,2,4 --memory 256MiB
  granary bench alloc --nic shm --clients 1,8 --json > alloc.jsonl";

/// One item of `--schemes`: a scheme, or "all".
#[derive(Clone, Copy, Debug)]
enum Schemes {
    All,
    One(Scheme),
}

impl Schemes {
    const DEFAULT: [Self; 2] = [Self::One(schemes::ONESIDEDMW), Self::One(schemes::RPC_MW_2)];

    /// The schemes that the items name, each once, in order.
    fn expand(items: &[Self]) -> Vec<Scheme> {
        let mut kinds = Vec::new();
        for item in items {
            let named = match item {
                Self::All => schemes::ALL,
                Self::One(kind) => &[*kind],
            };
            for kind in named {
                if !kinds.contains(kind) {
                    kinds.push(*kind);
                }
            }
        }
        kinds
    }
}

impl FromStr for Schemes {
    type Err = pool::Error;

    fn from_str(name: &str) -> Result<Self, pool::Error> {
        if name == "all" { Ok(Self::All) } else { schemes::find(name).map(Self::One) }
    }
}

impl fmt::Display for Schemes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.pad("all"),
            Self::One(kind) => kind.fmt(f),
        }
    }
}

/// Largest accepted number of clients.
const CLIENTS_MAX: u32 = 128;

/// Results of one round: the clients' latencies, and the memory node's CPU time during the round.
struct Round {
    outcome: Outcome,
    /// None on the inline NIC, which the clients' threads run.
    nic_cpu: Option<Duration>,
    control_cpu: Duration,
}

impl Alloc {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let donation = Donation { memory: self.memory, chunk: Some(self.chunk) };
        donation.check(schemes::ONESIDEDMW, "bench alloc")?;
        if let Some(clients) = self.clients.iter().find(|n| !(1..=CLIENTS_MAX).contains(*n)) {
            let text = format!("--clients {clients}: must be 1 to {CLIENTS_MAX}");
            return Err(UsageError(text, "bench alloc").into());
        }
        if !self.sizes.is_empty() {
            return self.compare(&donation);
        }
        let mut report = self.output.begin()?;
        let rounds = self.output.rounds();
        let controls = if self.control.is_empty() { ControlMode::ALL } else { &self.control };
        let contenders = Contender::with(&Schemes::expand(&self.schemes), controls);
        let steps = self.clients.len() * contenders.len() * rounds as usize;
        let bar = self.output.progress().bar("alloc", steps as u64);
        for &clients in &self.clients {
            let total = |contender: &Contender| (*contender, Total::default());
            let mut totals: Vec<_> = contenders.iter().map(total).collect();
            for _ in 0..rounds {
                for (contender, total) in &mut totals {
                    let Contender { scheme, control } = *contender;
                    bar.say(&format!("{scheme}, {control}, {clients} clients"));
                    let settings = self.settings_of(contender, &donation);
                    let round = self.round(&settings, clients, None)?;
                    total.add(&round.outcome, round.nic_cpu, round.control_cpu);
                    bar.step();
                }
            }
            for (contender, total) in &totals {
                let chunk_bytes = self.chunk.bytes();
                let setting = contender.setting(self.nic.name(), clients, chunk_bytes);
                report.extend(total.records(&setting))?;
            }
        }
        drop(bar);
        let tables = alloc::tables(report.records());
        self.output.conclude(&mut report, tables, |report, directory| {
            alloc::pictures(report.records(), directory)
        })
    }

    fn settings_of(&self, contender: &Contender, donation: &Donation) -> Settings {
        let settings = contender.settings(donation.settings(contender.scheme));
        match contender.scheme.needs_cpu() && self.cores != 1 {
            true => settings.with("cores", self.cores),
            false => settings,
        }
    }

    /// Compares all schemes over allocation sizes and numbers of clients (`--sizes`).
    fn compare(&self, donation: &Donation) -> anyhow::Result<ExitCode> {
        let mut report = self.output.begin()?;
        let controls =
            if self.control.is_empty() { &[ControlMode::Event][..] } else { &self.control };
        let contenders = Contender::with(&Schemes::expand(&self.schemes), controls);
        let (mut supported, mut unsupported) = (Vec::new(), Vec::new());
        for size in self.sizes.iter().map(|size| size.bytes()) {
            for contender in &contenders {
                let settings = self.settings_of(contender, donation);
                match SizeSupport::of(settings, size) {
                    SizeSupport::Supported(settings) => {
                        supported.push((size, *contender, *settings));
                    }
                    SizeSupport::Unsupported(why) => unsupported.push((size, *contender, why)),
                }
            }
        }
        let rounds = self.output.rounds();
        let steps = self.clients.len() * supported.len() * rounds as usize;
        let bar = self.output.progress().bar("alloc", steps as u64);
        for &clients in &self.clients {
            let mut totals: Vec<_> = supported.iter().map(|_| Total::default()).collect();
            for _ in 0..rounds {
                for ((size, contender, settings), total) in supported.iter().zip(&mut totals) {
                    let bytes = settings.scheme.has_sizes().then_some(*size);
                    let name = contender.name();
                    bar.say(&format!("{name}, {}, {clients} clients", Size(*size)));
                    let round = self.round(settings, clients, bytes)?;
                    total.add(&round.outcome, round.nic_cpu, round.control_cpu);
                    bar.step();
                }
            }
            for ((size, contender, _), total) in supported.iter().zip(&totals) {
                let setting = contender.setting(self.nic.name(), clients, *size);
                report.extend(total.records(&setting))?;
            }
        }
        drop(bar);
        let table = alloc::comparison(report.records(), &unsupported);
        let nic = self.nic.name();
        let title = format!("Allocation on {nic}: latency, and rate of allocate/free pairs");
        self.output.conclude(&mut report, [(title, table)], |report, directory| {
            alloc::comparison_picture(report.records(), nic, directory)
        })
    }

    fn round(
        &self,
        settings: &Settings,
        clients: u32,
        bytes: Option<u64>,
    ) -> anyhow::Result<Round> {
        let round = match self.nic {
            NicName::Inline => inline(settings, clients, self.output.round_duration(), bytes),
            nic => processes(settings, nic, clients, self.output.round_duration(), bytes),
        };
        round.with_context(|| {
            let scheme = settings.scheme;
            let control = settings.options.parse::<rpc::Options>().unwrap_or_default().control;
            let size = bytes.map_or(String::new(), |bytes| format!(" of {}", Size(bytes)));
            format!("measure {scheme}{size}, control {control}, with {clients} clients")
        })
    }
}

/// Runs a round on the inline NIC: the clients are threads of this process and run the NIC.
fn inline(
    settings: &Settings,
    clients: u32,
    duration: Duration,
    bytes: Option<u64>,
) -> anyhow::Result<Round> {
    let embedded = Arc::new(EmbeddedNode::start(settings)?);
    let connect = |_| -> anyhow::Result<Pool> {
        let options = Options { groups: Some(1), ..Options::default() };
        let pool = Pool::embedded_in(&embedded, options)?;
        alloc::warm_up(&pool)?;
        Ok(pool)
    };
    let pools = (0..clients).map(connect).collect::<Result<Vec<Pool>, _>>()?;
    let barrier = Barrier::new(pools.len());
    let before = embedded.threads().cpu_time();
    let outcomes = thread::scope(|scope| {
        let start = |pool| {
            let barrier = &barrier;
            scope.spawn(move || {
                barrier.wait();
                alloc::client(pool, duration, bytes)
            })
        };
        let threads: Vec<_> = pools.iter().map(start).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| {
            thread.join().expect("a client's thread does not panic")
        };
        threads.into_iter().map(join).collect::<Result<Vec<Outcome>, pool::Error>>()
    })?;
    let control_cpu = embedded.threads().cpu_time() - before;
    Ok(Round { outcome: join(&outcomes), nic_cpu: None, control_cpu })
}

/// Runs a round on the NIC of a memory node's process; each client is a separate process.
fn processes(
    settings: &Settings,
    nic: NicName,
    clients: u32,
    duration: Duration,
    bytes: Option<u64>,
) -> anyhow::Result<Round> {
    let node = NodeProcess::start_on(settings, nic)?;
    let granary = std::env::current_exe().context("find the path of this program")?;
    let start = |_| {
        let mut command = Command::new(&granary);
        let node = node.address().to_string();
        WorkerProcess::start(command.args(["worker", "alloc", "--pool", &node]))
    };
    let mut workers = (0..clients).map(start).collect::<Result<Vec<WorkerProcess>, _>>()?;
    workers.iter_mut().try_for_each(WorkerProcess::wait_ready)?;
    let before = node.status()?;
    let task = AllocTask { duration, bytes };
    workers.iter_mut().try_for_each(|worker| worker.send_task(&task))?;
    let outcomes =
        workers.iter_mut().map(WorkerProcess::receive).collect::<Result<Vec<Outcome>, _>>()?;
    let CpuTimes { nic, control } = CpuTimes::between(&before, &node.status()?);
    Ok(Round { outcome: join(&outcomes), nic_cpu: Some(nic), control_cpu: control })
}

/// Merges the measurements of all clients.
fn join(outcomes: &[Outcome]) -> Outcome {
    let mut joined = Outcome::default();
    outcomes.iter().for_each(|outcome| joined.join(outcome));
    joined
}
