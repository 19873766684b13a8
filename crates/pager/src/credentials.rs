//! Credentials of the pager's threads: they follow the program's.
//!
//! Capabilities and the flags around them belong to a thread. A program that keeps a capability
//! over `setresuid` (chronyd, ntpd, `setpriv`) changes the flags of its own threads only. glibc
//! then makes all threads repeat the `setresuid`, so the pager's threads would lose their
//! capabilities, and a later `setgroups` would fail in them: glibc aborts a process in which a
//! repeated call has different results. In the other direction, the pager's threads would keep
//! capabilities that the program has dropped by `capset`.
//!
//! So each pager thread repeats a call of the program that changes only the caller's credentials.
//! A thread repeats the call in a handler of signal 33, by which glibc makes threads repeat
//! `setuid`. The handler passes glibc's own signals on. Pager threads never have more rights than
//! the program's thread that changed its credentials last.
//!
//! The page server of forked children is a process in the memory of the program, with credentials
//! of its own. A program that has dropped root's rights could change the page server's stack, and
//! so act as root again. So the page server ends after each change of credentials, also by `setuid`
//! and its kin, and its thread starts another one, which has the credentials of the thread.

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU32, AtomicUsize, Ordering};

use crate::config::EXIT_PAGER;
use crate::fork::keeper;
use crate::sys::{self, Action, SignalsBlocked, system_call};
use crate::{descriptor, patience};

/// glibc's SIGSETXID. glibc lets no program block it or handle it.
const SIGNAL: i32 = 33;
/// `si_code` of a signal by `rt_tgsigqueueinfo`; glibc's own signals have SI_TKILL.
const SI_QUEUE: i32 = -1;
const THREADS_MAX: usize = 256;
const THREADS_TEXT: &str = "the pager's threads";
/// Interval at which a thread that ended without an answer is noticed.
const LOOK_MS: u64 = 10;

/// A thread of the pager.
struct Thread {
    /// Kernel's id of the thread; 0 in a free entry.
    id: AtomicI32,
    /// Last round whose signal was sent to the thread.
    sent: AtomicU32,
    /// Last round whose call the thread has repeated.
    done: AtomicU32,
}

static THREADS: [Thread; THREADS_MAX] =
    [const { Thread { id: AtomicI32::new(0), sent: AtomicU32::new(0), done: AtomicU32::new(0) } };
        THREADS_MAX];
/// Threads that are being started, and have no entry yet.
static STARTING: AtomicU32 = AtomicU32::new(0);
/// 1 while a thread of the program has a call repeated.
static TURN: AtomicU32 = AtomicU32::new(0);
/// Number of the call that is repeated. 0 before the first.
static ROUND: AtomicU32 = AtomicU32::new(0);
/// System call that is repeated; -1 for none.
static NUMBER: AtomicI64 = AtomicI64::new(-1);
static ARGUMENTS: [AtomicUsize; 6] = [const { AtomicUsize::new(0) }; 6];
/// Number of answers, on which the program's thread waits.
static ANSWERS: AtomicU32 = AtomicU32::new(0);
/// glibc's handler of the signal.
static LIBCS: AtomicUsize = AtomicUsize::new(0);
/// Thread that starts the page server, and the descriptor by which it ends; 0 without one.
static SERVER_THREAD: AtomicI32 = AtomicI32::new(0);
static SERVER_INBOX: AtomicI32 = AtomicI32::new(-1);
/// Id of the page server that ends in the current round; 0 without one.
static ENDING_SERVER: AtomicU32 = AtomicU32::new(0);

/// Called by the thread that starts page servers. A zero word that is written to `inbox` ends the
/// page server. Returns the word for its process id.
pub(crate) fn serves_children(inbox: RawFd) -> *mut i32 {
    SERVER_INBOX.store(inbox, Ordering::Relaxed);
    SERVER_THREAD.store(sys::thread_id() as i32, Ordering::Release);
    keeper::prepare().keeper.as_ptr().cast()
}

/// Returns the word with the id of the process that serves forked children, and the id; `None`
/// without such a process.
fn server() -> Option<(&'static AtomicU32, u32)> {
    let word = &keeper::own()?.keeper;
    Some((word, word.load(Ordering::Acquire))).filter(|(_, id)| *id != 0)
}

/// Called after a change of credentials that all threads of the process have followed: the page
/// server of forked children follows too.
pub fn server_follows() {
    if server().is_some() {
        // SAFETY: a call without arguments. It has no effect but the new page server.
        unsafe { follow(libc::SYS_getppid, [0; 6]) };
    }
}

/// Called before a thread of the pager is started.
pub fn thread_starts() {
    STARTING.fetch_add(1, Ordering::AcqRel);
}

