//! Experiments: workloads, measurements, and which tables and pictures show them.
//!
//! An experiment runs a workload, collects latencies in [`bench_report::histogram::Latencies`], and
//! pushes one [`bench_report::record::Record`] per number into a
//! [`bench_report::report::Report`].
//!
//! | module | content |
//! | --- | --- |
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
//! | [`kv`] | key-value stores, and servers of other projects under the same workloads |
//! | [`lease`] | permissions with leases |
//! | [`policy`] | replacement policies on fault traces |
//! | [`queue`] | a concurrent queue under permissions with leases |
//! | [`seal`] | sealing and opening of pages |
//! | [`paper`] | the papers' experiments, under virtual time and on this machine |

pub mod access;
pub mod alloc;
mod cores;
pub mod fault;
pub mod handoff;
mod inline_client;
pub mod kv;
pub mod lease;
#[cfg(test)]
#[path = "../../../tests/src/needs.rs"]
mod needs;
pub mod paged_fault;
pub mod paper;
pub mod pingpong;
pub mod policy;
pub mod pool_access;
pub mod queue;
pub mod recovery;
pub mod seal;
pub mod timestamps;
pub mod uffd_baseline;

/// Errors of an experiment.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The results cannot be reported.
    #[error(transparent)]
    Report(#[from] bench_report::Error),
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
    /// A point of an experiment failed.
    #[error("{point}: {why}")]
    Point {
        /// The point, as the progress bar names it.
        point: String,
        /// The cause.
        why: Box<Error>,
    },
    /// The pool failed in an experiment.
    #[error(transparent)]
    Pool(#[from] pool::Error),
    /// The NIC failed in an experiment.
    #[error(transparent)]
    Verbs(#[from] verbs::Error),
    /// The simulation failed.
    #[error(transparent)]
    Simulation(#[from] sim::Error),
    /// A fault trace is not usable.
    #[error(transparent)]
    Trace(#[from] pager::trace::TraceError),
    /// Pages cannot be sealed.
    #[error(transparent)]
    Seal(#[from] ::seal::Error),
    /// A key-value store failed in an experiment.
    #[error(transparent)]
    Kv(#[from] ::kv::Error),
    /// The blocks of a key-value store cannot be allocated.
    #[error(transparent)]
    Heap(#[from] heap::Error),
    /// A server of a key-value store cannot be measured.
    #[error("measuring the server at {address}: {why}")]
    Server {
        /// HOST:PORT.
        address: String,
        /// The cause.
        why: String,
    },
    /// Userfaultfd is not permitted here.
    #[error(transparent)]
    Pager(#[from] pager::Error),
}
