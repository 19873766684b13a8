//! Errors: the QPs that fail, and the state that does not change.

use super::*;
use crate::limits::{FunctionLimits, Limits};
use crate::protection::Refusal;
use crate::spec::Event;
use verbs::cqe::{self, Syndrome};
use verbs::wqe::{Builder, Remote, Sge};
use verbs::{Access, AsyncEvent, Cqn, Key, MwKind, QpChange, QpState, Qpn};

/// Two connected QPs with a region at each end.
struct Pair {
    bed: Bed,
    a: TestQp,
    b: TestQp,
    here: Mr,
    there: Mr,
}

fn pair() -> Pair {
    pair_with(Limits::default())
}

fn pair_with(limits: Limits) -> Pair {
    let mut bed = Bed::with(limits);
    let (a, b) = bed.pair();
    let here = bed.mr(PF, a.pd, 4096, ALL);
    let there = bed.mr(PF, b.pd, 4096, ALL);
    Pair { bed, a, b, here, there }
}

impl Pair {
    /// Executes a WQE that must fail: the requester goes to Error, an event is raised for its
    /// owner, and the remaining WQEs are flushed.
    #[track_caller]
    fn fails(&mut self, syndrome: Syndrome, fill: impl FnOnce(&mut Builder)) -> cqe::Cqe {
        self.bed.events();
        let wqe_counter = self.a.producer;
        self.bed.write_wqe(&mut self.a, fill);
        let blocks = self.a.producer.wrapping_sub(wqe_counter);
        self.bed.post(&mut self.a, |w| _ = w.nop());
        self.bed.run();
        let cqe = self.a.send_cq.reader.poll().expect("errors complete even when unsignaled");
        assert_error(&cqe, syndrome);
        assert_eq!((cqe.opcode, cqe.qpn), (cqe::opcode::REQ_ERR, self.a.qpn));
        assert_eq!(cqe.wqe_counter, wqe_counter);
        let flushed = self.a.send_cq.reader.poll().unwrap();
        assert_error(&flushed, Syndrome::Flushed);
        assert_eq!(flushed.wqe_counter, wqe_counter.wrapping_add(blocks));
        assert_eq!(self.a.send_cq.reader.poll(), None);
        assert_eq!(self.bed.state(&self.a), QpState::Error);
        let event = AsyncEvent::QpError { qpn: self.a.qpn, syndrome, by_peer: false };
        assert!(self.bed.events().contains(&Event::Async { function: PF, event }));
        cqe
    }

    /// As [`Pair::fails`]; the peer goes to Error too.
    #[track_caller]
    fn refused(&mut self, syndrome: Syndrome, fill: impl FnOnce(&mut Builder)) {
        let before = (self.here.bytes(0, 4096), self.there.bytes(0, 4096));
        let cqe = self.fails(syndrome, fill);
        assert_eq!(cqe.error.unwrap().vendor, 0);
        assert_eq!(self.bed.state(&self.b), QpState::Error);
        assert_eq!(before, (self.here.bytes(0, 4096), self.there.bytes(0, 4096)));
        self.reconnect();
    }

    /// As [`Pair::fails`]; the peer's state does not change.
    #[track_caller]
    fn fails_here(&mut self, syndrome: Syndrome, why: u8, fill: impl FnOnce(&mut Builder)) {
        let before = (self.here.bytes(0, 4096), self.there.bytes(0, 4096));
        let cqe = self.fails(syndrome, fill);
        assert_eq!(cqe.error.unwrap().vendor, why);
        assert_eq!(self.bed.state(&self.b), QpState::ReadyToSend);
        assert_eq!(before, (self.here.bytes(0, 4096), self.there.bytes(0, 4096)));
        self.reconnect();
    }

    fn reconnect(&mut self) {
        for q in [&mut self.a, &mut self.b] {
            self.bed.e.modify_qp(q.function, q.qpn, QpChange::Reset).unwrap();
            q.producer = 0;
            q.recv_producer = 0;
            q.recv_record.store_be32(0, 0);
            while q.send_cq.reader.poll().is_some() {}
            while q.recv_cq.reader.poll().is_some() {}
        }
        self.bed.connect(&self.a, &self.b);
    }
}

