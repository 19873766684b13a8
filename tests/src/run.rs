//! Programs under `granary run`, with a memory node behind them: the one that it starts itself, or a
//! running one. Both are the built command, as a user has it.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use pager::stats::{Counter, Summary};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::node::{MemoryNode, granary};
use crate::pager::{Outcome, Running, Scratch, as_asked};

/// Which memory node is behind a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behind {
    /// The default: `granary run` starts one for itself.
    Private,
    /// A running `granary serve`, through `--pool shm:PATH`.
    Served,
}

/// Makes a test of each function here for each [`Behind`], which it is called with.
#[macro_export]
macro_rules! over_each_node {
    ($($check:ident),* $(,)?) => {
        mod private_node {
            $(#[test] fn $check() { super::$check($crate::run::Behind::Private) })*
        }
        mod served_node {
            $(#[test] fn $check() { super::$check($crate::run::Behind::Served) })*
        }
    };
}

/// A place to run programs: a bound, a memory node and a directory.
pub struct Site {
    local_bytes: u64,
    memory: String,
    node: Option<MemoryNode>,
    /// A directory of this test's own.
    pub scratch: Scratch,
}

/// How a program ended, and what `--stats-json` says.
#[derive(Debug)]
pub struct Paged {
    /// How it ended. What was resident is the most of any of its processes.
    pub outcome: Outcome,
    /// The summary; null if there is none.
    pub stats: Value,
}

impl Site {
    /// A site with this bound, in front of a memory node that donates `memory` (as `--memory` takes
    /// it). The name must be the test's own.
    pub fn new(behind: Behind, name: &str, local_bytes: u64, memory: &str) -> Self {
        let name = format!("{name}-{behind:?}");
        let node = (behind == Behind::Served)
            .then(|| MemoryNode::start(&format!("node-{name}"), &["--memory", memory]))
            .map(|node| node.expect("a memory node starts"));
        Self { local_bytes, memory: memory.into(), node, scratch: Scratch::new(&name) }
    }

    /// The bound.
    pub fn local_bytes(&self) -> u64 {
        self.local_bytes
    }

    /// `granary run` of a program here, not started yet.
    pub fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(granary());
        command.args(["run", "--stats", "--local", &self.local_bytes.to_string(), "--stats-json"]);
        command.arg(self.scratch.0.join("stats.json"));
        match &self.node {
            None => command.args(["--memory", &self.memory]),
            Some(node) => command.arg("--pool").arg(format!("shm:{}", node.socket.display())),
        };
        command.arg("--").arg(program).args(arguments).stdin(Stdio::null());
        as_asked(&mut command);
        command
    }

    /// Runs a program to its end.
    pub fn run(&self, program: &str, arguments: &[&str]) -> Paged {
        self.finish(Running::start(&mut self.command(program, arguments)))
    }

    /// Waits for the end of what [`Site::command`] started.
    pub fn finish(&self, running: Running) -> Paged {
        let mut outcome = running.finish();
        let stats = fs::read(self.scratch.0.join("stats.json"));
        let stats: Value = stats.map_or(Value::Null, |text| {
            serde_json::from_slice(&text).expect("--stats-json writes JSON")
        });
        outcome.resident_bytes = stats["local_peak_bytes"].as_u64().unwrap_or(0);
        Paged { outcome, stats }
    }

    /// Waits until this many pages of the program have gone to the memory node.
    pub fn wait_for_pages_out(&self, running: &Running, pages: u64) {
        let gone_out = || {
            let children = children(running);
            let directory = children.iter().find_map(|&child| counters_of(child))?;
            let summary = Summary::read(&directory).ok()?;
            Some(summary.get(Counter::PagesOut))
        };
        while gone_out().unwrap_or(0) < pages {
            let ended = running.ends_within(Duration::from_millis(2));
            assert!(!ended, "it ended before {pages} of its pages were out");
        }
    }

    /// Kills the memory node without warning.
    pub fn kill_node(&mut self, running: &Running) {
        match &mut self.node {
            Some(node) => node.kill().expect("it runs"),
            None => {
                let mut children = children(running);
                children.retain(|&child| argument(child, 1) == "serve");
                let [node] = children[..] else { panic!("not one memory node: {children:?}") };
                kill_process(Pid::from_raw(node).expect("a pid"), Signal::KILL).expect("it runs");
            }
        }
    }

    /// Waits until the served node has all its chunks again: a program that has ended gives them back.
    /// The private one ended with its command.
    pub fn assert_whole(&self) {
        let Some(node) = &self.node else { return };
        let mut status = Value::Null;
        for _ in 0..1000 {
            status = node.status().expect("the memory node answers");
            if status["free"] == status["chunks"] && status["clients"] == 0 {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("chunks are missing: {status}");
    }
}

/// The children of `granary run`: its memory node and the program.
fn children(running: &Running) -> Vec<i32> {
    let pid = running.pid();
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let children = children.expect("it was not waited for, and the kernel lists children");
    children.split_whitespace().map(|pid| pid.parse().expect("a pid")).collect()
}

/// An argument of a process; nothing if it has none.
fn argument(pid: i32, number: usize) -> String {
    let command = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    command.split('\0').nth(number).unwrap_or_default().into()
}

/// Where a paged process counts, once it is one.
fn counters_of(pid: i32) -> Option<PathBuf> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let mut entries = environment.split(|&byte| byte == 0);
    let directory = entries.find_map(|entry| entry.strip_prefix(b"GRANARY_RUN_DIR="))?;
    Some(OsStr::from_bytes(directory).into())
}

impl Paged {
    /// A number of the summary.
    pub fn count(&self, name: &str) -> u64 {
        let Self { outcome, stats } = self;
        stats[name].as_u64().unwrap_or_else(|| panic!("no {name} in {stats}: {}", outcome.stderr))
    }

    /// Asserts that pages really went to the memory node and came back, in chunks that its NIC
    /// allocated.
    pub fn assert_moved(&self, pages: u64) {
        let stats = &self.stats;
        assert!(self.count("pages_out") >= pages, "too few pages out: {stats}");
        assert!(self.count("pages_in") >= pages, "too few pages in: {stats}");
        assert!(self.count("chunks_peak") > 0, "{stats}");
        assert!(self.count("allocations_by_nic") >= self.count("chunks_peak"), "{stats}");
        assert_eq!(self.count("allocations_by_cpu"), 0, "{stats}");
    }
}
