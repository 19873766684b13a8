//! `granary assist`: the assist of a run; `granary run --assist process` starts it.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use pager::assist::server::Server;

use crate::assist::Ready;
use crate::file_descriptors;
use crate::options::Output;

/// Move pages for the processes of one run of granary run
///
/// Prints one JSON object when the processes can connect. Runs until it is killed.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Assist {
    /// Path of the socket at which the processes connect
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,

    #[command(flatten)]
    output: Output,
}

const EXAMPLES: &str = "\
Examples:
  granary assist --socket /tmp/granary-run-1-0/assist.sock";

impl Assist {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        file_descriptors::raise_limit();
        let at = || format!("listen at {}", self.socket.display());
        let mut server = Server::listen(&self.socket).with_context(at)?;
        self.output.report().print(serde_json::to_string(&Ready { ready: true })?)?;
        server.serve()
    }
}
