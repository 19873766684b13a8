//! Building blocks of chains: managed queues, WAIT, SEND_EN, RECV_EN, WQEs that patch WQEs; and a
//! small chain that serves requests and re-arms itself across every wrap-around of its indices.

use super::*;
use crate::limits::{FunctionLimits, Limits};
use verbs::wqe::{Builder, Remote, offset, opcode};
use verbs::{Access, Pdn, QpChange, QpState};

/// Registers the send ring of `q` as a region of `pd`.
fn ring_mr(bed: &mut Bed, q: &TestQp, pd: Pdn, access: Access) -> Mr {
    let key = bed.e.reg_mr(PF, pd, q.ring.clone(), q.ring.addr(), access).unwrap();
    Mr { mem: q.ring.clone(), key }
}

#[test]
fn wait_blocks_until_the_count_is_reached() {
    let mut bed = Bed::new();
    let (mut a, _) = bed.pair();
    let (mut c, _) = bed.pair();
    let cqn = c.send_cq.cqn;
    bed.post(&mut a, |w| _ = w.wait(cqn, 1).signaled());
    bed.post(&mut a, |w| _ = w.nop().signaled());
    assert_eq!((bed.run(), bed.e.has_ready(), bed.e.next_timeout()), (0, false, None));
    bed.execute(&mut c, |w| _ = w.nop());
    assert_eq!(a.send_cq.reader.poll(), None, "completion 0 is not completion 1");
    bed.execute(&mut c, |w| _ = w.nop());
    assert_eq!(a.send_cq.reader.poll().unwrap().wqe_opcode, opcode::WAIT);
    assert_eq!(a.send_cq.reader.poll().unwrap().wqe_opcode, opcode::NOP);
    // A WAIT for an old completion succeeds at once.
    assert_eq!(bed.execute(&mut a, |w| _ = w.wait(cqn, 0)).error, None);
    bed.post(&mut a, |w| _ = w.wait(cqn, 2).signaled());
    bed.run();
    assert_eq!(a.send_cq.reader.poll(), None);
}

#[test]
fn wait_compares_in_24_bits_across_the_wrap() {
    let mut bed = Bed::new();
    let pd = bed.pd(PF);
    let shape = Shape { initial_count: 0xff_ffff, ..bed.shape(PF, pd) };
    let (mut c, d) = (bed.qp(&shape), bed.qp(&shape));
    bed.connect(&c, &d);
    let cqn = c.send_cq.cqn;
    let (mut a, _) = bed.pair();
    for (index, passes) in [(0xff_fffe, true), (0xff_ffff, false)] {
        bed.post(&mut a, |w| _ = w.wait(cqn, index).signaled());
        bed.run();
        assert_eq!(a.send_cq.reader.poll().is_some(), passes);
    }
    bed.execute(&mut c, |w| _ = w.nop());
    assert!(a.send_cq.reader.poll().is_some());
    bed.post(&mut a, |w| _ = w.wait(cqn, 0).signaled());
    bed.run();
    assert_eq!(a.send_cq.reader.poll(), None);
    bed.execute(&mut c, |w| _ = w.nop());
    assert!(a.send_cq.reader.poll().is_some());
}

#[test]
fn several_qps_wait_for_one_cq() {
    let mut bed = Bed::new();
    let (mut c, _) = bed.pair();
    let cqn = c.send_cq.cqn;
    let mut waiting: Vec<TestQp> = (0..4).map(|_| bed.pair().0).collect();
    for (i, q) in waiting.iter_mut().enumerate() {
        bed.post(q, |w| _ = w.wait(cqn, i as u32 / 2).signaled());
    }
    bed.run();
    bed.e.destroy_qp(PF, waiting.remove(0).qpn).unwrap();
    bed.e.modify_qp(PF, waiting[1].qpn, QpChange::Reset).unwrap();
    bed.execute(&mut c, |w| _ = w.nop());
    bed.execute(&mut c, |w| _ = w.nop());
    let passed: Vec<bool> = waiting.iter_mut().map(|q| q.send_cq.reader.poll().is_some()).collect();
    assert_eq!(passed, [true, false, true]);
}

