//! Experiments: measurements, records, tables, pictures.
//!
//! An experiment runs a workload, collects latencies in [`histogram::Latencies`], and pushes one
//! [`record::Record`] per number into a [`report::Report`]. The report prints the records as JSON
//! lines, or as tables and pictures. Tables show the papers' numbers, from [`claims::Claims`],
//! beside ours.
//!
//! | module | content |
//! | --- | --- |
//! | [`record`] | the machine-readable record, one JSON object per line |
//! | [`histogram`] | HDR histograms of latencies |
//! | [`number`] | formatting of numbers |
//! | [`table`] | plain-text tables made of records |
//! | [`plot`] | pictures, SVG and PNG |
//! | [`report`] | output of records and tables |
//! | [`claims`] | the papers' numbers |
//! | [`progress`] | progress bars |
//! | [`size`] | parsing and formatting of sizes |
//! | [`access`] | READ and WRITE: metrics, tables, pictures |
//! | [`pool_access`] | READ and WRITE through the pool |
//! | [`handoff`] | baseline of READ and WRITE: a bare hand-off between two threads |
//! | [`pingpong`] | messages between two processes |
//! | [`alloc`] | allocation and free: the client's loop, metrics, tables, pictures |
//! | [`recovery`] | time to reclaim a departed client's memory in scheme `finemem` |
//! | [`timestamps`] | wrap-around of the timestamps in scheme `finemem` |
//! | [`fault`] | page faults: metrics, tables, pictures |
//! | [`paged_fault`] | page faults of a paged program |
//! | [`uffd_baseline`] | baseline of the pager: bare userfaultfd |
//! | [`paper`] | the papers' experiments, under virtual time and on this machine |

pub mod access;
pub mod alloc;
pub mod claims;
mod cores;
pub mod fault;
pub mod handoff;
pub mod histogram;
mod inline_client;
pub mod number;
pub mod paged_fault;
pub mod paper;
pub mod pingpong;
pub mod plot;
pub mod pool_access;
pub mod progress;
pub mod record;
pub mod recovery;
pub mod report;
mod rng;
pub mod size;
pub mod table;
pub mod timestamps;
pub mod uffd_baseline;

/// Errors of an experiment.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `claims.toml` is malformed.
    #[error("cannot read claims.toml: {0}; compare it with the rules at its head")]
    Claims(String),
    /// A picture could not be drawn.
    #[error("cannot draw {picture}: {why}")]
    Draw {
        /// Name of the picture.
        picture: String,
        /// Error message of the plotting library.
        why: String,
    },
    /// A file or directory could not be written.
    #[error("cannot write {path}: {source}; choose another directory with --out")]
    Write {
        /// The file or directory.
        path: std::path::PathBuf,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// A system call of an experiment failed.
    #[error("cannot {what}: {source}")]
    System {
        /// The attempt, as a verb phrase.
        what: &'static str,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// A verb failed.
    #[error("cannot {what}: completion status {status}")]
    Verb {
        /// The attempt, as a verb phrase.
        what: &'static str,
        /// Status of the completion.
        status: verbs::Status,
    },
    /// A memory node that an experiment needs did not start.
    #[error("cannot start a memory node: {0}")]
    Node(String),
    /// The pool failed in an experiment.
    #[error(transparent)]
    Pool(#[from] pool::Error),
    /// The NIC failed in an experiment.
    #[error(transparent)]
    Verbs(#[from] verbs::Error),
    /// The simulation failed.
    #[error(transparent)]
    Simulation(#[from] sim::Error),
    /// Userfaultfd is not permitted here.
    #[error(transparent)]
    Pager(#[from] pager::Error),
    /// Standard output cannot be written.
    #[error("cannot print results: {0}")]
    Print(std::io::Error),
}
