//! State of the forks of a process.

use std::cell::UnsafeCell;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{MutexGuard, OnceLock};

use super::channel::{self, Message};
use super::child::Inbox;
use super::child_setup::ChildSetup;
use crate::config::EXIT_PAGER;
use crate::descriptor;
use crate::region::Space;
use crate::slots::Epoch;
use crate::sys::{self, SignalsBlocked};

/// Locks and sockets that the forking thread holds across the fork.
pub(super) struct ForkGuards {
    pub(super) space: MutexGuard<'static, Space>,
    /// Excludes the taking out of pages.
    pub(super) protection: MutexGuard<'static, ()>,
    pub(super) blocked: SignalsBlocked,
    pub(super) calls: [OwnedFd; 2],
    pub(super) notices: [OwnedFd; 2],
    pub(super) added_before: u32,
    /// Set-up of the child where the kernel does not report forks.
    pub(super) setup: Option<Box<ChildSetup>>,
}

/// Steps of a fork. No fork is in progress.
pub(super) const NONE: u32 = 0;
/// The worker must write back the pages on the shelf and freeze the slots.
pub(super) const ASKED: u32 = 1;
/// The worker has done so.
pub(super) const FROZEN: u32 = 2;
/// There is a child that the kernel did not report. The worker must hand it to the page server.
pub(super) const CHILD_MADE: u32 = 3;
/// The worker has done so.
pub(super) const HANDED: u32 = 4;

/// State of the forks of this process.
#[derive(Default)]
pub struct Forks {
    /// True if this process is a light child.
    pub(super) light: AtomicBool,
    /// 1 if this pager was a light child's and another pager has replaced it. A futex.
    pub(super) promoted: AtomicU32,
    /// A light child's request socket, in the program's table.
    pub(super) calls: AtomicI32,
    /// Socket whose peer hangs up when this process ends, in the table of the pager's threads.
    pub(super) exit_socket: AtomicI32,
    /// Futex: set by a light child's thread once it waits for notices.
    pub(super) watched: AtomicU32,
    /// The page server's ends of the sockets of the fork in progress, or 0.
    pub(super) server_ends: [AtomicI32; 2],
    /// Futex: number of children that the page server has received.
    pub(super) children_added: AtomicU32,
    pub(super) step: AtomicU32,
    /// Id of the forking thread while it holds the protection lock, otherwise 0.
    pub(super) thread: AtomicU32,
    /// Epoch of the prepared fork in progress, see [`Slots::freeze`](crate::slots::Slots::freeze).
    pub(super) epoch: AtomicU32,
    pub(super) inbox: OnceLock<Inbox>,
    pub(super) guards: UnsafeCell<Option<ForkGuards>>,
}

// SAFETY: only the thread that holds `space` accesses `guards` (the guard is part of it).
unsafe impl Sync for Forks {}
// SAFETY: as above; a guard is released by the thread that took it, or by that thread's copy in the
// child.
unsafe impl Send for Forks {}

impl Forks {
    /// Returns true in a forked child that has no pager of its own yet.
    pub(crate) fn is_light(&self) -> bool {
        self.light.load(Ordering::Acquire)
    }

    /// Returns true if another pager has replaced this one.
    pub(crate) fn is_promoted(&self) -> bool {
        self.promoted.load(Ordering::Acquire) != 0
    }

    /// Returns true for the forking thread while it holds the protection lock.
    pub(crate) fn is_forking_thread(&self, thread: u32) -> bool {
        self.thread.load(Ordering::Acquire) == thread
    }

    /// Returns true if a fork waits for the worker.
    pub(crate) fn is_asked(&self) -> bool {
        matches!(self.step.load(Ordering::Acquire), ASKED | CHILD_MADE)
    }

    /// Returns the socket whose peer hangs up when this process ends.
    pub(super) fn exit_socket(&self) -> RawFd {
        self.exit_socket.load(Ordering::Acquire)
    }

    /// Records that the page server has received a child, so that the parent may continue or end.
    pub(super) fn note_child_added(&self) {
        self.children_added.fetch_add(1, Ordering::AcqRel);
        sys::futex_wake(&self.children_added);
    }

    /// Returns the epoch of the prepared fork in progress.
    pub(super) fn epoch(&self) -> Epoch {
        Epoch(self.epoch.load(Ordering::Acquire))
    }

    /// In a light child, with `space` locked: sends a request to the page server and waits for its
    /// answer.
    pub(super) fn request(&self, message: Message, fds: &[RawFd]) {
        if channel::call(self.calls.load(Ordering::Acquire), message, fds).is_err() {
            server_lost();
        }
    }

    /// Records that another pager has replaced this one, and wakes the threads that wait for it.
    pub(super) fn mark_promoted(&self) {
        self.promoted.store(1, Ordering::Release);
        sys::futex_wake(&self.promoted);
    }

    /// Creates the socket pair that reveals the end of this process. Returns the pager's end; the
    /// program's end stays open in the program's table until the process ends.
    pub(crate) fn open_exit_socket(&self) -> io::Result<OwnedFd> {
        let [reader, writer] = channel::pair()?;
        let writer = ManuallyDrop::new(descriptor::move_high(writer.as_raw_fd())?);
        debug_assert!(descriptor::is_ours(writer.as_raw_fd()));
        self.exit_socket.store(reader.as_raw_fd(), Ordering::Release);
        Ok(reader)
    }
}

/// Ends a child because the page server is gone, and with it pages of the child.
pub(super) fn server_lost() -> ! {
    sys::die(
        EXIT_PAGER,
        &format!(
            "granary-keeper, which held pages of the forked process {}, was killed, so the process \
             ends now (status {EXIT_PAGER})",
            descriptor::program()
        ),
    )
}
