//! Programs that fork, under the pager. Every process sees the memory that POSIX specifies, within
//! its own limit, even if other processes of the family end.
//!
//! With `GRANARY_TEST_UNPRIVILEGED=1` the tests run without reports of forks from the kernel
//! (`pager::fork::child_setup`).
//!
//! Unmodified programs run with a memory node. C programs that check themselves cover rare cases.

use std::process::Stdio;
use std::time::Duration;

use granary_tests::node::{MemoryNode, full};
use granary_tests::pager::{Running, Scratch, assert_same, forks_are_reported, paged, plain};
use granary_tests::run::{NodeKind, Site, name_of, processes_of};
use granary_tests::{needs, over_each_node};
use pager::config::EXIT_PAGER;
use rustix::process::{Pid, Signal, kill_process};

const MIB: u64 = 1 << 20;

over_each_node![
    make_with_two_jobs_of_gcc,
    python_with_processes,
    a_shell_script_with_subshells,
    redis_saves_in_the_background,
    killed_command_leaves_no_process,
    daemon_ends_with_a_private_memory_node_only,
    children_of_clone_fork_by_libc,
    sandbox_with_a_pid_namespace,
];

/// Runs a program without the pager and paged, and compares the results.
fn compare(site: &Site, program: &str, arguments: &[&str]) {
    compare_within(site.local_bytes(), site, program, arguments);
}

/// As [`compare`], with another limit than the site's, for programs with a large text segment.
fn compare_within(bound: u64, site: &Site, program: &str, arguments: &[&str]) {
    let plain = plain(program, arguments);
    assert_eq!(plain.code, 0, "{}", plain.stderr);
    let paged = site.run(program, arguments);
    assert_same(&plain, &paged.outcome, bound);
    site.assert_all_chunks_free();
}

fn script(site: &Site, name: &str, text: &str) -> String {
    let path = site.scratch.0.join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().into()
}

fn make_with_two_jobs_of_gcc(node: NodeKind) {
    let site = Site::new(node, "make", 12 * MIB, "1GiB");
    let makefile = script(&site, "Makefile", include_str!("pager_programs/build.mk"));
    let directory = site.scratch.0.to_str().unwrap();
    let files = if full() { "FILES=1 2 3 4 5 6 7 8" } else { "FILES=1 2" };
    let arguments = ["-s", "-B", "-j2", "-C", directory, "-f", &makefile, files];
    // The compiler proper has 30 MiB of text.
    compare_within(28 * MIB, &site, "make", &arguments);
}

fn python_with_processes(node: NodeKind) {
    let site = Site::new(node, "multiprocessing", 16 * MIB, "1GiB");
    let program = script(&site, "processes.py", include_str!("pager_programs/processes.py"));
    let rows = if full() { "400000" } else { "60000" };
    compare(&site, "/usr/bin/python3", &[&program, rows]);
}

fn a_shell_script_with_subshells(node: NodeKind) {
    let site = Site::new(node, "subshells", 4 * MIB, "1GiB");
    let program = script(&site, "subshells.sh", include_str!("pager_programs/subshells.sh"));
    compare(&site, "sh", &[&program, if full() { "200000" } else { "60000" }]);
}

fn redis_saves_in_the_background(node: NodeKind) {
    let site = Site::new(node, "redis", 8 * MIB, "1GiB");
    let program = script(&site, "redis.sh", include_str!("pager_programs/redis.sh"));
    let directory = site.scratch.0.to_str().unwrap();
    let keys = if full() { "200000" } else { "20000" };
    compare(&site, "sh", &[&program, directory, keys]);
}

/// Waits until processes of a run have these names, and returns all processes of the run.
fn processes_with(running: &Running, names: &[&str]) -> Vec<i32> {
    for _ in 0..6000 {
        let processes = processes_of(running);
        let found: Vec<_> = processes.iter().filter_map(|&process| name_of(process)).collect();
        if names.iter().all(|name| found.iter().any(|found| found == name)) {
            return processes;
        }
        assert!(!running.ends_within(Duration::from_millis(5)), "the program ended: {found:?}");
    }
    panic!("no processes {names:?}");
}

