//! Order of execution and completion in a send queue over the network.

use super::*;
use crate::engine::AckDelay;
use verbs::Access;
use verbs::wqe::{FM_FENCE, opcode};

#[test]
fn local_operations_complete_in_order_with_remote_ones() {
    let mut net = Net::new(1);
    let [mut a, b] = net.pair(&Link::default());
    let mine = net.beds[0].mr(PF, a.pd, 8192, ALL);
    let theirs = net.beds[1].mr(PF, b.pd, 8192, ALL);
    let wqes: [fn(&mut Builder, &Mr, &Mr); 5] = [
        |w, m, t| _ = w.rdma_read(t.remote(0), &[m.sge(0, 5000)]),
        |w, _, _| _ = w.nop(),
        |w, m, t| _ = w.rdma_write(t.remote(0), &[m.sge(0, 8)]),
        |w, m, t| _ = w.fetch_add(t.remote(8), 1, m.sge(16, 8)),
        |w, _, _| _ = w.nop(),
    ];
    for fill in wqes {
        net.beds[0].post(&mut a, |w| {
            fill(w, &mine, &theirs);
            w.signaled();
        });
    }
    net.turn(0);
    assert_eq!(a.send_cq.reader.poll(), None, "the NOP completes after the earlier WQEs");
    assert_eq!(net.beds[0].e.query_qp(PF, a.qpn).unwrap().progress.send_consumer, a.producer);
    net.run();
    let seen: Vec<u8> =
        std::iter::from_fn(|| a.send_cq.reader.poll()).map(|c| c.wqe_opcode).collect();
    let want = [opcode::RDMA_READ, 0, opcode::RDMA_WRITE, opcode::ATOMIC_FA, 0];
    assert_eq!(seen, want);
}

#[test]
fn fence_waits_for_reads_and_invalidation_for_all_requests() {
    let mut net = Net::new(2);
    let [mut a, b] = net.pair(&Link::default());
    let mine = net.beds[0].mr(PF, a.pd, 8192, ALL);
    let theirs = net.beds[1].mr(PF, b.pd, 8192, ALL);
    let packets = |net: &Net| net.beds[0].e.wire_stats().packets_out;
    net.beds[0].post(&mut a, |w| _ = w.rdma_read(theirs.remote(0), &[mine.sge(0, 8)]));
    net.beds[0].post(&mut a, |w| {
        w.rdma_write(theirs.remote(0), &[mine.sge(0, 8)]).flags(FM_FENCE).signaled();
    });
    net.turn(0);
    assert_eq!(packets(&net), 1);
    net.run();
    assert_eq!((packets(&net), a.send_cq.reader.poll().unwrap().error), (2, None));
    let window = net.beds[0].e.alloc_mw(PF, a.pd, Default::default()).unwrap();
    net.beds[0].post(&mut a, |w| _ = w.rdma_write(theirs.remote(0), &[mine.sge(0, 8)]));
    let umr =
        verbs::wqe::Umr::bind(window, 9, a.qpn, Access::REMOTE_READ, mine.key, mine.mem.addr(), 64);
    net.beds[0].post(&mut a, |w| _ = w.umr(&umr).signaled());
    net.turn(0);
    assert!(!net.beds[0].e.query_key(PF, window.index()).unwrap().bound);
    net.run();
    assert!(net.beds[0].e.query_key(PF, window.index()).unwrap().bound);
    assert_eq!(a.send_cq.reader.poll().unwrap().error, None);
}

/// A managed pair as on a server: WAIT detects the request, and the chain sends the reply.
#[test]
fn chain_serves_a_client_of_another_host() {
    for loss in [0, 1000] {
        let mut net = Net::new(3 + loss as u64);
        net.faults.loss = loss;
        let [mut client, mut server] = net.pair_of(&Link::default(), |end, s| {
            if end == 1 {
                s.managed = true;
                s.recv = Some(true);
                s.ignore_overrun = true;
            }
        });
        let mine = net.beds[0].mr(PF, client.pd, 8192, ALL);
        let theirs = net.beds[1].mr(PF, server.pd, 8192, ALL);
        // 16 times: wait for a request, then write its bytes back.
        for n in 0..16u32 {
            let wait = server.recv_cq.cqn;
            net.beds[1].write_wqe(&mut server, |w| _ = w.wait(wait, n));
            net.beds[1].write_wqe(&mut server, |w| {
                let at = n as usize * 64;
                w.rdma_write(mine.remote(4096 + at), &[theirs.sge(at, 64)]);
            });
        }
        for n in 0..16 {
            put_recv(&server.recv_ring, n * STRIDE as usize, &[theirs.sge(n * 64, 64)]);
        }
        net.beds[1].e.enable_send(PF, server.qpn, server.producer).unwrap();
        net.turn(1);
        assert_eq!(net.beds[1].e.wire_stats().packets_out, 0, "the chain waits");
        for n in 0..16u16 {
            mine.mem.write(0, &[n as u8 + 1; 64]);
            net.beds[0].post(&mut client, |w| _ = w.send(&[mine.sge(0, 64)]).signaled());
            net.run_for(1_000_000);
            assert_eq!(mine.bytes(4096 + n as usize * 64, 64), [0; 64], "no receive was enabled");
            net.beds[1].e.enable_recv(PF, server.qpn, n + 1).unwrap();
            net.run();
            assert_eq!(client.send_cq.reader.poll().unwrap().error, None);
            assert_eq!(mine.bytes(4096 + n as usize * 64, 64), [n as u8 + 1; 64]);
        }
    }
}

