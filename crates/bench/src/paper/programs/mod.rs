//! Programs whose memory a system under test holds: those of the evaluations of SAMS, of
//! OneSidedMW and of TDMEM. Each runs in a process of its own.
//!
//! ```text
//!   workload.rs, graph.rs   programs of this crate
//!   memcached.rs            client of the installed server
//!   rounds.rs               results of programs by point and round: medians, missing results
//! ```

pub mod graph;
pub mod memcached;
pub mod rounds;
pub mod workload;

use serde::{Deserialize, Serialize};

/// The programs.
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
    /// PageRank of a power-law graph.
    PageRank,
    /// Betweenness centrality of a power-law graph.
    Betweenness,
    /// STREAM, of which only the triads are timed.
    Triad,
    /// One load of each page, in the order of addresses.
    Sequential,
}

impl Program {
    /// All programs.
    pub const ALL: [Self; 9] = [
        Self::Linpack,
        Self::Quicksort,
        Self::Memcached,
        Self::KMeans,
        Self::Stream,
        Self::PageRank,
        Self::Betweenness,
        Self::Triad,
        Self::Sequential,
    ];

    /// The name in records and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Linpack => "linpack",
            Self::Quicksort => "quicksort",
            Self::Memcached => "memcached",
            Self::KMeans => "k-means",
            Self::Stream => "stream",
            Self::PageRank => "pagerank",
            Self::Betweenness => "betweenness",
            Self::Triad => "triad",
            Self::Sequential => "sequential",
        }
    }

    /// Bytes of the program's data if `memory` is that of a program. Linpack has an eighth, because
    /// its time grows with the size to the power of 1.5. Sequential loads have four times as much,
    /// because they take little time.
    pub fn bytes(self, memory: u64) -> u64 {
        match self {
            Self::Linpack => memory / 8,
            Self::Sequential => 4 * memory,
            _ => memory,
        }
    }
}

impl std::str::FromStr for Program {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|program| program.name() == name);
        found.ok_or_else(|| format!("no program {name:?}"))
    }
}

/// Result of one run of a program.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Time of the computation.
    pub seconds: f64,
    /// CPU time of the program's process during the computation.
    pub cpu_seconds: f64,
    /// Time of the initialization of the data, of the computation and of its check.
    pub whole_seconds: f64,
    /// Checksum of the result.
    pub checksum: u64,
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

    /// Bytes of swap, or of a memory node: more than a process of the program ever has.
    pub fn backing_bytes(&self) -> u64 {
        2 * self.bytes + (256 << 20)
    }
}

impl rounds::Checked for Measured {
    fn checksum(&self) -> u64 {
        self.checksum
    }
}
