//! A memory node, victims that work beside it, and attackers: all of them processes.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pool::protocol::{Reply, Request};
use serde_json::Value;

use crate::control::Control;
use crate::hosts::{Hosts, V4};
use crate::node::{MemoryNode, granary};

/// How long an attack may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long the memory node may take to be whole again.
const WHOLE: Duration = Duration::from_secs(20);

/// The built programs.
#[derive(Clone, Copy)]
pub struct Programs {
    /// The attacker.
    pub hostile: &'static str,
    /// The compute node that is attacked.
    pub victim: &'static str,
}

/// A memory node with victims.
pub struct Scene {
    /// The memory node.
    pub node: MemoryNode,
    /// The others are on another host.
    far: Option<Far>,
    programs: Programs,
    victims: Vec<Process>,
    /// What each victim holds, as it described it: an array of chunks.
    pub held: Vec<Value>,
}

/// Where victims and attackers are, if not beside the memory node.
struct Far {
    hosts: Hosts,
    /// What `--pool` takes there.
    pool: String,
}

/// A process of the scene; killed if it is dropped early.
pub struct Process {
    name: String,
    child: Child,
    /// The NIC of its host, if it has one of its own.
    _nic: Option<NicProcess>,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Process {
    /// Starts a program.
    pub fn start(program: &str, arguments: &[&str]) -> Result<Self> {
        Self::start_by(Command::new(program), program, arguments, None)
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

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: i32) -> Result<()> {
        // SAFETY: kill takes no pointers; the child was not waited for, so the number is its own.
        let sent = unsafe { libc::kill(self.pid(), signal) };
        ensure!(sent == 0, "signalling {}: {}", self.name, std::io::Error::last_os_error());
        Ok(())
    }

    /// Writes it a line.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        let input = self.input.as_mut().context("its input is closed")?;
        writeln!(input, "{line}").with_context(|| format!("telling {} to {line}", self.name))
    }

