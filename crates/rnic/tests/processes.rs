//! The `shm` port between real processes.
//!
//! The other process is this test binary again. It runs one test, [`other_process`], in the role
//! that an environment variable names.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::{End, LONG, end, pair};
use rnic::nic::SoftNic;
use rnic::port::shm::{Host, Session, SessionLimits};
use verbs::completion::Completer;
use verbs::{
    CompletionQueue, CqAttr, Error, MemoryRegion, Nic, Op, Qpn, QueuePair, ReceiveRequest, Remote,
    Status, WorkRequest,
};

/// Environment variable with the role of the started process.
const ROLE: &str = "GRANARY_TEST_ROLE";
/// Environment variable with the path of the socket to attach to or to serve.
const SOCKET: &str = "GRANARY_TEST_SOCKET";

/// Serializes the tests, which measure this process's mappings and CPU time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn other_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let socket = PathBuf::from(std::env::var_os(SOCKET).expect("a socket"));
    match role.as_str() {
        "client" => client(&socket),
        "hammer" => hammer(&socket),
        "host" => host_process(&socket),
        "one_core" => one_core(),
        other => panic!("no role {other}"),
    }
}

/// Another process, killed at the latest when the handle is dropped.
struct Other {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Other {
    fn start(role: &str, socket: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", "other_process", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(SOCKET, socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("starting this binary again");
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, input, output }
    }

    /// Returns the next line that the other process prints for this one.
    fn read_line(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).expect("a pipe") > 0, "the process has ended");
            // The other side's test harness prints in between, without a newline.
            if let Some((_, reported)) = line.trim_end().split_once("REPORT ") {
                return reported.to_string();
            }
        }
    }

    fn write_line(&mut self, line: &str) {
        writeln!(self.input, "{line}").expect("a pipe");
    }

    fn finish(mut self) {
        assert!(self.child.wait().expect("a child").success(), "the other process failed");
    }

    fn kill(mut self) {
        self.child.kill().expect("killing");
        self.child.wait().expect("a child");
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn report(line: &str) {
    println!("REPORT {line}");
}

fn read_numbers() -> Vec<u64> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a pipe");
    line.split_whitespace().map(|n| n.parse().expect("a number")).collect()
}

/// A host that serves its own socket.
struct Served {
    nic: SoftNic,
    host: Host,
    socket: PathBuf,
    sessions: &'static AtomicUsize,
}

impl Served {
    fn start() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!(
            "granary-test-{}-{}.sock",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        let socket = std::env::temp_dir().join(name);
        let (nic, host) = SoftNic::host().expect("a host");
        let sessions: &AtomicUsize = Box::leak(Box::default());
        accept_on(&socket, host.clone(), sessions);
        Self { nic, host, socket, sessions }
    }

