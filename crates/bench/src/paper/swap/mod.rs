//! OneSidedMW's swap: programs with a part of their memory local, over the schemes (figures 8 and
//! 9, and the ablations of §6.3), with one compute node.
//!
//! ```text
//!   granary bench paper onesidedmw --experiment swap     starts the processes (Machine)
//!      │ measure                    by turns: each program, each local share, each scheme
//!      ▼
//!   Outcomes ── records (outcomes.rs), claims (claims.rs), tables and pictures (show.rs)
//! ```
//!
//! The paper has six compute nodes, and 1 GiB chunks of `static-mr`. Here the tasks of figure 9 and
//! the chunks of `static-mr` have a sixteenth of their sizes.

mod claims;
mod outcomes;
mod show;
mod variants;

use super::Extent;
use super::experiment::ProgramExperiment;
use super::programs::{Job, Measured, Program};
use bench_report::progress::Bar;
pub use outcomes::Outcomes;
pub use variants::Variant;

/// Name and claims.
pub const EXPERIMENT: ProgramExperiment = ProgramExperiment {
    name: "swap",
    title: "Programs over the schemes (§6.2, figures 8 and 9), measured only",
    claims: &claims::CLAIMS,
};

/// The programs of figure 8, in its order.
pub const PROGRAMS: [Program; 4] =
    [Program::KMeans, Program::Memcached, Program::PageRank, Program::Betweenness];

/// The local share of a plain run, in percent.
const ALL_LOCAL: u32 = 100;
/// The local share of figure 9, in percent.
const TASKS_SHARE: u32 = 50;

/// Result of one run: of a program, or of several tasks of it at a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Swapped {
    /// The program's times; means over the tasks.
    pub program: Measured,
    /// The memory node and the pages. `None` of a plain run.
    pub far: Option<Far>,
}

/// Use of the memory node during a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Far {
    /// CPU time of the memory node without the NIC thread.
    pub cpu_seconds: f64,
    /// The largest share of a core that the memory node used for a tenth of a second, or for a
    /// shorter run, without the NIC thread.
    pub cpu_peak: f64,
    /// CPU time of the NIC thread, which stands in for hardware.
    pub nic_seconds: f64,
    /// Bytes of pages in chunks over those of the chunks, as a mean over the run. `None` if no
    /// chunk was ever seen.
    pub utilization: Option<f64>,
    /// Number of allocated chunks.
    pub allocations: u64,
    /// Mean time to serve a fault, in microseconds. `None` without faults.
    pub fault_us: Option<f64>,
}

/// A cell: a number of tasks of a program that run together over one memory node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// Each task.
    pub job: Job,
    /// Number of tasks.
    pub tasks: u32,
    /// Bytes of a program's data, for the chunks of [`Variant::StaticMr`].
    pub memory: u64,
}

/// Runs of programs over schemes.
pub trait Machine {
    /// Runs a cell once, over a fresh memory node.
    ///
    /// # Errors
    /// The reason why there is no result, for the table of missing results.
    fn run(&self, cell: Cell, variant: Variant) -> Result<Swapped, String>;
}

/// A point of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Point {
    program: Program,
    /// Bytes of the program's data.
    bytes: u64,
    tasks: u32,
    /// Percent of the data that is local.
    share: u32,
    variant: Variant,
}

/// The measured points.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The programs.
    pub programs: Vec<Program>,
    /// Local shares of the data, in percent.
    pub shares: Vec<u32>,
    /// Numbers of tasks of figure 9.
    pub tasks: Vec<u32>,
    /// Rounds of all points.
    pub rounds: u32,
    /// Bytes of a program's data. A task of figure 9 has the half.
    pub memory: u64,
}

impl Plan {
    /// The points of an extent. `memory`: bytes of a program's data, or the extent's default.
    pub fn new(extent: Extent, memory: Option<u64>) -> Self {
        match extent {
            Extent::Full => Self {
                programs: PROGRAMS.into(),
                shares: vec![50, 25],
                tasks: vec![1, 2, 4, 8],
                rounds: 3,
                memory: memory.unwrap_or(256 << 20),
            },
            Extent::Quick => Self {
                programs: vec![Program::KMeans, Program::PageRank],
                shares: vec![25],
                tasks: vec![1, 2],
                rounds: 1,
                memory: memory.unwrap_or(64 << 20),
            },
        }
    }

    /// Number of runs.
    pub fn steps(&self) -> usize {
        self.rounds as usize * self.points().len()
    }

    /// Runs all points, round by round, so that other load on the machine affects all alike. A
    /// point without a result is not run again.
    pub fn measure(&self, machine: &dyn Machine, bar: &Bar) -> Outcomes {
        let mut outcomes = Outcomes::new(self);
        for round in 0..self.rounds {
            for point in self.points() {
                bar.say(&point.text());
                if !outcomes.is_missing(&point) {
                    let outcome = machine.run(self.cell(&point), point.variant);
                    outcomes.add(point, round, outcome);
                }
                bar.step();
            }
        }
        outcomes
    }

    fn cell(&self, point: &Point) -> Cell {
        // Job::new computes the bytes again, from the memory of a program.
        let memory = if self.is_task(point) { self.task_memory() } else { self.memory };
        let job = Job::new(point.program, memory, point.share);
        Cell { job, tasks: point.tasks, memory: self.memory }
    }

    fn task_memory(&self) -> u64 {
        self.memory / 2
    }

    fn is_task(&self, point: &Point) -> bool {
        point.bytes == Program::KMeans.bytes(self.task_memory())
    }

    /// A point of figure 8.
    fn point(&self, program: Program, share: u32, variant: Variant) -> Point {
        let share = if variant == Variant::Plain { ALL_LOCAL } else { share };
        Point { program, bytes: program.bytes(self.memory), tasks: 1, share, variant }
    }

    /// A point of figure 9.
    fn task_point(&self, tasks: u32, variant: Variant) -> Point {
        let bytes = Program::KMeans.bytes(self.task_memory());
        Point { program: Program::KMeans, bytes, tasks, share: TASKS_SHARE, variant }
    }

    /// The programs with the local shares of figure 8.
    fn workloads(&self) -> impl Iterator<Item = (Program, u32)> {
        self.programs.iter().flat_map(|program| self.shares.iter().map(|share| (*program, *share)))
    }

    /// The points of a round.
    fn points(&self) -> Vec<Point> {
        let plain = self.programs.iter().map(|p| self.point(*p, ALL_LOCAL, Variant::Plain));
        let paged = self.workloads().flat_map(|(program, share)| {
            Variant::PAGED.map(|variant| self.point(program, share, variant))
        });
        let tasks = self
            .tasks
            .iter()
            .flat_map(|tasks| Variant::FIGURES.map(|variant| self.task_point(*tasks, variant)));
        let mut points: Vec<Point> = plain.chain(paged).chain(tasks).collect();
        // A program's plain run is before its paged runs.
        points.sort_by_key(|point| (self.is_task(point), point.program));
        points
    }
}

impl Point {
    /// The point in words.
    fn text(&self) -> String {
        let Self { program, tasks, share, variant, .. } = self;
        let name = match tasks {
            1 => program.name().to_owned(),
            tasks => format!("{tasks} tasks of {}", program.name()),
        };
        format!("{name}, {share}% local, {}", variant.name())
    }
}

#[cfg(test)]
mod tests;
