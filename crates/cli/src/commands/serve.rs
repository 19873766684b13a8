//! `granary serve`: a memory node.

use std::path::PathBuf;
use std::process::ExitCode;

use super::not_in_this_build;
use crate::UsageError;
use crate::options::Donation;

/// Bytes of the path in a Unix socket's address, without the final zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Serve memory: be a memory node
///
/// Donates memory, cut into chunks, to every process that attaches to its socket, and says
/// what it serves once it does. Its software NIC runs in a thread of its own; the control
/// thread takes no part in allocations, accesses and frees. Ends on SIGINT or SIGTERM.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Serve {
    #[command(flatten)]
    donation: Donation,

    /// Socket at which clients attach [default: granary.sock in $XDG_RUNTIME_DIR or /tmp]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  granary serve --memory 4GiB
  granary serve --memory 256MiB --chunk 4KiB --socket /run/granary.sock
  granary run --pool shm:/run/granary.sock --local 64MiB -- python3 train.py";

impl Serve {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.donation.check("serve")?;
        let socket = self.socket();
        if socket.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
            let text = format!(
                "--socket {}: longer than the {SOCKET_PATH_BYTES_MAX} bytes of a socket's path",
                socket.display()
            );
            return Err(UsageError(text, "serve").into());
        }
        Err(not_in_this_build(&format!("serve at {}", socket.display()), "the memory node"))
    }

    /// The socket's path; the runtime directory belongs to this user, and is preferred.
    fn socket(&self) -> PathBuf {
        let directory = || std::env::var_os("XDG_RUNTIME_DIR").map_or("/tmp".into(), PathBuf::from);
        self.socket.clone().unwrap_or_else(|| directory().join("granary.sock"))
    }
}
