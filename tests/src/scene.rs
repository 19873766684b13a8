//! Set-up of an attack test: a memory node, victims that work normally, and attackers, each in a
//! process of its own.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pool::protocol::{Reply, Request};
use rustix::process::Signal;
use serde_json::Value;

use crate::control::Control;
use crate::hosts::{Hosts, V4};
use crate::node::{MemoryNode, granary};
use crate::signals;

/// Time limit of an attack.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time after the last client's end in which all chunks must become free.
const RECLAIM_TIMEOUT: Duration = Duration::from_secs(20);
/// Arguments of a new client. The pauses keep the client within every budget of a memory node, even
/// if the test is not scheduled for seconds between the commands "go" and "stop".
const NEW_CLIENT: &[&str] = &["--hold", "2", "--pause-us", "2000", "--allocate-every", "5"];

/// Paths of the built programs.
#[derive(Clone, Copy)]
pub struct Programs {
    /// The attacker.
    pub hostile: &'static str,
    /// The attacked compute node.
    pub victim: &'static str,
}

/// A memory node with victims.
pub struct Scene {
    /// The memory node.
    pub node: MemoryNode,
    /// Set if victims and attackers are on another host.
    remote: Option<RemoteHost>,
    programs: Programs,
    victims: Vec<Process>,
    /// The chunks that each victim holds, as the victim reported them: arrays of chunks.
    pub held: Vec<Value>,
}

/// The host of victims and attackers, if it is not the memory node's host.
struct RemoteHost {
    hosts: Hosts,
    /// The node's `--pool` address on that host.
    pool: String,
}

/// A process of the scene; dropping the value kills the process if it still runs.
pub struct Process {
    name: String,
    child: Child,
    /// A separate NIC process for this process, if needed.
    _nic: Option<NicProcess>,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Process {
    /// Starts a program.
    pub fn start(program: &str, arguments: &[&str]) -> Result<Self> {
        Self::start_by(Command::new(program), program, arguments, None)
    }

    /// Starts a program by a command, which may name another host.
    pub fn start_with(command: Command, arguments: &[&str]) -> Result<Self> {
        let program = command.get_program().to_string_lossy().into_owned();
        Self::start_by(command, &program, arguments, None)
    }

    fn start_by(
        mut command: Command,
        program: &str,
        arguments: &[&str],
        nic: Option<NicProcess>,
    ) -> Result<Self> {
        let mut child = command
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {program}"))?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let name = arguments.first().map_or(program, |a| *a).to_owned();
        Ok(Self { name, child, _nic: nic, input, output })
    }

    /// The process id.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Sends the process a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        signals::signal(self.pid(), signal).with_context(|| self.name.clone())
    }

    /// Writes a line to the standard input of the process.
    pub fn send_line(&mut self, line: &str) -> Result<()> {
        let input = self.input.as_mut().context("its input is closed")?;
        writeln!(input, "{line}").with_context(|| format!("sending {line:?} to {}", self.name))
    }

