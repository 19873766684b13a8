//! What a test needs of its machine: privileges, programs, features of the kernel.
//!
//! Also a module of other crates' tests (`#[path]`): a test that cannot run here ends by [`skip`].

use std::ffi::OsStr;
use std::fmt::Display;
use std::io::Write;

/// Says on standard error that the test at hand is skipped, and why.
///
/// The line is written past the capture of the test harness, which shows the output of failures
/// only.
///
/// # Panics
/// Where the environment variable `CI` is set to anything but nothing, `0` or `false`: a machine
/// that is to check every change has what the tests need.
pub fn skip(why: impl Display) {
    assert!(
        !is_ci(std::env::var_os("CI").as_deref()),
        "this test cannot run here, and CI is set: {why}"
    );
    let thread = std::thread::current();
    // The harness names the thread of each test after it.
    let test = thread.name().unwrap_or("a test");
    let _ = writeln!(std::io::stderr(), "{test}: skipped: {why}");
}

fn is_ci(value: Option<&OsStr>) -> bool {
    value.is_some_and(|value| !["", "0", "false"].iter().any(|no| value == *no))
}
