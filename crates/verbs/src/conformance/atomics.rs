//! CAS and FAA (IBTA vol. 1, chapter 9, atomic operations).

use super::pair::{Pair, Shape};
use super::{Bench, Case, always, with};
use crate::{Access, Feature, Key, MemoryRegion, Op, Remote, Sge, Status, WcOpcode};

pub fn cases<B: Bench>() -> Vec<Case<B>> {
    vec![
        always(
            "atomics.compare_and_swap",
            &["test_atomic.test_atomic_cmp_and_swap", "test_qpex.test_qp_ex_rc_atomic_cmp_swp"],
            compare_and_swap,
        ),
        always(
            "atomics.fetch_and_add",
            &["test_atomic.test_atomic_fetch_and_add", "test_qpex.test_qp_ex_rc_atomic_fetch_add"],
            fetch_and_add,
        ),
        always(
            "atomics.qp_without_the_right",
            &["test_atomic.test_atomic_invalid_qp_access"],
            qp_without_the_right,
        ),
        always(
            "atomics.region_without_the_right",
            &["test_atomic.test_atomic_invalid_mr_access"],
            region_without_the_right,
        ),
        always(
            "atomics.address_not_aligned",
            &["test_atomic.test_atomic_non_aligned_addr"],
            address_not_aligned,
        ),
        always("atomics.wrong_lkey", &["test_atomic.test_atomic_invalid_lkey"], wrong_lkey),
        always("atomics.wrong_rkey", &["test_atomic.test_atomic_invalid_rkey"], wrong_rkey),
        always("atomics.result_too_short", &[], result_too_short),
        always("atomics.in_flight_add_up", &[], in_flight_add_up),
        with(Feature::MaskedAtomics, "atomics.masked", &[], masked),
    ]
}

fn compare_and_swap<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    let swap = |compare, swap| Op::CompareSwap { at: s.at(64), compare, swap, old: c.sge(8, 8) };
    for (here, there) in [(1u64, 2u64), (1, 1), (u64::MAX, u64::MAX)] {
        s.put(64, &s.word(there));
        let done = c.ok(swap(here, 7));
        assert_eq!(done.opcode, WcOpcode::CompareSwap);
        assert_eq!(c.get(8, 8), c.word(there), "the old value");
        assert_eq!(s.get(64, 8), s.word(if here == there { 7 } else { there }));
    }
    // In the other direction; and the bytes beside the word have not changed.
    c.put(64, &c.word(5));
    s.ok(Op::CompareSwap { at: c.at(64), compare: 5, swap: 6, old: s.sge(8, 8) });
    assert_eq!(c.get(64, 8), c.word(6));
    assert_eq!((s.get(56, 8), s.get(72, 8)), (vec![0; 8], vec![0; 8]));
}

fn fetch_and_add<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    s.put(64, &s.word(u64::MAX - 10));
    let mut value = u64::MAX - 10;
    for add in [1u64, 9, 5, u64::MAX] {
        let done = c.ok(Op::FetchAdd { at: s.at(64), add, old: c.sge(8, 8) });
        assert_eq!(done.opcode, WcOpcode::FetchAdd);
        assert_eq!(c.get(8, 8), c.word(value));
        value = value.wrapping_add(add);
        assert_eq!(s.get(64, 8), s.word(value));
    }
}

/// Returns an FAA on the 8 bytes at `at`.
fn add<B: Bench>(p: &Pair<'_, B>, at: Remote) -> Op<'static> {
    Op::FetchAdd { at, add: 1, old: p.client.sge(0, 8) }
}

fn qp_without_the_right<B: Bench>(bench: &B) {
    let qp = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let p = Pair::of(bench, &Shape::default(), &Shape { qp, ..Shape::default() });
    p.refused(add(&p, p.server.at(0)), Status::RemoteAccess);
    assert_eq!(p.server.get(0, 8), [0; 8]);
}

fn region_without_the_right<B: Bench>(bench: &B) {
    let region = Access::LOCAL_ALL | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let p = Pair::of(bench, &Shape::default(), &Shape { region, ..Shape::default() });
    p.refused(add(&p, p.server.at(0)), Status::RemoteAccess);
    assert_eq!(p.server.get(0, 8), [0; 8]);
    p.client.ok(Op::WriteInline { to: p.server.at(0), data: &[1] });
}

fn address_not_aligned<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    for offset in [1, 2, 4, 7] {
        p.refused(add(&p, p.server.at(offset)), Status::RemoteInvalidRequest);
    }
    assert_eq!(p.server.get(0, 16), [0; 16]);
}

fn wrong_lkey<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let lkey = Key(p.client.mr.key().0 ^ 1);
    let old = Sge { lkey, ..p.client.sge(0, 8) };
    let c = p.client.run(Op::FetchAdd { at: p.server.at(0), add: 1, old });
    assert_eq!(c.status, Status::LocalProtection);
    assert_eq!(p.server.get(0, 8), [0; 8], "a failed atomic must change nothing");
}

fn wrong_rkey<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    for change in [1, 1 << 8, 1 << 31] {
        let rkey = Key(p.server.mr.key().0 ^ change);
        p.refused(add(&p, Remote { rkey, ..p.server.at(0) }), Status::RemoteAccess);
    }
    assert_eq!(p.server.get(0, 8), [0; 8]);
}

fn result_too_short<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let old = p.client.sge(0, 4);
    let c = p.client.run(Op::FetchAdd { at: p.server.at(0), add: 1, old });
    assert_eq!(c.status, Status::LocalLength);
    assert_eq!(p.server.get(0, 8), [0; 8]);
}

fn in_flight_add_up<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    let op = Op::FetchAdd { at: s.at(0), add: 3, old: c.sge(8, 8) };
    for round in 0..8u64 {
        (0..8).for_each(|id| c.post(round * 8 + id, op));
        for id in 0..8 {
            let done = c.next();
            assert_eq!((done.id, done.status), (round * 8 + id, Status::Success));
        }
    }
    assert_eq!(s.get(0, 8), s.word(3 * 64));
}

fn masked<B: Bench>(bench: &B) {
    let p = Pair::new(bench);
    let (c, s) = (&p.client, &p.server);
    s.put(0, &s.word(0x0001_ffff_0000_00ff));
    let (at, old) = (s.at(0), c.sge(0, 8));
    // Two fields of 32 bits: no carry from one into the other.
    let add = 0x0000_0001_ffff_ffff;
    c.ok(Op::MaskedFetchAdd { at, add, boundary: 1 << 31 | 1 << 63, old });
    assert_eq!(c.get(0, 8), c.word(0x0001_ffff_0000_00ff));
    assert_eq!(s.get(0, 8), s.word(0x0002_0000_0000_00fe));
    let masked = |compare, swap| Op::MaskedCompareSwap {
        at,
        compare,
        compare_mask: 0xff,
        swap,
        swap_mask: 0xffff_0000,
        old,
    };
    c.ok(masked(0xaa00_00fe, 0x1234_5678));
    assert_eq!(s.get(0, 8), s.word(0x0002_0000_1234_00fe), "only the masked bits");
    c.ok(masked(0xff, 0));
    assert_eq!(s.get(0, 8), s.word(0x0002_0000_1234_00fe), "not equal");
}
