//! Fairness between functions and QPs, counted in WQEs and bytes, without a clock.

use super::*;
use crate::limits::{FunctionLimits, Limits};
use verbs::{FunctionId, QpState};

/// A function with QPs that always have work.
struct Client {
    function: FunctionId,
    qps: Vec<TestQp>,
    _peers: Vec<TestQp>,
}

impl Client {
    /// Creates `count` QPs whose rings are full of READs of `bytes`.
    fn new(bed: &mut Bed, function: FunctionId, count: usize, bytes: u32) -> Self {
        let pd = bed.pd(function);
        let shape = Shape { managed: true, recv: None, blocks: 512, ..bed.shape(function, pd) };
        let mr = bed.mr(function, pd, 1 << 20, ALL);
        let (mut qps, mut peers) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let (mut q, peer) = (bed.qp(&shape), bed.qp(&shape));
            bed.connect(&q, &peer);
            for _ in 0..q.blocks {
                let sge = mr.sge(0, bytes as usize);
                bed.write_wqe(&mut q, |w| _ = w.rdma_read(mr.remote(0), &[sge]));
            }
            qps.push(q);
            peers.push(peer);
        }
        Self { function, qps, _peers: peers }
    }

    fn virtual_one(bed: &mut Bed, count: usize, bytes: u32) -> Self {
        let f = bed.e.add_function(FunctionLimits::default()).unwrap();
        Self::new(bed, f, count, bytes)
    }

    fn refill(&self, bed: &mut Bed) {
        for q in &self.qps {
            let info = bed.e.query_qp(self.function, q.qpn).unwrap();
            assert_eq!(info.info.state, QpState::ReadyToSend);
            let limit = info.progress.send_consumer.wrapping_add(q.blocks as u16);
            bed.e.enable_send(self.function, q.qpn, limit).unwrap();
        }
    }

    fn executed(&self, bed: &Bed) -> Vec<u64> {
        let of = |q: &TestQp| bed.e.query_qp(self.function, q.qpn).unwrap().progress.executed;
        self.qps.iter().map(of).collect()
    }

    fn total(&self, bed: &Bed) -> u64 {
        self.executed(bed).iter().sum()
    }
}

fn run(bed: &mut Bed, clients: &[&Client], polls: usize) {
    for _ in 0..polls {
        for c in clients {
            c.refill(bed);
        }
        bed.e.poll(0, 64);
    }
}

/// Asserts that two numbers differ by at most a tenth.
#[track_caller]
fn alike(a: u64, b: u64) {
    assert!(a.abs_diff(b) * 10 <= a.max(b), "{a} and {b}");
}

const POLLS: usize = if cfg!(miri) { 60 } else { 2000 };

#[test]
fn functions_share_equally_regardless_of_qp_count() {
    let mut bed = Bed::new();
    let one = Client::virtual_one(&mut bed, 1, 8);
    let many = Client::virtual_one(&mut bed, 40, 8);
    let some = Client::virtual_one(&mut bed, 5, 8);
    run(&mut bed, &[&one, &many, &some], POLLS);
    alike(one.total(&bed), many.total(&bed));
    alike(one.total(&bed), some.total(&bed));
    for qp in some.executed(&bed) {
        alike(5 * qp, some.total(&bed));
    }
}

#[test]
fn bytes_count_as_well_as_wqes() {
    let mut bed = Bed::new();
    let small = Client::virtual_one(&mut bed, 1, 8);
    let large = Client::virtual_one(&mut bed, 3, 1 << 20);
    run(&mut bed, &[&small, &large], POLLS);
    // Work of a READ: its 8 bytes or 1 MiB, and 4 times 64 bytes for the WQE or for each slice.
    let of_small = small.total(&bed) * (8 + 4 * 64);
    let moved = bed.e.stats().bytes - small.total(&bed) * 8;
    alike(of_small, moved + moved / (32 << 10) * 4 * 64);
    assert!(large.total(&bed) > 0 || cfg!(miri), "slices add up to whole READs");
}

/// Polls until the first QP has executed one more WQE, while each of `floods` always has work.
fn polls_for_one(bed: &mut Bed, client: &Client, floods: &[&Client]) -> usize {
    let q = &client.qps[0];
    let info = bed.e.query_qp(client.function, q.qpn).unwrap();
    bed.e.enable_send(client.function, q.qpn, info.progress.send_consumer.wrapping_add(1)).unwrap();
    for polls in 1.. {
        run(bed, floods, 1);
        if bed.e.query_qp(client.function, q.qpn).unwrap().progress.executed
            > info.progress.executed
        {
            return polls;
        }
    }
    unreachable!("the NIC starves the client")
}

