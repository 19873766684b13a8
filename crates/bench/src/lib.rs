//! Experiments: measurements, records, tables, pictures.
//!
//! An experiment runs something, keeps latencies in [`histogram::Latencies`], and pushes one
//! [`record::Record`] per number into a [`report::Report`], which prints them as lines of
//! JSON for machines, or as tables and pictures for people. The numbers of the papers come
//! from [`claims::Claims`] and stand beside ours.
//!
//! | module | what |
//! | --- | --- |
//! | [`record`] | the machine-readable record, one JSON object a line |
//! | [`histogram`] | HDR histograms of latencies |
//! | [`table`] | plain-text tables out of records |
//! | [`plot`] | pictures, SVG and PNG |
//! | [`report`] | where an experiment's results go |
//! | [`claims`] | the papers' numbers |
//! | [`progress`] | progress bars |
//! | [`size`] | sizes as people write them |
//! | [`access`] | READ and WRITE: metrics, tables, pictures |
//! | [`pool_access`] | READ and WRITE through the pool |
//! | [`bare`] | yardstick of READ and WRITE: the bare hand-off between two threads |
//! | [`pingpong`] | messages between two programs |
//! | [`alloc`] | allocation and free: the client's loop, metrics, tables, pictures |
//! | [`recovery`] | how fast scheme `finemem` takes back what was left behind |
//! | [`timestamps`] | how long its timestamps last |
//! | [`fault`] | page faults: metrics, tables, pictures |
//! | [`paged_fault`] | page faults of a paged program |
//! | [`bare_fault`] | yardstick of the pager: bare userfaultfd |
//! | [`paper`] | the papers' experiments, under virtual time and on this machine |

pub mod access;
pub mod alloc;
pub mod bare;
pub mod bare_fault;
pub mod claims;
mod cores;
pub mod fault;
pub mod histogram;
mod local;
pub mod paged_fault;
pub mod paper;
pub mod pingpong;
pub mod plot;
pub mod pool_access;
pub mod progress;
pub mod record;
pub mod recovery;
pub mod report;
pub mod size;
pub mod table;
pub mod timestamps;

/// What can go wrong in an experiment that is not the measured system's fault.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A `claims.toml` that is none.
    #[error("cannot read claims.toml: {0}; compare it with the rules at its head")]
    Claims(String),
    /// A picture that could not be drawn.
    #[error("cannot draw {picture}: {why}")]
    Draw {
        /// Name of the picture.
        picture: String,
        /// What the plotting library said.
        why: String,
    },
    /// A file or directory that could not be written.
    #[error("cannot write {path}: {source}; choose another directory with --out")]
    Write {
        /// The file or directory.
        path: std::path::PathBuf,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// A system call of an experiment failed.
    #[error("cannot {what}: {source}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// A verb's completion says that it failed.
    #[error("cannot {what}: the completion says {status}")]
    Verb {
        /// What was attempted.
        what: &'static str,
        /// What the completion says.
        status: fabric::Status,
    },
    /// A memory node that an experiment needs did not start.
    #[error("cannot start a memory node: {0}")]
    Node(String),
    /// The pool failed in an experiment.
    #[error(transparent)]
    Pool(#[from] pool::Error),
    /// The NIC failed in an experiment.
    #[error(transparent)]
    Fabric(#[from] fabric::Error),
    /// The simulation failed.
    #[error(transparent)]
    Simulation(#[from] sim::Error),
    /// Userfaultfd is not permitted here.
    #[error(transparent)]
    Pager(#[from] pager::Error),
    /// Standard output is gone.
    #[error("cannot print results: {0}")]
    Print(std::io::Error),
}
