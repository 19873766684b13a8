//! Round trips of encoding and decoding, and decoding of arbitrary bytes.

use super::*;
use crate::{Access, Cqn};
use proptest::prelude::*;

fn decoded(b: &Builder) -> (Control, Vec<u8>) {
    let bytes = b.bytes().to_vec();
    let ctrl = Control::from_bytes(bytes[..16].try_into().unwrap());
    (ctrl, bytes)
}

fn arb_sge() -> impl Strategy<Value = Sge> {
    (any::<u64>(), 1..INLINE, any::<u32>()).prop_map(|(addr, len, k)| Sge {
        addr,
        len,
        lkey: Key(k),
    })
}

fn arb_remote() -> impl Strategy<Value = Remote> {
    (any::<u64>(), any::<u32>()).prop_map(|(addr, k)| Remote { addr, rkey: Key(k) })
}

proptest! {
    #[test]
    fn transfers_round_trip(
        qpn in 0..=Qpn::MAX,
        index: u16,
        remote in arb_remote(),
        list in proptest::collection::vec(arb_sge(), 0..60),
    ) {
        let mut b = Builder::new(Qpn::new(qpn), index);
        b.rdma_write(remote, &list).signaled();
        let (ctrl, bytes) = decoded(&b);
        prop_assert_eq!((ctrl.qpn, ctrl.index, ctrl.signaled()), (Qpn::new(qpn), index, true));
        prop_assert_eq!(ctrl.blocks(), b.blocks());
        match decode(&ctrl, &bytes).unwrap() {
            Wqe::Write { to, from, imm: None } => {
                prop_assert_eq!(to, remote);
                prop_assert_eq!(from.iter().collect::<Vec<_>>(), list.clone());
            }
            other => prop_assert!(false, "{other:?}"),
        }
        b.rdma_read(remote, &list);
        let (ctrl, bytes) = decoded(&b);
        match decode(&ctrl, &bytes).unwrap() {
            Wqe::Read { from, to } => {
                prop_assert_eq!(from, remote);
                prop_assert_eq!(to.total_len(), list.iter().map(|s| s.len as u64).sum::<u64>());
            }
            other => prop_assert!(false, "{other:?}"),
        }
        b.send(&list);
        let (ctrl, bytes) = decoded(&b);
        prop_assert!(!ctrl.signaled());
        match decode(&ctrl, &bytes).unwrap() {
            Wqe::Send { from, .. } => prop_assert_eq!(from.iter().collect::<Vec<_>>(), list),
            other => prop_assert!(false, "{other:?}"),
        }
    }

    #[test]
    fn inline_data_round_trips(data in proptest::collection::vec(any::<u8>(), 0..900)) {
        let mut b = Builder::new(Qpn::new(1), 0);
        b.rdma_write_inline(Remote::default(), &data);
        let (ctrl, bytes) = decoded(&b);
        match decode(&ctrl, &bytes).unwrap() {
            Wqe::Write { from: Sges::Inline(got), .. } => prop_assert_eq!(got, &data[..]),
            other => prop_assert!(false, "{other:?}"),
        }
        b.send_inline(&data);
        let (ctrl, bytes) = decoded(&b);
        match decode(&ctrl, &bytes).unwrap() {
            Wqe::Send { from: Sges::Inline(got), .. } => prop_assert_eq!(got, &data[..]),
            other => prop_assert!(false, "{other:?}"),
        }
    }

    #[test]
    fn atomics_round_trip(at in arb_remote(), v: [u64; 4], old in arb_sge()) {
        let [compare, compare_mask, swap, swap_mask] = v;
        let mut b = Builder::new(Qpn::new(1), 0);
        b.masked_compare_swap(at, (compare, compare_mask), (swap, swap_mask), old);
        let (ctrl, bytes) = decoded(&b);
        let want = Wqe::CompareSwap { at, compare, compare_mask, swap, swap_mask, old };
        prop_assert_eq!(decode(&ctrl, &bytes).unwrap(), want);
        b.compare_swap(at, compare, swap, old);
        let (ctrl, bytes) = decoded(&b);
        let (m, s) = (u64::MAX, u64::MAX);
        let want = Wqe::CompareSwap { at, compare, compare_mask: m, swap, swap_mask: s, old };
        prop_assert_eq!(decode(&ctrl, &bytes).unwrap(), want);
        b.masked_fetch_add(at, swap, compare, old);
        let (ctrl, bytes) = decoded(&b);
        let want = Wqe::FetchAdd { at, add: swap, boundary: compare, old };
        prop_assert_eq!(decode(&ctrl, &bytes).unwrap(), want);
        b.fetch_add(at, swap, old);
        let (ctrl, bytes) = decoded(&b);
        let want = Wqe::FetchAdd { at, add: swap, boundary: 0, old };
        prop_assert_eq!(decode(&ctrl, &bytes).unwrap(), want);
    }

    #[test]
    fn windows_round_trip(key: u32, tag: u8, qpn in 0..=Qpn::MAX, mr: u32, start: u64, len: u32) {
        let mut b = Builder::new(Qpn::new(1), 0);
        for umr in [
            Umr::bind(Key(key), tag, Qpn::new(qpn), Access::REMOTE_ALL, Key(mr), start, len),
            Umr::unbind(Key(key), true),
            Umr::unbind(Key(key), false),
        ] {
            b.umr(&umr);
            let (ctrl, bytes) = decoded(&b);
            prop_assert_eq!(b.blocks(), if umr.free { 2 } else { 3 });
            prop_assert_eq!(decode(&ctrl, &bytes).unwrap(), Wqe::Umr(umr));
        }
    }

    #[test]
    fn arbitrary_bytes_decode_or_are_rejected(
        bytes in proptest::collection::vec(any::<u8>(), 1024),
    ) {
        let ctrl = Control::from_bytes(bytes[..16].try_into().unwrap());
        if let Ok(Wqe::Send { from, .. } | Wqe::Write { from, .. }) = decode(&ctrl, &bytes) {
            from.total_len();
        }
    }
}

