//! SEND, READ and WRITE in all their forms (IBTA vol. 1, chapter 9, operations).

use super::pair::{End, Pair, Shape, pattern};
use super::{Bench, Case, always, never};
use crate::{
    Access, Completion, CompletionKind, CompletionQueue, Data, Error, Nic, Op, QueuePair, Remote,
    SendFlags, Sge, Status, WcOpcode, WorkRequest,
};

pub fn cases<B: Bench>() -> Vec<Case<B>> {
    vec![
        always(
            "traffic.send",
            &["test_qpex.test_qp_ex_rc_send", "test_cqex.test_rc_traffic_cq_ex"],
            send,
        ),
        always("traffic.send_imm", &["test_qpex.test_qp_ex_rc_send_imm"], send_imm),
        always("traffic.write", &["test_qpex.test_qp_ex_rc_rdma_write"], write),
        always("traffic.write_imm", &["test_qpex.test_qp_ex_rc_rdma_write_imm"], write_imm),
        always("traffic.read", &["test_qpex.test_qp_ex_rc_rdma_read"], read),
        always(
            "traffic.zero_length",
            &[
                "test_qpex.test_qp_ex_rc_rdma_write_zero_size",
                "test_qpex.test_qp_ex_rc_rdma_read_zero_size",
            ],
            zero_length,
        ),
        always("traffic.sizes_and_alignments", &[], sizes_and_alignments),
        always("traffic.gather_and_scatter", &[], gather_and_scatter),
        always("traffic.inline", &[], inline),
        always(
            "traffic.many_before_any_is_polled",
            &["utils.traffic_poll_at_once"],
            many_in_flight,
        ),
        always("traffic.unsignaled", &[], unsignaled),
        always("traffic.fence_and_order", &[], fence_and_order),
        always("traffic.one_queue_pair_with_itself", &[], with_itself),
        never(
            "traffic.flush_and_atomic_write",
            &[
                "test_qpex.test_qp_ex_rc_flush",
                "test_qpex.test_qp_ex_rc_flush_type_violate",
                "test_qpex.test_qp_ex_rc_atomic_write",
            ],
            "FLUSH and ATOMIC WRITE are for persistent memory, which memory nodes do not donate",
        ),
    ]
}

fn both_ways<B: Bench>(bench: &B, case: impl Fn(&End<B::Nic>, &End<B::Nic>)) {
    let p = Pair::new(bench);
    for _ in 0..5 {
        case(&p.client, &p.server);
        case(&p.server, &p.client);
    }
}

fn received(c: Completion, id: u64, opcode: WcOpcode, bytes: u32, imm: Option<u32>) {
    assert_eq!((c.id, c.status, c.kind), (id, Status::Success, CompletionKind::Receive));
    assert_eq!((c.opcode, c.bytes, c.imm, c.invalidated), (opcode, bytes, imm, None));
}

fn send<B: Bench>(bench: &B) {
    both_ways(bench, |from, to| {
        let data = pattern(1, 1000);
        from.put(0, &data);
        to.put(0, &[0xcc; 1100]);
        to.receive(9, &[to.sge(0, 1024)]);
        let sent = from.ok(Op::Send { from: &[from.sge(0, 1000)] });
        assert_eq!((sent.kind, sent.opcode), (CompletionKind::Send, WcOpcode::Send));
        let c = to.next();
        received(c, 9, WcOpcode::Receive, 1000, None);
        assert_eq!(c.qpn, to.qp.qpn());
        assert_eq!((to.get(0, 1000), to.get(1000, 100)), (data, vec![0xcc; 100]));
    });
}

fn send_imm<B: Bench>(bench: &B) {
    both_ways(bench, |from, to| {
        for (imm, len) in [(0, 16), (0xdead_beef, 0), (u32::MAX, 1)] {
            from.put(0, &pattern(imm as u8, 16));
            to.receive(9, &[to.sge(0, 16)]);
            let list = [from.sge(0, len)];
            from.ok(Op::SendImm { data: Data::Gather(&list), imm });
            received(to.next(), 9, WcOpcode::Receive, len, Some(imm));
            assert_eq!(to.get(0, len as usize), pattern(imm as u8, len as usize));
        }
    });
}

