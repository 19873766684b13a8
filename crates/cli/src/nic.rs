//! A NIC in a process of its own, for the programs that one command runs.

use std::io::{BufRead, BufReader};
use std::net::UdpSocket;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail};
use pool::{Address, LocalNic, Remote};
use serde::{Deserialize, Serialize};

use crate::child;

/// What the process says once it serves.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ready {
    socket: PathBuf,
    port: u16,
}

impl Ready {
    /// Of a NIC that serves.
    pub fn new(nic: &LocalNic) -> Self {
        Self { socket: nic.socket.clone(), port: nic.port }
    }
}

/// `granary nic` for this command alone. Ends when it is dropped, or when this process ends, however that
/// happens.
pub struct NicProcess {
    child: Child,
    address: Address,
}

impl NicProcess {
    /// Starts it for programs that use the memory node `remote`, and waits until it serves.
    pub fn start(remote: &Remote) -> anyhow::Result<Self> {
        Self::spawn(remote).context("start a NIC for the program")
    }

    fn spawn(remote: &Remote) -> anyhow::Result<Self> {
        let granary = std::env::current_exe().context("find this program's own file")?;
        let mut command = Command::new(granary);
        command.args(["nic", "--local", &local_address(remote)?]);
        // A group of its own: Ctrl-C at the terminal is for the program that uses it.
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = child::end_with_us(&mut command).spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("its output is a pipe")).read_line(&mut line)?;
        if line.is_empty() {
            bail!("it ended with {}; what it said stands above", child.wait()?);
        }
        let Ready { socket, port } = serde_json::from_str(&line)
            .with_context(|| format!("it said {line:?}; use one version of granary"))?;
        let nic = Some(LocalNic { socket, port });
        Ok(Self { child, address: Address::Roce(Remote { nic, ..remote.clone() }) })
    }

    /// The memory node, over this NIC.
    pub fn address(&self) -> &Address {
        &self.address
    }
}

/// The address of this host from which packets go to a memory node.
fn local_address(remote: &Remote) -> anyhow::Result<String> {
    let mut last = None;
    for to in remote.to.resolve()? {
        let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        // Nothing is sent: the system only chooses the way.
        let chosen = UdpSocket::bind(any).and_then(|socket| {
            socket.connect(to)?;
            socket.local_addr()
        });
        match chosen {
            Ok(local) => return Ok(local.ip().to_string()),
            Err(e) => last = Some(e),
        }
    }
    bail!("no way to {}: {}", remote.to, last.map_or("no address".into(), |e| e.to_string()))
}

impl Drop for NicProcess {
    fn drop(&mut self) {
        // A process that has ended already needs no signal; its number is ours until `wait`.
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.child.wait();
    }
}
