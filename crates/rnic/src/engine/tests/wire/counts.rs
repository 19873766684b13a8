//! Exact values: statistics, the work that the scheduler charges, the memory charged to a function.

use super::injected::{MTU, World};
use super::*;
use crate::engine::remote::connection::Connection;
use crate::limits::FunctionLimits;
use crate::wire::packet::{Aeth, Body, Malformed, Part, Reth, Syndrome as Says, opcode};
use crate::wire::requester::Request;
use verbs::FunctionId;
use verbs::cqe::Syndrome;
use verbs::wqe::opcode as wqe_opcode;

const WQE: u64 = crate::engine::core::WQE_WORK;

fn ring_bytes(net: &Net, f: FunctionId) -> u64 {
    net.beds[0].e.core.owners.functions[&f].used.ring_bytes
}

/// Creates a connected QP of a function; also returns the function's ring bytes before the
/// connection.
fn charged(link: &Link) -> (Net, FunctionId, Qpn, u64) {
    let mut net = Net::new(8);
    let limits = FunctionLimits { remote_peers: 1, ..FunctionLimits::default() };
    let f = net.beds[0].e.add_function(limits).unwrap();
    let pd = net.beds[0].pd(f);
    let shape = net.beds[0].shape(f, pd);
    let qpn = net.beds[0].qp(&shape).qpn;
    let before = ring_bytes(&net, f);
    let peer = net.peer(0, Qpn::new(70), link).into();
    for change in [QpChange::Init, QpChange::ReadyToReceive { peer }] {
        net.beds[0].e.modify_qp(f, qpn, change).unwrap();
    }
    (net, f, qpn, before)
}

#[test]
fn connection_memory_is_charged_while_connected() {
    let (mut net, f, qpn, before) = charged(&Link::default());
    let wire = wired().wire.unwrap();
    let rings = u64::from(wire.blocks) * 64 + u64::from(STRIDE);
    let structs = wire.requests as usize * size_of::<Request>() + size_of::<Connection>();
    assert_eq!(ring_bytes(&net, f) - before, rings + structs as u64);
    net.beds[0].e.modify_qp(f, qpn, QpChange::Reset).unwrap();
    assert_eq!(ring_bytes(&net, f), before);
    assert_eq!(net.beds[0].e.core.owners.functions[&f].used.remote_peers, 0);
}

#[test]
fn authentication_keys_are_charged_to_the_function() {
    let paid = |link: &Link| {
        let (net, f, _, before) = charged(link);
        ring_bytes(&net, f) - before
    };
    assert!(paid(&Link::authenticated()) > paid(&Link::default()));
}

#[test]
fn connections_with_outstanding_requests_are_counted() {
    let mut net = Net::new(9);
    let [mut a, b] = net.pair(&Link::default());
    let mine = net.beds[0].mr(PF, a.pd, 4096, ALL);
    let theirs = net.beds[1].mr(PF, b.pd, 4096, ALL);
    let awaiting = |net: &Net| net.beds[0].e.core.wire.awaiting;
    let read = |w: &mut Builder| _ = w.rdma_read(theirs.remote(0), &[mine.sge(0, 8)]).signaled();
    net.beds[0].post(&mut a, read);
    net.turn(0);
    assert_eq!(awaiting(&net), 1);
    net.run();
    assert_eq!(awaiting(&net), 0);
    // The QP leaves RTS while a response is outstanding.
    net.faults.loss = 10_000;
    for end in [QpChange::Error, QpChange::Reset] {
        net.beds[0].post(&mut a, read);
        net.turn(0);
        assert_eq!(awaiting(&net), 1);
        net.beds[0].e.modify_qp(PF, a.qpn, end).unwrap();
        net.turn(0);
        assert_eq!(awaiting(&net), 0);
        net.beds[0].e.modify_qp(PF, a.qpn, QpChange::Reset).unwrap();
        a.producer = 0;
        let peer = net.peer(0, b.qpn, &Link::default()).into();
        for change in [QpChange::Init, QpChange::ReadyToReceive { peer }, QpChange::ReadyToSend] {
            net.beds[0].e.modify_qp(PF, a.qpn, change).unwrap();
        }
    }
}

