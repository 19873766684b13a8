use std::thread::JoinHandle;

use super::super::super::Function;
use super::super::nic_thread::eventfd;
use super::super::page::{WAITER, WHERE, on_one_cpu};
use super::*;

fn pair() -> (OwnedFd, OwnedFd) {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None).unwrap()
}

/// Opens a function of a host that responds to the hello with `answer` and a number of descriptors.
fn open(answer: Response, descriptors: usize) -> (Result<Attached, Error>, OwnedFd) {
    let (client, host) = pair();
    let hosting: JoinHandle<OwnedFd> = std::thread::spawn(move || {
        assert_eq!(socket::receive(&host).unwrap().unwrap().bytes, SERVICE.as_bytes());
        let hello = socket::receive(&host).unwrap().unwrap();
        assert_eq!(hello.descriptors.len(), 1);
        let fds: Vec<_> = (0..descriptors).map(|_| eventfd().unwrap()).collect();
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        socket::send(&host, &serde_json::to_vec(&answer).unwrap(), &fds).unwrap();
        host
    });
    let opened = Attached::open(client);
    (opened, hosting.join().unwrap())
}

fn welcome(doorbells: u32) -> Response {
    Response::Welcome { version: VERSION, doorbells, secret: SessionSecret::random().unwrap() }
}

fn room() -> u32 {
    let page = page_bytes(DOORBELLS_WANTED).next_multiple_of(rustix::param::page_size());
    doorbells_in(page)
}

#[test]
fn client_reports_why_the_host_rejects_it() {
    let (refused, _) = open(Response::Error("no room".to_string()), 0);
    assert!(
        matches!(&refused, Err(Error::Refused { why }) if why == "no room"),
        "{:?}",
        refused.err()
    );
    let (other, _) = open(Response::Memory(0), 0);
    assert!(matches!(other, Err(Error::Protocol { .. })));
}

#[test]
fn client_rejects_more_doorbells_than_its_page_holds() {
    for doorbells in [1, room()] {
        let (opened, _host) = open(welcome(doorbells), 1);
        let f = opened.unwrap();
        assert!(f.doorbell(doorbells - 1).is_ok());
        assert!(matches!(f.doorbell(doorbells), Err(Error::Protocol { .. })));
    }
    for doorbells in [room() + 1, u32::MAX] {
        let (opened, _host) = open(welcome(doorbells), 1);
        assert!(matches!(opened, Err(Error::Protocol { .. })), "{doorbells}");
    }
    for descriptors in [0, 2] {
        let (opened, _host) = open(welcome(1), descriptors);
        assert!(matches!(opened, Err(Error::Protocol { .. })), "{descriptors} descriptors");
    }
}

#[test]
fn client_lists_its_descriptors() {
    let (opened, _host) = open(welcome(1), 1);
    let f = opened.unwrap();
    let inner = &f.0;
    let needed = [
        inner.socket.lock().socket.as_raw_fd(),
        inner.watched.as_raw_fd(),
        inner.page.wake.as_raw_fd(),
    ];
    for named in [f.descriptors(), Function::Attached(f.clone()).descriptors()] {
        assert_eq!(named, needed);
    }
}

#[test]
fn describe_accepts_only_memory_within_a_shared_piece() {
    let (opened, _host) = open(welcome(1), 1);
    let inner = &opened.unwrap().0;
    // The first half of these pages is shared.
    let memory = DmaMemory::anonymous(16384).unwrap();
    let shared = Shared { number: 7, bytes: 8192 };
    inner.memories.lock().insert(memory.addr(), shared);
    let part = |at, len| inner.describe(&memory.slice(at, len).unwrap());
    for (at, len) in [(0, 8192), (0, 1), (4096, 4096), (8191, 1)] {
        let span = part(at, len).unwrap();
        assert_eq!((span.memory, span.offset, span.bytes), (7, at as u64, len as u64));
    }
    for (at, len) in [(0, 8193), (4096, 8192), (8191, 2), (8192, 1), (12288, 4096), (8193, 1)] {
        assert!(matches!(part(at, len), Err(Error::NotDma { .. })), "{len} bytes at {at}");
    }
}

