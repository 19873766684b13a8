//! The attacks on the pool (`attacks_chunks.rs`) from another host, over RoCEv2 on a cable that loses, doubles and
//! reorders packets, with victims on that host. The attacker's NIC is honest, as a tenant's is who may use
//! it and not change it; who can forge packets on the wire is beyond what tokens keep out (docs/security.md).
//!
//! Needs network namespaces: says so, and does nothing, where this user may not make any.

use anyhow::{Result, ensure};
use granary_tests::hosts::{Hosts, Trouble};
use granary_tests::node::full;
use granary_tests::scene::{Programs, Scene};
use serde_json::Value;

const PROGRAMS: Programs =
    Programs { hostile: env!("CARGO_BIN_EXE_hostile"), victim: env!("CARGO_BIN_EXE_victim") };

/// 64 chunks of 4 KiB.
const SMALL: [&str; 4] = ["--memory", "256KiB", "--chunk", "4KiB"];
/// A victim that leaves CPU to the others.
const CALM: [&str; 4] = ["--pause-us", "100", "--seed", "11"];
const MAY_BE_EMPTY: [&str; 5] = ["--pause-us", "100", "--seed", "12", "--may-be-empty"];

fn scene(name: &str, victim: &[&str]) -> Result<Option<Scene>> {
    let trouble = Trouble { lost: 5, doubled: 5, late: 5, seed: 0x5eed };
    let Some(hosts) = Hosts::with(trouble)? else { return Ok(None) };
    let name = format!("wire-{name}");
    Scene::start_between(hosts, &name, PROGRAMS, &SMALL, &[victim]).map(Some)
}

/// An attack from beginning to end, told the victim's chunks, with a `--count` for short runs and one for
/// full ones; its report.
fn attack(name: &str, counts: [&str; 2]) -> Result<Option<Value>> {
    let Some(mut scene) = scene(name, &CALM)? else { return Ok(None) };
    let of = scene.held[0].to_string();
    let report = scene.attack(name, &["--of", &of, "--count", counts[full() as usize]])?;
    scene.victims_worked()?;
    scene.end()?;
    Ok(Some(report))
}

fn at_least(report: Option<Value>, name: &str, least: u64) -> Result<()> {
    let Some(report) = report else { return Ok(()) };
    ensure!(report[name].as_u64().is_some_and(|n| n >= least), "{report}");
    Ok(())
}

#[test]
fn anothers_chunk_is_not_freed() -> Result<()> {
    at_least(attack("foreign-free", ["10", "400"])?, "refused", 40)
}

#[test]
fn a_chunk_is_freed_once() -> Result<()> {
    at_least(attack("double-free", ["20", "400"])?, "refused", 40)
}

#[test]
fn an_index_out_of_the_table_frees_nothing() -> Result<()> {
    at_least(attack("unknown-free", ["64", "64"])?, "refused", 7)
}

#[test]
fn a_wrong_qp_number_harms_its_sender_only() -> Result<()> {
    at_least(attack("wrong-qpn", ["0", "0"])?, "refused", 80)
}

#[test]
fn a_reply_that_cannot_be_written_harms_its_sender_only() -> Result<()> {
    at_least(attack("unwritable-reply", ["0", "0"])?, "targets", 10)
}

#[test]
fn malformed_requests_harm_their_sender_only() -> Result<()> {
    attack("malformed", ["0", "0"]).map(drop)
}

#[test]
fn who_never_polls_stops_itself_only() -> Result<()> {
    attack("never-poll", ["0", "0"]).map(drop)
}

#[test]
fn all_tags_of_anothers_key_are_refused() -> Result<()> {
    // Four chunks, two keys each.
    at_least(attack("tags", ["0", "0"])?, "tried", 4 * 2 * (256 + 8))
}

#[test]
fn a_chunk_ends_at_its_borders() -> Result<()> {
    at_least(attack("borders", ["0", "0"])?, "refused", 200)
}

/// Frees with WRITEs in flight, which go on after the free, some of them for the second time.
#[test]
fn a_released_key_is_dead() -> Result<()> {
    at_least(attack("reuse", ["100", "2000"])?, "cut_off_by_it", 1)
}

/// An attacker fills its chunks and is killed with WRITEs in flight, some of them not acknowledged; who gets
/// them next, at once, finds zeros.
#[test]
fn what_a_dead_client_left_is_gone() -> Result<()> {
    let Some(mut scene) = scene("spoil", &MAY_BE_EMPTY)? else { return Ok(()) };
    for _ in 0..if full() { 20 } else { 2 } {
        let mut spoiler = scene.hostile("spoil", &["--count", "48"])?;
        let mut scavenger = scene.hostile("scavenge", &["--count", "50"])?;
        spoiler.tell("go")?;
        let report = spoiler.report()?;
        ensure!(report["spoiled"].as_u64() >= Some(46), "{report}");
        scavenger.tell("go")?;
        spoiler.kill()?;
        let report = scavenger.report()?;
        ensure!(report["all_zero"] == 50, "{report}");
        scavenger.end()?;
    }
    scene.victims_worked()?;
    scene.end().map(drop)
}

/// Requests in flight, and on their way again, when their management connection is re-established.
#[test]
fn resets_with_requests_in_flight_lose_no_chunk() -> Result<()> {
    let Some(mut scene) = scene("reset-storm", &MAY_BE_EMPTY)? else { return Ok(()) };
    scene.attack("reset-storm", &["--count", if full() { "1000" } else { "50" }])?;
    scene.victims_worked()?;
    scene.end().map(drop)
}

/// Stopped in the middle with requests of every kind in flight, its NIC going on; then it is killed, and its
/// NIC a moment later.
#[test]
fn clients_that_stop_and_die_leave_the_pool_whole() -> Result<()> {
    let Some(mut scene) = scene("die", &MAY_BE_EMPTY)? else { return Ok(()) };
    for _ in 0..if full() { 30 } else { 3 } {
        let mut dying = scene.hostile("in-flight", &[])?;
        dying.tell("go")?;
        dying.report()?;
        dying.signal(libc::SIGSTOP)?;
        scene.victims_worked()?;
        dying.kill()?;
    }
    scene.end().map(drop)
}
