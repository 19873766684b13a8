//! Control verbs: rejected arguments, limits, and removal of functions.

use super::*;
use crate::error::Error;
use crate::limits::{FunctionLimits, Limits};
use crate::spec::SendSpec;
use verbs::cqe::Syndrome;
use verbs::{Access, FunctionId, Key, MwKind, QpChange, QpState};

#[test]
fn peers_of_a_removed_function_fail_at_their_next_request() {
    let mut bed = Bed::new();
    let f = bed.e.add_function(FunctionLimits::default()).unwrap();
    let (pd, pf_pd) = (bed.pd(f), bed.pd(PF));
    let (shape, pf_shape) = (bed.shape(f, pd), bed.shape(PF, pf_pd));
    let (client, mut server) = (bed.qp(&shape), bed.qp(&pf_shape));
    let (client2, mut waiting) = (bed.qp(&shape), bed.qp(&pf_shape));
    bed.connect(&client, &server);
    bed.connect(&client2, &waiting);
    let theirs = bed.mr(f, pd, 64, ALL);
    let mw = bed.e.alloc_mw(f, pd, MwKind::Type2).unwrap();
    let mut boss = client2;
    let bind = verbs::wqe::Umr::bind(
        mw,
        1,
        boss.qpn,
        Access::REMOTE_READ,
        theirs.key,
        theirs.mem.addr(),
        64,
    );
    assert_eq!(bed.execute(&mut boss, |w| _ = w.umr(&bind)).error, None);
    let mine = bed.mr(PF, pf_pd, 64, ALL);
    bed.post(&mut waiting, |w| _ = w.send(&[mine.sge(0, 8)]));
    assert_eq!(bed.run(), 0, "no receive is posted");
    bed.e.remove_function(f);
    bed.run();
    assert_error(&waiting.send_cq.reader.poll().unwrap(), Syndrome::RetryExceeded);
    assert_eq!(bed.state(&server), QpState::ReadyToSend);
    let at = theirs.remote(0);
    let cqe = bed.execute(&mut server, |w| _ = w.rdma_write(at, &[mine.sge(0, 8)]));
    assert_error(&cqe, Syndrome::RetryExceeded);
    assert!(bed.e.query_qp(f, client.qpn).is_err());
    assert!(bed.e.query_key(PF, theirs.key.index()).is_err());
    assert!(bed.e.alloc_pd(f).is_err());
    assert_eq!(bed.e.core.owners.pds.len(), 1);
    assert_eq!(
        (bed.e.core.queues.qps.len(), bed.e.core.queues.recvs.len(), bed.e.core.queues.cqs.len()),
        (2, 2, 4)
    );
    bed.e.remove_function(f);
    bed.e.remove_function(FunctionId::PHYSICAL);
    assert!(bed.e.alloc_pd(PF).is_ok());
}

