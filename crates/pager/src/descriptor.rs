//! Descriptors out of the program's way.
//!
//! Programs close descriptors that they did not open (daemons, `close_fds`). A userfaultfd that is
//! closed turns the pages that are not resident into zeros, so two measures protect ours: they have
//! high numbers that the interposed `close` family spares, and the pager's threads have a descriptor
//! table of their own (`unshare(CLONE_FILES)`), whose copies nobody else can close.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

const MOST: usize = 64;
static OURS: [AtomicI32; MOST] = [const { AtomicI32::new(-1) }; MOST];
/// The process whose table the program uses; 0 before it is known.
static PROGRAM: AtomicI32 = AtomicI32::new(0);

thread_local! {
    /// The calling thread has a table of its own: its numbers mean nothing to the program.
    static OWN_TABLE: Cell<bool> = const { Cell::new(false) };
}

/// The calling thread is the program's: [`take_from_program`] means its process from now on.
pub fn note_program() {
    PROGRAM.store(std::process::id() as i32, Ordering::Release);
}

/// The program's process.
pub fn program() -> i32 {
    match PROGRAM.load(Ordering::Acquire) {
        0 => std::process::id() as i32,
        program => program,
    }
}

/// True if the calling thread has called [`own_table`], or was started by one that had.
pub fn has_own_table() -> bool {
    OWN_TABLE.get()
}

/// Duplicates `fd` to a high number, close-on-exec, and remembers it as ours. The caller closes `fd`.
pub fn move_high(fd: RawFd) -> io::Result<OwnedFd> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for the write.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    let lowest = (limit.rlim_cur as i64 - 24).clamp(3, 1000) as i32;
    // SAFETY: a plain system call; the descriptor that it returns is ours.
    let moved = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, lowest) };
    if moved < 0 {
        return Err(io::Error::last_os_error());
    }
    if !has_own_table() {
        let free = OURS.iter().find(|ours| {
            ours.compare_exchange(-1, moved, Ordering::AcqRel, Ordering::Acquire).is_ok()
        });
        assert!(free.is_some(), "more than {MOST} descriptors to keep");
    }
    // SAFETY: just created.
    Ok(unsafe { OwnedFd::from_raw_fd(moved) })
}

/// The descriptor is no longer ours.
pub fn forget(fd: RawFd) {
    for ours in &OURS {
        let _ = ours.compare_exchange(fd, -1, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// Closes one of ours.
pub fn close(fd: RawFd) {
    forget(fd);
    // SAFETY: ours, and nobody uses it any more.
    unsafe { libc::syscall(libc::SYS_close, fd) };
}

/// The calling thread shares the own table of the one that started it.
pub fn shares_own_table() {
    OWN_TABLE.set(true);
}

/// Closes all of ours but those in `keep`: in a forked child, what was its parent's.
pub fn close_all_but(keep: &[RawFd]) {
    for ours in &OURS {
        let fd = ours.load(Ordering::Acquire);
        if fd >= 0 && !keep.contains(&fd) {
            close(fd);
        }
    }
}

/// True if the descriptor is one of the pager's.
pub fn is_ours(fd: RawFd) -> bool {
    fd >= 0 && OURS.iter().any(|ours| ours.load(Ordering::Acquire) == fd)
}

/// Calls `visit` with the parts of `[first, last]` between our descriptors.
pub fn between_ours(first: u32, last: u32, mut visit: impl FnMut(u32, u32)) {
    let mut ours = [-1i32; MOST];
    for (copy, fd) in ours.iter_mut().zip(&OURS) {
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

/// A copy of a descriptor of the program's table, for a thread that does not share it.
pub fn take_from_program(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: plain system calls; descriptors that they return are ours.
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

/// Gives the calling thread a descriptor table of its own that holds only `keep`, with nothing
/// behind the standard ones.
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
