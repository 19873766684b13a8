//! A software NIC in a separate process, for the programs that one command runs.

use std::net::UdpSocket;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, bail};
use pool::{Address, LocalNic, Remote};
use serde::{Deserialize, Serialize};

use crate::child::ChildProcess;
use crate::log::LogLevel;

/// Start-up message of `granary nic`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ready {
    socket: PathBuf,
    port: u16,
}

impl Ready {
    /// The message of a NIC that is ready.
    pub fn new(nic: &LocalNic) -> Self {
        Self { socket: nic.socket.clone(), port: nic.port }
    }
}

/// `granary nic` as a child process of this command. The NIC ends when this value is dropped, or
/// when this process ends for any reason.
pub struct NicProcess {
    _child: ChildProcess,
    address: Address,
}

impl NicProcess {
    /// Starts a NIC for programs that use the memory node `remote`, and waits until it is ready.
    pub fn start(remote: &Remote, log: LogLevel) -> anyhow::Result<Self> {
        Self::spawn(remote, log).context("start a NIC for the program")
    }

    fn spawn(remote: &Remote, log: LogLevel) -> anyhow::Result<Self> {
        let granary = std::env::current_exe().context("find the path of this program")?;
        let mut command = Command::new(granary);
        command.args(["nic", "--local", &local_address(remote)?, "--log", log.name()]);
        let mut child = ChildProcess::spawn_server(&mut command)?;
        let Ready { socket, port } = child.read_line()?;
        let nic = Some(LocalNic { socket, port });
        Ok(Self { _child: child, address: Address::Roce(Remote { nic, ..remote.clone() }) })
    }

    /// Address of the memory node, reached over this NIC.
    pub fn address(&self) -> &Address {
        &self.address
    }
}

/// The source address that the kernel uses for packets to a memory node.
fn local_address(remote: &Remote) -> anyhow::Result<String> {
    let mut last = None;
    for to in remote.to.resolve()? {
        let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        // Connecting a UDP socket sends nothing; the kernel only selects the route.
        let chosen = UdpSocket::bind(any).and_then(|socket| {
            socket.connect(to)?;
            socket.local_addr()
        });
        match chosen {
            Ok(local) => return Ok(local.ip().to_string()),
            Err(e) => last = Some(e),
        }
    }
    let why = last.map_or("the name has no address".into(), |e| e.to_string());
    bail!("find a route to {}: {why}", remote.to)
}