#[test]
fn lkeys_are_checked() {
    let mut p = pair();
    let (here, there) = (p.here.sge(0, 8), p.there.remote(0));
    let read_only = p.bed.mr(PF, p.a.pd, 64, Access::NONE);
    let cases = [
        (Refusal::NoKey, Sge { lkey: Key(0), ..here }),
        (Refusal::NoKey, Sge { lkey: Key(0x7fff_ff00), ..here }),
        (Refusal::Tag, Sge { lkey: Key(here.lkey.0 ^ 0x80), ..here }),
        (Refusal::Pd, p.there.sge(0, 8)),
        (Refusal::Range, p.here.sge(4089, 8)),
        (Refusal::Range, Sge { addr: here.addr - 1, ..here }),
        (Refusal::Range, Sge { addr: u64::MAX, ..here }),
        (Refusal::Range, Sge { len: 4097, ..here }),
    ];
    let local = Syndrome::LocalProtection;
    for (why, sge) in cases {
        let why = why as u8;
        p.fails_here(local, why, |w| _ = w.rdma_write(there, &[here, sge]));
        p.fails_here(local, why, |w| _ = w.rdma_read(there, &[here, sge]));
        p.fails_here(local, why, |w| _ = w.send(&[here, sge]));
        if sge.len == 8 {
            p.fails_here(local, why, |w| _ = w.fetch_add(there, 1, sge));
        }
    }
    let rights = Refusal::Rights as u8;
    let sge = read_only.sge(0, 8);
    p.fails_here(local, rights, |w| _ = w.rdma_read(there, &[here, sge]));
    p.fails_here(local, rights, |w| _ = w.compare_swap(there, 0, 1, sge));
    assert_eq!(p.bed.execute(&mut p.a, |w| _ = w.rdma_write(there, &[sge])).error, None);
}

#[test]
fn rkeys_are_checked_and_both_ends_fail() {
    let mut p = pair();
    let (here, there) = (p.here.sge(0, 8), p.there.remote(0));
    let write_only = p.bed.mr(PF, p.b.pd, 64, Access::LOCAL_ALL | Access::REMOTE_WRITE);
    let window = p.bed.e.alloc_mw(PF, p.b.pd, MwKind::Type2).unwrap();
    let remote = Syndrome::RemoteAccess;
    for at in [
        Remote { rkey: Key(0), ..there },
        Remote { rkey: Key(0x7fff_ff00), ..there },
        Remote { rkey: Key(there.rkey.0 ^ 1), ..there },
        Remote { rkey: window, ..there },
        p.here.remote(0),
        p.there.remote(4096),
        Remote { addr: there.addr - 8, ..there },
        Remote { addr: !7, ..there },
    ] {
        p.refused(remote, |w| _ = w.rdma_write(at, &[here]));
        p.refused(remote, |w| _ = w.rdma_write_inline(at, &[1; 8]));
        p.refused(remote, |w| _ = w.rdma_read(at, &[here]));
        p.refused(remote, |w| _ = w.fetch_add(at, 1, here));
        p.refused(remote, |w| _ = w.masked_compare_swap(at, (0, 0), (1, 1), here));
    }
    let at = write_only.remote(0);
    p.refused(remote, |w| _ = w.rdma_read(at, &[here]));
    p.refused(remote, |w| _ = w.fetch_add(at, 1, here));
    assert_eq!(p.bed.execute(&mut p.a, |w| _ = w.rdma_write(at, &[here])).error, None);
}

