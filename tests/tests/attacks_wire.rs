//! The attacks on the pool (`attacks_chunks.rs`) from another host, over RoCEv2. The link loses,
//! duplicates and reorders packets, and victims run on the same host. The attacker can use its NIC
//! but cannot change it, like a tenant. Tokens do not stop an attacker who forges packets on the
//! wire (docs/user/security.md).
//!
//! The tests need network namespaces; they are skipped if this user may not create any.

use anyhow::{Result, ensure};
use granary_tests::hosts::{Hosts, Impairment};
use granary_tests::node::full;
use granary_tests::scene::{Programs, Scene};
use rustix::process::Signal;
use serde_json::Value;

const PROGRAMS: Programs =
    Programs { hostile: env!("CARGO_BIN_EXE_hostile"), victim: env!("CARGO_BIN_EXE_victim") };

/// 64 chunks of 4 KiB.
const SMALL: [&str; 4] = ["--memory", "256KiB", "--chunk", "4KiB"];
/// Arguments of a victim that pauses, to leave CPU time to other processes.
const CALM: [&str; 4] = ["--pause-us", "100", "--seed", "11"];
const MAY_BE_EMPTY: [&str; 5] = ["--pause-us", "100", "--seed", "12", "--may-be-empty"];

fn scene(name: &str, victim: &[&str]) -> Result<Option<Scene>> {
    let impairment = Impairment { lost: 5, duplicated: 5, delayed: 5, seed: 0x5eed };
    let Some(hosts) = Hosts::with(impairment)? else { return Ok(None) };
    let name = format!("wire-{name}");
    Scene::start_between(hosts, &name, PROGRAMS, &SMALL, &[victim]).map(Some)
}

/// Runs an attack on the victim's chunks and returns its report. `counts`: the value of `--count`
/// in short runs, and in full runs.
fn attack(name: &str, counts: [&str; 2]) -> Result<Option<Value>> {
    let Some(mut scene) = scene(name, &CALM)? else { return Ok(None) };
    let of = scene.held[0].to_string();
    let report = scene.attack(name, &["--of", &of, "--count", counts[full() as usize]])?;
    scene.victims_worked()?;
    scene.end()?;
    Ok(Some(report))
}

fn at_least(report: Option<Value>, name: &str, min: u64) -> Result<()> {
    let Some(report) = report else { return Ok(()) };
    ensure!(report[name].as_u64().is_some_and(|n| n >= min), "{report}");
    Ok(())
}

#[test]
fn free_of_a_foreign_chunk_is_refused() -> Result<()> {
    at_least(attack("foreign-free", ["10", "400"])?, "refused", 40)
}

#[test]
fn double_free_is_refused() -> Result<()> {
    at_least(attack("double-free", ["20", "400"])?, "refused", 40)
}

#[test]
fn free_of_an_invalid_entry_is_refused() -> Result<()> {
    at_least(attack("unknown-free", ["64", "64"])?, "refused", 7)
}

#[test]
fn wrong_qp_number_gives_no_access() -> Result<()> {
    at_least(attack("wrong-qpn", ["0", "0"])?, "refused", 80)
}

#[test]
fn unwritable_reply_breaks_only_the_senders_connection() -> Result<()> {
    at_least(attack("unwritable-reply", ["0", "0"])?, "targets", 10)
}

#[test]
fn malformed_requests_break_only_the_senders_connection() -> Result<()> {
    attack("malformed", ["0", "0"]).map(drop)
}

#[test]
fn client_that_never_polls_blocks_only_itself() -> Result<()> {
    attack("never-poll", ["0", "0"]).map(drop)
}

#[test]
fn all_tags_of_a_foreign_key_are_refused() -> Result<()> {
    // Four chunks, two keys each.
    at_least(attack("tags", ["0", "0"])?, "tried", 4 * 2 * (256 + 8))
}

#[test]
fn access_beyond_chunk_borders_is_refused() -> Result<()> {
    at_least(attack("borders", ["0", "0"])?, "refused", 200)
}

/// The attacker frees a chunk with WRITEs in flight that continue after the free; some of them are
/// retransmissions.
#[test]
fn released_key_is_revoked() -> Result<()> {
    at_least(attack("reuse", ["100", "2000"])?, "cut_off_by_it", 1)
}

/// An attacker fills its chunks and is killed with WRITEs in flight, some of them unacknowledged. A
/// client that allocates the chunks immediately afterwards must find zeros.
#[test]
fn chunks_of_a_killed_client_are_cleared() -> Result<()> {
    let Some(mut scene) = scene("spoil", &MAY_BE_EMPTY)? else { return Ok(()) };
    for _ in 0..if full() { 20 } else { 2 } {
        let mut spoiler = scene.hostile("spoil", &["--count", "48"])?;
        let mut scavenger = scene.hostile("scavenge", &["--count", "50"])?;
        spoiler.send_line("go")?;
        let report = spoiler.report()?;
        ensure!(report["spoiled"].as_u64() >= Some(46), "{report}");
        scavenger.send_line("go")?;
        spoiler.kill()?;
        let report = scavenger.report()?;
        ensure!(report["all_zero"] == 50, "{report}");
        scavenger.end()?;
    }
    scene.victims_worked()?;
    scene.end().map(drop)
}

/// A client repeatedly re-establishes its management connection with requests and retransmissions
/// in flight.
#[test]
fn resets_with_requests_in_flight_lose_no_chunk() -> Result<()> {
    let Some(mut scene) = scene("reset-storm", &MAY_BE_EMPTY)? else { return Ok(()) };
    scene.attack("reset-storm", &["--count", if full() { "1000" } else { "50" }])?;
    scene.victims_worked()?;
    scene.end().map(drop)
}

/// A client is stopped (SIGSTOP) with requests of every kind in flight while its NIC keeps running.
/// Then the client is killed, and its NIC a moment later.
#[test]
fn clients_stopped_and_killed_lose_no_chunk() -> Result<()> {
    let Some(mut scene) = scene("die", &MAY_BE_EMPTY)? else { return Ok(()) };
    for _ in 0..if full() { 30 } else { 3 } {
        let mut dying = scene.hostile("in-flight", &[])?;
        dying.send_line("go")?;
        dying.report()?;
        dying.signal(Signal::STOP)?;
        scene.victims_worked()?;
        dying.kill()?;
    }
    scene.end().map(drop)
}
