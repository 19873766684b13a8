//! Programs of the papers' experiments as processes of this machine.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use bench::paper::programs::memcached::{self, Load};
use bench::paper::programs::{Job, Measured, Program, workload};
use bench::paper::results::Results;
use bench_report::record::Record;
use bench_report::report::Report;
use bench_report::table::Table;
use rustix::process::{Pid, Signal, kill_process};
use units::Size;

use super::{BenchOutput, say_pictures};
use crate::child::terminate_with_parent;

/// The least `--memory`: a quarter of it is the least bound of `granary run`, or less.
pub const MEMORY_MIN: u64 = 8 << 20;
/// Longest time of a run.
const TIME_LIMIT: Duration = Duration::from_secs(300);
/// Longest time until memcached listens.
const START_LIMIT: Duration = Duration::from_secs(20);

/// Runs a program in this process, for [`Programs`].
pub fn work(program: Program, memory: Size) -> anyhow::Result<Measured> {
    let bytes = usize::try_from(memory.bytes()).context("--memory exceeds the address space")?;
    workload::run(program, bytes).context("run a program that is not part of granary")
}

/// Outcomes of an experiment, to be shown.
pub struct Shown<'a> {
    /// Tables with their titles.
    pub tables: Vec<(String, Table)>,
    /// All results.
    pub results: &'a Results,
    /// Title and rows of the comparison with the paper.
    pub compared: (&'a str, &'a Results),
    /// Lines on missing results.
    pub missing: Vec<String>,
    /// A program gave a wrong result.
    pub has_wrong_result: bool,
    /// Explanation below the tables.
    pub note: &'a str,
    /// Prefix of file names.
    pub files: &'a str,
}