#[test]
fn qp_rights_limit_its_peer() {
    let mut bed = Bed::new();
    let pd = bed.pd(PF);
    let mut shape = bed.shape(PF, pd);
    for granted in [Access::REMOTE_READ, Access::REMOTE_WRITE, Access::REMOTE_ATOMIC] {
        for asked in [Access::REMOTE_READ, Access::REMOTE_WRITE, Access::REMOTE_ATOMIC] {
            shape.access = granted;
            let (mut a, b) = (bed.qp(&shape), bed.qp(&shape));
            bed.connect(&a, &b);
            let m = bed.mr(PF, pd, 64, ALL);
            let cqe = bed.execute(&mut a, |w| {
                match asked {
                    Access::REMOTE_READ => w.rdma_read(m.remote(0), &[m.sge(8, 8)]),
                    Access::REMOTE_WRITE => w.rdma_write(m.remote(0), &[m.sge(8, 8)]),
                    _ => w.fetch_add(m.remote(0), 1, m.sge(8, 8)),
                };
            });
            assert_eq!(cqe.error.is_none(), asked == granted, "{asked:?} of {granted:?}");
        }
    }
}

#[test]
fn malformed_requests_fail_at_the_right_end() {
    let mut p = pair();
    let (here, there) = (p.here.sge(0, 8), p.there.remote(0));
    let misaligned = p.there.remote(4);
    p.refused(Syndrome::RemoteInvalidRequest, |w| _ = w.fetch_add(misaligned, 1, here));
    let short = p.here.sge(0, 7);
    p.fails_here(Syndrome::LocalLength, 0, |w| _ = w.fetch_add(there, 1, short));
    let huge = Sge { len: 0x7fff_ffff, ..here };
    let range = Refusal::Range as u8;
    p.fails_here(Syndrome::LocalProtection, range, |w| _ = w.rdma_write(there, &[huge]));
}

#[test]
fn invalid_wqes_fail_locally() {
    let mut p = pair();
    let operation = Syndrome::LocalQpOperation;
    for opcode in [0x02, 0x0e, 0x20, 0x3e, 0xff] {
        let at = p.a.producer as usize % 64 * 64;
        // Patches the encoded WQE, because the builder cannot create an invalid one.
        let (ring, _) = (p.a.ring.clone(), ());
        let before = p.bed.e.stats().errors;
        p.bed.write_wqe(&mut p.a, |w| _ = w.nop());
        ring.write(at + 3, &[opcode]);
        p.bed.e.doorbell(p.a.qpn, p.a.producer);
        p.bed.run();
        assert_error(&p.a.send_cq.reader.poll().unwrap(), operation);
        assert_eq!(p.bed.e.stats().errors, before + 1);
        p.reconnect();
    }
    // A `ds` of 0, too few segments for the opcode, and inline data beyond the end of the WQE.
    for (opcode, ds, inline) in
        [(0x00, 0, 0), (0x10, 1, 0), (0x12, 3, 0), (0x25, 7, 0), (0x08, 3, 100u32)]
    {
        let at = p.bed.write_wqe(&mut p.a, |w| _ = w.nop_filling(2));
        p.a.ring.write(at + 3, &[opcode]);
        p.a.ring.write(at + 7, &[ds]);
        p.a.ring.write(at + 32, &(verbs::wqe::INLINE | inline).to_be_bytes());
        p.bed.e.doorbell(p.a.qpn, p.a.producer);
        p.bed.run();
        assert_error(&p.a.send_cq.reader.poll().unwrap(), operation);
        p.reconnect();
    }
    // Index and QPN in an unmanaged ring must match.
    for (offset, bytes) in [(1, [0x12, 0x34]), (4, [0xff, 0xff])] {
        let at = p.bed.write_wqe(&mut p.a, |w| _ = w.nop());
        p.a.ring.write(at + offset, &bytes);
        p.bed.e.doorbell(p.a.qpn, p.a.producer);
        p.bed.run();
        assert_error(&p.a.send_cq.reader.poll().unwrap(), operation);
        p.reconnect();
    }
    for missing in [0, 0x7f_ffff] {
        p.fails_here(operation, 0, |w| _ = w.wait(Cqn::new(missing), 0));
        p.fails_here(operation, 0, |w| _ = w.send_enable(Qpn::new(missing), 0));
        p.fails_here(operation, 0, |w| _ = w.receive_enable(Qpn::new(missing), 0));
    }
    let unmanaged = p.b.qpn;
    p.fails_here(operation, 0, |w| _ = w.send_enable(unmanaged, 0));
    p.fails_here(operation, 0, |w| _ = w.receive_enable(unmanaged, 0));
}

