//! READ, WRITE, atomics and SEND: data movement and completions.

use super::*;
use crate::limits::Limits;
use verbs::cqe::{self, Syndrome};
use verbs::wqe::{SE_SOLICITED, Sge, opcode};
use verbs::{Access, DmaMemory, Key};

#[test]
fn write_gathers_and_completes() {
    let mut bed = Bed::new();
    let (mut a, b) = bed.pair();
    let from = bed.mr(PF, a.pd, 4096, Access::NONE);
    let to = bed.mr(PF, b.pd, 4096, ALL);
    from.mem.write(100, b"hello, window");
    let nothing = Sge::default();
    let cqe = bed.execute(&mut a, |w| {
        w.rdma_write(to.remote(200), &[from.sge(100, 5), nothing, from.sge(105, 8)]);
    });
    assert_eq!(to.bytes(200, 14), b"hello, window\0");
    assert_eq!((cqe.opcode, cqe.wqe_opcode), (cqe::opcode::REQ, opcode::RDMA_WRITE));
    assert_eq!((cqe.qpn, cqe.byte_count, cqe.wqe_counter), (a.qpn, 13, 0));
    assert_eq!((cqe.error, cqe.timestamp_ns), (None, bed.now - 100));
    let cqe = bed.execute(&mut a, |w| {
        w.rdma_write_inline(to.remote(300), &[7; 100]);
    });
    assert_eq!(to.bytes(299, 102), [&[0u8][..], &[7; 100], &[0]].concat());
    assert_eq!((cqe.byte_count, cqe.wqe_counter), (100, 2), "the first WQE took two blocks");
    assert_eq!(bed.e.query_qp(PF, a.qpn).unwrap().progress.executed, 2);
    let s = bed.e.stats();
    assert_eq!((s.wqes[8], s.bytes, s.completions, s.wqes_total()), (2, 113, 2, 2));
}

#[test]
fn unsignaled_wqe_writes_no_completion() {
    let mut bed = Bed::new();
    let (mut a, _b) = bed.pair();
    bed.post(&mut a, |w| {
        w.nop();
    });
    assert_eq!(bed.run(), 1);
    assert_eq!(a.send_cq.reader.poll(), None);
    let cqe = bed.execute(&mut a, |w| {
        w.nop_filling(15);
    });
    assert_eq!(cqe.wqe_counter, 1);
    assert_eq!(bed.e.query_qp(PF, a.qpn).unwrap().progress.send_consumer, 16);
}

#[test]
fn read_scatters_in_order() {
    let mut bed = Bed::new();
    let (mut a, b) = bed.pair();
    let to = bed.mr(PF, a.pd, 4096, Access::LOCAL_WRITE);
    let from = bed.mr(PF, b.pd, 4096, Access::REMOTE_READ);
    let data: Vec<u8> = (0..=255).collect();
    from.mem.write(1000, &data);
    let pieces = [(7, 1), (100, 3), (50, 8), (200, 100), (8, 2), (400, 142)];
    let list: Vec<Sge> = pieces.iter().map(|&(at, len)| to.sge(at, len)).collect();
    let cqe = bed.execute(&mut a, |w| {
        w.rdma_read(from.remote(1000), &list);
    });
    assert_eq!((cqe.wqe_opcode, cqe.byte_count), (opcode::RDMA_READ, 256));
    let mut at = 0;
    for (place, len) in pieces {
        assert_eq!(to.bytes(place, len), data[at..at + len]);
        at += len;
    }
}

#[test]
fn overlapping_transfers_are_memmoves() {
    let mut bed = Bed::new();
    let pd = bed.pd(PF);
    let shape = bed.shape(PF, pd);
    let (mut a, b) = (bed.qp(&shape), bed.qp(&shape));
    bed.connect(&a, &b);
    let m = bed.mr(PF, pd, 4096, ALL);
    let data: Vec<u8> = (0..1000).map(|i| (i * 7) as u8).collect();
    for (from, to) in [(0, 13), (13, 0), (5, 5)] {
        m.mem.write(from, &data);
        bed.execute(&mut a, |w| {
            w.rdma_write(m.remote(to), &[m.sge(from, 1000)]);
        });
        assert_eq!(m.bytes(to, 1000), data);
        m.mem.write(from, &data);
        bed.execute(&mut a, |w| {
            w.rdma_read(m.remote(from), &[m.sge(to, 1000)]);
        });
        assert_eq!(m.bytes(to, 1000), data);
    }
}