/// Otherwise the host keeps its mapping, and an address that is used again names the old memory.
#[test]
fn memory_that_a_client_drops_is_removed_from_the_host() {
    let (opened, host) = open(welcome(1), 1);
    let f = opened.unwrap();
    let hosting = std::thread::spawn(move || {
        let answer = |answer: Response| {
            let asked = socket::receive(&host).unwrap().unwrap();
            socket::send(&host, &serde_json::to_vec(&answer).unwrap(), &[]).unwrap();
            serde_json::from_slice::<Request>(&asked.bytes).unwrap()
        };
        [answer(Response::Memory(7)), answer(Response::Reply(Reply::Done))]
    });
    let memory = f.alloc_dma(4096).unwrap();
    assert_eq!(f.0.memories.lock().len(), 1);
    drop(memory);
    assert_eq!(f.0.memories.lock().len(), 0);
    // Without a request the host would wait: its socket closes.
    drop(f);
    let [added, removed] = hosting.join().unwrap();
    assert!(matches!(added, Request::AddMemory { bytes: 4096 }));
    assert!(matches!(removed, Request::RemoveMemory { memory: 7 }));
}

#[test]
fn client_yields_its_cpu_only_on_the_nics_cpu() {
    let (opened, _host) = open(welcome(1), 1);
    let f = opened.unwrap();
    on_one_cpu(|cpu| {
        let word = |at| f.0.page.memory.word32(at);
        for offer in [Attached::offer_cpu, |f: &Attached| Function::Attached(f.clone()).offer_cpu()]
        {
            word(WHERE).store(cpu + 2, Ordering::Relaxed);
            word(WAITER).store(0, Ordering::Relaxed);
            assert!(!offer(&f));
            word(WHERE).store(cpu + 1, Ordering::Relaxed);
            assert!(offer(&f));
            assert_eq!(word(WAITER).load(Ordering::Relaxed), cpu + 1);
        }
    });
}

#[test]
fn posted_receive_wakes_a_nic_that_waits_for_one() {
    let (opened, _host) = open(welcome(1), 1);
    let f = opened.unwrap();
    let through = |f: &Attached| Function::Attached(f.clone()).receive_posted();
    for receive_posted in [Attached::receive_posted, through] {
        for (depth, wakes) in [(0, false), (1, false), (ASLEEP_RNR, true)] {
            f.0.page.memory.word32(SLEEPING).store(depth, Ordering::Relaxed);
            receive_posted(&f);
            let read = rustix::io::read(&f.0.page.wake, &mut [0; 8]);
            assert_eq!(read.is_ok(), wakes, "asleep at level {depth}");
        }
    }
}

/// The host is stopped for longer than the time limit, and then answers the requests of before.
#[test]
fn client_goes_on_with_a_host_that_was_silent() {
    let (opened, host) = open(welcome(1), 1);
    let f = opened.unwrap();
    let is_late = |result: Result<Reply, Error>| matches!(result, Err(Error::Unanswered { .. }));
    assert!(is_late(f.execute(Verb::AllocPd)));
    // The next verbs send nothing, and wait for the overdue response only.
    for _ in 0..8 {
        assert!(is_late(f.execute(Verb::AllocPd)));
    }
    assert!(f.check_alive().is_ok());
    let hosting = std::thread::spawn(move || {
        for memory in [7, 8] {
            let request = socket::receive(&host).unwrap().unwrap();
            assert!(request.descriptors.is_empty());
            let answer = serde_json::to_vec(&Response::Memory(memory)).unwrap();
            socket::send(&host, &answer, &[]).unwrap();
        }
        host
    });
    let answer = loop {
        match f.0.ask(&Request::RemoveMemory { memory: 1 }, None) {
            Err(Error::Unanswered { .. }) => {}
            answer => break answer.unwrap(),
        }
    };
    assert!(matches!(answer, Response::Memory(8)), "the response to an earlier request");
    hosting.join().unwrap();
}

#[test]
fn client_detects_and_remembers_the_end_of_its_host() {
    for by_word in [false, true] {
        let (opened, host) = open(welcome(1), 1);
        let f = opened.unwrap();
        assert!(f.check_alive().is_ok() && Function::Attached(f.clone()).check_alive().is_ok());
        let why = if by_word {
            f.0.page.memory.word32(SLEEPING).store(GONE, Ordering::Relaxed);
            "its thread has ended"
        } else {
            drop(host);
            "its process has closed the connection"
        };
        for gone in [f.check_alive(), Function::Attached(f.clone()).check_alive()] {
            assert!(matches!(&gone, Err(Error::Gone { why: told }) if told == why), "{gone:?}");
        }
        f.0.page.memory.word32(SLEEPING).store(0, Ordering::Relaxed);
        assert!(f.check_alive().is_err());
        assert!(matches!(f.execute(Verb::AllocPd), Err(Error::Gone { .. })));
    }
}
