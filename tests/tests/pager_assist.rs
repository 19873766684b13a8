//! Programs with an assist (`granary run --assist process`): over the private memory node, whose
//! pages the assist copies, and over a running one, whose queues it borrows.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use granary_tests::node::{MemoryNode, full, granary, start_and_wait_ready};
use granary_tests::pager::{Outcome, Running, Scratch, assert_same, plain};
use granary_tests::run::{NodeKind, Paged, Site};
use granary_tests::signals::signal;
use granary_tests::{needs, over_each_node};
use pager::assist::protocol::{Message, VERSION};
use pager::assist::ring;
use pager::stats::Counter;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags, ftruncate, memfd_create};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use units::Random;

const MIB: u64 = 1 << 20;
const PYTHON: &str = "/usr/bin/python3";
const GONE: &str = "granary: the assist is gone (killed by signal 9)";

/// Passes over 24 MiB that check and change each page, and print a digest.
const PASSES: &str = "
import hashlib, sys
PAGES = 6144
memory = bytearray(PAGES * 4096)
for turn in range(int(sys.argv[1])):
    for at in range(0, PAGES * 4096, 4096):
        old = int.from_bytes(memory[at:at + 8], 'little')
        assert old == (at * 7919 + turn if turn else 0), (at, turn, old)
        memory[at:at + 8] = (at * 7919 + turn + 1).to_bytes(8, 'little')
print(hashlib.sha256(memory).hexdigest(), flush=True)
";
/// A quarter of the memory of [`PASSES`].
const LOCAL: u64 = 6 * MIB;

over_each_node![
    program_at_a_quarter_has_its_plain_output,
    output_is_right_when_the_assist_is_killed,
    program_goes_on_when_the_assist_is_stopped,
    forks_are_served,
    processes_share_one_assist,
];

fn site(node: NodeKind, name: &str, local: u64) -> Site {
    Site::new(node, &format!("assist-{name}"), local, "1GiB").with_options(&["--assist", "process"])
}

fn passes(turns: &str) -> [&str; 3] {
    ["-c", PASSES, turns]
}

/// Checks a run whose assist is gone: the output, one message, and the statistics.
fn assert_gone(plain: &Outcome, paged: &Paged) {
    assert_same(plain, &paged.outcome, LOCAL);
    let stderr = &paged.outcome.stderr;
    assert_eq!(stderr.matches("the assist is gone (").count(), 1, "{stderr}");
    assert!(stderr.contains(GONE) && stderr.contains("; the assist is gone\n"), "{stderr}");
    assert_eq!(paged.stats["assist_gone"], true, "{}", paged.stats);
    assert_eq!(paged.count("assist_sessions_lost"), 1, "{}", paged.stats);
}

fn program_at_a_quarter_has_its_plain_output(node: NodeKind) {
    let site = site(node, "quarter", LOCAL);
    let paged = site.run(PYTHON, &passes("4"));
    assert_same(&plain(PYTHON, &passes("4")), &paged.outcome, LOCAL);
    // Each pass but the first reads nearly all pages ahead, and all but the last are written back.
    let moved = paged.count("assist_pages");
    assert!(moved > 20_000, "{}", paged.stats);
    assert!(moved <= paged.count("pages_in") + paged.count("pages_out"), "{}", paged.stats);
    assert_eq!(paged.count("assist_processes"), 1, "{}", paged.stats);
    assert!(paged.stats["assist_cpu_s"].as_f64().unwrap() > 0.0, "{}", paged.stats);
    let stderr = &paged.outcome.stderr;
    assert!(stderr.contains("pages moved for 1 of 1 process(es), with "), "{stderr}");
    assert!(!stderr.contains("gone"), "{stderr}");
    site.assert_all_chunks_free();
}

fn output_is_right_when_the_assist_is_killed(node: NodeKind) {
    let plain = plain(PYTHON, &passes("4"));
    let mut random = Random::new(41);
    for round in 0..if full() { 20 } else { 8 } {
        let site = site(node, &format!("killed-{round}"), LOCAL);
        let running = Running::start(&mut site.command(PYTHON, &passes("4")));
        // In the first three passes of four.
        site.wait_for_pages_out(&running, 500 + random.below(14_000));
        kill_process(site.assist(&running), Signal::KILL).unwrap();
        assert_gone(&plain, &site.finish(running));
        site.assert_all_chunks_free();
    }
}

