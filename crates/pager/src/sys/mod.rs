//! Direct system calls for memory, files and threads.
//!
//! Inside the preload library, the symbols `mmap`, `munmap`, `madvise` and so on are the interposed
//! functions of the library itself. The pager must reach the kernel instead. So [`system_call`]
//! contains the instruction, and calls no other library. The other functions only add error
//! handling.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

pub mod dispatch;
mod signals;

pub use units::PAGE_BYTES;

pub use self::signals::{Action, SIGNAL_SET_BYTES};

/// log2 of [`PAGE_BYTES`].
pub const PAGE_SHIFT: u32 = 12;

/// Makes a system call of at most six arguments. Returns the error number on failure and leaves
/// `errno` unchanged.
///
/// The function is inlined because the preload library makes system calls before the dynamic linker
/// has relocated it. A call of another crate's function would go through the global offset table,
/// which is not ready then.
///
/// # Safety
/// As for the system call.
#[inline]
pub unsafe fn system_call(number: libc::c_long, arguments: [usize; 6]) -> Result<usize, i32> {
    /// Results above this value are negated error numbers.
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

/// As [`system_call`], with an error of the standard library.
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
/// With `MAP_FIXED` the range must belong to the caller, because the existing mapping there is
/// replaced.
pub unsafe fn mmap(
    addr: usize,
    len: usize,
    prot: i32,
    flags: i32,
    fd: i32,
    offset: i64,
) -> io::Result<usize> {
    // SAFETY: the caller guarantees a fixed range; without one, the kernel picks a free range.
    unsafe {
        let arguments = [addr, len, prot as usize, flags as usize, fd as usize, offset as usize];
        call(libc::SYS_mmap, arguments)
    }
}

/// Start address and bytes of each mapping by [`map_anonymous`]; start 0 marks a free entry.
static OWN: [(AtomicUsize, AtomicUsize); 256] =
    [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; 256];

/// Maps private anonymous memory for the pager itself: readable and writable, without a reservation
/// of swap.
pub fn map_anonymous(len: usize) -> io::Result<usize> {
    map_own(len, libc::MAP_PRIVATE)
}

/// As [`map_anonymous`], with memory that forked children share with this process.
pub(crate) fn map_shared_anonymous(len: usize) -> io::Result<usize> {
    map_own(len, libc::MAP_SHARED)
}

fn map_own(len: usize, kind: i32) -> io::Result<usize> {
    let flags = kind | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
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

/// Unmaps a whole mapping made by [`map_anonymous`].
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

/// Returns true for a mapping that begins in memory mapped by [`map_anonymous`].
pub(crate) fn is_own_mapping(range: &std::ops::Range<usize>) -> bool {
    OWN.iter().any(|(own, bytes)| {
        let own = own.load(Ordering::Acquire);
        own != 0 && range.start.wrapping_sub(own) < bytes.load(Ordering::Acquire)
    })
}

/// Frees all entries of mappings. Worlds of the simulator whose process ends keep their mappings,
/// and fill the table.
#[cfg(test)]
pub(crate) fn forget_own_mappings() {
    OWN.iter().for_each(|(own, _)| own.store(0, Ordering::Release));
}

/// Returns the kernel's name of the program: at most 15 bytes, padded with zeros; empty without
/// `/proc`.
///
/// The C library's `program_invocation_short_name` is not used, because the program may change it:
/// setproctitle of Redis and others lets it point to the heap, whose pages the pager's threads must
/// not touch.
pub(crate) fn program_name() -> [u8; 16] {
    let mut name = [0; 16];
    let read = open_own(c"/proc/self/comm").and_then(|file| io::Read::read(&mut &file, &mut name));
    let len = read.unwrap_or(0);
    name[len.saturating_sub(1)..].fill(0);
    name
}

/// Returns the name of the program as text.
pub(crate) fn program_name_text() -> String {
    let name = program_name();
    let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
    String::from_utf8_lossy(&name[..end]).into_owned()
}

/// `munmap(2)`.
///
/// # Safety
/// The range must belong to the caller, and no reference to it may remain.
pub unsafe fn munmap(addr: usize, len: usize) -> io::Result<()> {
    // SAFETY: the caller releases the range.
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
    // SAFETY: the caller releases the old range and owns the new one.
    unsafe { call(libc::SYS_mremap, [addr, old_len, new_len, flags as usize, new_addr, 0]) }
}

/// `mprotect(2)`.
///
/// # Safety
/// The range must belong to the caller, and no code may rely on an access that is removed.
pub unsafe fn mprotect(addr: usize, len: usize, prot: i32) -> io::Result<()> {
    // SAFETY: the caller owns the range.
    unsafe { call(libc::SYS_mprotect, [addr, len, prot as usize, 0, 0, 0]) }.map(drop)
}

/// `madvise(2)`.
///
/// # Safety
/// The range must belong to the caller; destructive advice drops its content.
pub unsafe fn madvise(addr: usize, len: usize, advice: i32) -> io::Result<()> {
    // SAFETY: the caller owns the range.
    unsafe { call(libc::SYS_madvise, [addr, len, advice as usize, 0, 0, 0]) }.map(drop)
}

/// Returns true if the page of anonymous memory at `addr` has memory, by `mincore(2)`. Does not
/// wait for a page.
pub fn is_present(addr: usize) -> bool {
    let mut found = 0u8;
    let argument = &raw mut found as usize;
    // SAFETY: the kernel writes one byte for one page.
    let asked = unsafe { call(libc::SYS_mincore, [addr, PAGE_BYTES, argument, 0, 0, 0]) };
    asked.is_ok() && found & 1 == 1
}

/// Writes `text` and a newline to the program's standard error, without a lock, an allocation or
/// stdio.
pub fn say(text: &str) {
    use std::os::fd::AsRawFd;
    // The pager's threads have a descriptor table of their own, in which descriptor 2 leads to
    // `/dev/null`.
    let theirs = crate::descriptor::take_from_program(2);
    write_line(theirs.as_ref().map_or(2, |fd| fd.as_raw_fd()), text);
}

fn write_line(fd: i32, text: &str) {
    let parts = ["granary: ", text, "\n"]
        .map(|part| libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() });
    // SAFETY: the buffers outlive the call, which only reads them.
    unsafe { libc::syscall(libc::SYS_writev, fd, parts.as_ptr(), parts.len()) };
}

/// Writes `text` to standard error and ends the process at once: all threads, without running exit
/// handlers.
pub fn die(status: i32, text: &str) -> ! {
    #[cfg(test)]
    if crate::sim::fiber::current().is_some() {
        panic!("status {status}: {text}");
    }
    say(text);
    loop {
        // SAFETY: exit_group does not return.
        unsafe { libc::syscall(libc::SYS_exit_group, status) };
    }
}

/// Opens a file of `/proc/self` for reading. A process that has changed its user may open these
/// files only while it is "dumpable", so the function sets this flag for the duration of the call.
pub fn open_own(path: &std::ffi::CStr) -> io::Result<std::fs::File> {
    use std::os::fd::FromRawFd;
    // SAFETY: the path is a C string; this function owns the returned descriptor.
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

/// Waits for the end of a process that shares this thread's thread-local storage. Calls no function
/// that touches that storage.
#[inline(never)]
pub fn wait_for_clone(process: i32) {
    // SAFETY: no status is requested, so the kernel writes no memory.
    let wait = || unsafe {
        let arguments = [process as usize, 0, libc::__WCLONE as usize, 0, 0, 0];
        system_call(libc::SYS_wait4, arguments)
    };
    while wait() == Err(libc::EINTR) {}
}

/// Returns the id of the calling thread.
pub fn thread_id() -> u32 {
    // SAFETY: no argument, cannot fail.
    unsafe { libc::syscall(libc::SYS_gettid) as u32 }
}

/// Returns the monotonic time in nanoseconds.
pub fn now_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

/// Returns the CPU time of this process in nanoseconds.
pub(crate) fn process_cpu_ns() -> u64 {
    clock_ns(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Returns the CPU time of a thread of this process in nanoseconds; 0 if the thread has ended.
pub(crate) fn thread_cpu_ns(id: i32) -> u64 {
    // The kernel's number of a thread's clock: `CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED` is 6.
    clock_ns(!id << 3 | 6)
}

fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for the write, and stays 0 if there is no such clock.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// All signals but number 33. With signal 33, libc makes every thread change its user or group ids:
/// `setuid` waits until all threads, including the pager's, have answered. Its handler touches no
/// paged memory.
const BLOCKED: u64 = !(1 << 32);

/// Blocks the calling thread's signals while it lives, except libc's own signal for `setuid`.
///
/// A program thread that holds a lock of the pager must not run a signal handler. The handler may
/// touch paged memory, and its fault would wait for the lock.
pub struct SignalsBlocked(u64);

impl SignalsBlocked {
    /// Blocks the signals.
    pub fn new() -> Self {
        let all = BLOCKED;
        let mut old = 0u64;
        // SAFETY: both sets are 8 bytes, the size passed to the kernel.
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
        // SAFETY: the set is 8 bytes, the size passed to the kernel.
        unsafe {
            libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &self.0, 0usize, 8usize)
        };
    }
}

/// Turns SIGXFSZ into an error for the calling thread while it lives. A file that would grow beyond
/// RLIMIT_FSIZE then causes EFBIG instead of ending the process. The program's own handling of the
/// signal is unchanged.
///
/// The pager's threads block all signals anyway. The program's threads need this when they run code
/// of the pager.
pub struct FileSizeSignalBlocked {
    old: u64,
    /// True if the signal was already pending, for the program.
    theirs: bool,
}

/// A `sigset_t` of the kernel that contains only SIGXFSZ.
const FILE_SIZE_SIGNAL: u64 = 1 << (libc::SIGXFSZ - 1);

impl FileSizeSignalBlocked {
    /// Blocks the signal.
    pub fn new() -> Self {
        let (mut old, mut pending) = (0u64, 0u64);
        // SAFETY: all sets are 8 bytes, the size passed to the kernel.
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

    /// Returns true if a file would have grown beyond the limit since the signal was blocked.
    pub fn was_raised(&self) -> bool {
        let mut pending = 0u64;
        // SAFETY: the set is 8 bytes, the size passed to the kernel.
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
        // SAFETY: the sets are 8 bytes, the size passed to the kernel; no signal information is
        // requested.
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

/// Returns the maximum size of a file of this process, in bytes (RLIMIT_FSIZE).
pub fn file_size_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for the write.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
    limit.rlim_cur
}

/// Returns true if the calling thread has a real-time scheduling policy.
pub(crate) fn is_real_time() -> bool {
    // SAFETY: reads the calling thread's policy.
    let policy = unsafe { libc::sched_getscheduler(0) } & !libc::SCHED_RESET_ON_FORK;
    matches!(policy, libc::SCHED_FIFO | libc::SCHED_RR)
}

/// Waits while `*word == expected`, at most `timeout_ms` (forever if `None`). May return early.
pub fn futex_wait(word: &std::sync::atomic::AtomicU32, expected: u32, timeout_ms: Option<u64>) {
    wait_on(word, expected, timeout_ms, libc::FUTEX_PRIVATE_FLAG);
}

/// As [`futex_wait`], on a word that other processes map too.
pub fn futex_wait_shared(
    word: &std::sync::atomic::AtomicU32,
    expected: u32,
    timeout_ms: Option<u64>,
) {
    wait_on(word, expected, timeout_ms, 0);
}

fn wait_on(
    word: &std::sync::atomic::AtomicU32,
    expected: u32,
    timeout_ms: Option<u64>,
    flags: i32,
) {
    let time = timeout_ms.map(|ms| libc::timespec {
        tv_sec: (ms / 1000) as i64,
        tv_nsec: (ms % 1000 * 1_000_000) as i64,
    });
    let pointer = time.as_ref().map_or(std::ptr::null(), |t| t as *const libc::timespec);
    let operation = libc::FUTEX_WAIT | flags;
    // SAFETY: the word and the time outlive the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, expected, pointer) };
}

/// Wakes all threads that wait on `word`.
pub fn futex_wake(word: &std::sync::atomic::AtomicU32) {
    wake_on(word, libc::FUTEX_PRIVATE_FLAG);
}

/// As [`futex_wake`], on a word that other processes map too.
pub fn futex_wake_shared(word: &std::sync::atomic::AtomicU32) {
    wake_on(word, 0);
}

fn wake_on(word: &std::sync::atomic::AtomicU32, flags: i32) {
    let operation = libc::FUTEX_WAKE | flags;
    // SAFETY: the word outlives the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, i32::MAX) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsRawFd, FromRawFd};

    #[test]
    fn file_size_limit_is_an_error_without_a_signal() {
        // In a child process, because the limit applies to all threads.
        // SAFETY: the child only makes system calls, and ends by one.
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
            // SAFETY: ends the child process only.
            unsafe { libc::_exit(status) };
        }
        let mut status = 0;
        // SAFETY: waits for the child; `status` is valid for the write.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
    }

    #[test]
    fn a_message_is_one_line() {
        let (mut ends, text) = ([0; 2], "cannot do this".to_string());
        // SAFETY: `ends` is valid for the write; the test owns the descriptors.
        let (reader, writer) = unsafe {
            assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
            (std::fs::File::from_raw_fd(ends[0]), std::fs::File::from_raw_fd(ends[1]))
        };
        write_line(writer.as_raw_fd(), &text);
        drop(writer);
        let mut line = String::new();
        io::Read::read_to_string(&mut &reader, &mut line).unwrap();
        assert_eq!(line, "granary: cannot do this\n");
    }
}
