//! `granary bench paper onesidedmw --experiment swap`: starts memory nodes of each scheme, and
//! programs whose pages they hold.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use bench::paper::Extent;
use bench::paper::programs::Measured;
use bench::paper::programs::memcached::Load;
use bench::paper::swap::{self, Cell, Far, Machine, Plan, Swapped, Variant};
use pool::{Address, Settings};
use units::Size;

use super::BenchOutput;
use super::programs::{Programs, Running, Shown, show};
use super::watch::{Seen, Watch};
use crate::failure;
use crate::node::{CpuTimes, NodeProcess};
use crate::summary::RunSummary;

/// Prefix of file names.
const FILES: &str = "paper-onesidedmw-swap";

const NOTE: &str = "\
Times are those of whole programs, from their start to their result: chunks are allocated while \
the data grows. They are medians of the rounds, over the plain run of the same round. The memory \
node is a process on this machine, and its NIC thread stands in for hardware: its CPU time is not \
in the tables of the memory node's CPU. The paper's numbers are of six compute nodes and one core \
of the memory node. A chunk of static-mr is a quarter of a program's data: 64 MiB without --quick, \
a sixteenth of the paper's.";

/// Runs the experiment, and prints its tables.
pub fn run(
    quick: bool,
    memory: Option<Size>,
    output: &BenchOutput<()>,
) -> anyhow::Result<ExitCode> {
    let extent = if quick { Extent::Quick } else { Extent::Full };
    let plan = Plan::new(extent, memory.map(|memory| memory.bytes()));
    let report = output.begin()?;
    let machine = MemoryNodes(Programs::new(Load::ETC)?);
    let bar = output.progress().bar(swap::EXPERIMENT.name, plan.steps() as u64);
    let outcomes = plan.measure(&machine, &bar);
    drop(bar);
    let (results, claims) = (outcomes.results(), outcomes.claims());
    let shown = Shown {
        tables: outcomes.tables(),
        results: &results,
        compared: ("The paper's numbers - measured, this machine", &claims),
        missing: outcomes.missing(),
        has_wrong_result: outcomes.has_wrong_result(),
        note: NOTE,
        files: FILES,
    };
    let draw = |directory: &Path| {
        outcomes.draw("measured, this machine, one compute node", directory, FILES)
    };
    show(report, output, &shown, draw)
}

/// Runs programs over memory nodes of this machine.
struct MemoryNodes(Programs);

impl Machine for MemoryNodes {
    fn run(&self, cell: Cell, variant: Variant) -> Result<Swapped, String> {
        let bytes = u64::from(cell.tasks) * cell.job.backing_bytes();
        match variant.settings(cell.memory, bytes) {
            Some(settings) => self.run_paged(cell, &settings),
            None => {
                let command = Command::new(self.0.path(cell.job.program)?);
                let program = self.0.start(cell.job, command, "plain")?.finish()?;
                Ok(Swapped { program, far: None })
            }
        }
    }
}

impl MemoryNodes {
    fn run_paged(&self, cell: Cell, settings: &Settings) -> Result<Swapped, String> {
        let failed = |error: anyhow::Error| failure::text(&error);
        let node = NodeProcess::start(settings).map_err(failed)?;
        let before = node.status().map_err(failed)?;
        let tasks = (0..cell.tasks).map(|task| self.start(cell, task, &node));
        let mut tasks = tasks.collect::<Result<Vec<Running>, String>>()?;
        let watch = Watch::start(node.id(), tasks.iter().map(Running::id).collect());
        let results = tasks.iter_mut().map(Running::result).collect::<Result<Vec<_>, String>>();
        // The end of `granary run` may take long on a busy machine, and is no part of the program.
        let seen = watch.finish();
        let program = mean(&results?)?;
        tasks.into_iter().try_for_each(Running::end)?;
        let times = CpuTimes::between(&before, &node.status().map_err(failed)?);
        let summaries = (0..cell.tasks).map(|task| self.summary(task));
        let summaries = summaries.collect::<Result<Vec<_>, String>>()?;
        Ok(Swapped { program, far: Some(far(&times, seen, &summaries)) })
    }

