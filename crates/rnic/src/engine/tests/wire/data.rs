//! Data movement of every operation, at every path MTU.

use super::*;
use crate::limits::Limits;
use verbs::cqe::{self, Syndrome};
use verbs::wqe::{SE_SOLICITED, Umr, opcode};
use verbs::{Access, Key, PathMtu, QpState};

/// Lengths around multiples of the packet length.
fn lengths(mtu: usize) -> Vec<usize> {
    let around = [mtu, 2 * mtu, 5 * mtu].into_iter().flat_map(|n| [n - 1, n, n + 1]);
    [0, 1, 3, 4, 7].into_iter().chain(around).collect()
}

fn pattern(len: usize, salt: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + salt * 7 + i / 256) as u8).collect()
}

#[test]
fn writes_and_reads_of_all_lengths_arrive() {
    for (seed, mtu) in PathMtu::ALL.into_iter().enumerate() {
        let mut net = Net::new(seed as u64);
        let [mut a, b] = net.pair(&Link { mtu, ..Link::default() });
        let mine = net.beds[0].mr(PF, a.pd, 64 << 10, ALL);
        let theirs = net.beds[1].mr(PF, b.pd, 64 << 10, ALL);
        for (i, len) in lengths(mtu.bytes() as usize).into_iter().enumerate() {
            let (data, at) = (pattern(len, i), 13 * i + 5);
            mine.mem.write(at, &data);
            theirs.mem.zero(0, 64 << 10);
            let cut = len / 3;
            let list = [mine.sge(at, cut), mine.sge(at + cut, len - cut)];
            let cqe = net.execute(0, &mut a, |w| {
                w.rdma_write(theirs.remote(at + 1), &list);
            });
            assert_eq!((cqe.error, cqe.byte_count), (None, len as u32));
            assert_eq!(theirs.bytes(at, len + 2), [&[0][..], &data, &[0]].concat());
            mine.mem.zero(0, 64 << 10);
            let cqe = net.execute(0, &mut a, |w| {
                w.rdma_read(theirs.remote(at + 1), &list);
            });
            assert_eq!((cqe.error, cqe.byte_count), (None, len as u32));
            assert_eq!(mine.bytes(at, len + 1), [&data[..], &[0]].concat(), "{len} of {mtu:?}");
        }
        let (a, b) = (net.beds[0].e.wire_stats(), net.beds[1].e.wire_stats());
        assert_eq!((a.packets_out, b.packets_out), (b.packets_in, a.packets_in));
        assert_eq!((a.repeated, a.timeouts, a.stray, b.duplicates, b.ahead), (0, 0, 0, 0, 0));
    }
}

#[test]
fn sends_of_all_lengths_and_kinds_arrive() {
    for (seed, mtu) in PathMtu::ALL.into_iter().enumerate() {
        let mut net = Net::new(seed as u64);
        let [mut a, mut b] = net.pair(&Link { mtu, ..Link::default() });
        let mine = net.beds[0].mr(PF, a.pd, 64 << 10, ALL);
        let theirs = net.beds[1].mr(PF, b.pd, 64 << 10, ALL);
        for (i, len) in lengths(mtu.bytes() as usize).into_iter().enumerate() {
            let data = pattern(len, i);
            mine.mem.write(i, &data);
            let list = [theirs.sge(0, 100), theirs.sge(200, 3), theirs.sge(300, 40_000)];
            net.beds[1].post_recv(&mut b, &list);
            let cqe = net.execute(0, &mut a, |w| {
                if i % 2 == 0 {
                    w.send(&[mine.sge(i, len)]);
                } else {
                    w.send_imm(&[mine.sge(i, len)], 0xabc0 + i as u32).flags(SE_SOLICITED);
                }
            });
            assert_eq!((cqe.error, cqe.byte_count), (None, len as u32));
            let cqe = b.recv_cq.reader.poll().expect("a receive");
            assert_eq!((cqe.error, cqe.byte_count), (None, len as u32));
            assert_eq!((cqe.qpn, cqe.wqe_counter), (b.qpn, i as u16));
            match i % 2 {
                0 => assert_eq!((cqe.opcode, cqe.solicited), (cqe::opcode::RESP_SEND, false)),
                _ => {
                    assert_eq!((cqe.opcode, cqe.solicited), (cqe::opcode::RESP_SEND_IMM, true));
                    assert_eq!(cqe.imm, 0xabc0 + i as u32);
                }
            }
            let got = [theirs.bytes(0, 100), theirs.bytes(200, 3), theirs.bytes(300, 40_000)];
            assert_eq!(got.concat()[..len], data, "{len} of {mtu:?}");
        }
    }
}

#[test]
fn send_to_another_nic_may_exceed_the_local_limit() {
    let mut net = Net::new(7);
    let [mut a, mut b] = net.pair(&Link { mtu: PathMtu::Mtu4096, ..Link::default() });
    let len = 5 * Limits::default().send_bytes_max as usize + 3;
    let mine = net.beds[0].mr(PF, a.pd, 1 << 20, ALL);
    let theirs = net.beds[1].mr(PF, b.pd, 1 << 20, ALL);
    let data = pattern(len, 3);
    mine.mem.write(0, &data);
    net.beds[1].post_recv(&mut b, &[theirs.sge(0, 1 << 20)]);
    let cqe = net.execute(0, &mut a, |w| {
        w.send(&[mine.sge(0, len)]);
    });
    assert_eq!((cqe.error, cqe.byte_count), (None, len as u32));
    let cqe = b.recv_cq.reader.poll().expect("a receive");
    assert_eq!((cqe.error, cqe.byte_count), (None, len as u32));
    assert_eq!(theirs.bytes(0, len), data);
}