    /// The next line that it prints.
    pub fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        ensure!(!line.is_empty(), "{} ended early: see its error above", self.name);
        Ok(line)
    }

    /// The next line as JSON.
    pub fn report(&mut self) -> Result<Value> {
        let line = self.line()?;
        serde_json::from_str(&line).with_context(|| format!("{} said {line}", self.name))
    }

    /// Waits for its end, which must be a good one. It is killed if it takes too long.
    pub fn end(mut self) -> Result<()> {
        self.input.take();
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait()? {
                ensure!(status.success(), "{} ended with {status}", self.name);
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{} did not end for {PATIENCE:?}", self.name);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Kills it without warning.
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

/// A running `granary nic` on host 1, ended with its value.
struct NicProcess {
    child: Child,
    /// What is added to an address so that this NIC is used.
    part: String,
}

impl NicProcess {
    fn start(hosts: &Hosts) -> Result<Self> {
        let mut command = hosts.command(1, granary());
        command.args(["nic", "--local", V4[1]]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().context("starting granary nic")?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line)?;
        let ready: Value = serde_json::from_str(&line).context("granary nic says where it is")?;
        let socket = ready["socket"].as_str().context("a socket")?;
        Ok(Self { child, part: format!(";nic={socket};port={}", ready["port"]) })
    }
}

impl Drop for NicProcess {
    fn drop(&mut self) {
        // It removes its socket when it is told to end.
        // SAFETY: kill takes no pointers; the child was not waited for, so the number is its own.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGTERM) };
        let _ = self.child.wait();
    }
}

impl Scene {
    /// The same as [`Scene::start`], with the memory node on host 0 and all others on host 1: victims have a NIC
    /// each in their process, attackers one in a process of its own.
    pub fn start_between(
        hosts: Hosts,
        name: &str,
        programs: Programs,
        serve: &[&str],
        victims: &[&[&str]],
    ) -> Result<Self> {
        let node = MemoryNode::start_on(&hosts, name, V4[0], serve)?;
        let far = Some(Far { pool: node.pool_at(V4[0]), hosts });
        Self::with_victims(
            Self { node, far, programs, victims: Vec::new(), held: Vec::new() },
            victims,
        )
    }

    /// Starts a memory node with `serve` as further arguments, and a victim for each list of arguments
    /// in `victims`. The victims work when this returns.
    pub fn start(
        name: &str,
        programs: Programs,
        serve: &[&str],
        victims: &[&[&str]],
    ) -> Result<Self> {
        let node = MemoryNode::start(name, serve)?;
        let scene = Self { node, far: None, programs, victims: Vec::new(), held: Vec::new() };
        Self::with_victims(scene, victims)
    }

    fn with_victims(mut scene: Self, victims: &[&[&str]]) -> Result<Self> {
        for arguments in victims {
            let mut victim = scene.process(scene.programs.victim, None, arguments)?;
            let ready = victim.line()?;
            ensure!(ready == "ready\n", "a victim said {ready}");
            scene.held.push(victim.report()?);
            victim.tell("go")?;
            scene.victims.push(victim);
        }
        Ok(scene)
    }

    fn process(&self, program: &str, first: Option<&str>, more: &[&str]) -> Result<Process> {
        let mut arguments: Vec<&str> = first.into_iter().collect();
        let Some(Far { hosts, pool }) = &self.far else {
            let socket = self.node.socket.to_str().context("an odd path")?;
            arguments.extend(["--socket", socket]);
            arguments.extend(more);
            return Process::start(program, &arguments);
        };
        let attacks = program == self.programs.hostile;
        let nic = attacks.then(|| NicProcess::start(hosts)).transpose()?;
        let pool = format!("{pool}{}", nic.as_ref().map_or("", |nic| &nic.part));
        arguments.extend(["--pool", &pool]);
        arguments.extend(more);
        Process::start_by(hosts.command(1, program), program, &arguments, nic)
    }

    /// Starts an attacker and waits until it is ready: that is, it has attached and will go on when it
    /// is told so.
    pub fn hostile(&self, attack: &str, more: &[&str]) -> Result<Process> {
        let mut attacker = self.process(self.programs.hostile, Some(attack), more)?;
        let ready = attacker.line()?;
        ensure!(ready == "ready\n", "{attack} said {ready}");
        Ok(attacker)
    }

    /// Runs an attack from beginning to end; its report.
    pub fn attack(&self, attack: &str, more: &[&str]) -> Result<Value> {
        let mut attacker = self.hostile(attack, more)?;
        attacker.tell("go")?;
        let report = attacker.report()?;
        attacker.end()?;
        Ok(report)
    }

    /// What the victims did since they were asked last. An error if one of them saw an error.
    pub fn mark(&mut self) -> Result<Vec<Value>> {
        self.victims.iter_mut().try_for_each(|v| v.tell("mark"))?;
        self.victims.iter_mut().map(Process::report).collect()
    }

    /// Asks as [`Scene::mark`] does until every victim has done a round. An error after a minute: where
    /// other programs want the CPUs, a victim may have no turn during an attack of milliseconds.
    pub fn victims_worked(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let mut rounds = vec![0; self.victims.len()];
        loop {
            let reports = self.mark()?;
            for (rounds, report) in rounds.iter_mut().zip(&reports) {
                *rounds += report["rounds"].as_u64().unwrap_or(0);
            }
            if rounds.iter().all(|rounds| *rounds > 0) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "a victim stands still: rounds of each {rounds:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The end: the victims find all that they wrote, give it back and leave without an error; the pool
    /// is whole, and serves a client that comes now.
    pub fn end(mut self) -> Result<Vec<Value>> {
        self.victims.iter_mut().try_for_each(|v| v.tell("stop"))?;
        let reports = self.victims.iter_mut().map(Process::report).collect::<Result<Vec<_>>>()?;
        std::mem::take(&mut self.victims).into_iter().try_for_each(Process::end)?;
        self.check_whole()?;
        self.newcomer().context("a later client")?;
        self.check_whole()?;
        Ok(reports)
    }

    /// A client that comes now, works and leaves.
    pub fn newcomer(&self) -> Result<()> {
        let mut it = self.process(self.programs.victim, None, &["--hold", "2"])?;
        ensure!(it.line()? == "ready\n", "it did not start");
        it.line()?;
        it.tell("go")?;
        it.tell("mark")?;
        it.report()?;
        it.tell("stop")?;
        it.report()?;
        it.end()
    }

    /// Waits until nobody is connected and every chunk is free, then lets the memory node check its
    /// books.
    pub fn check_whole(&self) -> Result<()> {
        let deadline = Instant::now() + WHOLE;
        let control = Control::pool(&self.node.socket)?;
        loop {
            let Reply::Status(status) = control.ask(Request::Status)? else { bail!("no status") };
            let n = status.node;
            if n.clients == 0 && n.free == n.chunks {
                break;
            }
            ensure!(Instant::now() < deadline, "the pool is not whole: {n:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
        loop {
            match control.ask(Request::Audit)? {
                Reply::Done => return Ok(()),
                // Somebody may be on his way out yet.
                Reply::Error { .. } if Instant::now() < deadline => {}
                other => bail!("the audit: {other:?}"),
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Where the kernel lists the memory node's descriptors.
    pub fn fds(&self) -> String {
        format!("/proc/{}/fd", self.node.pid())
    }

    /// The memory node's state.
    pub fn status(&self) -> Result<pool::protocol::Status> {
        match Control::pool(&self.node.socket)?.ask(Request::Status)? {
            Reply::Status(status) => Ok(*status),
            other => bail!("{other:?}"),
        }
    }
}
