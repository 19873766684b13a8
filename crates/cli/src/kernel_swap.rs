//! The kernel's swap for one measurement: a memory cgroup with a limit, and a swap device on zram
//! or in a file.
//!
//! A process of its own sets all of this up, and removes it when its standard input ends. So
//! nothing is left of it however the benchmark ends:
//!
//! ```text
//!  benchmark                          granary worker swap
//!            ◀── {"cgroup": PATH}     limit and swap are set up
//!            ◀── {"unavailable": WHY} or this system does not allow it
//!  (closes)  ──▶                      ends the cgroup's processes, removes all
//! ```
//!
//! Files below /sys, and commands, may need root. A swap or a zram device that exists before is not
//! touched.

use std::fs;
use std::io::{self, BufRead, BufReader};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::worker_process::send_result;

/// Bytes by which the limit is raised for a moment.
const RESCUE_BYTES: u64 = 256 << 10;
/// Interval between checks for a process that the kernel has stopped.
const RESCUE_CHECK: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
/// Attempts to end the processes of a cgroup, or to remove a cgroup, and the pause between them.
const ATTEMPTS: u32 = 1000;
const ATTEMPT_PAUSE: Duration = Duration::from_millis(10);
/// The largest priority: the kernel uses this swap before any other one.
const PRIORITY: &str = "32767";

/// Place of the swapped pages.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwapKind {
    /// Compressed, in memory
    Zram,
    /// In a file in /var/tmp
    File,
}

/// Settings of a limit with swap.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct KernelSwap {
    /// Place of the swapped pages
    #[arg(long, value_enum)]
    pub kind: SwapKind,
    /// Bytes of the cgroup's limit
    #[arg(long)]
    pub limit: u64,
    /// Bytes of swap
    #[arg(long)]
    pub size: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Cgroup(PathBuf),
    Unavailable(String),
}

/// A limit with swap, as the benchmark sees it. Dropping it removes both.
pub struct SwapProcess {
    child: Child,
    cgroup: PathBuf,
}

impl SwapProcess {
    /// Starts the process that sets up the limit and the swap.
    ///
    /// # Errors
    /// The reason why this system has no such swap.
    pub fn start(swap: &KernelSwap) -> Result<Self, String> {
        let say = |error: io::Error| format!("start the process that sets up swap: {error}");
        let mut command = Command::new(std::env::current_exe().map_err(say)?);
        let kind = if swap.kind == SwapKind::Zram { "zram" } else { "file" };
        command.args(["worker", "swap", "--kind", kind]);
        command.args(["--limit", &swap.limit.to_string(), "--size", &swap.size.to_string()]);
        // A process group of its own, so that Ctrl-C does not end this process before it has
        // removed what it has made.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(say)?;
        let mut line = String::new();
        let output = child.stdout.take().expect("its output is a pipe");
        let read = BufReader::new(output).read_line(&mut line);
        let answer = read.ok().and_then(|_| serde_json::from_str(&line).ok());
        match answer {
            Some(Answer::Cgroup(cgroup)) => Ok(Self { child, cgroup }),
            other => {
                drop(child.stdin.take());
                let _ = child.wait();
                Err(match other {
                    Some(Answer::Unavailable(why)) => why,
                    _ => "the process that sets up swap gave no answer".into(),
                })
            }
        }
    }

    /// Returns a command that runs `program` within the limit. Arguments may be added.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("sh");
        let script = "echo $$ > \"$0\" && exec \"$@\"";
        command.args(["-c", script]).arg(self.cgroup.join("cgroup.procs")).arg(program);
        command
    }
}

impl Drop for SwapProcess {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // The process reports errors itself.
        let _ = self.child.wait();
    }
}

impl KernelSwap {
    /// Sets up the limit and the swap, and removes both when the standard input ends.
    pub fn run(self) -> anyhow::Result<()> {
        let mut undo = Undo::default();
        let answer = match self.set_up(&mut undo) {
            Ok(cgroup) => send_result(&Answer::Cgroup(cgroup.directory.clone()))
                .and_then(|()| cgroup.rescue_until_closed(self.limit))
                // Otherwise the end of the swap would bring the pages of these processes back.
                .and(cgroup.empty()),
            Err(why) => send_result(&Answer::Unavailable(format!("{why:#}"))),
        };
        undo.run().and(answer)
    }

