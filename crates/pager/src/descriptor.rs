//! Protection of the pager's file descriptors from the program.
//!
//! Some programs close descriptors that they did not open (daemons, `close_fds`). Closing the
//! userfaultfd turns all pages that are not resident into zeros. Two measures protect the pager's
//! descriptors. They have high numbers, which the interposed `close` family leaves open. And the
//! pager's threads have a descriptor table of their own (`unshare(CLONE_FILES)`), whose entries no
//! other thread can close.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

use crate::sys::system_call;

const MAX_DESCRIPTORS: usize = 64;
static OURS: [AtomicI32; MAX_DESCRIPTORS] = [const { AtomicI32::new(-1) }; MAX_DESCRIPTORS];
/// Descriptor of the run's memory, which programs inherit; -1 without one.
static INHERITED: AtomicI32 = AtomicI32::new(-1);
/// Process id of the program, whose descriptor table the program's threads use; 0 before it is
/// known.
static PROGRAM: AtomicI32 = AtomicI32::new(0);

thread_local! {
    /// True if the calling thread has a descriptor table of its own, whose numbers differ from the
    /// program's.
    static OWN_TABLE: Cell<bool> = const { Cell::new(false) };
}

/// Records the calling process as the program's process. Called on a thread of the program;
/// [`take_from_program`] copies from this process's table.
pub fn note_program() {
    PROGRAM.store(std::process::id() as i32, Ordering::Release);
}

/// Returns the process id of the program.
pub fn program() -> i32 {
    match PROGRAM.load(Ordering::Acquire) {
        0 => std::process::id() as i32,
        program => program,
    }
}

/// Returns true if the calling thread has called [`own_table`], or was started by a thread that
/// had.
pub fn has_own_table() -> bool {
    OWN_TABLE.get()
}

/// Returns the lowest number of the pager's descriptors.
pub(crate) fn lowest() -> i32 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for the write.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    (limit.rlim_cur as i64 - 24).clamp(3, 1000) as i32
}

/// Hides a descriptor from the program that this process has inherited, and that the programs of
/// its children inherit.
pub(crate) fn note_inherited(fd: RawFd) {
    INHERITED.store(fd, Ordering::Release);
}

/// Duplicates `fd` to a high number, close-on-exec, and registers the duplicate as the pager's. The
/// caller closes `fd`.
pub fn move_high(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: a plain system call; this function owns the returned descriptor.
    let moved = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, lowest()) };
    if moved < 0 {
        return Err(io::Error::last_os_error());
    }
    if !has_own_table() {
        register(moved);
    }
    // SAFETY: just created.
    Ok(unsafe { OwnedFd::from_raw_fd(moved) })
}

fn register(fd: RawFd) {
    let free = OURS
        .iter()
        .find(|ours| ours.compare_exchange(-1, fd, Ordering::AcqRel, Ordering::Acquire).is_ok());
    assert!(free.is_some(), "more than {MAX_DESCRIPTORS} descriptors to protect");
}

/// Registers an inherited descriptor as the pager's, close-on-exec. Returns false if it is not
/// open.
pub(crate) fn adopt(fd: RawFd) -> bool {
    let is_open = keep_over_exec(fd, false);
    if is_open && !is_ours(fd) {
        register(fd);
    }
    is_open
}

/// Sets whether a descriptor stays open when the calling thread's process executes a program.
/// Returns false if the descriptor is not open. Does not allocate.
pub fn keep_over_exec(fd: RawFd, stays_open: bool) -> bool {
    let flags = if stays_open { 0 } else { libc::FD_CLOEXEC };
    let arguments = [fd as usize, libc::F_SETFD as usize, flags as usize, 0, 0, 0];
    // SAFETY: changes a flag of a descriptor that the caller owns.
    unsafe { system_call(libc::SYS_fcntl, arguments) }.is_ok()
}

/// Removes a descriptor from the pager's list without closing it.
pub fn forget(fd: RawFd) {
    for ours in &OURS {
        let _ = ours.compare_exchange(fd, -1, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// Removes a descriptor from the pager's list and closes it.
pub fn close(fd: RawFd) {
    forget(fd);
    // SAFETY: a descriptor of the pager's that is no longer used.
    unsafe { libc::syscall(libc::SYS_close, fd) };
}

/// Records that the calling thread shares the pager's own descriptor table.
pub fn shares_own_table() {
    OWN_TABLE.set(true);
}

/// Closes all descriptors of the pager but those in `keep`. Called in a forked child to close the
/// parent's descriptors.
pub fn close_all_but(keep: &[RawFd]) {
    for ours in &OURS {
        let fd = ours.load(Ordering::Acquire);
        if fd >= 0 && !keep.contains(&fd) {
            close(fd);
        }
    }
}

/// Returns true if `fd` is one of the pager's descriptors.
pub fn is_ours(fd: RawFd) -> bool {
    let is = |ours: &AtomicI32| ours.load(Ordering::Acquire) == fd;
    fd >= 0 && (is(&INHERITED) || OURS.iter().any(is))
}

/// Calls `visit` with each maximal part of `[first, last]` that contains no descriptor of the
/// pager.
pub fn between_ours(first: u32, last: u32, mut visit: impl FnMut(u32, u32)) {
    let mut ours = [-1i32; MAX_DESCRIPTORS + 1];
    for (copy, fd) in ours.iter_mut().zip(OURS.iter().chain([&INHERITED])) {
        *copy = fd.load(Ordering::Acquire);
    }
    ours.sort_unstable();
    let mut at = u64::from(first);
    for fd in ours.into_iter().filter(|&fd| fd >= 0).map(|fd| fd as u64) {
        if fd < at || fd > u64::from(last) {
            continue;
        }
        if at < fd {
            visit(at as u32, fd as u32 - 1);
        }
        at = fd + 1;
    }
    if at <= u64::from(last) {
        visit(at as u32, last);
    }
}

/// Copies a descriptor out of the program's table, for a thread that does not share the table.
pub fn take_from_program(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: plain system calls; this function owns the returned descriptors.
    unsafe {
        let own = libc::syscall(libc::SYS_pidfd_open, program(), 0) as i32;
        if own < 0 {
            return Err(io::Error::last_os_error());
        }
        let own = OwnedFd::from_raw_fd(own);
        let taken = libc::syscall(libc::SYS_pidfd_getfd, own.as_raw_fd(), fd, 0) as i32;
        if taken < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(taken))
    }
}

/// Gives the calling thread a descriptor table of its own that holds only `keep` and the three
/// standard descriptors, which lead to `/dev/null`.
pub fn own_table(keep: &[RawFd]) -> io::Result<()> {
    // SAFETY: changes the calling thread's table only.
    if unsafe { libc::unshare(libc::CLONE_FILES) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the path is a C string; the copies go to numbers that are the calling thread's.
    unsafe {
        let nothing = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        for standard in 0..3 {
            libc::syscall(libc::SYS_dup2, nothing, standard);
        }
    }
    let mut keep = keep.to_vec();
    keep.extend(0..3);
    keep.sort_unstable();
    let mut at = 0u32;
    for fd in keep.into_iter().map(|fd| fd as u32) {
        if at < fd {
            close_range(at, fd - 1);
        }
        at = fd + 1;
    }
    close_range(at, u32::MAX);
    OWN_TABLE.set(true);
    Ok(())
}

fn close_range(first: u32, last: u32) {
    // SAFETY: closes copies that belong to the calling thread's own table.
    unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
}