    fn start(&self, cell: Cell, task: u32, node: &NodeProcess) -> Result<Running, String> {
        let mut command = self.0.paged(cell.job);
        command.args(["--pool", &Address::Shm(node.path().to_owned()).to_string()]);
        let file = self.summary_file(task);
        // The summary of an earlier run must not pass for that of this one.
        let _ = fs::remove_file(&file);
        command.arg("--stats-json").arg(file).arg("--").arg(self.0.path(cell.job.program)?);
        self.0.start(cell.job, command, &format!("task-{task}"))
    }

    fn summary_file(&self, task: u32) -> PathBuf {
        self.0.directory().join(format!("task-{task}.json"))
    }

    fn summary(&self, task: u32) -> Result<RunSummary, String> {
        let file = self.summary_file(task);
        let text = units::files::read_to_string(&file).map_err(|error| {
            format!("read {}: {error}; see the messages of granary run above", file.display())
        })?;
        serde_json::from_str(&text).map_err(|error| format!("unexpected statistics: {error}"))
    }
}

/// Means of the tasks' times.
fn mean(tasks: &[Measured]) -> Result<Measured, String> {
    let first = tasks.first().ok_or("no task")?;
    if let Some(other) = tasks.iter().find(|task| task.checksum != first.checksum) {
        let (one, two) = (first.checksum, other.checksum);
        return Err(format!("wrong result: checksums {one:x} and {two:x}; report this bug"));
    }
    let mean =
        |value: fn(&Measured) -> f64| tasks.iter().map(value).sum::<f64>() / tasks.len() as f64;
    Ok(Measured {
        seconds: mean(|task| task.seconds),
        cpu_seconds: mean(|task| task.cpu_seconds),
        whole_seconds: mean(|task| task.whole_seconds),
        checksum: first.checksum,
    })
}

/// Use of the memory node by runs with these statistics.
fn far(times: &CpuTimes, seen: Seen, runs: &[RunSummary]) -> Far {
    let faults: u64 = runs.iter().map(|run| run.faults).sum();
    let served_us = |run: &RunSummary| run.fault_mean_us.unwrap_or(0.0) * run.faults as f64;
    let served_us: f64 = runs.iter().map(served_us).sum();
    Far {
        cpu_seconds: times.control.as_secs_f64(),
        cpu_peak: seen.cpu_peak,
        nic_seconds: times.nic.as_secs_f64(),
        utilization: seen.utilization,
        allocations: runs.iter().map(|run| run.allocations_by_nic + run.allocations_by_cpu).sum(),
        fault_us: (faults > 0).then(|| served_us / faults as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn times_of_tasks_are_means_and_results_are_equal() {
        let task = |seconds, checksum| Measured {
            seconds,
            cpu_seconds: 2.0 * seconds,
            whole_seconds: 3.0 * seconds,
            checksum,
        };
        let both = mean(&[task(1.0, 7), task(3.0, 7)]).unwrap();
        assert_eq!(both, task(2.0, 7));
        assert!(mean(&[task(1.0, 7), task(3.0, 8)]).unwrap_err().starts_with("wrong result"));
    }

    #[test]
    fn time_of_a_fault_is_the_mean_over_all_tasks() {
        let run = |faults, fault_mean_us| RunSummary {
            faults,
            fault_mean_us,
            allocations_by_nic: 3,
            ..RunSummary::default()
        };
        let times = CpuTimes { nic: Duration::from_secs(4), control: Duration::from_millis(500) };
        let seen = Seen { cpu_peak: 0.5, utilization: Some(0.75) };
        let far = far(&times, seen, &[run(100, Some(2.0)), run(50, Some(5.0)), run(0, None)]);
        assert_eq!(far.fault_us, Some(3.0));
        assert_eq!((far.allocations, far.cpu_seconds, far.nic_seconds), (9, 0.5, 4.0));
        assert_eq!((far.cpu_peak, far.utilization), (0.5, Some(0.75)));
        assert_eq!(super::far(&times, seen, &[]).fault_us, None);
    }
}
