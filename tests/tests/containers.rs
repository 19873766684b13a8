//! A memory node in a container: outside processes have no process id in its PID namespace.

use anyhow::{Context, Result, ensure};
use granary_tests::control::Control;
use granary_tests::node::MemoryNode;
use granary_tests::scene::Process;
use pool::protocol::{Reply, Request};
use pool::{Options, Pool};

const HOSTILE: &str = env!("CARGO_BIN_EXE_hostile");
/// 64 chunks of 4 KiB.
const SMALL: [&str; 4] = ["--memory", "256KiB", "--chunk", "4KiB"];

fn hostile(node: &MemoryNode, attack: &str, more: &[&str]) -> Result<Process> {
    let socket = node.socket.to_str().context("a socket path in UTF-8")?;
    let mut process = Process::start(HOSTILE, &[&[attack, "--socket", socket], more].concat())?;
    ensure!(process.line()? == "ready\n", "{attack} is not ready");
    Ok(process)
}

fn use_pool(node: &MemoryNode) -> Result<()> {
    let pool = Pool::connect(&node.socket, Options::default())?;
    let grant = pool.allocate_blocking()?;
    pool.write_blocking(&grant, 0, b"from outside")?;
    pool.free_blocking(grant)?;
    Ok(())
}

/// One of two processes without a process id requests admission with the other one's QPs, and
/// disconnects.
#[test]
fn qps_of_another_process_are_not_admitted_in_a_pid_namespace() -> Result<()> {
    let Some(node) = MemoryNode::start_contained("contained-hijack", &SMALL)? else {
        return Ok(());
    };
    use_pool(&node).context("a normal process outside the namespace")?;
    let mut attached = hostile(&node, "hijack", &[])?;
    attached.send_line("attach")?;
    let numbers = attached.report()?;
    let mut attacker = hostile(&node, "hijack", &[])?;
    attacker.send_line(&numbers.to_string())?;
    let report = attacker.report()?;
    drop(attacker);
    let refusals = report["why"].as_array().map_or(0, Vec::len);
    ensure!(refusals == 3, "admitted with foreign QPs: {report}");
    // The control thread serves requests in order, so it has already processed the end of the
    // attacker's connections.
    let control = Control::pool(&node.socket)?;
    ensure!(matches!(control.ask(Request::Audit)?, Reply::Done), "the audit failed");
    attached.send_line("go on")?;
    attached.report().context("the attached process lost its NIC session")?;
    attached.end()
}

/// A process without a process id opens as many connections as one process may have. Another
/// process without a process id can still connect.
#[test]
fn connection_limit_is_per_process_outside_a_pid_namespace() -> Result<()> {
    let Some(node) = MemoryNode::start_contained("contained-crowd", &SMALL)? else {
        return Ok(());
    };
    let mut crowd = hostile(&node, "connections", &["--count", "3000"])?;
    crowd.send_line("go")?;
    crowd.report()?;
    use_pool(&node).context("a second process outside the namespace")?;
    crowd.send_line("end")?;
    crowd.report()?;
    crowd.end()
}
