//! The memory system calls, made directly.
//!
//! Inside the preload library the symbols `mmap`, `munmap`, `madvise` and so on are the library's
//! own, interposed ones. The pager must reach the kernel and not itself. So [`system_call`] holds the
//! instruction, and calls no other library. The functions are thin: they add the error and nothing
//! else.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

pub mod dispatch;

/// Bytes of a page, the unit of paging.
pub const PAGE_BYTES: usize = 4096;
/// log2 of [`PAGE_BYTES`].
pub const PAGE_SHIFT: u32 = 12;

/// A system call of six arguments at most; the error is its number. `errno` stays as it was.
///
/// It is inlined, as the preload library makes system calls before the dynamic linker has relocated
/// it: a call of another crate's function goes through the global offset table.
///
/// # Safety
/// As for the system call.
#[inline]
pub unsafe fn system_call(number: libc::c_long, arguments: [usize; 6]) -> Result<usize, i32> {
    /// Results above this one are errors, negated.
    const LAST: usize = -4096isize as usize;
    let [a, b, c, d, e, f] = arguments;
    let result: usize;
    // SAFETY: the kernel's calling convention; the rest is the caller's.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as usize => result,
            in("rdi") a,
            in("rsi") b,
            in("rdx") c,
            in("r10") d,
            in("r8") e,
            in("r9") f,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number as usize,
            inlateout("x0") a => result,
            in("x1") b,
            in("x2") c,
            in("x3") d,
            in("x4") e,
            in("x5") f,
            options(nostack),
        );
    }
    if result > LAST { Err(result.wrapping_neg() as i32) } else { Ok(result) }
}

/// The same, with an error of the standard library.
///
/// # Safety
/// As for the system call.
unsafe fn call(number: libc::c_long, arguments: [usize; 6]) -> io::Result<usize> {
    // SAFETY: by the caller.
    unsafe { system_call(number, arguments) }.map_err(io::Error::from_raw_os_error)
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
    unsafe {
        let arguments = [addr, len, prot as usize, flags as usize, fd as usize, offset as usize];
        call(libc::SYS_mmap, arguments)
    }
}

/// Start and bytes of what [`map_anonymous`] mapped; 0 where there is none.
static OWN: [(AtomicUsize, AtomicUsize); 256] =
    [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; 256];

/// Private anonymous memory of the pager's own, readable and writable, without a reservation of swap.
pub fn map_anonymous(len: usize) -> io::Result<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: no MAP_FIXED, so no existing mapping is touched.
    let start = unsafe { mmap(0, len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)? };
    for (own, bytes) in &OWN {
        if own.compare_exchange(0, start, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            bytes.store(len, Ordering::Release);
            break;
        }
    }
    Ok(start)
}

