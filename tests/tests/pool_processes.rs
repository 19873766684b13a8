//! Clients in separate processes, with a running `granary serve`.

use anyhow::Result;
use granary_tests::node::{Client, MemoryNode, full};
use granary_tests::thread::Thread;
use serde_json::Value;

const CLIENT: &str = env!("CARGO_BIN_EXE_pool-client");

fn start(node: &MemoryNode, ledger: &str, id: &str, more: &[&str]) -> Result<Client> {
    let mut arguments = vec!["--ledger", ledger, "--id", id];
    arguments.extend(more);
    Client::start(CLIENT, node, &arguments)
}

fn number(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("no number {name} in {report}"))
}

/// Two processes with two threads each use up to four chunks per thread of a pool of twelve, so the
/// pool is empty most of the time. No chunk ever has two owners, shows old contents or changes
/// while it is held, and all chunks are free at the end.
#[test]
fn chunks_are_exclusive_while_the_pool_is_near_empty() -> Result<()> {
    let node = MemoryNode::start("exclusive", &["--memory", "48KiB", "--chunk", "4KiB"])?;
    let ledger = node.ledger(12)?;
    let ledger = ledger.to_str().expect("a plain path");
    let rounds = if full() { "400000" } else { "100000" };
    let more = ["--rounds", rounds, "--threads", "2", "--hold", "4"];
    let mut clients = [start(&node, ledger, "1", &more)?, start(&node, ledger, "2", &more)?];
    clients.iter_mut().try_for_each(Client::go)?;
    let mut empty = 0;
    for client in &mut clients {
        let report = client.report()?;
        assert_eq!(number(&report, "rounds"), 2 * rounds.parse::<u64>()?);
        empty += number(&report, "empty");
        assert_eq!(number(&report, "allocations"), number(&report, "frees"), "{report}");
    }
    assert!(empty > 1000, "the pool was empty only {empty} times");
    clients.into_iter().try_for_each(Client::leave)?;
    let status = node.status()?;
    assert_eq!((number(&status, "chunks"), number(&status, "free")), (12, 12), "{status}");
    assert_eq!(number(&status, "allocations_cpu"), 0);
    assert_eq!(number(&status, "allocations_nic"), number(&status, "frees_nic"), "{status}");
    Ok(())
}

/// The memory node's CPU takes no part in allocations: with the control thread stopped by a tracer,
/// two clients do 100,000 rounds of allocate, write, read and free.
#[test]
fn allocations_work_without_the_control_thread() -> Result<()> {
    let node = MemoryNode::start("stopped", &["--memory", "4MiB", "--chunk", "64KiB"])?;
    let ledger = node.ledger(64)?;
    let ledger = ledger.to_str().expect("a plain path");
    let more = ["--rounds", "50000", "--hold", "8"];
    let mut clients = [start(&node, ledger, "1", &more)?, start(&node, ledger, "2", &more)?];
    let control = Thread::find(node.pid(), "granary-control")?;
    let nic = Thread::find(node.pid(), "granary-nic")?;
    let stopped = control.stop()?;
    let (control_before, nic_before) = (control.cpu_ns()?, nic.cpu_ns()?);
    clients.iter_mut().try_for_each(Client::go)?;
    for client in &mut clients {
        assert_eq!(number(&client.report()?, "rounds"), 50_000);
    }
    assert_eq!(control.state()?, 't', "the control thread ran in between");
    assert_eq!(control.cpu_ns()?, control_before, "the control thread took part");
    println!(
        "control CPU: 0 ns; NIC thread, which stands in for the hardware: {} ns per round",
        (nic.cpu_ns()? - nic_before) / 100_000
    );
    drop(stopped);
    clients.into_iter().try_for_each(Client::leave)?;
    let status = node.status()?;
    assert_eq!(number(&status, "free"), 64, "{status}");
    assert!(number(&status, "frees_nic") >= 100_000);
    Ok(())
}

/// The chunks of a killed client return to the pool; other clients are not affected.
#[test]
fn chunks_of_a_killed_client_return_to_the_pool() -> Result<()> {
    let node = MemoryNode::start("killed", &["--memory", "256KiB", "--chunk", "4KiB"])?;
    let ledger = node.ledger(64)?;
    let ledger = ledger.to_str().expect("a plain path");
    let mut kept = start(&node, ledger, "1", &["--rounds", "20000", "--hold", "8"])?;
    kept.go()?;
    for _ in 0..5 {
        let other = node.directory().join("other-ledger");
        std::fs::File::create(&other)?.set_len(4096)?;
        let other = other.to_str().expect("a plain path");
        let mut victim = start(&node, other, "2", &["--rounds", "100000000", "--hold", "8"])?;
        victim.go()?;
        // Waits until the victim has allocated 100 chunks.
        let seen = number(&node.status()?, "allocations_nic");
        while number(&node.status()?, "allocations_nic") < seen + 100 {}
        victim.kill()?;
    }
    assert_eq!(number(&kept.report()?, "rounds"), 20_000);
    kept.leave()?;
    let mut status = node.status()?;
    for _ in 0..1000 {
        if number(&status, "free") == 64 {
            break;
        }
        status = node.status()?;
    }
    assert_eq!((number(&status, "free"), number(&status, "clients")), (64, 0), "{status}");
    Ok(())
}
