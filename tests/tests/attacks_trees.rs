//! Hostile compute nodes against scheme `finemem`, each a process with its own verbs: what a guard, a window or the NIC
//! refuses, with victims beside it that must not notice; and what nothing refuses, since compute nodes change the
//! metadata themselves.

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
/// A victim that leaves CPU to the others.
const CALM: [&str; 4] = ["--pause-us", "100", "--seed", "11"];
/// Another one.
const SECOND: [&str; 4] = ["--pause-us", "150", "--seed", "12"];

fn number(of: &Value, name: &str) -> u64 {
    of[name].as_u64().unwrap_or_else(|| panic!("no number {name} in {of}"))
}

/// An attack beside two victims, on the first one's chunks. The pool is whole afterwards, and its books are right.
fn attack(name: &str, more: &[&str]) -> Result<Value> {
    let mut scene = Scene::start(name, PROGRAMS, &SMALL, &[&CALM, &SECOND])?;
    let of = scene.held[0].to_string();
    let report = scene.attack(name, &[&["--of", &of], more].concat())?;
    scene.victims_worked()?;
    scene.end()?;
    Ok(report)
}

#[test]
fn no_tag_opens_others_blocks_or_the_metadata_on_an_access_qp() -> Result<()> {
    let report = attack("tree-guess", &[])?;
    ensure!(number(&report, "refused") > 512, "{report}");
    Ok(())
}

/// Also freed twice, and tried when others may have the block.
#[test]
fn keys_that_were_given_up_die() -> Result<()> {
    let rounds = if full() { "500" } else { "20" };
    let report = attack("tree-late", &["--count", rounds])?;
    ensure!(number(&report, "refused") >= 60, "{report}");
    Ok(())
}

#[test]
fn the_management_qp_reaches_the_metadata_by_read_and_atomics_only() -> Result<()> {
    let report = attack("tree-beyond", &[])?;
    ensure!(number(&report, "refused") >= 18, "{report}");
    Ok(())
}

/// Whoever allocates there meets it at every CAS, and so does the memory node's scan.
#[test]
fn a_storm_of_cas_on_one_header_keeps_nobody_from_allocating() -> Result<()> {
    let time = if full() { "20000" } else { "500" };
    let report = attack("tree-storm", &["--ms", time])?;
    ensure!(number(&report, "changed") > 100, "{report}");
    Ok(())
}

/// Logs of its own blocks that name others: they come back when these go.
#[test]
fn who_gives_others_names_to_its_own_blocks_harms_nobody() -> Result<()> {
    let report = attack("tree-misnames", &[])?;
    ensure!(number(&report, "misnamed") >= 3, "{report}");
    Ok(())
}

fn hostile(node: &MemoryNode, attack: &str, more: &[&str]) -> Result<Value> {
    let socket = node.socket.to_str().context("an odd path")?;
    let mut attacker =
        Process::start(PROGRAMS.hostile, &[&[attack, "--socket", socket], more].concat())?;
    attacker.line()?;
    attacker.tell("go")?;
    let report = attacker.report()?;
    attacker.end()?;
    Ok(report)
}

/// What the scheme does not withstand by design: who has a management QP gives another's block up in its place. Its owner
/// hears of it as of a refusal, and reads nobody else's data; what he holds beside it is as it was.
#[test]
fn who_has_a_management_qp_can_take_anothers_block_away() -> Result<()> {
    let node = MemoryNode::start("tree-takes", &SMALL)?;
    let options = || Options { groups: Some(1), ..Options::default() };
    let victim = Pool::connect(&node.socket, options())?;
    let (lost, kept) = (victim.allocate_blocking()?, victim.allocate_blocking()?);
    for grant in [&lost, &kept] {
        victim.write_blocking(grant, 0, b"a secret")?;
    }
    let keys: Vec<u32> = lost.keys().iter().map(|k| k.0).collect();
    let of = json!([{ "entry": lost.entry, "addr": lost.addr, "len": lost.len, "keys": keys }]);
    let report = hostile(&node, "tree-takes", &["--of", &of.to_string()])?;
    ensure!(number(&report, "taken") == 1, "{report}");
    let mut bytes = [0; 8];
    let refused = loop {
        match victim.read_blocking(&lost, 0, &mut bytes) {
            // Its key lives until the scan comes by.
            Ok(()) => ensure!(&bytes == b"a secret" || bytes == [0; 8], "{bytes:?}"),
            Err(e) => break e,
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    ensure!(matches!(refused, Error::Access { .. }), "{refused}");
    // Whoever has it now, it is clear.
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

/// Whatever is in the metadata: the memory node lives, answers, admits who comes and takes back who goes.
#[test]
fn nonsense_in_the_metadata_does_not_stop_the_memory_node() -> Result<()> {
    for seed in 1..=if full() { 40 } else { 4 } {
        let node = MemoryNode::start(&format!("tree-nonsense-{seed}"), &SMALL)?;
        let seeds = seed.to_string();
        let report = hostile(&node, "tree-nonsense", &["--seed", &seeds, "--count", "3000"])?;
        ensure!(number(&report, "changed") > 1000, "seed {seed}: {report}");
        // Who comes is told of memory or of none; a memory node whose background work had ended would leave him waiting.
        let (told, ends) = channel();
        let socket = node.socket.clone();
        std::thread::spawn(move || {
            let tried = Pool::connect(&socket, Options { groups: Some(1), ..Options::default() })
                .map(|pool| (0..8).filter(|_| pool.allocate_blocking().is_ok()).count());
            let _ = told.send(tried);
        });
        let got = ends.recv_timeout(Duration::from_secs(20));
        let got = got.with_context(|| format!("seed {seed}: a newcomer waits for ever"))?;
        let got = got.with_context(|| format!("seed {seed}: a newcomer is not let in"))?;
        let status = node.status().with_context(|| format!("seed {seed}"))?;
        println!("seed {seed}: a newcomer got {got} of 8; {status}");
    }
    Ok(())
}
