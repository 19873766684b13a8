//! `granary bench fault`: what a page fault costs.

use std::process::{Command, ExitCode};

use anyhow::Context;
use bench::fault::{self, Outcome, PAGE_BYTES, Pattern, Spec};
use bench::size::Size;
use bench::{bare, bare_fault};
use pool::Settings;

use super::{Rounds, begin, conclude};
use crate::UsageError;
use crate::commands::worker::FaultTask;
use crate::node::NodeProcess;
use crate::options::{Output, Pictures, PoolAddress};
use crate::team::Member;

/// Measure page faults on remote pages, ours and bare userfaultfd's
///
/// Random faults one page at a time, and sequential ones as the pager batches them, in a
/// process that `granary run` pages to a memory node, and in one that it pages to a file in
/// memory (scheme memory: the pager without the pool); beside them, in the same run,
/// userfaultfd with nothing behind it: its handler on the faulting thread's own core, and 64
/// pages per UFFDIO_COPY with MADV_DONTNEED.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Fault {
    /// Memory that the faults go over
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    memory: Size,

    /// How much of it is local
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    local: Size,

    #[command(flatten)]
    rounds: Rounds,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    pictures: Pictures,
}

const EXAMPLES: &str = "\
Examples:
  granary bench fault
  granary bench fault --memory 1GiB --local 128MiB --seconds 5
  granary bench fault --json > fault.jsonl";

/// The most memory that makes sense here.
const MEMORY_BYTES_MAX: u64 = 1 << 40;
/// Bytes of the memory node's chunks.
const CHUNK_BYTES: u64 = 1 << 20;

/// Who resolves faults: bare userfaultfd, or the pager over something.
struct Way {
    scheme: &'static str,
    nic: &'static str,
    /// The paged process.
    paged: Option<Member>,
}

impl Way {
    fn measure(&mut self, spec: &Spec) -> anyhow::Result<Outcome> {
        match &mut self.paged {
            None => Ok(bare_fault::measure(spec)?),
            Some(member) => {
                let &Spec { pattern, duration, .. } = spec;
                member.give(&FaultTask { pattern, duration })?;
                member.result()
            }
        }
    }
}

impl Fault {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.check()?;
        let mut report = begin(&self.output)?;
        let settings = Settings {
            // The program itself has memory, too; chunks that nobody allocates take none.
            donate_bytes: (2 * self.memory.bytes()).next_multiple_of(CHUNK_BYTES),
            chunk_bytes: CHUNK_BYTES,
            ..Settings::default()
        };
        let node = NodeProcess::start(&settings)?;
        let rounds = self.rounds.rounds;
        let steps = 1 + (Pattern::ALL.len() * rounds as usize) as u64;
        let bar = self.output.progress().bar("fault", steps);
        bar.say(&format!("page out {}", self.memory));
        let pool = PoolAddress::Node(node.address());
        let store = PoolAddress::Store(format!("memory:{}", settings.donate_bytes));
        let mut ways = [
            Way { scheme: bare::SCHEME, nic: bare::NIC, paged: None },
            Way { scheme: "memory", nic: bare::NIC, paged: Some(self.start_paged(&store)?) },
            Way {
                scheme: settings.scheme.name(),
                nic: "shm",
                paged: Some(self.start_paged(&pool)?),
            },
        ];
        bar.step();
        for pattern in Pattern::ALL {
            bar.say(&pattern.to_string());
            let spec = self.spec(pattern);
            let mut outcomes = [Outcome::default(), Outcome::default(), Outcome::default()];
            for _ in 0..rounds {
                for (way, outcome) in ways.iter_mut().zip(&mut outcomes) {
                    outcome.merge(&way.measure(&spec)?);
                }
                bar.step();
            }
            for (way, outcome) in ways.iter().zip(&outcomes) {
                report.extend(outcome.records(&spec.setting(way.scheme, way.nic)))?;
            }
        }
        drop(bar);
        drop(ways);
        let tables = fault::tables(report.records());
        let pictures = self.pictures.directory(&self.output);
        conclude(&mut report, tables, pictures.as_deref(), |report, directory| {
            fault::pictures(report.records(), directory)
        })
    }

    fn check(&self) -> Result<(), UsageError> {
        let (memory, local) = (self.memory.bytes(), self.local.bytes());
        if memory > MEMORY_BYTES_MAX || memory < 2 * local || local < PAGE_BYTES as u64 {
            let text = format!(
                "--memory {} --local {}: take at least twice as much memory as is local, up to {}",
                self.memory,
                self.local,
                Size(MEMORY_BYTES_MAX)
            );
            return Err(UsageError(text, "bench fault"));
        }
        Ok(())
    }

    fn spec(&self, pattern: Pattern) -> Spec {
        Spec {
            pattern,
            memory: self.memory.bytes() as usize,
            local: self.local.bytes() as usize,
            duration: self.rounds.each(),
        }
    }

    /// A paged process with the memory, filled; returns when it is.
    fn start_paged(&self, pool: &PoolAddress) -> anyhow::Result<Member> {
        let granary = std::env::current_exe().context("find this program's own file")?;
        let mut command = Command::new(&granary);
        command.arg("run").arg("--local").arg(self.local.to_string());
        command.arg("--pool").arg(pool.to_string());
        command.arg("--").arg(&granary);
        command.args(["worker", "fault", "--memory"]).arg(self.memory.to_string());
        let mut member = Member::start(&mut command)?;
        member.wait_ready()?;
        Ok(member)
    }
}
