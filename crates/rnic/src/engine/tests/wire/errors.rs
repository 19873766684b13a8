//! Rejected requests, exhausted retries, invalid packets: errors at each end, and no hangs.

use super::*;
use crate::error::Error;
use crate::limits::{FunctionLimits, Limits};
use crate::spec::Event;
use crate::wire::Packet;
use crate::wire::packet::{Aeth, Body, Nak, Notice, PACKET_MAX, Part, Reth, Syndrome as Says};
use verbs::cqe::Syndrome;
use verbs::wqe::Remote;
use verbs::{AsyncEvent, Key, Psn, QpState};

const LATE: u64 = 10_000_000_000;

/// Creates two connected QPs, memory at both ends, and posted receives at the far end.
pub(super) fn world(link: &Link) -> (Net, [TestQp; 2], [Mr; 2]) {
    let mut net = Net::new(7);
    let qps = net.pair(link);
    let mut end = 0;
    let mrs = qps.each_ref().map(|qp| {
        end += 1;
        net.beds[end - 1].mr(PF, qp.pd, 16 << 10, ALL)
    });
    (net, qps, mrs)
}

#[test]
fn rejected_request_fails_both_ends() {
    type Case = (fn(&mut Builder, &Mr, &Mr), Syndrome);
    let cases: [Case; 9] = [
        (
            |w, m, t| {
                _ = w.rdma_write(Remote { rkey: Key(0x1234_5678), ..t.remote(0) }, &[m.sge(0, 9)])
            },
            Syndrome::RemoteAccess,
        ),
        (
            |w, m, t| _ = w.rdma_write(t.remote((16 << 10) - 8), &[m.sge(0, 9)]),
            Syndrome::RemoteAccess,
        ),
        (|w, m, t| _ = w.rdma_write(t.remote(12 << 10), &[m.sge(0, 5000)]), Syndrome::RemoteAccess),
        (|w, m, t| _ = w.rdma_read(t.remote(12 << 10), &[m.sge(0, 5000)]), Syndrome::RemoteAccess),
        (
            |w, m, t| {
                _ = w.rdma_read(Remote { rkey: Key(t.key.0 + 1), ..t.remote(0) }, &[m.sge(0, 9)])
            },
            Syndrome::RemoteAccess,
        ),
        (|w, m, t| _ = w.fetch_add(t.remote(4), 1, m.sge(0, 8)), Syndrome::RemoteInvalidRequest),
        (
            |w, m, t| _ = w.fetch_add(Remote { rkey: Key(7), ..t.remote(0) }, 1, m.sge(0, 8)),
            Syndrome::RemoteAccess,
        ),
        // The posted receive WQE has 3000 bytes.
        (|w, m, _| _ = w.send(&[m.sge(0, 3001)]), Syndrome::RemoteInvalidRequest),
        (|w, m, t| _ = w.send_invalidate(&[m.sge(0, 10)], t.key), Syndrome::RemoteAccess),
    ];
    for loss in [0, 1000] {
        for (i, (wrong, syndrome)) in cases.iter().enumerate() {
            let (mut net, [mut a, mut b], [mine, theirs]) = world(&Link::default());
            net.random = units::Random::new(i as u64);
            net.faults.loss = loss;
            net.beds[1].post_recv(&mut b, &[theirs.sge(0, 3000)]);
            let end = 16 << 10;
            theirs.mem.zero(0, end);
            // Earlier WQEs complete; later WQEs are flushed.
            let good = |w: &mut Builder| _ = w.rdma_read(theirs.remote(0), &[mine.sge(8000, 4000)]);
            for step in 0..3 {
                net.beds[0].post(&mut a, |w| {
                    match step {
                        1 => wrong(w, &mine, &theirs),
                        _ => good(w),
                    }
                    w.signaled();
                });
            }
            net.run_for(LATE);
            let mut next = || a.send_cq.reader.poll().expect("a completion");
            let (first, second, third) = (next(), next(), next());
            if loss == 0 {
                assert_eq!(first.error, None, "case {i}");
                assert_error(&second, *syndrome);
            } else if first.error.is_none() && second.error.unwrap().syndrome != 0x15 {
                assert_error(&second, *syndrome);
            }
            assert_error(&third, Syndrome::Flushed);
            assert_eq!(net.beds[0].state(&a), QpState::Error);
            assert_eq!(net.beds[1].state(&b), QpState::Error, "case {i}");
            let is_reported = net.beds[1].events().into_iter().any(|e| match e {
                Event::Async { event: AsyncEvent::QpError { qpn, .. }, .. } => qpn == b.qpn,
                _ => false,
            });
            assert!(is_reported, "case {i}");
            assert_eq!(theirs.bytes(4096, 16), [0; 16], "nothing was written");
        }
    }
}

