//! `granary assist`: the assist of a run; `granary run --assist process` starts it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use pager::assist::server::{SET_UP, Server};

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

    /// Milliseconds after which the session of a process ends that has not completed its set-up.
    /// The process goes on without the assist
    #[arg(long, value_name = "MS", default_value_t = SET_UP.as_millis() as u32)]
    set_up_ms: u32,

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
        let set_up = Duration::from_millis(self.set_up_ms.into());
        let mut server = Server::listen(&self.socket, set_up).with_context(at)?;
        self.output.report().print(serde_json::to_string(&Ready { ready: true })?)?;
        server.serve()
    }
}
