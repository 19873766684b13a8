//! Hostile compute nodes against the pool: frees, arguments of requests, keys, ranges, exhaustion. Each
//! attacker is a process of its own; victims work beside it and must not notice.

use anyhow::{Result, ensure};
use granary_tests::node::full;
use granary_tests::scene::{Programs, Scene};
use serde_json::Value;

const PROGRAMS: Programs =
    Programs { hostile: env!("CARGO_BIN_EXE_hostile"), victim: env!("CARGO_BIN_EXE_victim") };

/// 64 chunks of 4 KiB.
const SMALL: [&str; 4] = ["--memory", "256KiB", "--chunk", "4KiB"];
/// A victim that leaves CPU to the others.
const CALM: [&str; 4] = ["--pause-us", "100", "--seed", "11"];
/// Another one.
const SECOND: [&str; 4] = ["--pause-us", "150", "--seed", "12"];

fn scene(name: &str) -> Result<Scene> {
    Scene::start(name, PROGRAMS, &SMALL, &[&CALM, &SECOND])
}

/// The chunks of the first victim, for an attack's `--of`.
fn targets(scene: &Scene) -> String {
    scene.held[0].to_string()
}

fn number(of: &Value, name: &str) -> u64 {
    of[name].as_u64().unwrap_or_else(|| panic!("no number {name} in {of}"))
}

/// An attack that is told the first victim's chunks, with this `--count`.
fn attack(name: &str, count: &str) -> Result<Value> {
    let mut scene = scene(name)?;
    let of = targets(&scene);
    let report = scene.attack(name, &["--of", &of, "--count", count])?;
    scene.victims_worked()?;
    scene.end()?;
    Ok(report)
}

#[test]
fn anothers_chunk_is_not_freed() -> Result<()> {
    let report = attack("foreign-free", if full() { "2000" } else { "50" })?;
    ensure!(number(&report, "refused") >= 200, "{report}");
    Ok(())
}

/// One after the other, and up to 15 frees of the same chunk in flight at once.
#[test]
fn a_chunk_is_freed_once() -> Result<()> {
    let report = attack("double-free", if full() { "1000" } else { "200" })?;
    ensure!(number(&report, "refused") >= 400, "{report}");
    Ok(())
}

#[test]
fn an_index_out_of_the_table_frees_nothing() -> Result<()> {
    // The number of chunks: the null entry stands behind them.
    let report = attack("unknown-free", "64")?;
    ensure!(number(&report, "refused") == 7, "{report}");
    Ok(())
}

#[test]
fn a_wrong_qp_number_harms_its_sender_only() -> Result<()> {
    let report = attack("wrong-qpn", "0")?;
    ensure!(number(&report, "refused") >= 4 * number(&report, "named"), "{report}");
    Ok(())
}

#[test]
fn a_reply_that_cannot_be_written_harms_its_sender_only() -> Result<()> {
    let report = attack("unwritable-reply", "0")?;
    ensure!(number(&report, "targets") == 10, "{report}");
    Ok(())
}

