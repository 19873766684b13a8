//! The commands, one file each.

mod bench;
mod quickstart;
mod run;
mod serve;
mod status;

use std::process::ExitCode;

/// All commands.
#[derive(clap::Subcommand, Debug)]
pub enum Command {
    Quickstart(quickstart::Quickstart),
    Run(run::Run),
    Serve(serve::Serve),
    Status(status::Status),
    #[command(subcommand)]
    Bench(bench::Bench),
}

impl Command {
    /// Runs it. An error's chain reads: what was attempted, why it failed, what to do.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Quickstart(quickstart) => quickstart.run(),
            Self::Run(run) => run.run(),
            Self::Serve(serve) => serve.run(),
            Self::Status(status) => status.run(),
            Self::Bench(bench) => bench.run(),
        }
    }
}

/// The end of a command whose memory node, client or pager is not part of this build yet.
fn not_in_this_build(attempted: &str, missing: &str) -> anyhow::Error {
    anyhow::anyhow!("{attempted}: {missing} is not part of this build; take a later version")
}
