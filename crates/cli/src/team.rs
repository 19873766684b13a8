//! Processes that take part in a benchmark: this program with a hidden command, spoken to in
//! lines over its standard input and output.
//!
//! ```text
//!  benchmark                     worker
//!            ◀── {"ready":true}  it is set up and warm
//!  a task    ──▶
//!            ◀── what came out   one JSON object
//!  (closes)  ──▶                 it ends
//! ```

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::child;

/// The first line of a worker.
#[derive(Serialize, Deserialize)]
struct Ready {
    ready: bool,
}

/// The benchmark's side: one worker.
pub struct Member {
    child: Child,
    /// Closed, it ends.
    tasks: Option<ChildStdin>,
    results: BufReader<ChildStdout>,
}

impl Member {
    /// Starts a worker; it is set up when [`Member::wait_ready`] returns.
    pub fn start(command: &mut Command) -> anyhow::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = child::end_with_us(command).spawn().context("start a worker process")?;
        let results = BufReader::new(child.stdout.take().expect("its output is a pipe"));
        Ok(Self { tasks: child.stdin.take(), child, results })
    }

    /// Waits until it is set up and warm.
    pub fn wait_ready(&mut self) -> anyhow::Result<()> {
        let Ready { ready } = self.result()?;
        if ready { Ok(()) } else { bail!("a worker process is not ready") }
    }

    /// Gives it a task.
    pub fn give(&mut self, task: &impl Serialize) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(task).context("write down a task")?;
        line.push(b'\n');
        let tasks = self.tasks.as_mut().expect("open until it is dropped");
        tasks.write_all(&line).context("give a worker process its task")
    }

    /// Waits for what it says next.
    pub fn result<T: DeserializeOwned>(&mut self) -> anyhow::Result<T> {
        let mut line = String::new();
        self.results.read_line(&mut line).context("hear from a worker process")?;
        if line.is_empty() {
            bail!("a worker process ended with {}; what it said stands above", self.child.wait()?);
        }
        serde_json::from_str(&line).with_context(|| format!("a worker process said {line:?}"))
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        drop(self.tasks.take());
        // What it had to say was said.
        let _ = self.child.wait();
    }
}

/// The worker's side: says that it is set up.
pub fn say_ready() -> anyhow::Result<()> {
    say(&Ready { ready: true })
}

/// The worker's side: says what came out.
pub fn say(result: &impl Serialize) -> anyhow::Result<()> {
    let mut line = serde_json::to_vec(result)?;
    line.push(b'\n');
    let mut out = io::stdout().lock();
    out.write_all(&line).and_then(|()| out.flush()).context("tell what came out")
}

/// The worker's side: waits for the next task; none when there will be no more.
pub fn next_task<T: DeserializeOwned>() -> anyhow::Result<Option<T>> {
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line).context("read a task")?;
    if line.is_empty() {
        return Ok(None);
    }
    Ok(Some(serde_json::from_str(&line).with_context(|| format!("read {line:?} as a task"))?))
}
