//! `granary nic`: a software NIC for one user's programs; `granary run` starts it.

use std::net::{IpAddr, UdpSocket};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use pool::{LocalNic, NicService};

use crate::log::{Log, LogLevel};
use crate::nic::Ready;
use crate::options::Output;
use crate::signals::Signals;

/// Serve a software NIC that connects this user's programs to other hosts
///
/// Prints one JSON object: the socket at which processes attach, and the UDP port for RoCEv2. Stops
/// on SIGINT or SIGTERM.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Nic {
    /// Source address of the packets: an address of this host
    #[arg(long, value_name = "ADDRESS")]
    local: IpAddr,

    #[command(flatten)]
    log: Log,

    #[command(flatten)]
    output: Output,
}

/// Timeout of one wait for a signal; the command then waits again.
const SIGNAL_TIMEOUT: Duration = Duration::from_secs(60);

const EXAMPLES: &str = "\
Examples:
  granary nic --local 10.0.0.1";

impl Nic {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.log.start(LogLevel::Warn);
        let mut report = self.output.report();
        // Block the signals before the NIC starts threads, so that no NIC thread receives one.
        let signals = Signals::to_stop().context("wait for signals")?;
        let open = || format!("open a UDP socket at {}", self.local);
        let socket = UdpSocket::bind((self.local, 0)).with_context(open)?;
        let port = socket.local_addr().with_context(open)?.port();
        let (service, scheduling) = NicService::start_urgent(socket)?;
        tracing::info!(socket = %service.path().display(), port, %scheduling, "NIC is ready");
        let nic = LocalNic { socket: service.path().to_owned(), port };
        report.print(serde_json::to_string(&Ready::new(&nic))?)?;
        while !signals.wait(SIGNAL_TIMEOUT).context("wait for signals")? {}
        drop(service);
        Ok(ExitCode::SUCCESS)
    }
}
