//! Log lines of `granary serve --log`.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use granary_tests::node::granary;
use granary_tests::pager::Scratch;
use pool::{Error, Options, Pool};
use rnic::port::shm::socket::{receive, send};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

const TIMEOUT: Duration = Duration::from_secs(60);

/// A memory node whose log goes to a file.
struct Node {
    child: Child,
    scratch: Scratch,
}

impl Node {
    fn start(name: &str, log: &[&str]) -> Result<Self> {
        let scratch = Scratch::new(name);
        let mut command = Command::new(granary());
        command.args(["serve", "--json", "--memory", "4MiB", "--chunk", "16KiB"]);
        command.args(["--budget-requests-per-s", "100", "--budget-interval-ms", "10"]).args(log);
        command.arg("--socket").arg(scratch.0.join("pool.sock"));
        command.env_remove("GRANARY_LOG").stdout(Stdio::piped());
        let mut child = command.stderr(File::create(scratch.0.join("log"))?).spawn()?;
        let output = child.stdout.take().context("piped")?;
        BufReader::new(output).read_line(&mut String::new())?;
        Ok(Self { child, scratch })
    }

    fn socket(&self) -> PathBuf {
        self.scratch.0.join("pool.sock")
    }

    fn lines(&self) -> Result<Vec<String>> {
        let log = std::fs::read_to_string(self.scratch.0.join("log"))?;
        Ok(log.lines().map(str::to_owned).collect())
    }

    /// Waits for a line that contains all `parts`.
    fn wait_for(&self, parts: &[&str]) -> Result<String> {
        let begin = Instant::now();
        loop {
            let lines = self.lines()?;
            let found = lines.iter().find(|line| parts.iter().all(|part| line.contains(part)));
            if let Some(line) = found {
                return Ok(line.clone());
            }
            ensure!(begin.elapsed() < TIMEOUT, "no line has {parts:?}:\n{}", lines.join("\n"));
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Opens a connection for a service that does not exist.
    fn ask_for_unknown_service(&self) -> Result<()> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(self.socket())?)?;
        send(&socket, br#"{"service":"no\nsuch"}"#, &[])?;
        ensure!(receive(&socket)?.is_some(), "no answer");
        Ok(())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn log_names_admitted_refused_and_departed_clients() -> Result<()> {
    let node = Node::start("log-info", &["--log", "info"])?;
    node.wait_for(&[" INFO ", "memory node starts", "budget_requests_per_s=100"])?;
    let peer = format!("peer=process:{}", std::process::id());
    let pool = Pool::connect(node.socket(), Options { groups: Some(1), ..Options::default() })?;
    node.wait_for(&[" INFO ", "client admitted", "client=1", &peer])?;
    let begin = Instant::now();
    let error = loop {
        if let Err(error) = pool.allocate_blocking().and_then(|grant| pool.free_blocking(grant)) {
            break error;
        }
        ensure!(begin.elapsed() < TIMEOUT, "the budget has no effect");
    };
    let Error::OverBudget { .. } = error else { bail!("{error}") };
    node.wait_for(&[" WARN ", "client suspended", "client=1", "its budget is 100"])?;
    node.wait_for(&[" WARN ", "request refused", "client=1", &peer, "its budget is 100"])?;
    node.ask_for_unknown_service()?;
    // The text of the peer cannot begin a line of its own.
    node.wait_for(&[" WARN ", "request refused", &peer, r"there is no service `no\nsuch`"])?;
    drop(pool);
    node.wait_for(&[" INFO ", "client departed", "client=1", &peer])?;
    node.wait_for(&[" INFO ", "client reclaimed", "client=1"])?;
    for line in node.lines()? {
        ensure!(line.starts_with("20") && line.contains("Z "), "not a log line: {line:?}");
    }
    Ok(())
}

#[test]
fn default_level_has_refusals_only_and_off_has_nothing() -> Result<()> {
    let node = Node::start("log-default", &[])?;
    let pool = Pool::connect(node.socket(), Options { groups: Some(1), ..Options::default() })?;
    node.ask_for_unknown_service()?;
    node.wait_for(&["request refused"])?;
    let lines = node.lines()?;
    ensure!(lines.len() == 1, "more than the refusal: {lines:?}");
    drop(pool);
    let node = Node::start("log-off", &["--log", "off"])?;
    node.ask_for_unknown_service()?;
    ensure!(node.lines()?.is_empty(), "{:?}", node.lines()?);
    Ok(())
}

#[test]
fn refusals_in_a_flood_are_left_out() -> Result<()> {
    let node = Node::start("log-flood", &[])?;
    let begin = Instant::now();
    for _ in 0..200 {
        node.ask_for_unknown_service()?;
    }
    let allowed = 32 + begin.elapsed().as_secs() as usize + 1;
    let lines = node.lines()?.len();
    ensure!(lines <= allowed, "{lines} lines, {allowed} allowed");
    Ok(())
}
