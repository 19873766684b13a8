//! A caller that selects the QP of each step.

use super::*;
use crate::engine::NextKind;
use verbs::QpState;
use verbs::cqe::Syndrome;

#[test]
fn caller_selects_the_qp_and_each_step_is_one_wqe() {
    let mut bed = Bed::new();
    let (mut a, b) = bed.pair();
    let (mut c, d) = bed.pair();
    let (source, target) = (bed.mr(PF, a.pd, 64, ALL), bed.mr(PF, b.pd, 64, ALL));
    let other = bed.mr(PF, d.pd, 64, ALL);
    source.mem.store_be64(0, 7);
    assert!(bed.e.ready_qps().is_empty());
    assert!(!bed.e.step(a.qpn, 0), "the QP has no work");
    for at in [0, 8] {
        bed.post(&mut a, |w| _ = w.rdma_write(target.remote(at), &[source.sge(0, 8)]));
    }
    bed.post(&mut c, |w| _ = w.rdma_write(other.remote(0), &[source.sge(0, 8)]));
    assert_eq!(bed.e.ready_qps(), [a.qpn, c.qpn]);
    assert!(bed.e.step(a.qpn, 0));
    assert_eq!((target.mem.load_be64(0), target.mem.load_be64(8)), (7, 0));
    assert!(bed.e.step(a.qpn, 0));
    assert_eq!((target.mem.load_be64(8), other.mem.load_be64(0)), (7, 0));
    assert_eq!(bed.e.ready_qps(), [c.qpn]);
    assert!(!bed.e.step(a.qpn, 0));
    assert!(bed.e.step(c.qpn, 0));
    assert_eq!(bed.e.poll(0, 16), 0, "no work is left");
}

#[test]
fn waiting_qp_is_ready_once_its_condition_holds() {
    let mut bed = Bed::new();
    let (mut a, mut b) = bed.pair();
    let source = bed.mr(PF, a.pd, 64, ALL);
    bed.post(&mut a, |w| _ = w.send(&[source.sge(0, 8)]));
    assert!(bed.e.step(a.qpn, 0));
    assert!(bed.e.ready_qps().is_empty(), "no receive is posted");
    let target = bed.mr(PF, b.pd, 64, ALL);
    bed.post_recv(&mut b, &[target.sge(0, 8)]);
    assert_eq!(bed.e.ready_qps(), [a.qpn]);
    assert!(bed.e.step(a.qpn, 0));
    assert_eq!(b.recv_cq.reader.poll().unwrap().byte_count, 8);
    // A QP in Error flushes one WQE per step.
    for _ in 0..2 {
        bed.post(&mut a, |w| _ = w.rdma_write(verbs::wqe::Remote::default(), &[source.sge(0, 8)]));
    }
    assert!(bed.e.step(a.qpn, 0));
    assert_eq!(bed.state(&a), QpState::Error);
    assert_eq!(bed.e.ready_qps(), [a.qpn]);
    assert!(bed.e.step(a.qpn, 0));
    assert!(bed.e.ready_qps().is_empty());
    let cq = &mut a.send_cq.reader;
    assert_error(&cq.poll().unwrap(), Syndrome::RemoteAccess);
    assert_error(&cq.poll().unwrap(), Syndrome::Flushed);
}

#[test]
fn caller_looks_at_operations_behind_the_next_one() {
    let mut bed = Bed::new();
    let (mut a, b) = bed.pair();
    let (source, target) = (bed.mr(PF, a.pd, 64, ALL), bed.mr(PF, b.pd, 64, ALL));
    for bytes in [8, 16, 24] {
        bed.post(&mut a, |w| _ = w.rdma_write(target.remote(0), &[source.sge(0, bytes)]));
    }
    let write = |bytes| NextKind::Write { bytes, inline: false, imm: false };
    let mut at = bed.e.position(a.qpn);
    for bytes in [8, 16, 24] {
        let next = bed.e.peek_at(a.qpn, at).expect("an operation");
        assert_eq!((next.kind, Some(next.at)), (write(bytes), at));
        at = Some(next.after);
    }
    assert_eq!(bed.e.peek_at(a.qpn, at), None, "no operation is posted there");
    assert!(bed.e.step(a.qpn, 0));
    let next = bed.e.peek(a.qpn).expect("the second operation");
    assert_eq!((next.kind, Some(next.at)), (write(16), bed.e.position(a.qpn)));
    assert_eq!(bed.e.peek_at(a.qpn, Some(next.at.wrapping_sub(1))), None, "it was executed");
    // In Error the WQEs are flushed one by one, so only the next operation is known.
    bed.e.modify_qp(PF, a.qpn, verbs::QpChange::Error).unwrap();
    assert_eq!(bed.e.peek(a.qpn).expect("a flush").kind, NextKind::Flush);
    assert_eq!(bed.e.peek_at(a.qpn, Some(next.after)), None);
}