#[test]
fn zero_key_gives_no_access() {
    let mut bed = Bed::new();
    let (mut a, b) = bed.pair();
    let nowhere = verbs::wqe::Remote { addr: 1, rkey: Key(0xdead_beef) };
    for list in [&[][..], &[Sge::default()]] {
        assert_eq!(bed.execute(&mut a, |w| _ = w.rdma_write(nowhere, list)).error, None);
        assert_eq!(bed.execute(&mut a, |w| _ = w.rdma_read(nowhere, list)).error, None);
    }
    let _ = b;
}

#[test]
fn atomics_work_on_big_endian_words() {
    let mut bed = Bed::new();
    let (mut a, b) = bed.pair();
    let old = bed.mr(PF, a.pd, 64, Access::LOCAL_WRITE);
    let word = bed.mr(PF, b.pd, 64, Access::LOCAL_WRITE | Access::REMOTE_ATOMIC);
    let check = |bed: &Bed, before: u64, after: u64| {
        assert_eq!(old.mem.load_be64(8), before);
        assert_eq!(word.mem.load_be64(16), after);
        let _ = bed;
    };
    word.mem.store_be64(16, 0xff);
    let cqe = bed.execute(&mut a, |w| _ = w.fetch_add(word.remote(16), 1, old.sge(8, 8)));
    assert_eq!((cqe.wqe_opcode, cqe.byte_count), (opcode::ATOMIC_FA, 8));
    check(&bed, 0xff, 0x100);
    assert_eq!(word.bytes(16, 8), [0, 0, 0, 0, 0, 0, 1, 0]);
    bed.execute(&mut a, |w| _ = w.fetch_add(word.remote(16), u64::MAX, old.sge(8, 8)));
    check(&bed, 0x100, 0xff);
    bed.execute(&mut a, |w| _ = w.compare_swap(word.remote(16), 0xfe, 7, old.sge(8, 8)));
    check(&bed, 0xff, 0xff);
    bed.execute(&mut a, |w| _ = w.compare_swap(word.remote(16), 0xff, 7, old.sge(8, 8)));
    check(&bed, 0xff, 7);
    // With a compare mask of 0 the CAS always swaps.
    bed.execute(&mut a, |w| {
        w.masked_compare_swap(word.remote(16), (0, 0), (0, u64::MAX), old.sge(8, 8));
    });
    check(&bed, 7, 0);
    word.mem.store_be64(16, 0x1122_3344_5566_7788);
    bed.execute(&mut a, |w| {
        let (compare, swap) = ((0x88, 0xff), (0xaabb << 48, 0xffff << 48));
        w.masked_compare_swap(word.remote(16), compare, swap, old.sge(8, 8));
    });
    check(&bed, 0x1122_3344_5566_7788, 0xaabb_3344_5566_7788);
    // Only the 16-bit field in the middle wraps around.
    word.mem.store_be64(16, 0x0000_ffff_0000_0001);
    bed.execute(&mut a, |w| {
        w.masked_fetch_add(word.remote(16), 1 << 32, 1 << 47, old.sge(8, 8));
    });
    check(&bed, 0x0000_ffff_0000_0001, 1);
    // Every byte is a field.
    word.mem.store_be64(16, 0xff00_7f80_01fe_ffff);
    let ends = 0x8080_8080_8080_8080;
    bed.execute(&mut a, |w| {
        w.masked_fetch_add(word.remote(16), 0x0101_0101_0101_0101, ends, old.sge(8, 8));
    });
    check(&bed, 0xff00_7f80_01fe_ffff, 0x0001_8081_02ff_0000);
}

#[test]
fn send_scatters_into_the_next_receive() {
    let mut bed = Bed::new();
    let (mut a, mut b) = bed.pair();
    let from = bed.mr(PF, a.pd, 256, Access::NONE);
    let to = bed.mr(PF, b.pd, 256, Access::LOCAL_WRITE);
    from.mem.write(0, b"abcdefghijkl");
    let end = Sge { addr: 0, len: 0, lkey: verbs::wqe::INVALID_LKEY };
    bed.post_recv(&mut b, &[to.sge(10, 3), to.sge(20, 100), end, to.sge(0, 200)]);
    bed.post_recv(&mut b, &[to.sge(128, 64)]);
    let cqe = bed.execute(&mut a, |w| _ = w.send(&[from.sge(0, 2), from.sge(2, 10)]));
    assert_eq!((cqe.wqe_opcode, cqe.byte_count), (opcode::SEND, 12));
    assert_eq!((to.bytes(10, 3), to.bytes(20, 10)), (b"abc".to_vec(), b"defghijkl\0".to_vec()));
    let cqe = b.recv_cq.reader.poll().unwrap();
    assert_eq!((cqe.opcode, cqe.qpn), (cqe::opcode::RESP_SEND, b.qpn));
    assert_eq!((cqe.byte_count, cqe.wqe_counter, cqe.solicited), (12, 0, false));
    bed.post(&mut a, |w| _ = w.send_imm(&[], 0x1234_5678).flags(SE_SOLICITED));
    bed.run();
    let cqe = b.recv_cq.reader.poll().unwrap();
    assert_eq!((cqe.opcode, cqe.imm), (cqe::opcode::RESP_SEND_IMM, 0x1234_5678));
    assert_eq!((cqe.byte_count, cqe.wqe_counter, cqe.solicited), (0, 1, true));
    assert_eq!(b.recv_cq.reader.poll(), None);
}

