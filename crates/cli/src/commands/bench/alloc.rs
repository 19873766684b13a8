//! `granary bench alloc`: what an allocation costs.

use std::fmt;
use std::process::{Command, ExitCode};
use std::str::FromStr;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use bench::alloc::{self, Contender, Outcome, Served, Total};
use bench::size::Size;
use pool::{ControlMode, Embedded, Options, Pool, SchemeKind, Settings};

use super::{Rounds, begin, conclude};
use crate::UsageError;
use crate::commands::worker::AllocTask;
use crate::node::{CpuTimes, NodeProcess};
use crate::options::{Donation, NicName, Output, Pictures};
use crate::team::Member;

/// Measure allocation and free: the NIC's chains against an RPC to the memory node's CPU
///
/// Latency and rate of scheme onesidedmw and, in the same run on the same NIC, of an RPC that
/// does the same binding on the memory node's CPU (rpc-mw-2), with a control thread that
/// sleeps between requests (event) and with one that has a core (polling); and of the other
/// schemes, if they are named. Whose time each
/// took is told apart: the NIC thread's, which plays the hardware, and the control CPU's.
/// On shm each client is a process; on inline it is a thread, and runs the NIC itself.
/// With --sizes all are compared over size and number of clients, in one table and one picture: schemes
/// with several sizes have chunks of --chunk, the others chunks as large as what is asked for.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Alloc {
    /// NIC
    #[arg(long, value_enum, default_value = "shm")]
    nic: NicName,

    /// Clients at once, one measurement for each number
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',',
          default_values_t = alloc::CLIENTS)]
    clients: Vec<u32>,

    /// Memory that the memory node donates
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    memory: Size,

    /// Size of a chunk, which each free clears: a power of two, 512 bytes to 1GiB
    #[arg(long, value_name = "SIZE", default_value = "4KiB")]
    chunk: Size,

    /// Sizes to compare the schemes over, instead of allocating chunks
    #[arg(long, value_name = "SIZES", value_delimiter = ',')]
    sizes: Vec<Size>,

    /// Schemes, of those that granary serve has, or all; an allocation of odrp is the first write of a page; see
    /// docs/choosing.md
    #[arg(long, value_name = "SCHEMES", value_delimiter = ',', default_values_t = Schemes::DEFAULT)]
    schemes: Vec<Schemes>,

    /// How the control thread waits for requests, in the schemes by RPC: event, polling [default: both; event with
    /// --sizes]
    #[arg(long, value_name = "MODES", value_delimiter = ',')]
    control: Vec<ControlMode>,

    /// Cores of the memory node's CPU that answer requests, in the schemes by RPC
    #[arg(long, value_name = "CORES", default_value_t = 1)]
    cores: u32,

    #[command(flatten)]
    rounds: Rounds,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    pictures: Pictures,
}

const EXAMPLES: &str = "\
Examples:
  granary bench alloc --nic shm
  granary bench alloc --nic inline --clients 1 --chunk 1MiB --memory 64MiB
  granary bench alloc --schemes onesidedmw,rpc-mw-1,fine-mr,static-mr --clients 1
  granary bench alloc --schemes all --sizes 4KiB,64KiB,2MiB --clients 1,2,4 --memory 256MiB
  granary bench alloc --nic shm --clients 1,8 --json > alloc.jsonl";

/// Schemes on the command line.
#[derive(Clone, Copy, Debug)]
enum Schemes {
    All,
    One(SchemeKind),
}

impl Schemes {
    const DEFAULT: [Self; 2] = [Self::One(SchemeKind::OneSidedMw), Self::One(SchemeKind::RpcMw2)];

