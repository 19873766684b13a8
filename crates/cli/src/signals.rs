//! Signals that a server waits for synchronously, without signal handlers.

use std::io;
use std::time::Duration;

/// Makes a file beyond RLIMIT_FSIZE (`ulimit -f`) an error of the call instead of a fatal SIGXFSZ.
///
/// A handler that does nothing, because a program that this process starts would inherit an ignored
/// signal, and an exec resets a handler. A caller's own disposition stays.
pub fn report_file_size_limit() {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: all zeros is a value of sigaction; both pointers are to live values; the handler does
    // nothing, so it may run at any point.
    unsafe {
        let mut found: libc::sigaction = std::mem::zeroed();
        let done = libc::sigaction(libc::SIGXFSZ, std::ptr::null(), &mut found);
        if done == 0 && found.sa_sigaction == libc::SIG_DFL {
            found.sa_sigaction = nothing as *const () as usize;
            found.sa_flags = libc::SA_RESTART;
            libc::sigaction(libc::SIGXFSZ, &found, std::ptr::null_mut());
        }
    }
}

/// A set of blocked signals, which stay pending until [`Signals::wait`] takes one.
pub struct Signals(libc::sigset_t);

impl Signals {
    /// The signals that stop a server: SIGINT, SIGTERM, SIGHUP.
    ///
    /// Blocks the signals in the calling thread. New threads inherit the mask, so this call must
    /// come before any thread is started.
    ///
    /// # Errors
    /// As `pthread_sigmask`.
    pub fn to_stop() -> io::Result<Self> {
        // SAFETY: sigset_t is an array of integers, for which all zeros is a value; the calls get
        // pointers to that value and valid signal numbers.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
                libc::sigaddset(&mut set, signal);
            }
            match libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) {
                0 => Ok(Self(set)),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        }
    }

    /// Waits for one of the signals. False after the timeout, or if a signal handler interrupted
    /// the wait.
    ///
    /// # Errors
    /// As `sigtimedwait`.
    pub fn wait(&self, timeout: Duration) -> io::Result<bool> {
        let timeout = libc::timespec {
            tv_sec: timeout.as_secs() as libc::time_t,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // SAFETY: both pointers are to live values; a null siginfo pointer is allowed.
        let taken = unsafe { libc::sigtimedwait(&self.0, std::ptr::null_mut(), &timeout) };
        if taken > 0 {
            return Ok(true);
        }
        match io::Error::last_os_error() {
            e if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Ok(false),
            error => Err(error),
        }
    }
}
