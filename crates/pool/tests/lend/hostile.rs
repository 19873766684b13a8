//! A borrower whose owner is hostile: whatever the owner has written, nothing panics.

use pool::{BorrowedLanes, BorrowedMemory, Direction, Error, LaneTransfer, LentLanes};
use proptest::prelude::*;
use rnic::port::shm::LendableMemory;

fn mapped() -> BorrowedMemory {
    let lendable = LendableMemory::new(32 << 10).unwrap();
    let descriptors = lendable.descriptors().map(|fd| fd.try_clone_to_owned().unwrap());
    BorrowedMemory::map(descriptors).unwrap()
}

fn adopt(memory: &BorrowedMemory, state: Vec<u8>) -> Result<BorrowedLanes, Error> {
    let flags = rustix::event::EventfdFlags::NONBLOCK;
    let wake = rustix::event::eventfd(0, flags).unwrap();
    BorrowedLanes::adopt(memory, LentLanes { state, wake })
}

/// A state for a buffer of `bytes` bytes at `base`, with two QPs.
fn state_of(base: u64, bytes: u64, next: u32) -> Vec<u8> {
    let queues = format!(
        r#"{{"cqn":1,"ring":0,"record":4096,"entries":32,"next":{next},"qps":[
           {{"qpn":5,"slot":0,"ring":8192,"blocks":16}},
           {{"qpn":6,"slot":1,"ring":12288,"blocks":16}}]}}"#
    );
    [&7u32.to_le_bytes()[..], &base.to_le_bytes(), &bytes.to_le_bytes(), queues.as_bytes()].concat()
}

proptest! {
    #[test]
    fn random_state_is_refused(state in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(adopt(&mapped(), state).is_err());
    }

    #[test]
    fn changed_state_never_panics(
        changes in prop::collection::vec((0usize..300, any::<u8>()), 1..4),
        length in 0usize..400,
    ) {
        let mut state = state_of(1 << 40, 1 << 20, 0);
        changes.iter().for_each(|(at, byte)| {
            let at = at % state.len();
            state[at] = *byte;
        });
        state.truncate(length.max(20));
        if let Ok(mut lanes) = adopt(&mapped(), state) {
            let t = LaneTransfer { qp: 0, address: 1, rkey: 1, offset: 0, bytes: 1 };
            let _ = lanes.post(1, Direction::Read, &[t]);
            lanes.poll();
        }
    }

    #[test]
    fn forged_completions_never_panic(
        next in 0u32..0xff_ffff,
        counters in prop::collection::vec((any::<u16>(), 4u8..8, any::<bool>(), any::<u8>()), 32),
        lengths in prop::collection::vec(1usize..20, 1..20),
    ) {
        let memory = mapped();
        let mut lanes = adopt(&memory, state_of(1 << 40, 1 << 20, next)).unwrap();
        let transfer = |i: usize| {
            LaneTransfer { qp: (i % 2) as u16, address: 0, rkey: 0, offset: 0, bytes: 4096 }
        };
        for (round, length) in lengths.iter().enumerate() {
            let list: Vec<_> = (0..*length).map(transfer).collect();
            lanes.post(round as u64, Direction::Write, &list).unwrap();
            for (at, (counter, qpn, is_error, syndrome)) in counters.iter().enumerate() {
                let number = next as usize / 32 * 32 + at;
                let number = if number < next as usize { number + 32 } else { number };
                let mut cqe = [0; 64];
                cqe[55] = *syndrome;
                cqe[59] = *qpn;
                cqe[60..62].copy_from_slice(&counter.to_be_bytes());
                let opcode = if *is_error { 13 << 4 } else { 0 };
                cqe[63] = opcode | ((number + round * 32) / 32 % 2) as u8;
                memory.arena().write(at * 64, &cqe);
            }
            while lanes.poll().is_some() {}
        }
    }
}

#[test]
fn borrower_posts_only_what_is_lent() {
    let memory = mapped();
    assert!(adopt(&memory, state_of(u64::MAX - 10, 11, 0)).is_err(), "beyond all addresses");
    let mut lanes = adopt(&memory, state_of(1 << 40, 8192, 0)).unwrap();
    let first = LaneTransfer { qp: 0, address: 0, rkey: 0, offset: 4096, bytes: 4096 };
    let wrong = [
        LaneTransfer { qp: 2, ..first },
        LaneTransfer { offset: 4097, ..first },
        LaneTransfer { offset: u64::MAX, ..first },
        LaneTransfer { bytes: u32::MAX, ..first },
    ];
    for transfer in wrong {
        assert!(lanes.post(1, Direction::Read, &[first, transfer]).is_err(), "{transfer:?}");
    }
    assert!(lanes.post(1, Direction::Read, &[]).is_err());
    assert_eq!(lanes.in_flight(), 0);
    assert!(!lanes.post(1, Direction::Read, &[first; 17]).unwrap(), "more than the queue holds");
    assert!(lanes.post(1, Direction::Read, &[first; 16]).unwrap());
    let second = LaneTransfer { qp: 1, ..first };
    assert!(!lanes.post(2, Direction::Read, &[second, first]).unwrap(), "all or nothing");
    assert!(lanes.post(2, Direction::Read, &[second; 16]).unwrap());
    assert_eq!((lanes.in_flight(), lanes.poll()), (2, None));
    // An armed event ends with the lanes.
    lanes.arm().unwrap();
}
