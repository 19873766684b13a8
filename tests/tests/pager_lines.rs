//! Lines on standard error by which a user learns why a program ends, waits or is slow.

use std::process::{Command, Stdio};

use granary_tests::node::granary;
use granary_tests::over_each_node;
use granary_tests::pager::{Outcome, Running, Scratch};
use granary_tests::run::{NodeKind, Paged, Site};
use rustix::process::{Pid, Signal, kill_process};

const MIB: u64 = 1 << 20;

over_each_node![stopped_memory_node_is_named_and_so_is_its_return];

#[test]
fn wrong_socket_path_is_named_with_the_next_step() {
    let scratch = Scratch::new("lines-path");
    let at = |name: &str| scratch.0.join(name);
    std::fs::write(at("notes"), "mine").unwrap();
    drop(std::os::unix::net::UnixListener::bind(at("left")).unwrap());
    for (name, cause) in [
        ("none", "there is no such file"),
        ("notes", "the file is not a socket"),
        ("left", "no process listens there"),
    ] {
        let path = at(name);
        let pool = format!("shm:{}", path.display());
        let arguments = ["run", "--local", "16MiB", "--pool", &pool, "--", "true"];
        let output = Command::new(granary()).args(arguments).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        for part in [path.to_str().unwrap(), cause, "granary serve --socket"] {
            assert!(stderr.contains(part), "{stderr}");
        }
        assert!(!stderr.contains("lost") && !stderr.contains("gone"), "{stderr}");
    }
}

/// The program may notice the end of its memory node before it is ended with the run. Its memory
/// node clears the pages then, and no cleared page is taken for the program's.
#[test]
fn killed_command_is_not_blamed_on_its_memory_node() {
    let site = Site::new(NodeKind::Private, "lines-killed", 8 * MIB, "512MiB");
    let program = site.scratch.compile("holder", include_str!("pager_programs/holder.c"));
    for _ in 0..8 {
        let running = Running::start(&mut site.command(program.to_str().unwrap(), &[]));
        site.wait_for_pages_out(&running, 10_000);
        let command = running.pid();
        kill_process(Pid::from_raw(command as i32).unwrap(), Signal::KILL).unwrap();
        let Outcome { stdout, stderr, .. } = running.finish();
        assert_eq!(String::from_utf8_lossy(&stdout), "filled\n", "{stderr}");
        let ended = format!("granary run (process {command}) has ended before");
        assert!(stderr.contains(&ended) && !stderr.contains("is gone"), "{stderr}");
    }
}

fn stopped_memory_node_is_named_and_so_is_its_return(node: NodeKind) {
    let site = Site::new(node, "lines-stopped", 8 * MIB, "512MiB");
    let options: &[&str] = match node {
        NodeKind::Private => &["--private-node", "nic"],
        NodeKind::Served => &[],
    };
    let site = site.with_options(options);
    let program = site.scratch.compile("cycle", include_str!("pager_programs/cycle.c"));
    let mut command = site.command(program.to_str().unwrap(), &["24"]);
    command.env("GRANARY_WAIT_S", "1").stdin(Stdio::piped());
    let mut running = Running::start(&mut command);
    site.wait_for_pages_out(&running, 3000);
    site.signal_node(&running, Signal::STOP);
    running.wait_for_stderr("has not answered for");
    site.signal_node(&running, Signal::CONT);
    running.wait_for_stderr("answers again");
    drop(running.input());
    let Paged { outcome, .. } = site.finish(running);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let line = outcome.stderr.lines().find(|line| line.contains("has not answered")).unwrap();
    assert!(line.contains("(cycle) waits for the pool: the memory node shm:"), "{line}");
}

#[test]
fn full_pool_is_named_with_the_directory_of_the_overflow_file() {
    for (memory, lines) in [("4MiB", 1), ("256MiB", 0)] {
        let site = Site::new(NodeKind::Private, &format!("lines-full-{memory}"), 8 * MIB, memory);
        let program = site.scratch.compile("cycle", include_str!("pager_programs/cycle.c"));
        let directory = site.scratch.0.display().to_string();
        let mut command = site.command(program.to_str().unwrap(), &["24", "1"]);
        command.env("TMPDIR", &directory);
        let Paged { outcome, stats } = site.finish(Running::start(&mut command));
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        assert_eq!(stats["overflow_peak_bytes"].as_u64() > Some(0), lines > 0, "{stats}");
        let stderr = &outcome.stderr;
        assert_eq!(stderr.matches("the pool is full: pages of process").count(), lines, "{stderr}");
        if lines > 0 {
            assert!(stderr.contains(&directory) && stderr.contains("--memory"), "{stderr}");
        }
    }
}

/// Twice the bound, over and over: the line names a bound that is enough.
#[test]
fn thrashing_is_named_once_with_a_bound_that_helps() {
    let local = 16 * MIB;
    let run = |name: &str, local: u64, arguments: &[&str], ends: bool| {
        let site = Site::new(NodeKind::Private, name, local, "256MiB");
        let program = site.scratch.compile("cycle", include_str!("pager_programs/cycle.c"));
        let mut command = site.command(program.to_str().unwrap(), arguments);
        let mut running = Running::start(command.stdin(Stdio::piped()));
        if ends {
            running.wait_for_stderr("thrashes");
        }
        drop(running.input());
        let paged = site.finish(running);
        assert_eq!(paged.outcome.code, 0, "{}", paged.outcome.stderr);
        paged
    };
    let paged = run("lines-thrash", local, &["32"], true);
    let stderr = paged.outcome.stderr;
    assert_eq!(stderr.matches("thrashes").count(), 1, "{stderr}");
    let (_, named) = stderr.split_once("--local ").expect("a bound");
    let (mib, _) = named.split_once("MiB would keep").expect("a bound in MiB");
    let enough = mib.parse::<u64>().unwrap() * MIB;
    assert!((local..3 * local).contains(&enough), "{stderr}");
    let paged = run("lines-enough", enough, &["32", "50"], false);
    // The first pages, and nothing in each of 50 rounds.
    assert!(paged.count("pages_in") < 32 * 256, "{enough} bytes: {}", paged.stats);
}