    /// The next line on the standard output of the process.
    pub fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        ensure!(!line.is_empty(), "{} ended early: see its error above", self.name);
        Ok(line)
    }

    /// The next line as JSON.
    pub fn report(&mut self) -> Result<Value> {
        let line = self.line()?;
        serde_json::from_str(&line).with_context(|| format!("{} printed {line}", self.name))
    }

    /// Waits until the process has ended, with success. Fails after a timeout; the process is
    /// killed then.
    pub fn end(mut self) -> Result<()> {
        self.input.take();
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait()? {
                ensure!(status.success(), "{} ended with {status}", self.name);
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{} did not end within {TIMEOUT:?}", self.name);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Kills the process (SIGKILL).
    pub fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A running `granary nic` on host 1; dropping the value ends the process.
struct NicProcess {
    child: Child,
    /// Suffix of a pool address that selects this NIC.
    suffix: String,
}

impl NicProcess {
    fn start(hosts: &Hosts) -> Result<Self> {
        let mut command = hosts.command(1, granary());
        command.args(["nic", "--local", V4[1]]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().context("starting granary nic")?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line)?;
        let ready: Value = serde_json::from_str(&line).context("parsing granary nic's output")?;
        let socket = ready["socket"].as_str().context("a socket")?;
        Ok(Self { child, suffix: format!(";nic={socket};port={}", ready["port"]) })
    }
}

impl Drop for NicProcess {
    fn drop(&mut self) {
        // SIGTERM and not SIGKILL, so that the NIC process removes its socket.
        let _ = signals::signal(self.child.id() as i32, Signal::TERM);
        let _ = self.child.wait();
    }
}

impl Scene {
    /// As [`Scene::start`], with the memory node on host 0 and all other processes on host 1. Each
    /// victim has a NIC in its own process; each attacker uses a separate NIC process.
    pub fn start_between(
        hosts: Hosts,
        name: &str,
        programs: Programs,
        serve: &[&str],
        victims: &[&[&str]],
    ) -> Result<Self> {
        let node = MemoryNode::start_on(&hosts, name, V4[0], serve)?;
        let remote = Some(RemoteHost { pool: node.pool_at(V4[0]), hosts });
        Self::with_victims(
            Self { node, remote, programs, victims: Vec::new(), held: Vec::new() },
            victims,
        )
    }

    /// Starts a memory node with the additional arguments `serve`, and a victim for each list of
    /// arguments in `victims`. The victims are working when this function returns.
    pub fn start(
        name: &str,
        programs: Programs,
        serve: &[&str],
        victims: &[&[&str]],
    ) -> Result<Self> {
        let node = MemoryNode::start(name, serve)?;
        let scene = Self { node, remote: None, programs, victims: Vec::new(), held: Vec::new() };
        Self::with_victims(scene, victims)
    }

    fn with_victims(mut scene: Self, victims: &[&[&str]]) -> Result<Self> {
        for arguments in victims {
            let mut victim = scene.process(scene.programs.victim, None, arguments)?;
            let ready = victim.line()?;
            ensure!(ready == "ready\n", "a victim printed {ready}");
            scene.held.push(victim.report()?);
            victim.send_line("go")?;
            scene.victims.push(victim);
        }
        Ok(scene)
    }

    /// Starts a program on the host of the victims. Its arguments are `first`, the memory node's
    /// address and `more`.
    pub fn process(&self, program: &str, first: Option<&str>, more: &[&str]) -> Result<Process> {
        let mut arguments: Vec<&str> = first.into_iter().collect();
        let Some(RemoteHost { hosts, pool }) = &self.remote else {
            let socket = self.node.socket.to_str().context("a socket path in UTF-8")?;
            arguments.extend(["--socket", socket]);
            arguments.extend(more);
            return Process::start(program, &arguments);
        };
        let attacks = program == self.programs.hostile;
        let nic = attacks.then(|| NicProcess::start(hosts)).transpose()?;
        let pool = format!("{pool}{}", nic.as_ref().map_or("", |nic| &nic.suffix));
        arguments.extend(["--pool", &pool]);
        arguments.extend(more);
        Process::start_by(hosts.command(1, program), program, &arguments, nic)
    }

    /// Starts an attacker and waits until it has attached. The attacker then waits for a line on
    /// its standard input.
    pub fn hostile(&self, attack: &str, more: &[&str]) -> Result<Process> {
        let mut attacker = self.process(self.programs.hostile, Some(attack), more)?;
        let ready = attacker.line()?;
        ensure!(ready == "ready\n", "{attack} printed {ready}");
        Ok(attacker)
    }

    /// Runs an attack to completion and returns its report.
    pub fn attack(&self, attack: &str, more: &[&str]) -> Result<Value> {
        let mut attacker = self.hostile(attack, more)?;
        attacker.send_line("go")?;
        let report = attacker.report()?;
        attacker.end()?;
        Ok(report)
    }

    /// The victims' reports since the last mark. An error if a victim has failed.
    pub fn mark(&mut self) -> Result<Vec<Value>> {
        self.victims.iter_mut().try_for_each(|v| v.send_line("mark"))?;
        self.victims.iter_mut().map(Process::report).collect()
    }

    /// Repeats [`Scene::mark`] until every victim has completed a round. An error after a minute.
    /// On a busy machine a victim may not be scheduled during an attack of a few milliseconds.
    pub fn victims_worked(&mut self) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        let mut rounds = vec![0; self.victims.len()];
        loop {
            let reports = self.mark()?;
            for (rounds, report) in rounds.iter_mut().zip(&reports) {
                *rounds += report["rounds"].as_u64().unwrap_or(0);
            }
            if rounds.iter().all(|rounds| *rounds > 0) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "a victim makes no progress: rounds {rounds:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends the scene: the victims verify their chunks, free them and disconnect without an error;
    /// then all chunks must be free, and the pool must serve a new client.
    pub fn end(mut self) -> Result<Vec<Value>> {
        self.victims.iter_mut().try_for_each(|v| v.send_line("stop"))?;
        let reports = self.victims.iter_mut().map(Process::report).collect::<Result<Vec<_>>>()?;
        std::mem::take(&mut self.victims).into_iter().try_for_each(Process::end)?;
        self.check_all_chunks_free()?;
        self.check_new_client().context("a new client")?;
        self.check_all_chunks_free()?;
        Ok(reports)
    }

    /// Checks that a new client can connect, work and disconnect.
    pub fn check_new_client(&self) -> Result<()> {
        let mut client = self.process(self.programs.victim, None, NEW_CLIENT)?;
        ensure!(client.line()? == "ready\n", "the client did not start");
        client.line()?;
        client.send_line("go")?;
        client.send_line("mark")?;
        client.report()?;
        client.send_line("stop")?;
        client.report()?;
        client.end()
    }

    /// [`check_all_chunks_free`] of the memory node.
    pub fn check_all_chunks_free(&self) -> Result<()> {
        check_all_chunks_free(&self.node)
    }

    /// The `/proc` directory of the memory node's file descriptors.
    pub fn fds(&self) -> String {
        format!("/proc/{}/fd", self.node.pid())
    }

    /// The memory node's status.
    pub fn status(&self) -> Result<pool::protocol::Status> {
        match Control::pool(&self.node.socket)?.ask(Request::Status)? {
            Reply::Status(status) => Ok(*status),
            other => bail!("{other:?}"),
        }
    }
}

/// Waits until no client is connected and every chunk is free, then lets the memory node audit its
/// metadata.
pub fn check_all_chunks_free(node: &MemoryNode) -> Result<()> {
    let deadline = Instant::now() + RECLAIM_TIMEOUT;
    let control = Control::pool(&node.socket)?;
    loop {
        let Reply::Status(status) = control.ask(Request::Status)? else { bail!("no status") };
        let n = status.node;
        if n.clients == 0 && n.free == n.chunks {
            break;
        }
        ensure!(Instant::now() < deadline, "chunks are not free, or clients connected: {n:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
    loop {
        match control.ask(Request::Audit)? {
            Reply::Done => return Ok(()),
            // The node may still be reclaiming a departed client.
            Reply::Error { .. } if Instant::now() < deadline => {}
            other => bail!("the audit: {other:?}"),
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
