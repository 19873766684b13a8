//! Changing and describing existing objects, and asynchronous events.

use super::*;
use crate::error::Error;
use crate::limits::FunctionLimits;
use crate::spec::{Event, RecvSpec, RegionChange};
use verbs::cqe::Syndrome;
use verbs::wqe::{Remote, SE_SOLICITED, Umr};
use verbs::{Access, AsyncEvent, DmaMemory, Key, MwKind, Pdn, QpChange, QpState, Srqn};

fn tell(event: AsyncEvent) -> Event {
    Event::Async { function: PF, event }
}

/// Creates a sender, a receiver with an SRQ, and the SRQ's doorbell record.
fn with_srq(bed: &mut Bed) -> (TestQp, TestQp, Srqn, DmaMemory, Pdn) {
    let pd = bed.pd(PF);
    let record = memory(8);
    let spec = RecvSpec {
        ring: memory(16 * 16),
        entries: 16,
        stride: 16,
        record: record.clone(),
        initial_consumer: 0,
    };
    let srqn = bed.e.create_srq(PF, pd, spec).unwrap();
    let (a, b) = (bed.shape(PF, pd), Shape { srq: Some(srqn), ..bed.shape(PF, pd) });
    let (a, b) = (bed.qp(&a), bed.qp(&b));
    bed.connect(&a, &b);
    (a, b, srqn, record, pd)
}

#[test]
fn srq_limit_event_is_raised_once() {
    let mut bed = Bed::new();
    let (mut a, _b, srqn, record, _) = with_srq(&mut bed);
    let low = tell(AsyncEvent::SrqLimit { srqn });
    record.store_be32(0, 10);
    bed.e.modify_srq(PF, srqn, 8).unwrap();
    let info = bed.e.query_srq(PF, srqn).unwrap();
    assert_eq!((info.entries, info.stride, info.posted, info.limit), (16, 16, 10, 8));
    for left in [9, 8] {
        assert_eq!(bed.execute(&mut a, |w| _ = w.send(&[])).error, None);
        assert_eq!(bed.events(), [], "{left} are not fewer than 8");
    }
    bed.execute(&mut a, |w| _ = w.send(&[]));
    assert_eq!(bed.events(), [low]);
    bed.execute(&mut a, |w| _ = w.send(&[]));
    assert_eq!(bed.events(), [], "no event unless the limit is armed");
    let info = bed.e.query_srq(PF, srqn).unwrap();
    assert_eq!((info.posted, info.limit), (6, 0));

    // A message that finds no receive WQE raises the event too; no later message would.
    for _ in 0..6 {
        bed.execute(&mut a, |w| _ = w.send(&[]));
    }
    bed.e.modify_srq(PF, srqn, 1).unwrap();
    bed.post(&mut a, |w| _ = w.send(&[]));
    bed.run();
    assert_eq!(bed.events(), [low]);
    assert!(matches!(bed.e.modify_srq(PF, srqn, 17), Err(Error::Argument { .. })));
    assert!(matches!(bed.e.modify_srq(PF, Srqn::new(77), 1), Err(Error::Unknown(_))));
}

#[test]
fn last_wqe_event_is_raised_when_a_qp_leaves_its_srq() {
    let mut bed = Bed::new();
    let (_a, b, ..) = with_srq(&mut bed);
    let left = tell(AsyncEvent::LastWqeReached { qpn: b.qpn });
    for _ in 0..3 {
        bed.e.modify_qp(PF, b.qpn, QpChange::Error).unwrap();
        bed.e.modify_qp(PF, b.qpn, QpChange::Reset).unwrap();
    }
    assert_eq!(bed.events(), [left], "an untaken event is not repeated");
    bed.e.modify_qp(PF, b.qpn, QpChange::Error).unwrap();
    assert_eq!(bed.events(), [left]);
}

