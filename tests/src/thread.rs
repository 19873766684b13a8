//! Finds, measures and stops threads of another process.

use std::fs;

use anyhow::{Context, Result, ensure};

/// A thread of another process.
#[derive(Clone, Copy, Debug)]
pub struct Thread {
    pid: i32,
    tid: i32,
}

impl Thread {
    /// Finds the thread called `name` of process `pid`.
    pub fn find(pid: i32, name: &str) -> Result<Self> {
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            let tid: i32 = task?.file_name().to_string_lossy().parse()?;
            if fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm"))?.trim() == name {
                return Ok(Self { pid, tid });
            }
        }
        anyhow::bail!("process {pid} has no thread called {name}")
    }

    /// CPU time of the thread in nanoseconds.
    pub fn cpu_ns(&self) -> Result<u64> {
        let text = fs::read_to_string(format!("/proc/{}/task/{}/schedstat", self.pid, self.tid))?;
        Ok(text.split(' ').next().context("an empty schedstat")?.parse()?)
    }

    /// State of the thread as in `/proc`: `t` means stopped by a tracer.
    pub fn state(&self) -> Result<char> {
        let text = fs::read_to_string(format!("/proc/{}/task/{}/stat", self.pid, self.tid))?;
        let after = text.rsplit(") ").next().context("a malformed stat")?;
        after.chars().next().context("a malformed stat")
    }

    /// Stops this thread; other threads of the process keep running. Dropping the returned value
    /// resumes the thread.
    pub fn stop(&self) -> Result<Stopped> {
        // SAFETY: PTRACE_SEIZE and PTRACE_INTERRUPT take no pointers; waitpid writes to `status`.
        unsafe {
            let seized = libc::ptrace(libc::PTRACE_SEIZE, self.tid, 0usize, 0usize);
            ensure!(seized == 0, "tracing thread {}: {}", self.tid, errno());
            let stopped = libc::ptrace(libc::PTRACE_INTERRUPT, self.tid, 0usize, 0usize);
            ensure!(stopped == 0, "stopping thread {}: {}", self.tid, errno());
            let mut status = 0;
            let waited = libc::waitpid(self.tid, &mut status, libc::__WALL);
            ensure!(waited == self.tid, "waiting for thread {}: {}", self.tid, errno());
        }
        ensure!(self.state()? == 't', "thread {} did not stop", self.tid);
        Ok(Stopped(*self))
    }
}

/// A stopped thread. Must be dropped in the thread that stopped it, because ptrace binds a tracee
/// to the tracing thread.
pub struct Stopped(Thread);

impl Drop for Stopped {
    fn drop(&mut self) {
        // SAFETY: detaching takes no pointers; the call fails harmlessly if the thread has ended.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0.tid, 0usize, 0usize) };
    }
}

fn errno() -> std::io::Error {
    std::io::Error::last_os_error()
}
