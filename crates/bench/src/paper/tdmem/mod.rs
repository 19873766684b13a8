//! TDMEM: the cost of sealed pages, and of a memory node that checks every page (table 2, figures
//! 14 to 18).
//!
//! ```text
//!   granary bench paper tdmem      starts the processes (Machine)
//!      │ measure                    by turns: each program, each local share, each system
//!      ▼
//!   Outcomes ── records (outcomes.rs), claims (claims.rs), tables and pictures (show.rs)
//!   crypt.rs    sealing and opening of pages in this process
//! ```
//!
//! All numbers are measured with a clock. The paper's other numbers are inputs of any model
//! (figures 12 and 13) or concern an FPGA; `claims.rs` lists them with the reasons.

mod claims;
pub mod crypt;
mod outcomes;
mod show;
mod systems;

use super::Extent;
use super::experiment::ProgramExperiment;
use super::programs::{Job, Measured, Program};
use bench_report::progress::Bar;
pub use claims::not_reproduced;
pub use outcomes::Outcomes;
pub use systems::System;

/// Name of the paper.
pub const NAME: &str = "tdmem";
/// Title of the paper.
pub const TITLE: &str = "TDMEM (sealed pages, and a memory node that checks every page)";

/// A part of the evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Sealing and opening of a page (table 2, figure 14): [`crypt`].
    Crypt,
    /// Sequential loads of pages, sealed and plain (figure 15).
    Sequential,
    /// Bandwidth of STREAM's triad (figure 16).
    Stream,
    /// Performance of programs (figures 17 and 18).
    Programs,
}

impl Part {
    /// All parts, in the order in which they run.
    pub const ALL: [Self; 4] = [Self::Crypt, Self::Sequential, Self::Stream, Self::Programs];

    /// Name, title and claims.
    pub fn experiment(self) -> ProgramExperiment {
        match self {
            Self::Crypt => ProgramExperiment {
                name: "crypt",
                title: "Sealing and opening of a page (table 2, figure 14), measured only",
                claims: &crypt::CLAIMS,
            },
            Self::Sequential => ProgramExperiment {
                name: "sequential",
                title: "Sequential loads of pages, sealed and plain (figure 15), measured only",
                claims: &["tdmem.sealed.sequential"],
            },
            Self::Stream => ProgramExperiment {
                name: "stream",
                title: "Bandwidth of STREAM's triad (figure 16), measured only",
                claims: &claims::STREAM,
            },
            Self::Programs => ProgramExperiment {
                name: "programs",
                title: "Performance of programs (figures 17 and 18), measured only",
                claims: &claims::PROGRAMS,
            },
        }
    }

    /// The part with this name.
    ///
    /// # Errors
    /// A message with the existing names.
    pub fn find(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|part| part.experiment().name == name);
        found.ok_or_else(|| {
            let names = Self::ALL.map(|part| part.experiment().name);
            format!("--experiment {name}: must be one of {}", names.join(", "))
        })
    }

    /// The systems with a pager.
    pub fn systems(self) -> &'static [System] {
        match self {
            Self::Crypt => &[],
            Self::Sequential => &System::SEQUENTIAL,
            Self::Stream | Self::Programs => &System::REMOTE,
        }
    }
}

/// The programs. The first three have a counterpart in table 5.
pub const PROGRAMS: [Program; 7] = [
    Program::KMeans,
    Program::Quicksort,
    Program::PageRank,
    Program::Betweenness,
    Program::Memcached,
    Program::Linpack,
    Program::Stream,
];

/// The programs with a counterpart in table 5: kmeans, quicksort, graph-analytics.
const PAPERS: [Program; 3] = [Program::KMeans, Program::Quicksort, Program::PageRank];

/// The local share of a plain run, in percent.
const ALL_LOCAL: u32 = 100;
/// The local share of sequential loads, in percent.
const SEQUENTIAL_SHARE: u32 = 10;
/// The local shares of figure 16, in percent.
const STREAM_SHARES: [u32; 3] = [90, 70, 50];

/// Runs of programs on systems.
pub trait Machine {
    /// Runs a program once, with `local_bytes` of its memory local.
    ///
    /// # Errors
    /// The reason why there is no result, for the table of missing results.
    fn run(&self, job: Job, system: System) -> Result<Measured, String>;
}

/// A point of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Point {
    part: Part,
    program: Program,
    /// Percent of the data that is local.
    share: u32,
    system: System,
}

impl Point {
    /// A plain run has all of its data local.
    fn new(part: Part, program: Program, share: u32, system: System) -> Self {
        let share = if system == System::Plain { ALL_LOCAL } else { share };
        Self { part, program, share, system }
    }

    /// The point of another system.
    fn of(self, system: System) -> Self {
        Self::new(self.part, self.program, self.share, system)
    }

    /// The point in words.
    fn text(&self) -> String {
        format!("{}, {}% local, {}", self.program.name(), self.share, self.system.name())
    }
}

/// The measured points.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The parts of the evaluation.
    pub parts: Vec<Part>,
    /// The programs of [`Part::Programs`].
    pub programs: Vec<Program>,
    /// Their local shares, in percent.
    pub shares: Vec<u32>,
    /// Rounds of all points.
    pub rounds: u32,
    /// Bytes of a program's data ([`Program::bytes`]).
    pub memory: u64,
}

impl Plan {
    /// The points of an extent. `memory`: bytes of a program's data, or the extent's default.
    pub fn new(parts: &[Part], extent: Extent, memory: Option<u64>) -> Self {
        let parts = parts.into();
        match extent {
            Extent::Full => Self {
                parts,
                programs: PROGRAMS.into(),
                shares: vec![100, 90, 80, 70, 60, 50, 40],
                rounds: 3,
                memory: memory.unwrap_or(256 << 20),
            },
            Extent::Quick => Self {
                parts,
                programs: vec![Program::KMeans, Program::Quicksort],
                shares: vec![70, 40],
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
                    let job = Job::new(point.program, self.memory, point.share);
                    outcomes.add(point, round, machine.run(job, point.system));
                }
                bar.step();
            }
        }
        outcomes
    }

    /// The programs of a part with their local shares.
    fn workloads(&self, part: Part) -> Vec<(Program, u32)> {
        let (programs, shares) = match part {
            Part::Crypt => (&[][..], &[][..]),
            Part::Sequential => (&[Program::Sequential][..], &[SEQUENTIAL_SHARE][..]),
            Part::Stream => (&[Program::Triad][..], &STREAM_SHARES[..]),
            Part::Programs => (&self.programs[..], &self.shares[..]),
        };
        let shares = |program| shares.iter().map(move |share| (program, *share));
        programs.iter().flat_map(|program| shares(*program)).collect()
    }

    /// The points of a round. The plain run of a program is before its other runs.
    fn points(&self) -> Vec<Point> {
        let mut points: Vec<Point> = Vec::new();
        for &part in &self.parts {
            for (program, share) in self.workloads(part) {
                let plain = Point::new(part, program, share, System::Plain);
                // Sequential loads are compared with each other only.
                if part != Part::Sequential && !points.contains(&plain) {
                    points.push(plain);
                }
                let point = |system: &System| Point::new(part, program, share, *system);
                points.extend(part.systems().iter().map(point));
            }
        }
        points
    }
}

#[cfg(test)]
mod tests;
