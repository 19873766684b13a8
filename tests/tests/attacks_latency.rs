//! What a neighbour costs a victim: the 99th percentile of its operations beside each kind of attacker, over
//! that beside a baseline neighbour, in one run, in windows that take turns. Prints a table of medians: a scheduler
//! that puts two of the threads on one core for a while spoils a window, not the line.
//!
//! A machine of two cores has no third one for an attacker: a process that burns CPU slows its
//! neighbours whatever the NIC does, and one that wakes up often interrupts them. So there are three
//! baselines. Attackers that need no CPU (they leave the NIC work that never ends, and sleep) are
//! compared with a neighbour that is attached and sleeps. Those that need CPU are compared with an
//! honest neighbour that takes as much in the same manner: it READs from its own chunk, one READ at a
//! time, and spins; or, for attackers that wait for answers, sleeps in between as they do.

use anyhow::{Context, Result, ensure};
use bench::histogram::Latencies;
use granary_tests::node::full;
use granary_tests::scene::{Process, Programs, Scene};
use granary_tests::thread::Thread;
use serde_json::Value;
use std::time::Duration;

const PROGRAMS: Programs =
    Programs { hostile: env!("CARGO_BIN_EXE_hostile"), victim: env!("CARGO_BIN_EXE_victim") };

/// Kinds of load of the attacker, by position: its name in the table, and its baseline.
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
    (14, "lying doorbells and hints", BUSY),
];
/// Neighbours that attackers are compared with: the kind of load, and its name in the table.
type Baseline = (usize, &'static str);
const ASLEEP: Baseline = (0, "asleep");
const BUSY: Baseline = (1, "busy");
const NAPPING: Baseline = (15, "napping");

const OPERATIONS: [&str; 5] = ["read", "write", "atomic", "allocate", "free"];
const ROUNDS: usize = 9;

/// The 99th percentile of each operation in a window, in us.
type P99s = [f64; OPERATIONS.len()];

fn p99s(report: &Value) -> Result<P99s> {
    let mut all = P99s::default();
    for (p99, name) in all.iter_mut().zip(OPERATIONS) {
        let latencies: Latencies =
            serde_json::from_value(report[name].clone()).context("a histogram")?;
        *p99 = latencies.quantile_us(0.99);
    }
    Ok(all)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// One window with a neighbour at work; what the victim did in it.
fn window(scene: &mut Scene, neighbour: &mut Process, length: Duration) -> Result<Value> {
    neighbour.tell("on")?;
    neighbour.report()?;
    // What starting costs is not measured.
    std::thread::sleep(length / 10);
    scene.mark()?;
    std::thread::sleep(length);
    let report = scene.mark()?.remove(0);
    neighbour.tell("off")?;
    neighbour.report()?;
    let rounds = report["rounds"].as_u64().unwrap_or(0);
    ensure!(rounds > 0, "the victim stood still: {report}");
    Ok(report)
}

/// The full run prints the table; the short one only sees that every kind of load does no harm.
/// `GRANARY_LATENCY_KINDS` (numbers with commas) chooses some of the kinds.
#[test]
fn victims_beside_each_kind_of_load() -> Result<()> {
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
        "P99 of a victim's operations in us, beside a baseline neighbour -> beside an attacker \
         (ratio of two windows, one after the other); medians of {rounds} windows of {length:?} each, in turns"
    );
    println!(
        "baselines: asleep: attached, no work; busy: one honest READ at a time, spinning; napping: one \
         honest READ, then a nap"
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
            let of = |value: fn(f64, f64) -> f64| {
                median(pairs.iter().map(|(before, during)| value(before[i], during[i])).collect())
            };
            let (before, during) = (of(|before, _| before), of(|_, during| during));
            let ratio = of(|before, during| during / before);
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

/// The work that a victim and the NIC did beside parked threads.
struct Beside {
    /// Rounds of the victim in a second.
    rounds: f64,
    /// WQEs of the attacker for each second of CPU time of the NIC's thread.
    wqes: f64,
}

/// A window in which the NIC wakes CQs without end in whose hash bucket `count` threads are parked.
fn beside_parked(scene: &mut Scene, count: usize, length: Duration) -> Result<Beside> {
    let nic = Thread::find(scene.node.pid(), "granary-nic")?;
    let mut attacker = scene.hostile("parked", &["--count", &count.to_string()])?;
    attacker.tell("go")?;
    attacker.report()?;
    let before = nic.cpu_ns()?;
    attacker.tell("on")?;
    scene.mark()?;
    std::thread::sleep(length);
    let report = scene.mark()?.remove(0);
    attacker.tell("off")?;
    let executed = attacker.report()?["executed"].as_u64().context("WQEs")?;
    let cpu = nic.cpu_ns()? - before;
    attacker.end()?;
    let rounds = report["rounds"].as_u64().unwrap_or(0) as f64 / length.as_secs_f64();
    let wqes = executed as f64 / (cpu as f64 / 1e9);
    println!("{count} parked threads: victim {rounds:.0} rounds/s, NIC {wqes:.0} WQEs/CPU s");
    Ok(Beside { rounds, wqes })
}

/// A client parks threads in the hash bucket of its CQs' records, which the kernel walks in each wake-up.
/// The NIC thread must not make these wake-ups. The test compares the WQEs that the NIC thread executes
/// for each second of its CPU time, which do not depend on other processes; it prints the victim's rounds.
#[test]
fn parked_threads_of_a_client_cost_the_nic_thread_nothing() -> Result<()> {
    let (length, rounds, counts): (_, _, &[usize]) = match full() {
        true => (Duration::from_secs(2), 5, &[2000, 5000]),
        false => (Duration::from_millis(500), 3, &[2000]),
    };
    let serve = ["--memory", "64MiB", "--chunk", "64KiB"];
    let victim = ["--hold", "4", "--seed", "33", "--allocate-every", "8"];
    let mut scene = Scene::start("parked", PROGRAMS, &serve, &[&victim])?;
    let mut ratios = vec![Vec::new(); counts.len()];
    for _ in 0..rounds {
        let alone = beside_parked(&mut scene, 0, length)?;
        for (ratios, count) in ratios.iter_mut().zip(counts) {
            let beside = beside_parked(&mut scene, *count, length)?;
            ratios.push((beside.rounds / alone.rounds, beside.wqes / alone.wqes));
        }
    }
    for (ratios, count) in ratios.into_iter().zip(counts) {
        let (rounds, wqes) = ratios.into_iter().unzip();
        let (rounds, wqes) = (median(rounds), median(wqes));
        println!(
            "beside {count} parked threads over beside none: victim's rounds {rounds:.2}, WQEs {wqes:.2}"
        );
        ensure!(wqes > 0.4, "beside {count} parked threads the NIC does {wqes:.2} of its work");
    }
    scene.end()?;
    Ok(())
}
