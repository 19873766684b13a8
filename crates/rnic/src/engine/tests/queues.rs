//! Completion queues that overrun, completion events, receivers that are not ready, shared receive
//! queues.

use super::*;
use crate::spec::{Event, RecvSpec};
use verbs::cqe::{CqReader, Cqe, Syndrome};
use verbs::wqe::Sge;
use verbs::{Access, AsyncEvent, QpState, Srqn};

#[test]
fn completions_wrap_the_ring_and_the_24_bit_index() {
    let mut bed = Bed::new();
    let pd = bed.pd(PF);
    let shape = Shape { cq_entries: 4, initial_count: 0xff_fffa, ..bed.shape(PF, pd) };
    let (mut a, b) = (bed.qp(&shape), bed.qp(&shape));
    bed.connect(&a, &b);
    for i in 0..20u16 {
        let cqe = bed.execute(&mut a, |w| _ = w.nop());
        assert_eq!(cqe.wqe_counter, i);
        assert_eq!(a.send_cq.reader.poll(), None);
    }
    assert_eq!(bed.e.cq_count(PF, a.send_cq.cqn).unwrap(), 14);
    assert_eq!(a.send_cq.record.load_be32(0), 14);
}

#[test]
fn cq_overrun_raises_an_event_and_fails_its_qps() {
    let mut bed = Bed::new();
    let pd = bed.pd(PF);
    let shape = Shape { cq_entries: 4, ..bed.shape(PF, pd) };
    let (mut a, b) = (bed.qp(&shape), bed.qp(&shape));
    bed.connect(&a, &b);
    for _ in 0..6 {
        bed.post(&mut a, |w| _ = w.nop().signaled());
    }
    bed.run();
    assert_eq!(bed.state(&a), QpState::Error);
    let cqn = a.send_cq.cqn;
    let events = bed.events();
    let overruns = |events: &[Event]| {
        let overrun = Event::Async { function: PF, event: AsyncEvent::CqOverrun { cqn } };
        events.iter().filter(|e| **e == overrun).count()
    };
    assert_eq!(overruns(&events), 1, "{events:?}");
    assert!(
        events.iter().any(|e| matches!(e, Event::Async { event: AsyncEvent::QpError { .. }, .. }))
    );
    for i in 0..4 {
        assert_eq!(
            a.send_cq.reader.poll().unwrap().wqe_counter,
            i,
            "earlier completions stay valid"
        );
    }
    assert_eq!(a.send_cq.reader.poll(), None);
    assert_eq!(bed.e.cq_count(PF, cqn).unwrap(), 4);
    assert_eq!(bed.state(&b), QpState::ReadyToSend);
}

#[test]
fn cq_that_ignores_overrun_keeps_counting() {
    let mut bed = Bed::new();
    let pd = bed.pd(PF);
    let shape = Shape { cq_entries: 4, ignore_overrun: true, ..bed.shape(PF, pd) };
    let (mut a, b) = (bed.qp(&shape), bed.qp(&shape));
    bed.connect(&a, &b);
    for _ in 0..11 {
        bed.post(&mut a, |w| _ = w.nop().signaled());
    }
    bed.run();
    assert_eq!(bed.e.cq_count(PF, a.send_cq.cqn).unwrap(), 11);
    let entry = |i: usize| {
        let mut b = [0; 64];
        a.send_cq.ring.read(i * 64, &mut b);
        Cqe::from_bytes(&b).wqe_counter
    };
    assert_eq!([entry(0), entry(1), entry(2), entry(3)], [8, 9, 10, 7]);
}

#[test]
fn armed_cq_raises_one_event() {
    let mut bed = Bed::new();
    let (mut a, _b) = bed.pair();
    let cqn = a.send_cq.cqn;
    bed.execute(&mut a, |w| _ = w.nop());
    assert_eq!(bed.events(), []);
    a.send_cq.reader.arm();
    bed.run();
    assert_eq!(bed.events(), [], "a completion before arming raises no event");
    for _ in 0..2 {
        bed.post(&mut a, |w| _ = w.nop().signaled());
        bed.run();
    }
    assert_eq!(bed.events(), [Event::Completion(cqn)]);
    assert_eq!(a.send_cq.record.word32(4).load(std::sync::atomic::Ordering::Relaxed), 0);
    a.send_cq.reader.arm();
    bed.post(&mut a, |w| _ = w.nop().signaled());
    bed.run();
    assert_eq!(bed.events(), [Event::Completion(cqn)]);
}

