//! Attacks through a function of the NIC: foreign objects, windows, limits, file descriptors,
//! noise, the control socket. Each attacker is a separate process; victims work at the same time
//! and must not be affected.

use anyhow::{Context, Result, ensure};
use granary_tests::node::full;
use granary_tests::scene::{Process, Programs, Scene};
use serde_json::{Value, json};

const PROGRAMS: Programs =
    Programs { hostile: env!("CARGO_BIN_EXE_hostile"), victim: env!("CARGO_BIN_EXE_victim") };

/// 64 chunks of 4 KiB.
const SMALL: [&str; 4] = ["--memory", "256KiB", "--chunk", "4KiB"];
/// Arguments of a victim that pauses, to leave CPU time to other processes.
const CALM: [&str; 4] = ["--pause-us", "100", "--seed", "21"];
/// Arguments of a second victim, which tolerates an empty pool.
const SECOND: [&str; 5] = ["--pause-us", "150", "--seed", "22", "--may-be-empty"];

fn scene(name: &str) -> Result<Scene> {
    Scene::start(name, PROGRAMS, &SMALL, &[&CALM, &SECOND])
}

fn number(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("no number {name} in {report}"))
}

/// Runs an attack on the first victim's chunks.
fn attack(name: &str, more: &[&str]) -> Result<Value> {
    let mut scene = scene(name)?;
    let of = scene.held[0].to_string();
    let report = scene.attack(name, &[&["--of", &of], more].concat())?;
    scene.victims_worked()?;
    scene.end()?;
    Ok(report)
}

/// Runs an attack that allocates a resource, reports, and keeps the resource until the next
/// command. Meanwhile the victims work, and a new client gets the resources that it needs.
fn hold(name: &str, more: &[&str]) -> Result<Value> {
    let mut scene = scene(name)?;
    let mut attacker = scene.hostile(name, more)?;
    attacker.send_line("go")?;
    let report = attacker.report()?;
    scene.mark()?;
    std::thread::sleep(std::time::Duration::from_millis(50));
    scene.victims_worked()?;
    scene.check_new_client().context("a new client while the attacker holds its resources")?;
    attacker.send_line("end")?;
    attacker.report()?;
    attacker.end()?;
    scene.end()?;
    Ok(report)
}

#[test]
fn umrs_reach_own_windows_only() -> Result<()> {
    let report = attack("umr", &[])?;
    ensure!(number(&report, "refused") > 60, "{report}");
    Ok(())
}

#[test]
fn wait_and_enable_reach_own_queues_only() -> Result<()> {
    let report = attack("enable", &[])?;
    ensure!(number(&report, "refused") > 900, "{report}");
    Ok(())
}

#[test]
fn verbs_reach_own_objects_only() -> Result<()> {
    let report = attack("verbs", &[])?;
    ensure!(number(&report, "refused") > 2000, "{report}");
    Ok(())
}

#[test]
fn qps_without_mutual_connection_exchange_nothing() -> Result<()> {
    let report = attack("connect", &[])?;
    ensure!(number(&report, "refused") > 150, "{report}");
    Ok(())
}

#[test]
fn objects_are_limited() -> Result<()> {
    hold("objects", &[]).map(drop)
}

/// Each piece of shared memory is a mapping in the memory node's process, which may have about
/// 65,530 mappings.
#[test]
fn shared_memory_is_limited() -> Result<()> {
    let report = hold("memories", &["--count", "40"])?;
    println!("{report}");
    ensure!(report["why"].as_str().is_some_and(|w| w.contains("limit")), "{report}");
    Ok(())
}

#[test]
fn connections_are_limited() -> Result<()> {
    hold("connections", &["--count", "3000"]).map(drop)
}

#[test]
fn qps_of_many_functions_are_limited() -> Result<()> {
    let report = hold("many-functions", &["--count", "8"])?;
    println!("{report}");
    Ok(())
}

/// An admission request must name each QP once, and must not exceed the memory node's number of
/// groups.
#[test]
fn groups_are_limited() -> Result<()> {
    let report = attack("groups", &[])?;
    ensure!(report["refusals"].as_array().is_some_and(|r| r.len() == 5), "{report}");
    Ok(())
}

#[test]
fn only_sealed_shared_memory_is_accepted() -> Result<()> {
    let report = attack("descriptors", &[])?;
    let refusals = report["refusals"].as_object().context("refusals")?;
    ensure!(refusals.values().all(|why| why.as_str().is_some_and(|w| w.len() > 20)), "{report}");
    Ok(())
}