    fn set_up(&self, undo: &mut Undo) -> anyhow::Result<Cgroup> {
        let cgroup = Cgroup::create(undo)?;
        cgroup.limit(self.limit)?;
        match self.kind {
            SwapKind::Zram => swap_on_zram(self.size, undo)?,
            SwapKind::File => swap_on_file(self.size, undo)?,
        }
        Ok(cgroup)
    }
}

/// Steps that are reversed at the end, the newest first.
#[derive(Default)]
struct Undo(Vec<Box<dyn FnOnce() -> anyhow::Result<()>>>);

impl Undo {
    fn push(&mut self, step: impl FnOnce() -> anyhow::Result<()> + 'static) {
        self.0.push(Box::new(step));
    }

    /// Runs all steps. Returns the first error.
    fn run(mut self) -> anyhow::Result<()> {
        let mut result = Ok(());
        while let Some(step) = self.0.pop() {
            result = result.and(step());
        }
        result
    }
}

/// A memory cgroup.
struct Cgroup {
    version: u32,
    directory: PathBuf,
}

/// Finds the hierarchy with the memory controller, and its version, in the text of /proc/mounts.
fn find_hierarchy(mounts: &str) -> Option<(u32, PathBuf)> {
    let mut unified = None;
    for line in mounts.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let &[_, directory, kind, options, ..] = &words[..] else { continue };
        match kind {
            "cgroup" if options.split(',').any(|option| option == "memory") => {
                return Some((1, directory.into()));
            }
            "cgroup2" => unified = Some((2, directory.into())),
            _ => {}
        }
    }
    unified
}

impl Cgroup {
    fn create(undo: &mut Undo) -> anyhow::Result<Self> {
        let mounts = read(Path::new("/proc/mounts"))?;
        let (version, top) = find_hierarchy(&mounts).context("no memory cgroups are mounted")?;
        if version == 2 {
            let control = top.join("cgroup.subtree_control");
            if !read(&control)?.split_whitespace().any(|name| name == "memory") {
                write(&control, "+memory")?;
                undo.push(move || write(&control, "-memory"));
            }
        }
        let directory = top.join(format!("granary-bench-{}", std::process::id()));
        fs::create_dir(&directory)
            .with_context(|| format!("make the cgroup {}", directory.display()))?;
        let removed = directory.clone();
        undo.push(move || remove(&removed));
        Ok(Self { version, directory })
    }

    fn limit(&self, bytes: u64) -> anyhow::Result<()> {
        if self.version == 2 {
            return write(&self.directory.join("memory.max"), &bytes.to_string());
        }
        write(&self.directory.join("memory.limit_in_bytes"), &bytes.to_string())?;
        // Where reclaim finds no page, the process stops until the limit is raised.
        write(&self.directory.join("memory.oom_control"), "1")
    }

    /// Ends the processes of the cgroup, which the benchmark has started.
    fn empty(&self) -> anyhow::Result<()> {
        for _ in 0..ATTEMPTS {
            let processes = read(&self.directory.join("cgroup.procs"))?;
            if processes.is_empty() {
                return Ok(());
            }
            for process in processes.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)) {
                let _ = kill_process(process, Signal::KILL);
            }
            thread::sleep(ATTEMPT_PAUSE);
        }
        bail!("processes in the cgroup {} do not end", self.directory.display())
    }

    /// Waits for the end of the standard input. Meanwhile raises the limit for a moment whenever
    /// reclaim has failed, which happens in version 1 although swap is free.
    fn rescue_until_closed(&self, limit: u64) -> anyhow::Result<()> {
        let file = self.directory.join("memory.limit_in_bytes");
        let mut raised = 0;
        let input = io::stdin();
        let timeout = (self.version == 1).then_some(&RESCUE_CHECK);
        loop {
            let mut wait = [PollFd::new(&input, PollFlags::IN)];
            match poll(&mut wait, timeout) {
                Ok(0) => {}
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => bail!("wait for the benchmark: {error}"),
            }
            if read(&self.directory.join("memory.oom_control"))?.contains("under_oom 1") {
                raised += RESCUE_BYTES;
                write(&file, &(limit + raised).to_string())?;
            } else if raised > 0 && write(&file, &limit.to_string()).is_ok() {
                raised = 0;
            }
        }
    }
}