fn write<B: Bench>(bench: &B) {
    both_ways(bench, |from, to| {
        let data = pattern(2, 1000);
        from.put(0, &data);
        to.put(0, &[0; 2000]);
        let c = from.ok(Op::Write { to: to.at(500), from: &[from.sge(0, 1000)] });
        assert_eq!((c.kind, c.opcode), (CompletionKind::Send, WcOpcode::Write));
        assert_eq!(to.get(500, 1000), data);
        assert_eq!((to.get(0, 500), to.get(1500, 500)), (vec![0; 500], vec![0; 500]));
    });
}

fn write_imm<B: Bench>(bench: &B) {
    both_ways(bench, |from, to| {
        for (imm, len) in [(7, 300), (8, 0)] {
            let data = pattern(imm as u8, len as usize);
            from.put(0, &data);
            to.put(0, &[0; 1024]);
            to.put(4096, &[0xcc; 64]);
            to.receive(3, &[to.sge(4096, 64)]);
            let list = [from.sge(0, len)];
            let op = Op::WriteImm { to: to.at(100), data: Data::Gather(&list), imm };
            assert_eq!(from.ok(op).opcode, WcOpcode::Write);
            received(to.next(), 3, WcOpcode::ReceiveWrite, len, Some(imm));
            assert_eq!(to.get(100, len as usize), data);
            assert_eq!(to.get(4096, 64), [0xcc; 64], "the receive's memory is left alone");
        }
        // Without a receive, both data and notification wait.
        to.put(100, &[0; 8]);
        from.post(5, Op::WriteImm { to: to.at(100), data: Data::Inline(&[5; 8]), imm: 9 });
        from.nothing();
        to.receive(6, &[]);
        assert_eq!(from.next().status, Status::Success);
        received(to.next(), 6, WcOpcode::ReceiveWrite, 8, Some(9));
        assert_eq!(to.get(100, 8), [5; 8]);
    });
}

fn read<B: Bench>(bench: &B) {
    both_ways(bench, |to, from| {
        let data = pattern(3, 1000);
        from.put(500, &data);
        to.put(0, &[0; 2000]);
        let c = to.ok(Op::Read { from: from.at(500), to: &[to.sge(100, 1000)] });
        assert_eq!((c.kind, c.opcode), (CompletionKind::Send, WcOpcode::Read));
        assert_eq!((to.get(100, 1000), to.get(1100, 100)), (data, vec![0; 100]));
    });
}

fn zero_length<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    let nowhere = Remote { addr: 1, rkey: crate::Key(0) };
    for at in [s.at(0), nowhere] {
        c.ok(Op::Write { to: at, from: &[] });
        c.ok(Op::Write { to: at, from: &[c.sge(0, 0)] });
        c.ok(Op::Read { from: at, to: &[] });
    }
    for list in [&[][..], &[c.sge(0, 0)]] {
        s.receive(1, &[]);
        c.ok(Op::Send { from: list });
        received(s.next(), 1, WcOpcode::Receive, 0, None);
    }
    assert_eq!(s.get(0, 64), [0; 64]);
    // A QP without the access right refuses the operation even for 0 bytes.
    let deaf = Shape { qp: Access::NONE, ..Shape::default() };
    let p = Pair::of(bench, &Shape::default(), &deaf);
    p.refused(Op::Write { to: p.server.at(0), from: &[] }, Status::RemoteAccess);
    p.refused(Op::Read { from: p.server.at(0), to: &[] }, Status::RemoteAccess);
}

fn sizes_and_alignments<B: Bench>(bench: &B) {
    let shape = Shape { bytes: (1 << 20) + 8192, ..Shape::default() };
    let p = Pair::of(bench, &shape, &shape);
    let (c, s) = (&p.client, &p.server);
    let sizes = [1, 2, 3, 7, 8, 9, 63, 64, 65, 255, 256, 1023, 1024, 1025, 4095, 4096, 4097, 8193];
    let long = [32767, 32768, 32769, 65537, (1 << 20) - 1, 1 << 20];
    for (i, len) in sizes.into_iter().chain(long).enumerate() {
        let (here, there) = (i * 5 % 64, i * 3 % 64 + 1);
        let data = pattern(i as u8, len);
        c.put(here, &data);
        s.put(there - 1, &[0xaa]);
        s.put(there + len, &[0xbb]);
        c.ok(Op::Write { to: s.at(there), from: &[c.sge(here, len as u32)] });
        assert!(s.get(there, len) == data, "WRITE of {len}");
        assert_eq!((s.get(there - 1, 1), s.get(there + len, 1)), (vec![0xaa], vec![0xbb]));
        c.put(here, &vec![0; len]);
        c.ok(Op::Read { from: s.at(there), to: &[c.sge(here, len as u32)] });
        assert!(c.get(here, len) == data, "READ of {len}");
        if len <= 4097 {
            s.receive(1, &[s.sge(8192, 8192)]);
            c.ok(Op::Send { from: &[c.sge(here, len as u32)] });
            assert_eq!(s.next().bytes as usize, len);
            assert!(s.get(8192, len) == data, "SEND of {len}");
        }
    }
}

