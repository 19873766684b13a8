//! A memory node and its clients on different hosts (network namespaces), over RoCEv2.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use granary_tests::hosts::{Hosts, Impairment, V4, V6};
use granary_tests::kv::{Connection, PATIENCE, Server};
use granary_tests::node::{MemoryNode, full, granary};
use serde_json::Value;

const VICTIM: &str = env!("CARGO_BIN_EXE_victim");

/// Time limit of a memory node to detect a lost host and to reclaim its chunks.
const GONE: Duration = Duration::from_secs(40);

/// Waits until no client is connected and every chunk is free; returns the elapsed time.
fn wait_until_all_free(node: &MemoryNode) -> Result<Duration> {
    let start = Instant::now();
    loop {
        let status = node.status()?;
        if status["clients"] == 0 && status["leaving"] == 0 && status["free"] == status["chunks"] {
            return Ok(start.elapsed());
        }
        ensure!(start.elapsed() < GONE, "not all chunks are free after {GONE:?}: {status}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Waits until `living` clients are connected and all departed clients are reclaimed.
fn wait_for_reclaim(node: &MemoryNode, living: u64) -> Result<()> {
    let start = Instant::now();
    loop {
        let status = node.status()?;
        if status["clients"] == living && status["leaving"] == 0 {
            return Ok(());
        }
        ensure!(start.elapsed() < GONE, "clients are not reclaimed after {GONE:?}: {status}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A compute node on host 1 that checks every byte.
struct Client {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Client {
    fn start(hosts: &Hosts, pool: &str, seed: u64) -> Result<Self> {
        let mut command = hosts.command(1, VICTIM);
        command.args(["--pool", pool, "--hold", "6", "--seed", &seed.to_string()]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let lines = BufReader::new(child.stdout.take().expect("piped"));
        let mut client = Self { child, lines };
        ensure!(client.line()? == "ready\n", "a client did not connect");
        client.line()?;
        client.send_line("go")?;
        Ok(client)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        ensure!(!line.is_empty(), "a client ended early: see its error above");
        Ok(line)
    }

    fn send_line(&mut self, command: &str) -> Result<()> {
        let input = self.child.stdin.as_mut().expect("piped");
        writeln!(input, "{command}").context("sending a command to a client")
    }

    /// Waits until the client has done `rounds` more rounds.
    fn work(&mut self, rounds: u64) -> Result<()> {
        let mut done = 0;
        while done < rounds {
            self.send_line("mark")?;
            let report: Value = serde_json::from_str(&self.line()?)?;
            done += report["rounds"].as_u64().context("a report has rounds")?;
        }
        Ok(())
    }

    /// Lets the client verify its data and disconnect.
    fn finish(mut self) -> Result<()> {
        self.send_line("stop")?;
        self.line()?;
        drop(self.child.stdin.take());
        let status = self.child.wait()?;
        ensure!(status.success(), "a client ended with {status}");
        Ok(())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const SMALL: [&str; 4] = ["--memory", "4MiB", "--chunk", "64KiB"];

#[test]
fn clients_on_another_host_work_and_are_reclaimed() -> Result<()> {
    let Some(hosts) = Hosts::new()? else { return Ok(()) };
    for (name, address, listen) in [
        ("v4", V4[0], V4[0]),
        ("v6", V6[0], V6[0]),
        ("any", V4[0], "0.0.0.0"),
        ("both-v4", V4[0], "[::]"),
        ("both-v6", V6[0], "[::]"),
    ] {
        let node = MemoryNode::start_on(&hosts, &format!("hosts-{name}"), listen, &SMALL)?;
        let pool = node.pool_at(address);
        let mut clients: Vec<_> =
            (1..=3).map(|seed| Client::start(&hosts, &pool, seed)).collect::<Result<_>>()?;
        for client in &mut clients {
            client.work(200)?;
        }
        // Killing one client must not affect the other clients.
        drop(clients.pop());
        for client in &mut clients {
            client.work(50)?;
        }
        clients.into_iter().try_for_each(Client::finish)?;
        wait_until_all_free(&node)?;
    }
    Ok(())
}

#[test]
fn clients_work_over_an_impaired_link() -> Result<()> {
    let rates: &[u32] = if full() { &[1, 10, 100] } else { &[10] };
    for &lost in rates {
        let seed = 77 + u64::from(lost);
        let impairment = Impairment { lost, duplicated: lost, delayed: lost, seed };
        let Some(hosts) = Hosts::with(impairment)? else { return Ok(()) };
        let node = MemoryNode::start_on(&hosts, &format!("cable-{lost}"), V4[0], &SMALL)?;
        let pool = node.pool_at(V4[0]);
        let mut clients = vec![Client::start(&hosts, &pool, 5)?, Client::start(&hosts, &pool, 6)?];
        for client in &mut clients {
            client.work(if full() { 2000 } else { 100 })?;
        }
        clients.into_iter().try_for_each(Client::finish)?;
        wait_until_all_free(&node)?;
    }
    Ok(())
}

/// Clients are killed at pseudo-random times over a lossy link while another client keeps working.
/// Each time all of their chunks are reclaimed.
#[test]
fn clients_killed_over_an_impaired_link_are_reclaimed() -> Result<()> {
    let kills = if full() { 60 } else { 3 };
    for scheme in ["onesidedmw", "finemem"] {
        let impairment = Impairment { lost: 10, duplicated: 10, delayed: 10, seed: 78 };
        let Some(hosts) = Hosts::with(impairment)? else { return Ok(()) };
        let arguments = [&SMALL[..], &["--scheme", scheme]].concat();
        let node = MemoryNode::start_on(&hosts, &format!("bad-{scheme}"), V4[0], &arguments)?;
        let pool = node.pool_at(V4[0]);
        let mut living = Client::start(&hosts, &pool, 8)?;
        let mut random = units::Random::new(0x5eed);
        for seed in 0..kills {
            let mut victims = [
                Client::start(&hosts, &pool, 100 + seed)?,
                Client::start(&hosts, &pool, 200 + seed)?,
            ];
            victims.each_mut().map(|victim| victim.work(1)).into_iter().collect::<Result<()>>()?;
            // A random delay, so that a client dies in a random state.
            std::thread::sleep(Duration::from_micros(random.below(1 << 14)));
            drop(victims);
            living.work(5)?;
            wait_for_reclaim(&node, 1)?;
        }
        living.finish()?;
        wait_until_all_free(&node)?;
    }
    Ok(())
}

#[test]
fn chunks_of_a_vanished_host_are_reclaimed() -> Result<()> {
    // In scheme onesidedmw the memory node's own state names a client's chunks, in finemem the logs
    // that the client wrote.
    for scheme in ["onesidedmw", "finemem"] {
        let Some(hosts) = Hosts::new()? else { return Ok(()) };
        let arguments = [&SMALL[..], &["--scheme", scheme]].concat();
        let node = MemoryNode::start_on(&hosts, &format!("vanish-{scheme}"), V4[0], &arguments)?;
        let mut client = Client::start(&hosts, &node.pool_at(V4[0]), 9)?;
        client.work(20)?;
        ensure!(node.status()?["free"] != node.status()?["chunks"], "the client holds chunks");
        hosts.unplug(1)?;
        let took = wait_until_all_free(&node)?;
        eprintln!("{scheme}: all chunks were free {took:.1?} after the loss of the host");
    }
    Ok(())
}

#[test]
fn client_without_token_is_refused() -> Result<()> {
    let Some(hosts) = Hosts::new()? else { return Ok(()) };
    let node = MemoryNode::start_on(&hosts, "token", V4[0], &SMALL)?;
    let status = |pool: &str| -> Result<(bool, String)> {
        let out = hosts.command(1, granary()).args(["status", "--pool", pool]).output()?;
        Ok((out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned()))
    };
    let (ok, error) = status(&node.pool_at(V4[0]))?;
    ensure!(ok, "{error}");
    let bare = format!("roce://{}", V4[0]);
    let (ok, error) = status(&bare)?;
    ensure!(!ok && error.contains("asks for a token"), "{error}");
    let wrong = node.directory().join("wrong");
    std::fs::write(&wrong, "another token of that length")?;
    std::fs::set_permissions(&wrong, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    let (ok, error) = status(&format!("{bare};token={}", wrong.display()))?;
    ensure!(!ok && error.contains("the token is wrong"), "{error}");
    // A port without a listener.
    let (ok, error) = status(&format!("roce://{}:9;token={}", V4[0], node.token().display()))?;
    ensure!(!ok && error.contains("granary serve --listen"), "{error}");
    Ok(())
}

#[test]
fn listen_without_token_requires_open_to_all() -> Result<()> {
    for address in ["0.0.0.0:0", "[::]:0", "127.0.0.1:0", "[::1]:0"] {
        let mut command = Command::new("timeout");
        command.arg("10").arg(granary()).args(["serve", "--private", "--listen", address]);
        let out = command.output()?;
        let error = String::from_utf8_lossy(&out.stderr);
        ensure!(out.status.code() == Some(2), "{address}: {}: {error}", out.status);
        ensure!(error.contains("--token-file FILE or --open-to-all"), "{address}: {error}");
    }
    Ok(())
}

#[test]
fn programs_page_to_another_host() -> Result<()> {
    let Some(hosts) = Hosts::new()? else { return Ok(()) };
    let node = MemoryNode::start_on(&hosts, "pages", V6[0], &["--memory", "256MiB"])?;
    // Forks with 400,000 lines in memory; parent and child sort them.
    let script = "import hashlib, os\n\
        lines = [b'%020d' % (i * 7919 % 1000003) for i in range(400000)]\n\
        child = os.fork()\n\
        lines.sort(reverse=child == 0)\n\
        digest = hashlib.sha256(b''.join(lines)).hexdigest()\n\
        if child: os.waitpid(child, 0)\n\
        print(digest, flush=True)\n";
    let plain = Command::new("python3").args(["-c", script]).output()?;
    ensure!(plain.status.success(), "python3 runs");
    let mut command = hosts.command(1, granary());
    let pool = format!("roce://[{}]", V6[0]);
    command.args(["run", "--stats", "--local-each", "24MiB", "--pool", &pool]);
    command.arg("--token-file").arg(node.token()).args(["--", "python3", "-c", script]);
    let paged = command.output()?;
    let stderr = String::from_utf8_lossy(&paged.stderr);
    ensure!(paged.status.success(), "{stderr}");
    ensure!(paged.stdout == plain.stdout, "the outputs differ; standard error: {stderr}");
    ensure!(node.status()?["allocations_nic"].as_u64() > Some(0), "no page was moved: {stderr}");
    wait_until_all_free(&node)?;
    Ok(())
}

/// The cable of a key-value server is cut while a write is under way, for less than the memory node
/// waits. Nothing is lost.
#[test]
fn store_goes_on_after_the_cable_was_cut() -> Result<()> {
    let Some(hosts) = Hosts::new()? else { return Ok(()) };
    let arguments = ["--memory", "16MiB", "--chunk", "16KiB", "--client-timeout", "60"];
    let node = MemoryNode::start_on(&hosts, "kv-cable", V4[0], &arguments)?;
    let (pool, token) = (format!("roce://{}", V4[0]), node.token());
    let token = token.to_str().context("no text")?;
    let arguments = ["--pool", &pool, "--token-file", token, "--pool-timeout", "1"];
    let server = Server::start_by(hosts.command(1, granary()), &arguments)?;
    let port = server.port;
    let mut connection = hosts.inside(1, move || Connection::open(port))?;
    for key in 0..100 {
        assert_eq!(connection.ask(&format!("INCRBY key:{key} {key}"))?, format!(":{key}"));
    }
    hosts.unplug(0)?;
    let reply = connection.ask("INCR key:7")?;
    ensure!(reply.starts_with("-UNCERTAIN ") || reply.starts_with("-MASTERDOWN "), "{reply}");
    let reply = connection.ask("GET key:8")?;
    ensure!(reply.starts_with("-MASTERDOWN "), "{reply}");
    assert_eq!(connection.ask("PING")?, "+PONG");
    hosts.plug(0)?;
    let start = Instant::now();
    while connection.ask("INCRBY key:9 0")? != ":9" {
        ensure!(start.elapsed() < PATIENCE, "the server does not go on");
        std::thread::sleep(Duration::from_millis(10));
    }
    let seven = connection.ask("INCRBY key:7 0")?;
    ensure!(seven == ":7" || seven == ":8", "{seven}");
    for key in 8..100 {
        assert_eq!(connection.ask(&format!("INCRBY key:{key} 1"))?, format!(":{}", key + 1));
    }
    assert_eq!(connection.ask("DBSIZE")?, ":100");
    Ok(())
}
