//! Programs that would stop the pager: a seccomp filter for all threads ends the program with the
//! reason, unless the user allows it.

use std::process::Command;

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