#[test]
fn verbs_reject_invalid_arguments() {
    use crate::error::Object;
    let mut bed = Bed::new();
    let f = bed.e.add_function(FunctionLimits::default()).unwrap();
    let (mut a, b) = bed.pair();
    let foreign = |object| Err(Error::Foreign { object, caller: f });
    assert_eq!(bed.e.dealloc_pd(f, a.pd), foreign(Object::Pd(a.pd)));
    let cqn = a.send_cq.cqn;
    assert_eq!(bed.e.destroy_cq(f, cqn), foreign(Object::Cq(cqn)));
    assert_eq!(bed.e.destroy_qp(f, a.qpn), foreign(Object::Qp(a.qpn)));
    assert_eq!(bed.e.modify_qp(f, a.qpn, QpChange::Error), foreign(Object::Qp(a.qpn)));
    assert_eq!(bed.e.enable_send(f, a.qpn, 1), foreign(Object::Qp(a.qpn)));
    let m = bed.mr(PF, a.pd, 4096, ALL);
    assert_eq!(bed.e.dereg_mr(f, m.key), foreign(Object::Key(m.key.index())));
    assert_eq!(bed.e.dealloc_mw(f, m.key), foreign(Object::Key(m.key.index())));
    // Wrong kinds of object, and an old tag.
    let mw = bed.e.alloc_mw(PF, a.pd, MwKind::Type2).unwrap();
    assert!(matches!(bed.e.dealloc_mw(PF, m.key), Err(Error::Unknown(_))));
    assert!(matches!(bed.e.dereg_mr(PF, mw), Err(Error::Unknown(_))));
    assert!(matches!(bed.e.dereg_mr(PF, Key(m.key.0 ^ 1)), Err(Error::Unknown(_))));
    // Objects in use.
    let bind = verbs::wqe::Umr::bind(mw, 9, a.qpn, Access::REMOTE_READ, m.key, m.mem.addr(), 64);
    assert_eq!(bed.execute(&mut a, |w| _ = w.umr(&bind)).error, None);
    assert!(matches!(bed.e.dereg_mr(PF, m.key), Err(Error::InUse { users: 1, .. })));
    assert!(matches!(bed.e.dealloc_pd(PF, a.pd), Err(Error::InUse { users: 3, .. })));
    assert!(matches!(bed.e.destroy_cq(PF, cqn), Err(Error::InUse { users: 1, .. })));
    bed.e.dealloc_mw(PF, mw).unwrap();
    bed.e.dereg_mr(PF, m.key).unwrap();
    assert!(matches!(bed.e.dereg_mr(PF, m.key), Err(Error::Unknown(_))));
    bed.e.destroy_qp(PF, a.qpn).unwrap();
    bed.e.destroy_cq(PF, cqn).unwrap();
    bed.e.dealloc_pd(PF, a.pd).unwrap();
    // Invalid transitions.
    let refused = bed.e.modify_qp(PF, b.qpn, QpChange::ReadyToSend);
    assert!(matches!(refused, Err(Error::Transition { .. })), "{refused:?}");
    assert!(bed.e.modify_qp(PF, b.qpn, QpChange::Init).is_err());
    // Invalid arguments.
    let pd = bed.pd(f);
    let (ring, mut shape) = (memory(4096), bed.shape(f, pd));
    shape.privileged = true;
    let cq = bed.cq(&shape);
    let spec = |blocks, ring, privileged| crate::spec::QpSpec {
        pd,
        send: Some(SendSpec { ring, blocks, managed: false }),
        recv: crate::spec::Recv::None,
        send_cq: cq.cqn,
        recv_cq: cq.cqn,
        access: Access::NONE,
        privileged,
    };
    let refused = bed.e.create_qp(f, spec(1, ring.clone(), true));
    assert!(matches!(refused, Err(Error::NotPermitted { .. })), "{refused:?}");
    for blocks in [0, 3, 65536] {
        let refused = bed.e.create_qp(f, spec(blocks, ring.clone(), false));
        assert!(matches!(refused, Err(Error::Argument { .. })), "{refused:?}");
    }
    let refused = bed.e.create_qp(f, spec(128, ring.clone(), false));
    assert!(matches!(refused, Err(Error::TooSmall { .. })), "{refused:?}");
    let refused = bed.e.create_qp(f, spec(1, ring.slice(8, 128).unwrap(), false));
    assert!(matches!(refused, Err(Error::Argument { .. })), "{refused:?}");
    let refused = bed.e.reg_mr(f, pd, ring.clone(), ring.addr() + 1, ALL);
    assert!(matches!(refused, Err(Error::Argument { .. })), "{refused:?}");
    let refused = bed.e.reg_mr(f, pd, ring.clone(), !7, ALL);
    assert!(matches!(refused, Err(Error::Argument { .. })), "{refused:?}");
}

#[test]
fn function_limits_are_enforced() {
    let mut bed = Bed::new();
    let limits = FunctionLimits {
        pds: 1,
        cqs: 1,
        qps: 1,
        srqs: 0,
        keys: 2,
        windows: 1,
        functions: 0,
        registered_bytes: 5000,
        ring_bytes: 1 << 20,
        remote_peers: 0,
    };
    let f = bed.e.add_function(limits).unwrap();
    let limited = |r: Result<(), Error>| assert!(matches!(r, Err(Error::Limit { .. })), "{r:?}");
    let pd = bed.pd(f);
    limited(bed.e.alloc_pd(f).map(|_| ()));
    let mem = memory(4096);
    let mr = bed.e.reg_mr(f, pd, mem.clone(), mem.addr(), ALL).unwrap();
    limited(bed.e.reg_mr(f, pd, mem.clone(), mem.addr(), ALL).map(|_| ()));
    bed.e.alloc_mw(f, pd, MwKind::Type2).unwrap();
    limited(bed.e.alloc_mw(f, pd, MwKind::Type2).map(|_| ()));
    bed.e.dereg_mr(f, mr).unwrap();
    bed.e.reg_mr(f, pd, mem.clone(), mem.addr(), ALL).unwrap();
    let shape = bed.shape(f, pd);
    let cq = bed.cq(&shape);
    let spec = crate::spec::QpSpec {
        pd,
        send: None,
        recv: crate::spec::Recv::None,
        send_cq: cq.cqn,
        recv_cq: cq.cqn,
        access: Access::NONE,
        privileged: false,
    };
    let qpn = bed.e.create_qp(f, spec.clone()).unwrap();
    limited(bed.e.create_qp(f, spec.clone()).map(|_| ()));
    bed.e.destroy_qp(f, qpn).unwrap();
    let next = bed.e.create_qp(f, spec).unwrap();
    assert_ne!(next, qpn, "a number is not reused soon");
}

