//! `granary local`: changes the bound of a run while it lives.

use std::process::ExitCode;

use anyhow::{Context, bail};
use pager::config::LOCAL_BYTES_MIN;
use pager::ledger::memory_pages;
use pager::runs::{Bound, Run};
use serde::Serialize;
use units::{PAGE_BYTES, Size};

use crate::bound::set_total;
use crate::options::Output;

/// Change the bound of a program that runs under granary run
///
/// Sets how much anonymous memory all processes of the run together may keep resident on this
/// machine. If the new bound is smaller, the processes take pages out at once. If it is greater,
/// they use the memory as they need it. With granary run --local MIN..MAX the bound follows memory
/// pressure from there, within its range.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Local {
    /// Process id of granary run, or the directory of the run, as granary status lists them
    #[arg(value_name = "RUN")]
    run: String,

    /// New bound of the run
    #[arg(value_name = "SIZE")]
    size: Size,

    #[command(flatten)]
    output: Output,
}

const EXAMPLES: &str = "\
Examples:
  granary local 4711 256MiB
  granary local /tmp/granary-run-4711-0 1GiB --json";

#[derive(Serialize)]
struct Changed {
    pid: u32,
    before_bytes: Option<u64>,
    local_limit_bytes: u64,
    given_bytes: u64,
    processes: u64,
}

impl Local {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let bytes = self.size.bytes();
        let machine = memory_pages() * PAGE_BYTES as u64;
        if bytes < LOCAL_BYTES_MIN || bytes > machine {
            let most = Size(machine).rounded();
            bail!(
                "set a bound of {}: use at least 4 MiB, and at most {most}, the machine's memory",
                self.size
            );
        }
        let name = &self.run;
        let found = Run::find(name);
        let run =
            found.with_context(|| format!("find the run {name}; granary status lists runs"))?;
        let ledger = run.ledger.with_context(|| {
            format!(
                "change the bound of the run {}, which has one only if it was started with --local \
                 (and not --local-each), by the same user or by root",
                run.pid
            )
        })?;
        let before = Bound::of(&ledger);
        set_total(&ledger, bytes);
        let changed = Changed {
            pid: run.pid,
            before_bytes: before.total_bytes,
            local_limit_bytes: bytes,
            given_bytes: before.given_bytes,
            processes: before.processes,
        };
        let text = match self.output.json {
            true => serde_json::to_string(&changed)?,
            false => {
                let before_bound =
                    before.total_bytes.map_or("unknown".into(), |bytes| Size(bytes).rounded());
                format!(
                    "run {}: {before_bound} -> {}; its {} process(es) have {}",
                    run.pid,
                    self.size,
                    before.processes,
                    Size(before.given_bytes).rounded()
                )
            }
        };
        self.output.report().print(text)?;
        Ok(ExitCode::SUCCESS)
    }
}
