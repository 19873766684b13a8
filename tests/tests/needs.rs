//! Test of the helper that skips tests: a test that cannot run on this machine is skipped with a
//! reason, and fails if `CI` is set.

use std::process::{Command, Output};

use granary_tests::needs;

/// Set in the processes that this test starts. There this test plays the test that cannot run.
const EXAMPLE: &str = "GRANARY_TEST_EXAMPLE";
const NAME: &str = "skipped_test_reports_reason_and_fails_in_ci";

/// Runs the example with this value of `CI` and returns its output.
fn with_ci(value: Option<&str>) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", NAME]).env(EXAMPLE, "1").env_remove("CI");
    command.envs(value.map(|value| ("CI", value))).output().unwrap()
}

#[test]
fn skipped_test_reports_reason_and_fails_in_ci() {
    if std::env::var_os(EXAMPLE).is_some() {
        needs::skip("this is an example");
        return;
    }
    for value in [None, Some(""), Some("0"), Some("false")] {
        let output = with_ci(value);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "CI={value:?}: {stderr}");
        let line = format!("{NAME}: skipped: this is an example\n");
        assert!(stderr.contains(&line), "CI={value:?}: {stderr}");
    }
    for value in ["1", "true", "woodpecker"] {
        let output = with_ci(Some(value));
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(!output.status.success(), "CI={value}: {stdout}");
        let line = "this test cannot run here, and CI is set: this is an example";
        assert!(stdout.contains(line), "CI={value}: {stdout}");
    }
}