#[test]
fn inline_send_carries_its_data() {
    let mut bed = Bed::new();
    let (mut a, mut b) = bed.pair();
    let to = bed.mr(PF, b.pd, 256, Access::LOCAL_WRITE);
    bed.post_recv(&mut b, &[to.sge(0, 100)]);
    assert_eq!(bed.execute(&mut a, |w| _ = w.send_inline(b"inline")).error, None);
    assert_eq!(to.bytes(0, 7), b"inline\0");
}

#[test]
fn write_with_immediate_consumes_a_receive_but_not_its_sges() {
    let mut bed = Bed::new();
    let (mut a, mut b) = bed.pair();
    let from = bed.mr(PF, a.pd, 64, Access::NONE);
    let to = bed.mr(PF, b.pd, 64, ALL);
    from.mem.write(0, b"data");
    let write_imm = |w: &mut verbs::wqe::Builder| {
        w.rdma_write(to.remote(8), &[from.sge(0, 4)]);
    };
    // The builder lacks this operation: patch opcode and immediate.
    let at = bed.write_wqe(&mut a, |w| write_imm(w));
    a.ring.write(at + 3, &[opcode::RDMA_WRITE_IMM]);
    a.ring.write(at + 12, &77u32.to_be_bytes());
    bed.e.doorbell(a.qpn, a.producer);
    bed.run();
    assert_eq!(to.bytes(8, 4), [0; 4], "a WRITE without a receive WQE writes nothing");
    bed.post_recv(&mut b, &[to.sge(32, 16)]);
    bed.run();
    assert_eq!((to.bytes(8, 4), to.bytes(32, 16)), (b"data".to_vec(), vec![0; 16]));
    let cqe = b.recv_cq.reader.poll().unwrap();
    assert_eq!((cqe.opcode, cqe.imm), (cqe::opcode::RESP_WR_IMM, 77));
    assert_eq!((cqe.byte_count, cqe.wqe_counter), (4, 0));
}

