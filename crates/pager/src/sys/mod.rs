//! The memory system calls, made directly.
//!
//! Inside the preload library the symbols `mmap`, `munmap`, `madvise` and so on are the library's
//! own, interposed ones. The pager must reach the kernel and not itself, so it calls through
//! `syscall(2)`, which nobody interposes. The functions are thin: they add the error and nothing else.

use std::io;

pub mod dispatch;

/// Bytes of a page, the unit of paging.
pub const PAGE_BYTES: usize = 4096;
/// log2 of [`PAGE_BYTES`].
pub const PAGE_SHIFT: u32 = 12;

fn check(result: libc::c_long) -> io::Result<usize> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result as usize) }
}

/// `mmap(2)`.
///
/// # Safety
/// With `MAP_FIXED` the range must belong to the caller, as whatever is mapped there goes away.
pub unsafe fn mmap(
    addr: usize,
    len: usize,
    prot: i32,
    flags: i32,
    fd: i32,
    offset: i64,
) -> io::Result<usize> {
    // SAFETY: the caller vouches for a fixed range; elsewhere the kernel picks a free one.
    check(unsafe { libc::syscall(libc::SYS_mmap, addr, len, prot, flags, fd, offset) })
}

/// Private anonymous memory, readable and writable, without a reservation of swap.
pub fn map_anonymous(len: usize) -> io::Result<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: no MAP_FIXED, so no existing mapping is touched.
    unsafe { mmap(0, len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) }
}

/// `munmap(2)`.
///
/// # Safety
/// The range must belong to the caller and nothing may refer to it any more.
pub unsafe fn munmap(addr: usize, len: usize) -> io::Result<()> {
    // SAFETY: the caller gives the range up.
    check(unsafe { libc::syscall(libc::SYS_munmap, addr, len) }).map(drop)
}

/// `mremap(2)`, with the fifth argument always passed.
///
/// # Safety
/// As for [`mmap`] and [`munmap`].
pub unsafe fn mremap(
    addr: usize,
    old_len: usize,
    new_len: usize,
    flags: i32,
    new_addr: usize,
) -> io::Result<usize> {
    // SAFETY: the caller gives the old range up and owns the new one.
    check(unsafe { libc::syscall(libc::SYS_mremap, addr, old_len, new_len, flags, new_addr) })
}

/// `mprotect(2)`.
///
/// # Safety
/// The range must belong to the caller, and nobody may rely on an access that is taken away.
pub unsafe fn mprotect(addr: usize, len: usize, prot: i32) -> io::Result<()> {
    // SAFETY: the caller owns the range.
    check(unsafe { libc::syscall(libc::SYS_mprotect, addr, len, prot) }).map(drop)
}

/// `madvise(2)`.
///
/// # Safety
/// The range must belong to the caller; destructive advice drops what is in it.
pub unsafe fn madvise(addr: usize, len: usize, advice: i32) -> io::Result<()> {
    // SAFETY: the caller owns the range.
    check(unsafe { libc::syscall(libc::SYS_madvise, addr, len, advice) }).map(drop)
}

/// Writes `text` and a newline to the standard error, without a lock, an allocation of the
/// program's or its stdio.
pub fn say(text: &str) {
    use std::os::fd::AsRawFd;
    let line = format!("granary: {text}\n");
    // The pager's threads have a descriptor table of their own.
    let theirs = crate::descriptor::take_from_program(2);
    let fd = theirs.as_ref().map_or(2, |fd| fd.as_raw_fd());
    // SAFETY: the buffer lives through the call.
    unsafe { libc::syscall(libc::SYS_write, fd, line.as_ptr(), line.len()) };
}

/// Ends the process at once, all threads, with no handler run.
pub fn die(status: i32, text: &str) -> ! {
    say(text);
    loop {
        // SAFETY: exit_group does not return.
        unsafe { libc::syscall(libc::SYS_exit_group, status) };
    }
}

