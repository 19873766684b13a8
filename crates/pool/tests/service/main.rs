//! Tests of the memory node as a service: requests that its control socket refuses, crashes of
//! clients, and that its CPU is not involved in the work of the NIC.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pool::protocol::{Admission, MAX_BYTES, Numbered, Reply, Request};
use pool::{
    Budget, ConnectRequest, Endpoint, Error, GroupId, Options, Pool, Service, Settings, schemes,
};
use rnic::nic::SoftNic;
use rnic::port::shm::socket::{receive, send};
use scheme::info::AccessKind;
use verbs::{Access, CqAttr, Nic, QpAttr, QueuePair, Receive, SessionSecret};

mod place;
mod silence;

use self::place::{Raw, check_whole, connect, service, settings};

/// The session limits allow everything that the settings promise to a compute node.
#[test]
fn session_limits_allow_all_groups_and_lanes() {
    let largest = Settings {
        donate_bytes: 8 * 4096,
        group_size: scheme::MAX_GROUP as u32,
        groups_max: Settings::GROUPS_MAX,
        ..settings(schemes::ONESIDEDMW)
    };
    let service = Service::start(&largest, &Endpoint::Fresh).unwrap();
    let options = Options {
        groups: Some(Settings::GROUPS_MAX as u16),
        send_blocks: 16,
        ..Options::default()
    };
    let pool = Pool::connect(service.path(), options).unwrap();
    let last = GroupId(Settings::GROUPS_MAX as u16 - 1);
    let grant = pool.allocate_in_blocking(last).unwrap();
    pool.write_blocking(&grant, 0, b"here").unwrap();
    pool.free_blocking(grant).unwrap();
    drop(pool);
    check_whole(&service);
}