#[test]
fn long_transfers_run_in_slices_and_yield_to_other_qps() {
    let mut bed = Bed::with(Limits { slice_bytes: 1000, qp_turn: 100, ..Limits::default() });
    let (mut a, b) = bed.pair();
    let (mut c, d) = bed.pair();
    let from = bed.mr(PF, a.pd, 10_000, Access::LOCAL_WRITE);
    let to = bed.mr(PF, b.pd, 10_000, ALL);
    let data: Vec<u8> = (0..10_000).map(|i| (i / 7) as u8).collect();
    from.mem.write(0, &data);
    bed.post(&mut a, |w| {
        w.rdma_write(to.remote(0), &[from.sge(0, 3_333), from.sge(3_333, 6_667)]).signaled();
    });
    bed.e.poll(1, 1);
    assert_eq!((to.bytes(999, 1), to.bytes(1000, 1)), (vec![data[999]], vec![0]));
    // The other QP runs after one slice.
    bed.post(&mut c, |w| _ = w.nop().signaled());
    bed.e.poll(2, 2);
    assert!(c.send_cq.reader.poll().is_some());
    assert!(a.send_cq.reader.poll().is_none());
    // The WQE was already fetched, so a change of the ring has no effect.
    a.ring.zero(0, 64);
    bed.run();
    assert_eq!(to.bytes(0, 10_000), data);
    let cqe = a.send_cq.reader.poll().unwrap();
    assert_eq!((cqe.byte_count, cqe.error), (10_000, None));
    from.mem.zero(0, 10_000);
    let cqe = bed.execute(&mut a, |w| {
        w.rdma_read(to.remote(0), &[from.sge(0, 1), from.sge(1, 9_999)]);
    });
    assert_eq!((cqe.byte_count, from.bytes(0, 10_000)), (10_000, data));
    let _ = d;
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no madvise")]
fn write_of_zeros_over_thin_memory_discards_its_pages() {
    const PAGE: usize = 4096;
    let mut bed = Bed::with(Limits { slice_bytes: 8 << 10, ..Limits::default() });
    let (mut a, b) = bed.pair();
    let len = 64 * PAGE;
    let thin = DmaMemory::thin(len, PAGE, 8 * PAGE).unwrap();
    let to = Mr { key: bed.e.reg_mr(PF, b.pd, thin.clone(), thin.addr(), ALL).unwrap(), mem: thin };
    let zeros = DmaMemory::zeros(len).unwrap();
    let key = bed.e.reg_mr(PF, a.pd, zeros.clone(), zeros.addr(), Access::LOCAL_READ).unwrap();
    let zeros = Mr { mem: zeros, key };
    // Offset and length: the whole memory with its kept part; whole pages; partial pages at both
    // ends; a partial page at the end.
    for (from, bytes, left) in [
        (0, len, 8 * PAGE),
        (16 * PAGE, 16 * PAGE, 48 * PAGE),
        (16 * PAGE + 8, 2 * PAGE, len),
        (16 * PAGE, 2 * PAGE + 8, len - 2 * PAGE),
    ] {
        to.mem.write(0, &vec![0xa5; len]);
        let cqe = bed.execute(&mut a, |w| {
            w.rdma_write(to.remote(from), &[zeros.sge(0, bytes)]);
        });
        assert_eq!((cqe.error, cqe.byte_count), (None, bytes as u32));
        // Count before reading the pages, because a read maps the kernel's zero page.
        assert_eq!(mapped(&to.mem), left, "{bytes} bytes at {from}");
        let is_right = |(i, byte): (usize, &u8)| (*byte == 0) == (from..from + bytes).contains(&i);
        assert!(to.bytes(0, len).iter().enumerate().all(is_right), "{bytes} bytes at {from}");
    }
    // Zeros in an ordinary region are ordinary bytes.
    let own = bed.mr(PF, a.pd, 2 * PAGE, Access::NONE);
    to.mem.write(0, &vec![0xa5; len]);
    bed.execute(&mut a, |w| _ = w.rdma_write(to.remote(16 * PAGE), &[own.sge(0, 2 * PAGE)]));
    assert_eq!(mapped(&to.mem), len);
    assert_eq!(to.bytes(16 * PAGE, 2 * PAGE), vec![0; 2 * PAGE]);
}

#[test]
fn key_is_checked_at_every_slice() {
    let mut bed = Bed::with(Limits { slice_bytes: 1000, ..Limits::default() });
    let (mut a, b) = bed.pair();
    let from = bed.mr(PF, a.pd, 4_000, Access::NONE);
    let to = bed.mr(PF, b.pd, 4_000, ALL);
    from.mem.write(0, &[1; 4_000]);
    bed.post(&mut a, |w| _ = w.rdma_write(to.remote(0), &[from.sge(0, 4_000)]));
    bed.e.poll(1, 2);
    bed.e.dereg_mr(PF, to.key).unwrap();
    bed.run();
    assert_eq!(to.bytes(1999, 2), [1, 0]);
    assert_error(&a.send_cq.reader.poll().unwrap(), Syndrome::RemoteAccess);
}

#[test]
fn ready_qps_alternate() {
    // A signaled NOP costs 192 bytes of work.
    let mut bed = Bed::with(Limits { qp_turn: 2 * 192, ..Limits::default() });
    let (mut a, _b) = bed.pair();
    let (mut c, _d) = bed.pair();
    for _ in 0..4 {
        bed.post(&mut a, |w| _ = w.nop().signaled());
        bed.post(&mut c, |w| _ = w.nop().signaled());
    }
    let mut order = Vec::new();
    while bed.e.has_ready() {
        assert_eq!(bed.e.poll(0, 1), 1);
        for (name, q) in [('a', &mut a), ('c', &mut c)] {
            while q.send_cq.reader.poll().is_some() {
                order.push(name);
            }
        }
    }
    assert_eq!(order.len(), 8);
    let mut budgeted = Vec::new();
    for _ in 0..4 {
        bed.post(&mut a, |w| _ = w.nop().signaled());
        bed.post(&mut c, |w| _ = w.nop().signaled());
    }
    while bed.e.has_ready() {
        bed.e.poll(0, 2);
        for (name, q) in [('a', &mut a), ('c', &mut c)] {
            while q.send_cq.reader.poll().is_some() {
                budgeted.push(name);
            }
        }
    }
    assert_eq!(budgeted.iter().collect::<String>(), "aaccaacc");
}
