//! The pager: anonymous memory of an unmodified program that lives mostly in the pool.
//!
//! ```text
//!   program                     pager (in the program's process)                 pool
//!  +----------+  fault   +---------+  read   +-----------+  Transport::read   +--------+
//!  | region   | -------> | handler | ------> | frames    | <----------------- | chunks |
//!  | (private | <------- |         |         | (staging) | -----------------> | slots  |
//!  |  memory) |  COPY    +---------+         +-----------+  Transport::write  +--------+
//!  |          |  PROTECT, DONTNEED  +---------+    ^
//!  |          | <------------------ | evictor | ---+
//!  +----------+                     +---------+
//! ```
//!
//! [`Pager`] owns a [`region`] of private anonymous memory registered with [`uffd`]. The
//! [`page_table`] records where each page's content is. [`fault`] brings pages in; [`evict`] takes
//! them out through [`staging`], in the order of the queue in [`residency`]. [`slots`] allocates
//! the pages' places in the chunks of a [`transport`]. [`mapping`] implements the program's
//! `munmap`, `mremap`, `madvise` and `mprotect` on the region, and [`fork`] gives forked children
//! their pages.
//!
//! # Resident memory
//! `GRANARY_LOCAL` bounds the resident pages of the region and the staging area together, at all
//! times. Other memory of the process is not included: see [`CONSTANT_BYTES`].
//!
//! # Limitations
//! - A system call that pins memory and writes to it later by DMA (O_DIRECT reads, io_uring's fixed
//!   buffers) loses the write if the page is evicted meanwhile: the kernel does not report pins to
//!   userfaultfd.
//! - A process made by a raw `fork` or `clone` system call (not through libc) has no pager of its
//!   own.

pub mod config;
pub mod descriptor;
pub mod errno;
pub mod evict;
pub mod fault;
pub mod fork;
pub mod mapping;
pub mod metrics;
mod node_sockets;
pub mod page_table;
mod pager;
pub mod policy;
pub mod pool_transport;
pub mod region;
pub mod residency;
pub mod run;
mod seal;
pub mod slots;
mod spawn;
pub mod staging;
pub mod stats;
pub mod store;
pub mod streams;
pub mod sys;
mod threads;
pub mod trace;
mod trace_recorder;
mod transfer;
pub mod transport;
pub mod uffd;
pub mod unpaged;

use std::io;

pub use config::Config;
pub use pager::{Pager, current, set_current};

/// Resident bytes that a paged process may have beyond `GRANARY_LOCAL`.
/// It holds for a program whose own text, libraries and thread stacks are small. It consists of
/// about 12 MiB of text and libraries that every process has, the preload library's text and heap,
/// the stacks of the pager's threads, and the memory that the program allocated before the preload
/// library was initialised. The page table adds 8 bytes for every page ever used (2 MiB for 1 GiB).
pub const CONSTANT_BYTES: u64 = 24 << 20;

/// Errors of setting up a pager or starting a paged program.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Both the system call and the device file refused to open a userfaultfd.
    #[error(
        "userfaultfd is not permitted (system call: {syscall}; /dev/userfaultfd: {device}). \
         Allow it with `sysctl vm.unprivileged_userfaultfd=1` \
         (/proc/sys/vm/unprivileged_userfaultfd), or give this user access to /dev/userfaultfd, \
         or run with CAP_SYS_PTRACE, for example as root"
    )]
    Userfaultfd {
        /// Error of userfaultfd(2).
        syscall: io::Error,
        /// Error of opening `/dev/userfaultfd`.
        device: io::Error,
    },
    /// The kernel lacks a userfaultfd feature that the pager needs.
    #[error(
        "this kernel's userfaultfd cannot write-protect or name the faulting thread ({0}): Linux \
         5.7 or later is needed, and CAP_SYS_PTRACE to follow forks"
    )]
    UserfaultfdApi(io::Error),
    /// `GRANARY_LOCAL` is below [`config::LOCAL_BYTES_MIN`] or does not fit the staging area.
    #[error(
        "--local {bytes} bytes is too small: use at least 4 MiB, of which 1 MiB is the staging \
         area; the rest must hold all pages that one system call over many buffers needs"
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
    /// The program cannot be paged: the file is missing, static, or not executable on this machine.
    #[error("cannot page {program}: {why}")]
    Program {
        /// The program as the user named it.
        program: String,
        /// Reason.
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
