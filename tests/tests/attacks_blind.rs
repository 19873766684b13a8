//! Forged packets that any user of a compute node's host can send, without token, key or privilege.
//!
//! The tests need network namespaces; they are skipped if this user may not create any.

use anyhow::{Context, Result, ensure};
use bench_report::histogram::Latencies;
use granary_tests::hosts::Hosts;
use granary_tests::node::full;
use granary_tests::scene::{Programs, Scene};
use serde_json::Value;

const PROGRAMS: Programs =
    Programs { hostile: env!("CARGO_BIN_EXE_hostile"), victim: env!("CARGO_BIN_EXE_victim") };

/// 64 chunks of 4 KiB.
const SMALL: [&str; 4] = ["--memory", "256KiB", "--chunk", "4KiB"];
const CALM: [&str; 4] = ["--pause-us", "100", "--seed", "11"];

fn scene(name: &str, more: &[&str]) -> Result<Option<Scene>> {
    let Some(hosts) = Hosts::new()? else { return Ok(None) };
    let serve = [&SMALL[..], more].concat();
    Scene::start_between(hosts, &format!("blind-{name}"), PROGRAMS, &serve, &[&CALM]).map(Some)
}

fn dropped(scene: &Scene, why: &str) -> Result<u64> {
    let status = scene.node.status()?;
    status["dropped"][why].as_u64().with_context(|| format!("no count of {why} in {status}"))
}

/// Forged requests to free a chunk, with all PSNs, to both management QPs, from the IP address of
/// the chunk's owner.
#[test]
fn forged_frees_with_all_psns_have_no_effect() -> Result<()> {
    for more in [&[][..], &["--no-packet-authentication"]] {
        let Some(mut scene) = scene("sweep", more)? else { return Ok(()) };
        let count = if full() { "0" } else { "1000000" };
        let report = scene.attack("sweep", &["--count", count])?;
        let sent = report["sent"].as_u64().context("a count")?;
        ensure!(sent >= 2_000_000, "{report}");
        // The forger's UDP port differs from the peer's port.
        let strangers = dropped(&scene, "strangers")?;
        ensure!(strangers > sent / 10, "{strangers} of {sent} arrived");
        scene.victims_worked()?;
        scene.end()?;
    }
    Ok(())
}

/// Prints the latency of the victim's operations without and with the attack, without a limit. On
/// two cores the latency depends on where the scheduler puts four threads.
#[test]
fn packets_to_unknown_qps_are_dropped() -> Result<()> {
    let Some(mut scene) = scene("junk", &[])? else { return Ok(()) };
    let ms = if full() { "5000" } else { "500" };
    let p99 = |report: &Value, name: &str| -> Result<f64> {
        let latencies: Latencies = serde_json::from_value(report[name].clone())?;
        Ok(latencies.quantile_us(0.99))
    };
    let mut attacker = scene.hostile("junk", &["--ms", ms])?;
    scene.mark()?;
    std::thread::sleep(std::time::Duration::from_millis(ms.parse()?));
    let before = scene.mark()?.remove(0);
    attacker.send_line("go")?;
    let report = attacker.report()?;
    let beside = scene.mark()?.remove(0);
    attacker.end()?;
    let sent = report["sent"].as_u64().context("a count")?;
    let unknown = dropped(&scene, "unknown_qp")?;
    for name in ["read", "allocate"] {
        let [before, beside] = [&before, &beside].map(|report| p99(report, name));
        eprintln!("{name}: 99th percentile {:.1} us, beside junk {:.1} us", before?, beside?);
    }
    eprintln!("{sent} packets in {ms} ms, {unknown} of them reached the NIC");
    ensure!(unknown > sent / 10, "{unknown} of {sent} reached the NIC");
    ensure!(beside["rounds"].as_u64() > Some(0), "the victim made no progress: {beside}");
    scene.victims_worked()?;
    scene.end().map(drop)
}
