//! A memory node and its clients as separate processes.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

pub use crate::built::granary;
use crate::hosts::Hosts;
use crate::needs::skip;

/// A running `granary serve`; dropping the value ends the process.
pub struct MemoryNode {
    child: Child,
    directory: PathBuf,
    /// Path of the Unix socket for clients on the same host.
    pub socket: PathBuf,
    /// The start-up message.
    pub ready: Value,
}

/// The token of memory nodes that serve other hosts.
const TOKEN: &str = "a token of twenty-odd bytes\n";

impl MemoryNode {
    /// Starts a memory node with additional arguments and waits until it is ready.
    pub fn start(name: &str, arguments: &[&str]) -> Result<Self> {
        let directory = std::env::temp_dir().join(format!("granary-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory)?;
        let socket = directory.join("pool.sock");
        let (child, ready) = serve(&socket, arguments)?;
        Ok(Self { child, directory, socket, ready })
    }

    /// Starts a memory node in a PID namespace of its own, in which outside processes have no
    /// process id. `None` if this user may not create PID namespaces; then the test is skipped.
    pub fn start_contained(name: &str, arguments: &[&str]) -> Result<Option<Self>> {
        if !rustix::process::geteuid().is_root() {
            skip("only root can create PID namespaces");
            return Ok(None);
        }
        let directory = std::env::temp_dir().join(format!("granary-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory)?;
        let socket = directory.join("pool.sock");
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child"]).arg(granary());
        command.args(["serve", "--json", "--socket"]).arg(&socket).args(arguments);
        let (child, ready) = start_and_wait_ready(&mut command)?;
        Ok(Some(Self { child, directory, socket, ready }))
    }

    /// Starts one on host 0 that serves other hosts too, at the address and port `listen`.
    pub fn start_on(hosts: &Hosts, name: &str, listen: &str, arguments: &[&str]) -> Result<Self> {
        let directory = std::env::temp_dir().join(format!("granary-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory)?;
        let token = directory.join("token");
        std::fs::write(&token, TOKEN)?;
        std::fs::set_permissions(&token, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        let mut command = hosts.command(0, granary());
        command.args(["serve", "--json", "--listen", listen, "--token-file"]).arg(&token);
        let socket = directory.join("pool.sock");
        let command = command.arg("--socket").arg(&socket).args(arguments);
        let (child, ready) = start_and_wait_ready(command)?;
        Ok(Self { child, directory, socket, ready })
    }

    /// Path of the token file for clients on other hosts.
    pub fn token(&self) -> PathBuf {
        self.directory.join("token")
    }

    /// The node's `--pool` address on host 1, if host 0 has the address `address`.
    pub fn pool_at(&self, address: &str) -> String {
        let host = if address.contains(':') { format!("[{address}]") } else { address.into() };
        format!("roce://{host};token={}", self.token().display())
    }

    /// Starts the node again at the same path after it was killed.
    pub fn restart(&mut self, arguments: &[&str]) -> Result<()> {
        (self.child, self.ready) = serve(&self.socket, arguments)?;
        Ok(())
    }

    /// The node's process id.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Directory for files of the test.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Kills the node (SIGKILL).
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// The output of `granary status --json`.
    pub fn status(&self) -> Result<Value> {
        let pool = format!("shm:{}", self.socket.display());
        let out = Command::new(granary()).args(["status", "--json", "--pool", &pool]).output()?;
        ensure!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        Ok(serde_json::from_slice(&out.stdout)?)
    }

    /// Creates the ledger of chunk owners for `chunks` chunks: a file of zeros.
    pub fn ledger(&self, chunks: u64) -> Result<PathBuf> {
        let path = self.directory.join("ledger");
        std::fs::File::create(&path)?.set_len((chunks * 4).next_multiple_of(4096))?;
        Ok(path)
    }
}

/// Starts `granary serve` and waits until it is ready.
fn serve(socket: &Path, arguments: &[&str]) -> Result<(Child, Value)> {
    let mut command = Command::new(granary());
    command.args(["serve", "--json", "--socket"]).arg(socket).args(arguments);
    start_and_wait_ready(&mut command)
}

/// Starts a command of granary that prints a JSON line when it is ready, and waits for the line.
pub fn start_and_wait_ready(command: &mut Command) -> Result<(Child, Value)> {
    let mut child = command.stdout(Stdio::piped()).spawn().context("starting granary")?;
    let mut ready = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut ready)?;
    ensure!(!ready.is_empty(), "granary ended before it was ready");
    Ok((child, serde_json::from_str(&ready).context("parsing the start-up message")?))
}

impl Drop for MemoryNode {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// A running `pool-client`.
pub struct Client {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Client {
    /// Starts the built `pool-client` and waits until it is connected.
    pub fn start(program: &str, node: &MemoryNode, arguments: &[&str]) -> Result<Self> {
        let mut child = Command::new(program)
            .arg("--socket")
            .arg(&node.socket)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take();
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        let mut ready = String::new();
        output.read_line(&mut ready)?;
        ensure!(ready == "ready\n", "a client did not connect");
        Ok(Self { child, input, output })
    }

    /// Starts the client's work.
    pub fn go(&mut self) -> Result<()> {
        Ok(self.input.as_mut().expect("open until leave").write_all(b"go\n")?)
    }

    /// Waits until the client has finished its work and returns its report.
    pub fn report(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        ensure!(!line.is_empty(), "a client ended early: see its error above");
        Ok(serde_json::from_str(&line)?)
    }

    /// Lets the client disconnect and checks that it exits with success.
    pub fn leave(mut self) -> Result<()> {
        self.input.take();
        let status = self.child.wait()?;
        ensure!(status.success(), "a client ended with {status}");
        Ok(())
    }

    /// Kills the client (SIGKILL).
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

/// True in `make test-full`, which runs longer checks.
pub fn full() -> bool {
    std::env::var_os("GRANARY_TEST_FULL").is_some()
}
