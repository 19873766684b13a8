//! `granary bench alloc`: what an allocation costs.

use std::process::{Command, ExitCode};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use bench::alloc::{self, Contender, Outcome, Total};
use bench::size::Size;
use pool::{Embedded, Options, Pool, SchemeKind, Settings};

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

    /// Schemes, of onesidedmw, finemem, rpc-mw-2, rpc-mw-1 (unsafe), fine-mr, static-mr, and odrp (4KiB), whose
    /// allocation is the first write of a page; see docs/schemes.md
    #[arg(long, value_name = "SCHEMES", value_delimiter = ',',
          default_values_t = [SchemeKind::OneSidedMw, SchemeKind::RpcMw2])]
    schemes: Vec<SchemeKind>,

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
  granary bench alloc --nic shm --clients 1,8 --json > alloc.jsonl";

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
        let mut report = begin(&self.output)?;
        let rounds = self.rounds.rounds;
        let contenders = Contender::of(&self.schemes);
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
                    let round = match self.nic {
                        NicName::Inline => inline(&settings, clients, self.rounds.each()),
                        nic => processes(&settings, nic, clients, self.rounds.each()),
                    };
                    let round = round.with_context(|| {
                        format!("measure {scheme}, control {control}, with {clients} clients")
                    })?;
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
}

/// A round on a NIC that the clients, threads of this process, run themselves.
fn inline(settings: &Settings, clients: u32, duration: Duration) -> anyhow::Result<Round> {
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
                alloc::client(pool, duration)
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
    team.iter_mut().try_for_each(|member| member.give(&AllocTask { duration }))?;
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