#[test]
fn error_event_tells_whether_the_peer_caused_it() {
    let mut bed = Bed::new();
    let (mut a, b) = bed.pair();
    let bad = Remote { addr: 0, rkey: Key(0xdead00) };
    bed.execute(&mut a, |w| _ = w.rdma_write(bad, &[]).flags(0));
    assert_eq!(bed.events(), [], "the key of a zero-length request is not checked");
    let mr = bed.mr(PF, a.pd, 64, ALL);
    bed.execute(&mut a, |w| _ = w.rdma_write(bad, &[mr.sge(0, 8)]));
    let syndrome = Syndrome::RemoteAccess;
    let events = bed.events();
    let of = |qpn, by_peer| tell(AsyncEvent::QpError { qpn, syndrome, by_peer });
    assert!(events.contains(&of(a.qpn, false)), "{events:?}");
    assert!(events.contains(&of(b.qpn, true)), "{events:?}");
}

#[test]
fn solicited_arming_ignores_other_completions() {
    let mut bed = Bed::new();
    let (mut a, mut b) = bed.pair();
    let told = Event::Completion(b.recv_cq.cqn);
    let armed = b.recv_cq.record.clone();
    let arm = || armed.word32(4).store(2, std::sync::atomic::Ordering::SeqCst);
    let is_armed = || armed.word32(4).load(std::sync::atomic::Ordering::SeqCst) == 2;
    for _ in 0..6 {
        bed.post_recv(&mut b, &[]);
    }
    arm();
    bed.execute(&mut a, |w| _ = w.send(&[]));
    assert_eq!((bed.events(), is_armed()), (vec![], true));
    bed.execute(&mut a, |w| _ = w.send(&[]).flags(SE_SOLICITED));
    assert_eq!((bed.events(), is_armed()), (vec![told], false));
    assert!(!b.recv_cq.reader.poll().unwrap().solicited);
    assert!(b.recv_cq.reader.poll().unwrap().solicited);
    arm();
    bed.execute(&mut a, |w| _ = w.send_imm(&[], 7).flags(SE_SOLICITED));
    assert_eq!(bed.events(), [told]);
    // An error completion always raises an event.
    arm();
    bed.e.modify_qp(PF, b.qpn, QpChange::Error).unwrap();
    bed.run();
    assert!(bed.events().contains(&told));
}

#[test]
fn rights_of_a_qp_can_change() {
    let mut bed = Bed::new();
    let (mut a, b) = bed.pair();
    let (here, there) = (bed.mr(PF, a.pd, 64, ALL), bed.mr(PF, b.pd, 64, ALL));
    let access = |access| QpChange::Access { access };
    bed.e.modify_qp(PF, b.qpn, access(Access::REMOTE_READ)).unwrap();
    let info = bed.e.query_qp(PF, b.qpn).unwrap();
    assert_eq!((info.info.state, info.info.access), (QpState::ReadyToSend, Access::REMOTE_READ));
    assert_eq!((info.info.send_blocks, info.info.recv_entries), (64, 16));
    let read = |w: &mut verbs::wqe::Builder| _ = w.rdma_read(there.remote(0), &[here.sge(0, 8)]);
    assert_eq!(bed.execute(&mut a, read).error, None);
    bed.e.modify_qp(PF, b.qpn, access(Access::REMOTE_WRITE)).unwrap();
    assert_error(&bed.execute(&mut a, read), Syndrome::RemoteAccess);
    for q in [&a, &b] {
        assert!(bed.e.modify_qp(PF, q.qpn, access(ALL)).is_err(), "the QP is in Error");
    }
}

