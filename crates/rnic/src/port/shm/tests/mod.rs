//! Tests of sessions with clients that violate the protocol, and of the doorbell page.

use std::os::fd::{AsFd, OwnedFd};

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags};

use super::super::Error;
use super::super::control::{QpVerb, ReceiveRing, ReceiveVerb, Reply, SendRing, Verb};
use super::page::{DOORBELLS, page_bytes};
use super::protocol::{Request, Response, SERVICE, Span, VERSION};
use super::{Attached, Host, Session, SessionLimits, socket};

mod load;
mod memory;
use crate::limits::Limits;
use verbs::cqe::CqReader;
use verbs::wqe::Builder;
use verbs::{Access, AsyncEvent, DmaMemory, Key, KeyIndex, QpChange, Qpn, SessionSecret};

fn host() -> Host {
    Host::start(Limits::default()).unwrap()
}

fn session(host: &Host) -> Session {
    Session::new(host, SessionLimits { memories: 3, memory_bytes: 1 << 20, ..Default::default() })
}

fn ask(s: &mut Session, request: &str, fds: Vec<OwnedFd>) -> (Response, Vec<OwnedFd>) {
    let (reply, fds) = s.handle(request.as_bytes(), fds);
    (serde_json::from_slice(&reply).expect("a response"), fds)
}

fn opened(host: &Host) -> Session {
    let mut s = session(host);
    let (welcome, fds) = ask(&mut s, HELLO, vec![whole(8192)]);
    assert!(matches!(welcome, Response::Welcome { version: VERSION, .. }), "{welcome:?}");
    assert_eq!(fds.len(), 1);
    s
}

const HELLO: &str = r#"{"hello":{"version":4,"bytes":8192}}"#;

#[track_caller]
fn refused(s: &mut Session, request: &str, fds: Vec<OwnedFd>, why: &str) {
    match ask(s, request, fds) {
        (Response::Error(e), fds) => {
            assert!(e.contains(why), "{e}");
            assert!(fds.is_empty());
        }
        other => panic!("{request}: {:?}", other.0),
    }
}

fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("test", flags).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    let page = vec![0; 4096];
    for at in (0..bytes).step_by(4096) {
        assert_eq!(rustix::io::pwrite(&fd, &page[..(bytes - at).min(4096) as usize], at), Ok(4096));
    }
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

/// Memory that a host accepts.
fn whole(bytes: u64) -> OwnedFd {
    memfd(bytes, SealFlags::empty())
}