/// The work and statistics of a WRITE of three packets, at both engines.
#[test]
fn work_of_a_write_counts_segments_packets_and_bytes() {
    let mut net = Net::new(10);
    let [mut a, b] = net.pair(&Link::default());
    let mine = net.beds[0].mr(PF, a.pd, 4096, ALL);
    let theirs = net.beds[1].mr(PF, b.pd, 4096, ALL);
    let len = 2 * MTU + 100;
    let work = |net: &Net, end: usize| net.beds[end].e.core.work;
    let start = [work(&net, 0), work(&net, 1)];
    net.beds[0].post(&mut a, |w| {
        w.rdma_write(theirs.remote(0), &[mine.sge(0, 1000), mine.sge(0, len - 1000)]).signaled();
    });
    net.run();
    // Two halves of a WQE's head and two SGEs are four segments. Sending fetches the stored WQE
    // once more.
    let fetched = WQE * (1 + 4) + WQE;
    let sent = 3 * WQE + len as u64;
    // Work for the acknowledgement and for the completion.
    let ended = WQE + WQE;
    assert_eq!(work(&net, 0) - start[0], fetched + sent + ended);
    let received = 3 * WQE + len as u64;
    assert_eq!(work(&net, 1) - start[1], received + WQE);
    let (near, far) = (net.beds[0].e.stats(), net.beds[1].e.stats());
    assert_eq!((near.bytes, far.bytes), (len as u64, len as u64));
    assert_eq!(near.wqes[wqe_opcode::RDMA_WRITE as usize], 1);
    assert_eq!(near.wqes_total(), 1);
    assert_eq!(net.beds[0].e.query_qp(PF, a.qpn).unwrap().progress.executed, 1);
    let (near, far) = (net.beds[0].e.wire_stats(), net.beds[1].e.wire_stats());
    assert_eq!((near.packets_out, far.packets_in), (3, 3));
    assert_eq!((far.packets_out, near.packets_in), (1, 1));
}

#[test]
fn malformed_packets_are_counted_by_reason() {
    let mut w = World::new(false);
    let good = {
        let reth = Some(Reth { at: w.region.remote(0), len: 4 });
        let body = Body::Write { part: Part::Only, reth, imm: None };
        let packet = crate::wire::Packet {
            qpn: w.far.qpn,
            psn: verbs::Psn::new(w.psn),
            ack_request: true,
            solicited: false,
            body,
            payload: b"good",
        };
        let mut bytes = [0; 64];
        let len = packet.encode(&mut bytes);
        bytes[..len].to_vec()
    };
    let spoilt = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        bytes
    };
    let cases = [
        (Malformed::Short, good[..12].to_vec()),
        (Malformed::Version, spoilt(1, 0x41)),
        (Malformed::Opcode, spoilt(0, 0x15)),
        (Malformed::Partition, spoilt(2, 0)),
        (Malformed::Pad, good[..good.len() - 1].to_vec()),
        (Malformed::Payload, spoilt(0, opcode::READ_REQUEST)),
        (Malformed::Long, [&good[..], &[0; 5000]].concat()),
    ];
    let source = std::net::SocketAddr::new(address(0, w.net.v6), PORT);
    for (n, (why, bytes)) in cases.iter().enumerate() {
        for _ in 0..=n {
            w.net.drop_in(1, source, bytes);
        }
        let at = Malformed::ALL.iter().position(|m| m == why).unwrap();
        let counts = w.net.beds[1].e.wire_stats().malformed;
        assert_eq!(counts[at], n as u64 + 1, "{why:?}: {counts:?}");
        assert_eq!(counts.iter().sum::<u64>(), (1..=n as u64 + 1).sum::<u64>(), "{why:?}");
    }
}

#[test]
fn packets_in_the_wrong_state_are_counted_and_dropped() {
    let mut w = World::new(false);
    let read = Body::Read(Reth { at: w.region.remote(0), len: 8 });
    let answer = |body_psn: u32| {
        let aeth = Aeth { syndrome: Says::Ack(31), msn: body_psn };
        [
            Body::ReadResponse { part: Part::Only, aeth: Some(aeth) },
            Body::AtomicAcknowledge { aeth, old: 7 },
        ]
    };
    // Responses without a request.
    for (n, body) in answer(0).into_iter().enumerate() {
        w.receive(body, &[0; 8][..if n == 0 { 8 } else { 0 }]);
    }
    assert_eq!(w.net.beds[1].e.wire_stats().stray, 2);
    w.net.beds[1].e.modify_qp(PF, w.far.qpn, QpChange::Error).unwrap();
    for n in 1..=3 {
        assert_eq!(w.receive(read, &[]), []);
        assert_eq!(w.net.beds[1].e.wire_stats().untimely, 2 * n - 1);
        assert_eq!(w.receive(answer(1)[1], &[]), []);
        assert_eq!(w.net.beds[1].e.wire_stats().untimely, 2 * n);
    }
}

