//! `granary bench paper sams` at its smallest size, and the paths of a fault under `granary run`.

use std::process::{Command, Output};

use bench_report::record::Record;
use granary_tests::built;
use granary_tests::pager::Scratch;
use serde_json::Value;

fn output(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

#[test]
fn programs_run_on_every_system_that_this_machine_has() {
    let directory = Scratch::new("bench-sams");
    let mut command = Command::new(built::granary());
    command.args(["bench", "paper", "sams", "--quick", "--memory", "8MiB", "--out"]);
    let text = String::from_utf8(output(command.arg(&directory.0)).stdout).unwrap();
    let records = std::fs::read_to_string(directory.0.join("paper-sams-measured.jsonl"));
    let records: Vec<Record> =
        records.unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for program in ["quicksort", "stream"] {
        for system in ["plain", "linux", "fastswap", "two", "two+assist", "zram", "file"] {
            let of = |record: &&Record| {
                let is = |key: &str, value: &str| {
                    record.setting.get(key).is_some_and(|own| own.to_string() == value)
                };
                is("program", program) && is("system", system)
            };
            let count = records.iter().filter(of).count();
            let is_optional = matches!(system, "zram" | "file");
            let says_why = text.contains(&format!("No result of {system} for"));
            assert!(count >= 4 || is_optional && says_why, "{program}, {system}: {count}: {text}");
        }
    }
    let claims = ["sams.time.linux", "sams.cpu.linux", "sams.time.fastswap", "sams.cpu.fastswap"];
    for claim in claims {
        assert!(records.iter().any(|r| r.claim.as_deref() == Some(claim)), "{claim}: {text}");
    }
    assert!(directory.0.join("paper-sams-time-25.svg").exists());
}

/// Sorts 16 MiB with 4 MiB local. Returns the run's statistics.
fn sorted(paths: &str) -> Value {
    let scratch = Scratch::new(&format!("sams-{paths}"));
    let file = scratch.0.join("stats.json");
    let granary = built::granary();
    let mut command = Command::new(&granary);
    command.args(["run", "--local", "4MiB", "--paths", paths, "--stats-json"]).arg(&file);
    command.arg("--").arg(&granary);
    output(command.args(["worker", "program", "quicksort", "--memory", "16MiB"]));
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

#[test]
fn paths_differ_in_faults_and_in_waits_for_writes() {
    let [linux, fastswap, two] = ["linux", "fastswap", "two"].map(sorted);
    let of = |stats: &Value, name: &str| stats[name].as_u64().unwrap();
    for stats in [&linux, &fastswap, &two] {
        assert!(of(stats, "pages_in") > 1000, "{stats}");
    }
    // Streams map runs of pages. Pages of a cluster have a fault each.
    for clustered in [&linux, &fastswap] {
        assert!(2 * of(clustered, "faults") > 3 * of(&two, "faults"), "{clustered} {two}");
    }
    // A fault with linux takes pages out and waits until they are written.
    assert!(of(&linux, "faults_writing") > 100, "{linux}");
    assert!(of(&two, "faults_writing") * 10 < of(&linux, "faults_writing"), "{linux} {two}");
}
