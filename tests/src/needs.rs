//! Requirements of a test on its machine: privileges, programs, kernel features.
//!
//! Tests of other crates include this file as a module (`#[path]`). A test that cannot run on this
//! machine calls [`skip`] and returns.

use std::ffi::OsStr;
use std::fmt::Display;
use std::io::Write;

/// Reports on standard error that the current test is skipped, and the reason.
///
/// The line bypasses the output capture of the test harness, which shows the output of failed tests
/// only.
///
/// # Panics
/// If the environment variable `CI` is set to a value other than the empty string, `0` or `false`,
/// because a CI machine must be able to run all tests.
pub fn skip(why: impl Display) {
    assert!(
        !is_ci(std::env::var_os("CI").as_deref()),
        "this test cannot run here, and CI is set: {why}"
    );
    let thread = std::thread::current();
    // The harness runs each test in a thread with the test's name.
    let test = thread.name().unwrap_or("a test");
    let _ = writeln!(std::io::stderr(), "{test}: skipped: {why}");
}

fn is_ci(value: Option<&OsStr>) -> bool {
    value.is_some_and(|value| !["", "0", "false"].iter().any(|no| value == *no))
}
