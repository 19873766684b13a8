//! Runs programs directly and with the preload library, and measures their peak resident memory.
//! [`crate::run`] runs programs under the `granary run` command.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use crate::built::library;
use pager::stats::Summary;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Result of a program's run.
#[derive(Debug)]
pub struct Outcome {
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: String,
    /// Exit code, or 128 plus the number of the signal that ended the program.
    pub code: i32,
    /// Peak resident memory (VmHWM) in bytes.
    pub resident_bytes: u64,
    /// The pager's counters; empty for a run without the pager, and for `granary run`, which
    /// reports its own.
    pub summary: Summary,
}

/// A temporary directory of one test; dropping the value removes the directory.
pub struct Scratch(pub PathBuf);

/// The header with assertions that the tests' C programs include.
const CHECK: &str = include_str!("../tests/pager_programs/check.h");

impl Scratch {
    /// Creates the directory.
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("granary-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("the temporary directory is writable");
        Self(path)
    }

    /// Compiles a C program into the directory and returns the program's path.
    pub fn compile(&self, name: &str, source: &str) -> PathBuf {
        self.compile_with(name, source, &[])
    }

    /// As [`Scratch::compile`], with additional options. They follow the file on the command line,
    /// because the linker searches libraries in that order.
    pub fn compile_with(&self, name: &str, source: &str, options: &[&str]) -> PathBuf {
        let (file, program) = (self.0.join(format!("{name}.c")), self.0.join(name));
        for (file, text) in [(&file, source), (&self.0.join("check.h"), CHECK)] {
            std::fs::write(file, text).expect("the scratch directory is writable");
        }
        let status = Command::new("cc")
            .args(["-O1", "-pthread", "-D_GNU_SOURCE"])
            .arg("-o")
            .args([&program, &file])
            .args(options)
            .status()
            .expect("a C compiler is installed");
        assert!(status.success(), "{name}.c does not compile");
        program
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs `program` without the pager.
pub fn plain(program: &str, arguments: &[&str]) -> Outcome {
    run(Command::new(program).args(arguments))
}

/// Runs `program` with the pager: at most `local` bytes resident, the rest in the pool `pool`.
pub fn paged(local: u64, pool: &str, program: &str, arguments: &[&str]) -> Outcome {
    paged_with(&pager::Config::new(local, pool), program, arguments)
}

/// Runs `program` with the pager and these settings, but for the directory of the counters.
pub fn paged_with(config: &pager::Config, program: &str, arguments: &[&str]) -> Outcome {
    static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let directory = Scratch::new(&format!("run-{count}"));
    let memory = pager::run_memory::OwnedRunMemory::create("granary-run-test").expect("memory");
    let mut config = config.clone();
    config.run_directory = Some(directory.0.clone());
    config.run_memory = Some(memory.path());
    config.read_choices(|name| std::env::var(name).ok()).expect("known choices");
    let mut command = Command::new(program);
    command.args(arguments).envs(config.to_environment()).env("LD_PRELOAD", library());
    apply_privilege_setting(&mut command);
    let mut outcome = run(&mut command);
    outcome.summary = Summary::read(memory.memory());
    outcome
}

/// True if the kernel reports forks to the pager of a paged program: as root, unless
/// `GRANARY_TEST_UNPRIVILEGED` is set.
pub fn forks_are_reported() -> bool {
    rustix::process::geteuid().is_root() && std::env::var_os("GRANARY_TEST_UNPRIVILEGED").is_none()
}

/// Applies `GRANARY_TEST_UNPRIVILEGED` to a command: if set, drops CAP_SYS_PTRACE in the started
/// program, so that the kernel reports no forks to the program's pager. No effect unless the tests
/// run as root, because other users do not have the capability.
pub fn apply_privilege_setting(command: &mut Command) {
    if forks_are_reported() || !rustix::process::geteuid().is_root() {
        return;
    }
    const CAP_SYS_PTRACE: i32 = 19;
    // SAFETY: the closure makes a single system call in the new process.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
}

fn run(command: &mut Command) -> Outcome {
    Running::start(command.stdin(Stdio::null())).finish()
}

/// A running program whose output is being read.
pub struct Running {
    child: Child,
    stdout: JoinHandle<Vec<u8>>,
    stderr: JoinHandle<Vec<u8>>,
    /// Standard error so far.
    said: Arc<Mutex<Vec<u8>>>,
    peak: JoinHandle<u64>,
}

impl Running {
    /// Starts the program. The caller sets the command's standard input.
    pub fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let status_file = format!("/proc/{}/status", child.id());
        let peak = std::thread::spawn(move || resident_peak(&status_file));
        let stdout = read_all(child.stdout.take().expect("piped"), Arc::default());
        let said = Arc::default();
        let stderr = read_all(child.stderr.take().expect("piped"), Arc::clone(&said));
        Self { child, stdout, stderr, said, peak }
    }

    /// Waits until standard error contains a text. Fails if the program ends before.
    pub fn wait_for_stderr(&self, text: &str) {
        loop {
            let ended = self.ends_within(Duration::from_millis(5));
            let said = self.said.lock().expect("no panic").clone();
            let said = String::from_utf8_lossy(&said);
            if said.contains(text) {
                return;
            }
            assert!(!ended, "the program ended without saying {text:?}: {said}");
        }
    }

    /// The program's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Takes the program's standard input, which must be piped.
    pub fn input(&mut self) -> ChildStdin {
        self.child.stdin.take().expect("its input is piped and was not taken")
    }

    /// Waits until the program has ended, at most for `time`. False after the timeout.
    pub fn ends_within(&self, time: Duration) -> bool {
        let pid = Pid::from_child(&self.child);
        let end = pidfd_open(pid, PidfdFlags::empty()).expect("the child was not reaped");
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).expect("minutes");
            match poll(&mut [PollFd::new(&end, PollFlags::IN)], Some(&left)) {
                Err(Errno::INTR) => {}
                done => return done.expect("a descriptor can be polled") > 0,
            }
        }
    }

    /// Waits until the program has ended and all of its descendants have closed the output.
    ///
    /// # Panics
    /// If the program still runs after [`TIMEOUT`]. It is killed first, so that the tests can end.
    pub fn finish(mut self) -> Outcome {
        let ended = self.ends_within(TIMEOUT);
        if !ended {
            self.child.kill().expect("the child was not reaped");
        }
        let status = self.child.wait().expect("the child was not reaped").into_raw();
        assert!(ended, "the program did not end within {TIMEOUT:?}");
        let stdout = self.stdout.join().expect("no panic");
        let stderr = self.stderr.join().expect("no panic");
        let resident_bytes = self.peak.join().expect("no panic");
        let code = if libc::WIFEXITED(status) {
            libc::WEXITSTATUS(status)
        } else {
            128 + libc::WTERMSIG(status)
        };
        let stderr = String::from_utf8_lossy(&stderr).into_owned();
        Outcome { stdout, stderr, code, resident_bytes, summary: Summary::default() }
    }
}