#[test]
fn immediates_inline_data_and_atomics() {
    let mut net = Net::new(3);
    let [mut a, mut b] = net.pair(&Link { mtu: PathMtu::Mtu256, ..Link::default() });
    let mine = net.beds[0].mr(PF, a.pd, 8192, ALL);
    let theirs = net.beds[1].mr(PF, b.pd, 8192, ALL);
    net.beds[1].post_recv(&mut b, &[]);
    mine.mem.write(0, &pattern(700, 1));
    let cqe = net.execute(0, &mut a, |w| {
        w.rdma_write_imm(theirs.remote(50), &[mine.sge(0, 700)], 0x01020304);
    });
    assert_eq!((cqe.error, cqe.wqe_opcode), (None, opcode::RDMA_WRITE_IMM));
    assert_eq!(theirs.bytes(50, 700), pattern(700, 1));
    let cqe = b.recv_cq.reader.poll().unwrap();
    assert_eq!((cqe.opcode, cqe.imm), (cqe::opcode::RESP_WR_IMM, 0x01020304));
    assert_eq!(cqe.byte_count, 700);
    net.execute(0, &mut a, |w| {
        w.rdma_write_inline(theirs.remote(1000), &[9; 300]);
    });
    assert_eq!(theirs.bytes(999, 302), [&[0][..], &[9; 300], &[0]].concat());
    theirs.mem.store_be64(2000, 41);
    net.execute(0, &mut a, |w| {
        w.fetch_add(theirs.remote(2000), 1, mine.sge(4000, 8));
    });
    assert_eq!((mine.mem.load_be64(4000), theirs.mem.load_be64(2000)), (41, 42));
    for (compare, after) in [(7, 42), (42, 99)] {
        net.execute(0, &mut a, |w| {
            w.compare_swap(theirs.remote(2000), compare, 99, mine.sge(4008, 8));
        });
        assert_eq!((mine.mem.load_be64(4008), theirs.mem.load_be64(2000)), (42, after));
    }
    // RoCEv2 has no opcode for masked atomics.
    let cqe = net.execute(0, &mut a, |w| {
        w.masked_fetch_add(theirs.remote(2000), 1, 1 << 31, mine.sge(4000, 8));
    });
    assert_error(&cqe, Syndrome::LocalQpOperation);
}

#[test]
fn remote_window_admits_its_qp_until_invalidated() {
    let mut net = Net::new(4);
    let [mut a, mut b] = net.pair(&Link::default());
    let [mut other, _far] = net.pair(&Link { psn: [5, 6], ..Link::default() });
    let mine = net.beds[0].mr(PF, a.pd, 8192, ALL);
    let others = net.beds[0].mr(PF, other.pd, 8192, ALL);
    let region = net.beds[1].mr(PF, b.pd, 8192, ALL);
    let window = net.beds[1].e.alloc_mw(PF, b.pd, Default::default()).unwrap();
    let bind = |net: &mut Net, b: &mut TestQp, key: Key, tag: u8| {
        let (mr, start) = (region.key, region.mem.addr());
        let umr = Umr::bind(key, tag, b.qpn, Access::REMOTE_ALL, mr, start, 4096);
        let cqe = net.execute(1, b, |w| {
            w.umr(&umr);
        });
        assert_eq!(cqe.error, None);
        Key::new(key.index(), tag)
    };
    let key = bind(&mut net, &mut b, window, 1);
    let at = verbs::wqe::Remote { addr: region.mem.addr(), rkey: key };
    mine.mem.write(0, &pattern(3000, 5));
    let cqe = net.execute(0, &mut a, |w| {
        w.rdma_write(at, &[mine.sge(0, 3000)]);
    });
    assert_eq!(cqe.error, None);
    assert_eq!(region.bytes(0, 3000), pattern(3000, 5));
    // Another QP of the same host presents the right key.
    let cqe = net.execute(0, &mut other, |w| {
        w.rdma_write(at, &[others.sge(0, 8)]);
    });
    assert_error(&cqe, Syndrome::RemoteAccess);
    // The peer invalidates the window with its SEND.
    net.beds[1].post_recv(&mut b, &[region.sge(8000, 100)]);
    let cqe = net.execute(0, &mut a, |w| _ = w.send_invalidate(&[mine.sge(0, 10)], key));
    assert_eq!(cqe.error, None);
    let cqe = b.recv_cq.reader.poll().unwrap();
    assert_eq!((cqe.opcode, cqe.imm), (cqe::opcode::RESP_SEND_INV, key.0));
    let key = bind(&mut net, &mut b, key, 2);
    let at = verbs::wqe::Remote { addr: region.mem.addr(), rkey: key };
    // The owner invalidates the window between two requests.
    assert_eq!(net.execute(0, &mut a, |w| _ = w.rdma_read(at, &[mine.sge(0, 8)])).error, None);
    assert_eq!(net.execute(1, &mut b, |w| _ = w.local_invalidate(key)).error, None);
    let cqe = net.execute(0, &mut a, |w| _ = w.rdma_read(at, &[mine.sge(0, 8)]));
    assert_error(&cqe, Syndrome::RemoteAccess);
    assert_eq!(net.beds[1].state(&b), QpState::Error);
}
