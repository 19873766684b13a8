//! `granary bench lease`: permissions with leases, beside their baselines.

use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use bench::lease::{self, Measure, Next, NodeKind, Place, Results, Subject, WindowOperations};
use bench_report::histogram::Latencies;
use bench_report::progress::Bar;
use pool::schemes::patronus::Extension;
use pool::{ControlMode, EmbeddedNode, Pool, Settings};

use super::{BenchOutput, Rounds};
use crate::node::NodeProcess;
use crate::options::NicName;
use crate::worker_process::WorkerProcess;

/// Measure permissions with leases (scheme patronus) beside allocation by RPC
///
/// Measures acquisition with revoke and with expiry beside allocation and free of scheme rpc-mw-2,
/// extension of a lease by CAS beside extension by RPC and new acquisitions, READs under a
/// permission beside READs under a grant, three READs with their acquisition beside READs by RPC
/// of scheme rpc-data, and refused READs with a spare QP beside those without. Then it measures how
/// late leases end, how long a process waits for an object after the SIGKILL of its holder, and how
/// often the memory node's CPU wakes up while no lease exists. The measurements of a ratio run by
/// turns, and the ratio is the median over the turns. Targets are those of an idle machine with two
/// cores. On inline the CPU polls in one part of the run and sleeps between requests in the other
/// part; on shm it sleeps, because the NIC thread, the CPU and the client would share two cores.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Lease {
    /// NICs to measure on, separated by commas
    #[arg(long, value_enum, value_name = "NICS", value_delimiter = ',',
          default_values = ["inline", "shm"])]
    nic: Vec<NicName>,

    /// Leases that end, and processes that are killed, for the measurement of waits
    #[arg(long, value_name = "NUMBER", default_value_t = 100,
          value_parser = clap::value_parser!(u32).range(1..=100_000))]
    trials: u32,

    /// One short round with few trials, to see that everything runs
    #[arg(long, conflicts_with_all = ["trials", "rounds", "seconds"])]
    quick: bool,

    #[command(flatten)]
    output: BenchOutput<Rounds, ()>,
}

const EXAMPLES: &str = "\
Examples:
  granary bench lease
  granary bench lease --nic inline --rounds 9 --seconds 3
  granary bench lease --quick
  granary bench lease --json > lease.jsonl";

/// Longest turn of a measurement, before the next one has its turn.
const TURN: Duration = Duration::from_millis(20);

/// Lease of which the lateness of expiry is measured.
const EXPIRING: Duration = Duration::from_millis(2);

/// Extent of a run.
struct Plan {
    rounds: u32,
    turns: u32,
    turn: Duration,
    trials: u32,
    /// Time for which wake-ups are counted.
    asleep: Duration,
}

impl Lease {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let mut report = self.output.begin()?;
        let plan = self.plan();
        let places: Vec<(NicName, Place)> = self.nic.iter().flat_map(places).collect();
        let steps = places.len() * (plan.rounds as usize + 1);
        let bar = self.output.progress().bar("lease", steps as u64);
        let mut all = Vec::new();
        for (nic, place) in places {
            let mut results = Results::new(place);
            bar.say(&place.name());
            let name = || format!("measure permissions on {}", place.name());
            for _ in 0..plan.rounds {
                plan.round(nic, &mut results).with_context(name)?;
                bar.step();
            }
            plan.waits(nic, &mut results, &bar).with_context(name)?;
            bar.step();
            report.extend(results.records())?;
            all.push(results);
        }
        drop(bar);
        for (title, table) in lease::tables(&all) {
            report.table(&title, &table)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn plan(&self) -> Plan {
        if self.quick {
            let (turn, asleep) = (Duration::from_millis(2), Duration::from_millis(200));
            return Plan { rounds: 1, turns: 2, turn, trials: 3, asleep };
        }
        let duration = self.output.round_duration();
        let turns = duration.as_nanos().div_ceil(TURN.as_nanos()).max(1) as u32;
        Plan {
            rounds: self.output.rounds(),
            turns,
            turn: duration / turns,
            trials: self.trials,
            asleep: Duration::from_secs(10),
        }
    }
}

/// The places to measure on a NIC.
fn places(nic: &NicName) -> Vec<(NicName, Place)> {
    let controls = match nic {
        NicName::Inline => &[ControlMode::Polling, ControlMode::Event][..],
        NicName::Shm | NicName::Roce => &[ControlMode::Event],
    };
    controls.iter().map(|control| (*nic, Place { nic: nic.name(), control: *control })).collect()
}

impl Plan {
    /// One round: the measures of each memory node, by turns.
    fn round(&self, nic: NicName, results: &mut Results) -> anyhow::Result<()> {
        for kind in NodeKind::ALL {
            let measures: Vec<Measure> =
                Measure::ALL.into_iter().filter(|measure| measure.node() == kind).collect();
            let host = Host::start(nic, &kind.settings(results.place.control))?;
            let connect = |extension| -> anyhow::Result<Subject> {
                Ok(Subject::new(host.connect(extension)?)?)
            };
            let (mut by_cas, mut by_rpc) = (connect(Extension::Cas)?, connect(Extension::Rpc)?);
            let standing = lease::permissions(&by_cas.pool().node_status()?);
            for turn in 0..=self.turns {
                for measure in &measures {
                    let subject = match measure.extension() {
                        Extension::Cas => &mut by_cas,
                        Extension::Rpc => &mut by_rpc,
                    };
                    match turn {
                        0 => lease::warm_up(subject, *measure)?,
                        _ => self.turn(subject, *measure, standing, results)?,
                    }
                }
            }
        }
        Ok(())
    }

