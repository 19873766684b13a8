//! `granary nic`: a NIC of this host for one user's programs; started by `granary run`.

use std::net::{IpAddr, UdpSocket};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use pool::{LocalNic, NicService};

use crate::nic::Ready;
use crate::options::Output;
use crate::signals::Signals;

/// Serve a NIC to this user's programs, with a way to other hosts
///
/// Prints, as JSON, the socket at which processes attach and the UDP port of its RoCEv2. Ends on SIGINT or SIGTERM.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Nic {
    /// The address of this host that packets leave from
    #[arg(long, value_name = "ADDRESS")]
    local: IpAddr,

    #[command(flatten)]
    output: Output,
}

/// Another signal than one to stop may come between.
const LOOK: Duration = Duration::from_secs(60);

const EXAMPLES: &str = "\
Examples:
  granary nic --local 10.0.0.1";

impl Nic {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let mut report = self.output.report();
        // Before the NIC has threads, so that none of them takes a signal.
        let signals = Signals::to_stop().context("wait for signals")?;
        let open = || format!("open a UDP socket at {}", self.local);
        let wire = UdpSocket::bind((self.local, 0)).with_context(open)?;
        let port = wire.local_addr().with_context(open)?.port();
        let service = NicService::start(wire)?;
        let nic = LocalNic { socket: service.path().to_owned(), port };
        report.print(serde_json::to_string(&Ready::new(&nic))?)?;
        while !signals.wait(LOOK).context("wait for signals")? {}
        drop(service);
        Ok(ExitCode::SUCCESS)
    }
}