/// Waits until none of the processes is left.
fn assert_gone(processes: &[i32], when: &str) {
    for _ in 0..6000 {
        if processes.iter().all(|&process| name_of(process).is_none()) {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let left = processes.iter().filter_map(|&process| Some((process, name_of(process)?)));
    panic!("{when}: left behind: {:?}", left.collect::<Vec<_>>());
}

/// A child with a keeper, a process that is not paged, a daemon, and a stopped process.
fn killed_command_leaves_no_process(node: NodeKind) {
    let site = Site::new(node, "reaper", 8 * MIB, "512MiB");
    let program = script(
        &site,
        "left.py",
        "import os, signal, time\n\
         heap = [bytes([n % 251]) * 4096 for n in range(8000)]\n\
         if os.fork() == 0:\n\
         \x20   time.sleep(3000)\n\
         os.system('env -i head -c1 /dev/zero; env -i tail -f /dev/null & setsid sleep 3000 &')\n\
         if os.fork() == 0:\n\
         \x20   os.setsid()\n\
         \x20   if os.fork() == 0: os.kill(os.getpid(), 19)\n\
         \x20   os.execvp('cat', ['cat', '/dev/stdin'])\n\
         time.sleep(3000)\n",
    );
    for signal in [Signal::KILL, Signal::ABORT] {
        let mut command = site.command("/usr/bin/python3", &[&program]);
        let running = Running::start(command.stdin(Stdio::piped()));
        let names = ["granary-keeper", "granary-reaper", "tail", "sleep", "cat"];
        let processes = processes_with(&running, &names);
        kill_process(Pid::from_raw(running.pid() as i32).unwrap(), signal).unwrap();
        assert_gone(&processes, &format!("{signal:?}"));
        let outcome = running.finish();
        assert!(outcome.stderr.contains("has ended before"), "{}", outcome.stderr);
        if node == NodeKind::Served {
            // A private memory node ends too, and a process may report that first.
            assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
        }
    }
}

fn daemon_ends_with_a_private_memory_node_only(node: NodeKind) {
    let site = Site::new(node, "daemons", 8 * MIB, "512MiB");
    let daemon = "import os, sys, time; open(sys.argv[1], 'w'); time.sleep(3000)";
    let ready = site.scratch.0.join("ready").display().to_string();
    // A process that is set up after the end of the command would not find the run's directory.
    let text = format!(
        "setsid /usr/bin/python3 -c \"{daemon}\" {ready} > /dev/null 2>&1 &\n\
         while [ ! -e {ready} ]; do sleep 0.01; done; echo $!; exit 3"
    );
    let mut command = site.command("sh", &["-c", &text]);
    let running = Running::start(command.env("GRANARY_WAIT_S", "1"));
    let outcome = site.finish(running).outcome;
    assert_eq!(outcome.code, 3, "{}", outcome.stderr);
    let daemon: i32 = String::from_utf8_lossy(&outcome.stdout).trim().parse().unwrap();
    let says = outcome.stderr.contains(&format!("python3 ({daemon})"));
    if node == NodeKind::Private {
        assert!(says && outcome.stderr.contains("--pool"), "{}", outcome.stderr);
        // Two fifths of GRANARY_WAIT_S.
        assert!(outcome.stderr.contains("outlived sh by 400ms"), "{}", outcome.stderr);
        return assert_gone(&[daemon], "the end of the program");
    }
    assert!(!says, "{}", outcome.stderr);
    assert_eq!(name_of(daemon).as_deref(), Some("python3"));
    kill_process(Pid::from_raw(daemon).unwrap(), Signal::KILL).unwrap();
}

/// Child of a system call by number, in a namespace of its own and not.
fn children_of_clone_fork_by_libc(node: NodeKind) {
    let site = Site::new(node, "past_libc", 8 * MIB, "1GiB");
    let program = site.scratch.compile("past_libc", include_str!("pager_programs/past_libc.c"));
    let program = program.to_str().unwrap();
    compare(&site, program, &["clone"]);
    if rustix::process::geteuid().is_root() {
        compare(&site, program, &["namespace"]);
    }
    if forks_are_reported() {
        compare(&site, program, &["unknown"]);
    }
}

/// bubblewrap makes its child by `clone` as a system call, and the child forks by libc.
fn sandbox_with_a_pid_namespace(node: NodeKind) {
    let text =
        "x = [str(n) for n in range(300000)]; import os; print(os.getpid() < 99, len(''.join(x)))";
    let arguments = [
        "--unshare-pid",
        "--bind",
        "/",
        "/",
        "--dev-bind",
        "/dev",
        "/dev",
        "--proc",
        "/proc",
        "/usr/bin/python3",
        "-c",
        text,
    ];
    if std::process::Command::new("bwrap").arg("--version").output().is_err() {
        return needs::skip("bwrap (package bubblewrap) is not installed");
    }
    let plain = plain("bwrap", &arguments);
    if plain.code != 0 {
        return needs::skip(format!("bwrap does not work here: {}", plain.stderr));
    }
    let site = Site::new(node, "sandbox", 8 * MIB, "1GiB");
    let paged = site.run("bwrap", &arguments);
    assert_same(&plain, &paged.outcome, site.local_bytes());
    site.assert_all_chunks_free();
}

/// Runs a C program that checks itself, without the pager and paged.
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
fn process_family_keeps_its_page_contents() {
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
fn grandchildren_of_a_child_that_becomes_paged_have_their_pages() {
    self_checking("grandchildren", include_str!("pager_programs/grandchildren.c"), &[&[]]);
}

#[test]
fn daemon_outlives_its_parent() {
    self_checking("daemon", include_str!("pager_programs/daemon.c"), &[&["libc"], &["double"]]);
}

#[test]
fn child_survives_when_its_parent_is_killed() {
    self_checking("killed", include_str!("pager_programs/daemon.c"), &[&["killed"]]);
}

/// Like nginx, Apache and php-fpm, which start as root and run their workers as another user.
#[test]
fn workers_without_root_page_to_the_private_node() {
    if !rustix::process::geteuid().is_root() {
        return needs::skip("only root can change its user");
    }
    let site = Site::new(NodeKind::Private, "drops_privileges", 12 * MIB, "1GiB");
    let program =
        site.scratch.compile("drops_privileges", include_str!("pager_programs/drops_privileges.c"));
    compare(&site, program.to_str().unwrap(), &[]);
}

/// Like chronyd and ntpd. glibc aborts the program if a thread of the pager lacks the capability.
#[test]
fn capability_is_kept_over_a_change_of_the_user() {
    if !rustix::process::geteuid().is_root() {
        return needs::skip("only root can change its user");
    }
    let source = include_str!("pager_programs/keeps_capabilities.c");
    self_checking("keeps_capabilities", source, &[&[]]);
}

/// The process that serves a child's pages is in the program's memory.
#[test]
fn keeper_drops_the_rights_that_the_program_drops() {
    if !rustix::process::geteuid().is_root() {
        return needs::skip("only root can change its user");
    }
    let source = include_str!("pager_programs/keeper_rights.c");
    self_checking("keeper_rights", source, &[&["libc"], &["number"]]);
}

/// Ways of making a child that the preload library sees.
const WAYS: [&[&str]; 5] = [&["fork"], &["clone"], &["clone3"], &["_Fork"], &["function"]];

#[test]
fn children_made_past_fork_are_paged() {
    self_checking("past_libc", include_str!("pager_programs/past_libc.c"), &WAYS);
}

/// The library does not see the fork: the child has no pager, and the kernel reports the fork.
#[test]
fn child_of_an_instruction_works_within_its_bound() {
    if !forks_are_reported() {
        return needs::skip("the kernel reports no forks here");
    }
    let source = include_str!("pager_programs/past_libc.c");
    self_checking("past_libc-unknown", source, &[&["unknown"]]);
    let scratch = Scratch::new("forks-greedy");
    let program = scratch.compile("past_libc", source);
    let paged = paged(8 * MIB, "memory:2GiB", program.to_str().unwrap(), &["greedy"]);
    assert_eq!(paged.code, 0, "{}", paged.stderr);
    let output = String::from_utf8_lossy(&paged.stdout);
    let reasons = |text: &str| paged.stderr.lines().filter(|line| line.contains(text)).count();
    // Before Linux 6.6 there is no way to end the child.
    let expected = match reasons("ends now by SIGBUS") {
        0 => format!("1 6\n{}", reasons("goes beyond the bound")),
        ended => format!("0 {}\n{ended}", libc::SIGBUS),
    };
    let line = output.lines().next().unwrap_or_default();
    assert_eq!(format!("{line}\n3"), expected, "{}", paged.stderr);
    assert!(output.lines().count() == 3 && output.lines().all(|other| other == line), "{output}");
}

/// As root without CAP_SYS_PTRACE: the kernel reports no forks, and root may open
/// `/dev/userfaultfd`.
#[test]
fn children_made_past_fork_are_paged_without_reports() {
    if !rustix::process::geteuid().is_root() {
        return needs::skip("only root can drop a capability");
    }
    let scratch = Scratch::new("forks-unreported");
    let program = scratch.compile("past_libc", include_str!("pager_programs/past_libc.c"));
    let program = program.to_str().unwrap();
    for [way] in WAYS.iter().map(|way| <[&str; 1]>::try_from(*way).unwrap()) {
        let plain = plain(program, &[way]);
        assert_eq!(plain.code, 0, "{}", plain.stderr);
        let arguments = ["--bounding-set=-sys_ptrace", program, way];
        let paged = paged(8 * MIB, "memory:2GiB", "setpriv", &arguments);
        assert_same(&plain, &paged, 8 * MIB);
        assert_eq!(paged.stderr, "", "{way}");
    }
    // An instruction of the program, which the library does not see.
    let arguments = ["--bounding-set=-sys_ptrace", program, "unknown"];
    let paged = paged(8 * MIB, "memory:2GiB", "setpriv", &arguments);
    let ended = format!("1 {EXIT_PAGER}\n");
    assert_eq!(String::from_utf8_lossy(&paged.stdout), ended.repeat(3), "{}", paged.stderr);
    assert_eq!(paged.code, 0, "{}", paged.stderr);
    assert_eq!(paged.stderr.lines().count(), 3, "{}", paged.stderr);
    assert_eq!(paged.stderr.matches("made by a system call past libc").count(), 3);
}

#[test]
fn two_hundred_sequential_children_are_paged() {
    self_checking("many", include_str!("pager_programs/many.c"), &[&["200"]]);
}

/// The kernel refuses to write-protect pages while it reports a fork, and the pager's fork hook
/// does not run before a fork by an instruction of the program.
#[test]
fn pages_are_evicted_in_the_middle_of_forks() {
    let forks = if full() { "1000" } else { "60" };
    let all: &[&str] = &["fork", "number", "instruction"];
    let methods = if forks_are_reported() { all } else { &all[..2] };
    for method in methods {
        self_checking("storm", include_str!("pager_programs/storm.c"), &[&[method, forks]]);
    }
}

/// A thread whose fault needs room may hold a lock of the C library for which the forking thread
/// waits, and a child may need any number of pages before it has a thread of its own.
#[test]
fn fork_takes_the_lock_of_a_list_larger_than_the_limit() {
    let forks = if full() { "1000" } else { "60" };
    self_checking("stream_list", include_str!("pager_programs/stream_list.c"), &[&[forks]]);
}

#[test]
fn limits_set_by_a_program_still_apply() {
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
fn too_small_limits_are_named() {
    for limit in ["-v 2000000", "-d 2000000", "-d 100000000"] {
        let script = format!("ulimit {limit}; exec true");
        let paged = paged(8 * MIB, "memory:1GiB", "sh", &["-c", &script]);
        assert_eq!(paged.code, EXIT_PAGER, "{limit}: {}", paged.stderr);
        assert!(paged.stderr.contains("RLIMIT_AS and RLIMIT_DATA"), "{limit}: {}", paged.stderr);
    }
}

/// A pager thread that uses the program's allocator would own a heap there. When the thread ends in
/// a fork, another thread takes over the heap, and the next pager thread could wait for pages that
/// it must bring in itself.
#[test]
fn pager_threads_allocate_no_paged_memory() {
    let scratch = Scratch::new("forks-inside");
    let source = include_str!("pager_programs/pager_allocations.c");
    let program = scratch.compile("pager_allocations", source);
    let notes = scratch.compile_with("notes.so", source, &["-shared", "-fPIC", "-DLIBRARY"]);
    let under = |libraries: &[&std::path::Path]| {
        let libraries: Vec<_> = libraries.iter().map(|path| path.to_str().unwrap()).collect();
        format!("LD_PRELOAD={} exec {}", libraries.join(":"), program.display())
    };
    let plain = plain("sh", &["-c", &under(&[&notes])]);
    assert_eq!(plain.code, 0, "{}", plain.stderr);
    let script = under(&[&notes, &granary_tests::pager::library()]);
    // With a memory node too, because the pool client may start threads.
    let node = MemoryNode::start("forks-inside-node", &["--memory", "512MiB"]).unwrap();
    for pool in ["memory:1GiB".to_owned(), format!("shm:{}", node.socket.display())] {
        let paged = paged(8 * MIB, &pool, "sh", &["-c", &script]);
        assert_same(&plain, &paged, 8 * MIB);
        assert_eq!(paged.stderr, "", "{pool}");
    }
}

/// During a fork libc touches streams, the name service and thread-specific data, and runs fork
/// handlers of a library that is initialised before the pager's. All of that memory is paged out,
/// and the local memory is full.
#[test]
fn libc_state_touched_during_a_fork_is_available() {
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
    // Libraries later in the list are initialised first.
    for libraries in [&[&*library, &*early][..], &[&*library]] {
        let paged = paged(8 * MIB, "memory:1GiB", "sh", &["-c", &under(libraries)]);
        assert_same(&plain, &paged, 8 * MIB);
        assert_eq!(paged.stderr, "", "{libraries:?}");
    }
}

#[test]
fn all_ways_to_create_a_process_are_paged() {
    self_checking("process_creation", include_str!("pager_programs/process_creation.c"), &[&[]]);
}

/// The keeper's process is killed while it waits: another one takes its place, and no child
/// notices.
#[test]
fn children_survive_when_their_keeper_is_killed() {
    self_checking(
        "keeper",
        include_str!("pager_programs/keeper.c"),
        &[&["light"], &["grown"], &["exec"]],
    );
}

/// The keeper is killed repeatedly at any time. While it works it may hold locks of the parent;
/// then the parent ends with a message. No process hangs, and no process sees wrong data.
#[test]
fn keeper_killed_at_any_moment_causes_no_hang_or_data_loss() {
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
