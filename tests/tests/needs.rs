//! A test that its machine cannot run is skipped with a reason, and fails where `CI` is set.

use std::process::{Command, Output};

use granary_tests::needs;

/// Set in the processes that this test starts: there it is the test that cannot run.
const EXAMPLE: &str = "GRANARY_TEST_EXAMPLE";
const NAME: &str = "a_test_that_cannot_run_says_why_and_fails_in_ci";

/// Runs the example with this value of `CI`; the process' output.
fn with_ci(value: Option<&str>) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", NAME]).env(EXAMPLE, "1").env_remove("CI");
    command.envs(value.map(|value| ("CI", value))).output().unwrap()
}

#[test]
fn a_test_that_cannot_run_says_why_and_fails_in_ci() {
    if std::env::var_os(EXAMPLE).is_some() {
        needs::skip("this is an example");
        return;
    }
    for value in [None, Some(""), Some("0"), Some("false")] {
        let output = with_ci(value);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "CI={value:?}: {said}");
        let line = format!("{NAME}: skipped: this is an example\n");
        assert!(said.contains(&line), "CI={value:?}: {said}");
    }
    for value in ["1", "true", "woodpecker"] {
        let output = with_ci(Some(value));
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(!output.status.success(), "CI={value}: {said}");
        let line = "this test cannot run here, and CI is set: this is an example";
        assert!(said.contains(line), "CI={value}: {said}");
    }
}