/// Unmaps what [`map_anonymous`] mapped, whole.
///
/// # Safety
/// As for [`munmap`].
pub unsafe fn unmap_anonymous(start: usize, len: usize) -> io::Result<()> {
    for (own, _) in &OWN {
        let _ = own.compare_exchange(start, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
    // SAFETY: by the caller.
    unsafe { munmap(start, len) }
}

/// True for a mapping that begins in memory of the pager's own.
pub(crate) fn is_own_mapping(range: &std::ops::Range<usize>) -> bool {
    OWN.iter().any(|(own, bytes)| {
        let own = own.load(Ordering::Acquire);
        own != 0 && range.start.wrapping_sub(own) < bytes.load(Ordering::Acquire)
    })
}

/// The name of the program as the kernel has it: 15 bytes at most, zeros behind; empty without /proc.
///
/// The C library's `program_invocation_short_name` would be memory of the program: setproctitle of
/// Redis and others lets it point to the heap, whose pages the pager's threads must not touch.
pub(crate) fn program_name() -> [u8; 16] {
    let mut name = [0; 16];
    let read = open_own(c"/proc/self/comm").and_then(|file| io::Read::read(&mut &file, &mut name));
    let len = read.unwrap_or(0);
    name[len.saturating_sub(1)..].fill(0);
    name
}

/// `munmap(2)`.
///
/// # Safety
/// The range must belong to the caller and nothing may refer to it any more.
pub unsafe fn munmap(addr: usize, len: usize) -> io::Result<()> {
    // SAFETY: the caller gives the range up.
    unsafe { call(libc::SYS_munmap, [addr, len, 0, 0, 0, 0]) }.map(drop)
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
    unsafe { call(libc::SYS_mremap, [addr, old_len, new_len, flags as usize, new_addr, 0]) }
}

/// `mprotect(2)`.
///
/// # Safety
/// The range must belong to the caller, and nobody may rely on an access that is taken away.
pub unsafe fn mprotect(addr: usize, len: usize, prot: i32) -> io::Result<()> {
    // SAFETY: the caller owns the range.
    unsafe { call(libc::SYS_mprotect, [addr, len, prot as usize, 0, 0, 0]) }.map(drop)
}

/// `madvise(2)`.
///
/// # Safety
/// The range must belong to the caller; destructive advice drops what is in it.
pub unsafe fn madvise(addr: usize, len: usize, advice: i32) -> io::Result<()> {
    // SAFETY: the caller owns the range.
    unsafe { call(libc::SYS_madvise, [addr, len, advice as usize, 0, 0, 0]) }.map(drop)
}

/// Writes `text` and a newline to the standard error, without a lock, an allocation or stdio.
pub fn say(text: &str) {
    use std::os::fd::AsRawFd;
    // The pager's threads have a descriptor table of their own.
    let theirs = crate::descriptor::take_from_program(2);
    write_line(theirs.as_ref().map_or(2, |fd| fd.as_raw_fd()), text);
}

fn write_line(fd: i32, text: &str) {
    let parts = ["granary: ", text, "\n"]
        .map(|part| libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() });
    // SAFETY: the buffers live through the call, which only reads them.
    unsafe { libc::syscall(libc::SYS_writev, fd, parts.as_ptr(), parts.len()) };
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
    // SAFETY: there is no place for a status, so no memory is named.
    let wait = || unsafe {
        let arguments = [process as usize, 0, libc::__WCLONE as usize, 0, 0, 0];
        system_call(libc::SYS_wait4, arguments)
    };
    while wait() == Err(libc::EINTR) {}
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

/// While it lives, a file that would grow beyond RLIMIT_FSIZE is an error (EFBIG) to the calling thread and not
/// the end of the process by SIGXFSZ. The program's own handling of that signal stays as it is.
///
/// The pager's threads block all signals anyway; the program's need this where the pager works on them.
pub struct FileSizeSignalBlocked {
    old: u64,
    /// The signal was pending before: it is the program's.
    theirs: bool,
}

/// A set of signals with SIGXFSZ alone, as the kernel has it.
const FILE_SIZE_SIGNAL: u64 = 1 << (libc::SIGXFSZ - 1);

impl FileSizeSignalBlocked {
    /// Blocks the signal.
    pub fn new() -> Self {
        let (mut old, mut pending) = (0u64, 0u64);
        // SAFETY: all sets are 8 bytes, the size the kernel is told.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigprocmask,
                libc::SIG_BLOCK,
                &FILE_SIZE_SIGNAL,
                &mut old,
                8usize,
            );
            libc::syscall(libc::SYS_rt_sigpending, &mut pending, 8usize);
        }
        Self { old, theirs: pending & FILE_SIZE_SIGNAL != 0 }
    }

    /// True if a file would have grown beyond the limit since.
    pub fn was_raised(&self) -> bool {
        let mut pending = 0u64;
        // SAFETY: the set is 8 bytes, the size the kernel is told.
        unsafe { libc::syscall(libc::SYS_rt_sigpending, &mut pending, 8usize) };
        !self.theirs && pending & FILE_SIZE_SIGNAL != 0
    }
}

impl Default for FileSizeSignalBlocked {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for FileSizeSignalBlocked {
    fn drop(&mut self) {
        let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the sets are 8 bytes, the size the kernel is told; nothing about a signal is asked for.
        unsafe {
            if self.was_raised() {
                let none = std::ptr::null_mut::<libc::siginfo_t>();
                let set = &FILE_SIZE_SIGNAL;
                libc::syscall(libc::SYS_rt_sigtimedwait, set, none, &at_once, 8usize);
            }
            libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &self.old, 0usize, 8usize)
        };
    }
}

/// The most bytes that a file of this process may have (RLIMIT_FSIZE).
pub fn file_size_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for the write.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
    limit.rlim_cur
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsRawFd, FromRawFd};

    #[test]
    fn a_file_that_may_not_grow_is_an_error_and_no_signal() {
        // In a child process: the limit is for all threads.
        // SAFETY: the child makes system calls only, and ends by one.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            let status = unsafe {
                let limit = libc::rlimit { rlim_cur: 100, rlim_max: 100 };
                libc::setrlimit(libc::RLIMIT_FSIZE, &limit);
                libc::signal(libc::SIGXFSZ, libc::SIG_DFL);
                let file = libc::memfd_create(c"test".as_ptr(), 0);
                let blocked = FileSizeSignalBlocked::new();
                let before = blocked.was_raised();
                let done = libc::ftruncate(file, 101);
                let error = *libc::__errno_location();
                let after = blocked.was_raised();
                drop(blocked);
                i32::from(before || done == 0 || error != libc::EFBIG || !after)
            };
            // SAFETY: ends this process only.
            unsafe { libc::_exit(status) };
        }
        let mut status = 0;
        // SAFETY: waits for the child; `status` is valid for the write.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
    }

    #[test]
    fn a_message_is_one_line() {
        let (mut ends, text) = ([0; 2], "what cannot be done".to_string());
        // SAFETY: `ends` is valid for the write; the descriptors are ours.
        let (reader, writer) = unsafe {
            assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
            (std::fs::File::from_raw_fd(ends[0]), std::fs::File::from_raw_fd(ends[1]))
        };
        write_line(writer.as_raw_fd(), &text);
        drop(writer);
        let mut line = String::new();
        io::Read::read_to_string(&mut &reader, &mut line).unwrap();
        assert_eq!(line, "granary: what cannot be done\n");
    }
}