#[test]
fn out_of_order_requests_and_naks_are_counted() {
    let mut w = World::new(false);
    let at = w.region.remote(0);
    let write = Body::Write { part: Part::Only, reth: Some(Reth { at, len: 4 }), imm: None };
    for n in 1..=3 {
        w.psn += 1;
        w.receive(write, &[1; 4]);
        assert_eq!(w.net.beds[1].e.wire_stats().ahead, n);
    }
    let mut net = Net::new(7);
    for n in 1..=3 {
        let [mut a, b] = net.pair(&Link::default());
        let mine = net.beds[0].mr(PF, a.pd, 4096, ALL);
        let to = verbs::wqe::Remote { addr: 0, rkey: Default::default() };
        let cqe = net.execute(0, &mut a, |w| _ = w.rdma_write(to, &[mine.sge(0, 8)]));
        assert_error(&cqe, Syndrome::RemoteAccess);
        assert_eq!(net.beds[0].e.wire_stats().naks_in, n);
        for (end, q) in [&a, &b].into_iter().enumerate() {
            net.beds[end].e.modify_qp(PF, q.qpn, QpChange::Reset).unwrap();
        }
    }
}

/// A response with the expected PSN that does not match its request.
#[test]
fn mismatched_results_are_counted_and_dropped() {
    let mut net = Net::new(7);
    let [mut a, b] = net.pair(&Link::default());
    let mine = net.beds[0].mr(PF, a.pd, 4096, ALL);
    let theirs = net.beds[1].mr(PF, b.pd, 4096, ALL);
    net.beds[0].post(&mut a, |w| {
        w.rdma_read(theirs.remote(0), &[mine.sge(0, 100)]).signaled();
    });
    net.turn(0);
    let aeth = Aeth { syndrome: Says::Ack(31), msn: 1 };
    let psn = verbs::Psn::new(Link::default().psn[0]);
    let from = address(1, net.v6);
    let wrong = [
        (Body::AtomicAcknowledge { aeth, old: 7 }, 0),
        (Body::ReadResponse { part: Part::Only, aeth: Some(aeth) }, 99),
        (Body::ReadResponse { part: Part::Only, aeth: Some(aeth) }, 101),
    ];
    for (n, (body, len)) in wrong.into_iter().enumerate() {
        let payload = [0xee; 128];
        let (ack_request, solicited) = (false, false);
        let payload = &payload[..len];
        let packet = crate::wire::Packet { qpn: a.qpn, psn, ack_request, solicited, body, payload };
        let mut bytes = [0; 256];
        let len = packet.encode(&mut bytes);
        net.inject(0, from, &bytes[..len]);
        assert_eq!(net.beds[0].e.wire_stats().stray, n as u64 + 1);
    }
    assert_eq!(mine.bytes(0, 128), [0; 128]);
    net.run();
    assert_eq!(a.send_cq.reader.poll().unwrap().error, None);
}

#[test]
fn failures_are_counted_once() {
    let link = Link { timeout: 8, retry_cnt: 0, rnr_retry: 1, ..Link::default() };
    let mut net = Net::new(7);
    let [mut a, _b] = net.pair(&link);
    let mine = net.beds[0].mr(PF, a.pd, 4096, ALL);
    // The first SEND finds no receive WQE in two attempts; the next three WQEs are flushed.
    for _ in 0..4 {
        net.beds[0].post(&mut a, |w| _ = w.send(&[mine.sge(0, 8)]).signaled());
    }
    net.run();
    assert_error(&a.send_cq.reader.poll().unwrap(), Syndrome::RnrRetryExceeded);
    let (near, far) = (&net.beds[0].e, &net.beds[1].e);
    assert_eq!((near.stats().errors, near.stats().flushed, near.stats().wqes_total()), (1, 3, 0));
    assert_eq!((far.stats().rnr, far.wire_stats().naks_out), (2, 2));
    assert_eq!(near.wire_stats().naks_in, 2);
    assert_eq!(near.wire_stats().timeouts, 0);
    // The peer does not respond.
    let mut net = Net::new(7);
    let [mut a, _b] = net.pair(&Link { retry_cnt: 1, ..link });
    net.faults.loss = 10_000;
    let mine = net.beds[0].mr(PF, a.pd, 4096, ALL);
    let cqe = net.execute(0, &mut a, |w| _ = w.send(&[mine.sge(0, 8)]));
    assert_error(&cqe, Syndrome::RetryExceeded);
    let stats = net.beds[0].e.wire_stats();
    assert!(stats.timeouts > 0 && stats.repeated == stats.timeouts, "{stats:?}");
}