/// Opens a file of /proc/self for reading. A process that has changed its user may do that only while it
/// is "dumpable", so it is for the moment.
pub fn open_own(path: &std::ffi::CStr) -> io::Result<std::fs::File> {
    use std::os::fd::FromRawFd;
    // SAFETY: the path is a C string; a descriptor that is returned is ours.
    let open = || unsafe {
        match libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) {
            -1 => Err(io::Error::last_os_error()),
            fd => Ok(std::fs::File::from_raw_fd(fd)),
        }
    };
    open().or_else(|_| {
        // SAFETY: a flag of this process.
        let before = unsafe { libc::prctl(libc::PR_GET_DUMPABLE) };
        // SAFETY: as above.
        unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) };
        let opened = open();
        // SAFETY: as above.
        unsafe { libc::prctl(libc::PR_SET_DUMPABLE, before) };
        opened
    })
}

/// Waits for the end of a process that shares this thread's thread-local storage. Nothing is called here
/// that would touch that.
#[inline(never)]
pub fn wait_for_clone(process: i32) {
    const INTERRUPTED: isize = -(libc::EINTR as isize);
    while wait4_bare(process, libc::__WCLONE) == INTERRUPTED {}
}

/// wait4(2) with no place for a status; the result as the kernel gives it.
#[cfg(target_arch = "x86_64")]
fn wait4_bare(process: i32, options: i32) -> isize {
    let result: isize;
    // SAFETY: the kernel's calling convention; no memory is named.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") libc::SYS_wait4 as isize => result,
            in("rdi") process as isize,
            in("rsi") 0usize,
            in("rdx") options as isize,
            in("r10") 0usize,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

/// wait4(2) with no place for a status; the result as the kernel gives it.
#[cfg(target_arch = "aarch64")]
fn wait4_bare(process: i32, options: i32) -> isize {
    let result: isize;
    // SAFETY: the kernel's calling convention; no memory is named.
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") libc::SYS_wait4 as isize,
            inlateout("x0") process as isize => result,
            in("x1") 0usize,
            in("x2") options as isize,
            in("x3") 0usize,
        );
    }
    result
}

/// The calling thread's id.
pub fn thread_id() -> u32 {
    // SAFETY: no argument, cannot fail.
    unsafe { libc::syscall(libc::SYS_gettid) as u32 }
}

/// Monotonic time in nanoseconds.
pub fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for the write.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// All signals but number 33, with which libc has every thread change its user or group ids: `setuid`
/// waits until all have answered, the pager's threads too, and its handler touches no paged memory.
const BLOCKED: u64 = !(1 << 32);

/// Blocks the signals for the calling thread while it lives: all but libc's own for `setuid`.
///
/// A program thread that holds a lock of the pager's must not run a signal handler: the handler may
/// touch paged memory, and the fault would wait for the lock.
pub struct SignalsBlocked(u64);

impl SignalsBlocked {
    /// Blocks all signals.
    pub fn new() -> Self {
        let all = BLOCKED;
        let mut old = 0u64;
        // SAFETY: both sets are 8 bytes, the size the kernel is told.
        unsafe {
            libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &all, &mut old, 8usize)
        };
        Self(old)
    }
}

impl Default for SignalsBlocked {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: the set is 8 bytes, the size the kernel is told.
        unsafe {
            libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &self.0, 0usize, 8usize)
        };
    }
}

/// Waits while `*word == expected`, at most `timeout_ms` (forever if none). May return early.
pub fn futex_wait(word: &std::sync::atomic::AtomicU32, expected: u32, timeout_ms: Option<u64>) {
    let time = timeout_ms.map(|ms| libc::timespec {
        tv_sec: (ms / 1000) as i64,
        tv_nsec: (ms % 1000 * 1_000_000) as i64,
    });
    let pointer = time.as_ref().map_or(std::ptr::null(), |t| t as *const libc::timespec);
    let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word and the time outlive the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, expected, pointer) };
}

/// Wakes all that wait on `word`.
pub fn futex_wake(word: &std::sync::atomic::AtomicU32) {
    let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word outlives the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, i32::MAX) };
}
