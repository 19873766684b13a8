//! Effect of an attacker on a victim's latency: the 99th percentile of the victim's operations
//! during an attack, divided by that with a baseline neighbour. The two are measured in alternating
//! windows of one run. The test prints medians over the windows, so that a window in which the
//! scheduler puts two threads on one core does not spoil the result.
//!
//! On a machine with two cores any process that uses CPU time slows the other processes, and a
//! process that wakes up often interrupts them. Therefore there are three baselines. Attackers that
//! need no CPU (they give the NIC endless work and sleep) are compared with a neighbour that is
//! attached and sleeps. Attackers that need CPU are compared with a normal neighbour that READs
//! from its own chunk, one READ at a time, and spins. Attackers that wait for answers are compared
//! with a normal neighbour that sleeps between its READs.

use anyhow::{Context, Result, ensure};
use bench_report::histogram::Latencies;
use granary_tests::node::full;
use granary_tests::scene::{Process, Programs, Scene};
use granary_tests::thread::Thread;
use serde_json::Value;
use std::time::Duration;

const PROGRAMS: Programs =
    Programs { hostile: env!("CARGO_BIN_EXE_hostile"), victim: env!("CARGO_BIN_EXE_victim") };

/// The attacker's kinds of load: the index of the kind, its name in the table, and its baseline.
const KINDS: [(usize, &str, Baseline); 13] = [
    (2, "64 endless rings of NOPs", ASLEEP),
    (3, "64 endless rings of 8 B WRITEs", ASLEEP),
    (4, "64 endless rings of 1 MiB WRITEs", ASLEEP),
    (5, "64 endless rings of FAAs", ASLEEP),
    (6, "64 endless rings of binds", ASLEEP),
    (7, "512 endless rings of 4 KiB READs", ASLEEP),
    (8, "500 QPs waiting on a busy CQ", ASLEEP),
    (9, "1,000 idle QPs", ASLEEP),
    (10, "allocations and frees, 16 deep", BUSY),
    (11, "refused frees", NAPPING),
    (12, "refused accesses and resets", BUSY),
    (13, "slow control verbs", BUSY),
    (14, "false doorbells and hints", BUSY),
];
/// A baseline neighbour: the index of its kind of load, and its name in the table.
type Baseline = (usize, &'static str);
const ASLEEP: Baseline = (0, "asleep");
const BUSY: Baseline = (1, "busy");
const NAPPING: Baseline = (15, "napping");

const OPERATIONS: [&str; 5] = ["read", "write", "atomic", "allocate", "free"];
const ROUNDS: usize = 9;

/// The 99th percentile of each operation in a window, in us.
type P99s = [f64; OPERATIONS.len()];

fn p99s(report: &Value) -> Result<P99s> {
    let mut p99s = P99s::default();
    for (p99, name) in p99s.iter_mut().zip(OPERATIONS) {
        let latencies: Latencies =
            serde_json::from_value(report[name].clone()).context("a histogram")?;
        *p99 = latencies.quantile_us(0.99);
    }
    Ok(p99s)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Runs one window with a working neighbour; returns the victim's report.
fn window(scene: &mut Scene, neighbour: &mut Process, length: Duration) -> Result<Value> {
    neighbour.send_line("on")?;
    neighbour.report()?;
    // The start of the load is not measured.
    std::thread::sleep(length / 10);
    scene.mark()?;
    std::thread::sleep(length);
    let report = scene.mark()?.remove(0);
    neighbour.send_line("off")?;
    neighbour.report()?;
    let rounds = report["rounds"].as_u64().unwrap_or(0);
    ensure!(rounds > 0, "the victim made no progress: {report}");
    Ok(report)
}

/// The full run prints the table. The short run only checks that no kind of load causes an error.
/// `GRANARY_LATENCY_KINDS` (indices separated by commas) selects kinds.
#[test]
fn victim_latency_under_each_kind_of_load() -> Result<()> {
    let (length, rounds) = match full() {
        true => (Duration::from_millis(200), ROUNDS),
        false => (Duration::from_millis(60), 1),
    };
    let serve = ["--memory", "64MiB", "--chunk", "64KiB"];
    let victim = ["--hold", "4", "--seed", "31", "--allocate-every", "8"];
    let mut scene = Scene::start("latency", PROGRAMS, &serve, &[&victim])?;
    let mut baselines = Vec::new();
    for baseline in [ASLEEP, BUSY, NAPPING] {
        let process = scene.hostile("load", &["--seed", &baseline.0.to_string()])?;
        baselines.push((baseline, process));
    }
    println!(
        "P99 of a victim's operations in us, with a baseline neighbour -> with an attacker (ratio \
         of two consecutive windows); medians of {rounds} alternating windows of {length:?} each"
    );
    println!(
        "baselines: asleep: attached without work; busy: READs one at a time and spins; napping: \
         READs one at a time and sleeps in between"
    );
    let only = std::env::var("GRANARY_LATENCY_KINDS").ok();
    let wanted = |kind: usize| {
        only.as_ref().is_none_or(|only| only.split(',').any(|k| k.parse() == Ok(kind)))
    };
    for (kind, name, baseline) in KINDS.into_iter().filter(|(kind, ..)| wanted(*kind)) {
        let mut attacker = scene.hostile("load", &["--seed", &kind.to_string()])?;
        let base = baselines.iter_mut().find(|(b, _)| *b == baseline).map(|(_, process)| process);
        let base = base.context("every baseline was started")?;
        let mut pairs = Vec::new();
        for _ in 0..rounds {
            let before = p99s(&window(&mut scene, base, length)?)?;
            pairs.push((before, p99s(&window(&mut scene, &mut attacker, length).context(name)?)?));
        }
        attacker.end()?;
        print!("{name:34} {:7}", baseline.1);
        for (i, operation) in OPERATIONS.iter().enumerate() {
            let median_of = |value: fn(f64, f64) -> f64| {
                median(pairs.iter().map(|(before, during)| value(before[i], during[i])).collect())
            };
            let (before, during) = (median_of(|before, _| before), median_of(|_, during| during));
            let ratio = median_of(|before, during| during / before);
            print!(" | {operation} {before:.1} -> {during:.1} ({ratio:.2})");
        }
        println!();
    }
    for (_, process) in baselines {
        process.end()?;
    }
    scene.end()?;
    Ok(())
}

/// Progress of the victim and of the NIC while threads are parked.
struct Progress {
    /// The victim's rounds per second.
    rounds: f64,
    /// The attacker's WQEs per second of CPU time of the NIC thread.
    wqes: f64,
}

/// Runs a window in which the NIC continuously wakes CQs, with `count` threads parked in the CQs'
/// hash bucket.
fn with_parked_threads(scene: &mut Scene, count: usize, length: Duration) -> Result<Progress> {
    let nic = Thread::find(scene.node.pid(), "granary-nic")?;
    let mut attacker = scene.hostile("parked", &["--count", &count.to_string()])?;
    attacker.send_line("go")?;
    attacker.report()?;
    let before = nic.cpu_ns()?;
    attacker.send_line("on")?;
    scene.mark()?;
    std::thread::sleep(length);
    let report = scene.mark()?.remove(0);
    attacker.send_line("off")?;
    let executed = attacker.report()?["executed"].as_u64().context("WQEs")?;
    let cpu = nic.cpu_ns()? - before;
    attacker.end()?;
    let rounds = report["rounds"].as_u64().unwrap_or(0) as f64 / length.as_secs_f64();
    let wqes = executed as f64 / (cpu as f64 / 1e9);
    println!("{count} parked threads: victim {rounds:.0} rounds/s, NIC {wqes:.0} WQEs/CPU s");
    Ok(Progress { rounds, wqes })
}

/// A client parks threads in the hash bucket of its CQs' records, which the kernel walks at each
/// wake-up. The NIC thread must not execute these wake-ups. The test compares the NIC thread's WQEs
/// per second of its CPU time, which do not depend on other processes. It prints the victim's
/// rounds.
#[test]
fn parked_threads_do_not_slow_the_nic_thread() -> Result<()> {
    let (length, rounds, counts): (_, _, &[usize]) = match full() {
        true => (Duration::from_secs(2), 5, &[2000, 5000]),
        false => (Duration::from_millis(500), 3, &[2000]),
    };
    let serve = ["--memory", "64MiB", "--chunk", "64KiB"];
    let victim = ["--hold", "4", "--seed", "33", "--allocate-every", "8"];
    let mut scene = Scene::start("parked", PROGRAMS, &serve, &[&victim])?;
    let mut ratios = vec![Vec::new(); counts.len()];
    for _ in 0..rounds {
        let without = with_parked_threads(&mut scene, 0, length)?;
        for (ratios, count) in ratios.iter_mut().zip(counts) {
            let with = with_parked_threads(&mut scene, *count, length)?;
            ratios.push((with.rounds / without.rounds, with.wqes / without.wqes));
        }
    }
    for (ratios, count) in ratios.into_iter().zip(counts) {
        let (rounds, wqes) = ratios.into_iter().unzip();
        let (rounds, wqes) = (median(rounds), median(wqes));
        println!(
            "{count} parked threads over none: ratio of victim's rounds {rounds:.2}, of WQEs \
             {wqes:.2}"
        );
        ensure!(wqes > 0.4, "with {count} parked threads the NIC does {wqes:.2} of its work");
    }
    scene.end()?;
    Ok(())
}