#[test]
fn requester_fails_after_all_retries_without_response() {
    for (timeout, retry_cnt) in [(8u8, 0u8), (8, 7), (14, 1)] {
        let link = Link { timeout, retry_cnt, ..Link::default() };
        let (mut net, [mut a, _b], [mine, theirs]) = world(&link);
        net.execute(0, &mut a, |w| _ = w.rdma_read(theirs.remote(0), &[mine.sge(0, 5000)]));
        net.faults.loss = 10_000;
        let start = net.now;
        let cqe = net.execute(0, &mut a, |w| {
            w.rdma_read(theirs.remote(0), &[mine.sge(0, 5000)]);
        });
        assert_error(&cqe, Syndrome::RetryExceeded);
        assert_eq!(net.beds[0].state(&a), QpState::Error);
        let patience = (4096 << timeout) * (retry_cnt as u64 + 1);
        let took = net.now - start;
        assert!((patience..patience * 11 / 10 + 50_000).contains(&took), "{took} of {patience}");
        assert_eq!(net.beds[0].e.next_timeout(), None, "no timer runs");
    }
}

#[test]
fn rnr_retries_match_the_connection_parameter() {
    for rnr_retry in [0, 1, 6] {
        let link = Link { rnr_retry, min_rnr_timer: 14, ..Link::default() };
        let (mut net, [mut a, b], [mine, _]) = world(&link);
        let start = net.now;
        let cqe = net.execute(0, &mut a, |w| _ = w.send(&[mine.sge(0, 3000)]));
        assert_error(&cqe, Syndrome::RnrRetryExceeded);
        assert_eq!(net.beds[1].e.wire_stats().naks_out, rnr_retry as u64 + 1);
        let waited = rnr_retry as u64 * 1_280_000;
        assert!((waited..waited + 200_000).contains(&(net.now - start)));
        assert_eq!(net.beds[1].state(&b), QpState::ReadyToSend, "the peer is not affected");
    }
    // Retry count 7 means no limit.
    let (mut net, [mut a, mut b], [mine, theirs]) = world(&Link::default());
    net.beds[0].post(&mut a, |w| _ = w.send(&[mine.sge(0, 3000)]).signaled());
    net.run_for(500_000_000);
    assert_eq!(a.send_cq.reader.poll(), None);
    net.beds[1].post_recv(&mut b, &[theirs.sge(0, 4000)]);
    net.run();
    assert_eq!(a.send_cq.reader.poll().unwrap().error, None);
    assert_eq!(b.recv_cq.reader.poll().unwrap().byte_count, 3000);
}

#[test]
fn retransmission_does_not_read_a_destroyed_region() {
    let (mut net, [mut a, _b], [_, theirs]) = world(&Link::default());
    let mine = net.beds[0].mr(PF, a.pd, 8192, ALL);
    net.faults.loss = 10_000;
    net.beds[0].post(&mut a, |w| {
        w.rdma_write(theirs.remote(0), &[mine.sge(0, 100)]).signaled();
    });
    net.turn(0);
    net.beds[0].e.dereg_mr(PF, mine.key).unwrap();
    net.faults.loss = 0;
    net.run();
    assert_error(&a.send_cq.reader.poll().unwrap(), Syndrome::LocalProtection);
    assert_eq!(net.beds[0].e.wire_stats().packets_out, 1);
}