#[test]
fn hello_comes_first_and_once() {
    let host = host();
    let mut s = session(&host);
    refused(&mut s, r#"{"verb":"alloc_pd"}"#, Vec::new(), "before the hello");
    refused(&mut s, r#"{"hello":{"version":999}}"#, Vec::new(), "version 999");
    refused(&mut s, HELLO, Vec::new(), "0 descriptors");
    refused(
        &mut s,
        HELLO,
        vec![whole(4096)],
        "8192 bytes of shared memory, but the memfd has 4096",
    );
    for bytes in [0, 131, 69633, u64::MAX] {
        let hello = format!(r#"{{"hello":{{"version":4,"bytes":{bytes}}}}}"#);
        refused(&mut s, &hello, vec![whole(8192)], "the doorbell page has");
    }
    assert!(!s.is_open());
    let (welcome, _) = ask(&mut s, HELLO, vec![whole(8192)]);
    assert!(matches!(welcome, Response::Welcome { doorbells: 1024, .. }), "{welcome:?}");
    assert!(s.is_open());
    refused(&mut s, HELLO, vec![whole(8192)], "second hello");
    let (pd, _) = ask(&mut s, r#"{"verb":"alloc_pd"}"#, Vec::new());
    assert!(matches!(pd, Response::Reply(Reply::Pd(_))), "{pd:?}");
}

#[test]
fn malformed_requests_are_rejected() {
    let host = host();
    let mut s = opened(&host);
    for bad in
        ["", "{", "[]", "null", "\"hello\"", "{\"verb\":\"no_such\"}", "{\"service\":\"nic\"}"]
    {
        refused(&mut s, bad, Vec::new(), "malformed request");
    }
    refused(&mut s, r#"{"verb":{"alloc_mws":{"pd":0,"count":4000000000}}}"#, Vec::new(), "1024");
    refused(&mut s, r#"{"remove_memory":{"memory":5}}"#, Vec::new(), "not shared");
    let span = r#"{"memory":0,"offset":0,"bytes":64}"#;
    let cq = format!(
        r#"{{"verb":{{"create_cq":{{"ring":{span},"entries":1,"record":{span},
           "ignore_overrun":false}}}}}}"#
    );
    refused(&mut s, &cq, Vec::new(), "not shared");
    let fds = vec![whole(4096)];
    assert!(matches!(ask(&mut s, r#"{"add_memory":{"bytes":4096}}"#, fds).0, Response::Memory(0)));
    for (offset, bytes) in [(0, 4097), (4096, 1), (u64::MAX, 2), (1, u64::MAX)] {
        let verb = Verb::RegMr {
            pd: verbs::Pdn::new(0),
            memory: Span { memory: 0, offset, bytes },
            iova: 0,
            access: Access::LOCAL_ALL,
        };
        let request = serde_json::to_string(&Request::Verb(verb)).unwrap();
        refused(&mut s, &request, Vec::new(), "bytes at");
    }
}

#[test]
fn only_whole_sealable_memory_is_accepted() {
    let host = host();
    let mut s = opened(&host);
    refused(&mut s, &add(12288), vec![whole(8192)], "8192");
    refused(&mut s, &add(4096), vec![whole(8192)], "8192");
    refused(&mut s, &add(0), vec![whole(8192)], "whole pages");
    refused(&mut s, &add(100), vec![whole(8192)], "whole pages");
    refused(&mut s, &add(8192), vec![], "0 descriptors");
    refused(&mut s, &add(8192), vec![whole(8192), whole(8192)], "2 descriptors");
    refused(&mut s, &add(2 << 20), vec![whole(2 << 20)], "limit is 1048576");
    for number in 0..3 {
        let (shared, _) = ask(&mut s, &add(8192), vec![whole(8192)]);
        assert!(matches!(shared, Response::Memory(n) if n == number), "{shared:?}");
    }
    refused(&mut s, &add(8192), vec![whole(8192)], "limit is 3");
    let (done, _) = ask(&mut s, r#"{"remove_memory":{"memory":1}}"#, Vec::new());
    assert!(matches!(done, Response::Reply(Reply::Done)));
    assert!(matches!(ask(&mut s, &add(8192), vec![whole(8192)]).0, Response::Memory(3)));
}

fn add(bytes: u64) -> String {
    format!(r#"{{"add_memory":{{"bytes":{bytes}}}}}"#)
}

#[test]
fn objects_of_other_functions_are_inaccessible() {
    let host = host();
    let (mut s, mut t) = (opened(&host), opened(&host));
    let Response::Reply(Reply::Pd(pd)) = ask(&mut s, r#"{"verb":"alloc_pd"}"#, Vec::new()).0 else {
        panic!("no PD");
    };
    let mws = format!(r#"{{"verb":{{"alloc_mws":{{"pd":{},"count":1}}}}}}"#, pd.raw());
    refused(&mut t, &mws, Vec::new(), "another function");
    let Response::Reply(Reply::Keys(keys)) = ask(&mut s, &mws, Vec::new()).0 else {
        panic!("no windows");
    };
    let query = format!(r#"{{"verb":{{"query_key":{{"index":{}}}}}}}"#, keys[0].index().raw());
    refused(&mut t, &query, Vec::new(), "another function");
    assert!(matches!(ask(&mut s, &query, Vec::new()).0, Response::Reply(Reply::KeyInfo(_))));
    // Events are delivered to their own function only.
    let fd = whole(1 << 16);
    ask(&mut s, r#"{"add_memory":{"bytes":65536}}"#, vec![fd]);
    let span = |offset, bytes| Span { memory: 0, offset, bytes };
    let record = |at: u64| span(32768 + at, 8);
    let mut verb =
        |verb| ask(&mut s, &serde_json::to_string(&Request::Verb(verb)).unwrap(), vec![]);
    let cq = Verb::CreateCq {
        ring: span(0, 64 * 64),
        entries: 64,
        record: record(0),
        ignore_overrun: false,
    };
    let Response::Reply(Reply::Cq(cqn)) = verb(cq).0 else { panic!("no CQ") };
    let ring = ReceiveRing { ring: span(8192, 256), entries: 16, stride: 16, record: record(8) };
    let Response::Reply(Reply::Srq(srqn)) = verb(Verb::CreateSrq { pd, ring }).0 else {
        panic!("no SRQ")
    };
    let qp = QpVerb {
        pd,
        send: None,
        receive: ReceiveVerb::Shared { srqn },
        send_cq: cqn,
        recv_cq: cqn,
        access: Access::NONE,
        privileged: false,
    };
    let Response::Reply(Reply::Qp { qpn, .. }) = verb(Verb::CreateQp(qp)).0 else {
        panic!("no QP")
    };
    verb(Verb::ModifyQp { qpn, change: QpChange::Error });
    let limit = serde_json::to_string(&Request::Verb(Verb::ModifySrq { srqn, limit: 1 })).unwrap();
    refused(&mut t, &limit, Vec::new(), "another function");
    let events = |s: &mut Session| match ask(s, r#"{"verb":"take_events"}"#, Vec::new()).0 {
        Response::Reply(Reply::Events(events)) => events.events,
        other => panic!("{other:?}"),
    };
    assert_eq!(events(&mut t), []);
    assert_eq!(events(&mut s), [AsyncEvent::LastWqeReached { qpn }]);
    assert_eq!(events(&mut s), []);
    // The objects of a session end with the session.
    drop(s);
    refused(&mut t, &query, Vec::new(), "");
    let gone = host.physical().execute(Verb::QueryKey { index: KeyIndex::new(keys[0].0 >> 8) });
    assert!(matches!(gone, Err(Error::Verb(crate::Error::Unknown(_)))), "{gone:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn arbitrary_bytes_are_rejected_as_requests(
        request in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let host = host();
        let mut s = opened(&host);
        let (reply, _) = s.handle(&request, Vec::new());
        let response: Response = serde_json::from_slice(&reply).unwrap();
        prop_assert!(matches!(response, Response::Error(_)));
    }
}

#[test]
fn edge_values_in_verbs_do_not_stop_the_nic() {
    let host = host();
    let mut s = opened(&host);
    let fd = whole(1 << 16);
    ask(&mut s, r#"{"add_memory":{"bytes":65536}}"#, vec![fd]);
    ask(&mut s, r#"{"verb":"alloc_pd"}"#, Vec::new());
    // Every combination of a few edge values in the fields of all verbs.
    let odd = [0u32, 1, 2, 3, 7, 64, 4096, 0x7fff_ffff, 0xffff_ffff];
    for &a in &odd {
        for &b in &odd {
            let span = |n: u32| Span { memory: 0, offset: a as u64, bytes: n as u64 };
            let qp = |blocks| QpVerb {
                pd: a.into(),
                send: Some(SendRing { ring: span(b), blocks, managed: a == 3 }),
                receive: ReceiveVerb::Shared { srqn: b.into() },
                send_cq: a.into(),
                recv_cq: b.into(),
                access: Access(a as u8),
                privileged: b == 7,
            };
            let verbs = [
                Verb::DeallocPd { pd: b.into() },
                Verb::RegMr {
                    pd: a.into(),
                    memory: span(b),
                    iova: u64::MAX - 5,
                    access: Access(255),
                },
                Verb::DeregMr { key: Key(a) },
                Verb::DeallocMw { key: Key(a) },
                Verb::CreateCq {
                    ring: span(b),
                    entries: a,
                    record: span(8),
                    ignore_overrun: false,
                },
                Verb::DestroyCq { cqn: a.into() },
                Verb::CreateQp(qp(a)),
                Verb::CreateQp(qp(b)),
                Verb::ModifyQp { qpn: a.into(), change: QpChange::Reset },
                Verb::QueryQp { qpn: a.into() },
                Verb::DestroyQp { qpn: a.into() },
                Verb::EnableSend { qpn: a.into(), limit: b as u16 },
                Verb::EnableRecv { qpn: a.into(), limit: b },
                Verb::ModifyQp {
                    qpn: a.into(),
                    change: QpChange::Access { access: Access(b as u8) },
                },
                Verb::ReregMr {
                    key: Key(a),
                    pd: Some(b.into()),
                    memory: Some((span(b), u64::MAX - 5)),
                    access: Some(Access(255)),
                },
                Verb::ModifyQp { qpn: a.into(), change: QpChange::Tag { tag: b as u64 } },
                Verb::AllocGuardedMws {
                    pd: b.into(),
                    region: Key(a),
                    mask: b as u64,
                    words: vec![(a as u64, 0), (u64::MAX - b as u64, b as u64)],
                },
                Verb::ModifySrq { srqn: a.into(), limit: b },
                Verb::QuerySrq { srqn: a.into() },
                Verb::QueryDevice,
                Verb::TakeEvents,
            ];
            for verb in verbs {
                let request = serde_json::to_vec(&Request::Verb(verb)).unwrap();
                s.handle(&request, Vec::new());
            }
        }
    }
    assert!(host.stats().is_ok(), "the NIC thread runs");
}

#[test]
fn random_doorbells_do_not_stop_the_nic() {
    let host = host();
    let mut s = session(&host);
    let page = whole(8192);
    let memory = DmaMemory::map_shared(&page, 0, page_bytes(1024)).unwrap();
    let (_, mut fds) = ask(&mut s, HELLO, vec![page]);
    let (page, wake) = (memory, fds.remove(0));
    // A client may make its eventfd blocking and fill its counter.
    rustix::fs::fcntl_setfl(&wake, rustix::fs::OFlags::empty()).unwrap();
    let local = host.physical();
    let mut x = 1u32;
    for round in 0..200 {
        for slot in 0..1024 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            page.word32(DOORBELLS + slot * 4).store(x, std::sync::atomic::Ordering::Relaxed);
        }
        page.word32(0).store(x, std::sync::atomic::Ordering::Relaxed);
        if round == 100 {
            rustix::io::write(&wake, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        }
        assert!(matches!(local.execute(Verb::AllocPd), Ok(Reply::Pd(_))));
    }
}

#[test]
fn client_attaches_over_a_socket_and_executes_wqes() {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let host = host();
    let (client, server) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let mut s = Session::new(&host, SessionLimits::default());
    let serving = std::thread::spawn(move || {
        assert_eq!(socket::receive(&server).unwrap().unwrap().bytes, SERVICE.as_bytes());
        while let Some(packet) = socket::receive(&server).unwrap() {
            let (reply, fds) = s.handle(&packet.bytes, packet.descriptors);
            let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
            socket::send(&server, &reply, &fds).unwrap();
        }
    });
    {
        let f = Attached::open(client).unwrap();
        let memory = f.alloc_dma(3 * 4096).unwrap();
        let foreign = DmaMemory::anonymous(4096).unwrap();
        let pd = match f.execute(Verb::AllocPd).unwrap() {
            Reply::Pd(pd) => pd,
            other => panic!("{other:?}"),
        };
        let (access, iova) = (Access::LOCAL_ALL, 0);
        let not_dma = f.execute(Verb::RegMr { pd, memory: foreign, iova, access });
        assert!(matches!(not_dma, Err(Error::NotDma { .. })), "{not_dma:?}");
        let (ring, record) = (memory.slice(0, 4096).unwrap(), memory.slice(8192, 8).unwrap());
        for slot in 0..64 {
            ring.write(slot * 64 + 63, &[0xf1]);
        }
        let verb = Verb::CreateCq {
            ring: ring.clone(),
            entries: 64,
            record: record.clone(),
            ignore_overrun: false,
        };
        let Reply::Cq(cqn) = f.execute(verb).unwrap() else { panic!("no CQ") };
        let send = memory.slice(4096, 4096).unwrap();
        let verb = Verb::CreateQp(QpVerb {
            pd,
            send: Some(SendRing { ring: send.clone(), blocks: 64, managed: false }),
            receive: ReceiveVerb::None,
            send_cq: cqn,
            recv_cq: cqn,
            access: Access::NONE,
            privileged: false,
        });
        let Reply::Qp { qpn, doorbell } = f.execute(verb).unwrap() else { panic!("no QP") };
        for change in
            [QpChange::Init, QpChange::ReadyToReceive { peer: qpn.into() }, QpChange::ReadyToSend]
        {
            f.execute(Verb::ModifyQp { qpn, change }).unwrap();
        }
        let mut doorbell = f.doorbell(doorbell.unwrap()).unwrap();
        let mut cq = CqReader::new(ring, 64, record, 0);
        for index in 0..1000u16 {
            let mut wqe = Builder::new(qpn, index);
            wqe.nop().signaled();
            send.write(index as usize % 64 * 64, wqe.bytes());
            doorbell.write(index.wrapping_add(1));
            let cqe = loop {
                match cq.poll() {
                    Some(cqe) => break cqe,
                    None => std::thread::yield_now(),
                }
            };
            assert_eq!((cqe.wqe_counter, cqe.qpn, cqe.error), (index, qpn, None));
        }
        // A doorbell beyond the ring's size affects its own queue pair at most.
        for index in [1000 + 65, 0, 0xffff, 1001] {
            doorbell.write(index);
        }
        assert!(matches!(f.execute(Verb::QueryQp { qpn }), Ok(Reply::QpInfo(_))));
        drop((memory, send));
        assert!(f.check_alive().is_ok());
    }
    serving.join().unwrap();
}

/// The result of `owns_all` agrees with one query for each QP.
#[test]
fn session_owns_exactly_the_qps_that_it_can_query() {
    const QPS: usize = 512;
    let host = host();
    let mut s = opened(&host);
    let other = opened(&host);
    let number = |response: Response, name: &str| -> u64 {
        let json = serde_json::to_value(response).unwrap();
        json.pointer(name).and_then(|n| n.as_u64()).unwrap_or_else(|| panic!("{name} in {json}"))
    };
    let asked = |s: &mut Session, request: &str| ask(s, request, Vec::new()).0;
    ask(&mut s, &add(65536), vec![whole(65536)]);
    let pd = number(asked(&mut s, r#"{"verb":"alloc_pd"}"#), "/reply/pd");
    let span = |offset, bytes| format!(r#"{{"memory":0,"offset":{offset},"bytes":{bytes}}}"#);
    let cq = asked(
        &mut s,
        &format!(
            r#"{{"verb":{{"create_cq":{{"ring":{},"entries":64,"record":{},
               "ignore_overrun":false}}}}}}"#,
            span(0, 4096),
            span(4096, 8),
        ),
    );
    let cq = number(cq, "/reply/cq");
    let qp = format!(
        r#"{{"verb":{{"create_qp":{{"pd":{pd},"send":{{"ring":{},"blocks":1,"managed":true}},
           "receive":"none","send_cq":{cq},"recv_cq":{cq},"access":0,"privileged":false}}}}}}"#,
        span(8192, 64),
    );
    let qpns: Vec<Qpn> =
        (0..QPS).map(|_| Qpn::new(number(asked(&mut s, &qp), "/reply/qp/qpn") as u32)).collect();
    let requests: Vec<_> = qpns
        .iter()
        .map(|qpn| serde_json::to_string(&Request::Verb(Verb::QueryQp { qpn: *qpn })).unwrap())
        .collect();
    for request in &requests {
        assert!(matches!(asked(&mut s, request), Response::Reply(_)));
    }
    assert!(s.owns_all(&qpns).unwrap());
    // One QP of another owner makes the result false, and another session owns none of them.
    let one_more = [&qpns[..], &[Qpn::new(0xff_fffe)]].concat();
    assert!(!s.owns_all(&one_more).unwrap());
    assert!(!other.owns_all(&qpns[..1]).unwrap());
    assert!(!session(&host).owns_all(&[]).unwrap(), "a session that is not open");
}

#[test]
fn each_session_has_its_own_secret() {
    let host = host();
    let (a, b) = (opened(&host), opened(&host));
    let (a, b) = (a.secret().unwrap(), b.secret().unwrap());
    assert!(a != b);
    assert!(session(&host).secret().is_none());
    let text = serde_json::to_string(&a).unwrap();
    assert_eq!(text.len(), 2 + 32);
    assert!(serde_json::from_str::<SessionSecret>(&text).unwrap() == a);
    for wrong in ["\"\"", "\"+123456789abcdef0123456789abcdef\"", "12"] {
        assert!(serde_json::from_str::<SessionSecret>(wrong).is_err(), "{wrong}");
    }
    assert_eq!(format!("{a:?}"), "SessionSecret(..)");
}