#[test]
fn ring_bytes_of_a_function_are_limited_and_released() {
    use crate::spec::{CqSpec, QpSpec, Recv, RecvSpec};
    let mut bed = Bed::new();
    // Enough for a CQ of 64 entries, one send ring of 32 blocks and one receive ring of 32 entries
    // of 64 bytes.
    let limits = FunctionLimits { ring_bytes: (64 + 32 + 32) * 64, ..FunctionLimits::default() };
    let f = bed.e.add_function(limits).unwrap();
    let pd = bed.pd(f);
    let shape = bed.shape(f, pd);
    let cq = bed.cq(&shape).cqn;
    let limited = |r: Result<(), Error>| match r {
        Err(Error::Limit { what, limit }) => {
            assert_eq!((what, limit), ("bytes of rings of the function", 128 * 64));
        }
        other => panic!("{other:?}"),
    };
    let ring = memory(64 * 64);
    let recv = |entries| RecvSpec {
        ring: ring.clone(),
        entries,
        stride: 64,
        record: memory(8),
        initial_consumer: 0,
    };
    let qp = |blocks, entries| QpSpec {
        pd,
        send: Some(SendSpec { ring: ring.clone(), blocks, managed: false }),
        recv: Recv::Own { spec: recv(entries), managed: false },
        send_cq: cq,
        recv_cq: cq,
        access: Access::NONE,
        privileged: false,
    };
    for _ in 0..3 {
        limited(bed.e.create_qp(f, qp(64, 32)).map(|_| ()));
        limited(bed.e.create_qp(f, qp(32, 64)).map(|_| ()));
        let made = bed.e.create_qp(f, qp(32, 32)).unwrap();
        limited(bed.e.create_qp(f, qp(1, 1)).map(|_| ()));
        limited(bed.e.create_srq(f, pd, recv(1)).map(|_| ()));
        let spec = CqSpec {
            ring: ring.clone(),
            entries: 1,
            record: memory(8),
            ignore_overrun: true,
            initial_count: 0,
        };
        limited(bed.e.create_cq(f, spec.clone()).map(|_| ()));
        bed.e.destroy_qp(f, made).unwrap();
        let srq = bed.e.create_srq(f, pd, recv(64)).unwrap();
        limited(bed.e.create_cq(f, spec.clone()).map(|_| ()));
        bed.e.destroy_srq(f, srq).unwrap();
        let other = bed.e.create_cq(f, spec).unwrap();
        bed.e.destroy_cq(f, other).unwrap();
    }
}

#[test]
fn nic_limits_apply_over_all_functions() {
    let limits = Limits { functions: 2, qps: 8, cqs: 16, pds: 8, keys: 4, ..Limits::default() };
    let mut bed = Bed::with(limits);
    let limited = |r: Result<(), Error>| assert!(matches!(r, Err(Error::Limit { .. })), "{r:?}");
    let f = bed.e.add_function(FunctionLimits::default()).unwrap();
    bed.e.add_function(FunctionLimits::default()).unwrap();
    limited(bed.e.add_function(FunctionLimits::default()).map(|_| ()));
    let pd = bed.pd(f);
    let keys: Vec<Key> = (0..4).map(|_| bed.e.alloc_mw(f, pd, MwKind::Type2).unwrap()).collect();
    limited(bed.e.alloc_mw(f, pd, MwKind::Type1).map(|_| ()));
    bed.e.remove_function(f);
    let f = bed.e.add_function(FunctionLimits::default()).unwrap();
    let pd = bed.pd(f);
    let again = bed.e.alloc_mw(f, pd, MwKind::Type2).unwrap();
    assert!(!keys.contains(&again), "the tag of a reused index changes");
}

#[test]
fn untaken_events_do_not_accumulate() {
    let mut bed = Bed::new();
    let (mut a, b) = bed.pair();
    for _ in 0..50 {
        a.send_cq.record.word32(4).store(1, std::sync::atomic::Ordering::SeqCst);
        bed.post(&mut a, |w| _ = w.nop().signaled());
        bed.run();
        assert!(a.send_cq.reader.poll().is_some());
        // Both QPs go to Error because of an invalid opcode.
        let at = bed.write_wqe(&mut a, |w| _ = w.nop());
        a.ring.write(at + 3, &[0x3f]);
        bed.e.doorbell(a.qpn, a.producer);
        bed.run();
        while a.send_cq.reader.poll().is_some() {}
        bed.e.modify_qp(PF, a.qpn, QpChange::Reset).unwrap();
        a.producer = 0;
        bed.connect_to(&a, b.qpn);
    }
    let events = bed.events();
    assert_eq!(events.len(), 2, "{events:?}");
    // After an event was taken, a new one is raised.
    a.send_cq.record.word32(4).store(1, std::sync::atomic::Ordering::SeqCst);
    bed.post(&mut a, |w| _ = w.nop().signaled());
    bed.run();
    assert_eq!(bed.events().len(), 1);
}