#[test]
fn changed_region_has_a_new_key() {
    let mut bed = Bed::new();
    let (mut a, b) = bed.pair();
    let (here, there) = (bed.mr(PF, a.pd, 64, ALL), bed.mr(PF, b.pd, 4096, ALL));
    let window = bed.e.alloc_mw(PF, b.pd, MwKind::Type1).unwrap();
    let mut write = |bed: &mut Bed, rkey, addr, ok: bool| {
        let to = Remote { addr, rkey };
        let cqe = bed.execute(&mut a, |w| _ = w.rdma_write(to, &[here.sge(0, 8)]));
        if ok {
            return assert_eq!(cqe.error, None);
        }
        assert_error(&cqe, Syndrome::RemoteAccess);
        for (q, peer) in [(a.qpn, b.qpn), (b.qpn, a.qpn)] {
            let to_rtr = QpChange::ReadyToReceive { peer: peer.into() };
            for to in [QpChange::Reset, QpChange::Init, to_rtr, QpChange::ReadyToSend] {
                bed.e.modify_qp(PF, q, to).unwrap();
            }
        }
        a.producer = 0;
        while a.send_cq.reader.poll().is_some() {}
    };
    let addr = there.mem.addr();
    // Change the rights, then the memory, then the PD.
    let read_only = RegionChange { access: Some(Access::REMOTE_READ), ..Default::default() };
    let key = bed.e.rereg_mr(PF, there.key, read_only).unwrap();
    assert_ne!(key, there.key);
    write(&mut bed, there.key, addr, false);
    write(&mut bed, key, addr, false);
    let all = RegionChange { access: Some(ALL), ..Default::default() };
    let key = bed.e.rereg_mr(PF, key, all).unwrap();
    write(&mut bed, key, addr, true);
    let other = memory(8192);
    let moved = RegionChange { memory: Some((other.clone(), 0)), ..Default::default() };
    let key = bed.e.rereg_mr(PF, key, moved).unwrap();
    write(&mut bed, key, addr, false);
    here.mem.write(0, &[5; 8]);
    write(&mut bed, key, 8184, true);
    let mut got = [0; 8];
    other.read(8184, &mut got);
    assert_eq!(got, [5; 8]);
    let pd = bed.pd(PF);
    let key = bed.e.rereg_mr(PF, key, RegionChange { pd: Some(pd), ..Default::default() }).unwrap();
    write(&mut bed, key, 0, false);
    let back = RegionChange { pd: Some(b.pd), ..Default::default() };
    let key = bed.e.rereg_mr(PF, key, back).unwrap();
    write(&mut bed, key, 0, true);
    bed.e.dealloc_pd(PF, pd).unwrap();

    // A rejected change has no effect.
    let nowhere = RegionChange { pd: Some(pd), ..Default::default() };
    assert!(matches!(bed.e.rereg_mr(PF, key, nowhere), Err(Error::Unknown(_))));
    let odd = RegionChange { memory: Some((other.clone(), 3)), ..Default::default() };
    assert!(matches!(bed.e.rereg_mr(PF, key, odd), Err(Error::Argument { .. })));
    assert!(bed.e.rereg_mr(PF, there.key, RegionChange::default()).is_err(), "an old key");
    assert!(bed.e.rereg_mr(PF, window, RegionChange::default()).is_err(), "no region");
    write(&mut bed, key, 0, true);
}

#[test]
fn region_with_windows_cannot_change() {
    let mut bed = Bed::new();
    let (mut a, _b) = bed.pair();
    let mr = bed.mr(PF, a.pd, 4096, ALL);
    let mw = bed.e.alloc_mw(PF, a.pd, MwKind::Type2).unwrap();
    let umr = Umr::bind(mw, 9, a.qpn, Access::REMOTE_READ, mr.key, mr.mem.addr(), 64);
    assert_eq!(bed.execute(&mut a, |w| _ = w.umr(&umr)).error, None);
    let refused = bed.e.rereg_mr(PF, mr.key, RegionChange::default());
    assert!(matches!(refused, Err(Error::InUse { .. })), "{refused:?}");
    bed.e.dealloc_mw(PF, mw).unwrap();
    bed.e.rereg_mr(PF, mr.key, RegionChange::default()).unwrap();
}

