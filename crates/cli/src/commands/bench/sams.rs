//! `granary bench paper sams`: starts the programs of the experiment on each system.

use std::fs;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use bench::paper::Extent;
use bench::paper::sams::workload::Measured;
use bench::paper::sams::{self, Job, Machine, Outcomes, Plan, Program, System};
use bench_report::record::Record;
use rustix::process::{Pid, Signal, kill_process};
use units::Size;

use super::{BenchOutput, say_pictures};
use crate::child::terminate_with_parent;
use crate::kernel_swap::{KernelSwap, SwapKind, SwapProcess};

/// Bytes of a process that its cgroup counts and granary does not: page tables and stacks.
const ALLOWANCE_BYTES: u64 = 1 << 20;
/// The least `--memory`: a quarter of it is the least bound of `granary run`, or less.
pub const MEMORY_MIN: u64 = 8 << 20;
/// Longest time of a run.
const TIME_LIMIT: Duration = Duration::from_secs(300);
/// Longest time until memcached listens.
const START_LIMIT: Duration = Duration::from_secs(20);

const NOTE: &str = "\
Time and CPU time are those of the computation, as medians of the rounds, over those of the plain \
run of the same round. CPU time is that of the program's process with the pager's threads in it; \
the memory node is another process, and so is the assist. linux, fastswap and two are granary run \
--paths; its private memory node is in this machine's memory, and the process copies its pages \
itself. two+assist adds --assist process, which takes the role of the SmartNIC on a core of this \
machine: with two cores it competes with the program. The paper's numbers are of a cluster with a \
SmartNIC, and of the kernel's swap over its network.";

/// Runs the experiment, and prints its tables.
pub fn run(
    quick: bool,
    memory: Option<Size>,
    output: &BenchOutput<()>,
) -> anyhow::Result<ExitCode> {
    let extent = if quick { Extent::Quick } else { Extent::Full };
    let plan = Plan::new(extent, memory.map(|memory| memory.bytes()));
    let mut report = output.begin()?;
    let machine = Processes::new()?;
    let bar = output.progress().bar(sams::NAME, plan.steps() as u64);
    let outcomes = plan.measure(&machine, &bar);
    drop(bar);
    let (results, savings) = (outcomes.results(), outcomes.savings());
    let records: Vec<&Record> = results.records().chain(savings.records()).collect();
    report.extend(records.iter().map(|record| (*record).clone()))?;
    for (title, table) in outcomes.tables() {
        report.table(&title, &table)?;
    }
    if !savings.rows.is_empty() {
        report.table("Saved by two paths - measured, this machine", &savings.table())?;
    }
    for line in outcomes.missing() {
        report.say(line)?;
    }
    if let Some(directory) = output.directory() {
        let files = write_files(&outcomes, &records, &directory)?;
        say_pictures(&mut report, &files)?;
    }
    report.say(format_args!("\n{NOTE}"))?;
    if outcomes.has_wrong_result() {
        bail!("a program gave a wrong result: see the lines above, and report this bug");
    }
    Ok(ExitCode::SUCCESS)
}

fn write_files(
    outcomes: &Outcomes,
    records: &[&Record],
    directory: &Path,
) -> anyhow::Result<Vec<PathBuf>> {
    let files = outcomes.draw("measured, this machine", directory, "paper-sams")?;
    let path = directory.join("paper-sams-measured.jsonl");
    let lines: Vec<String> = records.iter().map(|record| record.to_json()).collect();
    fs::write(&path, lines.join("\n") + "\n")
        .with_context(|| format!("write {}; choose another --out", path.display()))?;
    Ok(files)
}

/// Runs a program of the experiment in this process, for [`Processes`].
pub fn work(program: Program, memory: Size) -> anyhow::Result<Measured> {
    let bytes = usize::try_from(memory.bytes()).context("--memory exceeds the address space")?;
    sams::workload::run(program, bytes).context("run a program that is not part of granary")
}

/// Runs programs as processes of this machine.
struct Processes {
    granary: PathBuf,
    directory: tempfile::TempDir,
}

impl Processes {
    fn new() -> anyhow::Result<Self> {
        let granary = std::env::current_exe().context("find the path of this program")?;
        let directory = tempfile::tempdir().context("make a directory for sockets")?;
        Ok(Self { granary, directory })
    }

    /// Returns a command that runs `program` under `granary run` with these options. Arguments may
    /// be added.
    fn paged(&self, options: &[&str], job: Job, program: &Path) -> Command {
        let mut command = Command::new(&self.granary);
        let local = job.local_bytes.to_string();
        command.arg("run").args(options).args(["--local", &local]);
        command.args(["--memory", &backing_bytes(job).to_string(), "--"]).arg(program);
        command
    }

