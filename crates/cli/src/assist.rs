//! The assist of a run, in a separate process.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, bail};
use pager::assist::link::socket_path;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use serde::{Deserialize, Serialize};

use crate::child::ChildProcess;

/// Start-up message of `granary assist`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Ready {
    pub ready: bool,
}

/// `granary assist` as a child process of this command. The assist ends when this value is dropped,
/// or when this process ends for any reason.
pub struct AssistProcess {
    child: ChildProcess,
    /// The end of the assist is no longer news.
    is_over: Arc<AtomicBool>,
    /// The assist has ended before its time.
    is_gone: Arc<AtomicBool>,
    watch: Option<JoinHandle<()>>,
}

impl AssistProcess {
    /// Starts an assist for the processes of a run, and waits until they can connect.
    pub fn start(run_directory: &Path) -> anyhow::Result<Self> {
        Self::spawn(run_directory).context("start the assist (--assist process)")
    }

    fn spawn(run_directory: &Path) -> anyhow::Result<Self> {
        let granary = std::env::current_exe().context("find the path of this program")?;
        let mut command = Command::new(granary);
        command.arg("assist").arg("--socket").arg(socket_path(run_directory));
        let mut child = ChildProcess::spawn_stateless(&mut command)?;
        if !child.read_line::<Ready>()?.ready {
            bail!("it is not ready; use the same version of granary for all processes");
        }
        let (is_over, is_gone) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let (pid, over, gone) = (child.pid(), is_over.clone(), is_gone.clone());
        let watch = move || {
            let cause = wait_without_reaping(pid);
            if !over.load(Ordering::Acquire) {
                gone.store(true, Ordering::Release);
                eprintln!("granary: the assist is gone ({cause}); the program goes on without it");
            }
        };
        let watch = thread::Builder::new().name("granary-assist".into()).spawn(watch);
        let watch = Some(watch.context("start a thread")?);
        Ok(Self { child, is_over, is_gone, watch })
    }

    /// True if the assist has ended before this value is dropped.
    pub fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    /// CPU time of the assist, also if it has ended.
    pub fn cpu_time(&self) -> Duration {
        let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
        let pid = self.child.pid().as_raw_nonzero().get();
        // SAFETY: both pointers are to live variables of the types that the calls write.
        let done = unsafe {
            libc::clock_getcpuclockid(pid, &mut clock) == 0
                && libc::clock_gettime(clock, &mut time) == 0
        };
        // The process is not reaped before this value is dropped, so its clock exists.
        assert!(done, "an assist that is not reaped has a CPU clock");
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }
}

/// Waits for the end of a child, which stays a zombie. Returns the cause of its end.
fn wait_without_reaping(pid: Pid) -> String {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    loop {
        match waitid(WaitId::Pid(pid), options) {
            Ok(Some(status)) => {
                return match (status.terminating_signal(), status.exit_status()) {
                    (Some(signal), _) => format!("killed by signal {signal}"),
                    (None, code) => format!("exit status {}", code.unwrap_or(0)),
                };
            }
            Ok(None) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return error.to_string(),
        }
    }
}

impl Drop for AssistProcess {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        // No effect on an assist that has ended: it is reaped after this function.
        let _ = kill_process(self.child.pid(), Signal::KILL);
        if let Some(watch) = self.watch.take() {
            // The thread only waits and prints.
            let _ = watch.join();
        }
    }
}
