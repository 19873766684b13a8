//! A memory node and its clients on different hosts (network namespaces), over RoCEv2.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use granary_tests::hosts::{Hosts, Trouble, V4, V6};
use granary_tests::node::{MemoryNode, full, granary};
use serde_json::Value;

const VICTIM: &str = env!("CARGO_BIN_EXE_victim");

/// How long a memory node may take to see that a host is gone, and to take back what that had.
const GONE: Duration = Duration::from_secs(40);

/// Waits until nobody is there and every chunk is free.
fn wait_until_whole(node: &MemoryNode) -> Result<Duration> {
    let start = Instant::now();
    loop {
        let status = node.status()?;
        if status["clients"] == 0 && status["leaving"] == 0 && status["free"] == status["chunks"] {
            return Ok(start.elapsed());
        }
        ensure!(start.elapsed() < GONE, "not whole after {GONE:?}: {status}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Waits until only `living` compute nodes are there and nothing is left of others.
fn wait_for_the_dead(node: &MemoryNode, living: u64) -> Result<()> {
    let start = Instant::now();
    loop {
        let status = node.status()?;
        if status["clients"] == living && status["leaving"] == 0 {
            return Ok(());
        }
        ensure!(start.elapsed() < GONE, "the dead are there after {GONE:?}: {status}");
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
        client.tell("go")?;
        Ok(client)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        ensure!(!line.is_empty(), "a client ended early: see its error above");
        Ok(line)
    }

    fn tell(&mut self, order: &str) -> Result<()> {
        let input = self.child.stdin.as_mut().expect("piped");
        writeln!(input, "{order}").context("steering a client")
    }

    /// Returns when it has done so many more rounds.
    fn work(&mut self, rounds: u64) -> Result<()> {
        let mut done = 0;
        while done < rounds {
            self.tell("mark")?;
            let report: Value = serde_json::from_str(&self.line()?)?;
            done += report["rounds"].as_u64().context("a report has rounds")?;
        }
        Ok(())
    }

    /// Lets it check everything once more and leave.
    fn finish(mut self) -> Result<()> {
        self.tell("stop")?;
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
fn clients_of_another_host_work_and_are_cleaned_up_after() -> Result<()> {
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
        // One is killed, the others do not notice.
        drop(clients.pop());
        for client in &mut clients {
            client.work(50)?;
        }
        clients.into_iter().try_for_each(Client::finish)?;
        wait_until_whole(&node)?;
    }
    Ok(())
}

#[test]
fn a_bad_cable_costs_time_and_nothing_else() -> Result<()> {
    let rates: &[u32] = if full() { &[1, 10, 100] } else { &[10] };
    for &lost in rates {
        let trouble = Trouble { lost, doubled: lost, late: lost, seed: 77 + u64::from(lost) };
        let Some(hosts) = Hosts::with(trouble)? else { return Ok(()) };
        let node = MemoryNode::start_on(&hosts, &format!("cable-{lost}"), V4[0], &SMALL)?;
        let pool = node.pool_at(V4[0]);
        let mut clients = vec![Client::start(&hosts, &pool, 5)?, Client::start(&hosts, &pool, 6)?];
        for client in &mut clients {
            client.work(if full() { 2000 } else { 100 })?;
        }
        clients.into_iter().try_for_each(Client::finish)?;
        wait_until_whole(&node)?;
    }
    Ok(())
}

/// Compute nodes are killed over a cable that loses packets, at moments that the seed says, while another one
/// goes on; each time all that they had comes back.
#[test]
fn clients_are_killed_over_a_bad_cable() -> Result<()> {
    let kills = if full() { 60 } else { 3 };
    for scheme in ["onesidedmw", "finemem"] {
        let trouble = Trouble { lost: 10, doubled: 10, late: 10, seed: 78 };
        let Some(hosts) = Hosts::with(trouble)? else { return Ok(()) };
        let arguments = [&SMALL[..], &["--scheme", scheme]].concat();
        let node = MemoryNode::start_on(&hosts, &format!("bad-{scheme}"), V4[0], &arguments)?;
        let pool = node.pool_at(V4[0]);
        let mut living = Client::start(&hosts, &pool, 8)?;
        let mut random = 0x5eed_u64;
        for seed in 0..kills {
            let mut victims = [
                Client::start(&hosts, &pool, 100 + seed)?,
                Client::start(&hosts, &pool, 200 + seed)?,
            ];
            victims.each_mut().map(|victim| victim.work(1)).into_iter().collect::<Result<()>>()?;
            // It is in the midst of whatever it is in.
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            std::thread::sleep(Duration::from_micros(random >> 50));
            drop(victims);
            living.work(5)?;
            wait_for_the_dead(&node, 1)?;
        }
        living.finish()?;
        wait_until_whole(&node)?;
    }
    Ok(())
}

#[test]
fn a_host_that_vanishes_is_noticed_and_what_it_had_comes_back() -> Result<()> {
    // What a compute node had is known by the memory node's NIC, or by the logs that it wrote itself.
    for scheme in ["onesidedmw", "finemem"] {
        let Some(hosts) = Hosts::new()? else { return Ok(()) };
        let arguments = [&SMALL[..], &["--scheme", scheme]].concat();
        let node = MemoryNode::start_on(&hosts, &format!("vanish-{scheme}"), V4[0], &arguments)?;
        let mut client = Client::start(&hosts, &node.pool_at(V4[0]), 9)?;
        client.work(20)?;
        ensure!(node.status()?["free"] != node.status()?["chunks"], "the client holds chunks");
        hosts.unplug(1)?;
        let took = wait_until_whole(&node)?;
        eprintln!("{scheme}: whole again {took:.1?} after the host was gone");
    }
    Ok(())
}

#[test]
fn who_has_no_token_gets_nothing() -> Result<()> {
    let Some(hosts) = Hosts::new()? else { return Ok(()) };
    let node = MemoryNode::start_on(&hosts, "token", V4[0], &SMALL)?;
    let status = |pool: &str| -> Result<(bool, String)> {
        let out = hosts.command(1, granary()).args(["status", "--pool", pool]).output()?;
        Ok((out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned()))
    };
    let (ok, said) = status(&node.pool_at(V4[0]))?;
    ensure!(ok, "{said}");
    let bare = format!("roce://{}", V4[0]);
    let (ok, said) = status(&bare)?;
    ensure!(!ok && said.contains("asks for a token"), "{said}");
    let wrong = node.directory().join("wrong");
    std::fs::write(&wrong, "another token of that length")?;
    std::fs::set_permissions(&wrong, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    let (ok, said) = status(&format!("{bare};token={}", wrong.display()))?;
    ensure!(!ok && said.contains("the token is wrong"), "{said}");
    // Nobody listens there, or there is nobody.
    let (ok, said) = status(&format!("roce://{}:9;token={}", V4[0], node.token().display()))?;
    ensure!(!ok && said.contains("granary serve --listen"), "{said}");
    Ok(())
}

#[test]
fn every_address_is_served_with_a_token_or_when_told_so_by_name() -> Result<()> {
    for address in ["0.0.0.0:0", "[::]:0", "127.0.0.1:0", "[::1]:0"] {
        let mut command = Command::new("timeout");
        command.arg("10").arg(granary()).args(["serve", "--private", "--listen", address]);
        let out = command.output()?;
        let said = String::from_utf8_lossy(&out.stderr);
        ensure!(out.status.code() == Some(2), "{address}: {}: {said}", out.status);
        ensure!(said.contains("--token-file FILE, or say --open-to-all"), "{address}: {said}");
    }
    Ok(())
}

#[test]
fn programs_page_to_another_host() -> Result<()> {
    let Some(hosts) = Hosts::new()? else { return Ok(()) };
    let node = MemoryNode::start_on(&hosts, "pages", V6[0], &["--memory", "256MiB"])?;
    // Sorts 1,000,000 lines in memory, beside a child that is forked with half of it.
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
    command.args(["run", "--stats", "--local", "24MiB", "--pool", &format!("roce://[{}]", V6[0])]);
    command.arg("--token-file").arg(node.token()).args(["--", "python3", "-c", script]);
    let paged = command.output()?;
    let said = String::from_utf8_lossy(&paged.stderr);
    ensure!(paged.status.success(), "{said}");
    ensure!(paged.stdout == plain.stdout, "the same output; it said {said}");
    ensure!(node.status()?["allocations_nic"].as_u64() > Some(0), "pages were moved: {said}");
    wait_until_whole(&node)?;
    Ok(())
}