    fn wait_for_sessions(&self, count: usize) {
        let since = Instant::now();
        while self.sessions.load(Ordering::SeqCst) != count {
            assert!(since.elapsed() < LONG, "sessions: {:?}", self.sessions);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // The socket is no longer needed.
        let _ = std::fs::remove_file(&self.socket);
    }
}

fn accept_on(path: &Path, host: Host, sessions: &'static AtomicUsize) {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let listener: OwnedFd = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .expect("a socket");
    rustix::net::bind(&listener, &SocketAddrUnix::new(path).expect("a path")).expect("binding");
    rustix::net::listen(&listener, 8).expect("listening");
    std::thread::spawn(move || {
        loop {
            let flags = SocketFlags::CLOEXEC;
            let socket = rustix::net::accept_with(&listener, flags).expect("accepting");
            let session = Session::new(&host, SessionLimits::default());
            sessions.fetch_add(1, Ordering::SeqCst);
            std::thread::spawn(move || {
                common::serve(session, socket);
                sessions.fetch_sub(1, Ordering::SeqCst);
            });
        }
    });
}

/// Connects an end of another process to an end of this one; the processes exchange their memory
/// addresses.
fn introduce(other: &mut Other, ours: &End) -> Remote {
    let reported: Vec<u64> =
        other.read_line().split(' ').map(|n| n.parse().expect("a number")).collect();
    let [qpn, addr, rkey] = reported[..] else { panic!("{reported:?}") };
    ours.qp.connect(Qpn::new(qpn as u32)).expect("connecting");
    let remote = ours.mr.remote(0);
    other.write_line(&format!("{} {} {}", ours.qp.qpn().raw(), remote.addr, remote.rkey.0));
    Remote { addr, rkey: verbs::Key(rkey as u32) }
}

/// The child's side of [`introduce`].
fn introduce_to_parent(ours: &End) -> Remote {
    let remote = ours.mr.remote(0);
    report(&format!("{} {} {}", ours.qp.qpn().raw(), remote.addr, remote.rkey.0));
    let [qpn, addr, rkey] = read_numbers()[..] else { panic!("three numbers") };
    ours.qp.connect(Qpn::new(qpn as u32)).expect("connecting");
    Remote { addr, rkey: verbs::Key(rkey as u32) }
}

#[test]
fn another_process_moves_data() {
    let _alone = alone();
    let served = Served::start();
    let ours = end(&served.nic, 1 << 20);
    let mut other = Other::start("client", &served.socket);
    let theirs = introduce(&mut other, &ours);
    for id in 0..16 {
        let to = [ours.sge(512 << 10 | (id as usize) << 10, 1024)];
        ours.qp.post_recv(&ReceiveRequest { id, to: &to }).unwrap();
    }
    other.write_line("1");
    for i in 0..500u64 {
        let c = ours.next();
        assert_eq!((c.status, c.bytes), (Status::Success, 8));
        let at = 512 << 10 | (c.id as usize) << 10;
        assert_eq!(ours.get(at, 8), i.to_be_bytes());
        ours.qp.post_recv(&ReceiveRequest { id: c.id, to: &[ours.sge(at, 1024)] }).unwrap();
    }
    assert_eq!(other.read_line(), "done");
    assert_eq!(ours.get(0, 8), 1000u64.to_be_bytes(), "sum of the client's atomics");
    // In the other direction: this process reads the other's memory.
    let c = ours.run(Op::Read { from: theirs, to: &[ours.sge(0, 1 << 19)] });
    assert_eq!(c.status, Status::Success);
    assert_eq!(ours.get(0, 1 << 19), vec![0x5a; 1 << 19]);
    other.write_line("1");
    other.finish();
    served.wait_for_sessions(0);
}

fn client(socket: &Path) {
    let nic = SoftNic::attach(socket).expect("attaching");
    assert_eq!(nic.caps().name, "shm");
    let ours = end(&nic, 1 << 20);
    let at = introduce_to_parent(&ours);
    read_numbers();
    for i in 0..1000u64 {
        let old = ours.sge(0, 8);
        assert_eq!(ours.run(Op::FetchAdd { at, add: 1, old }).status, Status::Success);
        assert_eq!(ours.get(0, 8), i.to_be_bytes());
    }
    let data: Vec<u8> = (0..300_000u32).map(|i| (i * 11) as u8).collect();
    ours.put(0, &data);
    let beyond = Remote { addr: at.addr + 4096, ..at };
    for size in [1, 64, 4096, 300_000] {
        let c = ours.run(Op::Write { to: beyond, from: &[ours.sge(0, size)] });
        assert_eq!(c.status, Status::Success);
        let c = ours.run(Op::Read { from: beyond, to: &[ours.sge(512 << 10, size)] });
        assert_eq!(c.status, Status::Success);
        assert_eq!(ours.get(512 << 10, size as usize), data[..size as usize]);
    }
    for i in 0..500u64 {
        let c = ours.run(Op::SendInline { data: &i.to_be_bytes() });
        assert_eq!(c.status, Status::Success);
    }
    ours.put(0, &vec![0x5a; 1 << 19]);
    report("done");
    read_numbers();
    // A range beyond the region and a dead key are refused, and only this queue pair fails.
    let far = Remote { addr: at.addr + (1 << 20) - 4, ..at };
    let c = ours.run(Op::Read { from: far, to: &[ours.sge(0, 8)] });
    assert_eq!(c.status, Status::RemoteAccess);
}

#[test]
fn a_killed_client_leaves_nothing_behind() {
    let _alone = alone();
    let served = Served::start();
    let bystander = SoftNic::attach(&served.socket).expect("attaching");
    let (left, right) = pair(&bystander);
    let ours = end(&served.nic, 1 << 20);
    let maps = shared_maps();
    let mut other = Other::start("hammer", &served.socket);
    let theirs = introduce(&mut other, &ours);
    served.wait_for_sessions(2);
    other.write_line("1");
    assert_eq!(other.read_line(), "hammering");
    assert!(shared_maps() > maps);
    let c = ours.run(Op::Read { from: theirs, to: &[ours.sge(0, 64)] });
    assert_eq!(c.status, Status::Success);
    other.kill();
    served.wait_for_sessions(1);
    let c = ours.run(Op::Read { from: theirs, to: &[ours.sge(0, 64)] });
    assert_eq!(c.status, Status::RetryExceeded, "the killed client must not answer");
    assert_eq!(shared_maps(), maps, "the killed client's memory must be unmapped");
    for _ in 0..1000 {
        let c = left.run(Op::Read { from: right.mr.remote(0), to: &[left.sge(0, 64)] });
        assert_eq!(c.status, Status::Success);
    }
}

fn hammer(socket: &Path) {
    let nic = SoftNic::attach(socket).expect("attaching");
    let ours = end(&nic, 1 << 20);
    let from = introduce_to_parent(&ours);
    read_numbers();
    report("hammering");
    let mut batch = [verbs::Completion::EMPTY; 32];
    loop {
        let to = [ours.sge(0, 512 << 10)];
        let read = WorkRequest { id: 0, op: Op::Read { from, to: &to }, signaled: true };
        // The queue is full most of the time.
        let _ = ours.qp.post_send(&[read]);
        ours.cq.poll(&mut batch);
    }
}

/// Returns the number of DMA memory mappings of this process.
fn shared_maps() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("proc");
    // The bystander's memory counts too: it has the same name and stays mapped.
    maps.lines().filter(|l| l.contains("memfd:granary-dma")).count()
}