#[test]
fn read_result_for_a_destroyed_region_fails_the_read() {
    let (mut net, [mut a, b], [_, theirs]) = world(&Link::default());
    let mine = net.beds[0].mr(PF, a.pd, 8192, ALL);
    net.beds[0].post(&mut a, |w| {
        w.rdma_read(theirs.remote(0), &[mine.sge(0, 5000)]).signaled();
    });
    net.turn(0);
    net.beds[0].e.dereg_mr(PF, mine.key).unwrap();
    net.run();
    assert_error(&a.send_cq.reader.poll().unwrap(), Syndrome::LocalProtection);
    assert_eq!(net.beds[1].state(&b), QpState::ReadyToSend);
}

/// Encodes a packet to `b` as its peer would send it.
pub(super) fn packet(b: &TestQp, psn: u32, body: Body, payload: &[u8]) -> Vec<u8> {
    let mut out = [0; PACKET_MAX];
    let (qpn, psn) = (b.qpn, Psn::new(psn));
    let packet = Packet { qpn, psn, ack_request: true, solicited: false, body, payload };
    let len = packet.encode(&mut out);
    out[..len].to_vec()
}

#[test]
fn packets_from_other_addresses_are_dropped() {
    let (mut net, [mut a, b], [mine, theirs]) = world(&Link::default());
    let psn = Link::default().psn[0];
    let reth = Reth { at: theirs.remote(0), len: 4 };
    let write = |psn| {
        let body = Body::Write { part: Part::Only, reth: Some(reth), imm: None };
        packet(&b, psn, body, b"evil")
    };
    let (peer, me, stranger) = (address(0, net.v6), address(1, net.v6), [10, 0, 0, 9].into());
    net.inject(1, stranger, &write(psn));
    net.inject(1, me, &write(psn));
    assert_eq!(net.beds[1].e.wire_stats().strangers, 2);
    let nobody = TestQp { qpn: Qpn::new(0x99), ..net.beds[1].pair().0 };
    net.inject(1, peer, &packet(&nobody, psn, Body::Read(reth), &[]));
    net.inject(1, peer, &write(psn)[..20]);
    net.inject(1, peer, &write(psn)[..11]);
    net.inject(1, peer, &[0xff; 5000]);
    let stats = net.beds[1].e.wire_stats();
    assert_eq!((stats.unknown_qp, stats.malformed.iter().sum::<u64>()), (2, 2));
    assert_eq!(theirs.bytes(0, 4), [0; 4]);
    // A QP whose peer is local accepts no packets from the network.
    let (local, _other) = net.beds[1].pair();
    net.inject(1, peer, &packet(&local, 0, Body::Read(reth), &[]));
    assert_eq!(net.beds[1].e.wire_stats().unknown_qp, 3);
    let cqe = net.execute(0, &mut a, |w| _ = w.rdma_read(theirs.remote(0), &[mine.sge(0, 8)]));
    assert_eq!(cqe.error, None, "the connection still works");
}

#[test]
fn malformed_requests_end_the_connection() {
    let psn = Link::default().psn[0];
    type Make = fn(&Mr) -> Vec<(Body, usize)>;
    let cases: [Make; 10] = [
        // A middle or last packet without a first packet.
        |_| vec![(Body::Send { part: Part::Middle, notice: Notice::None }, 1024)],
        |_| vec![(Body::Write { part: Part::Last, reth: None, imm: None }, 8)],
        // A first packet that is not full.
        |_| vec![(Body::Send { part: Part::First, notice: Notice::None }, 1020)],
        // More, or fewer, bytes than the header announces.
        |m| vec![(write_only(m, 9), 8)],
        |m| vec![(write_only(m, 7), 8)],
        |m| vec![(write_first(m, 1024), 1024)],
        |m| {
            vec![
                (write_first(m, 3000), 1024),
                (Body::Write { part: Part::Last, reth: None, imm: None }, 8),
            ]
        },
        // Another request in the middle of a message.
        |m| vec![(write_first(m, 3000), 1024), (Body::Read(Reth { at: m.remote(0), len: 8 }), 0)],
        |m| {
            vec![
                (write_first(m, 3000), 1024),
                (Body::Send { part: Part::Only, notice: Notice::None }, 8),
            ]
        },
        // Longer than the maximum message.
        |m| vec![(Body::Read(Reth { at: m.remote(0), len: u32::MAX }), 0)],
    ];
    for (i, case) in cases.iter().enumerate() {
        let (mut net, [_a, mut b], [_, theirs]) = world(&Link::default());
        net.beds[1].post_recv(&mut b, &[theirs.sge(0, 4000)]);
        net.log = Some(Vec::new());
        for (n, (body, len)) in case(&theirs).into_iter().enumerate() {
            let from = address(0, net.v6);
            net.inject(1, from, &packet(&b, psn + n as u32, body, &vec![0; len]));
        }
        assert_eq!(net.beds[1].state(&b), QpState::Error, "case {i}");
        let log = net.log.take().unwrap();
        let (end, last) = log.last().expect("an answer");
        let says = Packet::parse(last).unwrap();
        let nak = matches!(
            says.body,
            Body::Acknowledge(Aeth { syndrome: Says::Nak(Nak::InvalidRequest), .. })
        );
        assert!(*end == 1 && nak, "case {i}: {says:?}");
    }
}

