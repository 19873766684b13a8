//! Programs that fork, under the pager: every process sees what POSIX has it see, within a bound of its
//! own, whatever becomes of the others.
//!
//! With `GRANARY_TEST_UNPRIVILEGED=1` all of it runs where the kernel reports no forks (`pager::fork::birth`).
//!
//! Real programs run over a real memory node; what no real program does in a second is done by C programs
//! that check themselves.

use granary_tests::needs;
use granary_tests::node::{MemoryNode, full};
use granary_tests::over_each_node;
use granary_tests::pager::{Scratch, assert_same, forks_are_reported, paged, plain};
use granary_tests::run::{Behind, Site};
use pager::config::EXIT_PAGER;

const MIB: u64 = 1 << 20;

over_each_node![
    make_with_two_jobs_of_gcc,
    python_with_processes,
    a_shell_script_with_subshells,
    redis_saves_in_the_background,
];

/// Runs a program plainly and paged in a fresh directory each, and compares.
fn compare(site: &Site, program: &str, arguments: &[&str]) {
    compare_within(site.local_bytes(), site, program, arguments);
}

/// As [`compare`], for programs whose own text is large: with this bound instead of the site's.
fn compare_within(bound: u64, site: &Site, program: &str, arguments: &[&str]) {
    let plain = plain(program, arguments);
    assert_eq!(plain.code, 0, "{}", plain.stderr);
    let paged = site.run(program, arguments);
    assert_same(&plain, &paged.outcome, bound);
    site.assert_whole();
}

fn script(site: &Site, name: &str, text: &str) -> String {
    let path = site.scratch.0.join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().into()
}

fn make_with_two_jobs_of_gcc(behind: Behind) {
    let site = Site::new(behind, "make", 12 * MIB, "1GiB");
    let makefile = script(&site, "Makefile", include_str!("pager_programs/build.mk"));
    let directory = site.scratch.0.to_str().unwrap();
    let files = if full() { "FILES=1 2 3 4 5 6 7 8" } else { "FILES=1 2" };
    let arguments = ["-s", "-B", "-j2", "-C", directory, "-f", &makefile, files];
    // The compiler proper has 30 MiB of text.
    compare_within(28 * MIB, &site, "make", &arguments);
}

fn python_with_processes(behind: Behind) {
    let site = Site::new(behind, "multiprocessing", 16 * MIB, "1GiB");
    let program = script(&site, "processes.py", include_str!("pager_programs/processes.py"));
    let rows = if full() { "400000" } else { "60000" };
    compare(&site, "/usr/bin/python3", &[&program, rows]);
}

fn a_shell_script_with_subshells(behind: Behind) {
    let site = Site::new(behind, "subshells", 4 * MIB, "1GiB");
    let program = script(&site, "subshells.sh", include_str!("pager_programs/subshells.sh"));
    compare(&site, "sh", &[&program, if full() { "200000" } else { "60000" }]);
}

fn redis_saves_in_the_background(behind: Behind) {
    let site = Site::new(behind, "redis", 8 * MIB, "1GiB");
    let program = script(&site, "redis.sh", include_str!("pager_programs/redis.sh"));
    let directory = site.scratch.0.to_str().unwrap();
    let keys = if full() { "200000" } else { "20000" };
    compare(&site, "sh", &[&program, directory, keys]);
}

/// Runs a C program that checks itself, plainly and paged.
fn self_checking(name: &str, source: &str, runs: &[&[&str]]) {
    let scratch = Scratch::new(&format!("forks-{name}"));
    let program = scratch.compile(name, source);
    let program = program.to_str().unwrap();
    for arguments in runs {
        let plain = plain(program, arguments);
        assert_eq!(plain.code, 0, "{}", plain.stderr);
        let paged = paged(8 * MIB, "memory:2GiB", program, arguments);
        assert_same(&plain, &paged, 8 * MIB);
        assert_eq!(paged.stderr, "", "{name} {arguments:?}");
    }
}

#[test]
fn a_family_of_processes_finds_every_page_as_it_left_it() {
    let source = include_str!("pager_programs/family.c");
    let seeds: Vec<String> =
        (1..if full() { 60 } else { 5 }).map(|seed| seed.to_string()).collect();
    let (pages, steps) = if full() { ("6000", "600") } else { ("4000", "250") };
    let runs: Vec<[&str; 4]> =
        seeds.iter().map(|seed| [seed.as_str(), pages, steps, "3"]).collect();
    let runs: Vec<&[&str]> = runs.iter().map(|run| &run[..]).collect();
    self_checking("family", source, &runs);
}

#[test]
fn a_daemon_outlives_its_parent() {
    self_checking("daemon", include_str!("pager_programs/daemon.c"), &[&["libc"], &["double"]]);
}

#[test]
fn a_child_lives_on_when_its_parent_is_killed() {
    self_checking("killed", include_str!("pager_programs/daemon.c"), &[&["killed"]]);
}

/// nginx, Apache and php-fpm begin as root, and their workers have a user of their own.
#[test]
fn workers_that_give_up_roots_rights_page_over_the_private_memory_node() {
    if !rustix::process::geteuid().is_root() {
        return needs::skip("only root can change its user");
    }
    let site = Site::new(Behind::Private, "drops", 12 * MIB, "1GiB");
    let program = site.scratch.compile("drops", include_str!("pager_programs/drops.c"));
    compare(&site, program.to_str().unwrap(), &[]);
}

#[test]
fn two_hundred_children_one_after_the_other() {
    self_checking("many", include_str!("pager_programs/many.c"), &[&["200"]]);
}

