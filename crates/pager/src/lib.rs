//! The pager: anonymous memory of an unmodified program that lives mostly in the pool.
//!
//! ```text
//!   program                  pager (in the program's process)                      pool
//!  +----------+  fault  +---------+                                             +--------+
//!  | region   | ------> | handler |   +-----------+  copy  +--------+   READ    | chunks |
//!  | (private | <------ +---------+   | shelf     | <----> | frames | <-------- | slots  |
//!  |  memory) |  MOVE one page or run | (private  |        | (NIC's |  WRITE    |        |
//!  |          | <-------------------> |  memory)  |        | memory)| --------> |        |
//!  +----------+         +---------+   +-----------+        +--------+           +--------+
//!                       | worker  |
//!                       +---------+
//! ```
//!
//! [`Pager`] owns a [`region`] of private anonymous memory registered with [`uffd`]. The
//! [`page_table`] records where each page's content is, and [`pages`] is the logic that moves it:
//! between the program's memory and the [`shelf`] through [`memory`], between the shelf and the
//! [`slots`] of a [`transport`] through [`backing`]. [`fault`] and `worker` are the threads,
//! [`stream`] decides what is prefetched. [`mapping`] implements the program's `mmap`, `munmap` and
//! `mprotect` on paged memory, [`advice`] its `madvise`, and [`fork`] gives forked children their
//! pages. An [`assist`] can move pages in place of this process. [`extent`] is paged memory outside
//! of the region, at addresses that the program chose.
//!
//! # Resident memory
//! `GRANARY_LOCAL` bounds the resident pages of the region, the shelf and the frames together, at
//! all times: those of one process, or those of all processes of a run, which lease them from the
//! [`ledger`]. Other memory of the process is not included: see [`CONSTANT_BYTES`].
//!
//! # Limitations
//! - Where the kernel cannot move pages (before Linux 6.8), a system call that pins memory and
//!   writes to it later by DMA (O_DIRECT reads, io_uring's fixed buffers) loses the write if the
//!   page is taken out meanwhile: the kernel does not report pins to userfaultfd.
//! - A page that the kernel references without a pin is moved, and the kernel then transfers other
//!   content. The preload library keeps the program from `vmsplice` and `SO_ZEROCOPY`, but not from
//!   io_uring's sends without a copy.
//! - A process made by a `fork` or `clone` instruction of the program (not through libc) has no
//!   pager of its own ([`fork::unseen`]).

pub mod advice;
pub mod assist;
mod awake;
pub mod backing;
mod compactor;
pub mod config;
pub mod credentials;
pub mod descriptor;
mod direct_transport;
pub mod errno;
pub mod execs;
pub mod executable;
pub mod extent;
mod extent_mapping;
pub mod fault;
pub mod fingerprint;
pub mod fork;
mod latch;
mod leadership;
pub mod lease;
pub mod ledger;
pub mod mapping;
pub mod memory;
pub mod metrics;
mod monitor;
pub mod node_sockets;
pub mod page_table;
mod pager;
pub mod pages;
mod patience;
pub mod policy;
pub mod pool_transport;
mod presence;
mod priority;
mod reaper;
pub mod region;
mod remap;
pub mod run;
mod run_directory;
pub mod run_memory;
pub mod runs;
pub mod shelf;
#[cfg(test)]
mod sim;
pub mod slots;
mod spawn;
pub mod stats;
pub mod store;
mod strangers;
pub mod stream;
pub mod sys;
mod threads;
pub mod trace;
mod trace_recorder;
pub mod transport;
pub mod uffd;
pub mod unpaged;
mod wake;
mod worker;

use std::io;

#[cfg(test)]
pub(crate) use sim::fiber::point;

/// A point of the pager's logic at which another thread may run. Only the simulation ([`sim`]) uses
/// these points.
#[cfg(not(test))]
#[inline(always)]
pub(crate) fn point() {}

pub use config::Config;
pub use pager::{Pager, current, set_current};