    fn named(all: &[Self]) -> Vec<SchemeKind> {
        let mut kinds = Vec::new();
        for scheme in all {
            let some = match scheme {
                Self::All => SchemeKind::ALL,
                Self::One(kind) => &[*kind],
            };
            for kind in some {
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
        if name == "all" { Ok(Self::All) } else { name.parse().map(Self::One) }
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

/// The most clients that make sense here.
const CLIENTS_MAX: u32 = 128;

/// One round: what the clients measured, and the memory node's CPU time meanwhile.
struct Round {
    outcome: Outcome,
    nic_cpu: Option<Duration>,
    control_cpu: Duration,
}

impl Alloc {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let donation = Donation { memory: self.memory, chunk: self.chunk };
        donation.check("bench alloc")?;
        if let Some(clients) = self.clients.iter().find(|n| !(1..=CLIENTS_MAX).contains(*n)) {
            let text = format!("--clients {clients}: take 1 to {CLIENTS_MAX}");
            return Err(UsageError(text, "bench alloc").into());
        }
        if !self.sizes.is_empty() {
            return self.compare(&donation);
        }
        let mut report = begin(&self.output)?;
        let rounds = self.rounds.rounds;
        let controls = if self.control.is_empty() { ControlMode::ALL } else { &self.control };
        let contenders = Contender::with(&Schemes::named(&self.schemes), controls);
        let steps = self.clients.len() * contenders.len() * rounds as usize;
        let bar = self.output.progress().bar("alloc", steps as u64);
        for &clients in &self.clients {
            let total = |contender: &Contender| (*contender, Total::default());
            let mut totals: Vec<_> = contenders.iter().map(total).collect();
            for _ in 0..rounds {
                for (contender, total) in &mut totals {
                    let Contender { scheme, control } = *contender;
                    bar.say(&format!("{scheme}, {control}, {clients} clients"));
                    let cores = if scheme.needs_cpu() { self.cores } else { 1 };
                    let settings = Settings { scheme, control, cores, ..donation.settings() };
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
        let pictures = self.pictures.directory(&self.output);
        conclude(&mut report, tables, pictures.as_deref(), |report, directory| {
            alloc::pictures(report.records(), directory)
        })
    }

    /// All schemes over sizes and clients.
    fn compare(&self, donation: &Donation) -> anyhow::Result<ExitCode> {
        let mut report = begin(&self.output)?;
        let controls =
            if self.control.is_empty() { &[ControlMode::Event][..] } else { &self.control };
        let contenders = Contender::with(&Schemes::named(&self.schemes), controls);
        let (mut served, mut refused) = (Vec::new(), Vec::new());
        for size in self.sizes.iter().map(|size| size.bytes()) {
            for contender in &contenders {
                let Contender { scheme, control } = *contender;
                let cores = if scheme.needs_cpu() { self.cores } else { 1 };
                let settings = Settings { scheme, control, cores, ..donation.settings() };
                match Served::of(settings, size) {
                    Served::By(settings) => served.push((size, *contender, *settings)),
                    Served::Not(why) => refused.push((size, *contender, why)),
                }
            }
        }
        let rounds = self.rounds.rounds;
        let steps = self.clients.len() * served.len() * rounds as usize;
        let bar = self.output.progress().bar("alloc", steps as u64);
        for &clients in &self.clients {
            let mut totals: Vec<_> = served.iter().map(|_| Total::default()).collect();
            for _ in 0..rounds {
                for ((size, contender, settings), total) in served.iter().zip(&mut totals) {
                    let bytes = settings.scheme.has_sizes().then_some(*size);
                    let name = contender.name();
                    bar.say(&format!("{name}, {}, {clients} clients", Size(*size)));
                    let round = self.round(settings, clients, bytes)?;
                    total.add(&round.outcome, round.nic_cpu, round.control_cpu);
                    bar.step();
                }
            }
            for ((size, contender, _), total) in served.iter().zip(&totals) {
                let setting = contender.setting(self.nic.name(), clients, *size);
                report.extend(total.records(&setting))?;
            }
        }
        drop(bar);
        let table = alloc::comparison(report.records(), &refused);
        let nic = self.nic.name();
        let title = format!("Allocation on {nic}: latency, and allocations with their frees");
        let pictures = self.pictures.directory(&self.output);
        conclude(&mut report, [(title, table)], pictures.as_deref(), |report, directory| {
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
            NicName::Inline => inline(settings, clients, self.rounds.each(), bytes),
            nic => processes(settings, nic, clients, self.rounds.each(), bytes),
        };
        round.with_context(|| {
            let Settings { scheme, control, .. } = settings;
            let of = bytes.map_or(String::new(), |bytes| format!(" of {}", Size(bytes)));
            format!("measure {scheme}{of}, control {control}, with {clients} clients")
        })
    }
}

/// A round on a NIC that the clients, threads of this process, run themselves.
fn inline(
    settings: &Settings,
    clients: u32,
    duration: Duration,
    bytes: Option<u64>,
) -> anyhow::Result<Round> {
    let embedded = Arc::new(Embedded::start(settings)?);
    let connect = |_| -> anyhow::Result<Pool> {
        let options = Options { groups: Some(1), ..Options::default() };
        let pool = Pool::embedded_in(&embedded, options)?;
        alloc::warm_up(&pool)?;
        Ok(pool)
    };
    let pools = (0..clients).map(connect).collect::<Result<Vec<Pool>, _>>()?;
    let barrier = Barrier::new(pools.len());
    let before = embedded.turner().cpu_time();
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
    let control_cpu = embedded.turner().cpu_time() - before;
    Ok(Round { outcome: join(&outcomes), nic_cpu: None, control_cpu })
}

/// A round on the NIC of a memory node's process, with clients in processes of their own.
fn processes(
    settings: &Settings,
    nic: NicName,
    clients: u32,
    duration: Duration,
    bytes: Option<u64>,
) -> anyhow::Result<Round> {
    let node = NodeProcess::start_on(settings, nic)?;
    let granary = std::env::current_exe().context("find this program's own file")?;
    let start = |_| {
        let mut command = Command::new(&granary);
        Member::start(command.args(["worker", "alloc", "--pool", &node.address().to_string()]))
    };
    let mut team = (0..clients).map(start).collect::<Result<Vec<Member>, _>>()?;
    team.iter_mut().try_for_each(Member::wait_ready)?;
    let before = node.status()?;
    team.iter_mut().try_for_each(|member| member.give(&AllocTask { duration, bytes }))?;
    let outcomes = team.iter_mut().map(Member::result).collect::<Result<Vec<Outcome>, _>>()?;
    let CpuTimes { nic, control } = CpuTimes::between(&before, &node.status()?);
    Ok(Round { outcome: join(&outcomes), nic_cpu: Some(nic), control_cpu: control })
}

/// What all clients measured together.
fn join(outcomes: &[Outcome]) -> Outcome {
    let mut joined = Outcome::default();
    outcomes.iter().for_each(|outcome| joined.join(outcome));
    joined
}