fn write_only(mr: &Mr, len: u32) -> Body {
    let reth = Some(Reth { at: mr.remote(0), len });
    Body::Write { part: Part::Only, reth, imm: None }
}

fn write_first(mr: &Mr, len: u32) -> Body {
    let reth = Some(Reth { at: mr.remote(0), len });
    Body::Write { part: Part::First, reth, imm: None }
}

#[test]
fn reads_beyond_the_outstanding_limit_are_rejected() {
    let (mut net, [_a, b], [_, theirs]) = world(&Link { rd_atomic: 2, ..Link::default() });
    let psn = Link::default().psn[0];
    let source = std::net::SocketAddr::new(address(0, net.v6), PORT);
    for n in 0..3 {
        let body = Body::Read(Reth { at: theirs.remote(0), len: 8 });
        let bytes = packet(&b, psn + n, body, &[]);
        // The far end is not polled in between, so no READ is answered.
        net.drop_in(1, source, &bytes);
    }
    assert_eq!(net.beds[1].state(&b), QpState::Error);
    net.log = Some(Vec::new());
    net.turn(1);
    let log = net.log.take().unwrap();
    assert_eq!(log.len(), 3, "two READ responses, then a NAK");
}

#[test]
fn responses_without_a_request_are_ignored() {
    let (mut net, [mut a, _b], [mine, theirs]) = world(&Link::default());
    net.beds[0].post(&mut a, |w| {
        w.rdma_read(theirs.remote(0), &[mine.sge(0, 3000)]).signaled();
    });
    net.turn(0);
    let from = address(1, net.v6);
    let first = Link::default().psn[0];
    let ack = Aeth { syndrome: Says::Ack(31), msn: 1 };
    let nak = |nak| Aeth { syndrome: Says::Nak(nak), msn: 1 };
    let bodies = [
        Body::Acknowledge(ack),
        Body::AtomicAcknowledge { aeth: ack, old: 7 },
        Body::Acknowledge(nak(Nak::RemoteAccess)),
        Body::Acknowledge(nak(Nak::Sequence)),
        Body::Acknowledge(Aeth { syndrome: Says::Rnr(31), msn: 1 }),
        Body::ReadResponse { part: Part::Only, aeth: Some(ack) },
    ];
    for psn in [first - 1, first + 3, first + 1000, first.wrapping_add(1 << 23)] {
        for body in bodies {
            let len = if matches!(body, Body::ReadResponse { .. }) { 1024 } else { 0 };
            net.inject(0, from, &packet(&a, psn, body, &vec![0xee; len]));
        }
    }
    // The expected PSN, but a response of the wrong kind or length.
    for (body, len) in [(bodies[1], 0), (bodies[5], 1020)] {
        net.inject(0, from, &packet(&a, first, body, &vec![0xee; len]));
    }
    assert_eq!(mine.bytes(0, 3000), [0; 3000]);
    net.run();
    assert_eq!(a.send_cq.reader.poll().unwrap().error, None);
}