fn gather_and_scatter<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    let count = c.nic.caps().max_sges.min(16) as usize;
    // Gathers from two regions alternately, with an empty entry now and then.
    let second = c.region(8192, Access::LOCAL_ALL);
    let data = pattern(9, 4096);
    c.put(0, &data);
    second.memory_put(&data);
    let mut want = Vec::new();
    let list: Vec<Sge> = (0..count)
        .map(|i| {
            let (offset, len) = (i * 37, if i % 5 == 3 { 0 } else { i + 1 });
            want.extend_from_slice(&data[offset..offset + len]);
            let from = if i % 2 == 0 { &c.mr } else { &second };
            crate::MemoryRegion::sge(from, offset, len as u32)
        })
        .collect();
    c.ok(Op::Write { to: s.at(0), from: &list });
    assert_eq!(s.get(0, want.len()), want);
    c.put(16384, &[0; 4096]);
    let to: Vec<Sge> =
        list.iter().enumerate().map(|(i, sge)| c.sge(16384 + i * 64, sge.len)).collect();
    c.ok(Op::Read { from: s.at(0), to: &to });
    let mut at = 0;
    for (i, sge) in list.iter().enumerate() {
        let len = sge.len as usize;
        assert_eq!(c.get(16384 + i * 64, len), want[at..at + len]);
        assert_eq!(c.get(16384 + i * 64 + len, 1), [0]);
        at += len;
    }
    // A message ends within the receive's scatter list, and the unused entries are not written.
    s.put(8192, &[0xcc; 512]);
    s.receive(4, &[s.sge(8192, 10), s.sge(8300, 1), s.sge(8400, 100)]);
    c.ok(Op::Send { from: &list[..count.min(8)] });
    let len = s.next().bytes as usize;
    assert_eq!(len, list[..count.min(8)].iter().map(|sge| sge.len as usize).sum::<usize>());
    assert_eq!((s.get(8192, 10), s.get(8300, 1)), (want[..10].to_vec(), want[10..11].to_vec()));
    assert_eq!(s.get(8400, len - 11), want[11..len]);
    assert_eq!((s.get(8202, 1), s.get(8301, 1)), (vec![0xcc], vec![0xcc]));
    assert_eq!(s.get(8400 + len - 11, 1), [0xcc]);
}

trait Put {
    fn memory_put(&self, data: &[u8]);
}

impl<M: crate::MemoryRegion> Put for M {
    fn memory_put(&self, data: &[u8]) {
        self.memory().write(0, data);
    }
}

fn inline<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    let max = c.nic.caps().max_inline as usize;
    for len in [0, 1, 12, 13, 28, 29, max - 1, max] {
        let data = pattern(len as u8, len);
        c.ok(Op::WriteInline { to: s.at(0), data: &data });
        assert_eq!(s.get(0, len), data);
        s.receive(1, &[s.sge(4096, 4096)]);
        c.ok(Op::SendInline { data: &data });
        received(s.next(), 1, WcOpcode::Receive, len as u32, None);
        assert_eq!(s.get(4096, len), data);
        s.receive(2, &[s.sge(8192, 4096)]);
        c.ok(Op::SendImm { data: Data::Inline(&data), imm: 5 });
        received(s.next(), 2, WcOpcode::Receive, len as u32, Some(5));
        assert_eq!(s.get(8192, len), data);
        s.receive(3, &[]);
        c.ok(Op::WriteImm { to: s.at(12288), data: Data::Inline(&data), imm: 6 });
        received(s.next(), 3, WcOpcode::ReceiveWrite, len as u32, Some(6));
        assert_eq!(s.get(12288, len), data);
    }
    let long = vec![0; max + 1];
    let op = Op::SendInline { data: &long };
    let refused = c.qp.post_send(&[WorkRequest { id: 1, op, signaled: true }]);
    assert!(matches!(refused, Err(Error::BadRequest { .. })), "{refused:?}");
    c.nothing();
}

