//! Hostile compute nodes against scheme `finemem`, each a separate process that posts its own
//! verbs. Some attacks are refused by a guard, a window or the NIC, and must not affect victims.
//! Other attacks cannot be refused, because compute nodes change the metadata themselves.

use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use granary_tests::node::{MemoryNode, full};
use granary_tests::scene::{Process, Programs, Scene};
use pool::{Error, Options, Pool};
use serde_json::{Value, json};

const PROGRAMS: Programs =
    Programs { hostile: env!("CARGO_BIN_EXE_hostile"), victim: env!("CARGO_BIN_EXE_victim") };

/// 64 chunks of 4 KiB: two spans.
const SMALL: [&str; 6] = ["--scheme", "finemem", "--memory", "256KiB", "--chunk", "4KiB"];
/// Arguments of a victim that pauses, to leave CPU time to other processes.
const CALM: [&str; 4] = ["--pause-us", "100", "--seed", "11"];
/// Arguments of a second victim.
const SECOND: [&str; 4] = ["--pause-us", "150", "--seed", "12"];

fn number(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("no number {name} in {report}"))
}

/// Runs an attack on the first of two victims. Afterwards all chunks are free and the audit of the
/// metadata succeeds.
fn attack(name: &str, more: &[&str]) -> Result<Value> {
    let mut scene = Scene::start(name, PROGRAMS, &SMALL, &[&CALM, &SECOND])?;
    let of = scene.held[0].to_string();
    let report = scene.attack(name, &[&["--of", &of], more].concat())?;
    scene.victims_worked()?;
    scene.end()?;
    Ok(report)
}

#[test]
fn access_qp_reaches_no_foreign_block_or_metadata() -> Result<()> {
    let report = attack("tree-guess", &[])?;
    ensure!(number(&report, "refused") > 512, "{report}");
    Ok(())
}

/// Includes double frees, and accesses when another client may own the block.
#[test]
fn keys_of_freed_blocks_are_revoked() -> Result<()> {
    let rounds = if full() { "500" } else { "20" };
    let report = attack("tree-late", &["--count", rounds])?;
    ensure!(number(&report, "refused") >= 60, "{report}");
    Ok(())
}

#[test]
fn management_qp_has_read_and_atomic_access_only() -> Result<()> {
    let report = attack("tree-beyond", &[])?;
    ensure!(number(&report, "refused") >= 18, "{report}");
    Ok(())
}

/// Allocations in that section, and the memory node's scan, conflict with the attacker's CASes.
#[test]
fn cas_storm_on_a_header_does_not_block_allocation() -> Result<()> {
    let time = if full() { "20000" } else { "500" };
    let report = attack("tree-storm", &["--ms", time])?;
    ensure!(number(&report, "changed") > 100, "{report}");
    Ok(())
}

/// The attacker's blocks whose logs name other clients are reclaimed when those clients disconnect.
#[test]
fn wrong_owners_in_logs_harm_no_other_client() -> Result<()> {
    let report = attack("tree-misnames", &[])?;
    ensure!(number(&report, "misnamed") >= 3, "{report}");
    Ok(())
}

fn hostile(node: &MemoryNode, attack: &str, more: &[&str]) -> Result<Value> {
    let socket = node.socket.to_str().context("a socket path in UTF-8")?;
    let mut attacker =
        Process::start(PROGRAMS.hostile, &[&[attack, "--socket", socket], more].concat())?;
    attacker.line()?;
    attacker.send_line("go")?;
    let report = attacker.report()?;
    attacker.end()?;
    Ok(report)
}

/// A limit of the scheme by design: a client with a management QP can free another client's block.
/// The block's owner then gets refusals and never reads another client's data. The owner's other
/// blocks are not affected.
#[test]
fn management_qp_can_free_a_foreign_block() -> Result<()> {
    let node = MemoryNode::start("tree-takes", &SMALL)?;
    let options = || Options { groups: Some(1), ..Options::default() };
    let victim = Pool::connect(&node.socket, options())?;
    let (lost, kept) = (victim.allocate_blocking()?, victim.allocate_blocking()?);
    for grant in [&lost, &kept] {
        victim.write_blocking(grant, 0, b"a secret")?;
    }
    let keys: Vec<u32> = lost.keys().iter().map(|k| k.0).collect();
    let of =
        json!([{ "entry": lost.entry.raw(), "addr": lost.addr, "len": lost.len, "keys": keys }]);
    let report = hostile(&node, "tree-takes", &["--of", &of.to_string()])?;
    ensure!(number(&report, "taken") == 1, "{report}");
    let mut bytes = [0; 8];
    let refused = loop {
        match victim.read_blocking(&lost, 0, &mut bytes) {
            // The key is valid until the next scan rebinds the window.
            Ok(()) => ensure!(&bytes == b"a secret" || bytes == [0; 8], "{bytes:?}"),
            Err(e) => break e,
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    ensure!(matches!(refused, Error::Access { .. }), "{refused}");
    // The next owner of the block reads zeros.
    let next = Pool::connect(&node.socket, options())?;
    while let Ok(grant) = next.allocate_blocking() {
        next.read_blocking(&grant, 0, &mut bytes)?;
        ensure!(bytes == [0; 8], "{bytes:?}");
    }
    victim.read_blocking(&kept, 0, &mut bytes)?;
    ensure!(&bytes == b"a secret");
    let freed = victim.free_blocking(lost);
    ensure!(matches!(freed, Err(Error::NotYours { .. })), "{freed:?}");
    Ok(())
}

/// With random metadata the memory node keeps running, answers, admits new clients and reclaims
/// departed ones.
#[test]
fn memory_node_survives_random_metadata() -> Result<()> {
    for seed in 1..=if full() { 40 } else { 4 } {
        let node = MemoryNode::start(&format!("tree-nonsense-{seed}"), &SMALL)?;
        let seeds = seed.to_string();
        let report = hostile(&node, "tree-nonsense", &["--seed", &seeds, "--count", "3000"])?;
        ensure!(number(&report, "changed") > 1000, "seed {seed}: {report}");
        // A new client's allocations succeed or fail. They would wait forever if the memory node's
        // background work had ended.
        let (sender, results) = channel();
        let socket = node.socket.clone();
        std::thread::spawn(move || {
            let tried = Pool::connect(&socket, Options { groups: Some(1), ..Options::default() })
                .map(|pool| (0..8).filter(|_| pool.allocate_blocking().is_ok()).count());
            let _ = sender.send(tried);
        });
        let got = results.recv_timeout(Duration::from_secs(20));
        let got = got.with_context(|| format!("seed {seed}: a new client waits forever"))?;
        let got = got.with_context(|| format!("seed {seed}: a new client is not admitted"))?;
        let status = node.status().with_context(|| format!("seed {seed}"))?;
        println!("seed {seed}: a new client got {got} of 8; {status}");
    }
    Ok(())
}
