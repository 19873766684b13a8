//! `granary bench`: one file per experiment, and the options that experiments share.

mod access;
mod alloc;
mod fault;
mod kv;
mod lease;
mod paper;
mod pingpong;
mod policy;
pub mod programs;
mod sams;
mod seal;
mod swap;
mod tdmem;
mod watch;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use bench_report::progress::Progress;
use bench_report::report::Report;
use bench_report::table::Table;

use crate::options::{Output, Pictures, seconds};

/// Run benchmarks on this machine, or the papers' experiments under virtual time
#[derive(clap::Subcommand, Debug)]
#[command(after_help = EXAMPLES)]
pub enum Bench {
    Access(access::Access),
    Alloc(alloc::Alloc),
    Fault(fault::Fault),
    Kv(Box<kv::Kv>),
    Lease(lease::Lease),
    Paper(paper::Paper),
    Pingpong(pingpong::Pingpong),
    Policy(policy::Policy),
    Seal(seal::Seal),
}

const EXAMPLES: &str = "\
Examples:
  granary bench access                          READ and WRITE over sizes and queue depths
  granary bench alloc --nic shm --clients 1,8   allocation by the NIC against RPC
  granary bench pingpong --nic roce             messages between two processes
  granary bench fault --json                    page faults, results as JSON lines
  granary bench kv --nic inline                 a key-value store under YCSB's workloads
  granary bench lease --quick                   permissions with leases, few operations
  granary bench policy *.trace                  replacement policies on fault traces
  granary bench seal --rounds 9                 encryption of pages against memcpy
  granary bench paper finemem                   a paper's numbers beside ours
  granary bench paper sams --quick              programs on several kinds of far memory
  granary bench paper tdmem --quick             sealed pages, and a node that checks every page
  granary bench paper onesidedmw --experiment swap --quick    programs over the schemes";

impl Bench {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Access(access) => access.run(),
            Self::Alloc(alloc) => alloc.run(),
            Self::Fault(fault) => fault.run(),
            Self::Kv(kv) => kv.run(),
            Self::Lease(lease) => lease.run(),
            Self::Paper(paper) => paper.run(),
            Self::Pingpong(pingpong) => pingpong.run(),
            Self::Policy(policy) => policy.run(),
            Self::Seal(seal) => seal.run(),
        }
    }
}

/// Duration and rounds of a measurement. In each round every variant runs once, so that other
/// load on the machine affects all variants alike.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct Rounds {
    /// Seconds for each measurement, summed over all rounds
    #[arg(long, default_value = "0.5", value_parser = seconds)]
    seconds: Duration,

    /// Rounds over which the measurements are interleaved
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
}

impl Rounds {
    /// Duration of one round of a measurement.
    fn duration(&self) -> Duration {
        self.seconds / self.rounds
    }
}

/// Options that experiments share: duration, output, pictures. An experiment whose rounds are fixed
/// or that draws no pictures has `()` in place of that group of options.
#[derive(clap::Args, Clone, Debug)]
pub struct BenchOutput<R: clap::Args = Rounds, P: clap::Args = Pictures> {
    #[command(flatten)]
    rounds: R,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    pictures: P,
}

impl<R: clap::Args, P: clap::Args> BenchOutput<R, P> {
    /// Progress bars, if they are wanted.
    fn progress(&self) -> Progress {
        self.output.progress()
    }

    /// Starts the report of an experiment.
    fn report(&self) -> Report {
        self.output.report()
    }

    /// Starts the report of a measurement, with a warning if the machine is busy.
    fn begin(&self) -> Result<Report, bench_report::Error> {
        let mut report = self.report();
        let cores = units::cpus::cores();
        let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load = load.split(' ').next().and_then(|load| load.parse::<f64>().ok());
        if let Some(load) = load.filter(|load| *load > cores as f64 / 2.0) {
            report.say(format_args!(
                "Warning: this machine is busy: load average {load} on {cores} cores over the \
                 last minute. Measurements that need two cores at once include scheduling delays; \
                 measure again on an idle machine."
            ))?;
        }
        Ok(report)
    }
}

impl<P: clap::Args> BenchOutput<Rounds, P> {
    /// Number of rounds.
    fn rounds(&self) -> u32 {
        self.rounds.rounds
    }

    /// Duration of one round of a measurement.
    fn round_duration(&self) -> Duration {
        self.rounds.duration()
    }
}

impl<R: clap::Args> BenchOutput<R, Pictures> {
    /// Directory of pictures; `None` if no pictures are drawn.
    fn directory(&self) -> Option<PathBuf> {
        self.pictures.directory(&self.output)
    }

    /// Ends an experiment: prints its tables, draws its pictures and prints their paths.
    fn conclude(
        &self,
        report: &mut Report,
        tables: impl IntoIterator<Item = (String, Table)>,
        draw: impl FnOnce(&Report, &Path) -> Result<Vec<PathBuf>, bench::Error>,
    ) -> anyhow::Result<ExitCode> {
        for (title, table) in tables {
            report.table(&title, &table)?;
        }
        if let Some(directory) = self.directory() {
            say_pictures(report, &draw(report, &directory)?)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Prints the paths of pictures, if there are any.
fn say_pictures(report: &mut Report, files: &[PathBuf]) -> Result<(), bench_report::Error> {
    if files.is_empty() {
        return Ok(());
    }
    let svgs = files.iter().filter(|file| file.extension().is_some_and(|e| e == "svg"));
    let names: Vec<String> = svgs.map(|file| file.display().to_string()).collect();
    report.say(format_args!("\nPictures (also as .png): {}", names.join(" ")))
}