fn many_in_flight<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    for (round, with_imm) in [false, true].into_iter().enumerate() {
        for i in 0..16 {
            c.put(i * 64, &pattern((16 * round + i) as u8, 64));
            s.receive(100 + i as u64, &[s.sge(i * 64, 64)]);
        }
        for i in 0..16usize {
            let list = [c.sge(i * 64, 64)];
            let op = match with_imm {
                false => Op::Send { from: &list },
                true => Op::WriteImm { to: s.at(i * 64), data: Data::Gather(&list), imm: i as u32 },
            };
            c.post(i as u64, op);
        }
        for i in 0..16 {
            let sent = c.next();
            assert_eq!((sent.id, sent.status), (i, Status::Success));
            let opcode = if with_imm { WcOpcode::ReceiveWrite } else { WcOpcode::Receive };
            received(s.next(), 100 + i, opcode, 64, with_imm.then_some(i as u32));
            let data = pattern((16 * round as u64 + i) as u8, 64);
            assert_eq!(s.get(i as usize * 64, 64), data);
        }
    }
}

fn unsignaled<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    for round in 0..10u8 {
        let data = [round; 4];
        let list: Vec<_> = (0..32u64)
            .map(|id| WorkRequest {
                id,
                op: Op::WriteInline { to: s.at(id as usize * 4), data: &data },
                signaled: id == 31,
            })
            .collect();
        c.qp.post_send(&list).expect("room for a list");
        let done = c.next();
        assert_eq!((done.id, done.status), (31, Status::Success));
        assert_eq!(s.get(0, 128), vec![round; 128], "all before it were done");
    }
    c.nothing();
    // A failing request completes even if it is unsignaled.
    let bad = Remote { rkey: crate::Key(0xdead_be00), ..s.at(0) };
    let op = Op::WriteInline { to: bad, data: &[1] };
    c.qp.post_send(&[WorkRequest { id: 5, op, signaled: false }]).expect("posting");
    let done = c.next();
    assert_eq!((done.id, done.status), (5, Status::RemoteAccess));
}

fn fence_and_order<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    let fence = SendFlags { fence: true, ..SendFlags::default() };
    for round in 0..8u8 {
        // The READ fetches the bytes that the fenced SEND carries; then the WRITE changes them.
        s.put(0, &[round + 1; 64]);
        c.put(0, &[0; 64]);
        s.receive(2, &[s.sge(4096, 64)]);
        let here = [c.sge(0, 64)];
        let ops = [
            Op::Read { from: s.at(0), to: &here },
            Op::With { flags: fence, op: &Op::Send { from: &here } },
            Op::WriteInline { to: s.at(0), data: &[0xff; 64] },
        ];
        let list = ops.map(|op| WorkRequest { id: 0, op, signaled: true });
        c.qp.post_send(&list).expect("posting");
        for opcode in [WcOpcode::Read, WcOpcode::Send, WcOpcode::Write] {
            let done = c.next();
            assert_eq!((done.status, done.opcode), (Status::Success, opcode));
        }
        received(s.next(), 2, WcOpcode::Receive, 64, None);
        assert_eq!((s.get(4096, 64), s.get(0, 64)), (vec![round + 1; 64], vec![0xff; 64]));
    }
}

fn with_itself<B: Bench>(bench: &B) {
    let end = End::new(bench.client(), &Shape::default());
    super::pair::connect_to_itself(bench, &end.qp);
    end.ok(Op::WriteInline { to: end.at(0), data: &[4; 8] });
    assert_eq!(end.get(0, 8), [4; 8]);
    end.receive(8, &[end.sge(64, 8)]);
    end.post(9, Op::Send { from: &[end.sge(0, 8)] });
    let mut ids = [end.next(), end.next()].map(|c| (c.id, c.status));
    ids.sort_by_key(|c| c.0);
    assert_eq!(ids, [(8, Status::Success), (9, Status::Success)]);
    assert_eq!(end.get(64, 8), [4; 8]);
    assert_eq!(end.cq.poll(&mut [Completion::EMPTY]), 0);
}
