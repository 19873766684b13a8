//! Faults of one process, and what the others do: cells of `docs/internals/faults.md` that no other
//! file of tests has.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use granary_tests::node::{MemoryNode, granary};
use granary_tests::pager::{Running, Scratch};
use granary_tests::run::{NodeKind, Site, name_of, processes_of};
use granary_tests::signals::signal;
use granary_tests::waiting::{Waiting, compile};
use pager::config::EXIT_POOL_GONE;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::Signal;

/// `granary status` of a memory node that is stopped ends within its time, with the node's name.
#[test]
fn stopped_node_does_not_stop_status() -> Result<()> {
    let node = MemoryNode::start("faults-status", &["--memory", "8MiB", "--chunk", "64KiB"])?;
    let pool = format!("shm:{}", node.socket.display());
    let status =
        || Command::new(granary()).args(["status", "--timeout", "1", "--pool", &pool]).output();
    ensure!(status()?.status.success());
    signal(node.pid(), Signal::STOP)?;
    let out = status()?;
    ensure!(!out.status.success());
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    let path = node.socket.display().to_string();
    for part in [&*path, "has not answered for 1 s", "continue the process, and try again"] {
        ensure!(text.contains(part), "{part} is missing: {text}");
    }
    ensure!(!text.contains("contents are lost"), "{text}");
    signal(node.pid(), Signal::CONT)?;
    ensure!(status()?.status.success());
    Ok(())
}

/// The queue of connections of a memory node that is stopped is full: connecting ends, too.
#[test]
fn full_queue_of_a_stopped_node_does_not_stop_status() -> Result<()> {
    let node = MemoryNode::start("faults-queue", &["--memory", "8MiB", "--chunk", "64KiB"])?;
    let pool = format!("shm:{}", node.socket.display());
    signal(node.pid(), Signal::STOP)?;
    let mut held = Vec::new();
    loop {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(family, kind, flags, None)?;
        match connect(&socket, &SocketAddrUnix::new(&node.socket)?) {
            Ok(()) => held.push(socket),
            Err(Errno::AGAIN) => break,
            Err(error) => return Err(error.into()),
        }
    }
    let out =
        Command::new(granary()).args(["status", "--timeout", "1", "--pool", &pool]).output()?;
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    ensure!(!out.status.success() && text.contains("has not accepted the connection"), "{text}");
    signal(node.pid(), Signal::CONT)?;
    Ok(())
}

/// The memory node of a paged program is stopped. The program ends with status 117 and the node's
/// name after `GRANARY_ANSWER_S`.
#[test]
fn stopped_node_ends_a_paged_program() -> Result<()> {
    let node = MemoryNode::start("faults-paged", &["--memory", "256MiB"])?;
    let site = Site::new(NodeKind::Private, "faults-program", 8 << 20, "256MiB");
    let program = site.scratch.compile("holder", include_str!("pager_programs/holder.c"));
    let mut command = Command::new(granary());
    command.args(["run", "--local", "8MiB", "--pool"]);
    command.arg(format!("shm:{}", node.socket.display())).arg("--").arg(&program);
    let running = Running::start(command.env("GRANARY_ANSWER_S", "1").stdin(Stdio::null()));
    site.wait_for_pages_out(&running, 10_000);
    signal(node.pid(), Signal::STOP)?;
    let outcome = running.finish();
    ensure!(outcome.code == EXIT_POOL_GONE, "{}: {}", outcome.code, outcome.stderr);
    let path = node.socket.display().to_string();
    for part in [
        "granary: the memory node does not answer: ",
        &*path,
        "has not answered for 1 s",
        "status 117",
    ] {
        ensure!(outcome.stderr.contains(part), "{part} is missing: {}", outcome.stderr);
    }
    for part in ["contents are lost", "is gone"] {
        ensure!(!outcome.stderr.contains(part), "{}", outcome.stderr);
    }
    signal(node.pid(), Signal::CONT)?;
    // The chunks of the program are free again.
    loop {
        let status = node.status()?;
        if status["free"] == status["chunks"] && status["clients"] == 0 {
            return Ok(());
        }
        std::thread::yield_now();
    }
}

/// A memory node that goes on before the limit costs a paged program nothing but the time.
#[test]
fn shortly_stopped_node_costs_a_paged_program_time_only() -> Result<()> {
    let node = MemoryNode::start("faults-short", &["--memory", "256MiB"])?;
    let scratch = Scratch::new("faults-short");
    let pool = format!("shm:{}", node.socket.display());
    let program = Waiting::start(compile(&scratch), &pager::Config::new(8 << 20, pool));
    signal(node.pid(), Signal::STOP)?;
    let (code, stdout, stderr) = std::thread::scope(|scope| {
        let checking = scope.spawn(|| program.check_memory());
        // The outage: the program needs its pages meanwhile.
        std::thread::sleep(Duration::from_secs(2));
        signal(node.pid(), Signal::CONT)?;
        checking.join().map_err(|_| anyhow::anyhow!("the check panics"))
    })?;
    ensure!(code == Some(0), "{code:?}: {stdout} {stderr}");
    Ok(())
}