#[test]
fn a_client_learns_that_the_host_was_killed() {
    let _alone = alone();
    let socket = std::env::temp_dir().join(format!("granary-test-{}-h.sock", std::process::id()));
    let mut other = Other::start("host", &socket);
    assert_eq!(other.read_line(), "serving");
    let nic = SoftNic::attach(&socket).expect("attaching");
    // Removing the test's socket file is best effort.
    let _ = std::fs::remove_file(&socket);
    let cq = nic.create_cq(CqAttr { entries: 64, ignore_overrun: false }).unwrap();
    let completer = Completer::new(cq);
    let (a, b) = pair(&nic);
    let attr = verbs::QpAttr {
        send_cq: completer.cq(),
        recv_cq: completer.cq(),
        send_blocks: 64,
        receive: verbs::Receive::None,
        access: verbs::Access::NONE,
    };
    let qp = nic.create_qp(&a.pd, attr).unwrap();
    qp.connect(b.qp.qpn()).unwrap();
    b.qp.connect(qp.qpn()).unwrap();
    let held = |op| completer.submit(|id| qp.post_send(&[WorkRequest { id, op, signaled: true }]));
    // No receive is posted, so the operations wait: two threads, one of which leads, and a future.
    let pending: Vec<_> =
        (0..3).map(|_| held(Op::SendInline { data: b"x" }).expect("posting")).collect();
    std::thread::scope(|s| {
        let waiting: Vec<_> = pending
            .into_iter()
            .enumerate()
            .map(|(i, pending)| {
                s.spawn(move || match i {
                    0 => verbs::executor::block_on(pending),
                    _ => pending.wait(),
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(30));
        let killed = Instant::now();
        other.kill();
        for waiter in waiting {
            let end = waiter.join().expect("no panic");
            assert!(matches!(end, Err(Error::Gone { .. })), "{end:?}");
        }
        assert!(killed.elapsed() < Duration::from_secs(5), "{:?}", killed.elapsed());
    });
    assert!(matches!(a.cq.wait(LONG), Err(Error::Gone { .. })));
    assert!(matches!(nic.alloc_pd(), Err(Error::Gone { .. })));
    let after = held(Op::Nop).map(drop);
    assert!(matches!(after, Err(Error::Gone { .. })), "{after:?}");
}

fn host_process(socket: &Path) {
    let (_nic, host) = SoftNic::host().expect("a host");
    accept_on(socket, host, Box::leak(Box::default()));
    report("serving");
    read_numbers();
}

#[test]
fn an_idle_nic_sleeps() {
    let _alone = alone();
    let served = Served::start();
    let attached = SoftNic::attach(&served.socket).expect("attaching");
    let (a, b) = pair(&attached);
    let (c, d) = pair(&served.nic);
    for (a, b) in [(&a, &b), (&c, &d)] {
        a.run(Op::Read { from: b.mr.remote(0), to: &[a.sge(0, 64)] });
    }
    std::thread::sleep(Duration::from_millis(20));
    let (start, before) = (Instant::now(), served.host.stats().unwrap());
    std::thread::sleep(Duration::from_secs(1));
    let (time, after) = (start.elapsed(), served.host.stats().unwrap());
    // Each query of the statistics may wake the NIC.
    let woken = after.sleeps - before.sleeps;
    assert!(woken <= 2, "woken {woken} times in an idle second");
    let used = after.cpu - before.cpu;
    assert!(used < time / 2, "{used:?} of CPU in {time:?} without work");
    // Work from either client wakes the NIC again.
    for (a, b) in [(&a, &b), (&c, &d)] {
        let c = a.run(Op::Read { from: b.mr.remote(0), to: &[a.sge(0, 64)] });
        assert_eq!(c.status, Status::Success);
    }
    let stats = served.host.stats().unwrap();
    assert!(stats.engine.wqes_total() >= 4 && stats.sleeps > 0, "{stats:?}");
}

#[test]
fn nic_and_client_share_one_core() {
    let _alone = alone();
    let socket = std::env::temp_dir().join("unused");
    let mut other = Other::start("one_core", &socket);
    let us: f64 = other.read_line().parse().expect("a number");
    other.finish();
    // Two context switches take a few us; waiting for a time slice to end would take milliseconds.
    assert!(us < 500.0, "{us} us for a READ on one core");
}

fn one_core() {
    let mut one = rustix::thread::CpuSet::new();
    let allowed = rustix::thread::sched_getaffinity(None).expect("the CPUs of this thread");
    let cpu = (0..rustix::thread::CpuSet::MAX_CPU).find(|c| allowed.is_set(*c)).expect("a CPU");
    one.set(cpu);
    for thread in [None, Some(rustix::process::getpid())] {
        rustix::thread::sched_setaffinity(thread, &one).expect("one CPU");
    }
    let (nic, _host) = SoftNic::host().expect("a host");
    let (a, b) = pair(&nic);
    let completer = Completer::new(a.cq.clone());
    let since = Instant::now();
    let rounds = 2000;
    for _ in 0..rounds {
        let to = [a.sge(0, 8)];
        let op = Op::Read { from: b.mr.remote(0), to: &to };
        let pending = completer
            .submit(|id| a.qp.post_send(&[WorkRequest { id, op, signaled: true }]))
            .expect("posting");
        assert_eq!(pending.wait().expect("the NIC is there").status, Status::Success);
    }
    report(&format!("{:.3}", since.elapsed().as_secs_f64() * 1e6 / rounds as f64));
}
