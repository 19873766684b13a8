//! Programs that would stop the pager: a seccomp filter for all threads ends the program with the
//! reason, unless the user allows it.

use std::process::Command;

use granary_tests::needs;
use granary_tests::pager::{Outcome, Running, plain};
use granary_tests::run::{NodeKind, Site};
use pager::config::EXIT_PAGER;

/// Runs `filter.c` paged, with further options of `granary run`.
fn run(name: &str, option: Option<&str>, threads: &str) -> Outcome {
    let site = Site::new(NodeKind::Private, name, 12 << 20, "256MiB");
    let program = site.scratch.compile("filter", include_str!("pager_programs/filter.c"));
    let program = program.to_str().unwrap();
    assert_eq!(plain(program, &[threads]).code, 0);
    let mut command = site.command(program, &[threads]);
    if let Some(option) = option {
        // Options come before the program.
        let mut with = Command::new(command.get_program());
        let mut arguments = command.get_args();
        with.args(arguments.next()).arg(option).args(arguments);
        command = with;
    }
    site.finish(Running::start(&mut command)).outcome
}

#[test]
fn filter_for_all_threads_ends_the_program_before_it_is_installed() {
    let outcome = run("filter-all", None, "all");
    assert_eq!(outcome.code, EXIT_PAGER, "{}", outcome.stderr);
    assert_eq!(String::from_utf8_lossy(&outcome.stdout), "begins\n");
    for part in ["TSYNC", "status 118", "--allow-unpaged"] {
        assert!(outcome.stderr.contains(part), "{}", outcome.stderr);
    }
}

#[test]
fn filter_for_all_threads_is_installed_if_the_user_allows_it() {
    let outcome = run("filter-allowed", Some("--allow-unpaged"), "all");
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert_eq!(String::from_utf8_lossy(&outcome.stdout), "begins\nends\n");
    assert!(outcome.stderr.contains("TSYNC"), "{}", outcome.stderr);
}

#[test]
fn filter_for_one_thread_is_no_obstacle() {
    let outcome = run("filter-one", None, "one");
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert_eq!(String::from_utf8_lossy(&outcome.stdout), "begins\nends\n");
    assert!(!outcome.stderr.contains("TSYNC"), "{}", outcome.stderr);
}

/// Status of `pinned.c` where io_uring is not available.
const NO_RING: i32 = 77;

/// Runs `pinned.c` paged, with a number of seconds for which pinned pages may exceed the bound.
/// `None` if the test is skipped.
fn run_pinned(
    name: &str,
    local: u64,
    seconds: &str,
    arguments: &[&str],
    held: bool,
) -> Option<Outcome> {
    let site = Site::new(NodeKind::Private, name, local, "256MiB");
    let program = site.scratch.compile("pinned", include_str!("pager_programs/pinned.c"));
    let mut command = site.command(program.to_str().unwrap(), arguments);
    command.env("GRANARY_PINNED_S", seconds);
    if held {
        command.stdin(std::process::Stdio::piped());
    }
    let outcome = site.finish(Running::start(&mut command)).outcome;
    if outcome.code == NO_RING {
        needs::skip("io_uring_setup fails (kernel.io_uring_disabled, or a seccomp filter)");
        return None;
    }
    Some(outcome)
}

#[test]
fn short_pins_beyond_the_bound_are_served_with_a_line() {
    let Some(outcome) = run_pinned("pinned-short", 8 << 20, "60", &["ring", "16"], false) else {
        return;
    };
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert_eq!(String::from_utf8_lossy(&outcome.stdout), "registered\n");
    assert!(outcome.stderr.contains("goes beyond --local now"), "{}", outcome.stderr);
}

#[test]
fn lasting_pins_end_the_program_with_a_bound_that_is_enough() {
    let Some(outcome) = run_pinned("pinned-long", 8 << 20, "1", &["ring", "16"], true) else {
        return;
    };
    assert_eq!(outcome.code, EXIT_PAGER, "{}", outcome.stderr);
    let (_, named) = outcome.stderr.split_once("use --local ").expect("a size");
    let (mib, _) = named.split_once("MiB or more").expect("a size in MiB");
    let enough = mib.parse::<u64>().unwrap() << 20;
    let outcome = run_pinned("pinned-enough", enough, "0", &["ring", "16"], false)
        .expect("io_uring is available");
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(!outcome.stderr.contains("pinned its memory"), "{}", outcome.stderr);
}

#[test]
fn processes_that_read_each_other_do_not_wait_for_ever() {
    let outcome = run_pinned("pinned-peers", 8 << 20, "60", &["peers", "8"], false)
        .expect("io_uring is not used");
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
}
