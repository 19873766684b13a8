//! `granary bench`: the experiments, one file each.

mod access;
mod alloc;
mod fault;
mod paper;
mod pingpong;

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use bench::report::Report;
use bench::table::Table;

use crate::options::{Output, seconds};

/// Measure on this machine, and the papers' experiments under virtual time
#[derive(clap::Subcommand, Debug)]
#[command(after_help = EXAMPLES)]
pub enum Bench {
    Access(access::Access),
    Alloc(alloc::Alloc),
    Fault(fault::Fault),
    Paper(paper::Paper),
    Pingpong(pingpong::Pingpong),
}

const EXAMPLES: &str = "\
Examples:
  granary bench access                          READ and WRITE over sizes and depths
  granary bench alloc --nic shm --clients 1,8   the NIC's allocation against an RPC's
  granary bench pingpong --nic roce             messages between two programs
  granary bench fault --json                    page faults, for machines
  granary bench paper finemem                   the papers' numbers beside ours";

impl Bench {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Access(access) => access.run(),
            Self::Alloc(alloc) => alloc.run(),
            Self::Fault(fault) => fault.run(),
            Self::Paper(paper) => paper.run(),
            Self::Pingpong(pingpong) => pingpong.run(),
        }
    }
}

/// Rounds of a measurement. Baseline and ours take turns, so that what else the machine does at
/// a time falls on both.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct Rounds {
    /// Seconds for each measurement, all rounds together
    #[arg(long, default_value = "0.5", value_parser = seconds)]
    seconds: Duration,

    /// Rounds in which the measurements take turns
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
}

impl Rounds {
    /// How long one round is.
    fn each(&self) -> Duration {
        self.seconds / self.rounds
    }
}

/// Begins an experiment: says so if the machine has other work to do.
fn begin(output: &Output) -> Result<Report, bench::Error> {
    let mut report = output.report();
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().and_then(|load| load.parse::<f64>().ok());
    if let Some(load) = load.filter(|load| *load > cores as f64 / 2.0) {
        report.say(format_args!(
            "This machine has other work: a load of {load} on {cores} cores in the last minute. What \
             needs two cores at once then waits for a turn of the scheduler; measure again later."
        ))?;
    }
    Ok(report)
}

/// Ends an experiment: tables for people, and where the pictures are.
fn conclude(
    report: &mut Report,
    tables: impl IntoIterator<Item = (String, Table)>,
    pictures: Option<&Path>,
    draw: impl FnOnce(&Report, &Path) -> Result<Vec<std::path::PathBuf>, bench::Error>,
) -> anyhow::Result<ExitCode> {
    for (title, table) in tables {
        report.table(&title, &table)?;
    }
    if let Some(directory) = pictures {
        let files = draw(report, directory)?;
        if !files.is_empty() {
            let svgs = files.iter().filter(|file| file.extension().is_some_and(|e| e == "svg"));
            let names: Vec<String> = svgs.map(|file| file.display().to_string()).collect();
            report.say(format_args!("\nPictures (and as PNG): {}", names.join(" ")))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