#[test]
fn waiting_sender_does_not_block_other_qps() {
    let mut bed = Bed::new();
    let (mut a, mut b) = bed.pair();
    let (mut c, _d) = bed.pair();
    let (from, to) = (bed.mr(PF, a.pd, 64, ALL), bed.mr(PF, b.pd, 64, ALL));
    from.mem.write(0, b"late");
    bed.post(&mut a, |w| _ = w.send(&[from.sge(0, 4)]).signaled());
    bed.post(&mut a, |w| _ = w.nop().signaled());
    bed.post(&mut c, |w| _ = w.nop().signaled());
    assert_eq!(bed.run(), 1);
    assert!(c.send_cq.reader.poll().is_some());
    assert_eq!((a.send_cq.reader.poll(), bed.e.has_ready()), (None, false));
    assert_eq!(bed.e.stats().rnr, 1);
    // Writing the record does not notify the NIC: the NIC polls it at increasing intervals.
    let mut waits = Vec::new();
    for _ in 0..12 {
        let t = bed.e.next_timeout().unwrap();
        assert!(t > bed.now);
        waits.push(t - bed.now);
        bed.now = t;
        assert_eq!(bed.e.poll(t, 64), 0);
    }
    assert!(waits.is_sorted(), "{waits:?}");
    assert!(waits[0] <= 10_000 && waits[11] == 2_000_000, "{waits:?}");
    bed.post_recv(&mut b, &[to.sge(0, 64)]);
    assert!(bed.e.has_ready());
    bed.run();
    assert_eq!(to.bytes(0, 4), b"late");
    assert_eq!(a.send_cq.reader.poll().unwrap().wqe_counter, 0);
    assert_eq!(a.send_cq.reader.poll().unwrap().wqe_counter, 1);
    assert_eq!(bed.e.next_timeout(), None);
}

#[test]
fn recv_en_wakes_a_waiting_sender() {
    let mut bed = Bed::new();
    let pd = bed.pd(PF);
    let shape = bed.shape(PF, pd);
    let mut a = bed.qp(&shape);
    let mut b = bed.qp(&Shape { recv: Some(true), ..shape });
    bed.connect(&a, &b);
    bed.post_recv(&mut b, &[]);
    bed.post_recv(&mut b, &[]);
    bed.post(&mut a, |w| _ = w.send(&[]).signaled());
    bed.post(&mut a, |w| _ = w.send(&[]).signaled());
    bed.run();
    assert_eq!(a.send_cq.reader.poll(), None, "a managed queue ignores the record");
    assert_eq!(bed.e.next_timeout(), None, "the record of a managed queue is not polled");
    bed.e.enable_recv(PF, b.qpn, 1).unwrap();
    bed.run();
    assert!(a.send_cq.reader.poll().is_some());
    assert_eq!(a.send_cq.reader.poll(), None);
    let target = b.qpn;
    bed.execute(&mut b, |w| _ = w.receive_enable(target, 2));
    assert!(a.send_cq.reader.poll().is_some());
    let info = bed.e.query_qp(PF, b.qpn).unwrap();
    assert_eq!((info.progress.recv_consumer, info.progress.recv_limit), (2, 2));
}

#[test]
fn waiting_sender_can_be_reset_destroyed_or_disconnected() {
    for what in 0..5 {
        let mut bed = Bed::new();
        let srq = Shared::new(&mut bed, 4, 16);
        let mut senders = Vec::new();
        for _ in 0..3 {
            senders.push(srq.pair(&mut bed));
        }
        for (a, _) in &mut senders {
            bed.post(a, |w| _ = w.send(&[]).signaled());
        }
        bed.run();
        let (mut first, mut second, mut third) = {
            let mut it = senders.into_iter();
            (it.next().unwrap(), it.next().unwrap(), it.next().unwrap())
        };
        let expect_lost = match what {
            0 => {
                bed.e.modify_qp(PF, second.0.qpn, verbs::QpChange::Reset).unwrap();
                false
            }
            1 => {
                bed.e.destroy_qp(PF, second.0.qpn).unwrap();
                false
            }
            2 => {
                bed.e.modify_qp(PF, second.0.qpn, verbs::QpChange::Error).unwrap();
                bed.run();
                assert_error(&second.0.send_cq.reader.poll().unwrap(), Syndrome::Flushed);
                false
            }
            3 => {
                bed.e.destroy_qp(PF, second.1.qpn).unwrap();
                true
            }
            _ => {
                bed.e.modify_qp(PF, second.1.qpn, verbs::QpChange::Error).unwrap();
                true
            }
        };
        bed.run();
        let lost = second.0.send_cq.reader.poll();
        assert_eq!(lost.is_some(), expect_lost, "case {what}");
        if let Some(cqe) = lost {
            assert_error(&cqe, Syndrome::RetryExceeded);
        }
        srq.post(3, |_| Vec::new());
        bed.run();
        for q in [&mut first, &mut third] {
            assert_eq!(q.0.send_cq.reader.poll().unwrap().error, None);
            assert!(q.1.recv_cq.reader.poll().is_some());
        }
        assert_eq!(second.1.recv_cq.reader.poll(), None);
        assert_eq!(bed.e.next_timeout(), None);
    }
}

