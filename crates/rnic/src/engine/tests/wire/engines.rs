//! Regions with an engine, accessed through packets.

use super::*;
use crate::engine::tests::engines::{ANSWER, COMMAND, DATA, PAGE, Region, TAG, register};
use verbs::cqe::{self, Syndrome};
use verbs::{PathMtu, QpState};

/// Two connected QPs, memory of the near end, and a region with an engine at the far end, all of
/// which the far QP's peer may access.
fn world(seed: u64, faults: Faults) -> (Net, [TestQp; 2], Mr, Region) {
    let mut net = Net::new(seed);
    let qps = net.pair(&Link { mtu: PathMtu::Mtu256, ..Link::default() });
    let mine = net.beds[0].mr(PF, qps[0].pd, 64 * PAGE, ALL);
    let region = register(&mut net.beds[1], PF, qps[1].pd, 64);
    net.beds[1].e.modify_qp(PF, qps[1].qpn, QpChange::Tag { tag: TAG }).unwrap();
    net.faults = faults;
    (net, qps, mine, region)
}

/// Many repeated packets of every kind.
const FAULTY: Faults = Faults { loss: 500, duplicates: 1000, delays: 1000, spoilt: 100 };

#[test]
fn remote_commands_act_before_the_next_request() {
    let mut repeated = 0;
    for (seed, faults) in [(1, Faults::default()), (2, FAULTY), (3, FAULTY)] {
        let (mut net, [mut a, _b], mine, region) = world(seed, faults);
        for round in 0..40u8 {
            let page = 2 + round as usize % 8;
            mine.mem.write(0, &[round; PAGE]);
            let wqes: [&dyn Fn(&mut Builder); 4] = [
                &|w| _ = w.rdma_write(region.remote(DATA), &[mine.sge(0, PAGE)]),
                &|w| _ = w.rdma_write_inline(region.remote(COMMAND), &[page as u8; 64]),
                &|w| _ = w.rdma_read(region.remote(ANSWER), &[mine.sge(PAGE, 64)]),
                &|w| {
                    let to = mine.sge(2 * PAGE, PAGE);
                    w.rdma_read(region.remote(page * PAGE), &[to]).signaled();
                },
            ];
            for fill in wqes {
                net.beds[0].write_wqe(&mut a, fill);
            }
            net.beds[0].e.doorbell(a.qpn, a.producer);
            net.run();
            assert_eq!(a.send_cq.reader.poll().expect("a completion").error, None);
            assert_eq!(region.ended(), [(TAG, DATA, PAGE), (TAG, COMMAND, 64)], "round {round}");
            assert_eq!(mine.bytes(PAGE, 64), [2; 64], "the answer is of this command");
            assert_eq!(mine.bytes(2 * PAGE, PAGE), [round; PAGE]);
        }
        repeated += net.beds[1].e.wire_stats().duplicates;
    }
    assert!(repeated > 100, "only {repeated} packets were repeated");
}

#[test]
fn each_remote_write_ends_once() {
    for (seed, faults) in [(4, Faults::default()), (5, FAULTY), (6, FAULTY)] {
        let (mut net, [mut a, mut b], mine, region) = world(seed, faults);
        let lengths = [1, 255, 256, 257, 1000, 3 * PAGE];
        for round in 0..20 {
            let mut wants = Vec::new();
            for (i, len) in lengths.into_iter().enumerate() {
                let at = 100 * i + round;
                wants.push((TAG, at, len));
                let imm = i % 2 == 0;
                if imm {
                    net.beds[1].post_recv(&mut b, &[]);
                }
                net.beds[0].post(&mut a, |w| {
                    let (to, from) = (region.remote(at), [mine.sge(0, len)]);
                    match imm {
                        true => w.rdma_write_imm(to, &from, i as u32),
                        false => w.rdma_write(to, &from),
                    };
                    w.signaled();
                });
            }
            // A WRITE without bytes never reaches the engine.
            net.beds[0].post(&mut a, |w| _ = w.rdma_write(region.remote(0), &[]).signaled());
            net.run();
            for _ in 0..=lengths.len() {
                assert_eq!(a.send_cq.reader.poll().expect("a completion").error, None);
            }
            assert_eq!(region.ended(), wants);
            for imm in [0, 2, 4] {
                let cqe = b.recv_cq.reader.poll().expect("a receive");
                assert_eq!((cqe.opcode, cqe.imm), (cqe::opcode::RESP_WR_IMM, imm));
            }
        }
    }
}