/// Resident bytes that a paged process may have beyond `GRANARY_LOCAL`.
/// It holds for a program whose own text, libraries and thread stacks are small. It consists of
/// about 12 MiB of text and libraries that every process has, the preload library's text and heap,
/// the stacks of the pager's threads, and the memory that the program allocated before the preload
/// library was initialised. The page table adds 8 bytes for every page ever used (2 MiB for 1 GiB),
/// and the order of eviction at most 24 bytes for every page of the bound (6 MiB for 1 GiB).
pub const CONSTANT_BYTES: u64 = 24 << 20;

/// Errors of setting up a pager or starting a paged program.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Both the system call and the device file refused to open a userfaultfd.
    #[error(
        "userfaultfd is not permitted (system call: {syscall}; /dev/userfaultfd: {device}). \
         Allow it with `sysctl vm.unprivileged_userfaultfd=1` \
         (/proc/sys/vm/unprivileged_userfaultfd), or give this user access to /dev/userfaultfd, \
         or run with CAP_SYS_PTRACE, for example as root{filter}"
    )]
    Userfaultfd {
        /// Error of userfaultfd(2).
        syscall: io::Error,
        /// Error of opening `/dev/userfaultfd`.
        device: io::Error,
        /// Remark on the process's seccomp filter, if it has one.
        filter: &'static str,
    },
    /// The kernel lacks a userfaultfd feature that the pager needs.
    #[error(
        "this kernel's userfaultfd cannot write-protect or name the faulting thread ({0}): Linux \
         5.7 or later is needed, and CAP_SYS_PTRACE to follow forks"
    )]
    UserfaultfdApi(io::Error),
    /// `GRANARY_LOCAL` is below [`config::LOCAL_BYTES_MIN`] or does not fit the transport's frames.
    #[error(
        "--local {bytes} bytes is too small: use at least 4 MiB; the bound must hold all pages \
         that one system call over many buffers needs"
    )]
    LocalTooSmall {
        /// The requested bound.
        bytes: u64,
    },
    /// An environment variable has a value that the pager cannot use.
    #[error("{name}={value}: {why}")]
    Setting {
        /// Name of the environment variable.
        name: &'static str,
        /// Value of the variable.
        value: String,
        /// Reason, and the expected form.
        why: String,
    },
    /// `RLIMIT_FSIZE` is smaller than the files that the process shares with the NIC, or the
    /// counters' file.
    #[error(
        "cannot create the memory shared with the memory node, or the counters' file: both count \
         as files, and RLIMIT_FSIZE limits files of this process to {limit_bytes} bytes; raise \
         ulimit -f (best: unlimited) before the paged program starts"
    )]
    FileSizeLimit {
        /// The limit, in bytes.
        limit_bytes: u64,
    },
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// The attempted operation, as a phrase after "cannot".
        what: String,
        /// Error of the system call.
        source: io::Error,
    },
    /// The program cannot be run: the file is missing, or not executable on this machine.
    #[error("cannot page {program}: {why}")]
    Program {
        /// The program as the user named it.
        program: String,
        /// Reason.
        why: String,
    },
    /// The program's memory cannot be paged, although the program could run.
    #[error(
        "cannot page {program}: {why}. --allow-unpaged runs the program with this memory unpaged"
    )]
    Unpaged {
        /// The program as the user named it.
        program: String,
        /// Reason, and what to do.
        why: String,
    },
    /// The preload library was not found.
    #[error(
        "libgranary_preload.so is not found (looked at {looked}): set GRANARY_PRELOAD to its path"
    )]
    NoPreload {
        /// The paths that were searched, separated by commas.
        looked: String,
    },
    /// The fault trace of a run cannot be used.
    #[error(transparent)]
    Trace(#[from] trace::TraceError),
    /// Connecting to the pool, or allocating shared memory for it, failed.
    #[error("cannot use the pool: {0}")]
    Pool(#[from] pool::Error),
}
