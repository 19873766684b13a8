//! Scheduling of a connected QP: events that make it ready, and its timer.

use super::*;
use crate::wire::Outgoing;
use crate::wire::icrc::{self, Route};
use std::net::SocketAddr;
use verbs::cqe::Syndrome;

/// Creates two connected QPs, and a region of one page at each end.
fn world() -> (Net, [TestQp; 2], [Mr; 2]) {
    let mut net = Net::new(9);
    let qps = net.pair(&Link::default());
    let regions = [0, 1].map(|end| net.beds[end].mr(PF, qps[end].pd, 4096, ALL));
    (net, qps, regions)
}

/// Posts a WRITE of eight bytes.
fn write(net: &mut Net, a: &mut TestQp, [mine, theirs]: &[Mr; 2]) {
    net.beds[0].post(a, |w| _ = w.rdma_write(theirs.remote(0), &[mine.sge(0, 8)]).signaled());
}

/// The connection has nothing in flight, and the QP has no receive WQE.
#[test]
fn unfetched_wqes_are_flushed_in_error() {
    let (mut net, [mut a, _b], regions) = world();
    net.beds[0].e.modify_qp(PF, a.qpn, QpChange::Error).unwrap();
    net.turn(0);
    for _ in 0..3 {
        write(&mut net, &mut a, &regions);
    }
    net.turn(0);
    for _ in 0..3 {
        assert_error(&a.send_cq.reader.poll().expect("a flushed WQE"), Syndrome::Flushed);
    }
}

/// Before the first round-trip measurement, the retransmission timeout is 20 ms.
#[test]
fn timer_is_rearmed_for_an_earlier_deadline() {
    let (mut net, [mut a, _b], regions) = world();
    write(&mut net, &mut a, &regions);
    net.deliver();
    assert_eq!(a.send_cq.reader.poll().unwrap().error, None);
    assert!(net.now < 1_000_000);
    net.faults.loss = 10_000;
    write(&mut net, &mut a, &regions);
    net.turn(0);
    // The minimum retransmission timeout is 1 ms.
    assert_eq!(net.beds[0].e.core.wire.deadline_ns(), Some(net.now + 1_000_000));
}

#[test]
fn flushing_a_fetched_wqe_costs_one_unit_of_work() {
    let flushed = |count: usize| {
        let (mut net, [mut a, _b], regions) = world();
        net.faults.loss = 10_000;
        for _ in 0..count {
            write(&mut net, &mut a, &regions);
        }
        net.turn(0);
        let before = net.beds[0].e.core.work;
        net.beds[0].e.modify_qp(PF, a.qpn, QpChange::Error).unwrap();
        net.turn(0);
        net.beds[0].e.core.work - before
    };
    // The completion costs as much work again.
    assert_eq!(flushed(5) - flushed(2), 3 * 2 * crate::engine::core::WQE_WORK);
}

#[test]
fn outbox_adds_an_icrc_to_each_packet_without_tag() {
    let (mut net, [mut a, _b], [mine, theirs]) = world();
    let list = [mine.sge(0, 2500)];
    net.beds[0].post(&mut a, |w| _ = w.rdma_write(theirs.remote(0), &list));
    let e = &mut net.beds[0].e;
    while e.poll(0, 64) > 0 {}
    e.outbox().seal(PORT);
    let mut packets = 0;
    for Outgoing { envelope, bytes, .. } in e.outbox().packets() {
        let route = Route::new(SocketAddr::new(envelope.from, PORT), envelope.to);
        assert!(icrc::check(&route, bytes));
        bytes[20] ^= 1;
        assert!(!icrc::check(&route, bytes));
        packets += 1;
    }
    assert_eq!(packets, 3);
}

/// Responding to a READ costs as much as sending a WRITE, except for the WQE.
#[test]
fn work_of_a_read_response_counts_packets_and_bytes() {
    let answered = |len: usize| {
        let (mut net, [mut a, _b], [mine, theirs]) = world();
        let before = net.beds[1].e.core.work;
        let list = [mine.sge(0, len)];
        let cqe = net.execute(0, &mut a, |w| _ = w.rdma_read(theirs.remote(0), &list));
        assert_eq!(cqe.error, None);
        net.beds[1].e.core.work - before
    };
    let more = answered(2500) - answered(4);
    assert_eq!(more, 2 * crate::engine::core::WQE_WORK + 2496);
}
