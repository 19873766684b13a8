//! A session of the shared-memory port: the input is packets, requests and doorbells of a hostile
//! client.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, OnceLock, PoisonError};

use rnic::limits::{FunctionLimits, Limits};
use rnic::port::control::{QpVerb, ReceiveRing, ReceiveVerb, Reply, SendRing, Verb};
use rnic::port::shm::protocol::{MESSAGE_MAX, Request, Response, Span, VERSION};
use rnic::port::shm::{Host, Session, SessionLimits, raw};
use rustix::fs::{MemfdFlags, SealFlags};
use verbs::{Access, DmaMemory, Key, KeyIndex, MwKind, Pdn, QpChange};

use crate::Input;

/// Bytes of the doorbell page, and of a piece of shared memory.
const BYTES: u64 = 8192;
/// Maximum number of packets per input.
const PACKETS: usize = 40;

fn host() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(|| Host::start(Limits::default()).expect("a NIC"))
}

fn open() -> (Session, DmaMemory) {
    let function =
        FunctionLimits { pds: 4, qps: 8, cqs: 8, srqs: 4, keys: 16, ..FunctionLimits::default() };
    let limits = SessionLimits { function, memories: 4, memory_bytes: 1 << 20 };
    let mut session = Session::new(host(), limits);
    let fd = memory();
    let page = DmaMemory::map_shared(&fd, 0, BYTES as usize).expect("a mapping");
    let hello = Request::Hello { version: VERSION, bytes: BYTES };
    let hello = serde_json::to_vec(&hello).expect("plain data");
    match ask(&mut session, &hello, vec![fd]) {
        Response::Welcome { .. } => (session, page),
        other => panic!("{other:?}"),
    }
}

fn memory() -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("fuzz", flags).expect("a memfd");
    rustix::io::pwrite(&fd, &[0; BYTES as usize], 0).expect("its pages");
    fd
}

/// Sends a request. Every packet must get an answer that fits into a packet.
fn ask(session: &mut Session, request: &[u8], fds: Vec<OwnedFd>) -> Response {
    let (answer, fds) = session.handle(request, fds);
    assert!(answer.len() <= MESSAGE_MAX, "an answer of {} bytes", answer.len());
    let response = serde_json::from_slice(&answer).expect("a response");
    assert_eq!(fds.len(), matches!(response, Response::Welcome { .. }) as usize);
    response
}

/// Runs the input `bytes`.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let (mut session, page) = open();
    for _ in 0..PACKETS {
        if input.is_empty() {
            break;
        }
        step(&mut session, &page, &mut input);
    }
    drop(session);
    honest();
}

/// Checks that another client is served.
fn honest() {
    static HONEST: OnceLock<Mutex<(Session, DmaMemory)>> = OnceLock::new();
    let honest = HONEST.get_or_init(|| Mutex::new(open()));
    let (session, _) = &mut *honest.lock().unwrap_or_else(PoisonError::into_inner);
    let ask = |session: &mut Session, verb: Verb<Span>| {
        let request = serde_json::to_vec(&Request::Verb(verb)).expect("plain data");
        ask(session, &request, Vec::new())
    };
    let pd = match ask(session, Verb::AllocPd) {
        Response::Reply(Reply::Pd(pd)) => pd,
        other => panic!("{other:?}"),
    };
    let freed = ask(session, Verb::DeallocPd { pd });
    assert!(matches!(freed, Response::Reply(Reply::Done)), "{freed:?}");
}

fn step(session: &mut Session, page: &DmaMemory, input: &mut Input<'_>) {
    match input.byte() % 8 {
        0 => {
            let length = input.short() as usize % 512;
            ask(session, input.take(length), Vec::new());
        }
        1 => {
            for _ in 0..input.byte() {
                let at = raw::DOORBELLS + input.byte() as usize * 4;
                let word = input.number() << 16 | input.number();
                page.word32(at).store(word, std::sync::atomic::Ordering::Relaxed);
                let hint = [raw::SLEEPING, raw::WHERE, raw::WAITER, raw::EVENTS][word as usize % 4];
                page.word32(hint).store(word, std::sync::atomic::Ordering::Relaxed);
            }
        }
        2 => {
            let fds = descriptors(input);
            let bytes = [BYTES, 0, 4096, input.number() as u64 * 4096][input.byte() as usize % 4];
            let request = Request::AddMemory { bytes };
            ask(session, &serde_json::to_vec(&request).expect("plain data"), fds);
        }
        3 => {
            let request = Request::RemoveMemory { memory: input.number() };
            ask(session, &serde_json::to_vec(&request).expect("plain data"), Vec::new());
        }
        kind => {
            let request = Request::Verb(verb(input));
            let mut bytes = serde_json::to_vec(&request).expect("plain data");
            // A corrupted request.
            if kind == 4 {
                let at = input.short() as usize % bytes.len();
                bytes[at] = input.byte();
            }
            ask(session, &bytes, Vec::new());
        }
    }
}