fn program_goes_on_when_the_assist_is_stopped(node: NodeKind) {
    let plain = plain(PYTHON, &passes("4"));
    let site = site(node, "stopped", LOCAL);
    let running = Running::start(&mut site.command(PYTHON, &passes("4")));
    site.wait_for_pages_out(&running, 5_000);
    signal(site.assist(&running).as_raw_nonzero().get(), Signal::STOP).unwrap();
    assert_gone(&plain, &site.finish(running));
}

fn forks_are_served(node: NodeKind) {
    let site = site(node, "forks", 8 * MIB);
    let pipeline = include_str!("pager_programs/subshells.sh");
    let processes = include_str!("pager_programs/processes.py");
    for (program, arguments) in
        [("sh", ["-c", pipeline, "sh", "60000"]), (PYTHON, ["-c", processes, "60000", ""])]
    {
        let paged = site.run(program, &arguments);
        assert_same(&plain(program, &arguments), &paged.outcome, 16 * MIB);
        assert!(paged.count("assist_processes") > 1, "{}", paged.stats);
        assert_eq!(paged.count("assist_sessions_lost"), 0, "{}", paged.stats);
        site.assert_all_chunks_free();
    }
}

fn processes_share_one_assist(node: NodeKind) {
    let site = site(node, "share", 12 * MIB);
    let script = "$0 -c \"$1\" 3 & $0 -c \"$1\" 5 & wait";
    let arguments = ["-c", script, PYTHON, PASSES];
    let running = Running::start(&mut site.command("sh", &arguments));
    site.wait_for_counters(&running, |summary| summary.get(Counter::AssistedProcesses) == 3);
    // This call fails if there are two.
    site.assist(&running);
    let paged = site.finish(running);
    let lines = |outcome: &Outcome| {
        let text = String::from_utf8(outcome.stdout.clone()).unwrap();
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(lines(&paged.outcome), lines(&plain("sh", &arguments)));
    assert!(paged.count("assist_pages") > 20_000, "{}", paged.stats);
}

/// Kills the assist while processes come and go: each of them goes on.
#[test]
fn assist_killed_during_forks_costs_no_process() {
    let arguments = ["-c", include_str!("pager_programs/processes.py"), "60000"];
    let plain = plain(PYTHON, &arguments);
    for sessions in [1, 2, 3] {
        let site = site(NodeKind::Private, &format!("forks-{sessions}"), 16 * MIB);
        let running = Running::start(&mut site.command(PYTHON, &arguments));
        let counter = Counter::AssistedProcesses;
        site.wait_for_counters(&running, |summary| summary.get(counter) >= sessions);
        kill_process(site.assist(&running), Signal::KILL).unwrap();
        let paged = site.finish(running);
        assert_same(&plain, &paged.outcome, 16 * MIB);
        let stderr = &paged.outcome.stderr;
        assert_eq!(stderr.matches("the assist is gone (").count(), 1, "{stderr}");
    }
}

/// Children come and go while another thread writes more pages than the limit allows.
#[test]
fn storm_of_forks_is_served() {
    let site = site(NodeKind::Private, "storm", 8 * MIB);
    let program = site.scratch.compile("storm", include_str!("pager_programs/storm.c"));
    let (program, forks) = (program.to_str().unwrap(), if full() { "500" } else { "60" });
    let paged = site.run(program, &["fork", forks]);
    assert_same(&plain(program, &["fork", forks]), &paged.outcome, 8 * MIB);
    assert!(paged.count("assist_pages") > 1_000, "{}", paged.stats);
}

/// Waits until a process has ended.
fn wait_for_end(pid: Pid) {
    let Ok(end) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    let ready = poll(&mut [PollFd::new(&end, PollFlags::IN)], Some(&limit));
    assert_eq!(ready, Ok(1), "process {pid:?} still runs");
}

#[test]
fn killed_command_leaves_no_assist_behind() {
    for stopped in [false, true] {
        let site = site(NodeKind::Private, &format!("orphan-{stopped}"), LOCAL);
        let running = Running::start(&mut site.command(PYTHON, &passes("1000")));
        site.wait_for_pages_out(&running, 5_000);
        let assist = site.assist(&running);
        if stopped {
            signal(assist.as_raw_nonzero().get(), Signal::STOP).unwrap();
        }
        let command = Pid::from_raw(running.pid() as i32).unwrap();
        kill_process(command, Signal::KILL).unwrap();
        wait_for_end(assist);
        // The program has lost its private memory node, and ends too.
        site.finish(running);
    }
}

#[test]
fn killed_process_ends_only_its_session() {
    let site = site(NodeKind::Private, "killed-host", 12 * MIB);
    let script = "$0 -c \"$1\" 1000 & sleep 0.5; kill -9 $!; $0 -c \"$1\" 4";
    let paged = site.run("sh", &["-c", script, PYTHON, PASSES]);
    let stdout = String::from_utf8_lossy(&paged.outcome.stdout).into_owned();
    let plain = plain(PYTHON, &passes("4"));
    assert_eq!(stdout.as_bytes(), plain.stdout, "{}", paged.outcome.stderr);
    assert_eq!(paged.stats["assist_gone"], false, "{}", paged.outcome.stderr);
    assert!(paged.count("assist_pages") > 20_000, "{}", paged.stats);
}

/// An assist without a run.
struct Lone {
    child: Child,
    scratch: Scratch,
}

impl Lone {
    /// Starts an assist with a time limit for the set-up of sessions.
    fn start(name: &str, set_up_ms: &str) -> Self {
        let scratch = Scratch::new(&format!("assist-{name}"));
        let mut command = Command::new(granary());
        command
            .args(["assist", "--set-up-ms", set_up_ms, "--socket"])
            .arg(scratch.0.join("socket"));
        let (child, _) = start_and_wait_ready(command.stderr(Stdio::piped())).unwrap();
        Self { child, scratch }
    }

    /// Connects, and sends packets with descriptors.
    fn connect(&self, packets: &[(Message, &[BorrowedFd<'_>])]) -> Host {
        let host = Host(pool::socket::connect(&self.scratch.0.join("socket")).unwrap());
        packets.iter().for_each(|(message, files)| host.send(message, files).unwrap());
        host
    }

    /// Ends the assist, which must still run, and returns its messages.
    fn end(mut self) -> String {
        assert_eq!(self.child.try_wait().unwrap(), None, "the assist has ended");
        self.child.kill().unwrap();
        let output = self.child.wait_with_output().unwrap();
        String::from_utf8(output.stderr).unwrap()
    }
}

/// A host that sends what it wants.
struct Host(OwnedFd);

impl Host {
    fn send(&self, message: &Message, files: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
        pool::socket::send(self.0.as_fd(), &message.encode(), files)
    }

    /// Waits for the next packet; `None` at the end of the session.
    fn receive(&self) -> Option<Message> {
        let packet = match pool::socket::receive(self.0.as_fd()) {
            // The assist has not read all packets.
            Err(error) if error == rustix::io::Errno::CONNRESET => {
                pool::socket::receive(self.0.as_fd())
            }
            other => other,
        };
        packet.unwrap().map(|packet| Message::decode(&packet.bytes).unwrap())
    }
}

/// A memfd that nothing has sealed.
fn open_memory(bytes: usize) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("hostile", flags).unwrap();
    ftruncate(&file, bytes as u64).unwrap();
    file
}

const HELLO: Message = Message::Hello { version: VERSION };

#[test]
fn session_whose_set_up_never_ends_is_ended() {
    let assist = Lone::start("late", "1000");
    let file = open_memory(4096);
    let frames: (Message, &[BorrowedFd<'_>]) = (Message::Frames { bytes: 4096 }, &[file.as_fd()]);
    let late = [assist.connect(&[]), assist.connect(&[(HELLO, &[])])];
    let half = assist.connect(&[(HELLO, &[]), frames]);
    assert_eq!(half.receive(), Some(Message::Ready));
    for host in late.iter().chain([&half]) {
        let answer = host.receive();
        let Some(Message::Refused(why)) = answer else { panic!("{answer:?}") };
        assert_eq!(why, "its set-up was not complete within 1s");
        assert_eq!(host.receive(), None);
    }
    // A host that sends without end is not served longer.
    let busy = assist.connect(&[]);
    while busy.send(&HELLO, &[]).is_ok() {}
    let messages = assist.end();
    assert!(messages.contains("the assist has ended 1 session(s) whose set-up was"), "{messages}");
    assert!(messages.contains(&format!("of process {}, which", std::process::id())), "{messages}");
}

#[test]
fn memory_that_a_host_shares_cannot_be_cut() {
    let assist = Lone::start("cut", "60000");
    let frames = open_memory(16 * 4096);
    let chunks = open_memory(16 * 4096);
    rustix::fs::fcntl_add_seals(&chunks, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    let bytes = ring::BYTES.next_multiple_of(4096);
    let shared_ring = open_memory(bytes);
    let memory = verbs::DmaMemory::map_shared(&shared_ring, 0, bytes).unwrap();
    drop(ring::Producer::new(memory));
    let (control, _other) = UnixStream::pair().unwrap();
    let host = assist.connect(&[
        (HELLO, &[]),
        (Message::Frames { bytes: 16 * 4096 }, &[frames.as_fd()]),
        (Message::Chunks { address: 0, bytes: 16 * 4096 }, &[chunks.as_fd()]),
        (Message::Control, &[control.as_fd()]),
        (Message::Ring, &[shared_ring.as_fd()]),
    ]);
    assert_eq!(host.receive(), Some(Message::Ready), "the frames are mapped");
    assert_eq!(host.receive(), Some(Message::Ready), "the ring is served");
    for file in [&frames, &chunks, &shared_ring] {
        for bytes in [0, 4096, 1 << 30] {
            assert_eq!(ftruncate(file, bytes), Err(rustix::io::Errno::PERM));
        }
    }
    // The assist looks at the ring, which still has its pages.
    host.send(&Message::Wake, &[]).unwrap();

    // Memory whose length the assist cannot fix is refused.
    let fixed = open_memory(4096);
    rustix::fs::fcntl_add_seals(&fixed, SealFlags::SEAL).unwrap();
    let file = open_file(&assist.scratch);
    for memory in [fixed.as_fd(), file.as_fd()] {
        let host = assist.connect(&[(HELLO, &[]), (Message::Frames { bytes: 4096 }, &[memory])]);
        let answer = host.receive();
        assert!(matches!(answer, Some(Message::Refused(_))), "{answer:?}");
    }
    let honest = open_memory(4096);
    let host =
        assist.connect(&[(HELLO, &[]), (Message::Frames { bytes: 4096 }, &[honest.as_fd()])]);
    assert_eq!(host.receive(), Some(Message::Ready));
    assist.end();
}

/// A file of a disk, which cannot be sealed.
fn open_file(scratch: &Scratch) -> std::fs::File {
    let path = scratch.0.join("file");
    std::fs::write(&path, [0; 4096]).unwrap();
    std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// The assist serves processes of its own user only.
#[test]
fn workers_without_root_go_on_without_the_assist() {
    if !rustix::process::geteuid().is_root() {
        return needs::skip("only root can change its user");
    }
    let site = site(NodeKind::Private, "workers", 12 * MIB);
    let source = include_str!("pager_programs/drops_privileges.c");
    let program = site.scratch.compile("drops_privileges", source);
    let program = program.to_str().unwrap();
    let paged = site.run(program, &[]);
    assert_same(&plain(program, &[]), &paged.outcome, 12 * MIB);
    assert!(paged.count("assist_processes") < paged.count("processes"), "{}", paged.stats);
}

#[test]
fn queues_of_two_memory_nodes_are_lent() {
    let scratch = Scratch::new("assist-nodes");
    let nodes = ["a", "b"]
        .map(|name| MemoryNode::start(&format!("assist-{name}"), &["--memory", "64MiB"]).unwrap());
    let pool: Vec<String> =
        nodes.iter().map(|node| format!("shm:{}", node.socket.display())).collect();
    let stats = scratch.0.join("stats.json");
    let mut command = Command::new(granary());
    command.args(["run", "--local", &LOCAL.to_string(), "--assist", "process", "--pool"]);
    command.arg(pool.join(",")).arg("--stats-json").arg(&stats).args(["--", PYTHON]);
    let outcome = Running::start(command.args(passes("4")).stdin(Stdio::null()));
    let outcome = outcome.finish();
    let plain = plain(PYTHON, &passes("4"));
    assert_eq!((outcome.code, outcome.stdout), (0, plain.stdout), "{}", outcome.stderr);
    let stats: serde_json::Value = serde_json::from_slice(&std::fs::read(stats).unwrap()).unwrap();
    assert!(stats["assist_pages"].as_u64().unwrap() > 20_000, "{stats}");
}
