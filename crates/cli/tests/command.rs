//! The `granary` binary as a user meets it: exit codes, output for machines, pictures.

use std::io::Read;
use std::process::{Command, Output, Stdio};

use bench::record::Record;

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
fn a_wrong_command_line_is_exit_code_2_and_says_why() {
    for (arguments, why) in [
        (&["frobnicate"][..], "unrecognized subcommand"),
        (&["run", "--", "true"], "--local"),
        (&["run", "--local", "1x", "--", "true"], "\"x\" is not a unit"),
        (&["serve", "--memory", "1MB"], "take e.g. 1MiB"),
        (&["bench", "access", "--in-flight", "0"], "--in-flight 0: take 1 to"),
        (&["bench", "access", "--seconds", "0"], "more than 0"),
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(why), "{arguments:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}

#[test]
fn a_failure_is_exit_code_1_and_one_line() {
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
fn machines_get_records_and_nothing_else() {
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
fn people_get_tables_and_pictures() {
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

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut child = granary(&ACCESS).arg("--json").stdout(Stdio::piped()).spawn().unwrap();
    let mut output = child.stdout.take().unwrap();
    output.read_exact(&mut [0; 1]).unwrap();
    drop(output);
    assert!(child.wait().unwrap().success());
}