fn descriptors(input: &mut Input<'_>) -> Vec<OwnedFd> {
    let sealed = |seals| {
        let fd = memory();
        rustix::fs::fcntl_add_seals(&fd, seals).expect("sealing");
        fd
    };
    (0..input.byte() % 3)
        .map(|_| match input.byte() % 8 {
            0..=3 => memory(),
            4 => sealed(SealFlags::SHRINK),
            5 => sealed(SealFlags::SHRINK | SealFlags::SEAL),
            6 => {
                let fd = memory();
                rustix::fs::ftruncate(&fd, 2 * BYTES).expect("growing");
                fd
            }
            _ => rustix::pipe::pipe().expect("a pipe").0,
        })
        .collect()
}

fn verb(input: &mut Input<'_>) -> Verb<Span> {
    let n = [0; 4].map(|_| input.number());
    // Object numbers include a generation above the slot index; recently created objects have low
    // indices.
    let span = |input: &mut Input<'_>| Span {
        memory: input.byte() as u32 % 5,
        offset: input.number() as u64 * 8,
        bytes: input.number() as u64 * 64,
    };
    let receive = |input: &mut Input<'_>| ReceiveRing {
        ring: span(input),
        entries: 1 << (n[2] % 33).min(31),
        stride: n[3].wrapping_mul(16),
        record: span(input),
    };
    let pd = Pdn::from(n[0]);
    match input.byte() % 25 {
        0 => Verb::AllocPd,
        1 => Verb::DeallocPd { pd },
        2 => Verb::RegMr {
            pd,
            memory: span(input),
            iova: (n[1] as u64) << (n[2] % 64),
            access: Access(n[3] as u8),
        },
        3 => Verb::DeregMr { key: Key(n[0]) },
        4 => Verb::AllocMws {
            pd,
            count: n[1],
            kind: [MwKind::Type1, MwKind::Type2][n[2] as usize % 2],
        },
        5 => Verb::DeallocMw { key: Key(n[0]) },
        6 => Verb::QueryKey { index: KeyIndex::new(n[0] & 0xff_ffff) },
        7 | 8 => Verb::CreateCq {
            ring: span(input),
            entries: if n[0] == 0 { n[1] } else { 1 << (n[0] % 8) },
            record: span(input),
            ignore_overrun: n[1] & 1 == 1,
        },
        9 => Verb::DestroyCq { cqn: n[0].into() },
        10 => Verb::CqCount { cqn: n[0].into() },
        11 => Verb::CreateSrq { pd, ring: receive(input) },
        12 => Verb::DestroySrq { srqn: n[0].into() },
        13 | 14 => Verb::CreateQp(QpVerb {
            pd,
            send: (n[1] & 1 == 0).then(|| SendRing {
                ring: span(input),
                blocks: 1 << (n[1] % 17),
                managed: n[1] & 2 == 2,
            }),
            receive: match input.byte() % 3 {
                0 => ReceiveVerb::None,
                1 => ReceiveVerb::Own { ring: receive(input), managed: n[1] & 4 == 4 },
                _ => ReceiveVerb::Shared { srqn: n[2].into() },
            },
            send_cq: n[2].into(),
            recv_cq: n[3].into(),
            access: Access(n[1] as u8),
            privileged: n[1] & 8 == 8,
        }),
        15 => {
            let peer: verbs::Qpn = n[1].into();
            let changes = [
                QpChange::Reset,
                QpChange::Init,
                QpChange::ReadyToReceive { peer: peer.into() },
                QpChange::ReadyToSend,
                QpChange::Error,
                QpChange::Access { access: Access(n[3] as u8) },
            ];
            Verb::ModifyQp { qpn: n[0].into(), change: changes[n[2] as usize % changes.len()] }
        }
        16 => Verb::QueryQp { qpn: n[0].into() },
        17 => Verb::DestroyQp { qpn: n[0].into() },
        18 => Verb::EnableSend { qpn: n[0].into(), limit: n[1] as u16 },
        20 => Verb::QueryDevice,
        21 => Verb::TakeEvents,
        22 => Verb::ReregMr {
            key: Key(n[0]),
            pd: (n[2] & 1 == 1).then_some(Pdn::from(n[1])),
            memory: (n[2] & 2 == 2).then(|| (span(input), (n[1] as u64) << (n[2] % 64))),
            access: (n[2] & 4 == 4).then_some(Access(n[3] as u8)),
        },
        23 => Verb::ModifySrq { srqn: n[0].into(), limit: n[1] },
        24 => Verb::QuerySrq { srqn: n[0].into() },
        _ => Verb::EnableRecv { qpn: n[0].into(), limit: n[1] },
    }
}