/// Removes an empty cgroup, which the kernel may hold for a moment.
fn remove(directory: &Path) -> anyhow::Result<()> {
    for _ in 0..ATTEMPTS {
        if fs::remove_dir(directory).is_ok() {
            return Ok(());
        }
        thread::sleep(ATTEMPT_PAUSE);
    }
    bail!("the cgroup {} cannot be removed: remove it with rmdir", directory.display())
}

fn swap_on_zram(size: u64, undo: &mut Undo) -> anyhow::Result<()> {
    let device = add_zram(undo)?;
    let directory = Path::new("/sys/block").join(&device);
    let reset = directory.join("reset");
    undo.push(move || write(&reset, "1"));
    write(&directory.join("disksize"), &size.to_string())?;
    swap_on(&Path::new("/dev").join(&device), undo)
}

/// Returns the name of a zram device of our own: a new one, or one without a size.
fn add_zram(undo: &mut Undo) -> anyhow::Result<String> {
    let control = Path::new("/sys/class/zram-control");
    if control.exists() {
        let number = read(&control.join("hot_add"))?.trim().to_owned();
        let (remove, name) = (control.join("hot_remove"), format!("zram{number}"));
        undo.push(move || write(&remove, &number));
        return Ok(name);
    }
    let names = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let mut names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let is_unused = |name: &String| {
        let state = Path::new("/sys/block").join(name).join("initstate");
        name.starts_with("zram") && read(&state).is_ok_and(|text| text.trim() == "0")
    };
    names.find(is_unused).context("no zram device is free: load the module with modprobe zram")
}

fn swap_on_file(size: u64, undo: &mut Undo) -> anyhow::Result<()> {
    let path = PathBuf::from(format!("/var/tmp/granary-bench-{}.swap", std::process::id()));
    let file = fs::File::options().write(true).create_new(true).mode(0o600).open(&path);
    let file = file.with_context(|| format!("create {}", path.display()))?;
    let removed = path.clone();
    undo.push(move || Ok(fs::remove_file(&removed)?));
    fallocate(file.as_fd(), FallocateFlags::empty(), 0, size)
        .with_context(|| format!("allocate {size} bytes in {}", path.display()))?;
    swap_on(&path, undo)
}

fn swap_on(path: &Path, undo: &mut Undo) -> anyhow::Result<()> {
    call(Command::new("mkswap").arg(path))?;
    call(Command::new("swapon").args(["-p", PRIORITY]).arg(path))?;
    let path = path.to_owned();
    undo.push(move || call(Command::new("swapoff").arg(&path)));
    Ok(())
}

fn call(command: &mut Command) -> anyhow::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let done = command.output().with_context(|| format!("start {name}"))?;
    if !done.status.success() {
        bail!("{name}: {}", String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

fn write(path: &Path, value: &str) -> anyhow::Result<()> {
    fs::write(path, value).with_context(|| format!("write {value} to {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchy_with_the_memory_controller_is_found() {
        let first = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
                     cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n\
                     cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                     cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n";
        assert_eq!(find_hierarchy(first), Some((1, "/sys/fs/cgroup/memory".into())));
        let second = "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n";
        assert_eq!(find_hierarchy(second), Some((2, "/sys/fs/cgroup".into())));
        assert_eq!(find_hierarchy("proc /proc proc rw 0 0\n"), None);
    }

    #[test]
    fn steps_are_reversed_in_order_and_all_run_after_an_error() {
        let order = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
        let mut undo = Undo::default();
        for step in 0..3 {
            let order = order.clone();
            undo.push(move || {
                order.borrow_mut().push(step);
                if step == 1 { bail!("step 1") } else { Ok(()) }
            });
        }
        assert_eq!(undo.run().unwrap_err().to_string(), "step 1");
        assert_eq!(*order.borrow(), [2, 1, 0]);
    }
}
