//! Hostile compute nodes against the pool: frees, arguments of requests, keys, ranges, exhaustion.
//! Each attacker is a separate process; victims work at the same time and must not be affected.

use anyhow::{Result, ensure};
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
/// Arguments of a second victim.
const SECOND: [&str; 4] = ["--pause-us", "150", "--seed", "12"];

fn scene(name: &str) -> Result<Scene> {
    Scene::start(name, PROGRAMS, &SMALL, &[&CALM, &SECOND])
}

/// The chunks of the first victim, for an attack's `--of`.
fn targets(scene: &Scene) -> String {
    scene.held[0].to_string()
}

fn number(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("no number {name} in {report}"))
}

/// Runs an attack on the first victim's chunks, with this `--count`.
fn attack(name: &str, count: &str) -> Result<Value> {
    let mut scene = scene(name)?;
    let of = targets(&scene);
    let report = scene.attack(name, &["--of", &of, "--count", count])?;
    scene.victims_worked()?;
    scene.end()?;
    Ok(report)
}

#[test]
fn free_of_a_foreign_chunk_is_refused() -> Result<()> {
    let report = attack("foreign-free", if full() { "2000" } else { "50" })?;
    ensure!(number(&report, "refused") >= 200, "{report}");
    Ok(())
}

/// Sequential frees of a chunk, and up to 15 concurrent ones.
#[test]
fn double_free_is_refused() -> Result<()> {
    let report = attack("double-free", if full() { "1000" } else { "200" })?;
    ensure!(number(&report, "refused") >= 400, "{report}");
    Ok(())
}

#[test]
fn free_of_an_invalid_entry_is_refused() -> Result<()> {
    // The count is the number of chunks; the null entry follows them.
    let report = attack("unknown-free", "64")?;
    ensure!(number(&report, "refused") == 7, "{report}");
    Ok(())
}

#[test]
fn wrong_qp_number_gives_no_access() -> Result<()> {
    let report = attack("wrong-qpn", "0")?;
    ensure!(number(&report, "refused") >= 4 * number(&report, "named"), "{report}");
    Ok(())
}

#[test]
fn unwritable_reply_breaks_only_the_senders_connection() -> Result<()> {
    let report = attack("unwritable-reply", "0")?;
    ensure!(number(&report, "targets") == 10, "{report}");
    Ok(())
}

#[test]
fn malformed_requests_break_only_the_senders_connection() -> Result<()> {
    attack("malformed", "0").map(drop)
}

#[test]
fn requests_beyond_the_credits_wait() -> Result<()> {
    let mut scene = Scene::start(
        "over-credit",
        PROGRAMS,
        &SMALL,
        &[&[&CALM[..], &["--may-be-empty"]].concat(), &[&SECOND[..], &["--may-be-empty"]].concat()],
    )?;
    scene.attack("over-credit", &["--count", "10"])?;
    scene.victims_worked()?;
    scene.end()?;
    Ok(())
}

#[test]
fn client_that_never_polls_blocks_only_itself() -> Result<()> {
    attack("never-poll", "0").map(drop)
}

#[test]
fn all_tags_of_a_foreign_key_are_refused() -> Result<()> {
    let report = attack("tags", "0")?;
    // Four chunks, two keys each.
    ensure!(number(&report, "tried") == 4 * 2 * (256 + 8), "{report}");
    Ok(())
}

#[test]
fn access_beyond_chunk_borders_is_refused() -> Result<()> {
    let report = attack("borders", "0")?;
    ensure!(number(&report, "granted") >= 50 && number(&report, "refused") >= 200, "{report}");
    Ok(())
}

/// The attacker frees a chunk with WRITEs in flight that continue after the free.
#[test]
fn released_key_is_revoked() -> Result<()> {
    let report = attack("reuse", if full() { "4000" } else { "400" })?;
    ensure!(number(&report, "cut_off_by_it") > 0, "{report}");
    Ok(())
}

