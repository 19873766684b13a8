//! The subcommands, one file each.

mod assist;
mod bench;
mod completions;
mod kv;
mod local;
mod man;
mod nic;
mod quickstart;
mod run;
mod serve;
mod sim;
mod status;
mod worker;

use std::process::ExitCode;

/// The subcommands of `granary`.
#[derive(clap::Subcommand, Debug)]
pub enum Command {
    Quickstart(quickstart::Quickstart),
    Run(run::Run),
    Serve(serve::Serve),
    Status(status::Status),
    Local(local::Local),
    Kv(kv::Kv),
    Nic(nic::Nic),
    #[command(subcommand)]
    Bench(bench::Bench),
    #[command(subcommand)]
    Sim(sim::Sim),
    Completions(completions::Completions),
    Man(man::Manual),
    #[command(hide = true)]
    Assist(assist::Assist),
    #[command(subcommand, hide = true)]
    Worker(worker::Worker),
}

impl Command {
    /// Runs the command. The chain of an error names the attempt, the cause, and the remedy.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Quickstart(quickstart) => quickstart.run(),
            Self::Run(run) => run.run(),
            Self::Serve(serve) => serve.run(),
            Self::Status(status) => status.run(),
            Self::Local(local) => local.run(),
            Self::Kv(kv) => kv.run(),
            Self::Bench(bench) => bench.run(),
            Self::Sim(sim) => sim.run(),
            Self::Completions(completions) => completions.run(),
            Self::Man(manual) => manual.run(),
            Self::Assist(assist) => assist.run(),
            Self::Nic(nic) => nic.run(),
            Self::Worker(worker) => worker.run(),
        }
    }
}