#[test]
fn wqe_longer_than_its_ring_is_rejected() {
    let mut bed = Bed::new();
    let pd = bed.pd(PF);
    let shape = Shape { blocks: 1, ..bed.shape(PF, pd) };
    let (mut a, b) = (bed.qp(&shape), bed.qp(&shape));
    bed.connect(&a, &b);
    assert_eq!(bed.execute(&mut a, |w| _ = w.nop()).error, None);
    bed.write_wqe(&mut a, |w| _ = w.nop());
    a.ring.write(7, &[63]);
    bed.e.doorbell(a.qpn, a.producer);
    bed.run();
    assert_error(&a.send_cq.reader.poll().unwrap(), Syndrome::LocalQpOperation);
    assert_eq!(a.send_cq.reader.poll(), None, "blocks behind the doorbell index are not flushed");
}

#[test]
fn control_operations_are_limited_to_their_function() {
    let mut bed = Bed::new();
    let f = bed.e.add_function(FunctionLimits::default()).unwrap();
    let (pd, pf_pd) = (bed.pd(f), bed.pd(PF));
    let theirs = Shape { managed: true, recv: Some(true), ..bed.shape(PF, pf_pd) };
    let theirs = bed.qp(&theirs);
    let shape = bed.shape(f, pd);
    for op in 0..3 {
        let (mut a, b) = (bed.qp(&shape), bed.qp(&shape));
        bed.connect(&a, &b);
        let cqe = bed.execute(&mut a, |w| {
            match op {
                0 => w.wait(theirs.send_cq.cqn, 0xff_ffff),
                1 => w.send_enable(theirs.qpn, 1),
                _ => w.receive_enable(theirs.qpn, 1),
            };
        });
        assert_error(&cqe, Syndrome::LocalQpOperation);
    }
    let info = bed.e.query_qp(PF, theirs.qpn).unwrap();
    assert_eq!((info.progress.send_limit, info.progress.recv_limit), (0, 0));
}

#[test]
fn oversized_message_fails_both_ends() {
    let mut p = pair();
    let from = p.here.sge(0, 20);
    let list = [p.there.sge(0, 10), p.there.sge(100, 9)];
    p.bed.post_recv(&mut p.b, &list);
    p.bed.post(&mut p.a, |w| _ = w.send(&[from]));
    p.bed.run();
    assert_error(&p.a.send_cq.reader.poll().unwrap(), Syndrome::RemoteInvalidRequest);
    let cqe = p.b.recv_cq.reader.poll().unwrap();
    assert_error(&cqe, Syndrome::LocalLength);
    assert_eq!((cqe.opcode, cqe.wqe_counter), (cqe::opcode::RESP_ERR, 0));
    assert_eq!(p.bed.state(&p.b), QpState::Error);
}

#[test]
fn receive_with_invalid_key_fails_both_ends() {
    let mut p = pair();
    p.here.mem.write(0, &[9; 20]);
    let (from, good, bad) = (p.here.sge(0, 20), p.there.sge(0, 10), p.here.sge(0, 10));
    p.bed.post_recv(&mut p.b, &[good, bad]);
    p.bed.post_recv(&mut p.b, &[good]);
    p.bed.post(&mut p.a, |w| _ = w.send(&[from]));
    p.bed.run();
    assert_error(&p.a.send_cq.reader.poll().unwrap(), Syndrome::RemoteOperation);
    let cqe = p.b.recv_cq.reader.poll().unwrap();
    assert_error(&cqe, Syndrome::LocalProtection);
    assert_eq!(cqe.error.unwrap().vendor, Refusal::Pd as u8);
    assert_eq!(p.there.bytes(0, 10), [0; 10], "nothing is scattered");
    let cqe = p.b.recv_cq.reader.poll().unwrap();
    assert_error(&cqe, Syndrome::Flushed);
    assert_eq!((cqe.opcode, cqe.wqe_counter), (cqe::opcode::RESP_ERR, 1));
    // A receive posted later is flushed too, by the next poll.
    p.bed.post_recv(&mut p.b, &[good]);
    assert!(p.bed.e.has_ready());
    p.bed.run();
    assert_error(&p.b.recv_cq.reader.poll().unwrap(), Syndrome::Flushed);
}

