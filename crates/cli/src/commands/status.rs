//! `granary status`: what a memory node is doing.

use std::process::ExitCode;

use super::not_in_this_build;
use crate::options::{Output, PoolAddress};

/// Show what a memory node is doing
///
/// Chunks free and held, clients, allocations and frees, and whose time they took: the NIC
/// thread's, which plays the hardware, and the control CPU's.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Status {
    /// The memory node: shm:PATH
    #[arg(long, value_name = "POOL")]
    pool: PoolAddress,

    #[command(flatten)]
    output: Output,
}

const EXAMPLES: &str = "\
Examples:
  granary status --pool shm:/run/granary.sock
  granary status --pool shm:/run/granary.sock --json";

impl Status {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let Self { pool: PoolAddress::Shm(path), output } = self;
        let form = if output.json { "as JSON" } else { "as a table" };
        let attempted = format!("show the status of {} {form}", path.display());
        Err(not_in_this_build(&attempted, "the memory node"))
    }
}
