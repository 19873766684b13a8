//! Programs that this one starts: run to their end with what they used, or ended with this one.

use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::Signal;

/// Has the command's process end (by SIGTERM) when this one does, however that happens. To be
/// started from the main thread: the kernel takes the end of the starting thread for ours.
pub fn end_with_us(command: &mut Command) -> &mut Command {
    let us = rustix::process::getpid();
    // SAFETY: between fork and exec only system calls are made, and nothing is allocated.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            // We may have ended in between.
            match rustix::process::getppid() {
                Some(parent) if parent == us => Ok(()),
                _ => Err(io::Error::from_raw_os_error(libc::ESRCH)),
            }
        })
    }
}

/// A program that ran to its end.
#[derive(Clone, Copy, Debug)]
pub struct Finished {
    /// How it ended.
    pub status: ExitStatus,
    /// From before it was started until it had ended.
    pub elapsed: Duration,
    /// The most memory that it (or a child that it waited for) had resident, in bytes. The
    /// kernel counts what this process had resident when it started the program, too: keep
    /// this one small.
    pub peak_bytes: u64,
}

/// Starts a program and waits for its end.
///
/// # Errors
/// As [`Command::spawn`], if it cannot be started.
pub fn finish(command: &mut Command) -> io::Result<Finished> {
    let start = Instant::now();
    let child = command.spawn()?;
    let pid = libc::pid_t::try_from(child.id()).expect("a process id fits into pid_t");
    let mut status = 0;
    // SAFETY: rusage is a structure of integers, for which all zeros is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live variables of the types that wait4 writes; the child is
    // ours and nobody else waits for it (dropping a `Child` does not).
    while unsafe { libc::wait4(pid, &mut status, 0, &mut usage) } != pid {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    let peak_kib = u64::try_from(usage.ru_maxrss).unwrap_or(0);
    Ok(Finished {
        status: ExitStatus::from_raw(status),
        elapsed: start.elapsed(),
        peak_bytes: peak_kib * 1024,
    })
}

/// The most memory that any child that has ended and was waited for had resident, in bytes.
pub fn peak_bytes_of_ended() -> u64 {
    // SAFETY: rusage is a structure of integers, for which all zeros is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live variable of the type that getrusage writes.
    let done = unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage) };
    assert_eq!(done, 0, "getrusage has no other error than a wrong argument");
    u64::try_from(usage.ru_maxrss).unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_time_and_peak() {
        let script = "x=$(head -c 30000000 /dev/zero | tr '\\0' a); exit 3";
        let finished = finish(Command::new("sh").args(["-c", script])).unwrap();
        assert_eq!(finished.status.code(), Some(3));
        assert!(finished.elapsed > Duration::ZERO);
        assert!(finished.peak_bytes > 30_000_000, "{finished:?}");
    }

    #[test]
    fn a_program_that_is_not_there() {
        let error = finish(&mut Command::new("/no/such/program")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
