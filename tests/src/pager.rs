//! Runs real programs, plainly and with the preload library, and measures what they had resident.
//! [`crate::run`] runs them with the whole command.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use crate::built::library;
use pager::stats::Summary;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// How a program ended.
#[derive(Debug)]
pub struct Outcome {
    /// What it wrote.
    pub stdout: Vec<u8>,
    /// What it said.
    pub stderr: String,
    /// Exit code, or 128 and the signal's number.
    pub code: i32,
    /// Most that it had resident (VmHWM), in bytes.
    pub resident_bytes: u64,
    /// What the pager counted; nothing for a plain run, and for the command, which reports itself.
    pub summary: Summary,
}

/// A directory of a test's own, removed with its value.
pub struct Scratch(pub PathBuf);

/// A header that C programs of the tests include: they check themselves with it.
const CHECK: &str = include_str!("../tests/pager_programs/check.h");

impl Scratch {
    /// Makes one.
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("granary-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("the temporary directory is writable");
        Self(path)
    }

    /// Compiles a C program into it; returns its path.
    pub fn compile(&self, name: &str, source: &str) -> PathBuf {
        self.compile_with(name, source, &[])
    }

    /// The same, with these options too. They stand behind the file: the linker looks libraries up
    /// in the order of the command.
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

/// Runs `program` plainly.
pub fn plain(program: &str, arguments: &[&str]) -> Outcome {
    run(Command::new(program).args(arguments))
}

/// Runs `program` with `local` bytes of paged memory and the pool that `pool` names.
pub fn paged(local: u64, pool: &str, program: &str, arguments: &[&str]) -> Outcome {
    static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let directory = Scratch::new(&format!("run-{count}"));
    let mut config = pager::Config::new(local, pool);
    config.run_directory = Some(directory.0.clone());
    let mut command = Command::new(program);
    command.args(arguments).envs(config.to_environment()).env("LD_PRELOAD", library());
    as_asked(&mut command);
    let mut outcome = run(&mut command);
    outcome.summary = Summary::read(&directory.0).expect("the counters are readable");
    outcome
}

/// True if the kernel reports forks to the pager of a paged program: as root, unless
/// `GRANARY_TEST_UNPRIVILEGED` is set.
pub fn forks_are_reported() -> bool {
    rustix::process::geteuid().is_root() && std::env::var_os("GRANARY_TEST_UNPRIVILEGED").is_none()
}

/// With `GRANARY_TEST_UNPRIVILEGED` set the kernel reports no forks to the program that `command` starts: the
/// program lacks the capability for that. Only root has that capability to lose.
pub fn as_asked(command: &mut Command) {
    if forks_are_reported() || !rustix::process::geteuid().is_root() {
        return;
    }
    const CAP_SYS_PTRACE: i32 = 19;
    // SAFETY: one system call in the new process.
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

/// A program that runs, whose output is being read.
pub struct Running {
    child: Child,
    stdout: JoinHandle<Vec<u8>>,
    stderr: JoinHandle<Vec<u8>>,
    peak: JoinHandle<u64>,
}

impl Running {
    /// Starts it. What is its standard input is the command's business.
    pub fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let status_file = format!("/proc/{}/status", child.id());
        let peak = std::thread::spawn(move || resident_peak(&status_file));
        let stdout = read_all(child.stdout.take().expect("piped"));
        let stderr = read_all(child.stderr.take().expect("piped"));
        Self { child, stdout, stderr, peak }
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where to write what it reads, once, if that was piped.
    pub fn input(&mut self) -> ChildStdin {
        self.child.stdin.take().expect("its input is piped and was not taken")
    }

    /// Waits for its end, at most for this time. True if it has ended.
    pub fn ends_within(&self, time: Duration) -> bool {
        let pid = Pid::from_child(&self.child);
        let end = pidfd_open(pid, PidfdFlags::empty()).expect("it was not waited for yet");
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

    /// Waits until it has ended and all that it started has closed its output.
    ///
    /// # Panics
    /// If it still runs after [`PATIENCE`]: then it is ended, so that the tests end too.
    pub fn finish(mut self) -> Outcome {
        let ended = self.ends_within(PATIENCE);
        if !ended {
            self.child.kill().expect("the child is ours");
        }
        let status = self.child.wait().expect("the child is ours").into_raw();
        assert!(ended, "it ran on for {PATIENCE:?}");
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

/// After how long a program is taken to hang.
pub const PATIENCE: Duration = Duration::from_secs(480);

fn read_all(mut from: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut all = Vec::new();
        from.read_to_end(&mut all).expect("the pipe is readable");
        all
    })
}

/// VmHWM of a process, read every few milliseconds until it has none (a zombie). The kernel keeps the
/// maximum, so only what was added in the last milliseconds is missed. (`ru_maxrss` would count the
/// memory of this test too, from before the exec.)
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

/// Asserts that the paged run gave what the plain one gave, and stayed within its bound.
pub fn assert_same(plain: &Outcome, paged: &Outcome, local: u64) {
    assert_same_within(plain, paged, local + pager::CONSTANT_BYTES);
}

/// The first line in which two outputs differ.
fn first_difference(plain: &[u8], paged: &[u8]) -> String {
    let line =
        plain.iter().zip(paged).take_while(|(a, b)| a == b).filter(|(a, _)| **a == b'\n').count();
    let show = |output: &[u8]| {
        let line = output.split(|byte| *byte == b'\n').nth(line).unwrap_or_default();
        String::from_utf8_lossy(line).into_owned()
    };
    format!(" in line {}: plain {:?}, paged {:?}", line + 1, show(plain), show(paged))
}

/// Asserts that the paged run gave what the plain one gave, and never had more than `bound` bytes
/// resident.
pub fn assert_same_within(plain: &Outcome, paged: &Outcome, bound: u64) {
    assert_eq!(paged.code, plain.code, "stderr: {}", paged.stderr);
    assert!(
        paged.stdout == plain.stdout,
        "the output differs{}; stderr: {}",
        first_difference(&plain.stdout, &paged.stdout),
        paged.stderr
    );
    assert!(paged.resident_bytes > 0, "nothing was measured; stderr: {}", paged.stderr);
    assert!(
        paged.resident_bytes <= bound,
        "{} KiB resident, of {} allowed ({} plainly)",
        paged.resident_bytes >> 10,
        bound >> 10,
        plain.resident_bytes >> 10,
    );
}