#[test]
fn send_to_a_qp_without_receive_queue_is_invalid() {
    let mut bed = Bed::new();
    let pd = bed.pd(PF);
    let shape = bed.shape(PF, pd);
    let (mut a, b) = (bed.qp(&shape), bed.qp(&Shape { recv: None, ..shape.clone() }));
    bed.connect(&a, &b);
    assert_error(&bed.execute(&mut a, |w| _ = w.send(&[])), Syndrome::RemoteInvalidRequest);
    assert_eq!(bed.state(&b), QpState::Error);
}

#[test]
fn send_length_is_limited() {
    let mut p = pair_with(Limits { send_bytes_max: 100, ..Limits::default() });
    let to = p.there.sge(0, 4096);
    p.bed.post_recv(&mut p.b, &[to]);
    let (fits, long) = (p.here.sge(0, 100), p.here.sge(0, 101));
    assert_eq!(p.bed.execute(&mut p.a, |w| _ = w.send(&[fits])).error, None);
    p.fails_here(Syndrome::LocalLength, 0, |w| _ = w.send(&[long]));
}

#[test]
fn peer_that_does_not_respond_fails_the_requester() {
    let mut p = pair();
    let (here, there) = (p.here.sge(0, 8), p.there.remote(0));
    let lost = Syndrome::RetryExceeded;
    for change in [QpChange::Error, QpChange::Reset] {
        for op in 0..4 {
            p.bed.e.modify_qp(PF, p.b.qpn, change).unwrap();
            p.fails(lost, |w| {
                match op {
                    0 => w.rdma_write(there, &[here]),
                    1 => w.rdma_read(there, &[here]),
                    2 => w.fetch_add(there, 1, here),
                    _ => w.send(&[here]),
                };
            });
            p.reconnect();
        }
    }
    // The peer is connected to a third QP.
    p.bed.e.modify_qp(PF, p.b.qpn, QpChange::Reset).unwrap();
    p.bed.connect_to(&p.b, Qpn::new(0x999));
    p.fails(lost, |w| _ = w.rdma_write(there, &[here]));
    assert_eq!(p.bed.state(&p.b), QpState::ReadyToSend);
    p.reconnect();
    p.bed.e.destroy_qp(PF, p.b.qpn).unwrap();
    p.fails(lost, |w| _ = w.rdma_write(there, &[here]));
}

#[test]
fn qp_that_is_its_own_peer_fails_once() {
    let mut bed = Bed::new();
    let pd = bed.pd(PF);
    let shape = bed.shape(PF, pd);
    let mut a = bed.qp(&shape);
    bed.connect_to(&a, a.qpn);
    let m = bed.mr(PF, pd, 64, ALL);
    m.mem.write(0, b"self");
    assert_eq!(bed.execute(&mut a, |w| _ = w.rdma_write(m.remote(8), &[m.sge(0, 4)])).error, None);
    assert_eq!(m.bytes(8, 4), b"self");
    bed.post_recv(&mut a, &[m.sge(32, 8)]);
    assert_eq!(bed.execute(&mut a, |w| _ = w.send(&[m.sge(0, 4)])).error, None);
    assert_eq!(m.bytes(32, 4), b"self");
    bed.post_recv(&mut a, &[]);
    let cqe = bed.execute(&mut a, |w| _ = w.rdma_write(m.remote(64), &[m.sge(0, 4)]));
    assert_error(&cqe, Syndrome::RemoteAccess);
    assert_eq!(a.send_cq.reader.poll(), None);
    assert!(a.recv_cq.reader.poll().is_some());
    assert_error(&a.recv_cq.reader.poll().unwrap(), Syndrome::Flushed);
    assert_eq!(bed.events().iter().filter(|e| matches!(e, Event::Async { .. })).count(), 1);
}