#[test]
fn changed_region_counts_with_its_new_size() {
    let mut bed = Bed::new();
    let limits = FunctionLimits { registered_bytes: 8192, ..FunctionLimits::default() };
    let f = bed.e.add_function(limits).unwrap();
    let pd = bed.pd(f);
    let mr = bed.mr(f, pd, 8192, ALL);
    let of = |bytes| {
        let mem = memory(bytes);
        let iova = mem.addr();
        RegionChange { memory: Some((mem, iova)), ..Default::default() }
    };
    assert!(matches!(bed.e.rereg_mr(f, mr.key, of(12288)), Err(Error::Limit { .. })));
    let key = bed.e.rereg_mr(f, mr.key, of(4096)).unwrap();
    let second = bed.mr(f, pd, 4096, ALL);
    assert!(matches!(bed.e.rereg_mr(f, key, of(8192)), Err(Error::Limit { .. })));
    bed.e.dereg_mr(f, second.key).unwrap();
    let key = bed.e.rereg_mr(f, key, of(8192)).unwrap();
    assert!(matches!(bed.e.rereg_mr(PF, key, of(64)), Err(Error::Foreign { .. })));
    bed.e.dereg_mr(f, key).unwrap();
    assert_eq!(bed.e.query_device(f).unwrap().registered_bytes, 8192);
}

#[test]
fn zero_based_window_is_addressed_from_0() {
    let mut bed = Bed::new();
    let (mut a, mut b) = bed.pair();
    let (here, there) = (bed.mr(PF, a.pd, 64, ALL), bed.mr(PF, b.pd, 4096, ALL));
    let mw = bed.e.alloc_mw(PF, b.pd, MwKind::Type2).unwrap();
    let start = there.mem.addr() + 1000;
    let (qpn, mr) = (b.qpn, there.key);
    let bind = |start, len: u32, access| Umr::bind(mw, 9, qpn, access, mr, start, len).zero_based();
    let umr = bind(start, 100, Access::REMOTE_ALL);
    assert_eq!(bed.execute(&mut b, |w| _ = w.umr(&umr)).error, None);
    let rkey = bed.e.query_key(PF, mw.index()).map(|i| Key::new(mw.index(), i.tag)).unwrap();
    let mut ways = Vec::new();
    bed.e.reachability(start + 99, 1, &mut ways);
    assert!(ways.iter().any(|r| r.key == rkey && r.start == start), "{ways:?}");
    here.mem.write(0, &[3; 8]);
    let to = Remote { addr: 92, rkey };
    assert_eq!(bed.execute(&mut a, |w| _ = w.rdma_write(to, &[here.sge(0, 8)])).error, None);
    assert_eq!(there.bytes(1091, 10), [0, 3, 3, 3, 3, 3, 3, 3, 3, 0]);
    let at = Remote { addr: 0, rkey };
    assert_eq!(bed.execute(&mut a, |w| _ = w.fetch_add(at, 6, here.sge(0, 8))).error, None);
    assert_eq!(there.bytes(1000, 8), 6u64.to_be_bytes());
    for addr in [93, start] {
        let to = Remote { addr, rkey };
        let cqe = bed.execute(&mut a, |w| _ = w.rdma_write(to, &[here.sge(0, 8)]));
        assert_error(&cqe, Syndrome::RemoteAccess);
        for q in [&mut a, &mut b] {
            bed.e.modify_qp(PF, q.qpn, QpChange::Reset).unwrap();
            q.producer = 0;
            while q.send_cq.reader.poll().is_some() {}
        }
        bed.connect(&a, &b);
    }

    // Atomic rights are rejected if words would not be aligned.
    bed.execute(&mut b, |w| _ = w.local_invalidate(rkey));
    let odd = Umr { key: rkey, ..bind(start + 1, 64, Access::REMOTE_WRITE) };
    assert_eq!(bed.execute(&mut b, |w| _ = w.umr(&odd)).error, None);
    let key = Key::new(mw.index(), 9);
    bed.execute(&mut b, |w| _ = w.local_invalidate(key));
    let odd = Umr { key, access: Access::REMOTE_ATOMIC, ..odd };
    assert_error(&bed.execute(&mut b, |w| _ = w.umr(&odd)), Syndrome::MwBind);
}