#[test]
fn messages_of_two_peers_fill_one_shared_queue() {
    let mut net = Net::new(5);
    net.faults.delays = 3000;
    let pd = net.beds[1].pd(PF);
    let (ring, record) = (memory(16 * 64), memory(8));
    let spec = crate::spec::RecvSpec {
        ring: ring.clone(),
        entries: 16,
        stride: 64,
        record: record.clone(),
        initial_consumer: 0,
    };
    let srqn = net.beds[1].e.create_srq(PF, pd, spec).unwrap();
    let link = |n: u32| Link { psn: [n, n + 5], ..Link::default() };
    let shape = |end: usize, s: &mut Shape| {
        if end == 1 {
            (s.pd, s.srq) = (pd, Some(srqn));
        }
    };
    let mut pairs = [net.pair_of(&link(1), shape), net.pair_of(&link(2), shape)];
    let theirs = net.beds[1].mr(PF, pd, 16 << 12, ALL);
    for n in 0..16 {
        put_recv(&ring, n * 64, &[theirs.sge(n << 12, 4096)]);
    }
    record.store_be32(0, 12);
    let mine = [0, 1].map(|i| net.beds[0].mr(PF, pairs[i].each_ref()[0].pd, 4096, ALL));
    for (i, pair) in pairs.iter_mut().enumerate() {
        mine[i].mem.write(0, &[i as u8 + 1; 4096]);
        for n in 0..6 {
            net.beds[0].post(&mut pair[0], |w| {
                w.send(&[mine[i].sge(0, 4000 - n)]).signaled();
            });
        }
    }
    net.run();
    let mut used = 0u32;
    for (i, pair) in pairs.iter_mut().enumerate() {
        for n in 0..6 {
            assert_eq!(pair[0].send_cq.reader.poll().unwrap().error, None);
            let cqe = pair[1].recv_cq.reader.poll().unwrap();
            assert_eq!((cqe.error, cqe.byte_count), (None, 4000 - n));
            let at = cqe.wqe_counter as usize;
            assert_eq!(
                theirs.bytes(at << 12, 4000 - n as usize),
                vec![i as u8 + 1; 4000 - n as usize]
            );
            used |= 1 << at;
        }
    }
    assert_eq!(used, 0xfff, "each receive WQE was used once");
    // If a message breaks off, its receive WQE is flushed with the QP.
    record.store_be32(0, 13);
    net.beds[0].post(&mut pairs[0][0], |w| _ = w.send(&[mine[0].sge(0, 4000)]));
    net.turn(0);
    net.faults.loss = 10_000;
    net.pass();
    net.run_for(1_000);
    net.beds[1].e.modify_qp(PF, pairs[0][1].qpn, QpChange::Error).unwrap();
    net.run_for(1_000);
    let cqe = pairs[0][1].recv_cq.reader.poll();
    assert!(cqe.is_some(), "the receive WQE completes: {cqe:?}");
}

#[test]
fn sending_resumes_when_the_full_outbox_is_cleared() {
    let mut limits = wired();
    limits.wire.as_mut().unwrap().outbox_bytes = 1;
    let mut net = Net::with(6, limits);
    let [mut a, b] = net.pair(&Link::default());
    let mine = net.beds[0].mr(PF, a.pd, 64 << 10, ALL);
    let theirs = net.beds[1].mr(PF, b.pd, 64 << 10, ALL);
    (0..64).for_each(|i| mine.mem.write(i << 10, &[i as u8; 1024]));
    net.beds[0].post(&mut a, |w| {
        w.rdma_write(theirs.remote(0), &[mine.sge(0, 64 << 10)]).signaled();
    });
    assert!(net.beds[0].e.poll(0, 64) > 0);
    let made = net.beds[0].e.outbox().len();
    assert!(made >= 1 && net.beds[0].e.poll(0, 64) > 0, "more packets follow");
    assert_eq!(net.beds[0].e.outbox().len(), made);
    net.run();
    assert_eq!(a.send_cq.reader.poll().unwrap().error, None);
    assert_eq!(theirs.bytes(0, 64 << 10), mine.bytes(0, 64 << 10));
}

