//! Limits of a memory node: file descriptors, number of clients, memory of the machine.

use std::os::unix::process::CommandExt;
use std::process::{Command, Output};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use granary_tests::node::{MemoryNode, granary};
use granary_tests::pager::Scratch;
use pool::{Address, ControlPlane};
use rustix::process::{Pid, Resource, Rlimit, prlimit};

const SMALL: [&str; 4] = ["--memory", "4MiB", "--chunk", "64KiB"];

/// A limit under which a process gets no further descriptor, even if it closes one meanwhile: only
/// the standard streams have lower numbers.
const NO_MORE_DESCRIPTORS: u64 = 3;

/// Sets the soft limit of a process's descriptors; returns the old limit.
fn limit_descriptors(pid: i32, to: Option<u64>) -> Result<Option<u64>> {
    let pid = Pid::from_raw(pid).context("a process")?;
    let limits = rustix::process::getrlimit(Resource::Nofile);
    let old = prlimit(Some(pid), Resource::Nofile, Rlimit { current: to, ..limits })?;
    Ok(old.current)
}

/// No connection ends during the test, because the memory node must retry without such an event.
#[test]
fn memory_node_without_descriptors_accepts_again_later() -> Result<()> {
    let node = MemoryNode::start("descriptors", &SMALL)?;
    let address = Address::Shm(node.socket.clone());
    let early = address.ask()?;
    let before = limit_descriptors(node.pid(), Some(NO_MORE_DESCRIPTORS))?;
    let (done, answered) = mpsc::channel();
    thread::spawn(move || {
        let status = address.ask().and_then(|control| control.status());
        // Fails only if the test has already ended.
        let _ = done.send(status);
    });
    let start = Instant::now();
    let (first, later) = loop {
        let status = early.status()?;
        if status.trouble.accepts >= 1 {
            while early.status()?.trouble.accepts < status.trouble.accepts + 5 {
                ensure!(start.elapsed() < Duration::from_secs(60), "the node does not retry");
                thread::sleep(Duration::from_millis(50));
            }
            break (status, early.status()?);
        }
        ensure!(start.elapsed() < Duration::from_secs(60), "no failure: {:?}", status.trouble);
        thread::sleep(Duration::from_millis(5));
    };
    let tries = later.trouble.accepts - first.trouble.accepts;
    let asked = later.uptime_ms.saturating_sub(first.uptime_ms) / 50 + 2;
    let woken = later.control_wakeups - first.control_wakeups;
    ensure!(woken <= 4 * tries + 2 * asked, "{woken} wake-ups for {tries} attempts: busy loop");
    limit_descriptors(node.pid(), before)?;
    let status = answered.recv_timeout(Duration::from_secs(30)).context("no answer")??;
    ensure!(status.trouble.last.is_some_and(|why| why.contains("accepting a connection")));
    drop(early);
    Ok(())
}

/// Runs a `granary serve` that must fail immediately.
fn serve(arguments: &[&str]) -> Result<Output> {
    let mut command = Command::new("timeout");
    command.args(["-s", "TERM", "10"]).arg(granary()).args(["serve", "--private"]).args(arguments);
    Ok(command.output()?)
}

fn total_memory() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:")).context("MemTotal")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse::<u64>()? * 1024)
}

#[test]
fn donation_above_total_memory_requires_overcommit() -> Result<()> {
    let beyond = ((total_memory()? >> 30) + 2).to_string() + "GiB";
    let out = serve(&["--memory", &beyond])?;
    let error = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.code() == Some(2), "{}: {error}", out.status);
    ensure!(error.contains(&beyond) && error.contains("--overcommit"), "{error}");
    let node = MemoryNode::start("overcommit", &["--memory", &beyond, "--overcommit"])?;
    ensure!(node.status()?["chunks"].as_u64() > Some(0));
    Ok(())
}

#[test]
fn donation_above_available_memory_is_warned_of() -> Result<()> {
    // The kernel and this test use more than 16 MiB, so this much is not available.
    let between = (total_memory()? >> 20) - 16;
    let scratch = Scratch::new("available");
    let mut command = Command::new("timeout");
    command.args(["-s", "TERM", "3"]).arg(granary()).args(["serve", "--memory"]);
    command.arg(format!("{between}MiB")).arg("--socket").arg(scratch.0.join("s"));
    let out = command.output()?;
    let warning = String::from_utf8_lossy(&out.stderr);
    ensure!(warning.contains("available now") && warning.contains("OOM killer"), "{warning}");
    let started = String::from_utf8_lossy(&out.stdout).contains("serving");
    ensure!(started, "the node does not serve: {warning}");
    Ok(())
}

/// A shell script with `count` child processes. All children exist at the same time if `together`;
/// otherwise each child may end as soon as it has started.
fn many(count: u32, together: bool) -> String {
    let children = r#"
        mkfifo "$0/up" "$0/go"; exec 3<>"$0/up" 4<>"$0/go"
        i=0; while [ $i -lt COUNT ]; do sh -c 'echo >&3; read x <&4' & i=$((i+1)); done
        i=0; while [ $i -lt COUNT ]; do read x <&3; EACH i=$((i+1)); done
        i=0; while [ $i -lt COUNT ]; do ALL i=$((i+1)); done
        wait; echo all went"#;
    let (each, all) = if together { ("", "echo >&4;") } else { ("echo >&4;", "") };
    let text = children.replace("COUNT", &count.to_string());
    text.replace("EACH", each).replace("ALL", all)
}

fn run_many(arguments: &[&str], count: u32, together: bool) -> Result<()> {
    let scratch = Scratch::new(&format!("many-{count}"));
    let mut command = Command::new("timeout");
    command.arg("240").arg(granary()).args(["run", "--local", "4MiB"]).args(arguments);
    command.args(["--", "sh", "-c", &many(count, together)]).arg(&scratch.0);
    let out = command.process_group(0).output()?;
    let error = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "{}: {error}", out.status);
    ensure!(out.stdout == b"all went\n" && error.is_empty(), "{error}");
    Ok(())
}

/// All processes exist at once; the private memory node's client limit is high enough.
#[test]
fn three_hundred_processes_of_one_program_are_served() -> Result<()> {
    run_many(&[], 300, true)
}

/// The shell and seven children reach the client limit; the other children wait until some have
/// ended.
#[test]
fn processes_beyond_the_client_limit_wait() -> Result<()> {
    let node = MemoryNode::start("places", &["--memory", "64MiB", "--clients", "8"])?;
    let pool = format!("shm:{}", node.socket.display());
    run_many(&["--pool", &pool], 24, false)
}
