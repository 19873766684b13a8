//! `granary bench fault`: latency of page faults on remote pages.

use std::process::{Command, ExitCode};

use anyhow::Context;
use bench::fault::{self, Outcome, Pattern, Spec};
use bench::uffd_baseline;
use bench_report::record::{BASELINE_NIC, BASELINE_SCHEME};
use pool::Settings;
use units::{PAGE_BYTES, Size};

use super::BenchOutput;
use crate::UsageError;
use crate::commands::worker::FaultTask;
use crate::node::NodeProcess;
use crate::options::PoolAddress;
use crate::worker_process::WorkerProcess;

/// Measure page faults on remote pages: the pager against bare userfaultfd
///
/// Measures random faults, one page at a time, and sequential faults, which the pager batches.
/// Three processes run under `granary run`: one pages to a memory node over its NIC (NIC "shm"),
/// one to a private memory node without the NIC (NIC "direct"), one to memory of its own host
/// (scheme "memory": the pager without the pool). The same run measures a baseline, scheme "bare":
/// a userfaultfd handler without a pager, on the faulting thread's core, which moves 64 pages per
/// UFFDIO_COPY and drops pages with MADV_DONTNEED.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Fault {
    /// Memory that the measured process touches
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    memory: Size,

    /// Part of that memory that may be resident at a time
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    local: Size,

    #[command(flatten)]
    output: BenchOutput,
}

const EXAMPLES: &str = "\
Examples:
  granary bench fault
  granary bench fault --memory 1GiB --local 128MiB --seconds 5
  granary bench fault --json > fault.jsonl";

/// Largest accepted memory in bytes.
const MEMORY_BYTES_MAX: u64 = 1 << 40;
/// Bytes of the memory node's chunks.
const CHUNK_BYTES: u64 = 1 << 20;

/// One of the fault handlers that a run compares: bare userfaultfd, or the pager over a store.
struct FaultHandler {
    scheme: &'static str,
    nic: &'static str,
    /// The paged process. None: bare userfaultfd, in this process.
    paged: Option<WorkerProcess>,
}

impl FaultHandler {
    fn measure(&mut self, spec: &Spec) -> anyhow::Result<Outcome> {
        match &mut self.paged {
            None => Ok(uffd_baseline::measure(spec)?),
            Some(worker) => {
                let &Spec { pattern, duration, .. } = spec;
                worker.send_task(&FaultTask { pattern, duration })?;
                worker.receive()
            }
        }
    }
}

impl Fault {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.check()?;
        let mut report = self.output.begin()?;
        let settings = Settings {
            // Twice --memory, because the worker process has other memory besides. Chunks that
            // are never allocated take no memory.
            donate_bytes: (2 * self.memory.bytes()).next_multiple_of(CHUNK_BYTES),
            chunk_bytes: CHUNK_BYTES,
            ..Settings::default()
        };
        let node = NodeProcess::start(&settings)?;
        let rounds = self.output.rounds();
        let steps = 1 + (Pattern::ALL.len() * rounds as usize) as u64;
        let bar = self.output.progress().bar("fault", steps);
        bar.say(&format!("page out {}", self.memory));
        let served = ["--pool".to_owned(), PoolAddress::Node(node.address()).to_string()];
        let private = ["--memory".to_owned(), settings.donate_bytes.to_string()];
        let store = PoolAddress::Store(format!("memory:{}", settings.donate_bytes));
        let store = ["--pool".to_owned(), store.to_string()];
        let mut handlers = [
            FaultHandler { scheme: BASELINE_SCHEME, nic: BASELINE_NIC, paged: None },
            FaultHandler {
                scheme: "memory",
                nic: BASELINE_NIC,
                paged: Some(self.start_paged(&store)?),
            },
            FaultHandler {
                scheme: settings.scheme.name,
                nic: "shm",
                paged: Some(self.start_paged(&served)?),
            },
            FaultHandler {
                scheme: settings.scheme.name,
                nic: "direct",
                paged: Some(self.start_paged(&private)?),
            },
        ];
        bar.step();
        for pattern in Pattern::ALL {
            bar.say(&pattern.to_string());
            let spec = self.spec(pattern);
            let mut outcomes = handlers.each_ref().map(|_| Outcome::default());
            for _ in 0..rounds {
                for (handler, outcome) in handlers.iter_mut().zip(&mut outcomes) {
                    outcome.merge(&handler.measure(&spec)?);
                }
                bar.step();
            }
            for (handler, outcome) in handlers.iter().zip(&outcomes) {
                report.extend(outcome.records(&spec.setting(handler.scheme, handler.nic)))?;
            }
        }
        drop(bar);
        drop(handlers);
        let tables = fault::tables(report.records());
        self.output.conclude(&mut report, tables, |report, directory| {
            fault::pictures(report.records(), directory)
        })
    }

    fn check(&self) -> Result<(), UsageError> {
        let (memory, local) = (self.memory.bytes(), self.local.bytes());
        if memory > MEMORY_BYTES_MAX || memory < 2 * local || local < PAGE_BYTES as u64 {
            let text = format!(
                "--memory {} --local {}: memory must be at least twice --local and at most {}; \
                 local at least one page",
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
            duration: self.output.round_duration(),
        }
    }

    /// Starts a worker under `granary run` and waits until it has filled its memory.
    /// Starts a paged process, with the options of `granary run` that name its pool.
    fn start_paged(&self, pool: &[String]) -> anyhow::Result<WorkerProcess> {
        let granary = std::env::current_exe().context("find the path of this program")?;
        let mut command = Command::new(&granary);
        command.arg("run").arg("--local").arg(self.local.to_string());
        command.args(pool);
        command.arg("--").arg(&granary);
        command.args(["worker", "fault", "--memory"]).arg(self.memory.to_string());
        let mut worker = WorkerProcess::start(&mut command)?;
        worker.wait_ready()?;
        Ok(worker)
    }
}