/// Opcodes of the packets that an end has sent since `net.log` was emptied.
fn sent_by(net: &mut Net, end: usize) -> Vec<u8> {
    let log = net.log.replace(Vec::new()).unwrap_or_default();
    log.iter().filter(|(by, _)| *by == end).map(|(_, bytes)| bytes[0]).collect()
}

const SEND_ONLY: u8 = 0x04;
const ACKNOWLEDGE: u8 = 0x11;

#[test]
fn lone_ack_is_sent_behind_requests() {
    let mut net = Net::new(3);
    let [mut a, mut b] = net.pair(&Link::default());
    let mine = net.beds[0].mr(PF, a.pd, 8192, ALL);
    let theirs = net.beds[1].mr(PF, b.pd, 8192, ALL);
    net.beds[0].post_recv(&mut a, &[mine.sge(4096, 64)]);
    net.beds[1].post_recv(&mut b, &[theirs.sge(4096, 64)]);
    net.beds[0].post(&mut a, |w| _ = w.send(&[mine.sge(0, 64)]).signaled());
    net.turn(0);
    net.beds[1].post(&mut b, |w| _ = w.nop());
    net.beds[1].post(&mut b, |w| _ = w.send(&[theirs.sge(0, 64)]).signaled());
    net.log = Some(Vec::new());
    // The doorbell of b's SEND precedes the packet, so one poll executes the SEND and sends the
    // acknowledgement.
    net.pass();
    assert_eq!(sent_by(&mut net, 1), [SEND_ONLY, ACKNOWLEDGE]);
    net.run();
    assert_eq!(a.send_cq.reader.poll().unwrap().error, None);
    assert_eq!(b.send_cq.reader.poll().unwrap().error, None);
    // An unlimited number of local operations does not delay the acknowledgement.
    net.beds[1].post_recv(&mut b, &[theirs.sge(4096, 64)]);
    for _ in 0..20 {
        net.beds[1].post(&mut b, |w| _ = w.nop());
    }
    net.execute(0, &mut a, |w| _ = w.send(&[mine.sge(0, 64)]));
}

#[test]
fn acks_of_short_messages_are_delayed_by_policy() {
    let mut net = Net::new(4);
    let [mut a, mut b] = net.pair(&Link::default());
    let mine = net.beds[0].mr(PF, a.pd, 8192, ALL);
    let theirs = net.beds[1].mr(PF, b.pd, 8192, ALL);
    let arrive = |net: &mut Net, a: &mut TestQp, b: &mut TestQp| {
        net.beds[1].post_recv(b, &[theirs.sge(4096, 64)]);
        net.beds[0].post(a, |w| _ = w.send(&[mine.sge(0, 64)]).signaled());
        net.deliver();
        b.recv_cq.reader.poll().expect("a receive");
    };
    net.beds[1].e.delay_acks(AckDelay::All);
    net.log = Some(Vec::new());
    (0..4).for_each(|_| arrive(&mut net, &mut a, &mut b));
    assert_eq!((sent_by(&mut net, 1), a.send_cq.reader.poll()), (vec![], None));
    // More than a few packets are acknowledged at once.
    arrive(&mut net, &mut a, &mut b);
    assert_eq!(sent_by(&mut net, 1), [ACKNOWLEDGE]);
    (0..5).for_each(|_| assert_eq!(a.send_cq.reader.poll().unwrap().error, None));
    // A request of the end that delays the acknowledgement is sent before it; the delay continues.
    arrive(&mut net, &mut a, &mut b);
    net.beds[0].post_recv(&mut a, &[mine.sge(4096, 64)]);
    net.beds[1].post(&mut b, |w| _ = w.send(&[theirs.sge(0, 64)]).signaled());
    net.deliver();
    assert_eq!(sent_by(&mut net, 1), [SEND_ONLY]);
    // The port ends the delay.
    assert!(net.beds[1].e.delay_acks(AckDelay::None), "one ACK is delayed");
    assert!(!net.beds[1].e.delay_acks(AckDelay::None), "no ACK is delayed");
    net.deliver();
    assert_eq!(sent_by(&mut net, 1), [ACKNOWLEDGE]);
    assert_eq!(a.send_cq.reader.poll().unwrap().error, None);
    // READ responses and NAKs are not delayed.
    net.beds[1].e.delay_acks(AckDelay::All);
    let cqe = net.execute(0, &mut a, |w| _ = w.rdma_read(theirs.remote(0), &[mine.sge(0, 64)]));
    assert_eq!(cqe.error, None);
    let cqe =
        net.execute(0, &mut a, |w| _ = w.rdma_write(theirs.remote(1 << 30), &[mine.sge(0, 64)]));
    assert!(cqe.error.is_some());
}