/// A program under a command that is stopped goes on, forks and starts another program. The command
/// reports its end when the command goes on.
#[test]
fn stopped_command_does_not_stop_its_program() -> Result<()> {
    let site = Site::new(NodeKind::Private, "faults-command", 8 << 20, "256MiB");
    let done = site.scratch.0.join("done");
    let after = format!(
        "if pid == 0:\n    check()\n    os._exit(0)\n\
        sys.stdin.readline()\n\
        os.waitpid(pid, 0)\n\
        check()\n\
        os.system('/bin/echo shell')\n\
        open({done:?}, 'w').close()\n\
        sys.exit(3)\n"
    );
    let mut command = site.command("/usr/bin/python3", &["-c", &forking(&after)]);
    let mut running = Running::start(command.stdin(Stdio::piped()));
    let mut input = running.input();
    wait_for_readers(&running, 2)?;
    signal(running.pid() as i32, Signal::STOP)?;
    input.write_all(b"go\ngo\n")?;
    drop(input);
    let until = Instant::now() + Duration::from_secs(120);
    while !done.exists() {
        ensure!(Instant::now() < until, "the program does not go on");
        ensure!(!running.ends_within(Duration::from_millis(5)), "the command is stopped");
    }
    signal(running.pid() as i32, Signal::CONT)?;
    let outcome = running.finish();
    ensure!(outcome.code == 3, "{}: {}", outcome.code, outcome.stderr);
    ensure!(right_sums(&outcome.stdout) == 2, "{outcome:?}");
    let text = String::from_utf8_lossy(&outcome.stdout).into_owned();
    ensure!(text.lines().any(|line| line == "shell"), "{text}");
    Ok(())
}

/// The keeper of a running program, once there is one.
fn keeper_of(running: &Running) -> Result<i32> {
    loop {
        let named = |pid: &i32| name_of(*pid).is_some_and(|name| name == "granary-keeper");
        if let Some(keeper) = processes_of(running).into_iter().find(named) {
            return Ok(keeper);
        }
        ensure!(!running.ends_within(Duration::from_millis(5)), "no keeper");
    }
}

/// Waits until this many processes of a running program wait for its standard input.
fn wait_for_readers(running: &Running, number: usize) -> Result<()> {
    // The text of proc_pid_syscall(5): the number of read(2), and its descriptor.
    let reads = |pid: &i32| {
        let call = std::fs::read_to_string(format!("/proc/{pid}/syscall"));
        call.is_ok_and(|call| call.starts_with("0 0x0 "))
    };
    while processes_of(running).iter().filter(|pid| reads(pid)).count() < number {
        ensure!(!running.ends_within(Duration::from_millis(5)), "no {number} readers");
    }
    Ok(())
}

/// A Python program whose parent and child need 32 MiB of pages, after a line of input. `after`
/// follows in both processes.
fn forking(after: &str) -> String {
    format!(
        "import os, sys\n\
        heap = [bytes([n % 251]) * 4096 for n in range(8000)]\n\
        def check():\n\
        \x20   print(sum(page[7] for page in heap), flush=True)\n\
        pid = os.fork()\n\
        if pid == 0:\n\
        \x20   print('forked', flush=True)\n\
        \x20   sys.stdin.readline()\n\
        {after}"
    )
}

/// Number of right sums that the processes of [`forking`] have printed.
fn right_sums(stdout: &[u8]) -> usize {
    let sum: u64 = (0..8000).map(|n| n % 251).sum();
    let text = String::from_utf8_lossy(stdout).into_owned();
    text.lines().filter(|line| **line == *sum.to_string()).count()
}

/// A keeper that is stopped stops the children whose pages it holds, and no more: when it goes on,
/// nothing is lost.
#[test]
fn stopped_keeper_costs_time_only() -> Result<()> {
    let site = Site::new(NodeKind::Private, "faults-keeper", 8 << 20, "256MiB");
    let script = forking("check()\nif pid: os.waitpid(pid, 0)\n");
    let mut command = site.command("/usr/bin/python3", &["-c", &script]);
    let mut running = Running::start(command.stdin(Stdio::piped()));
    let mut input = running.input();
    let keeper = keeper_of(&running)?;
    signal(keeper, Signal::STOP)?;
    input.write_all(b"go\n")?;
    ensure!(!running.ends_within(Duration::from_secs(2)), "the child needs its keeper");
    signal(keeper, Signal::CONT)?;
    drop(input);
    let outcome = running.finish();
    ensure!(outcome.code == 0, "{}: {}", outcome.code, outcome.stderr);
    ensure!(right_sums(&outcome.stdout) == 2, "{outcome:?}");
    ensure!(!outcome.stderr.contains("granary-keeper"), "{}", outcome.stderr);
    Ok(())
}