/// A shared receive queue.
struct Shared {
    pd: verbs::Pdn,
    srqn: Srqn,
    ring: verbs::DmaMemory,
    record: verbs::DmaMemory,
    entries: u32,
}

impl Shared {
    fn new(bed: &mut Bed, entries: u32, stride: u32) -> Self {
        Self::from(bed, entries, stride, 0)
    }

    fn from(bed: &mut Bed, entries: u32, stride: u32, initial_consumer: u32) -> Self {
        let pd = bed.pd(PF);
        let (ring, record) = (memory((entries * stride) as usize), memory(8));
        record.store_be32(0, initial_consumer);
        let spec = RecvSpec {
            ring: ring.clone(),
            entries,
            stride,
            record: record.clone(),
            initial_consumer,
        };
        let srqn = bed.e.create_srq(PF, pd, spec).unwrap();
        Self { pd, srqn, ring, record, entries }
    }

    /// Creates a sender, and a receiver that uses this queue.
    fn pair(&self, bed: &mut Bed) -> (TestQp, TestQp) {
        let pd = bed.pd(PF);
        let a = bed.shape(PF, pd);
        let b = Shape { srq: Some(self.srqn), ..bed.shape(PF, pd) };
        let (a, b) = (bed.qp(&a), bed.qp(&b));
        bed.connect(&a, &b);
        (a, b)
    }

    /// Posts `n` receive WQEs of one SGE.
    fn post(&self, n: u32, sge: impl Fn(u32) -> Vec<Sge>) {
        let first = self.record.load_be32(0);
        for i in 0..n {
            let at = (first.wrapping_add(i) & (self.entries - 1)) as usize * 16;
            match sge(i).first() {
                Some(s) => self.ring.write(at, &s.to_bytes()),
                None => self.ring.zero(at, 16),
            }
        }
        self.record.store_be32(0, first.wrapping_add(n));
    }
}

#[test]
fn senders_share_a_receive_queue_in_the_order_of_their_sends() {
    let mut bed = Bed::new();
    let srq = Shared::new(&mut bed, 16, 16);
    let slots = bed.mr(PF, srq.pd, 128, Access::LOCAL_WRITE);
    let (mut a, mut a_peer) = srq.pair(&mut bed);
    let (mut b, mut b_peer) = srq.pair(&mut bed);
    srq.post(16, |i| vec![slots.sge(8 * i as usize, 8)]);
    let mut want = Vec::new();
    for i in 0..8u64 {
        for (q, name) in [(&mut a, 0xaa), (&mut b, 0xbb)] {
            bed.post(q, |w| _ = w.send_inline(&(name << 8 | i).to_be_bytes()));
            bed.run();
            want.push(name << 8 | i);
        }
    }
    let got: Vec<u64> = (0..16).map(|i| slots.mem.load_be64(8 * i)).collect();
    assert_eq!(got, want);
    let cqe = a_peer.recv_cq.reader.poll().unwrap();
    assert_eq!((cqe.srqn, cqe.wqe_counter, cqe.qpn), (srq.srqn, 0, a_peer.qpn));
    assert_eq!(b_peer.recv_cq.reader.poll().unwrap().wqe_counter, 1);
    // A QP in Error does not change the shared queue.
    bed.e.modify_qp(PF, a_peer.qpn, verbs::QpChange::Error).unwrap();
    srq.post(1, |_| Vec::new());
    bed.run();
    while let Some(cqe) = a_peer.recv_cq.reader.poll() {
        assert_eq!(cqe.error, None);
    }
    assert_eq!(bed.execute(&mut b, |w| _ = w.send(&[])).error, None);
    assert!(bed.e.destroy_srq(PF, srq.srqn).is_err());
    for q in [&a_peer, &b_peer] {
        bed.e.destroy_qp(PF, q.qpn).unwrap();
    }
    bed.e.destroy_srq(PF, srq.srqn).unwrap();
}