/// Called if the thread could not be started.
pub fn thread_failed() {
    STARTING.fetch_sub(1, Ordering::AcqRel);
}

/// Called first in each thread of the pager.
pub fn thread_started() {
    let id = sys::thread_id() as i32;
    let taken = THREADS.iter().any(|thread| {
        let free = thread.id.compare_exchange(0, -1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if free {
            thread.sent.store(0, Ordering::Relaxed);
            thread.done.store(0, Ordering::Relaxed);
            thread.id.store(id, Ordering::Release);
        }
        free
    });
    if !taken {
        sys::die(
            EXIT_PAGER,
            &format!(
                "process {} starts more than {THREADS_MAX} threads of the pager, so it ends now \
                 (status {EXIT_PAGER}); report this error",
                descriptor::program()
            ),
        );
    }
    STARTING.fetch_sub(1, Ordering::AcqRel);
}

/// Called last in each thread of the pager.
pub fn thread_ends() {
    let id = sys::thread_id() as i32;
    for thread in &THREADS {
        let _ = thread.id.compare_exchange(id, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Called in a forked child, which has no thread of the pager yet.
pub(crate) fn forget_threads() {
    THREADS.iter().for_each(|thread| thread.id.store(0, Ordering::Relaxed));
    STARTING.store(0, Ordering::Relaxed);
    SERVER_THREAD.store(0, Ordering::Relaxed);
    NUMBER.store(-1, Ordering::Relaxed);
    TURN.store(0, Ordering::Release);
}

/// Makes all threads of the pager repeat a system call that has changed the credentials of the
/// calling thread. Ends the process if a thread does not repeat it within the limit, because that
/// thread would keep rights that the program has dropped.
///
/// # Safety
/// The call takes no pointers, or pointers that are valid for all threads of the pager: to memory
/// that is not paged.
pub unsafe fn follow(number: libc::c_long, arguments: [usize; 6]) {
    // A child of vfork has no threads of its own: those of its parent keep their credentials.
    if descriptor::program() != std::process::id() as i32 {
        return;
    }
    // A signal handler of the program could change credentials itself, and wait for this call.
    let _blocked = SignalsBlocked::new();
    let limit_s = patience::limit_s();
    let until = sys::now_ns().saturating_add(u64::from(limit_s) * 1_000_000_000);
    let or_end = |missing: usize, threads: &str| {
        if sys::now_ns() < until {
            return;
        }
        sys::die(
            EXIT_PAGER,
            &format!(
                "process {} changes its capabilities or users, and {missing} of {threads} \
                 did not do the same within {limit_s} s, so the process ends now (status \
                 {EXIT_PAGER}): rights that the program has dropped would be kept; see \
                 /proc/{0}/task/*/status for a thread that is stopped, or set GRANARY_WAIT_S to \
                 more seconds",
                descriptor::program()
            ),
        );
    };
    while TURN.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_err() {
        sys::futex_wait(&TURN, 1, Some(LOOK_MS));
        or_end(1, THREADS_TEXT);
    }
    if let Err(error) = install() {
        sys::die(
            EXIT_PAGER,
            &format!(
                "process {} changes its capabilities or users, and signal {SIGNAL} cannot be set \
                 up for the pager's threads ({error}), so the process ends now (status \
                 {EXIT_PAGER})",
                descriptor::program()
            ),
        );
    }
    for (to, from) in ARGUMENTS.iter().zip(arguments) {
        to.store(from, Ordering::Relaxed);
    }
    let round = ROUND.load(Ordering::Relaxed).wrapping_add(1).max(1);
    ROUND.store(round, Ordering::Relaxed);
    NUMBER.store(number, Ordering::Release);
    loop {
        let answers = ANSWERS.load(Ordering::Acquire);
        // Counted before the entries are read: a thread has its entry before it is not counted.
        let starting = STARTING.load(Ordering::Acquire) as usize;
        let missing = starting + THREADS.iter().filter(|thread| thread.lacks(round)).count();
        if missing == 0 {
            break;
        }
        or_end(missing, THREADS_TEXT);
        sys::futex_wait(&ANSWERS, answers, Some(LOOK_MS));
    }
    let ending = ENDING_SERVER.swap(0, Ordering::AcqRel);
    while let Some((word, id)) = server()
        && ending == id
    {
        or_end(1, "the processes granary-keeper");
        sys::futex_wait_shared(word, ending, Some(LOOK_MS));
    }
    NUMBER.store(-1, Ordering::Release);
    TURN.store(0, Ordering::Release);
    sys::futex_wake(&TURN);
}

impl Thread {
    /// Returns true if the thread has yet to repeat the call of the round. Sends the signal once.
    fn lacks(&self, round: u32) -> bool {
        let id = self.id.load(Ordering::Acquire);
        match id {
            0 => return false,
            // Being entered.
            ..0 => return true,
            _ if self.done.load(Ordering::Acquire) == round => return false,
            _ => {}
        }
        let sent = if self.sent.load(Ordering::Relaxed) == round {
            // SAFETY: signal 0 only tests whether the thread lives.
            unsafe {
                system_call(
                    libc::SYS_tgkill,
                    [std::process::id() as usize, id as usize, 0, 0, 0, 0],
                )
            }
        } else {
            queue(id)
        };
        match sent {
            Ok(_) => self.sent.store(round, Ordering::Relaxed),
            Err(libc::ESRCH) => return false,
            // EAGAIN: RLIMIT_SIGPENDING. The next turn of the loop tries again.
            Err(_) => {}
        }
        true
    }
}

/// Returns the CPU time of the pager's threads in nanoseconds.
pub(crate) fn threads_cpu_ns() -> u64 {
    let ids = THREADS.iter().map(|thread| thread.id.load(Ordering::Acquire));
    ids.filter(|id| *id != 0).map(sys::thread_cpu_ns).sum()
}

/// Sends the signal to a thread of this process.
fn queue(id: i32) -> Result<usize, i32> {
    // SAFETY: all zeros is a value of this type.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    info.si_signo = SIGNAL;
    info.si_code = SI_QUEUE;
    let info = &raw const info as usize;
    // SAFETY: the kernel reads `info` within the call.
    unsafe {
        let arguments = [std::process::id() as usize, id as usize, SIGNAL as usize, info, 0, 0];
        system_call(libc::SYS_rt_tgsigqueueinfo, arguments)
    }
}

/// Puts the handler before glibc's, which glibc has installed when it started the first thread.
fn install() -> io::Result<()> {
    let theirs = Action::of(SIGNAL)?;
    let ours = on_signal as *const () as usize;
    if theirs.handler == ours || theirs.handler == libc::SIG_DFL {
        // Without a handler of glibc there is no thread of the pager.
        return Ok(());
    }
    LIBCS.store(theirs.handler, Ordering::Release);
    // SAFETY: a function of this library, which is never unloaded.
    unsafe { Action { handler: ours, ..theirs }.set(SIGNAL) }
}

/// Tells the page server to end. Called by the thread that starts page servers, with its new
/// credentials.
fn end_server() {
    if let Some((_, server)) = server() {
        ENDING_SERVER.store(server, Ordering::Release);
        let (inbox, word) = (SERVER_INBOX.load(Ordering::Relaxed), 0usize);
        // SAFETY: the word is valid for the read. In a full pipe, the page server is not told, and
        // the limit of the wait ends the program.
        let _ = unsafe {
            let arguments = [inbox as usize, &raw const word as usize, size_of_val(&word), 0, 0, 0];
            system_call(libc::SYS_write, arguments)
        };
    }
}

type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// Repeats the call, or passes a signal of glibc on. Makes system calls only: the thread may hold
/// any lock, and its thread-local storage may be lent to granary-keeper.
extern "C" fn on_signal(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a valid pointer for the duration of the handler.
    if unsafe { (*info).si_code } != SI_QUEUE {
        // SAFETY: `install` stored glibc's handler, which has this type.
        let libcs: Handler = unsafe { std::mem::transmute(LIBCS.load(Ordering::Acquire)) };
        return libcs(signal, info, context);
    }
    let number = NUMBER.load(Ordering::Acquire);
    // SAFETY: no argument, cannot fail.
    let id = unsafe { system_call(libc::SYS_gettid, [0; 6]) }.map_or(0, |id| id as i32);
    let own = THREADS.iter().find(|thread| thread.id.load(Ordering::Acquire) == id);
    let Some(thread) = own.filter(|_| number >= 0) else { return };
    let arguments = ARGUMENTS.each_ref().map(|argument| argument.load(Ordering::Relaxed));
    // The thread that asked has made this call with success. It fails here only if another thread
    // of the program has dropped the right to it before: then this thread has fewer rights.
    // SAFETY: by the caller of `follow`.
    let _ = unsafe { system_call(number, arguments) };
    if SERVER_THREAD.load(Ordering::Acquire) == id {
        end_server();
    }
    thread.done.store(ROUND.load(Ordering::Relaxed), Ordering::Release);
    ANSWERS.fetch_add(1, Ordering::AcqRel);
    let operation = (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG) as usize;
    let word = ANSWERS.as_ptr() as usize;
    // SAFETY: a static word.
    let _ = unsafe { system_call(libc::SYS_futex, [word, operation, i32::MAX as usize, 0, 0, 0]) };
}