#[test]
fn memory_does_not_shrink_under_the_nic() -> Result<()> {
    attack("shrink", &["--count", "200"]).map(drop)
}

/// The attacker fills every ring, record, doorbell and word that it shares with the NIC with random
/// bytes. The full run takes minutes.
#[test]
fn nic_survives_noise_in_all_shared_memory() -> Result<()> {
    let (seeds, ms) = if full() { (16, "15000") } else { (3, "1000") };
    let first = std::env::var("GRANARY_NOISE_SEED").ok().map_or(Ok(1), |s| s.parse())?;
    for seed in first..first + seeds {
        println!("seed {seed}");
        let report = attack("noise", &["--seed", &seed.to_string(), "--ms", ms])?;
        println!("{report}");
        ensure!(number(&report, "resets") > 0, "no QP broke: {report}");
    }
    Ok(())
}

#[test]
fn control_socket_survives_garbage() -> Result<()> {
    let ms = if full() { "20000" } else { "700" };
    let before = std::time::Instant::now();
    let mut scene = scene("garbage")?;
    let descriptors = || Ok::<_, std::io::Error>(std::fs::read_dir(scene.fds())?.count());
    let first = descriptors()?;
    let report = scene.attack("garbage", &["--ms", ms])?;
    println!("{report}, {:?}", before.elapsed());
    // The memory node must close the descriptors that came with the packets.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while descriptors()? > first {
        ensure!(
            std::time::Instant::now() < deadline,
            "{first} descriptors, now {}",
            descriptors()?
        );
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    scene.victims_worked()?;
    scene.end()?;
    Ok(())
}

#[test]
fn client_that_never_reads_replies_delays_no_other() -> Result<()> {
    attack("deaf", &["--count", "16", "--ms", "500"]).map(drop)
}

/// A process is attached but not yet admitted. Another process requests admission with the first
/// one's QPs and disconnects.
#[test]
fn qps_of_another_process_are_not_admitted() -> Result<()> {
    let mut scene = scene("hijack")?;
    let mut attached = scene.hostile("hijack", &[])?;
    attached.send_line("attach")?;
    let numbers = attached.report()?;
    let mut attacker = scene.hostile("hijack", &[])?;
    attacker.send_line(&numbers.to_string())?;
    let report = attacker.report()?;
    println!("{report}");
    drop(attacker);
    // Gives the memory node time to process the end of the attacker's connections.
    std::thread::sleep(std::time::Duration::from_millis(50));
    attached.send_line("go on")?;
    attached.report().context("the attached process lost its NIC session")?;
    attached.end()?;
    let refusals = report["why"].as_array().map_or(0, Vec::len);
    ensure!(refusals == 3, "admitted with foreign QPs: {report}");
    scene.victims_worked()?;
    scene.end()?;
    Ok(())
}

/// OneSidedMW §2.3: a client of the same server finds the key of a type-1 window by trying all 256
/// tags, and can then read and write the window. The same attack on a type-2 window fails.
#[test]
fn tag_search_opens_type_1_but_not_type_2_windows() -> Result<()> {
    let mut scene = scene("type1")?;
    for seed in ["1", "2", "3"] {
        let mut server = scene.hostile("type1-server", &["--seed", seed])?;
        let mut owner = scene.hostile("type1-client", &[])?;
        let mut stranger = scene.hostile("type1-client", &["--count", "512"])?;
        let go = |p: &mut Process| -> Result<Value> {
            p.send_line("go")?;
            p.report()
        };
        let (serving, owners, strangers) = (go(&mut server)?, go(&mut owner)?, go(&mut stranger)?);
        server.send_line(&json!([owners, strangers]).to_string())?;
        let windows = server.report()?;
        let order = |order: &str, peers: &Value| {
            json!({ "order": order, "peers": peers, "windows": windows }).to_string()
        };
        owner.send_line(&order("own", &serving["owner"]))?;
        owner.report()?;
        stranger.send_line(&order("search", &serving["other"]))?;
        let found = stranger.report()?;
        stranger.report()?;
        owner.send_line(&order("look", &serving["owner"]))?;
        let intact = owner.report()?;
        owner.report()?;
        println!("seed {seed}: {found}, {intact}");
        ensure!(found[0]["secret"] == true, "the attack on type 1 failed: {found}");
        ensure!(found[1] == json!({ "tries": 256, "secret": false }), "type 2: {found}");
        ensure!(intact["intact"] == json!([false, true]), "{intact}");
        server.send_line("end")?;
        for process in [server, owner, stranger] {
            process.end()?;
        }
    }
    scene.victims_worked()?;
    scene.end()?;
    Ok(())
}