/// The last packet of a WRITE with immediate is refused until a receive WQE is posted.
#[test]
fn remote_write_without_a_receive_has_not_ended() {
    let (mut net, [mut a, mut b], mine, region) = world(7, Faults::default());
    net.beds[0].post(&mut a, |w| {
        w.rdma_write_imm(region.remote(0), &[mine.sge(0, PAGE)], 1).signaled();
    });
    net.run_for(10_000_000);
    assert_eq!((region.ended(), a.send_cq.reader.poll()), (vec![], None));
    net.beds[1].post_recv(&mut b, &[]);
    net.run();
    assert_eq!(region.ended(), [(TAG, 0, PAGE)]);
    assert_eq!(a.send_cq.reader.poll().expect("a completion").error, None);
}

#[test]
fn engine_is_asked_for_each_packet() {
    let (mut net, [mut a, _b], mine, region) = world(8, Faults::default());
    let packets = |calls: &[(u64, usize, usize)]| calls.iter().map(|call| call.2).sum::<usize>();
    let (len, start) = (PAGE, 100);
    let cqe = net.execute(0, &mut a, |w| {
        w.rdma_write(region.remote(start), &[mine.sge(0, len)]);
    });
    assert_eq!(cqe.error, None);
    let (reads, writes) = region.asked();
    assert_eq!((reads.len(), writes[0]), (0, (TAG, start, len)), "the whole WRITE comes first");
    assert_eq!((writes.len() - 1, packets(&writes[1..])), (len / 256, len));
    let cqe = net.execute(0, &mut a, |w| {
        w.rdma_read(region.remote(start), &[mine.sge(0, len)]);
    });
    assert_eq!(cqe.error, None);
    let (reads, writes) = region.asked();
    assert_eq!((writes.len(), reads[0]), (0, (TAG, start, len)), "the whole READ comes first");
    assert!(packets(&reads[1..]) >= len, "{reads:?}");
}

/// The engine allows the whole transfer and its first packets, and then nothing.
#[test]
fn remote_transfer_ends_when_the_engine_refuses_the_rest() {
    for write in [false, true] {
        let (mut net, [mut a, b], mine, region) = world(9, Faults::default());
        let len = 60 * PAGE;
        let (from, to) = if write { (&mine.mem, &region.mem) } else { (&region.mem, &mine.mem) };
        from.write(0, &vec![1; len]);
        region.state.lock().unwrap().calls_left = 3;
        let cqe = net.execute(0, &mut a, |w| {
            let (there, here) = (region.remote(0), [mine.sge(0, len)]);
            match write {
                true => w.rdma_write(there, &here),
                false => w.rdma_read(there, &here),
            };
        });
        assert_error(&cqe, Syndrome::RemoteAccess);
        let mut bytes = vec![0; len];
        to.read(0, &mut bytes);
        assert_eq!((bytes[0], bytes[len - 1]), (1, 0), "a WRITE: {write}");
        let (reads, writes) = region.asked();
        let moved: usize = reads.iter().chain(&writes).skip(1).take(2).map(|call| call.2).sum();
        assert!(bytes[..moved].iter().all(|b| *b == 1) && bytes[moved..].iter().all(|b| *b == 0));
        assert_eq!(region.ended(), []);
        for (end, q) in [(0, &a), (1, &b)] {
            assert_eq!(net.beds[end].state(q), QpState::Error);
        }
    }
}

#[test]
fn remote_atomics_and_foreign_pages_are_refused() {
    type Fill = fn(&mut Builder, &Region, &Mr);
    let cases: [Fill; 4] = [
        |w, r, m| _ = w.fetch_add(r.remote(0), 1, m.sge(0, 8)),
        |w, r, m| _ = w.compare_swap(r.remote(0), 0, 1, m.sge(0, 8)),
        |w, r, m| _ = w.rdma_write(r.remote(5 * PAGE - 1), &[m.sge(0, 2)]),
        |w, r, m| _ = w.rdma_read(r.remote(6 * PAGE - 1), &[m.sge(0, 2)]),
    ];
    for fill in cases {
        let (mut net, [mut a, b], mine, region) = world(10, Faults::default());
        region.give(5, TAG + 1);
        let cqe = net.execute(0, &mut a, |w| fill(w, &region, &mine));
        assert_error(&cqe, Syndrome::RemoteAccess);
        assert_eq!(net.beds[1].state(&b), QpState::Error);
        assert_eq!((region.bytes(0, 8), region.ended()), (vec![0; 8], vec![]));
    }
}
