//! `granary status`: what a memory node is doing.

use std::process::ExitCode;

use crate::node;
use crate::options::{Output, PoolAddress, TokenFile};

/// Show what a memory node is doing
///
/// Chunks free and held, clients, allocations and frees, and whose time they took: the NIC
/// thread's, which plays the hardware, and the control CPU's.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Status {
    /// The memory node: shm:PATH or roce://HOST[:PORT]
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
            true => serde_json::to_string(&status)?,
            false => format!("{:<12} {}\n{}", "pool", pool, node::describe(&status)),
        };
        self.output.report().print(text)?;
        Ok(ExitCode::SUCCESS)
    }
}
