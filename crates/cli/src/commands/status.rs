//! `granary status`: prints the state and the counters of a memory node.

use std::process::ExitCode;

use crate::node;
use crate::options::{Output, PoolAddress, TokenFile};

/// Show the state and the counters of a memory node
///
/// Prints free and held chunks, clients, allocations and frees, and the CPU time of the NIC thread,
/// which stands in for the hardware, and of the control CPU; then all metrics that are not zero, by
/// their names on the page of granary serve --metrics.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Status {
    /// Address of the memory node: shm:PATH or roce://HOST[:PORT]
    #[arg(long, value_name = "POOL")]
    pool: PoolAddress,

    #[command(flatten)]
    token: TokenFile,

    #[command(flatten)]
    output: Output,
}

const EXAMPLES: &str = "\
Examples:
  granary status --pool shm:/run/granary.sock
  granary status --pool shm:/run/granary.sock --json
  granary status --pool roce://memory-1 --token-file ~/granary.token";

impl Status {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let pool = self.pool.with_token(self.token.token_file.as_deref(), "status")?;
        let status = node::status(pool.node("status")?)?;
        let text = match self.output.json {
            true => serde_json::to_string(&node::StatusReport::new(status))?,
            false => format!("{:<12} {}\n{}", "pool", pool, node::describe(&status)),
        };
        self.output.report().print(text)?;
        Ok(ExitCode::SUCCESS)
    }
}
