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
//! [`page_table`] says where each page's content is; [`fault`] brings pages in, [`evict`] takes them
//! out through [`staging`] in the order that [`residency`] says; [`slots`] are their places in the
//! chunks of a [`transport`]. [`mapping`] is what the program's own `munmap`, `mremap`, `madvise` and
//! `mprotect` do to them, and [`fork`] what a child sees.
//!
//! # What is resident
//! `GRANARY_LOCAL` bounds the resident pages of the region and the staging area together, always. A
//! process has more than that: see [`CONSTANT_BYTES`].
//!
//! # What is not supported
//! - A system call that pins memory and writes to it later by DMA (O_DIRECT reads, io_uring's fixed
//!   buffers) while the page is evicted loses that write: the kernel tells a pager nothing of pins.
//! - What a process is made of by a raw `fork` or `clone` system call (not through libc) has no pager of its own.

pub mod config;
pub mod descriptor;
pub mod evict;
pub mod fault;
pub mod fork;
pub mod mapping;
pub mod page_table;
mod pager;
pub mod pool_transport;
mod reach;
pub mod region;
pub mod residency;
pub mod run;
mod seal;
pub mod slots;
pub mod staging;
pub mod stats;
pub mod store;
pub mod sys;
mod threads;
mod transfer;
pub mod transport;
pub mod uffd;
pub mod unpaged;

use std::io;

pub use config::Config;
pub use pager::{Pager, current, set_current};

/// What a paged process may have resident beyond `GRANARY_LOCAL`, for a program whose own text,
/// libraries and thread stacks are small: about 12 MiB of program and libraries that any process has,
/// the library's text and heap, the pager's thread stacks, and what the program allocated before the
/// library was initialised. The page table adds 8 bytes for every page ever used (2 MiB for 1 GiB).
pub const CONSTANT_BYTES: u64 = 24 << 20;

/// What can go wrong when a pager is set up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Neither way to a userfaultfd is open.
    #[error(
        "userfaultfd is not permitted (system call: {syscall}; /dev/userfaultfd: {device}). \
         Allow it with `sysctl vm.unprivileged_userfaultfd=1` \
         (/proc/sys/vm/unprivileged_userfaultfd), or give this user access to /dev/userfaultfd, \
         or run with CAP_SYS_PTRACE, for example as root"
    )]
    Userfaultfd {
        /// The error of userfaultfd(2).
        syscall: io::Error,
        /// The error of the device file.
        device: io::Error,
    },
    /// The kernel lacks a feature.
    #[error(
        "this kernel's userfaultfd cannot write-protect or name the faulting thread ({0}): Linux \
         5.7 or later is needed, and CAP_SYS_PTRACE to follow forks"
    )]
    UserfaultfdApi(io::Error),
    /// The bound is too small.
    #[error(
        "--local {bytes} bytes is too small: at least 4 MiB are needed, of which 1 MiB is the \
         staging area, so that a system call over many buffers finds room for its pages"
    )]
    LocalTooSmall {
        /// What was asked for.
        bytes: u64,
    },
    /// A setting cannot be used.
    #[error("{name}={value}: {why}")]
    Setting {
        /// Its variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is wrong.
        why: String,
    },
    /// Files of this process may not be as large as what is shared with the NIC.
    #[error(
        "what a paged process shares with its memory node, and its counters, count as files, and this \
         process may not make files of more than {limit_bytes} bytes (RLIMIT_FSIZE): where a paged program \
         starts, raise ulimit -f, best to unlimited"
    )]
    FileSizeLimit {
        /// The limit.
        limit_bytes: u64,
    },
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// What was attempted.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
    /// The program cannot be paged.
    #[error("cannot page {program}: {why}")]
    Program {
        /// The program.
        program: String,
        /// Why.
        why: String,
    },
    /// The preload library is not where it is looked for.
    #[error(
        "libgranary_preload.so is not found (looked at {looked}): set GRANARY_PRELOAD to its path"
    )]
    NoPreload {
        /// Where it was looked for.
        looked: String,
    },
    /// The pool refused at the start.
    #[error("cannot use the pool: {0}")]
    Pool(#[from] pool::Error),
}