/// `expects_more_packets` is true for a long message until at most 120 KiB remain.
#[test]
fn long_message_expects_packets_until_two_bursts_remain() {
    let mut w = World::with(false, |_| {});
    let region = w.net.beds[1].mr(PF, w.far.pd, 256 << 10, ALL);
    let (len, at) = (124u32 << 10, region.remote(0));
    let first = Body::Write { part: Part::First, reth: Some(Reth { at, len }), imm: None };
    let middle = Body::Write { part: Part::Middle, reth: None, imm: None };
    let here = address(1, w.net.v6);
    let mut amid = Vec::new();
    for n in 0..5 {
        w.receive_at(here, if n == 0 { first } else { middle }, &[1; MTU]);
        amid.push(w.net.beds[1].e.expects_more_packets());
    }
    // 123, 122, 121, 120 and 119 KiB remain.
    assert_eq!(amid, [true, true, true, true, false]);
}

#[test]
fn long_response_expects_packets_until_two_bursts_remain() {
    let mut net = Net::new(7);
    let [mut a, b] = net.pair(&Link::default());
    let mine = net.beds[0].mr(PF, a.pd, 256 << 10, ALL);
    let theirs = net.beds[1].mr(PF, b.pd, 256 << 10, ALL);
    let read = |w: &mut Builder| _ = w.rdma_read(theirs.remote(0), &[mine.sge(0, 200 << 10)]);
    net.log = Some(Vec::new());
    assert_eq!(net.execute(0, &mut a, read).error, None);
    let answers = net.log.take().unwrap().into_iter().filter(|(end, _)| *end == 1);
    // The same READ again; the test injects its response packet by packet.
    net.faults.loss = 10_000;
    net.beds[0].post(&mut a, read);
    net.turn(0);
    let (mut amid, shift) = (Vec::new(), 200u32);
    for (_, mut bytes) in answers.take(90) {
        let psn = u32::from_be_bytes([0, bytes[9], bytes[10], bytes[11]]);
        let later = verbs::Psn::new(psn).plus(shift).raw().to_be_bytes();
        bytes[9..12].copy_from_slice(&later[1..]);
        net.drop_in(0, std::net::SocketAddr::new(address(1, net.v6), PORT), &bytes);
        amid.push(net.beds[0].e.expects_more_packets());
    }
    let middle = amid.iter().take_while(|amid| **amid).count();
    assert!(amid[middle..].iter().all(|amid| !amid));
    // Packet n starts at n KiB, so 200 - n KiB remain including it.
    assert_eq!(middle, 81);
}

#[test]
fn work_of_a_packet_is_charged_to_its_function() {
    let mut w = World::new(false);
    let here = address(1, w.net.v6);
    let at = w.region.remote(0);
    let write = |len| Body::Write { part: Part::Only, reth: Some(Reth { at, len }), imm: None };
    let state = |w: &mut World| {
        let core = &mut w.net.beds[1].e.core;
        let sched_index = core.queues.qps.get(w.far.qpn.raw()).unwrap().sched_index;
        (core.queues.scheduler.function(sched_index).deficit, core.work)
    };
    // The first packet activates the function.
    w.receive_at(here, write(4), &[1; 4]);
    for len in [4, MTU] {
        let (left, work) = state(&mut w);
        w.receive_at(here, write(len as u32), &vec![1; len]);
        let done = WQE + len as u64;
        assert_eq!(state(&mut w), (left - done as i64, work + done), "{len} bytes");
    }
}
