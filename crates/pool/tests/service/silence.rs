//! Tests of the deadline for idle connections.

use std::fs;
use std::os::unix::fs::symlink;
use std::thread;
use std::time::{Duration, Instant};

use pool::protocol::{Numbered, Opening, Reply, Request};
use pool::{Endpoint, Options, Pool, Service, Settings, schemes};
use rnic::nic::SoftNic;
use rnic::port::shm::socket::{receive, send};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use verbs::Nic;

use crate::place::{Raw, check_whole, connect, service, settings};

/// An idle or half-open connection is closed after the deadline. A connection of an admitted
/// compute node or an attached process has no deadline. A connection that only sends control
/// requests has a deadline after each answer.
#[test]
fn idle_connections_are_closed_at_the_deadline() {
    let silence = Duration::from_secs(1);
    let settings = Settings { silence, ..settings(schemes::ONESIDEDMW) };
    let service = Service::start(&settings, &Endpoint::Fresh).unwrap();
    let settled = connect(&service);
    let grant = settled.allocate_blocking().unwrap();
    let attached = SoftNic::attach(service.path()).unwrap();
    let start = Instant::now();
    let idle = Raw::new(service.path());
    let no_hello = Raw::new(service.path());
    no_hello.say(br#"{"service":"nic"}"#);
    let wrong_hello = Raw::new(service.path());
    wrong_hello.say(br#"{"service":"nic"}"#);
    let not_admitted = Raw::pool(service.path());
    let asking = Raw::pool(service.path());
    let departed = Raw::pool(service.path());
    assert_eq!(departed.ask(1, Request::Goodbye), Reply::Done);
    // Invalid messages do not extend the deadline; valid requests do.
    for _ in 0..2 {
        thread::sleep(silence / 4);
        send(&wrong_hello.0, b"{}", &[]).unwrap();
        receive(&wrong_hello.0).unwrap().expect("a refusal");
        assert_eq!(asking.ask(1, Request::Audit), Reply::Done);
    }
    for raw in [&idle, &no_hello, &wrong_hello, &not_admitted, &departed] {
        assert!(receive(&raw.0).expect("an end in time").is_none());
    }
    let after = start.elapsed();
    assert!(after >= silence, "{after:?}");
    drop(asking.ask(2, Request::Status));
    assert!(asking.hear().is_none());
    // The admitted compute node stays connected all the time.
    settled.write_blocking(&grant, 0, b"here").unwrap();
    settled.free_blocking(grant).unwrap();
    attached.alloc_pd().unwrap();
    drop(settled);
    check_whole(&service);
}

/// Messages that arrive in time count even if the memory node is paused and reads them late.
#[test]
fn message_during_a_pause_keeps_the_connection() {
    let silence = Duration::from_millis(500);
    let settings = Settings { silence, ..settings(schemes::ONESIDEDMW) };
    let service = Service::start(&settings, &Endpoint::Fresh).unwrap();
    let nic = Raw::new(service.path());
    let pool = Raw::pool(service.path());
    service.pause();
    nic.say(br#"{"service":"nic"}"#);
    pool.say(&serde_json::to_vec(&Numbered { id: 3, body: Request::Audit }).unwrap());
    thread::sleep(silence + silence / 4);
    service.resume();
    assert_eq!(pool.hear().map(|reply| reply.body), Some(Reply::Done));
    assert!(
        receive(&nic.0).expect("an end in time").is_none(),
        "the session stayed open without a hello"
    );
    assert!(pool.hear().is_none());
}

/// While a process creates QPs, its connection to the pool does not count as idle, because creating
/// them takes long on a busy machine.
#[test]
fn creating_qps_extends_the_deadline() {
    let silence = Duration::from_millis(500);
    let settings = Settings { silence, ..settings(schemes::ONESIDEDMW) };
    let service = Service::start(&settings, &Endpoint::Fresh).unwrap();
    let start = Instant::now();
    let pool = Raw::pool(service.path());
    let nic = SoftNic::attach(service.path()).unwrap();
    let mut last = start;
    while start.elapsed() < silence * 3 {
        last = Instant::now();
        nic.alloc_pd().unwrap();
        thread::sleep(silence / 10);
    }
    assert_eq!(pool.ask(1, Request::Audit), Reply::Done);
    // Once the NIC connection is idle, too, it is closed.
    assert!(pool.hear().is_none());
    assert!(last.elapsed() >= silence, "{:?}", last.elapsed());
}

/// A process that was stopped too long before its admission finds its connection closed. It has
/// lost nothing, and reconnects.
#[test]
fn client_reconnects_after_a_missed_deadline() {
    let service = service(schemes::ONESIDEDMW);
    let welcome = {
        let raw = Raw::new(service.path());
        raw.say(&serde_json::to_vec(&Opening::pool()).unwrap());
        receive(&raw.0).unwrap().expect("a welcome").bytes
    };
    // The first server of this path closes the connection after the welcome; then the service takes
    // over.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("node");
    let (flags, kind) = (SocketFlags::CLOEXEC, SocketType::SEQPACKET);
    let listener = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 4).unwrap();
    let pool = thread::scope(|scope| {
        scope.spawn(|| {
            let impatient = rustix::net::accept(&listener).unwrap();
            receive(&impatient).unwrap().expect("an opening");
            fs::remove_file(&path).unwrap();
            symlink(service.path(), &path).unwrap();
            send(&impatient, &welcome, &[]).unwrap();
        });
        Pool::connect(&path, Options { groups: Some(1), ..Options::default() }).unwrap()
    });
    let grant = pool.allocate_blocking().unwrap();
    pool.write_blocking(&grant, 0, b"here").unwrap();
    pool.free_blocking(grant).unwrap();
    drop(pool);
    check_whole(&service);
}