/// The kernel refuses to write-protect pages while it reports a fork, and a child by a raw system call comes
/// without a step of the pager's before it.
#[test]
fn pages_are_evicted_in_the_middle_of_forks() {
    let forks = if full() { "1000" } else { "60" };
    let ways: &[&str] = if forks_are_reported() { &["fork", "raw"] } else { &["fork"] };
    for way in ways {
        self_checking("storm", include_str!("pager_programs/storm.c"), &[&[way, forks]]);
    }
}

#[test]
fn limits_that_a_program_sets_are_kept_to() {
    let scratch = Scratch::new("forks-limits");
    let program = scratch.compile("limits", include_str!("pager_programs/limits.c"));
    let program = program.to_str().unwrap();
    for limit in ["as", "data", "nproc"] {
        let plain = plain(program, &[limit]);
        assert_eq!(plain.code, 0, "{}", plain.stderr);
        let paged = paged(8 * MIB, "memory:1GiB", program, &[limit]);
        assert_same(&plain, &paged, 8 * MIB);
    }
}

#[test]
fn limits_that_leave_no_room_for_the_pager_are_named() {
    for limit in ["-v 2000000", "-d 2000000", "-d 100000000"] {
        let script = format!("ulimit {limit}; exec true");
        let paged = paged(8 * MIB, "memory:1GiB", "sh", &["-c", &script]);
        assert_eq!(paged.code, EXIT_PAGER, "{limit}: {}", paged.stderr);
        assert!(paged.stderr.contains("RLIMIT_AS and RLIMIT_DATA"), "{limit}: {}", paged.stderr);
    }
}

/// A thread of the pager's that takes memory from the program's allocator has a heap there; when it ends
/// in a fork, its heap is for others to take over, and the next such thread waits for pages that itself is to
/// bring.
#[test]
fn the_pagers_threads_allocate_nothing_that_is_paged() {
    let scratch = Scratch::new("forks-inside");
    let source = include_str!("pager_programs/inside.c");
    let program = scratch.compile("inside", source);
    let notes = scratch.compile_with("notes.so", source, &["-shared", "-fPIC", "-DLIBRARY"]);
    let under = |libraries: &[&std::path::Path]| {
        let libraries: Vec<_> = libraries.iter().map(|path| path.to_str().unwrap()).collect();
        format!("LD_PRELOAD={} exec {}", libraries.join(":"), program.display())
    };
    let plain = plain("sh", &["-c", &under(&[&notes])]);
    assert_eq!(plain.code, 0, "{}", plain.stderr);
    let script = under(&[&notes, &granary_tests::pager::library()]);
    // Over a memory node too: its client may start threads of its own.
    let node = MemoryNode::start("forks-inside-node", &["--memory", "512MiB"]).unwrap();
    for pool in ["memory:1GiB".to_owned(), format!("shm:{}", node.socket.display())] {
        let paged = paged(8 * MIB, &pool, "sh", &["-c", &script]);
        assert_same(&plain, &paged, 8 * MIB);
        assert_eq!(paged.stderr, "", "{pool}");
    }
}

/// Streams, the name service and thread-specific data, which libc touches in a fork, and handlers of a library that is
/// initialised before the pager's: with all of it paged out, and no room for it.
#[test]
fn what_is_touched_in_the_middle_of_a_fork() {
    let scratch = Scratch::new("forks-streams");
    let source = include_str!("pager_programs/streams.c");
    let program = scratch.compile("streams", source);
    let early = scratch.compile_with("early.so", source, &["-shared", "-fPIC", "-DLIBRARY"]);
    let forks = if full() { 140 } else { 12 };
    let under = |libraries: &[&std::path::Path]| {
        let libraries: Vec<_> = libraries.iter().map(|path| path.to_str().unwrap()).collect();
        format!("LD_PRELOAD={} exec {} {forks}", libraries.join(":"), program.display())
    };
    let library = granary_tests::pager::library();
    let plain = plain("sh", &["-c", &under(&[&early])]);
    assert_eq!(plain.code, 0, "{}", plain.stderr);
    // What stands behind in the list is initialised first.
    for libraries in [&[&*library, &*early][..], &[&*library]] {
        let paged = paged(8 * MIB, "memory:1GiB", "sh", &["-c", &under(libraries)]);
        assert_same(&plain, &paged, 8 * MIB);
        assert_eq!(paged.stderr, "", "{libraries:?}");
    }
}

#[test]
fn all_ways_to_make_a_process() {
    self_checking("ways", include_str!("pager_programs/ways.c"), &[&[]]);
}

/// The keeper's process is killed while it waits: another one takes its place, and no child notices.
#[test]
fn children_live_on_when_their_keeper_is_killed() {
    self_checking(
        "keeper",
        include_str!("pager_programs/keeper.c"),
        &[&["light"], &["grown"], &["exec"]],
    );
}

/// The keeper is killed again and again, whatever it does. While it works it may hold locks of the parent's: then
/// the parent ends with a message. Nobody hangs, and nobody sees anything wrong.
#[test]
fn a_keeper_that_is_killed_at_any_moment_leaves_nothing_wrong_and_nobody_waiting() {
    let scratch = Scratch::new("forks-storm");
    let program = scratch.compile("keeper", include_str!("pager_programs/keeper.c"));
    let program = program.to_str().unwrap();
    assert_eq!(plain(program, &["storm"]).code, 0);
    for _ in 0..if full() { 40 } else { 6 } {
        let paged = paged(8 * MIB, "memory:1GiB", program, &["storm"]);
        if paged.code == EXIT_PAGER {
            assert!(paged.stderr.contains("granary-keeper"), "{}", paged.stderr);
        } else {
            assert_eq!(paged.code, 0, "{}", paged.stderr);
        }
    }
}