#[test]
fn control_operations_round_trip() {
    let mut b = Builder::new(Qpn::new(0x123), 9);
    b.wait(Cqn::new(7), 0xff_ffff);
    let (ctrl, bytes) = decoded(&b);
    assert_eq!(decode(&ctrl, &bytes), Ok(Wqe::Wait { cqn: Cqn::new(7), index: 0xff_ffff }));
    b.send_enable(Qpn::new(8), 64);
    let (ctrl, bytes) = decoded(&b);
    assert_eq!(decode(&ctrl, &bytes), Ok(Wqe::SendEnable { qpn: Qpn::new(8), index: 64 }));
    b.receive_enable(Qpn::new(8), 65);
    let (ctrl, bytes) = decoded(&b);
    assert_eq!(decode(&ctrl, &bytes), Ok(Wqe::ReceiveEnable { qpn: Qpn::new(8), index: 65 }));
    b.local_invalidate(Key(0xabcd));
    let (ctrl, bytes) = decoded(&b);
    assert_eq!(decode(&ctrl, &bytes), Ok(Wqe::LocalInvalidate { key: Key(0xabcd) }));
    b.nop_filling(15);
    let (ctrl, bytes) = decoded(&b);
    assert_eq!((ctrl.blocks(), decode(&ctrl, &bytes)), (15, Ok(Wqe::Nop)));
}

#[test]
fn short_or_unknown_wqe_is_rejected() {
    let bytes = [0u8; 1024];
    let mut ctrl = Control { opcode: opcode::RDMA_READ, ds: 1, ..Control::default() };
    assert_eq!(
        decode(&ctrl, &bytes),
        Err(DecodeError::TooShort { opcode: opcode::RDMA_READ, ds: 1 })
    );
    ctrl = Control { opcode: 0x3e, ds: 1, ..Control::default() };
    assert_eq!(decode(&ctrl, &bytes), Err(DecodeError::Opcode { opcode: 0x3e }));
    ctrl = Control { opcode: opcode::NOP, ds: 0, ..Control::default() };
    assert!(matches!(decode(&ctrl, &bytes), Err(DecodeError::TooShort { .. })));
}
