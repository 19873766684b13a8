//! What a neighbour costs a victim: the 99th percentile of its operations beside each kind of attacker, over
//! that beside a baseline neighbour, in one run, in windows that take turns. Prints a table.
//!
//! A machine of two cores has no third one for an attacker: a process that burns CPU slows its
//! neighbours whatever the NIC does. So there are two baselines. Attackers that need no CPU (they
//! leave the NIC work that never ends, and sleep) are compared with a neighbour that is attached and
//! sleeps. Those that need CPU are compared with an honest neighbour that takes as much: it READs
//! from its own chunk, one READ at a time, and spins.

use anyhow::{Context, Result, ensure};
use bench::histogram::Latencies;
use granary_tests::node::full;
use granary_tests::scene::{Process, Programs, Scene};
use serde_json::Value;
use std::time::Duration;

const PROGRAMS: Programs =
    Programs { hostile: env!("CARGO_BIN_EXE_hostile"), victim: env!("CARGO_BIN_EXE_victim") };

/// Kinds of load of the attacker, by position: its name in the table, and whether it takes CPU.
const KINDS: [(usize, &str, bool); 13] = [
    (2, "64 endless rings of NOPs", false),
    (3, "64 endless rings of 8 B WRITEs", false),
    (4, "64 endless rings of 1 MiB WRITEs", false),
    (5, "64 endless rings of FAAs", false),
    (6, "64 endless rings of binds", false),
    (7, "512 endless rings of 4 KiB READs", false),
    (8, "500 QPs waiting on a busy CQ", false),
    (9, "1,000 idle QPs", false),
    (10, "allocations and frees, 16 deep", true),
    (11, "refused frees", true),
    (12, "refused accesses and resets", true),
    (13, "slow control verbs", true),
    (14, "lying doorbells and hints", true),
];
/// The kinds that baselines are: asleep, and busy.
const ASLEEP: usize = 0;
const BUSY: usize = 1;

const OPERATIONS: [&str; 5] = ["read", "write", "atomic", "allocate", "free"];
const ROUNDS: usize = 4;

/// Latencies of each operation.
struct Window([Latencies; OPERATIONS.len()]);

impl Window {
    fn new() -> Self {
        Self(std::array::from_fn(|_| Latencies::new()))
    }

    fn add(&mut self, report: &Value) -> Result<()> {
        for (sum, name) in self.0.iter_mut().zip(OPERATIONS) {
            sum.merge(&serde_json::from_value(report[name].clone()).context("a histogram")?);
        }
        Ok(())
    }

    fn p99(&self, operation: usize) -> f64 {
        self.0[operation].quantile_us(0.99)
    }
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
#[test]
fn victims_beside_each_kind_of_load() -> Result<()> {
    let (length, rounds) = match full() {
        true => (Duration::from_millis(300), ROUNDS),
        false => (Duration::from_millis(60), 1),
    };
    let serve = ["--memory", "64MiB", "--chunk", "64KiB"];
    let victim = ["--hold", "4", "--seed", "31", "--allocate-every", "8"];
    let mut scene = Scene::start("latency", PROGRAMS, &serve, &[&victim])?;
    let baseline = |scene: &Scene, kind: usize| -> Result<Process> {
        scene.hostile("load", &["--seed", &kind.to_string()])
    };
    let (mut asleep, mut busy) = (baseline(&scene, ASLEEP)?, baseline(&scene, BUSY)?);
    println!(
        "P99 of a victim's operations in us, beside a baseline neighbour -> beside an attacker \
         (ratio); {rounds} windows of {length:?} each, in turns"
    );
    println!("baseline asleep: attached, no work; busy: one honest READ at a time, spinning");
    for (kind, name, takes_cpu) in KINDS {
        let mut attacker = scene.hostile("load", &["--seed", &kind.to_string()])?;
        let (base, base_name) =
            if takes_cpu { (&mut busy, "busy") } else { (&mut asleep, "asleep") };
        let (mut before, mut during) = (Window::new(), Window::new());
        for _ in 0..rounds {
            before.add(&window(&mut scene, base, length)?)?;
            during.add(&window(&mut scene, &mut attacker, length).context(name)?)?;
        }
        attacker.end()?;
        print!("{name:34} {base_name:7}");
        for (i, operation) in OPERATIONS.iter().enumerate() {
            let (base, now) = (before.p99(i), during.p99(i));
            print!(" | {operation} {base:.1} -> {now:.1} ({:.2})", now / base);
        }
        println!();
    }
    asleep.end()?;
    busy.end()?;
    scene.end()?;
    Ok(())
}