#[test]
fn malformed_requests_harm_their_sender_only() -> Result<()> {
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
fn who_never_polls_stops_itself_only() -> Result<()> {
    attack("never-poll", "0").map(drop)
}

#[test]
fn all_tags_of_anothers_key_are_refused() -> Result<()> {
    let report = attack("tags", "0")?;
    // Four chunks, two keys each.
    ensure!(number(&report, "tried") == 4 * 2 * (256 + 8), "{report}");
    Ok(())
}

#[test]
fn a_chunk_ends_at_its_borders() -> Result<()> {
    let report = attack("borders", "0")?;
    ensure!(number(&report, "granted") >= 50 && number(&report, "refused") >= 200, "{report}");
    Ok(())
}

/// Frees with WRITEs in flight, which go on after the free.
#[test]
fn a_released_key_is_dead() -> Result<()> {
    let report = attack("reuse", if full() { "4000" } else { "400" })?;
    ensure!(number(&report, "cut_off_by_it") > 0, "{report}");
    Ok(())
}

/// The attacker takes everything. Victims are told that there is no memory, keep what they have, and get
/// memory again when it has died.
#[test]
fn an_empty_pool_is_no_error() -> Result<()> {
    let may = ["--may-be-empty", "--allocate-every", "1"];
    let mut scene = Scene::start(
        "hoard",
        PROGRAMS,
        &SMALL,
        &[&[&CALM[..], &may].concat(), &[&SECOND[..], &may].concat()],
    )?;
    let mut hoarder = scene.hostile("hoard", &["--ms", "100"])?;
    hoarder.tell("go")?;
    let report = hoarder.report()?;
    scene.mark()?;
    std::thread::sleep(std::time::Duration::from_millis(50));
    let (mut empty, mut allocated) = (0, 0);
    for victim in scene.mark()? {
        empty += number(&victim, "empty");
        allocated += number(&victim, "allocated");
    }
    // A victim may have had one that it allocates and frees in turns.
    ensure!(number(&report, "held") >= 54, "{report}");
    ensure!(empty > 0, "the pool was not empty: {allocated} allocations");
    hoarder.kill()?;
    // Where other programs want the CPUs, a victim may get a turn in few of these windows.
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

/// An attacker fills its chunks and is killed with WRITEs in flight; who gets them next, at once, finds
/// zeros.
#[test]
fn what_a_dead_client_left_is_gone() -> Result<()> {
    let may = ["--may-be-empty"];
    let victims: [&[&str]; 2] = [&[&CALM[..], &may].concat(), &[&SECOND[..], &may].concat()];
    let mut scene = Scene::start("spoil", PROGRAMS, &SMALL, &victims)?;
    for _ in 0..if full() { 50 } else { 4 } {
        let mut spoiler = scene.hostile("spoil", &["--count", "48"])?;
        let mut scavenger = scene.hostile("scavenge", &["--count", "50"])?;
        spoiler.tell("go")?;
        let report = spoiler.report()?;
        ensure!(number(&report, "spoiled") >= 46, "{report}");
        scavenger.tell("go")?;
        spoiler.kill()?;
        let report = scavenger.report()?;
        ensure!(number(&report, "all_zero") == 50, "{report}");
        scavenger.end()?;
    }
    scene.victims_worked()?;
    scene.end()?;
    Ok(())
}

/// Many compute nodes stop their free chains at the same moment: what that flushes must not overflow
/// what tells the memory node's CPU of it.
#[test]
fn many_refused_frees_at_once_are_all_answered() -> Result<()> {
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

/// Requests in flight when their own management connection is re-established, again and again.
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

/// The NIC has 512 other QPs to serve while clients die, or reset their connections, with requests in
/// flight: a chain that has begun is waited for, however long its turn takes to come.
#[test]
fn clients_that_die_under_a_flood_leave_the_pool_whole() -> Result<()> {
    let may = ["--may-be-empty"];
    let victims: [&[&str]; 1] = [&[&CALM[..], &may].concat()];
    let mut scene = Scene::start("die-in-flood", PROGRAMS, &SMALL, &victims)?;
    let mut flood = scene.hostile("load", &["--seed", "7"])?;
    flood.tell("on")?;
    flood.report()?;
    for _ in 0..if full() { 200 } else { 6 } {
        let mut dying = scene.hostile("in-flight", &[])?;
        dying.tell("go")?;
        dying.report()?;
        dying.kill()?;
        scene.attack("reset-storm", &["--count", "12"])?;
    }
    flood.tell("off")?;
    flood.report()?;
    flood.end()?;
    scene.victims_worked()?;
    scene.end()?;
    Ok(())
}

/// Stopped in the middle with requests of every kind in flight: it goes on as if nothing had been, or
/// it is killed.
#[test]
fn a_stopped_client_delays_nobody() -> Result<()> {
    let mut scene = scene("stopped-client")?;
    for kill in [false, true] {
        let mut stopped = scene.hostile("in-flight", &[])?;
        stopped.tell("go")?;
        stopped.report()?;
        stopped.signal(libc::SIGSTOP)?;
        scene.mark()?;
        std::thread::sleep(std::time::Duration::from_millis(200));
        scene.victims_worked()?;
        if kill {
            stopped.signal(libc::SIGKILL)?;
        } else {
            stopped.signal(libc::SIGCONT)?;
            stopped.tell("go on")?;
            stopped.report()?;
            stopped.end()?;
        }
    }
    scene.end()?;
    Ok(())
}
