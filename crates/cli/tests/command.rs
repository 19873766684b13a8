//! Tests of the `granary` binary: exit codes, JSON output, tables and pictures.

use std::io::Read;
use std::process::{Command, Output, Stdio};

use bench_report::record::Record;

fn granary(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_granary"));
    command.args(arguments).stdin(Stdio::null());
    command
}

fn run(arguments: &[&str]) -> Output {
    granary(arguments).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn wrong_command_line_exits_with_2_and_a_reason() {
    for (arguments, why) in [
        (&["frobnicate"][..], "unrecognized subcommand"),
        (&["run", "true"], "Write -- before the program: granary run -- true"),
        (&["run", "--local", "1x", "--", "true"], "\"x\" is not a unit"),
        (&["serve", "--memory", "1MB"], "use e.g. 1MiB"),
        (
            &["serve", "--scheme", "premmap-rpc", "--no-contention-control"],
            "--no-contention-control: only schemes finemem, finemem-paper and premmap-onesided",
        ),
        (&["serve", "--tier", "local=1MiB"], "expected fast=SIZE or dram=SIZE"),
        (&["serve", "--tier", "fast=1MiB"], "--tier: only scheme tdmem has this setting"),
        (&["serve", "--tier", "fast=1MiB", "--tier", "fast=1MiB"], "--tier fast: given twice"),
        (
            &["serve", "--scheme=tdmem", "--memory=8MiB", "--tier=fast=3MiB", "--tier=dram=6MiB"],
            "the tiers must add up to the donated 8388608 bytes",
        ),
        (
            &["serve", "--lease-max-us", "500"],
            "--lease-max-us 500: only schemes patronus, patronus-2, patronus-mr, \
             patronus-paper and unprotected have",
        ),
        (
            &["serve", "--domain-bytes", "1MiB", "--scheme", "finemem"],
            "--domain-bytes 1048576: only schemes patronus, patronus-2, patronus-mr, \
             rpc-data, patronus-paper and unprotected have",
        ),
        (
            &["serve", "--scheme=patronus", "--lease-max-us=40"],
            "--lease-min-us 50: must be 1 to the longest lease, 40 us",
        ),
        (&["serve", "--scheme=patronus", "--spares=4"], "--spares 4: must be 0 to 3"),
        (
            &["serve", "--scheme=patronus-2", "--spares=1"],
            "--spares 1: keys of this scheme are valid on one QP",
        ),
        (&["serve", "--scheme=patronus", "--permissions=0"], "--permissions 0: must be 1 to"),
        (
            &["serve", "--scheme=patronus", "--clock-drift-ppm=1000000"],
            "--clock-drift-ppm 1000000: must be 0 to 500000",
        ),
        (&["bench", "access", "--in-flight", "0"], "--in-flight 0: must be 1 to"),
        (&["bench", "access", "--seconds", "0"], "more than 0"),
        (&["bench", "paper"], "required arguments"),
        (
            &["bench", "paper", "onesidedmw", "--experiment", "x"],
            "must be one of allocation, access",
        ),
        (&["bench", "paper", "sams", "--simulated-only"], "sams, tdmem and swap are measured only"),
        (&["bench", "paper", "sams", "--memory", "1MiB"], "at least 8MiB"),
        (
            &["bench", "paper", "tdmem", "--simulated-only"],
            "sams, tdmem and swap are measured only",
        ),
        (&["bench", "paper", "tdmem", "--memory", "1MiB"], "at least 8MiB"),
        (
            &["bench", "paper", "tdmem", "--experiment", "x"],
            "must be one of crypt, sequential, stream, programs",
        ),
        (&["bench", "paper", "finemem", "--memory", "8MiB"], "only the programs of sams"),
        (&["bench", "paper", "onesidedmw", "--memory", "8MiB"], "only the programs of sams"),
        (
            &["bench", "paper", "onesidedmw", "--experiment", "swap", "--simulated-only"],
            "sams, tdmem and swap are measured only",
        ),
        (
            &["bench", "paper", "onesidedmw", "--experiment", "swap", "--memory", "1MiB"],
            "at least 8MiB",
        ),
        (&["run", "--local", "8MiB", "--paths", "x", "--", "true"], "expected linux, fastswap"),
        (
            &["run", "--local=8MiB", "--assist=process", "--paths=linux", "--", "true"],
            "--assist process: --paths linux has no work for an assist",
        ),
        (
            &["run", "--local=8MiB", "--assist=process", "--pool=memory:1GiB", "--", "true"],
            "--assist process: pages of a local store",
        ),
        (
            &["run", "--local=8MiB", "--assist=process", "--scheme=odrp", "--", "true"],
            "--assist process: scheme odrp moves pages by requests",
        ),
        (&["run", "--local=8MiB", "--tier=local:64MiB", "--", "true"], "expected local=SIZE"),
        (
            &["run", "--local=8MiB", "--tier=fast=64MiB", "--", "true"],
            "fast is a tier of the memory node: give it to granary serve --tier fast=64MiB",
        ),
        (
            &["run", "--local=8MiB", "--tier=local=64MiB", "--pool=memory:1GiB", "--", "true"],
            "--tier local=64MiB: a local store has no tiers",
        ),
        (
            &["run", "--local=8MiB", "--tier=local=64MiB", "--", "true"],
            "scheme onesidedmw, and only scheme tdmem has tiers; add --scheme tdmem",
        ),
        (
            &["run", "--local=8MiB", "--scheme=tdmem", "--tier=local=1000", "--", "true"],
            "the size must be a multiple of 4096 bytes",
        ),
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(why), "{arguments:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}

#[test]
fn failure_exits_with_1_and_one_line() {
    let arguments = ["quickstart", "--keep", "/dev/null/nowhere"];
    let output = run(&arguments);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let text = stderr(&output);
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.starts_with("granary: create /dev/null/nowhere: "), "{text}");
}

const ACCESS: [&str; 8] =
    ["bench", "access", "--sizes", "8,4KiB", "--in-flight", "1,4", "--seconds", "0.01"];

#[test]
fn file_size_limit_is_named_instead_of_a_signal() {
    let granary = env!("CARGO_BIN_EXE_granary");
    let script = format!("ulimit -f 100; exec '{granary}' run --local 8MiB -- true");
    let output = Command::new("sh").arg("-c").arg(script).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert_eq!(text.matches("File too large").count(), 1, "{text}");
    assert!(text.contains("at most 50KiB (ulimit -f)"), "{text}");
    assert!(text.contains("for example by ulimit -f unlimited"), "{text}");
    assert!(!text.contains("SIGXFSZ") && !text.contains("did not end within"), "{text}");
}

/// The bar's time goes on within a step.
#[test]
fn progress_is_drawn_during_a_long_step() {
    let granary = env!("CARGO_BIN_EXE_granary");
    let bench = format!("'{granary}' bench seal --rounds 1 --seconds 0.3");
    // script(1) makes the terminal.
    let mut command = Command::new("script");
    command.args(["--quiet", "--return", "--command", &bench, "/dev/null"]);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    assert!(text.contains("0/1 00:00:01"), "{text}");
}

#[test]
fn json_output_has_records_only() {
    let output = granary(&ACCESS).arg("--json").output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(output.stderr.is_empty(), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let records: Vec<Record> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for metric in ["read_latency_us", "write_rate_per_s", "read_bandwidth_gb_per_s"] {
        for in_flight in [1.0, 4.0] {
            for size in [8.0, 4096.0] {
                let found = records.iter().any(|record| {
                    record.metric == metric
                        && record.setting.number("in_flight") == Some(in_flight)
                        && record.setting.number("size") == Some(size)
                        && record.value > 0.0
                        && !record.simulated
                });
                assert!(found, "no {metric} of {size} bytes with {in_flight} in flight");
            }
        }
    }
}

#[test]
fn text_output_has_tables_and_pictures() {
    let directory = tempfile::tempdir().unwrap();
    let output = granary(&ACCESS).arg("--out").arg(directory.path()).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("READ, 1 in flight") && text.contains("WRITE, 4 in flight"), "{text}");
    let mut names: Vec<String> = std::fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names.len(), 8, "{names:?}");
    assert!(names.contains(&"access-read-latency-1.png".to_owned()), "{names:?}");
}

const PAPER: [&str; 6] =
    ["bench", "paper", "onesidedmw", "--quick", "--experiment", "chain-queues"];

#[test]
fn simulated_records_are_marked_and_repeat_for_a_seed() {
    let simulated = || granary(&PAPER).args(["--simulated-only", "--json"]).output().unwrap();
    let (first, second) = (simulated(), simulated());
    assert!(first.status.success(), "{}", stderr(&first));
    assert_eq!(first.stdout, second.stdout);
    let text = String::from_utf8(first.stdout).unwrap();
    let records: Vec<Record> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(records.iter().all(|record| record.simulated), "{records:?}");
    let fitted = |r: &&Record| r.claim.as_deref() == Some("offload.read.overhead.96qp");
    assert_eq!(records.iter().find(fitted).and_then(|r| r.fitted), Some(true));
}

#[test]
fn simulated_and_measured_results_have_separate_tables() {
    let directory = tempfile::tempdir().unwrap();
    let output = granary(&PAPER).arg("--out").arg(directory.path()).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    for part in ["- simulated: ", "- measured on shm, this machine", "Claims: 0 predicted"] {
        assert!(text.contains(part), "{text}");
    }
    for way in ["simulated", "measured"] {
        let records = directory.path().join(format!("paper-onesidedmw-{way}.jsonl"));
        let records = std::fs::read_to_string(records).unwrap();
        let mark = format!("\"simulated\":{}", way == "simulated");
        assert!(records.lines().count() > 3 && records.lines().all(|l| l.contains(&mark)));
    }
}

#[test]
fn list_names_the_claims_of_every_experiment() {
    let output = run(&["bench", "paper", "--list"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    for name in [
        "osmw.alloc.latency.1",
        "odrp.access.ratio.24",
        "patronus.bind",
        "scalability",
        "sams.cpu.linux",
        "osmw.swap.overhead.25",
        "tdmem.seal",
        "tdmem.kmeans.40",
    ] {
        assert!(text.contains(name), "{name}: {text}");
    }
}

#[test]
fn closed_output_pipe_is_not_a_failure() {
    let mut child = granary(&ACCESS).arg("--json").stdout(Stdio::piped()).spawn().unwrap();
    let mut output = child.stdout.take().unwrap();
    output.read_exact(&mut [0; 1]).unwrap();
    drop(output);
    assert!(child.wait().unwrap().success());
}