#[test]
fn destroying_a_cq_fails_its_waiters() {
    let mut bed = Bed::new();
    let (mut a, _) = bed.pair();
    let shape = bed.shape(PF, a.pd);
    let cq = bed.cq(&shape);
    bed.post(&mut a, |w| _ = w.wait(cq.cqn, 0));
    bed.run();
    bed.e.destroy_cq(PF, cq.cqn).unwrap();
    bed.run();
    let cqe = a.send_cq.reader.poll().unwrap();
    assert_error(&cqe, verbs::cqe::Syndrome::LocalQpOperation);
}

#[test]
fn managed_queue_executes_up_to_the_send_en_limit() {
    let mut bed = Bed::new();
    let pd = bed.pd(PF);
    let shape = bed.shape(PF, pd);
    let (mut boss, boss_peer) = (bed.qp(&shape), bed.qp(&shape));
    bed.connect(&boss, &boss_peer);
    let managed = Shape { managed: true, ..shape };
    let (mut m, m_peer) = (bed.qp(&managed), bed.qp(&managed));
    bed.connect(&m, &m_peer);
    for _ in 0..3 {
        bed.write_wqe(&mut m, |w| _ = w.nop().signaled());
    }
    bed.e.doorbell(m.qpn, 3);
    assert_eq!(bed.run(), 0, "a managed queue ignores doorbells");
    let target = m.qpn;
    bed.execute(&mut boss, |w| _ = w.send_enable(target, 2));
    assert!(m.send_cq.reader.poll().is_some() && m.send_cq.reader.poll().is_some());
    assert_eq!(m.send_cq.reader.poll(), None);
    bed.execute(&mut boss, |w| _ = w.send_enable(target, 3));
    assert!(m.send_cq.reader.poll().is_some());
    let info = bed.e.query_qp(PF, m.qpn).unwrap();
    assert_eq!(
        (info.progress.send_consumer, info.progress.send_limit, info.progress.executed),
        (3, 3, 3)
    );
    // A QP in Reset ignores SEND_EN: a late one must not start WQEs that are written after the
    // reset.
    bed.e.modify_qp(PF, m.qpn, QpChange::Reset).unwrap();
    bed.execute(&mut boss, |w| _ = w.send_enable(target, 3));
    assert_eq!(bed.e.query_qp(PF, m.qpn).unwrap().progress.send_limit, 0);
    bed.connect_to(&m, m_peer.qpn);
    assert_eq!(bed.run(), 0);
    // The CPU may set the limit in any state, at set-up.
    bed.e.enable_send(PF, m.qpn, 1).unwrap();
    assert_eq!(bed.run(), 1);
    assert!(bed.e.enable_send(PF, boss.qpn, 1).is_err());
    assert!(bed.e.enable_recv(PF, boss.qpn, 1).is_err());
}

#[test]
fn wqe_is_fetched_after_earlier_wqes_have_completed() {
    let mut bed = Bed::new();
    let pd = bed.pd(PF);
    let shape = bed.shape(PF, pd);
    let (mut a, b) = (bed.qp(&shape), bed.qp(&shape));
    bed.connect(&a, &b);
    let ring = ring_mr(&mut bed, &a, pd, ALL);
    let m = bed.mr(PF, pd, 256, ALL);
    m.mem.write(0, &[opcode::RDMA_WRITE]);
    m.mem.write(8, &m.remote(128).addr.to_be_bytes());
    m.mem.write(64, b"patched!");
    // The READ patches opcode and address of the next WQE; the atomic patches the tag of its rkey.
    bed.write_wqe(&mut a, |w| {
        w.rdma_read(m.remote(0), &[ring.sge(128 + offset::OPCODE, 1)]);
    });
    bed.write_wqe(&mut a, |w| {
        w.rdma_read(m.remote(8), &[ring.sge(128 + offset::REMOTE_ADDR, 8)]);
    });
    bed.post(&mut a, |w| {
        w.rdma_write(Remote { addr: 0, rkey: m.key }, &[m.sge(64, 8)]).signaled();
    });
    let at = 128 + offset::OPCODE;
    assert_eq!(ring.bytes(at, 1), [opcode::RDMA_WRITE]);
    ring.mem.write(at, &[opcode::NOP]);
    bed.run();
    assert_eq!(a.send_cq.reader.poll().unwrap().wqe_opcode, opcode::RDMA_WRITE);
    assert_eq!(m.bytes(128, 8), b"patched!");
}