/// The line about a keeper that has been stopped for too long.
fn stopped_line(keeper: i32) -> String {
    format!(
        "granary: granary-keeper (process {keeper}), which holds pages of forked processes, \
             has been stopped for 1 s"
    )
}

/// A keeper that stays stopped is killed after the limit, with a line, and another one takes its
/// place: for a child that needs pages, and for a fork of the parent.
#[test]
fn keeper_that_stays_stopped_is_replaced() -> Result<()> {
    let after = [
        ("child", "if pid: sys.stdin.readline()\ncheck()\nif pid: os.waitpid(pid, 0)\n", 2),
        (
            "fork",
            "if pid:\n    sys.stdin.readline()\n    pid = os.fork()\n    check()\n\
                  \x20   if pid: os.waitpid(pid, 0)\n",
            2,
        ),
    ];
    for (name, after, sums) in after {
        let site = Site::new(NodeKind::Private, &format!("faults-kept-{name}"), 8 << 20, "256MiB");
        let mut command = site.command("/usr/bin/python3", &["-c", &forking(after)]);
        let mut running = Running::start(command.env("GRANARY_WAIT_S", "1").stdin(Stdio::piped()));
        let mut input = running.input();
        let keeper = keeper_of(&running)?;
        // A keeper that is stopped within a transfer may hold locks, and its end ends the program.
        wait_for_readers(&running, 2)?;
        signal(keeper, Signal::STOP)?;
        input.write_all(b"go\n")?;
        drop(input);
        let outcome = running.finish();
        ensure!(outcome.code == 0, "{name}: {}: {}", outcome.code, outcome.stderr);
        ensure!(right_sums(&outcome.stdout) == sums, "{name}: {outcome:?}");
        ensure!(outcome.stderr.contains(&stopped_line(keeper)), "{name}: {}", outcome.stderr);
    }
    Ok(())
}

/// A child whose parent has ended cannot go on without its keeper, and ends with the reason.
#[test]
fn child_of_an_ended_parent_ends_with_its_stopped_keeper() -> Result<()> {
    let node = MemoryNode::start("faults-orphan", &["--memory", "256MiB"])?;
    let site = Site::new(NodeKind::Private, "faults-orphaned", 8 << 20, "256MiB");
    let parent = site.scratch.0.join("parent");
    // The program waits for its grandchild through a pipe, and is not its parent.
    let script = format!(
        "import os, signal, sys\n\
        read, write = os.pipe()\n\
        if os.fork() == 0:\n\
        \x20   heap = [bytes([n % 251]) * 4096 for n in range(8000)]\n\
        \x20   if os.fork() == 0:\n\
        \x20       sys.stdin.readline()\n\
        \x20       print(sum(page[7] for page in heap), flush=True)\n\
        \x20       os._exit(0)\n\
        \x20   with open({parent:?}, 'w') as file: file.write(f'{{os.getpid()}}\\n')\n\
        \x20   signal.pause()\n\
        os.close(write)\n\
        os.read(read, 1)\n"
    );
    let mut command = Command::new(granary());
    command.args(["run", "--local", "8MiB", "--pool"]);
    command.arg(format!("shm:{}", node.socket.display()));
    command.args(["--", "/usr/bin/python3", "-c", &script]);
    let mut running = Running::start(command.env("GRANARY_WAIT_S", "1").stdin(Stdio::piped()));
    let mut input = running.input();
    let parent = loop {
        let text = std::fs::read_to_string(&parent).unwrap_or_default();
        if let Some(id) = text.strip_suffix('\n') {
            break id.parse::<i32>()?;
        }
        ensure!(!running.ends_within(Duration::from_millis(5)), "no grandchild");
    };
    // That of the program, for its child, and that of the child, for the grandchild.
    let named = |pid: &i32| name_of(*pid).is_some_and(|name| name == "granary-keeper");
    let all: Vec<i32> = processes_of(&running).into_iter().filter(named).collect();
    for keeper in &all {
        signal(*keeper, Signal::STOP)?;
    }
    signal(parent, Signal::KILL)?;
    input.write_all(b"go\n")?;
    drop(input);
    let outcome = running.finish();
    ensure!(
        all.iter().any(|keeper| outcome.stderr.contains(&stopped_line(*keeper))),
        "{outcome:?}"
    );
    ensure!(outcome.stderr.contains("granary-keeper, which held pages"), "{}", outcome.stderr);
    ensure!(right_sums(&outcome.stdout) == 0, "{outcome:?}");
    // The keeper of the program is stopped, too, and no process needs it.
    while all.iter().any(named) {
        std::thread::yield_now();
    }
    Ok(())
}
