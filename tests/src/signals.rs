//! Signals to processes.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

/// Limit of the wait for the threads of a process that is being stopped.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// Sends a signal to a process. After SIGSTOP, waits until all threads have stopped.
///
/// The kernel stops a process when one of its threads next gets a CPU: until then the others go
/// on, so that a memory node accepts a connection after SIGSTOP was sent.
pub fn signal(pid: i32, signal: Signal) -> Result<()> {
    let process = Pid::from_raw(pid).context("no process id")?;
    kill_process(process, signal).with_context(|| format!("signalling process {pid}"))?;
    if signal == Signal::STOP {
        let end = Instant::now() + STOP_LIMIT;
        while !is_stopped(pid)? {
            ensure!(Instant::now() < end, "process {pid} does not stop");
            std::thread::yield_now();
        }
    }
    Ok(())
}

/// True if all threads of a process are stopped.
fn is_stopped(pid: i32) -> Result<bool> {
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that ends meanwhile has no file.
        let Ok(stat) = std::fs::read_to_string(task?.path().join("stat")) else { continue };
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        // T: stopped, t: stopped by a tracer, Z and X: ended.
        if !matches!(state, Some('T' | 't' | 'Z' | 'X')) {
            return Ok(false);
        }
    }
    Ok(true)
}