/// The attacker allocates all chunks. The victims' allocations fail with `OutOfMemory`, their
/// chunks stay intact, and after the attacker's death they can allocate again.
#[test]
fn empty_pool_is_reported_and_recovers() -> Result<()> {
    let may = ["--may-be-empty", "--allocate-every", "1"];
    let mut scene = Scene::start(
        "hoard",
        PROGRAMS,
        &SMALL,
        &[&[&CALM[..], &may].concat(), &[&SECOND[..], &may].concat()],
    )?;
    let mut hoarder = scene.hostile("hoard", &["--ms", "100"])?;
    hoarder.send_line("go")?;
    let report = hoarder.report()?;
    scene.mark()?;
    std::thread::sleep(std::time::Duration::from_millis(50));
    let (mut empty, mut allocated) = (0, 0);
    for victim in scene.mark()? {
        empty += number(&victim, "empty");
        allocated += number(&victim, "allocated");
    }
    // Each victim may have held one chunk that it was about to free.
    ensure!(number(&report, "held") >= 54, "{report}");
    ensure!(empty > 0, "the pool was not empty: {allocated} allocations");
    hoarder.kill()?;
    // Several windows, because on a busy machine a victim may not be scheduled in each of them.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let mut allocated = 0;
    loop {
        allocated += scene.mark()?.iter().map(|v| number(v, "allocated")).sum::<u64>();
        if allocated > 10 {
            break;
        }
        ensure!(std::time::Instant::now() < deadline, "no memory after the attacker's death");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    scene.end()?;
    Ok(())
}

/// An attacker fills its chunks and is killed with WRITEs in flight. A client that allocates the
/// chunks immediately afterwards must find zeros.
#[test]
fn chunks_of_a_killed_client_are_cleared() -> Result<()> {
    let may = ["--may-be-empty"];
    let victims: [&[&str]; 2] = [&[&CALM[..], &may].concat(), &[&SECOND[..], &may].concat()];
    let mut scene = Scene::start("spoil", PROGRAMS, &SMALL, &victims)?;
    for _ in 0..if full() { 50 } else { 4 } {
        let mut spoiler = scene.hostile("spoil", &["--count", "48"])?;
        let mut scavenger = scene.hostile("scavenge", &["--count", "50"])?;
        spoiler.send_line("go")?;
        let report = spoiler.report()?;
        ensure!(number(&report, "spoiled") >= 46, "{report}");
        scavenger.send_line("go")?;
        spoiler.kill()?;
        let report = scavenger.report()?;
        ensure!(number(&report, "all_zero") == 50, "{report}");
        scavenger.end()?;
    }
    scene.victims_worked()?;
    scene.end()?;
    Ok(())
}

/// Many compute nodes stop their free chains at the same time. The flushed WQEs must not overflow
/// the CQ that notifies the memory node's CPU.
#[test]
fn concurrent_invalid_frees_are_all_answered() -> Result<()> {
    let mut scene = Scene::start(
        "all-stop",
        PROGRAMS,
        &["--memory", "1MiB", "--chunk", "4KiB", "--credits", "64"],
        &[&CALM],
    )?;
    let report = scene.attack("all-stop-at-once", &["--count", "150"])?;
    ensure!(number(&report, "compute_nodes") == 150, "{report}");
    scene.victims_worked()?;
    scene.end()?;
    Ok(())
}

/// A client repeatedly re-establishes its management connection with requests in flight.
#[test]
fn resets_with_requests_in_flight_lose_no_chunk() -> Result<()> {
    let may = ["--may-be-empty"];
    let mut scene = Scene::start(
        "reset-storm",
        PROGRAMS,
        &SMALL,
        &[&[&CALM[..], &may].concat(), &[&SECOND[..], &may].concat()],
    )?;
    scene.attack("reset-storm", &["--count", if full() { "6000" } else { "300" }])?;
    scene.victims_worked()?;
    scene.end()?;
    Ok(())
}

/// Clients die or reset their connections with requests in flight while the NIC serves 512 other
/// busy QPs. The memory node must wait for running chains, even if the NIC schedules them late.
#[test]
fn clients_killed_under_load_lose_no_chunk() -> Result<()> {
    let may = ["--may-be-empty"];
    let victims: [&[&str]; 1] = [&[&CALM[..], &may].concat()];
    let mut scene = Scene::start("die-in-flood", PROGRAMS, &SMALL, &victims)?;
    let mut flood = scene.hostile("load", &["--seed", "7"])?;
    flood.send_line("on")?;
    flood.report()?;
    for _ in 0..if full() { 200 } else { 6 } {
        let mut dying = scene.hostile("in-flight", &[])?;
        dying.send_line("go")?;
        dying.report()?;
        dying.kill()?;
        scene.attack("reset-storm", &["--count", "12"])?;
    }
    flood.send_line("off")?;
    flood.report()?;
    flood.end()?;
    scene.victims_worked()?;
    scene.end()?;
    Ok(())
}

/// A client is stopped (SIGSTOP) with requests of every kind in flight, and later continued or
/// killed. After continuing, all of its requests complete normally.
#[test]
fn stopped_client_does_not_delay_others() -> Result<()> {
    let mut scene = scene("stopped-client")?;
    for kill in [false, true] {
        let mut stopped = scene.hostile("in-flight", &[])?;
        stopped.send_line("go")?;
        stopped.report()?;
        stopped.signal(Signal::STOP)?;
        scene.mark()?;
        std::thread::sleep(std::time::Duration::from_millis(200));
        scene.victims_worked()?;
        if kill {
            stopped.signal(Signal::KILL)?;
        } else {
            stopped.signal(Signal::CONT)?;
            stopped.send_line("go on")?;
            stopped.report()?;
            stopped.end()?;
        }
    }
    scene.end()?;
    Ok(())
}
