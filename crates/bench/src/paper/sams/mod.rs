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

pub mod memcached;
mod outcomes;
pub mod workload;

use super::Extent;
use bench_report::progress::Bar;
pub use outcomes::{CLAIMS, Outcomes};
use workload::Measured;

/// Name of the paper and of its experiment.
pub const NAME: &str = "sams";
/// Title of the paper.
pub const TITLE: &str = "SAMS (SmartNIC-assisted disaggregated memory)";

/// The programs of the paper's evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Program {
    /// LU decomposition with partial pivoting.
    Linpack,
    /// Quicksort of random numbers.
    Quicksort,
    /// Reads of random keys. Needs the installed server.
    Memcached,
    /// Lloyd's k-means.
    KMeans,
    /// Copy, scale, add and triad.
    Stream,
}

impl Program {
    /// All programs, in the paper's order.
    pub const ALL: [Self; 5] =
        [Self::Linpack, Self::Quicksort, Self::Memcached, Self::KMeans, Self::Stream];

    /// The name in records and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Linpack => "linpack",
            Self::Quicksort => "quicksort",
            Self::Memcached => "memcached",
            Self::KMeans => "k-means",
            Self::Stream => "stream",
        }
    }

    /// Bytes of the program's data if `memory` is that of a program. Linpack has an eighth, because
    /// its time grows with the size to the power of 1.5.
    pub fn bytes(self, memory: u64) -> u64 {
        if self == Self::Linpack { memory / 8 } else { memory }
    }
}

impl std::str::FromStr for Program {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|program| program.name() == name);
        found.ok_or_else(|| format!("no program {name:?}"))
    }
}

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

/// A program with its data and its local part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// The program.
    pub program: Program,
    /// Bytes of its data.
    pub bytes: u64,
    /// Bytes that may be local. No limit for a plain run.
    pub local_bytes: u64,
}

/// Memory of a process beside its data: program, libraries, heap, the pager's frames and shelf.
const BESIDE_BYTES: u64 = 16 << 20;
/// The least bound of `granary run`.
const LOCAL_BYTES_MIN: u64 = pager::config::LOCAL_BYTES_MIN;

impl Job {
    /// A program with `percent` of its data local. At 100 % the process's other memory is local
    /// too, so that nothing is evicted.
    pub fn new(program: Program, memory: u64, percent: u32) -> Self {
        let bytes = program.bytes(memory);
        let local_bytes = match percent {
            // memcached's items leave room in their slabs, and its table of keys grows.
            100 => bytes + bytes / 4 + BESIDE_BYTES,
            _ => (bytes * u64::from(percent) / 100).max(LOCAL_BYTES_MIN),
        };
        Self { program, bytes, local_bytes }
    }
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
                programs: Program::ALL.into(),
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
                    match machine.run(job, system) {
                        Ok(measured) => outcomes.add(point, round, measured),
                        Err(why) => outcomes.set_missing(point, why),
                    }
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