#[test]
fn receive_indices_wrap_at_16_and_at_32_bits() {
    for (entries, initial) in [(8, 0xfffa), (1 << 16, 0xffff_fffa)] {
        let mut bed = Bed::new();
        let srq = Shared::from(&mut bed, entries, 16, initial);
        let slots = bed.mr(PF, srq.pd, 64, Access::LOCAL_WRITE);
        let (mut a, mut peer) = srq.pair(&mut bed);
        for i in 0..12u64 {
            assert_eq!(
                bed.e.query_qp(PF, peer.qpn).unwrap().progress.recv_limit & 0xf,
                (10 + i as u32) & 0xf
            );
            srq.post(1, |_| vec![slots.sge(8, 8)]);
            let cqe = bed.execute(&mut a, |w| _ = w.send_inline(&i.to_be_bytes()));
            assert_eq!(cqe.error, None);
            assert_eq!(slots.mem.load_be64(8), i);
            let cqe = peer.recv_cq.reader.poll().unwrap();
            assert_eq!(cqe.wqe_counter, (0xfffa + i) as u16);
        }
        bed.post(&mut a, |w| _ = w.send(&[]).signaled());
        bed.run();
        assert_eq!(a.send_cq.reader.poll(), None, "no credit is left");
    }
}

#[test]
fn record_behind_the_consumer_means_no_credit() {
    let mut bed = Bed::new();
    let srq = Shared::new(&mut bed, 8, 16);
    let (mut a, _peer) = srq.pair(&mut bed);
    srq.post(1, |_| Vec::new());
    assert_eq!(bed.execute(&mut a, |w| _ = w.send(&[])).error, None);
    srq.record.store_be32(0, 0);
    bed.post(&mut a, |w| _ = w.send(&[]).signaled());
    bed.run();
    assert_eq!(a.send_cq.reader.poll(), None);
    assert!(bed.e.next_timeout().is_some());
}

#[test]
fn send_indices_wrap_at_16_bits_in_rings_of_every_size() {
    let sizes: &[u32] = if cfg!(miri) { &[16] } else { &[1, 2, 16, 32768] };
    for &blocks in sizes {
        let mut bed = Bed::new();
        let pd = bed.pd(PF);
        let shape = Shape { blocks, cq_entries: 4, ..bed.shape(PF, pd) };
        let (mut a, b) = (bed.qp(&shape), bed.qp(&shape));
        bed.connect(&a, &b);
        while a.producer < 65_500 {
            bed.post(&mut a, |w| _ = w.nop_filling(blocks.min(15)));
            bed.run();
        }
        for i in 0..80 {
            let at = a.producer;
            let cqe = bed.execute(&mut a, |w| _ = w.nop_filling(1 + i % blocks.min(2)));
            assert_eq!((cqe.error, cqe.wqe_counter), (None, at));
        }
        assert!(a.producer < 200, "the index has wrapped around");
    }
}

#[test]
fn full_ring_of_maximum_size_executes() {
    let mut bed = Bed::new();
    let pd = bed.pd(PF);
    let shape = Shape { blocks: 32768, managed: true, ..bed.shape(PF, pd) };
    let (a, b) = (bed.qp(&shape), bed.qp(&shape));
    bed.connect(&a, &b);
    let blank = verbs::wqe::Builder::new(a.qpn, 0);
    for i in 0..32768 {
        a.ring.write(i * 64, blank.bytes());
    }
    bed.e.enable_send(PF, a.qpn, 32768).unwrap();
    assert_eq!(bed.run(), 32768);
    bed.e.enable_send(PF, a.qpn, 0).unwrap();
    assert_eq!(bed.run(), 32768);
    // A limit behind the consumer: no WQEs.
    bed.e.enable_send(PF, a.qpn, 0xffff).unwrap();
    assert_eq!(bed.run(), 0);
}

#[test]
fn cq_reader_sees_only_complete_entries() {
    let (ring, record) = (memory(256), memory(8));
    let mut bed = Bed::new();
    let spec = crate::spec::CqSpec {
        ring: ring.clone(),
        entries: 4,
        record: record.clone(),
        ignore_overrun: false,
        initial_count: 0,
    };
    // Independent of the previous contents of the ring.
    ring.write(0, &[0x20; 256]);
    verbs::cqe::clear(&ring, 4);
    bed.e.create_cq(PF, spec).unwrap();
    let mut reader = CqReader::new(ring, 4, record, 0);
    assert_eq!(reader.poll(), None);
    assert_eq!(reader.next_number(), 0);
}
