//! Who is sent away for saying nothing, and who is not.

use std::fs;
use std::os::unix::fs::symlink;
use std::thread;
use std::time::{Duration, Instant};

use fabric::Nic;
use fabric::soft::SoftNic;
use pool::protocol::{Numbered, Opening, Reply, Request};
use pool::{Endpoint, Options, Pool, SchemeKind, Service, Settings};
use rnic::port::shm::socket::{receive, send};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::place::{Raw, check_whole, connect, service, settings};

/// Who connects and says nothing, or stops half-way, does not hold a place for ever; who has said what it is
/// for may be silent as long as it likes, and who only asks has some time after each answer.
#[test]
fn the_silent_are_sent_away() {
    let silence = Duration::from_secs(1);
    let settings = Settings { silence, ..settings(SchemeKind::OneSidedMw) };
    let service = Service::start(&settings, &Endpoint::Fresh).unwrap();
    let settled = connect(&service);
    let grant = settled.allocate_blocking().unwrap();
    let attached = SoftNic::attach(service.path()).unwrap();
    let start = Instant::now();
    let speechless = Raw::new(service.path());
    let no_hello = Raw::new(service.path());
    no_hello.say(br#"{"service":"nic"}"#);
    let wrong_hello = Raw::new(service.path());
    wrong_hello.say(br#"{"service":"nic"}"#);
    let not_admitted = Raw::pool(service.path());
    let asking = Raw::pool(service.path());
    let has_left = Raw::pool(service.path());
    assert_eq!(has_left.ask(1, Request::Goodbye), Reply::Done);
    // Talk that leads nowhere does not count, and requests do.
    for _ in 0..2 {
        thread::sleep(silence / 4);
        send(&wrong_hello.0, b"{}", &[]).unwrap();
        receive(&wrong_hello.0).unwrap().expect("a refusal");
        assert_eq!(asking.ask(1, Request::Audit), Reply::Done);
    }
    for raw in [&speechless, &no_hello, &wrong_hello, &not_admitted, &has_left] {
        assert!(receive(&raw.0).expect("an end in time").is_none());
    }
    let after = start.elapsed();
    assert!(after >= silence, "{after:?}");
    drop(asking.ask(2, Request::Status));
    assert!(asking.hear().is_none());
    // Who is settled is silent all this time, and beyond.
    settled.write_blocking(&grant, 0, b"here").unwrap();
    settled.free_blocking(grant).unwrap();
    attached.alloc_pd().unwrap();
    drop(settled);
    check_whole(&service);
}

/// A memory node that was held does not blame others for it: what they said in time counts.
#[test]
fn who_spoke_while_the_memory_node_was_held_was_not_silent() {
    let silence = Duration::from_millis(500);
    let settings = Settings { silence, ..settings(SchemeKind::OneSidedMw) };
    let service = Service::start(&settings, &Endpoint::Fresh).unwrap();
    let nic = Raw::new(service.path());
    let pool = Raw::pool(service.path());
    service.pause();
    nic.say(br#"{"service":"nic"}"#);
    pool.say(&serde_json::to_vec(&Numbered { id: 3, body: Request::Audit }).unwrap());
    thread::sleep(silence + silence / 4);
    service.resume();
    assert_eq!(pool.hear().map(|reply| reply.body), Some(Reply::Done));
    assert!(receive(&nic.0).expect("an end in time").is_none(), "no hello for too long");
    assert!(pool.hear().is_none());
}

/// What a compute node needs takes it long where many others want the CPU: as long as its process makes QPs, the
/// connection that is to name them is not silent.
#[test]
fn who_prepares_its_qps_is_not_silent() {
    let silence = Duration::from_millis(500);
    let settings = Settings { silence, ..settings(SchemeKind::OneSidedMw) };
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
    // With the NIC as silent as itself it is.
    assert!(pool.hear().is_none());
    assert!(last.elapsed() >= silence, "{:?}", last.elapsed());
}

/// A process that was stopped for too long before it was admitted finds its connection ended: it has lost
/// nothing, and connects again.
#[test]
fn who_was_stopped_before_it_was_admitted_connects_again() {
    let service = service(SchemeKind::OneSidedMw);
    let welcome = {
        let raw = Raw::new(service.path());
        raw.say(&serde_json::to_vec(&Opening::pool()).unwrap());
        receive(&raw.0).unwrap().expect("a welcome").bytes
    };
    // Who serves this path first ends the connection after the welcome; from then on the service does.
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
