//! Child processes: programs that run to completion, and servers and workers that end with this
//! process.

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Makes the kernel send SIGTERM to the command's process when this process ends for any reason.
///
/// The command must be spawned from the main thread ([`signal_with_parent`]).
pub fn terminate_with_parent(command: &mut Command) -> &mut Command {
    signal_with_parent(command, Signal::TERM)
}

/// Makes the kernel send a signal to the command's process when this process ends for any reason.
///
/// The command must be spawned from the main thread, because the kernel sends the signal when the
/// thread that spawned the child ends.
fn signal_with_parent(command: &mut Command, signal: Signal) -> &mut Command {
    let us = rustix::process::getpid();
    // SAFETY: between fork and exec the closure makes system calls only and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(signal))?;
            // The parent may have ended between fork and prctl; then no signal would come.
            match rustix::process::getppid() {
                Some(parent) if parent == us => Ok(()),
                _ => Err(io::Error::from_raw_os_error(libc::ESRCH)),
            }
        })
    }
}

/// Time after which a child that was asked to end is killed.
///
/// A child that is stopped (SIGSTOP) or that hangs does not react.
const END: Duration = Duration::from_secs(10);

/// A child process that prints one JSON object per line. Dropping it ends the process and waits.
pub struct ChildProcess {
    child: Child,
    /// Refers to the child even after it was reaped, when its process id may be another process's.
    pidfd: OwnedFd,
    /// Pipe to a worker's standard input; the worker ends when the pipe is closed. Servers have
    /// none: they end at SIGTERM.
    input: Option<ChildStdin>,
    /// Stays open as long as the child, because a server prints a summary when it stops.
    output: BufReader<ChildStdout>,
    /// Ends a server.
    end: Signal,
}

impl ChildProcess {
    /// Starts a server, in a process group of its own: Ctrl-C at the terminal must reach the
    /// program that uses the server, and not the server.
    pub fn spawn_server(command: &mut Command) -> io::Result<Self> {
        Self::spawn(command.process_group(0).stdin(Stdio::null()), Signal::TERM)
    }

    /// Starts a server without state, which is killed at the end. So it also ends if it is stopped.
    pub fn spawn_stateless(command: &mut Command) -> io::Result<Self> {
        Self::spawn(command.process_group(0).stdin(Stdio::null()), Signal::KILL)
    }

    /// Starts a worker, which reads tasks from its standard input.
    pub fn spawn_worker(command: &mut Command) -> io::Result<Self> {
        Self::spawn(command.stdin(Stdio::piped()), Signal::TERM)
    }

    fn spawn(command: &mut Command, end: Signal) -> io::Result<Self> {
        let mut child = signal_with_parent(command.stdout(Stdio::piped()), end).spawn()?;
        let pidfd = match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(error.into());
            }
        };
        let output = BufReader::new(child.stdout.take().expect("its output is a pipe"));
        Ok(Self { input: child.stdin.take(), child, pidfd, output, end })
    }

    /// Returns the process id. It stays valid until the child is reaped: when this value is
    /// dropped, or when [`read_line`](Self::read_line) reports that the child has ended.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Asks the child to end, kills it after `time`, and reaps it.
    fn end(&mut self, time: Duration) {
        if self.input.take().is_none() {
            // No effect on a child that has ended.
            let _ = pidfd_send_signal(&self.pidfd, self.end);
        }
        if !self.has_ended_within(time) {
            let pid = self.child.id();
            eprintln!(
                "granary: process {pid} of granary did not end within {time:?} of the request, and \
                 is killed; it may have been stopped (SIGSTOP)",
            );
            let _ = self.child.kill();
        }
        // The exit status of a child that is no longer needed is of no interest.
        let _ = self.child.wait();
    }

    /// Waits until the child has ended, without reaping it. Returns false after `time`.
    fn has_ended_within(&self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = left.try_into().expect("a few seconds fit");
            match poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&left)) {
                Ok(ready) => return ready > 0,
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }

    /// Writes one JSON object, on one line, to a worker.
    pub fn write_line(&mut self, value: &impl Serialize) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        let input = self.input.as_mut().expect("only a worker is written to, before it is dropped");
        Ok(input.write_all(&line)?)
    }

    /// Waits for the next line of the child and parses it.
    pub fn read_line<T: DeserializeOwned>(&mut self) -> anyhow::Result<T> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        if line.is_empty() {
            bail!("the process ended with {}; see its messages above", self.child.wait()?);
        }
        serde_json::from_str(&line).with_context(|| {
            format!(
                "unexpected message {line:?}; use the same version of granary for all processes"
            )
        })
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.end(END);
    }
}

/// Exit status and resource usage of a program that ran to completion.
#[derive(Clone, Copy, Debug)]
pub struct Finished {
    /// Exit status of the program.
    pub status: ExitStatus,
    /// Time from before the spawn until the program was reaped.
    pub elapsed: Duration,
    /// Peak resident memory in bytes of the program or of a child that it reaped. The kernel
    /// includes this process's own resident memory at the spawn, so this process must stay small.
    pub peak_bytes: u64,
}

/// Starts a program and waits until it ends.
///
/// # Errors
/// As [`Command::spawn`], if the program cannot be started.
pub fn run_to_completion(command: &mut Command) -> io::Result<Finished> {
    let start = Instant::now();
    let child = command.spawn()?;
    let pid = libc::pid_t::try_from(child.id()).expect("a process id fits into pid_t");
    let mut status = 0;
    // SAFETY: rusage is a structure of integers, for which all zeros is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live variables of the types that wait4 writes. No other code
    // waits for this child; dropping a `Child` does not reap it.
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

/// Largest peak resident memory, in bytes, of the children that were reaped so far.
pub fn peak_bytes_of_ended() -> u64 {
    // SAFETY: rusage is a structure of integers, for which all zeros is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live variable of the type that getrusage writes.
    let done = unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage) };
    assert_eq!(done, 0, "getrusage fails only on a wrong argument");
    u64::try_from(usage.ru_maxrss).unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completed_program_reports_status_time_and_peak_memory() {
        let script = "x=$(head -c 30000000 /dev/zero | tr '\\0' a); exit 3";
        let finished = run_to_completion(Command::new("sh").args(["-c", script])).unwrap();
        assert_eq!(finished.status.code(), Some(3));
        assert!(finished.elapsed > Duration::ZERO);
        assert!(finished.peak_bytes > 30_000_000, "{finished:?}");
    }

    #[test]
    fn stopped_server_is_killed() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo 1; kill -STOP $$"]);
        let mut server = ChildProcess::spawn_server(&mut command).unwrap();
        assert_eq!(server.read_line::<u32>().unwrap(), 1);
        let pid = server.pid();
        rustix::process::waitid(
            rustix::process::WaitId::Pid(pid),
            rustix::process::WaitIdOptions::STOPPED | rustix::process::WaitIdOptions::NOWAIT,
        )
        .unwrap();
        server.end(Duration::from_millis(1));
        assert_eq!(server.child.try_wait().unwrap().unwrap().signal(), Some(libc::SIGKILL));
    }

    #[test]
    fn child_that_was_reaped_is_known_to_have_ended() {
        let mut command = Command::new("sh");
        let mut server = ChildProcess::spawn_server(command.args(["-c", "exit 3"])).unwrap();
        let error = server.read_line::<u32>().unwrap_err();
        assert!(error.to_string().contains("exit status: 3"), "{error}");
        assert!(server.has_ended_within(Duration::ZERO));
    }

    #[test]
    fn missing_program_is_a_not_found_error() {
        let error = run_to_completion(&mut Command::new("/no/such/program")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