fn refusal(reply: Reply) -> String {
    match reply {
        Reply::Error { why } => why,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn invalid_message_is_refused_with_a_reason() {
    let service = service(schemes::RPC_MW_2);
    let cases: [(&[u8], &str); 5] = [
        (b"\xff\x00", "expected value"),
        (br#"{"service":"disk"}"#, "no service `disk`"),
        (br#"{"service":"pool","version":99}"#, "version 99"),
        (br#"{"version":1}"#, "service"),
        (&[b' '; MAX_BYTES + 1], "bytes"),
    ];
    for (bytes, expected) in cases {
        let raw = Raw::new(service.path());
        raw.say(bytes);
        let why = refusal(raw.hear().unwrap().body);
        assert!(why.contains(expected), "{why}");
        assert!(raw.hear().is_none(), "the connection stayed open after: {why}");
    }
    // After the opening, an invalid message does not end the connection.
    let raw = Raw::pool(service.path());
    let cases: [(&[u8], u64, &str); 5] = [
        (br#"{"id":7,"request":"reboot"}"#, 7, "reboot"),
        (br#"{"id":8,"request":"admit"}"#, 8, "management"),
        (br#"[]"#, 0, "invalid"),
        (&[b' '; MAX_BYTES + 1], 0, "bytes"),
        (br#"{"id":9,"request":"reset_access","group":-1,"lane":0}"#, 9, "-1"),
    ];
    for (bytes, id, expected) in cases {
        raw.say(bytes);
        let reply = raw.hear().unwrap();
        assert_eq!(reply.id, id);
        let why = refusal(reply.body);
        assert!(why.contains(expected), "{why}");
    }
    for request in [
        Request::AwaitMemory { timeout_ms: 5 },
        Request::ResetManagement { salt: None },
        Request::ResetAccess { group: 0, lane: 0, salt: None },
    ] {
        assert!(refusal(raw.ask(1, request)).contains("not admitted"));
    }
    assert!(matches!(raw.ask(2, Request::Status), Reply::Status(_)));
    assert_eq!(raw.ask(3, Request::Audit), Reply::Done);
    assert_eq!(raw.ask(4, Request::Goodbye), Reply::Done);
    drop(raw);
    check_whole(&service);
}

#[test]
fn admission_refuses_foreign_qps() {
    let service = service(schemes::RPC_MW_2);
    let victim = connect(&service);
    let grant = victim.allocate_blocking().unwrap();
    let nic = SoftNic::attach(service.path()).unwrap();
    let raw = Raw::pool(service.path());
    // None of these numbers belongs to a QP of this session, and without a session no QP is
    // accepted.
    for session in [nic.secret(), Some(SessionSecret::random().unwrap()), None] {
        for first in [0, 1, 2, 3, 17, 0xff_ffff, u32::MAX] {
            let connect = ConnectRequest {
                management: vec![first],
                groups: vec![vec![first.wrapping_add(1), u32::MAX]],
                ..ConnectRequest::default()
            };
            let admission = Admission { connect, session, ..Admission::default() };
            let why = refusal(raw.ask(1, Request::Admit(Box::new(admission))));
            assert!(why.contains("NIC session") || why.contains("session with the NIC"), "{why}");
        }
    }
    victim.write_blocking(&grant, 0, b"untouched").unwrap();
    drop((nic, raw, victim));
    check_whole(&service);
}

const STRANGER: &str = "GRANARY_TEST_STRANGER";

/// Helper, not a test: a process that creates QPs and prints their numbers, if the environment
/// variable is set.
#[test]
fn make_qps_and_wait() {
    let Ok(path) = std::env::var(STRANGER) else { return };
    let nic = SoftNic::attach(path).unwrap();
    let pd = nic.alloc_pd().unwrap();
    let cq = nic.create_cq(CqAttr { entries: 16, ignore_overrun: false }).unwrap();
    let qp = || {
        let (send_cq, recv_cq, receive, access) = (&cq, &cq, Receive::None, Access::NONE);
        nic.create_qp(&pd, QpAttr { send_cq, recv_cq, send_blocks: 16, receive, access }).unwrap()
    };
    let qps = [qp(), qp(), qp()];
    println!("qps {} {} {}", qps[0].qpn().raw(), qps[1].qpn().raw(), qps[2].qpn().raw());
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// The QPs exist and belong to one session, but another process created them.
#[test]
fn admission_refuses_qps_of_another_process() {
    let service = service(schemes::RPC_MW_2);
    let mut stranger = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "make_qps_and_wait", "--nocapture"])
        .env(STRANGER, service.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(stranger.stdout.take().unwrap()).lines().map_while(Result::ok);
    let named = |line: String| -> Option<Vec<u32>> {
        let (_, numbers) = line.split_once("qps ")?;
        numbers.split(' ').map(|n| n.trim().parse().ok()).collect()
    };
    let qps = lines.by_ref().find_map(named).expect("the QPs of the other process");
    let nic = SoftNic::attach(service.path()).unwrap();
    let raw = Raw::pool(service.path());
    for session in [nic.secret(), Some(SessionSecret::random().unwrap()), None] {
        let connect = ConnectRequest {
            management: vec![qps[0]],
            groups: vec![qps[1..].to_vec()],
            ..ConnectRequest::default()
        };
        let admission = Admission { connect, session, ..Admission::default() };
        match raw.ask(1, Request::Admit(Box::new(admission))) {
            Reply::Error { why } => assert!(why.contains("session"), "{why}"),
            other => panic!("another process's QPs were admitted: {other:?}"),
        }
    }
    drop((nic, raw, stranger.stdin.take()));
    assert!(lines.any(|line| line.contains("1 passed")));
    assert!(stranger.wait().unwrap().success());
    check_whole(&service);
}

#[test]
fn connection_admits_one_compute_node() {
    let service = service(schemes::RPC_MW_2);
    let pool = connect(&service);
    let admission = ConnectRequest {
        management: Vec::new(),
        groups: Vec::new(),
        bulletin_addr: 0,
        bulletin_rkey: 0,
        ..ConnectRequest::default()
    };
    let e = pool.control().admit(&admission).unwrap_err().to_string();
    assert!(e.contains("already"), "{e}");
    let grant = pool.allocate_blocking().unwrap();
    pool.free_blocking(grant).unwrap();
    drop(pool);
    check_whole(&service);
}

#[test]
fn client_that_reads_no_replies_delays_no_other() {
    let service = service(schemes::RPC_MW_2);
    let unread = Raw::pool(service.path());
    rustix::io::ioctl_fionbio(&unread.0, true).unwrap();
    let request = serde_json::to_vec(&Numbered { id: 1, body: Request::Status }).unwrap();
    let mut sent = 0;
    let deadline = Instant::now() + Duration::from_secs(10);
    // Sends until the service stops reading.
    let mut full_since = None;
    while full_since.is_none_or(|t: Instant| t.elapsed() < Duration::from_millis(100)) {
        assert!(Instant::now() < deadline, "{sent} requests were read although no reply was read");
        match send(&unread.0, &request, &[]) {
            Ok(()) => (sent, full_since) = (sent + 1, None),
            Err(_) => _ = full_since.get_or_insert_with(Instant::now),
        }
    }
    let pool = connect(&service);
    let grant = pool.allocate_blocking().unwrap();
    pool.free_blocking(grant).unwrap();
    assert!(matches!(Raw::pool(service.path()).ask(1, Request::Status), Reply::Status(_)));
    // Once the client reads, it receives all replies.
    rustix::io::ioctl_fionbio(&unread.0, false).unwrap();
    for _ in 0..sent {
        assert!(matches!(unread.hear().unwrap().body, Reply::Status(_)));
    }
    drop((unread, pool));
    check_whole(&service);
}

#[test]
fn number_of_clients_and_connections_is_bounded() {
    let service = service(schemes::RPC_MW_2);
    let pools: Vec<Pool> = (0..4).map(|_| connect(&service)).collect();
    match Pool::connect(service.path(), Options::default()) {
        Err(Error::Full { why, .. }) => assert!(why.contains("4 client slots"), "{why}"),
        Err(e) => panic!("{e}"),
        Ok(_) => panic!("a fifth compute node was admitted"),
    }
    let idle: Vec<Raw> = (0..100).map(|_| Raw::new(service.path())).collect();
    // The last connections exceed the limit and are closed without a reply.
    let refused =
        idle.iter().rev().take(50).all(|raw| matches!(receive(&raw.0), Ok(None) | Err(_)));
    assert!(refused, "100 idle connections were kept");
    drop(idle);
    drop(pools);
    check_whole(&service);
    connect(&service).allocate_blocking().unwrap();
    check_whole(&service);
}

#[test]
fn chains_need_no_cpu_of_the_memory_node() {
    let service = service(schemes::ONESIDEDMW);
    let pools = [connect(&service), connect(&service)];
    service.pause();
    // A paused thread has recorded that before it sleeps.
    let mut before = service.control_cpu();
    loop {
        thread::sleep(Duration::from_millis(5));
        match service.control_cpu() {
            now if now == before => break,
            now => before = now,
        }
    }
    thread::scope(|s| {
        for (id, pool) in pools.iter().enumerate() {
            s.spawn(move || {
                for round in 0..3000u64 {
                    let grant = pool.allocate_blocking().unwrap();
                    let mark = (id as u64) << 32 | round;
                    assert_eq!(pool.compare_and_swap_blocking(&grant, 0, 0, mark).unwrap(), 0);
                    pool.write_blocking(&grant, 8, &mark.to_le_bytes()).unwrap();
                    let mut out = [0; 8];
                    pool.read_blocking(&grant, 8, &mut out).unwrap();
                    assert_eq!(out, mark.to_le_bytes());
                    pool.free_blocking(grant).unwrap();
                }
            });
        }
    });
    assert_eq!(service.control_cpu(), before, "the memory node's CPU took part");
    service.resume();
    let status = service.status().unwrap().node;
    assert_eq!((status.allocations_nic, status.allocations_cpu), (6000, 0));
    assert_eq!((status.frees_nic, status.frees_cpu), (6000, 0));
    drop(pools);
    check_whole(&service);
}

/// The counterpart: the CPU that the test above pauses is really paused.
#[test]
fn rpcs_need_the_cpu_of_the_memory_node() {
    let service = service(schemes::RPC_MW_2);
    let pool = connect(&service);
    service.pause();
    let done = AtomicBool::new(false);
    thread::scope(|s| {
        let waiting = s.spawn(|| {
            let grant = pool.allocate_blocking().unwrap();
            done.store(true, Ordering::Release);
            grant
        });
        thread::sleep(Duration::from_millis(100));
        assert!(!done.load(Ordering::Acquire), "a paused CPU answered");
        service.resume();
        pool.free_blocking(waiting.join().unwrap()).unwrap();
    });
    drop(pool);
    check_whole(&service);
}

/// The number of wake-ups does not depend on the load of the machine, unlike the CPU time. The CPU
/// time only distinguishes a thread that never sleeps from one that does.
#[test]
fn idle_service_sleeps() {
    for scheme in schemes::ALL {
        let service = service(scheme);
        let pool = connect(&service);
        let grant = pool.allocate_blocking().unwrap();
        let (start, before) = (Instant::now(), service.status().unwrap());
        thread::sleep(Duration::from_millis(500));
        let (time, after) = (start.elapsed(), service.status().unwrap());
        // Scans of the capability table are 100 ms apart; a status request takes one or two
        // wake-ups.
        let most = 4 + 2 * time.as_millis() as u64 / 100;
        let control = after.control_wakeups - before.control_wakeups;
        let nic = after.nic_wakeups - before.nic_wakeups;
        assert!(control <= most, "{scheme}: control threads were woken {control} times");
        assert!(nic <= most, "{scheme}: the NIC was woken {nic} times");
        let cpu = Duration::from_nanos(after.control_cpu_ns - before.control_cpu_ns);
        assert!(cpu < time / 2, "{scheme}: control threads took {cpu:?}");
        let cpu = Duration::from_nanos(after.nic_cpu_ns - before.nic_cpu_ns);
        assert!(cpu < time / 2, "{scheme}: the NIC took {cpu:?}");
        pool.free_blocking(grant).unwrap();
    }
}

#[test]
fn stop_notifies_clients_and_removes_the_socket() {
    for scheme in schemes::ALL {
        let service = service(scheme);
        let path = service.path().to_path_buf();
        let pool = connect(&service);
        let grant = pool.allocate_blocking().unwrap();
        pool.write_blocking(&grant, 0, &[1; 4096]).unwrap();
        service.stop();
        assert!(!path.exists() && !path.parent().unwrap().exists());
        let start = Instant::now();
        for result in [pool.read_blocking(&grant, 0, &mut [0; 4096]), pool.free_blocking(grant)] {
            assert!(matches!(result, Err(Error::Gone { .. })), "{scheme}: {result:?}");
        }
        // A page is allocated by its first write.
        if scheme.access != AccessKind::Pages {
            assert!(matches!(pool.allocate_blocking(), Err(Error::Gone { .. })));
        }
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    }
}

const VICTIM: &str = "GRANARY_TEST_VICTIM";

/// Helper, not a test: a compute node that works until it is killed, if the environment variable is
/// set.
#[test]
fn work_until_killed() {
    let Ok(path) = std::env::var(VICTIM) else { return };
    let pool = Pool::connect(&path, Options { groups: Some(2), ..Options::default() }).unwrap();
    println!("ready");
    let mut held = Vec::new();
    for round in 0u64.. {
        let allocated = pool.allocate_in_blocking(GroupId((round % 2) as u16)).and_then(|grant| {
            held.push(grant);
            pool.write_blocking(&grant, 0, &[0xdd; 4096])
        });
        match allocated {
            Ok(()) => {}
            Err(Error::OutOfMemory { .. }) => {
                held.drain(..).for_each(|grant| pool.free_blocking(grant).unwrap());
            }
            Err(e) => panic!("{e}"),
        }
        if round % 7 == 0 && held.len() > 3 {
            pool.free_blocking(held.swap_remove(1)).unwrap();
        }
    }
}

#[test]
fn chunks_of_a_killed_process_are_reclaimed() {
    for scheme in schemes::ALL {
        let service = service(scheme);
        let survivor = connect(&service);
        // The published form does not clear.
        let clears = scheme.clears();
        for round in 0..8u64 {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "work_until_killed", "--nocapture"])
                .env(VICTIM, service.path())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let lines = BufReader::new(child.stdout.take().unwrap()).lines();
            assert!(lines.map_while(Result::ok).any(|line| line.contains("ready")));
            let until = Instant::now() + Duration::from_micros(300 + 1700 * round);
            while Instant::now() < until {
                match survivor.allocate_blocking() {
                    Ok(grant) => {
                        let mut page = [1; 4096];
                        survivor.read_blocking(&grant, 0, &mut page).unwrap();
                        assert!(
                            page == [0; 4096] || !clears,
                            "{scheme}: the page has another owner"
                        );
                        match survivor.write_blocking(&grant, 0, &[0x77; 4096]) {
                            Ok(()) | Err(Error::OutOfMemory { .. }) => {}
                            Err(e) => panic!("{scheme}: {e}"),
                        }
                        survivor.free_blocking(grant).unwrap();
                    }
                    Err(Error::OutOfMemory { .. }) => {}
                    Err(e) => panic!("{e}"),
                }
            }
            child.kill().unwrap();
            child.wait().unwrap();
            let deadline = Instant::now() + Duration::from_secs(20);
            loop {
                let status = survivor.node_status().unwrap().node;
                if status.free == status.chunks && (status.clients, status.leaving) == (1, 0) {
                    break;
                }
                assert!(Instant::now() < deadline, "{scheme}: chunks are missing: {status:?}");
                thread::sleep(Duration::from_millis(1));
            }
            survivor.audit().unwrap();
            let grants: Vec<_> = (0..64).map(|_| survivor.allocate_blocking().unwrap()).collect();
            for grant in grants {
                let mut page = [1; 4096];
                survivor.read_blocking(&grant, 0, &mut page).unwrap();
                let found = page != [0; 4096] && clears;
                assert!(!found, "{scheme}: a killed process's data is still there");
                survivor.free_blocking(grant).unwrap();
            }
        }
        drop(survivor);
        check_whole(&service);
    }
}

/// Budgets are checked from the first compute node on, although the thread sleeps before. A compute
/// node over its budget gets this error for every request until it may reconnect.
#[test]
fn over_budget_error_is_returned_for_each_request() {
    let suspension = Duration::from_millis(300);
    let budget = Budget { requests_per_s: Some(20), suspension, ..Budget::default() };
    let settings = settings(schemes::ONESIDEDMW).with("budget", budget);
    let service = Service::start(&settings, &Endpoint::Fresh).unwrap();
    let pool = connect(&service);
    // On a thread of its own, so that a request that never ends fails the test.
    let (done, ended) = std::sync::mpsc::channel();
    let client = thread::spawn(move || {
        let start = Instant::now();
        let mut refusals = Vec::new();
        let mut back = 0;
        let held = pool.allocate_blocking().unwrap();
        while back < 3 {
            let result = pool.allocate_blocking().and_then(|grant| pool.free_blocking(grant));
            match result {
                Ok(()) if refusals.is_empty() => assert!(start.elapsed() < Duration::from_secs(5)),
                Ok(()) => back += 1,
                Err(Error::OverBudget { retry_after, .. }) => refusals.push(retry_after),
                Err(e) => panic!("{e}"),
            }
        }
        pool.free_blocking(held).unwrap();
        done.send(refusals).unwrap();
    });
    let refusals = ended.recv_timeout(Duration::from_secs(20)).expect("a request that never ended");
    client.join().unwrap();
    assert!(refusals.len() > 1, "{refusals:?}");
    assert!(refusals.iter().all(|left| *left <= suspension), "{refusals:?}");
    check_whole(&service);
}

/// Keys, QP numbers and client numbers restart with the memory node, so that an old grant would
/// match.
#[test]
fn grant_does_not_survive_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let endpoint = Endpoint::At(directory.path().join("pool.sock"));
    for &scheme in schemes::ALL {
        let start = || Service::start(&settings(scheme), &endpoint).unwrap();
        let first = start();
        let pool = connect(&first);
        let held = pool.allocate_blocking().unwrap();
        first.stop();
        let second = start();
        let pool = pool.reconnect().unwrap();
        let anew = pool.allocate_blocking().unwrap();
        assert_eq!(
            (anew.entry, anew.keys()),
            (held.entry, held.keys()),
            "the numbers do not match, so the test is void"
        );
        let uses = [
            pool.read_blocking(&held, 0, &mut [0; 8]),
            pool.write_blocking(&held, 0, b"stale"),
            pool.fetch_and_add_blocking(&held, 0, 1).map(drop),
            pool.free_blocking(held),
        ];
        for result in uses {
            assert!(matches!(result, Err(Error::Stale { .. })), "{result:?}");
        }
        let mut bytes = [1; 4096];
        pool.read_blocking(&anew, 0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 4096]);
        pool.free_blocking(anew).unwrap();
        drop(pool);
        check_whole(&second);
    }
}