#[test]
fn connections_are_counted_and_released() {
    let mut net = Net::new(8);
    let limits = FunctionLimits { remote_peers: 1, ..FunctionLimits::default() };
    let f = net.beds[0].e.add_function(limits).unwrap();
    let pd = net.beds[0].pd(f);
    let shape = net.beds[0].shape(f, pd);
    let (one, two) = (net.beds[0].qp(&shape), net.beds[0].qp(&shape));
    let link = Link::default();
    let peers = [net.peer(0, Qpn::new(70), &link), net.peer(0, Qpn::new(71), &link)];
    let e = &mut net.beds[0].e;
    let mut rtr = |q: &TestQp, peer: verbs::RemotePeer| {
        e.modify_qp(f, q.qpn, QpChange::Reset).unwrap();
        e.modify_qp(f, q.qpn, QpChange::Init).unwrap();
        e.modify_qp(f, q.qpn, QpChange::ReadyToReceive { peer: peer.into() })
    };
    assert_eq!(rtr(&one, peers[0]), Ok(()));
    assert!(matches!(rtr(&two, peers[1]), Err(Error::Limit { .. })));
    assert!(matches!(rtr(&two, peers[0]), Err(Error::PeerTaken { .. })));
    assert_eq!(rtr(&one, peers[1]), Ok(()), "the reset has released the connection");
    net.beds[0].e.destroy_qp(f, one.qpn).unwrap();
    let e = &mut net.beds[0].e;
    e.modify_qp(f, two.qpn, QpChange::Init).unwrap_or(());
    assert_eq!(e.modify_qp(f, two.qpn, QpChange::ReadyToReceive { peer: peers[1].into() }), Ok(()));
    e.remove_function(f);
    assert_eq!(e.next_timeout(), None);
    // An engine without a wire rejects remote peers, and so does a function whose limit of remote
    // peers is 0.
    let mut bed = Bed::with(Limits::default());
    let (a, _b) = bed.pair();
    bed.e.modify_qp(PF, a.qpn, QpChange::Reset).unwrap();
    bed.e.modify_qp(PF, a.qpn, QpChange::Init).unwrap();
    let refused = bed.e.modify_qp(PF, a.qpn, QpChange::ReadyToReceive { peer: peers[0].into() });
    assert!(matches!(refused, Err(Error::NoWire { .. })), "{refused:?}");
}

/// The network duplicates a READ long after its response was received, and the key has become
/// invalid since.
#[test]
fn late_duplicate_read_with_invalid_key_is_harmless() {
    let (mut net, [mut a, b], [mine, theirs]) = world(&Link::default());
    let other = net.beds[1].mr(PF, b.pd, 4096, ALL);
    for len in [8, 5000] {
        let old = net.beds[1].mr(PF, b.pd, 8192, ALL);
        net.log = Some(Vec::new());
        let read = |w: &mut Builder| _ = w.rdma_read(old.remote(0), &[mine.sge(0, len)]);
        assert_eq!(net.execute(0, &mut a, read).error, None);
        let log = net.log.take().unwrap();
        let (_, request) = log.into_iter().find(|(end, _)| *end == 0).expect("a request");
        net.beds[1].e.dereg_mr(PF, old.key).unwrap();
        net.inject(1, address(0, net.v6), &request);
        net.run();
        let add = |w: &mut Builder| _ = w.fetch_add(other.remote(0), 1, mine.sge(0, 8));
        assert_eq!(net.execute(0, &mut a, add).error, None, "{len} bytes");
    }
    let _ = theirs;
}

/// The response of a READ is lost, and the key becomes invalid before the retransmission: the READ
/// fails.
#[test]
fn unanswered_read_whose_key_becomes_invalid_fails() {
    let (mut net, [mut a, _b], [mine, theirs]) = world(&Link::default());
    net.beds[0].post(&mut a, |w| {
        w.rdma_read(theirs.remote(0), &[mine.sge(0, 8)]).signaled();
    });
    net.turn(0);
    net.faults.loss = 10_000;
    // The request arrives, its response is lost.
    net.pass();
    net.faults.loss = 0;
    net.beds[1].e.dereg_mr(PF, theirs.key).unwrap();
    net.run();
    let cqe = a.send_cq.reader.poll().expect("a completion");
    assert_eq!(cqe.error.map(|e| e.syndrome), Some(Syndrome::RemoteAccess as u8));
}
