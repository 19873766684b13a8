//! `granary run`: an unmodified program with most of its memory in a pool.

use std::path::PathBuf;
use std::process::ExitCode;

use bench::size::Size;

use super::not_in_this_build;
use crate::options::{Donation, PoolAddress};

/// Run a program with the rest of its anonymous memory in a pool
///
/// Starts an unmodified, dynamically linked program. Each of its processes keeps at most
/// --local bytes of anonymous memory here; the rest is paged to chunks that are allocated on
/// demand from a memory node: a private one by default. The program's output and exit status
/// are its own.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Run {
    /// Anonymous memory that each process keeps here
    #[arg(long, value_name = "SIZE")]
    local: Size,

    /// Use a running memory node: shm:PATH [default: a private one]
    #[arg(long, value_name = "POOL", conflicts_with_all = ["memory", "chunk"])]
    pool: Option<PoolAddress>,

    #[command(flatten)]
    donation: Donation,

    /// At the end, print what was paged, to standard error
    #[arg(long)]
    stats: bool,

    /// At the end, write what was paged to a file, as one JSON object
    #[arg(long, value_name = "FILE")]
    stats_json: Option<PathBuf>,

    /// The program and its arguments
    #[arg(required = true, last = true, value_name = "PROGRAM")]
    pub program: Vec<String>,
}

const EXAMPLES: &str = "\
Examples:
  granary run --local 256MiB -- sort -S 1G big.txt -o sorted.txt
  granary run --local 64MiB --memory 8GiB --stats -- python3 train.py
  granary run --local 64MiB --pool shm:/run/granary.sock -- sqlite3 big.db .dump";

impl Run {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.donation.check("run")?;
        let Self { local, pool, stats, stats_json, program, .. } = self;
        let wanted = (local, pool, stats, stats_json);
        let attempted = format!("run {} with {wanted:?}", program.join(" "));
        Err(not_in_this_build(&attempted, "the pager"))
    }
}
