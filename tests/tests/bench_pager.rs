//! `bench/peers pager`: the script's own tests, and its programs, whose checksums must not depend
//! on the system that holds their memory.

use std::path::Path;
use std::process::Command;

use granary_tests::pager::{Outcome, Scratch, paged, plain};
use pager::stats::Counter;
use serde_json::Value;

fn bench() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench")
}

#[test]
fn script_passes_its_own_tests() {
    let output = Command::new("python3").arg(bench().join("test_pager.py")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn compiled(scratch: &Scratch) -> String {
    let source = std::fs::read_to_string(bench().join("pager.c")).unwrap();
    scratch.compile_with("pager", &source, &["-lm"]).to_str().unwrap().to_owned()
}

/// The programs' names and checksums.
fn checksums(outcome: &Outcome) -> Vec<(String, String)> {
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let lines = std::str::from_utf8(&outcome.stdout).unwrap().lines();
    lines
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .map(|record| (text(&record["program"]), text(&record["checksum"])))
        .collect()
}

#[test]
fn programs_have_the_same_checksums_with_paged_memory() {
    let scratch = Scratch::new("bench-pager");
    let program = compiled(&scratch);
    let patterns = "sequential-read sequential-write sequential-modify stride-3 backwards \
                    first-touch random-read random-modify two-threads paced-10000 content";
    // LU touches each page often.
    let sizes =
        [(patterns, "16777216"), ("triad", "16777216"), ("k-means", "16777216"), ("LU", "5242880")];
    for (programs, bytes) in sizes {
        let mut arguments = vec!["--memory", bytes, "--accesses", "300"];
        arguments.extend(programs.split_whitespace());
        let expected = checksums(&plain(&program, &arguments));
        assert_eq!(expected.len(), arguments.len() - 4, "{expected:?}");
        let outcome = paged(4 << 20, "memory:1GiB", &program, &arguments);
        assert_eq!(checksums(&outcome), expected);
        assert!(outcome.summary.get(Counter::PagesIn) > 1000, "{}", outcome.summary);
    }
}

#[test]
fn content_differs_after_writes() {
    let scratch = Scratch::new("bench-content");
    let program = compiled(&scratch);
    let content = |pattern: &str| {
        let arguments = ["--memory", "1048576", "--accesses", "10", pattern, "content"];
        checksums(&plain(&program, &arguments)).pop().unwrap().1
    };
    assert_eq!(content("random-read"), content("backwards"));
    assert_ne!(content("random-read"), content("random-modify"));
    assert_ne!(content("random-read"), content("sequential-write"));
}