#[test]
fn debt_is_repaid_by_missed_quanta() {
    let mut bed = Bed::with(Limits { shared_slice_bytes: 32 << 10, ..Limits::default() });
    let flood = Client::virtual_one(&mut bed, 8, 8);
    let f = bed.e.add_function(FunctionLimits::default()).unwrap();
    let (large, small) = (Client::new(&mut bed, f, 1, 32 << 10), Client::new(&mut bed, f, 1, 8));
    run(&mut bed, &[&flood], 10);
    assert!(polls_for_one(&mut bed, &large, &[&flood]) <= 2);
    // One WQE of sixteen quanta of work. Another WQE posted at once waits until the other functions
    // have done as much work.
    assert!(polls_for_one(&mut bed, &small, &[&flood]) >= 12);
    assert!(polls_for_one(&mut bed, &large, &[&flood]) <= 3);
    run(&mut bed, &[&flood], 20);
    assert!(polls_for_one(&mut bed, &small, &[&flood]) <= 2, "the debt is repaid");
    assert!(polls_for_one(&mut bed, &large, &[&flood]) <= 3);
    // Without other functions, the debt delays no request.
    while bed.e.poll(0, 64) > 0 {}
    bed.e.poll(0, 64);
    assert!(
        polls_for_one(&mut bed, &small, &[&flood]) <= 2,
        "the debt is repaid while the NIC is idle"
    );
}

#[test]
fn small_request_waits_only_for_the_quantum_in_progress() {
    let mut bed = Bed::new();
    let floods: Vec<Client> = (0..6).map(|_| Client::virtual_one(&mut bed, 8, 8)).collect();
    let floods: Vec<&Client> = floods.iter().collect();
    let one = Client::virtual_one(&mut bed, 1, 8);
    for _ in 0..20 {
        run(&mut bed, &floods, 8);
        assert!(polls_for_one(&mut bed, &one, &floods) <= 2);
    }
}

#[test]
fn intermittent_function_gets_no_more_than_an_active_one() {
    let mut bed = Bed::new();
    let stays = Client::virtual_one(&mut bed, 1, 1 << 10);
    let floods: Vec<Client> = (0..3).map(|_| Client::virtual_one(&mut bed, 4, 8)).collect();
    // Two clients, so that at almost any time one of them has work.
    let (one, other) =
        (Client::virtual_one(&mut bed, 1, 1 << 10), Client::virtual_one(&mut bed, 1, 1 << 10));
    let mut all: Vec<&Client> = floods.iter().collect();
    all.push(&stays);
    for _ in 0..POLLS / 4 {
        for client in [&one, &other] {
            polls_for_one(&mut bed, client, &all);
        }
    }
    let stayed = stays.total(&bed);
    for client in [&one, &other] {
        assert!(client.total(&bed) <= stayed + stayed / 10, "{} and {stayed}", client.total(&bed));
    }
}

#[test]
fn qps_of_a_function_share_by_bytes() {
    let mut bed = Bed::new();
    let f = bed.e.add_function(FunctionLimits::default()).unwrap();
    let small = Client::new(&mut bed, f, 1, 8);
    let large = Client::new(&mut bed, f, 1, 64 << 10);
    run(&mut bed, &[&small, &large], POLLS);
    let moved = bed.e.stats().bytes - small.total(&bed) * 8;
    let large_work = moved + moved / (32 << 10) * 4 * 64;
    let small_work = small.total(&bed) * (8 + 4 * 64);
    assert!(small_work * 10 >= large_work * 8, "{small_work} and {large_work}");
}

#[test]
fn physical_function_has_every_second_quantum() {
    let mut bed = Bed::new();
    let limits = Limits::default();
    let clients: Vec<Client> = (0..6).map(|_| Client::virtual_one(&mut bed, 8, 8)).collect();
    let node = Client::new(&mut bed, PF, 2, 8);
    let mut all: Vec<&Client> = clients.iter().collect();
    all.push(&node);
    run(&mut bed, &all, 4 * POLLS);
    let others: u64 = clients.iter().map(|c| c.total(&bed)).sum();
    let longer = limits.physical_turn as u64 / limits.function_turn as u64;
    alike(node.total(&bed), longer * others);
    for c in &clients {
        alike(6 * c.total(&bed), others);
    }
}