/// Prints outcomes. If the output has a directory, writes the records, and pictures by `draw`.
pub fn show(
    mut report: Report,
    output: &BenchOutput<()>,
    shown: &Shown<'_>,
    draw: impl FnOnce(&Path) -> Result<Vec<PathBuf>, bench::Error>,
) -> anyhow::Result<ExitCode> {
    let (title, compared) = shown.compared;
    let records: Vec<&Record> = shown.results.records().chain(compared.records()).collect();
    report.extend(records.iter().map(|record| (*record).clone()))?;
    for (title, table) in &shown.tables {
        report.table(title, table)?;
    }
    if !compared.rows.is_empty() {
        report.table(title, &compared.table())?;
    }
    for line in &shown.missing {
        report.say(line)?;
    }
    if let Some(directory) = output.directory() {
        let files = draw(&directory)?;
        write_records(&directory.join(format!("{}-measured.jsonl", shown.files)), &records)?;
        say_pictures(&mut report, &files)?;
    }
    report.say(format_args!("\n{}", shown.note))?;
    if shown.has_wrong_result {
        bail!("a program gave a wrong result: see the lines above, and report this bug");
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes records as one JSON object per line.
fn write_records(path: &Path, records: &[&Record]) -> anyhow::Result<()> {
    let lines: Vec<String> = records.iter().map(|record| record.to_json()).collect();
    units::files::write(path, (lines.join("\n") + "\n").as_bytes())
        .with_context(|| format!("write {}; choose another --out", path.display()))
}

/// Starts programs as processes of this machine.
pub struct Programs {
    granary: PathBuf,
    directory: tempfile::TempDir,
    /// Load of memcached.
    load: Load,
}

impl Programs {
    /// Makes a directory for the files of the programs. `load`: of memcached.
    pub fn new(load: Load) -> anyhow::Result<Self> {
        let granary = std::env::current_exe().context("find the path of this program")?;
        let directory = tempfile::tempdir().context("make a directory for sockets")?;
        Ok(Self { granary, directory, load })
    }

    /// Directory of the programs' files, which is removed when this value is dropped.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The executable of a program.
    pub fn path(&self, program: Program) -> Result<PathBuf, String> {
        match program {
            Program::Memcached => find_program("memcached")
                .ok_or_else(|| "memcached is not installed (apt install it)".into()),
            _ => Ok(self.granary.clone()),
        }
    }

    /// Returns the command `granary run` with the bound of a job. Arguments may be added.
    pub fn paged(&self, job: Job) -> Command {
        let mut command = Command::new(&self.granary);
        command.args(["run", "--local", &job.local_bytes.to_string()]);
        command
    }

    /// Starts a program with a command to which the program's arguments are added. `name`: of its
    /// socket, if it has one.
    pub fn start(&self, job: Job, mut command: Command, name: &str) -> Result<Running, String> {
        if job.program != Program::Memcached {
            command.args(["worker", "program", job.program.name()]);
            command.args(["--memory", &job.bytes.to_string()]);
            return Ok(Running { process: Process::start(&mut command)?, served: None });
        }
        let socket = self.directory().join(name);
        // The server removes an old socket only if it is the server's own.
        let _ = fs::remove_file(&socket);
        // Twice the data, so that the server never throws an item away.
        let megabytes = (2 * job.bytes / (1 << 20)).max(64).to_string();
        command.args(["-m", &megabytes, "-t", "1", "-s"]).arg(&socket);
        if rustix::process::geteuid().is_root() {
            command.args(["-u", "root"]);
        }
        let mut process = Process::start(&mut command)?;
        process.wait_for(&socket)?;
        Ok(Running {
            process,
            served: Some(Served { socket, bytes: job.bytes as usize, load: self.load }),
        })
    }
}

fn find_program(name: &str) -> Option<PathBuf> {
    let paths = std::env::var_os("PATH")?;
    std::env::split_paths(&paths).map(|path| path.join(name)).find(|path| path.is_file())
}

/// A program that runs. Dropping it ends it.
pub struct Running {
    process: Process,
    /// The load of a server.
    served: Option<Served>,
}

/// Load of a server at a socket.
struct Served {
    socket: PathBuf,
    bytes: usize,
    load: Load,
}

impl Running {
    /// Id of the started process.
    pub fn id(&self) -> u32 {
        self.process.0.id()
    }

    /// Waits for the result, and ends the process.
    pub fn finish(mut self) -> Result<Measured, String> {
        let measured = self.result()?;
        self.end()?;
        Ok(measured)
    }

    /// Waits for the result. The process may still run.
    pub fn result(&mut self) -> Result<Measured, String> {
        let Some(Served { socket, bytes, load }) = &self.served else {
            let line = self.process.line(TIME_LIMIT)?;
            return serde_json::from_str(&line).map_err(|_| format!("unexpected output {line:?}"));
        };
        let pid = self.process.pid();
        // The client waits for answers without a limit; the end of the server ends it.
        let (done, ended) = mpsc::channel::<()>();
        let watch = thread::spawn(move || {
            if ended.recv_timeout(TIME_LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
                let _ = kill_process(pid, Signal::TERM);
            }
        });
        let measured = memcached::run(socket, *bytes, *load);
        drop(done);
        watch.join().expect("the watching thread does not panic");
        measured.map_err(|error| error.to_string())
    }

    /// Waits for the end of the process; a server is ended.
    pub fn end(mut self) -> Result<(), String> {
        // Dropping a server ends it.
        if self.served.is_some() { Ok(()) } else { self.process.wait() }
    }
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

    /// Waits for the first line of the process's output.
    fn line(&mut self, limit: Duration) -> Result<String, String> {
        let output = self.0.stdout.take().expect("its output is a pipe, and is read once");
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            let mut line = String::new();
            let _ = BufReader::new(output).read_line(&mut line);
            // The receiver is gone if the process took too long.
            let _ = sender.send(line);
        });
        match receiver.recv_timeout(limit) {
            Err(_) => Err(format!("over {} s", limit.as_secs())),
            Ok(line) if line.is_empty() => {
                self.wait()?;
                Err("ended without a result; see its messages above".into())
            }
            Ok(line) => Ok(line),
        }
    }

    /// Waits for the end of the process.
    fn wait(&mut self) -> Result<(), String> {
        let status = self.0.wait().map_err(|error| format!("wait for the process: {error}"))?;
        match (status.code(), status.signal()) {
            (Some(0), _) => Ok(()),
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
