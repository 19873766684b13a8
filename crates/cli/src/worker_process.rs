//! Worker processes of a benchmark.
//!
//! A worker is this program with the hidden command `worker`. The benchmark sends tasks to its
//! standard input and reads results from its standard output, one JSON object per line:
//!
//! ```text
//!  benchmark                     worker
//!            ◀── {"ready":true}  connected and warmed up
//!  task      ──▶
//!            ◀── result
//!  (closes)  ──▶                 exits
//! ```

use std::io::{self, BufRead, Write};
use std::process::Command;

use anyhow::{Context, bail};
use rustix::process::{Signal, kill_process};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::child::ChildProcess;

/// The first line that a worker prints.
#[derive(Serialize, Deserialize)]
struct Ready {
    ready: bool,
}

/// A worker process, as the benchmark sees it. Dropping it closes its input and waits for its end.
pub struct WorkerProcess(ChildProcess);

impl WorkerProcess {
    /// Starts a worker. It is ready for tasks when [`WorkerProcess::wait_ready`] returns.
    pub fn start(command: &mut Command) -> anyhow::Result<Self> {
        ChildProcess::spawn_worker(command).map(Self).context("start a worker process")
    }

    /// Waits until the worker is connected and warmed up.
    pub fn wait_ready(&mut self) -> anyhow::Result<()> {
        let Ready { ready } = self.receive()?;
        if ready { Ok(()) } else { bail!("a worker process is not ready") }
    }

    /// Sends a task to the worker.
    pub fn send_task(&mut self, task: &impl Serialize) -> anyhow::Result<()> {
        self.0.write_line(task).context("send a task to a worker process")
    }

    /// Kills the worker.
    pub fn kill(&self) -> anyhow::Result<()> {
        kill_process(self.0.pid(), Signal::KILL).context("kill a worker process")
    }

    /// Waits for the worker's next result.
    pub fn receive<T: DeserializeOwned>(&mut self) -> anyhow::Result<T> {
        self.0.read_line().context("read from a worker process")
    }
}

/// In the worker: reports that it is ready for tasks.
pub fn send_ready() -> anyhow::Result<()> {
    send_result(&Ready { ready: true })
}

/// In the worker: prints a result for the benchmark.
pub fn send_result(result: &impl Serialize) -> anyhow::Result<()> {
    let mut line = serde_json::to_vec(result)?;
    line.push(b'\n');
    let mut out = io::stdout().lock();
    out.write_all(&line).and_then(|()| out.flush()).context("print a result")
}

/// In the worker: waits for the next task; `None` when the benchmark has closed the pipe.
pub fn next_task<T: DeserializeOwned>() -> anyhow::Result<Option<T>> {
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line).context("read a task")?;
    if line.is_empty() {
        return Ok(None);
    }
    Ok(Some(serde_json::from_str(&line).with_context(|| format!("parse {line:?} as a task"))?))
}