/// Time after which a program is considered to hang.
pub const TIMEOUT: Duration = Duration::from_secs(480);

fn read_all(
    mut from: impl Read + Send + 'static,
    so_far: Arc<Mutex<Vec<u8>>>,
) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut part = [0; 4096];
        loop {
            let count = from.read(&mut part).expect("the pipe is readable");
            let mut all = so_far.lock().expect("no panic");
            if count == 0 {
                return std::mem::take(&mut *all);
            }
            all.extend(&part[..count]);
        }
    })
}

/// VmHWM of a process, sampled every few milliseconds until the process is a zombie. The kernel
/// maintains the maximum, so only growth in the last milliseconds is missed. `ru_maxrss` is not
/// usable, because it includes this test's own memory from before the exec.
fn resident_peak(status_file: &str) -> u64 {
    let mut peak = 0;
    while let Ok(status) = std::fs::read_to_string(status_file) {
        let Some(line) = status.lines().find_map(|line| line.strip_prefix("VmHWM:")) else { break };
        let kib = line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number of KiB");
        peak = peak.max(kib * 1024);
        std::thread::sleep(std::time::Duration::from_millis(3));
    }
    peak
}

/// Asserts that the paged run has the output of the plain run and stayed within its limit.
pub fn assert_same(plain: &Outcome, paged: &Outcome, local: u64) {
    assert_same_within(plain, paged, local + pager::CONSTANT_BYTES);
}

/// Describes the first line in which two outputs differ.
fn first_difference(plain: &[u8], paged: &[u8]) -> String {
    let line =
        plain.iter().zip(paged).take_while(|(a, b)| a == b).filter(|(a, _)| **a == b'\n').count();
    let show = |output: &[u8]| {
        let line = output.split(|byte| *byte == b'\n').nth(line).unwrap_or_default();
        String::from_utf8_lossy(line).into_owned()
    };
    format!(" in line {}: plain {:?}, paged {:?}", line + 1, show(plain), show(paged))
}

/// Asserts that the paged run has the output of the plain run and never had more than `limit` bytes
/// resident.
pub fn assert_same_within(plain: &Outcome, paged: &Outcome, limit: u64) {
    assert_eq!(paged.code, plain.code, "stderr: {}", paged.stderr);
    assert!(
        paged.stdout == plain.stdout,
        "the output differs{}; stderr: {}",
        first_difference(&plain.stdout, &paged.stdout),
        paged.stderr
    );
    assert!(paged.resident_bytes > 0, "no resident memory was measured: {}", paged.stderr);
    assert!(
        paged.resident_bytes <= limit,
        "{} KiB resident, limit {} KiB ({} KiB without the pager)",
        paged.resident_bytes >> 10,
        limit >> 10,
        plain.resident_bytes >> 10,
    );
}