#[test]
fn error_affects_only_its_connection() {
    let mut p = pair();
    let (mut c, d) = p.bed.pair();
    let bad = Remote { addr: 0, rkey: Key(0) };
    let here = p.here.sge(0, 8);
    p.bed.post(&mut p.a, |w| _ = w.rdma_write(bad, &[here]));
    p.bed.post(&mut c, |w| _ = w.nop().signaled());
    p.bed.run();
    assert_eq!(c.send_cq.reader.poll().unwrap().error, None);
    assert_eq!((p.bed.state(&c), p.bed.state(&d)), (QpState::ReadyToSend, QpState::ReadyToSend));
}

#[test]
fn wqes_posted_in_error_are_flushed_and_reset_drops_them() {
    let mut p = pair();
    p.bed.e.modify_qp(PF, p.a.qpn, QpChange::Error).unwrap();
    assert_eq!(p.bed.events(), [], "a QP moved to Error by its owner raises no event");
    for i in 0..3 {
        let cqe = p.bed.execute(&mut p.a, |w| _ = w.nop_filling(2));
        assert_error(&cqe, Syndrome::Flushed);
        assert_eq!(cqe.wqe_counter, 2 * i);
    }
    assert_eq!(p.bed.e.stats().flushed, 3);
    p.bed.write_wqe(&mut p.a, |w| _ = w.nop().signaled());
    p.bed.e.doorbell(p.a.qpn, p.a.producer);
    p.reconnect();
    p.bed.run();
    assert_eq!(p.a.send_cq.reader.poll(), None);
    assert_eq!(p.bed.execute(&mut p.a, |w| _ = w.nop()).wqe_counter, 0);
}

#[test]
fn flush_handles_all_wqe_lengths_and_stops_at_the_limit() {
    let mut bed = Bed::new();
    let pd = bed.pd(PF);
    let shape = Shape { managed: true, cq_entries: 128, ..bed.shape(PF, pd) };
    let (mut a, b) = (bed.qp(&shape), bed.qp(&shape));
    bed.connect(&a, &b);
    let mut starts = Vec::new();
    for blocks in [1, 15, 2, 3, 7] {
        starts.push(a.producer);
        bed.write_wqe(&mut a, |w| _ = w.nop_filling(blocks));
    }
    starts.push(a.producer);
    // Bytes that are no valid WQE count as one block each.
    bed.e.enable_send(PF, a.qpn, a.producer + 2).unwrap();
    starts.push(a.producer + 1);
    bed.e.modify_qp(PF, a.qpn, QpChange::Error).unwrap();
    bed.run();
    for start in starts {
        let cqe = a.send_cq.reader.poll().unwrap();
        assert_error(&cqe, Syndrome::Flushed);
        assert_eq!(cqe.wqe_counter, start);
    }
    assert_eq!(a.send_cq.reader.poll(), None);
    bed.e.enable_send(PF, a.qpn, a.producer + 3).unwrap();
    bed.run();
    assert_error(&a.send_cq.reader.poll().unwrap(), Syndrome::Flushed);
}

#[test]
fn strict_rings_check_fields_that_managed_rings_ignore() {
    for strict in [false, true] {
        let mut bed = Bed::with(Limits { strict, ..Limits::default() });
        let pd = bed.pd(PF);
        let shape = Shape { managed: true, ..bed.shape(PF, pd) };
        let (mut a, b) = (bed.qp(&shape), bed.qp(&shape));
        bed.connect(&a, &b);
        let at = bed.write_wqe(&mut a, |w| _ = w.nop().signaled());
        a.ring.write(at + 1, &[0xff, 0xff]);
        bed.e.enable_send(PF, a.qpn, 1).unwrap();
        bed.run();
        assert_eq!(a.send_cq.reader.poll().unwrap().error.is_some(), strict);
    }
}
