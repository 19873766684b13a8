//! A memory node in a container: in its PID namespace the processes outside have no process id.

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
    let socket = node.socket.to_str().context("a path of text")?;
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

/// Of two processes without a process id, one asks to be admitted with the QPs of the other, and leaves.
#[test]
fn qps_of_another_process_are_not_admitted_in_a_pid_namespace() -> Result<()> {
    let Some(node) = MemoryNode::start_contained("contained-hijack", &SMALL)? else {
        return Ok(());
    };
    use_pool(&node).context("an honest process outside the namespace")?;
    let mut attached = hostile(&node, "hijack", &[])?;
    attached.tell("attach")?;
    let numbers = attached.report()?;
    let mut attacker = hostile(&node, "hijack", &[])?;
    attacker.tell(&numbers.to_string())?;
    let report = attacker.report()?;
    drop(attacker);
    let refusals = report["why"].as_array().map_or(0, Vec::len);
    ensure!(refusals == 3, "admitted with another's QPs: {report}");
    // The control thread answers in order: the end of the attacker's connections came before this.
    let control = Control::pool(&node.socket)?;
    ensure!(matches!(control.ask(Request::Audit)?, Reply::Done), "the pool is not whole");
    attached.tell("go on")?;
    attached.report().context("the attached process lost its NIC session")?;
    attached.end()
}

/// A process without a process id takes all the connections that one process may have; another one, without
/// a process id as well, connects.
#[test]
fn processes_outside_a_pid_namespace_have_connections_each() -> Result<()> {
    let Some(node) = MemoryNode::start_contained("contained-crowd", &SMALL)? else {
        return Ok(());
    };
    let mut crowd = hostile(&node, "connections", &["--count", "3000"])?;
    crowd.tell("go")?;
    crowd.report()?;
    use_pool(&node).context("a process outside the namespace, beside one with many connections")?;
    crowd.tell("end")?;
    crowd.report()?;
    crowd.end()
}
