//! SAMS: programs with a part of their memory local, on several kinds of far memory (figures 2
//! and 3).
//!
//! ```text
//!   granary bench paper sams       starts the processes (Machine)
//!      │ measure                    by turns: each program, each local share, each system
//!      ▼
//!   Outcomes ── tables, records and claims (outcomes.rs), pictures
//! ```
//!
//! The paper compares Linux, Fastswap and SAMS on a SmartNIC. Here Linux is the kernel's swap,
//! and also the way of Linux within the pager (`--paths linux`), so that everything but the paths
//! is equal. Fastswap is its way within the pager (`--paths fastswap`). The SmartNIC is an assist
//! process (`--assist process`).

mod outcomes;

use super::Extent;
use super::programs::{Job, Measured, Program};
use bench_report::progress::Bar;
pub use outcomes::{CLAIMS, Outcomes};

/// Name of the paper and of its experiment.
pub const NAME: &str = "sams";
/// Title of the paper.
pub const TITLE: &str = "SAMS (SmartNIC-assisted disaggregated memory)";

/// The programs of the paper's evaluation, in its order.
pub const PROGRAMS: [Program; 5] =
    [Program::Linpack, Program::Quicksort, Program::Memcached, Program::KMeans, Program::Stream];

/// What holds the memory of a program that is not local.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum System {
    /// All memory is local, and no pager is loaded.
    Plain,
    /// The kernel's swap on zram, under a memory cgroup.
    Zram,
    /// The kernel's swap in a file, under a memory cgroup.
    File,
    /// `granary run --paths linux`.
    Linux,
    /// `granary run --paths fastswap`.
    Fastswap,
    /// `granary run --paths two`.
    Two,
    /// `granary run --paths two --assist process`.
    Assist,
}

impl System {
    /// All systems, in the order of a round.
    pub const ALL: [Self; 7] =
        [Self::Plain, Self::Zram, Self::File, Self::Linux, Self::Fastswap, Self::Two, Self::Assist];

    /// The name in records and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Zram => "zram",
            Self::File => "file",
            Self::Linux => "linux",
            Self::Fastswap => "fastswap",
            Self::Two => "two",
            Self::Assist => "two+assist",
        }
    }
}

/// Runs of programs on systems.
pub trait Machine {
    /// Runs a program once, with `local_bytes` of its memory local.
    ///
    /// # Errors
    /// The reason why there is no result, for the table of missing results.
    fn run(&self, job: Job, system: System) -> Result<Measured, String>;
}

/// The measured points.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The programs.
    pub programs: Vec<Program>,
    /// Local shares of the data, in percent.
    pub shares: Vec<u32>,
    /// Rounds of all points.
    pub rounds: u32,
    /// Bytes of a program's data ([`Program::bytes`]).
    pub memory: u64,
}

impl Plan {
    /// The points of an extent. `memory`: bytes of a program's data, or the extent's default.
    pub fn new(extent: Extent, memory: Option<u64>) -> Self {
        match extent {
            Extent::Full => Self {
                programs: PROGRAMS.into(),
                shares: vec![100, 90, 70, 50, 25],
                rounds: 3,
                memory: memory.unwrap_or(512 << 20),
            },
            Extent::Quick => Self {
                programs: vec![Program::Quicksort, Program::Stream],
                shares: vec![50, 25],
                rounds: 1,
                memory: memory.unwrap_or(64 << 20),
            },
        }
    }

    /// Number of runs.
    pub fn steps(&self) -> usize {
        self.rounds as usize * self.points().count()
    }

    /// The systems of a share. A plain run has no share, and counts as the first one's.
    fn systems(&self, share: u32) -> &'static [System] {
        if Some(&share) == self.shares.first() { &System::ALL } else { &System::ALL[1..] }
    }

    /// Runs all points, round by round, so that other load on the machine affects all alike. A
    /// point without a result is not run again.
    pub fn measure(&self, machine: &dyn Machine, bar: &Bar) -> Outcomes {
        let mut outcomes = Outcomes::new(self);
        for round in 0..self.rounds {
            for (program, share, system) in self.points() {
                bar.say(&format!("{}, {share}% local, {}", program.name(), system.name()));
                let (job, point) =
                    (Job::new(program, self.memory, share), (program, share, system));
                if !outcomes.is_missing(point) {
                    outcomes.add(point, round, machine.run(job, system));
                }
                bar.step();
            }
        }
        outcomes
    }

    /// The points of a round.
    fn points(&self) -> impl Iterator<Item = (Program, u32, System)> {
        let jobs = self.programs.iter().flat_map(|p| self.shares.iter().map(|s| (*p, *s)));
        jobs.flat_map(|(program, share)| {
            self.systems(share).iter().map(move |system| (program, share, *system))
        })
    }
}

#[cfg(test)]
mod tests;