#[test]
fn acks_are_piggybacked_in_request_response_traffic() {
    let mut net = Net::new(5);
    let [mut a, mut b] = net.pair(&Link::default());
    let mine = net.beds[0].mr(PF, a.pd, 8192, ALL);
    let theirs = net.beds[1].mr(PF, b.pd, 8192, ALL);
    let hold = |net: &mut Net| {
        let released = net.beds[1].e.delay_acks(AckDelay::Piggyback);
        net.deliver();
        released
    };
    let mut exchange = |net: &mut Net, bytes: usize, answers: bool| {
        net.beds[1].post_recv(&mut b, &[theirs.sge(4096, 4096)]);
        net.beds[0].post(&mut a, |w| _ = w.send(&[mine.sge(0, bytes)]).signaled());
        net.deliver();
        b.recv_cq.reader.poll().expect("a receive");
        let arrived = net.now;
        if answers {
            net.beds[0].post_recv(&mut a, &[mine.sge(4096, 64)]);
            net.beds[1].post(&mut b, |w| _ = w.send(&[theirs.sge(0, 64)]));
            net.deliver();
            a.recv_cq.reader.poll().expect("an answer");
        }
        let ended = std::iter::from_fn(|| a.send_cq.reader.poll());
        (arrived, sent_by(net, 1), ended.inspect(|cqe| assert_eq!(cqe.error, None)).count())
    };
    hold(&mut net);
    net.log = Some(Vec::new());
    // No piggybacking before the traffic pattern is detected.
    for _ in 0..4 {
        let (_, sent, ended) = exchange(&mut net, 64, true);
        assert_eq!((sent, ended), (vec![ACKNOWLEDGE, SEND_ONLY], 1));
    }
    // After half of the maximum delay, or for many packets, the acknowledgement is sent with any
    // request.
    for _ in 0..3 {
        let (first, sent, _) = exchange(&mut net, 64, true);
        assert_eq!(sent, [SEND_ONLY]);
        for all in 2.. {
            let (arrived, sent, ended) = exchange(&mut net, 64, true);
            if arrived - first >= 50_000 {
                assert_eq!((sent, ended), (vec![SEND_ONLY, ACKNOWLEDGE], all));
                break;
            }
            assert_eq!((sent, ended), (vec![SEND_ONLY], 0));
        }
        let (_, sent, _) = exchange(&mut net, 4096, true);
        assert_eq!(sent, [SEND_ONLY]);
        let (_, sent, ended) = exchange(&mut net, 4096, true);
        assert_eq!((sent, ended), (vec![SEND_ONLY, ACKNOWLEDGE], 2));
    }
    // Without a response to piggyback on, the acknowledgement is sent after the maximum delay, and
    // later ones are not delayed.
    let (_, sent, _) = exchange(&mut net, 64, false);
    assert!(sent.is_empty());
    net.now += 99_000;
    net.turn(1);
    assert!(!hold(&mut net));
    net.now += 1_000;
    net.turn(1);
    assert!(hold(&mut net));
    assert!(!hold(&mut net));
    assert_eq!(sent_by(&mut net, 1), [ACKNOWLEDGE]);
    let (_, sent, ended) = exchange(&mut net, 64, false);
    assert_eq!((sent, ended), (vec![ACKNOWLEDGE], 2));
}

#[test]
fn duplicates_are_acknowledged_at_once() {
    let mut net = Net::new(6);
    let [mut a, mut b] = net.pair(&Link::default());
    let mine = net.beds[0].mr(PF, a.pd, 8192, ALL);
    let theirs = net.beds[1].mr(PF, b.pd, 8192, ALL);
    net.beds[1].e.delay_acks(AckDelay::All);
    net.beds[1].post_recv(&mut b, &[theirs.sge(4096, 64)]);
    net.beds[0].post(&mut a, |w| _ = w.send(&[mine.sge(0, 64)]).signaled());
    net.log = Some(Vec::new());
    net.deliver();
    assert_eq!((sent_by(&mut net, 1), a.send_cq.reader.poll()), (vec![], None));
    net.run();
    assert_eq!(net.beds[1].e.wire_stats().duplicates, 1);
    assert_eq!(sent_by(&mut net, 1), [ACKNOWLEDGE]);
    assert_eq!(a.send_cq.reader.poll().unwrap().error, None);
}
