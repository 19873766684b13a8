//! Runs programs under the built `granary run`, with a private memory node or a running
//! `granary serve`.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use pager::execs::Execs;
use pager::run_memory::RunMemory;
use pager::stats::{Counter, Summary};
use rustix::process::{Pid, Signal};
use serde_json::Value;

use crate::node::{MemoryNode, granary};
use crate::pager::{Outcome, Running, Scratch, apply_privilege_setting};
use crate::signals;

/// The memory node that a program uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// The default: `granary run` starts a private memory node.
    Private,
    /// A running `granary serve`, with `--pool shm:PATH`.
    Served,
}

/// Makes a test of each named function for each [`NodeKind`], which is the function's argument.
#[macro_export]
macro_rules! over_each_node {
    ($($check:ident),* $(,)?) => {
        mod private_node {
            $(#[test] fn $check() { super::$check($crate::run::NodeKind::Private) })*
        }
        mod served_node {
            $(#[test] fn $check() { super::$check($crate::run::NodeKind::Served) })*
        }
    };
}

/// Environment of `granary run` in a test: a limit of local memory, a memory node, a directory.
pub struct Site {
    local_bytes: u64,
    memory: String,
    node: Option<MemoryNode>,
    options: Vec<String>,
    /// Temporary directory of the test.
    pub scratch: Scratch,
}

/// Result of a run under `granary run`.
#[derive(Debug)]
pub struct Paged {
    /// The program's outcome; its resident memory is that of the largest process.
    pub outcome: Outcome,
    /// The output of `--stats-json`; null if the file is missing.
    pub stats: Value,
}

impl Site {
    /// Sets up a limit of `local_bytes` and a memory node that donates `memory` (a value of
    /// `--memory`). The name must be unique among the tests.
    pub fn new(kind: NodeKind, name: &str, local_bytes: u64, memory: &str) -> Self {
        let name = format!("{name}-{kind:?}");
        let node = (kind == NodeKind::Served)
            .then(|| MemoryNode::start(&format!("node-{name}"), &["--memory", memory]))
            .map(|node| node.expect("a memory node starts"));
        let (memory, options, scratch) = (memory.into(), Vec::new(), Scratch::new(&name));
        Self { local_bytes, memory, node, options, scratch }
    }

    /// The same environment, with more options of `granary run`.
    pub fn with_options(self, options: &[&str]) -> Self {
        Self { options: options.iter().map(|option| (*option).to_owned()).collect(), ..self }
    }

    /// The limit of local memory.
    pub fn local_bytes(&self) -> u64 {
        self.local_bytes
    }

    /// The command `granary run` of a program, not started yet.
    pub fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(granary());
        command.args(["run", "--stats", "--local", &self.local_bytes.to_string(), "--stats-json"]);
        command.arg(self.scratch.0.join("stats.json"));
        match &self.node {
            None => command.args(["--memory", &self.memory]),
            Some(node) => command.arg("--pool").arg(format!("shm:{}", node.socket.display())),
        };
        command.args(&self.options).arg("--").arg(program).args(arguments).stdin(Stdio::null());
        apply_privilege_setting(&mut command);
        command
    }

    /// Runs a program until it ends.
    pub fn run(&self, program: &str, arguments: &[&str]) -> Paged {
        self.finish(Running::start(&mut self.command(program, arguments)))
    }

    /// Waits until a program that was started with [`Site::command`] has ended.
    pub fn finish(&self, running: Running) -> Paged {
        let mut outcome = running.finish();
        let stats = fs::read(self.scratch.0.join("stats.json"));
        let stats: Value = stats.map_or(Value::Null, |text| {
            serde_json::from_slice(&text).expect("--stats-json writes JSON")
        });
        outcome.resident_bytes = stats["local_peak_bytes"].as_u64().unwrap_or(0);
        Paged { outcome, stats }
    }

    /// Waits until the pager has written this many pages of the program to the memory node.
    pub fn wait_for_pages_out(&self, running: &Running, pages: u64) {
        self.wait_for_counters(running, |summary| summary.get(Counter::PagesOut) >= pages);
    }

    /// Waits until `is_true` holds for the counters of a running program. Fails if the program ends
    /// before.
    pub fn wait_for_counters(&self, running: &Running, is_true: impl Fn(&Summary) -> bool) {
        self.wait_for_memory(running, |memory| is_true(&Summary::read(memory)));
    }

    /// Waits until a running program has this many processes without the pool. Fails if the program
    /// ends before.
    pub fn wait_for_processes_without_pool(&self, running: &Running, count: u64) {
        self.wait_for_memory(running, |memory| Execs::of(memory).without_pool().processes >= count);
    }

    fn wait_for_memory(&self, running: &Running, is_true: impl Fn(RunMemory) -> bool) {
        let holds = || {
            let processes = processes_of(running);
            let memory = processes.iter().find_map(|&process| counters_of(process))?;
            Some(is_true(memory))
        };
        while holds() != Some(true) {
            let ended = running.ends_within(Duration::from_millis(2));
            assert!(!ended, "the program ended before its counters had the expected values");
        }
    }

    /// Kills the memory node (SIGKILL).
    pub fn kill_node(&mut self, running: &Running) {
        match &mut self.node {
            Some(node) => node.kill().expect("the memory node runs"),
            None => self.signal_node(running, Signal::KILL),
        }
    }

    /// Sends a signal to the memory node.
    pub fn signal_node(&self, running: &Running, signal: Signal) {
        let node = match &self.node {
            Some(node) => node.pid(),
            None => {
                let mut children = processes_of(running);
                children.retain(|&child| argument(child, 1) == "serve");
                let [node] = children[..] else { panic!("not one memory node: {children:?}") };
                node
            }
        };
        signals::signal(node, signal).expect("the memory node runs");
    }

    /// Returns the assist of a running program (`--assist process`): there is exactly one.
    pub fn assist(&self, running: &Running) -> Pid {
        let mut children = processes_of(running);
        children.retain(|&child| argument(child, 1) == "assist");
        let [assist] = children[..] else { panic!("not one assist: {children:?}") };
        Pid::from_raw(assist).expect("a pid")
    }

    /// Asserts that all chunks of a served node become free after the program has ended. A private
    /// node has ended with its command.
    pub fn assert_all_chunks_free(&self) {
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

/// The processes of `granary run`: its memory node, its assist, its reaper, the program, and all
/// that these have started.
pub fn processes_of(running: &Running) -> Vec<i32> {
    let entries = fs::read_dir("/proc").expect("/proc is mounted").flatten();
    let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let parent = |id: i32| -> Option<i32> {
        let stat = fs::read(format!("/proc/{id}/stat")).ok()?;
        let stat = String::from_utf8_lossy(&stat).into_owned();
        stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
    };
    let all: Vec<(i32, i32)> = ids.filter_map(|id| Some((id, parent(id)?))).collect();
    let mut found = vec![running.pid() as i32];
    let mut at = 0;
    while at < found.len() {
        let above = found[at];
        found.extend(all.iter().filter(|(_, parent)| *parent == above).map(|(id, _)| id));
        at += 1;
    }
    found.split_off(1)
}

/// The name of a process; `None` if it has ended.
pub fn name_of(pid: i32) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = |key: &str| status.lines().find_map(|line| line.strip_prefix(key));
    let is_zombie = line("State:")?.trim_start().starts_with('Z');
    (!is_zombie).then(|| line("Name:").map(|name| name.trim().to_owned())).flatten()
}

/// An argument of a process; empty if the process has fewer.
fn argument(pid: i32, number: usize) -> String {
    let command = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    command.split('\0').nth(number).unwrap_or_default().into()
}

/// The memory with a paged process's counters; `None` until the process is paged.
fn counters_of(pid: i32) -> Option<RunMemory> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let mut entries = environment.split(|&byte| byte == 0);
    let path = entries.find_map(|entry| entry.strip_prefix(b"GRANARY_RUN_MEMORY="))?;
    RunMemory::open(Path::new(OsStr::from_bytes(path))).ok()
}

impl Paged {
    /// A number of `--stats-json`.
    pub fn count(&self, name: &str) -> u64 {
        let Self { outcome, stats } = self;
        stats[name].as_u64().unwrap_or_else(|| panic!("no {name} in {stats}: {}", outcome.stderr))
    }

    /// Asserts that at least `pages` pages were written to the memory node and read back, in chunks
    /// that the node's NIC allocated.
    pub fn assert_moved(&self, pages: u64) {
        let stats = &self.stats;
        assert!(self.count("pages_out") >= pages, "too few pages out: {stats}");
        assert!(self.count("pages_in") >= pages, "too few pages in: {stats}");
        assert!(self.count("chunks_peak") > 0, "{stats}");
        assert!(self.count("allocations_by_nic") >= self.count("chunks_peak"), "{stats}");
        assert_eq!(self.count("allocations_by_cpu"), 0, "{stats}");
    }
}