    fn run_command(&self, job: Job, mut command: Command) -> Result<Measured, String> {
        if job.program == Program::Memcached {
            return self.run_memcached(job, &mut command);
        }
        command.args(["worker", "sams", "--program", job.program.name()]);
        command.args(["--memory", &job.bytes.to_string()]);
        let mut process = Process::start(&mut command)?;
        let text = process.output(TIME_LIMIT)?;
        serde_json::from_str(&text).map_err(|_| format!("unexpected output {text:?}"))
    }

    fn run_memcached(&self, job: Job, command: &mut Command) -> Result<Measured, String> {
        let socket = self.directory.path().join("memcached");
        // The server removes an old socket only if it is the server's own.
        let _ = fs::remove_file(&socket);
        // Twice the data, so that the server never throws an item away.
        let megabytes = (2 * job.bytes / (1 << 20)).max(64).to_string();
        command.args(["-m", &megabytes, "-t", "1", "-s"]).arg(&socket);
        if rustix::process::geteuid().is_root() {
            command.args(["-u", "root"]);
        }
        let mut process = Process::start(command)?;
        process.wait_for(&socket)?;
        let pid = process.pid();
        // The client waits for answers without a limit; the end of the server ends it.
        let (done, ended) = mpsc::channel::<()>();
        let watch = thread::spawn(move || {
            if ended.recv_timeout(TIME_LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
                let _ = kill_process(pid, Signal::TERM);
            }
        });
        let measured = sams::memcached::run(&socket, job.bytes as usize);
        drop(done);
        watch.join().expect("the watching thread does not panic");
        measured.map_err(|error| error.to_string())
    }
}

impl Machine for Processes {
    fn run(&self, job: Job, system: System) -> Result<Measured, String> {
        let program = match job.program {
            Program::Memcached => {
                find_program("memcached").ok_or("memcached is not installed (apt install it)")?
            }
            _ => self.granary.clone(),
        };
        let swap = |kind| {
            let limit = job.local_bytes + ALLOWANCE_BYTES;
            SwapProcess::start(&KernelSwap { kind, limit, size: backing_bytes(job) })
        };
        match system {
            System::Plain => self.run_command(job, Command::new(program)),
            System::Zram | System::File => {
                let kind = if system == System::Zram { SwapKind::Zram } else { SwapKind::File };
                let swap = swap(kind)?;
                self.run_command(job, swap.command(&program))
            }
            System::Linux | System::Fastswap | System::Two => {
                self.run_command(job, self.paged(&["--paths", system.name()], job, &program))
            }
            System::Assist => {
                let options = ["--paths", "two", "--assist", "process"];
                self.run_command(job, self.paged(&options, job, &program))
            }
        }
    }
}

/// Bytes of swap, or of the memory node: more than a process of the experiment ever has.
fn backing_bytes(job: Job) -> u64 {
    2 * job.bytes + (256 << 20)
}

fn find_program(name: &str) -> Option<PathBuf> {
    let paths = std::env::var_os("PATH")?;
    std::env::split_paths(&paths).map(|path| path.join(name)).find(|path| path.is_file())
}

/// A process of the experiment. Dropping it ends it.
struct Process(Child);

impl Process {
    fn start(command: &mut Command) -> Result<Self, String> {
        let command = terminate_with_parent(command.stdin(Stdio::null()).stdout(Stdio::piped()));
        let program = command.get_program().to_string_lossy().into_owned();
        command.spawn().map(Self).map_err(|error| format!("start {program}: {error}"))
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Waits for the end of the process, and returns its output.
    fn output(&mut self, limit: Duration) -> Result<String, String> {
        let mut output = self.0.stdout.take().expect("its output is a pipe");
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            let mut text = String::new();
            let _ = output.read_to_string(&mut text);
            // The receiver is gone if the process took too long.
            let _ = sender.send(text);
        });
        let received = receiver.recv_timeout(limit);
        let Ok(text) = received else { return Err(format!("over {} s", limit.as_secs())) };
        let status = self.0.wait().map_err(|error| format!("wait for the process: {error}"))?;
        match (status.code(), status.signal()) {
            (Some(0), _) => Ok(text),
            (_, Some(9)) => Err("killed: out of memory".into()),
            _ => Err(format!("ended with {status}; see its messages above")),
        }
    }

    /// Waits until the process listens at a socket.
    fn wait_for(&mut self, socket: &Path) -> Result<(), String> {
        let end = Instant::now() + START_LIMIT;
        while !socket.exists() {
            if let Ok(Some(status)) = self.0.try_wait() {
                return Err(format!("ended with {status}; see its messages above"));
            }
            if Instant::now() > end {
                return Err(format!("does not listen after {} s", START_LIMIT.as_secs()));
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // `granary run` passes SIGTERM on, and ends its memory node. A process that has ended and
        // was waited for has no effect here.
        if let Ok(None) = self.0.try_wait() {
            let _ = kill_process(self.pid(), Signal::TERM);
        }
        let _ = self.0.wait();
    }
}