/// A WQE is fetched once: if it overwrites itself during its execution, it still completes as
/// fetched.
#[test]
fn wqe_that_overwrites_itself_completes_as_fetched() {
    let operations: [fn(&mut Builder, &Mr, &Mr); 3] = [
        |w, ring, m| _ = w.rdma_write(ring.remote(0), &[m.sge(0, 16)]),
        |w, ring, m| _ = w.rdma_read(m.remote(0), &[ring.sge(0, 16)]),
        |w, ring, m| _ = w.fetch_add(m.remote(0), 0, ring.sge(0, 8)),
    ];
    for operation in operations {
        let mut bed = Bed::new();
        let pd = bed.pd(PF);
        let shape = bed.shape(PF, pd);
        let (mut a, b) = (bed.qp(&shape), bed.qp(&shape));
        bed.connect(&a, &b);
        let ring = ring_mr(&mut bed, &a, pd, ALL);
        let m = bed.mr(PF, pd, 64, ALL);
        // A valid WQE of four blocks that requests no completion.
        let mut other = Builder::new(a.qpn, 0);
        other.nop_filling(4);
        m.mem.write(0, &other.bytes()[..16]);
        bed.write_wqe(&mut a, |w| {
            operation(w, &ring, &m);
            w.signaled();
        });
        let was = ring.bytes(offset::OPCODE, 1)[0];
        bed.post(&mut a, |w| _ = w.nop().signaled());
        bed.run();
        assert_eq!(ring.bytes(0, 8), m.bytes(0, 8), "the WQE has not overwritten itself");
        for (opcode, index) in [(was, 0), (opcode::NOP, 1)] {
            let cqe = a.send_cq.reader.poll().expect("a completion");
            assert_eq!((cqe.error, cqe.wqe_opcode, cqe.wqe_counter), (None, opcode, index));
        }
        assert_eq!(a.send_cq.reader.poll(), None);
    }
}

#[test]
fn self_enabling_and_waiting_qps_stay_in_their_lists() {
    // The QP executes RECV_EN of its own receive queue during its quantum, and then a WAIT that
    // blocks. It must neither run while it waits nor be lost from the lists.
    let mut bed = Bed::new();
    let pd = bed.pd(PF);
    let shape = Shape { recv: Some(true), ..bed.shape(PF, pd) };
    let (mut a, b) = (bed.qp(&shape), bed.qp(&shape));
    let (mut c, _) = bed.pair();
    let (mut other, _) = bed.pair();
    bed.connect(&a, &b);
    let (own, cqn) = (a.qpn, c.send_cq.cqn);
    bed.write_wqe(&mut a, |w| _ = w.receive_enable(own, 1));
    bed.write_wqe(&mut a, |w| _ = w.wait(cqn, 0));
    bed.post(&mut a, |w| _ = w.nop().signaled());
    bed.post(&mut other, |w| _ = w.wait(cqn, 0).signaled());
    assert_eq!(bed.run(), 1);
    assert!(!bed.e.has_ready());
    bed.post(&mut a, |w| _ = w.nop());
    assert_eq!(bed.run(), 0, "a doorbell does not end a WAIT");
    bed.execute(&mut c, |w| _ = w.nop());
    assert!(a.send_cq.reader.poll().is_some());
    assert!(other.send_cq.reader.poll().is_some(), "the waiter behind it is not lost");
    assert_eq!(bed.e.query_qp(PF, a.qpn).unwrap().progress.executed, 4);
}

