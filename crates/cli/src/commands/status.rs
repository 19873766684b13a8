//! `granary status`: prints the state and the counters of a memory node, or lists runs.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use pager::runs::{Bound, Run};
use serde::Serialize;
use units::Size;

use crate::node;
use crate::options::{Output, PoolAddress, TokenFile};

/// Show the state and the counters of a memory node, or the runs on this machine
///
/// Without --pool, lists the runs of granary run on this machine: the process id, the bound, what
/// the processes have of it, and their number. With --pool, prints free and held chunks, clients,
/// allocations and frees, and the CPU time of the NIC thread, which stands in for the hardware, and
/// of the control CPU; then all metrics that are not zero, by their names on the page of granary
/// serve --metrics.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Status {
    /// Address of the memory node: shm:PATH or roce://HOST[:PORT] [default: list runs]
    #[arg(long, value_name = "POOL")]
    pool: Option<PoolAddress>,

    /// Seconds after which a memory node that does not answer is an error
    #[arg(long, value_name = "SECONDS", default_value_t = 30,
          value_parser = clap::value_parser!(u64).range(1..=3600), requires = "pool")]
    timeout: u64,

    #[command(flatten)]
    token: TokenFile,

    #[command(flatten)]
    output: Output,
}

const EXAMPLES: &str = "\
Examples:
  granary status
  granary status --pool shm:/run/granary.sock
  granary status --pool shm:/run/granary.sock --json
  granary status --pool roce://memory-1 --token-file ~/granary.token";

impl Status {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let Some(pool) = self.pool else { return list_runs(&self.output) };
        let pool = pool.with_token(self.token.token_file.as_deref(), "status")?;
        let limit = Duration::from_secs(self.timeout);
        let status = node::status_within(pool.node("status")?, limit)?;
        let text = match self.output.json {
            true => serde_json::to_string(&node::StatusReport::new(status))?,
            false => format!("{:<12} {}\n{}", "pool", pool, node::describe(&status)),
        };
        self.output.report().print(text)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// A run in the list.
#[derive(Serialize)]
struct RunReport {
    pid: u32,
    directory: String,
    program: String,
    /// The bound of the run; `None` with --local-each.
    local_limit_bytes: Option<u64>,
    /// Bytes of it that the processes have leased.
    given_bytes: Option<u64>,
    given_peak_bytes: Option<u64>,
    processes: Option<u64>,
}

impl RunReport {
    fn new(run: &Run) -> Self {
        let bound = run.ledger.as_ref().ok().map(Bound::of);
        Self {
            pid: run.pid,
            directory: run.directory.display().to_string(),
            program: run.program.clone(),
            local_limit_bytes: bound.and_then(|bound| bound.total_bytes),
            given_bytes: bound.map(|bound| bound.given_bytes),
            given_peak_bytes: bound.map(|bound| bound.given_peak_bytes),
            processes: bound.map(|bound| bound.processes),
        }
    }

    fn line(&self) -> String {
        let size = |bytes: Option<u64>| bytes.map_or("-".into(), |bytes| Size(bytes).rounded());
        let processes = self.processes.map_or("-".into(), |count| count.to_string());
        format!(
            "{:<10} {:>10} {:>10} {:>10} {processes:>10}  {}",
            self.pid,
            size(self.local_limit_bytes),
            size(self.given_bytes),
            size(self.given_peak_bytes),
            if self.program.is_empty() { "-" } else { &self.program }
        )
    }
}

fn list_runs(output: &Output) -> anyhow::Result<ExitCode> {
    let runs = Run::all().with_context(|| {
        format!(
            "list the runs in {}; set TMPDIR as for granary run",
            std::env::temp_dir().display()
        )
    })?;
    let reports: Vec<RunReport> = runs.iter().map(RunReport::new).collect();
    let text = match output.json {
        true => {
            let lines: Result<Vec<_>, _> = reports.iter().map(serde_json::to_string).collect();
            lines?.join("\n")
        }
        false if reports.is_empty() => "no program runs under granary run".to_owned(),
        false => {
            let head = format!(
                "{:<10} {:>10} {:>10} {:>10} {:>10}  program",
                "run", "bound", "given", "peak", "processes"
            );
            let lines = std::iter::once(head).chain(reports.iter().map(RunReport::line));
            lines.collect::<Vec<_>>().join("\n")
        }
    };
    if !text.is_empty() {
        output.report().print(text)?;
    }
    Ok(ExitCode::SUCCESS)
}
