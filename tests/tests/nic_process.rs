//! `granary nic` when it runs out of file descriptors.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use granary_tests::node::granary;
use granary_tests::thread::Thread;
use rnic::port::shm::Attached;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::Value;

/// The process's limit of file descriptors.
const DESCRIPTORS: usize = 64;

struct NicProcess {
    child: Child,
    socket: PathBuf,
}

impl NicProcess {
    fn start() -> Result<Self> {
        let limited = format!("ulimit -n {DESCRIPTORS}; exec \"$0\" nic --local 127.0.0.1");
        let mut command = Command::new("sh");
        command.args(["-c", &limited]).arg(granary()).stdout(Stdio::piped());
        let mut child = command.spawn().context("starting granary nic")?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line)?;
        let ready: Value = serde_json::from_str(&line).context("parsing granary nic's output")?;
        let socket = ready["socket"].as_str().context("a socket")?.into();
        Ok(Self { child, socket })
    }

    fn descriptors(&self) -> Result<usize> {
        Ok(std::fs::read_dir(format!("/proc/{}/fd", self.child.id()))?.count())
    }
}

impl Drop for NicProcess {
    fn drop(&mut self) {
        // SIGTERM and not SIGKILL, so that the process removes its socket.
        // SAFETY: kill takes no pointers; the child was not reaped, so its process id is valid.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGTERM) };
        let _ = self.child.wait();
    }
}

fn connect(path: &Path) -> Result<rustix::fd::OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let fd = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
    Ok(fd)
}

#[test]
fn nic_without_descriptors_sleeps_and_recovers() -> Result<()> {
    let nic = NicProcess::start()?;
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut open = Vec::new();
    // Connections for all descriptors, and some more that stay in the backlog.
    for _ in 0..DESCRIPTORS + 16 {
        open.push(connect(&nic.socket)?);
    }
    while nic.descriptors()? < DESCRIPTORS {
        ensure!(Instant::now() < deadline, "only {} descriptors are open", nic.descriptors()?);
        std::thread::sleep(Duration::from_millis(5));
    }
    let accepting = Thread::find(nic.child.id() as i32, "granary-control")?;
    let (before, start) = (accepting.cpu_ns()?, Instant::now());
    std::thread::sleep(Duration::from_secs(1));
    let share = (accepting.cpu_ns()? - before) as f64 / start.elapsed().as_nanos() as f64;
    ensure!(share < 0.2, "the accepting thread uses {share:.2} of a CPU");
    // The process gets no event when descriptors become free, so it must retry after a time.
    drop(open);
    let attached = loop {
        match Attached::connect(&nic.socket) {
            Ok(attached) => break attached,
            Err(e) => ensure!(Instant::now() < deadline, "the NIC accepts no connection: {e}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    drop(attached);
    Ok(())
}