/// A service without a CPU. A request contains an addend and the address of the response. The chain
/// adds the addend to a counter and writes the old value of the counter back. There are R
/// instances; a client has one credit per instance.
///
/// ```text
/// worker (loopback)                        front (peer: the client)
///  0 WAIT  request k                        0 WRITE answer   <- address, rkey patched by RECV k
///  1 FAA   index of RECV_EN k += R          1 RECV_EN k      (from R + k + 1 on, by +R)
///  2 FAA   counter += addend <- RECV k
///  3 SEND_EN front, two more
///  4 FAA   index of WAIT k += R (24 bits)
///  5 FAA   index of SEND_EN k += 2 R (16 bits)
///  ...     FAA index of the last WQE += ring; NOPs; SEND_EN worker, one ring more
/// ```
struct Service {
    worker: TestQp,
    front: TestQp,
    counter: Mr,
}

const R: u32 = 2;
const WORKER_BLOCKS: u32 = 16;

fn service(bed: &mut Bed, first_count: u32) -> Service {
    let (data, meta) = (bed.pd(PF), bed.pd(PF));
    let base = Shape {
        managed: true,
        recv: Some(true),
        ignore_overrun: true,
        initial_count: first_count,
        cq_entries: 8,
        recv_entries: R,
        ..bed.shape(PF, data)
    };
    let front = Shape { blocks: 2 * R, access: Access::NONE, ..base.clone() };
    let mut front = bed.qp(&front);
    let worker = Shape { blocks: WORKER_BLOCKS, recv: None, access: Access::NONE, ..base };
    let mut worker = bed.qp(&worker);
    let loopback = Shape { recv: None, ..bed.shape(PF, meta) };
    let loopback = bed.qp(&loopback);
    bed.connect(&worker, &loopback);

    let counter = bed.mr(PF, meta, 64, Access::REMOTE_ATOMIC);
    let staging = bed.mr(PF, data, 128, ALL);
    let local = ring_mr(bed, &worker, data, ALL);
    let remote = ring_mr(bed, &worker, meta, ALL);
    let front_local = ring_mr(bed, &front, data, ALL);
    let front_remote = ring_mr(bed, &front, meta, ALL);
    let dump = staging.sge(64, 8);

    let bump = |w: &mut Builder, at: Remote, by: u32, bits: u32| {
        let at = Remote { addr: at.addr + offset::ENABLE_INDEX as u64, ..at };
        w.masked_fetch_add(at, (by as u64) << 32, 1 << (31 + bits), dump);
    };
    for k in 0..R {
        let requests = front.recv_cq.cqn;
        let wait = bed.write_wqe(&mut worker, |w| {
            w.wait(requests, first_count + k);
        });
        let recv_en_at = (2 * k as usize + 1) * 64;
        bed.write_wqe(&mut worker, |w| bump(w, front_remote.remote(recv_en_at), R, 16));
        let add = bed.write_wqe(&mut worker, |w| {
            w.fetch_add(counter.remote(0), 0, staging.sge(8 * k as usize, 8));
        });
        let enabled = front.qpn;
        let send_en = bed.write_wqe(&mut worker, |w| {
            w.send_enable(enabled, 2 * (k + 1));
        });
        bed.write_wqe(&mut worker, |w| bump(w, remote.remote(wait), R, 24));
        bed.write_wqe(&mut worker, |w| bump(w, remote.remote(send_en), 2 * R, 16));
        let answer = bed.write_wqe(&mut front, |w| {
            w.rdma_write(Remote::default(), &[staging.sge(8 * k as usize, 8)]);
        });
        let own = front.qpn;
        assert_eq!(recv_en_at, bed.write_wqe(&mut front, |w| _ = w.receive_enable(own, k + 1)));
        let patches = [
            local.sge(add + offset::ATOMIC_ADD, 8),
            front_local.sge(answer + offset::REMOTE_ADDR, 12),
        ];
        put_recv(&front.recv_ring, (k * STRIDE) as usize, &patches);
    }
    let last = (WORKER_BLOCKS as usize - 1) * 64;
    bed.write_wqe(&mut worker, |w| bump(w, remote.remote(last), WORKER_BLOCKS, 16));
    bed.write_wqe(&mut worker, |w| _ = w.nop_filling(WORKER_BLOCKS - 6 * R - 2));
    let own = worker.qpn;
    assert_eq!(last, bed.write_wqe(&mut worker, |w| _ = w.send_enable(own, 2 * WORKER_BLOCKS)));
    bed.e.enable_send(PF, worker.qpn, WORKER_BLOCKS as u16).unwrap();
    Service { worker, front, counter }
}