    /// `standing`: permissions that stay open between the measures.
    fn turn(
        &self,
        subject: &mut Subject,
        measure: Measure,
        standing: u64,
        results: &mut Results,
    ) -> anyhow::Result<()> {
        if !matches!(measure, Measure::Pair | Measure::Pairs) {
            results.add(measure, subject.run(measure, self.turn)?);
            return Ok(());
        }
        subject.settle(standing)?;
        let before = WindowOperations::of(&subject.pool().node_status()?);
        results.add(measure, subject.run(measure, self.turn)?);
        let after = WindowOperations::of(&subject.pool().node_status()?);
        results.add_windows(measure, after.each_since(&before));
        Ok(())
    }

    /// The waits for the end of a lease, and the wake-ups of the memory node's CPU.
    fn waits(&self, nic: NicName, results: &mut Results, bar: &Bar) -> anyhow::Result<()> {
        let control = results.place.control;
        let host = Host::start(nic, &NodeKind::Patronus { spares: 1 }.settings(control))?;
        let (holder, waiter) = (host.connect(Extension::Cas)?, host.connect(Extension::Cas)?);
        bar.say(&format!("{}, expiry", results.place.name()));
        results.lateness = lease::expiries(&holder, &waiter, EXPIRING, self.trials)?;
        if let Host::Process(node) = &host {
            bar.say(&format!("{}, SIGKILL", results.place.name()));
            results.killed = killed_holders(node, &waiter, self.trials)?;
        }
        if control == ControlMode::Event {
            bar.say(&format!("{}, asleep", results.place.name()));
            let count = || waiter.node_status().map(|status| status.control_wakeups);
            results.asleep = Some(lease::wakeups(count, self.asleep)?);
        }
        Ok(())
    }
}

/// A memory node for one round.
enum Host {
    /// On the inline NIC, in this process.
    Embedded(Arc<EmbeddedNode>),
    /// A process of its own.
    Process(Box<NodeProcess>),
}

impl Host {
    fn start(nic: NicName, settings: &Settings) -> anyhow::Result<Self> {
        Ok(match nic {
            NicName::Inline => Self::Embedded(Arc::new(EmbeddedNode::start(settings)?)),
            nic => Self::Process(Box::new(NodeProcess::start_on(settings, nic)?)),
        })
    }

    /// Connects a compute node in this process.
    fn connect(&self, extension: Extension) -> anyhow::Result<Pool> {
        let options = lease::options(extension);
        Ok(match self {
            Self::Embedded(node) => Pool::embedded_in(node, options)?,
            Self::Process(node) => node.address().connect(options)?,
        })
    }
}

/// Measures the wait for an object from the SIGKILL of the process that holds it. The processes
/// that were granted the object before, because the lease had ended, do not count.
fn killed_holders(node: &NodeProcess, waiter: &Pool, trials: u32) -> anyhow::Result<Latencies> {
    let granary = std::env::current_exe().context("find the path of this program")?;
    let address = node.address().to_string();
    let next = Next { object: lease::shared_object(waiter)?, lease: lease::KILLED };
    let mut waits = Latencies::new();
    for _ in 0..3 * trials {
        if waits.count() == u64::from(trials) {
            break;
        }
        let mut command = Command::new(&granary);
        command.args(["worker", "hold", "--pool", &address]);
        let mut holder = WorkerProcess::start(&mut command)?;
        holder.wait_ready()?;
        holder.send_task(&next)?;
        holder.wait_ready()?;
        let (killed, granted) = thread::scope(|scope| -> anyhow::Result<_> {
            let acquire = || next.acquire(waiter).map(|permission| (permission, Instant::now()));
            let thread = scope.spawn(acquire);
            while !thread.is_finished() && !has_waiter(waiter)? {
                thread::yield_now();
            }
            let killed = Instant::now();
            holder.kill()?;
            let (permission, granted) = thread.join().expect("a waiter does not panic")?;
            waiter.revoke_blocking(&permission)?;
            Ok((killed, granted))
        })?;
        if let Some(wait) = granted.checked_duration_since(killed) {
            waits.record(wait);
        }
    }
    Ok(waits)
}

/// True if a request waits for a permission to end.
fn has_waiter(pool: &Pool) -> anyhow::Result<bool> {
    Ok(pool.node_status()?.node.lease.is_some_and(|lease| lease.waiting > 0))
}