#[test]
fn clearing_a_chunk_waits_for_few_quanta_of_a_flood() {
    // The last step of a free clears 64 KiB; each slice exceeds a quantum.
    let mut bed = Bed::new();
    let flood = Client::virtual_one(&mut bed, 64, 8);
    let node = Client::new(&mut bed, PF, 1, 64 << 10);
    let limits = Limits::default();
    for i in 0..if cfg!(miri) { 3 } else { 100 } {
        for _ in 0..i % 5 {
            flood.refill(&mut bed);
            bed.e.poll(0, 64);
        }
        let before = flood.total(&bed);
        bed.e.enable_send(PF, node.qps[0].qpn, i + 1).unwrap();
        while node.total(&bed) == i as u64 {
            flood.refill(&mut bed);
            assert!(bed.e.poll(0, 64) > 0);
        }
        let went_before = (flood.total(&bed) - before) * (8 + 4 * 64);
        let turns = 1 + (64 << 10) / limits.physical_turn as u64;
        let bound = turns * (limits.function_turn + limits.qp_turn) as u64;
        assert!(went_before <= bound, "{went_before} of work of a flood went before");
    }
}

#[test]
fn wqe_waits_at_most_one_quantum_of_each_function() {
    // SENDs of the maximum length, READs of 1 MiB, and one function with many QPs in debt.
    let mut bed = Bed::new();
    let limits = Limits::default();
    let floods =
        [Client::virtual_one(&mut bed, 20, 1 << 20), Client::virtual_one(&mut bed, 1, 1 << 20)];
    let f = bed.e.add_function(FunctionLimits::default()).unwrap();
    let mut victim = Client::new(&mut bed, f, 1, 8);
    let q = &mut victim.qps[0];
    for i in 0..if cfg!(miri) { 3 } else { 200 } {
        for c in &floods {
            c.refill(&mut bed);
        }
        for _ in 0..i % 5 {
            bed.e.poll(0, 64);
        }
        let before = bed.e.stats().bytes;
        bed.e.enable_send(f, q.qpn, i + 1).unwrap();
        while bed.e.query_qp(f, q.qpn).unwrap().progress.executed == i as u64 {
            assert!(bed.e.poll(0, 64) > 0);
        }
        let moved = bed.e.stats().bytes - before;
        let bound =
            2 * (limits.function_turn + limits.slice_bytes) as u64 + limits.slice_bytes as u64;
        assert!(moved <= bound, "{moved} bytes went before");
    }
}

#[test]
fn waking_many_waiters_costs_one_step() {
    // 300 QPs of a function WAIT on the CQ of its receive queue, for a completion far ahead. QPs
    // that send to this queue, and other functions, must not pay for these waiters.
    let mut bed = Bed::new();
    let f = bed.e.add_function(FunctionLimits::default()).unwrap();
    let pd = bed.pd(f);
    let shape = bed.shape(f, pd);
    let mut target = bed.qp(&shape);
    let cqn = target.recv_cq.cqn;
    let mut waiting = Vec::new();
    for i in 0..300 {
        let mut q = bed.qp(&shape);
        bed.connect_to(&q, q.qpn);
        bed.post(&mut q, |w| _ = w.wait(cqn, 1 + i % 2).signaled());
        waiting.push(q);
    }
    bed.run();
    let sender_pd = bed.pd(PF);
    let sender_shape = bed.shape(PF, sender_pd);
    let mut sender = bed.qp(&sender_shape);
    bed.connect(&sender, &target);
    for _ in 0..2 {
        bed.post_recv(&mut target, &[]);
    }
    let ends = |waiting: &mut Vec<TestQp>| {
        waiting.iter_mut().filter_map(|q| q.send_cq.reader.poll()).count()
    };
    bed.post(&mut sender, |w| _ = w.send(&[]).signaled());
    assert_eq!(bed.e.poll(0, 1), 1);
    assert!(sender.send_cq.reader.poll().is_some());
    // The waiters are woken in one step, and wait again after each has run once.
    bed.run();
    assert_eq!(ends(&mut waiting), 0);
    // One QP leaves the middle of the list of waiters, one leaves the list of just woken QPs; the
    // WAITs of the remaining QPs succeed.
    bed.e.destroy_qp(f, waiting.remove(150).qpn).unwrap();
    bed.post(&mut sender, |w| _ = w.send(&[]));
    bed.e.poll(0, 1);
    bed.e.destroy_qp(f, waiting.remove(100).qpn).unwrap();
    bed.e.modify_qp(f, waiting[0].qpn, verbs::QpChange::Error).unwrap();
    bed.run();
    // Two of the 150 QPs were destroyed, and one was flushed.
    assert_eq!(ends(&mut waiting), 148);
}