#[test]
fn chain_serves_clients_across_every_wrap_without_a_cpu() {
    let requests: u64 = if cfg!(miri) { 40 } else { 40_000 };
    // A quantum of one WQE, so that the QPs interleave as finely as possible.
    let mut bed = Bed::with(Limits { qp_turn: 100, ..Limits::default() });
    let s = service(&mut bed, 0xff_fff0);
    let f = bed.e.add_function(FunctionLimits::default()).unwrap();
    let pd = bed.pd(f);
    let shape = bed.shape(f, pd);
    let mut client = bed.qp(&shape);
    bed.connect_to(&client, s.front.qpn);
    bed.connect_to(&s.front, client.qpn);
    bed.e.enable_recv(PF, s.front.qpn, R as u16).unwrap();
    let answers = bed.mr(f, pd, 8 * 8, ALL);

    let request = |i: u64| {
        let mut m = (i * i).to_be_bytes().to_vec();
        m.extend(answers.remote(8 * (i as usize % 8)).addr.to_be_bytes());
        m.extend(answers.key.0.to_be_bytes());
        m
    };
    let unanswered = u64::MAX;
    for slot in 0..8 {
        answers.mem.store_be64(8 * slot, unanswered);
    }
    let (mut sent, mut answered, mut sum) = (0u64, 0u64, 0u64);
    while answered < requests {
        // The client sends more requests than there are instances, and waits (RNR) without blocking
        // others.
        while sent < requests && sent - answered < 5 {
            bed.post(&mut client, |w| _ = w.send_inline(&request(sent)));
            sent += 1;
        }
        bed.now += 1;
        assert!(bed.e.poll(bed.now, 1 + (sent as usize % 3)) > 0, "the chain stalls");
        let slot = 8 * (answered as usize % 8);
        if answers.mem.load_be64(slot) != unanswered {
            assert_eq!(answers.mem.load_be64(slot), sum, "answer {answered}");
            answers.mem.store_be64(slot, unanswered);
            sum += answered * answered;
            answered += 1;
        }
    }
    bed.run();
    assert_eq!(s.counter.mem.load_be64(0), sum);
    for q in [&s.worker, &s.front, &client] {
        assert_eq!(bed.state(q), QpState::ReadyToSend);
    }
    assert!(bed.e.stats().rnr > requests / 8);
    let count = bed.e.cq_count(PF, s.front.recv_cq.cqn).unwrap();
    assert_eq!(count as u64, (0xff_fff0 + requests) & 0xff_ffff);
    let per_lap = 6 * R as u64 + 3;
    let worker = bed.e.query_qp(PF, s.worker.qpn).unwrap();
    assert_eq!(
        worker.progress.executed,
        requests / R as u64 * per_lap,
        "the worker waits at its first WAIT"
    );
}

#[test]
fn hostile_request_fails_only_its_client() {
    let mut bed = Bed::new();
    let s = service(&mut bed, 0);
    let f = bed.e.add_function(FunctionLimits::default()).unwrap();
    let pd = bed.pd(f);
    let shape = bed.shape(f, pd);
    let mut client = bed.qp(&shape);
    bed.connect_to(&client, s.front.qpn);
    bed.connect_to(&s.front, client.qpn);
    bed.e.enable_recv(PF, s.front.qpn, R as u16).unwrap();
    // The client has no right to the response address: the front QP fails, the worker keeps
    // running.
    let mut m = 5u64.to_be_bytes().to_vec();
    m.extend(s.counter.remote(0).addr.to_be_bytes());
    m.extend(s.counter.key.0.to_be_bytes());
    bed.post(&mut client, |w| _ = w.send_inline(&m).signaled());
    bed.run();
    assert_eq!(client.send_cq.reader.poll().unwrap().error, None);
    assert_eq!(bed.state(&client), QpState::Error);
    assert_eq!(bed.state(&s.front), QpState::Error);
    assert_eq!(bed.state(&s.worker), QpState::ReadyToSend);
    assert_eq!(s.counter.mem.load_be64(0), 5);
}
