//! `granary bench paper sams`: starts the programs of the experiment on each system.

use std::path::Path;
use std::process::{Command, ExitCode};

use bench::paper::Extent;
use bench::paper::programs::memcached::Load;
use bench::paper::programs::{Job, Measured};
use bench::paper::sams::{self, Machine, Plan, System};
use units::Size;

use super::BenchOutput;
use super::programs::{Programs, Shown, show};
use crate::kernel_swap::{KernelSwap, SwapKind, SwapProcess};

/// Bytes of a process that its cgroup counts and granary does not: page tables and stacks.
const ALLOWANCE_BYTES: u64 = 1 << 20;

/// Prefix of file names.
const FILES: &str = "paper-sams";

const NOTE: &str = "\
Time and CPU time are those of the computation, as medians of the rounds, over those of the plain \
run of the same round. CPU time is that of the program's process with the pager's threads in it; \
the memory node is another process, and so is the assist. linux, fastswap and two are granary run \
--paths; its private memory node is in this machine's memory, and the process copies its pages \
itself. two+assist adds --assist process, which takes the role of the SmartNIC on a core of this \
machine: with two cores it competes with the program. The paper's numbers are of a cluster with a \
SmartNIC, and of the kernel's swap over its network.";

/// Runs the experiment, and prints its tables.
pub fn run(
    quick: bool,
    memory: Option<Size>,
    output: &BenchOutput<()>,
) -> anyhow::Result<ExitCode> {
    let extent = if quick { Extent::Quick } else { Extent::Full };
    let plan = Plan::new(extent, memory.map(|memory| memory.bytes()));
    let report = output.begin()?;
    let machine = Systems(Programs::new(Load::EVEN)?);
    let bar = output.progress().bar(sams::NAME, plan.steps() as u64);
    let outcomes = plan.measure(&machine, &bar);
    drop(bar);
    let (results, savings) = (outcomes.results(), outcomes.savings());
    let shown = Shown {
        tables: outcomes.tables(),
        results: &results,
        compared: ("Saved by two paths - measured, this machine", &savings),
        missing: outcomes.missing(),
        has_wrong_result: outcomes.has_wrong_result(),
        note: NOTE,
        files: FILES,
    };
    let draw = |directory: &Path| outcomes.draw("measured, this machine", directory, FILES);
    show(report, output, &shown, draw)
}

/// Runs programs on the systems of this machine.
struct Systems(Programs);

impl Systems {
    fn run_command(&self, job: Job, command: Command) -> Result<Measured, String> {
        self.0.start(job, command, "program")?.finish()
    }

    /// Returns a command that runs `program` under `granary run` with these options. Arguments may
    /// be added.
    fn paged(&self, options: &[&str], job: Job, program: &Path) -> Command {
        let mut command = self.0.paged(job);
        command.args(options).args(["--memory", &job.backing_bytes().to_string(), "--"]);
        command.arg(program);
        command
    }
}

impl Machine for Systems {
    fn run(&self, job: Job, system: System) -> Result<Measured, String> {
        let program = self.0.path(job.program)?;
        let swap = |kind| {
            let limit = job.local_bytes + ALLOWANCE_BYTES;
            SwapProcess::start(&KernelSwap { kind, limit, size: job.backing_bytes() })
        };
        match system {
            System::Plain => self.run_command(job, Command::new(program)),
            System::Zram | System::File => {
                let kind = if system == System::Zram { SwapKind::Zram } else { SwapKind::File };
                let swap = swap(kind)?;
                self.run_command(job, swap.command(&program))
            }
            System::Linux | System::Fastswap | System::Two => {
                self.run_command(job, self.paged(&["--paths", system.name()], job, &program))
            }
            System::Assist => {
                let options = ["--paths", "two", "--assist", "process"];
                self.run_command(job, self.paged(&options, job, &program))
            }
        }
    }
}
