//! Single commands and accesses, valid and hostile.

use std::sync::atomic::Ordering;

use super::*;
use crate::tdmem::command::COMMAND_BYTES;
use crate::tdmem::engine::{SLICE_CLEARED, SLICE_EXAMINED};
use crate::tdmem::layout::Part;

#[test]
fn stored_page_is_loaded_by_its_owner_only() {
    let mut bench = Bench::new(8, 0, 1);
    let (a, b) = (bench.store(1, 7), bench.store(2, 9));
    assert_ne!(a, b);
    assert_eq!((bench.load(1, a), bench.load(2, b)), (Some([7; 4096]), Some([9; 4096])));
    assert_eq!((bench.load(1, b), bench.load(2, a), bench.load(3, a)), (None, None, None));
    let someone = |tag| bench.engine.may_read(tag, a, 8) || bench.engine.may_write(tag, a, 8);
    for tag in [0, 1 << 16, 1 << 63, u64::MAX, 0x1_0001] {
        assert!(!someone(tag), "tag {tag:#x}");
    }
    bench.check();
}

#[test]
fn parts_of_the_region_do_not_overlap() {
    let layout = Layout { owners: OWNERS, slots: SLOTS, pages: 3 };
    let slots = u64::from(OWNERS) * u64::from(SLOTS) + 1;
    let mut at = 0;
    for slot in 0..slots {
        assert_eq!((layout.data(slot), layout.part(at, 4096)), (at, Some(Part::Data(slot))));
        at += 4096;
    }
    for slot in 0..slots {
        assert_eq!((layout.command(slot), layout.part(at, 64)), (at, Some(Part::Command(slot))));
        assert_eq!(layout.part(at + 64, 64), Some(Part::Answer(slot)));
        assert_eq!(layout.answer(slot), at + 64);
        assert_eq!(layout.part(at + 63, 2), None, "across the command's end");
        at += 128;
    }
    assert_eq!(layout.part(at, 1), None, "between the slots and the pages");
    at = at.next_multiple_of(4096);
    for page in 0..3 {
        assert_eq!((layout.page(page), layout.part(at, 4096)), (at, Some(Part::Page(page))));
        assert_eq!(layout.page_at(at), Some(page));
        assert_eq!((layout.page_at(at + 1), layout.part(at + 1, 4096)), (None, None));
        at += 4096;
    }
    assert_eq!((layout.bytes(), layout.part(at, 1), layout.page_at(at)), (at, None, None));
    assert_eq!((layout.page_at(0), layout.part(u64::MAX, 2)), (None, None));
    for owner in 1..=OWNERS {
        let first = layout.first_slot(Peer::Donee(owner));
        let has = |slot| layout.has_slot(Peer::Donee(owner), slot);
        assert!(has(first) && has(first + 1) && !has(first + 2));
        assert!(owner == 1 || !has(first - 1));
    }
    let own = layout.first_slot(Peer::Administrator);
    assert!(layout.has_slot(Peer::Administrator, own) && !layout.has_slot(Peer::Donee(4), own));
}

#[test]
fn peers_reach_their_own_slots_only() {
    let mut bench = Bench::new(4, 0, 1);
    let layout = bench.layout;
    let peers = [Peer::Donee(1), Peer::Donee(2), Peer::Donee(3), Peer::Administrator];
    for peer in peers {
        for holder in peers {
            let (slot, own) = (layout.first_slot(holder), peer == holder);
            let tag = peer.tag();
            assert_eq!(bench.engine.may_write(tag, layout.data(slot), 4096), own);
            assert_eq!(bench.engine.may_write(tag, layout.command(slot), 64), own);
            assert_eq!(bench.engine.may_read(tag, layout.answer(slot), 64), own);
            assert!(!bench.engine.may_write(tag, layout.answer(slot), 1), "an answer is forged");
            assert!(!bench.engine.may_read(tag, layout.data(slot), 1));
            assert!(!bench.engine.may_read(tag, layout.command(slot), 1));
        }
        for page in 0..4 {
            assert!(!bench.engine.may_write(peer.tag(), layout.page(page), 1));
            assert!(!bench.engine.may_read(peer.tag(), layout.page(page), 1));
        }
    }
    // The number of an owner without slots.
    assert!(!bench.engine.may_write(Peer::Donee(OWNERS + 1).tag(), layout.data(6), 1));
    // A WRITE that ended although it was refused has no effect.
    let command = bench.command(1, Operation::Store, 0);
    let foreign = layout.command(layout.first_slot(Peer::Donee(2)));
    bench.memory.write(foreign as usize, &command.to_bytes());
    bench.engine.written(Peer::Donee(1).tag(), foreign, 64);
    assert_eq!(bench.tables.free(), 4);
}

#[test]
fn forged_requester_is_refused() {
    let mut bench = Bench::new(4, 0, 1);
    let at = bench.store(2, 9);
    for operation in [Operation::Store, Operation::InvalidatePage, Operation::InvalidateArea] {
        for src_mid in [0, 2, 3, 4, 0xffff] {
            let command = Command { src_mid, ..bench.command(1, operation, at) };
            assert_eq!(bench.execute(Peer::Donee(1), &command).status, Status::Invalid);
        }
    }
    assert_eq!((bench.load(2, at), bench.tables.free()), (Some([9; 4096]), 3));
    assert_eq!(bench.tables.counts.refused.load(Ordering::Relaxed), 15);
    bench.check();
}

#[test]
fn foreign_and_second_invalidations_change_nothing() {
    let mut bench = Bench::new(4, 0, 1);
    let at = bench.store(1, 7);
    assert_eq!(bench.invalidate(2, at), Status::NotYours);
    assert_eq!(bench.load(1, at), Some([7; 4096]));
    assert_eq!(bench.invalidate(1, at), Status::Done);
    assert_eq!((bench.load(1, at), bench.tables.free()), (None, 4));
    assert_eq!(bench.invalidate(1, at), Status::NotYours, "twice");
    bench.check();
    let other = bench.store(2, 5);
    for wrong in [other + 1, other + 8, bench.layout.bytes(), u64::MAX, 4096] {
        assert_eq!(bench.invalidate(2, wrong), Status::Invalid, "{wrong:#x}");
    }
    assert_eq!(bench.invalidate(2, 0), Status::Invalid, "no page");
    let wrong_tier = Command { tier: 1, ..bench.command(2, Operation::InvalidatePage, other) };
    assert_eq!(bench.execute(Peer::Donee(2), &wrong_tier).status, Status::Invalid);
    assert_eq!((bench.load(2, other), bench.tables.free()), (Some([5; 4096]), 3));
}

#[test]
fn unaligned_and_long_reads_are_refused() {
    let mut bench = Bench::new(2, 0, 1);
    let (a, b) = (bench.store(1, 1), bench.store(1, 2));
    let (first, peer) = (a.min(b), Peer::Donee(1));
    assert!(bench.read(peer, first, 4096).is_some() && bench.read(peer, first + 100, 8).is_some());
    for (at, len) in
        [(first, 4097), (first, 8192), (first + 1, 4096), (first - 8, 16), (first + 4096, 4097)]
    {
        assert!(bench.read(peer, at, len).is_none(), "{len} bytes at {at}");
    }
}

#[test]
fn store_draws_a_new_page_and_clears_the_old_one() {
    let mut bench = Bench::new(16, 0, 3);
    let mut at = bench.store(1, 1);
    for value in 2..100 {
        let answer = bench.store_over(1, value, at);
        assert_eq!(answer.status, Status::Done);
        assert_ne!(answer.remote_addr, at, "a page was stored to its old place");
        assert_eq!(bench.load(1, at), None);
        at = answer.remote_addr;
        assert_eq!((bench.load(1, at), bench.tables.free()), (Some([value; 4096]), 15));
        bench.check();
    }
    let foreign = bench.store(2, 9);
    assert_eq!(bench.store_over(1, 0xee, foreign).status, Status::NotYours);
    assert_eq!(bench.store_over(1, 0xee, at + 64).status, Status::Invalid);
    let free = (0..16).find(|page| bench.tables.owner(*page) == 0).unwrap();
    let free = bench.layout.page(free);
    assert_eq!(bench.store_over(1, 0xee, free).status, Status::NotYours);
    assert_eq!((bench.load(1, at), bench.load(2, foreign)), (Some([99; 4096]), Some([9; 4096])));
    bench.check();
}

#[test]
fn full_memory_refuses_new_pages_and_overwrites_old_ones() {
    let mut bench = Bench::new(3, 1, 3);
    let held = [1, 2, 3].map(|value| bench.store(1, value));
    assert_eq!(bench.store_over(2, 9, 0).status, Status::Full);
    let answer = bench.store_over(1, 8, held[1]);
    assert_eq!((answer.status, answer.remote_addr), (Status::Done, held[1]));
    assert_eq!(bench.load(1, held[1]), Some([8; 4096]));
    assert_eq!(bench.tables.counts.overwrites.load(Ordering::Relaxed), 1);
    assert_eq!(bench.tables.counts.refused.load(Ordering::Relaxed), 0);
    assert_eq!(bench.invalidate(1, held[0]), Status::Done);
    assert_eq!(bench.store(2, 9), held[0]);
    assert_eq!(bench.load(2, held[0]), Some([9; 4096]));
    bench.check();
}

#[test]
fn target_tier_falls_back_silently_to_the_other() {
    for target in Tier::DONOR {
        let mut bench = Bench::new(5, 2, 3);
        let in_target = if target == Tier::Fast { 2 } else { 3 };
        for i in 0..5 {
            let command = bench.command(1, Operation::Store, 0);
            let answer =
                bench.execute(Peer::Donee(1), &Command { target_tier: target as u8, ..command });
            let page = bench.layout.page_at(answer.remote_addr).unwrap();
            assert_eq!(
                (answer.status, answer.tier),
                (Status::Done, bench.tables.tier_of(page) as u8)
            );
            assert_eq!(answer.tier == target as u8, i < in_target, "page {i} to {target}");
        }
        assert_eq!(bench.tables.counts.fallbacks.load(Ordering::Relaxed), 5 - in_target);
        for target_tier in [0, 3, 255] {
            let command = Command { target_tier, ..bench.command(1, Operation::Store, 0) };
            assert_eq!(bench.execute(Peer::Donee(1), &command).status, Status::Invalid);
        }
    }
}

#[test]
fn area_is_invalidated_in_bounded_slices() {
    let pages = SLICE_EXAMINED + 100;
    let mut bench = Bench::new(pages, 0, 3);
    for i in 0..200 {
        bench.store(1 + i % 2, 5);
    }
    let other = bench.pages_of(2);
    let mut next = 0;
    loop {
        let free = bench.tables.free();
        let command = bench.command(1, Operation::InvalidateArea, next);
        let answer = bench.execute(Peer::Donee(1), &command);
        assert!(bench.tables.free() - free <= SLICE_CLEARED);
        match answer.remote_addr {
            0 => break,
            address => {
                let (from, to) = (bench.layout.page_at(next), bench.layout.page_at(address));
                assert!(to.unwrap() - from.unwrap_or(0) <= SLICE_EXAMINED);
                next = address;
            }
        }
    }
    assert_eq!((bench.pages_of(1).len(), bench.pages_of(2)), (0, other));
    assert_eq!(bench.tables.counts.frees.load(Ordering::Relaxed), 100);
    bench.check();
    // The administrator frees for others; an owner that has nothing ends after the same slices.
    assert!(bench.invalidate_area(Peer::Administrator, 2) >= 4);
    assert_eq!(bench.tables.counts.reclaimed.load(Ordering::Relaxed), 100);
    assert_eq!((bench.invalidate_area(Peer::Administrator, 2), bench.tables.free()), (2, pages));
    bench.check();
}

#[test]
fn administrator_frees_areas_only() {
    let mut bench = Bench::new(4, 0, 1);
    let at = bench.store(1, 7);
    for operation in [Operation::Store, Operation::InvalidatePage] {
        let command = bench.command(1, operation, at);
        assert_eq!(bench.execute(Peer::Administrator, &command).status, Status::Invalid);
    }
    let command = bench.command(0, Operation::InvalidateArea, 0);
    assert_eq!(bench.execute(Peer::Administrator, &command).status, Status::Invalid);
    let command = bench.command(1, Operation::InvalidateArea, at + 1);
    assert_eq!(bench.execute(Peer::Administrator, &command).status, Status::Invalid);
    assert!(!bench.engine.may_read(Peer::Administrator.tag(), at, 8));
    assert_eq!(bench.load(1, at), Some([7; 4096]));
}

#[test]
fn command_in_several_parts_is_executed_once_at_its_end() {
    let mut bench = Bench::new(4, 0, 1);
    bench.set_data(1, &[3; 4096]);
    let (peer, command) = (Peer::Donee(1), bench.command(1, Operation::Store, 0).to_bytes());
    let at = bench.layout.command(bench.layout.first_slot(peer));
    assert!(bench.write_in_steps(peer, at, &command, 7));
    assert_eq!(bench.tables.free(), 3);
    // WRITEs that are not exactly a command are no command.
    for (from, to) in [(0, 63), (1, 64), (8, 16), (63, 64)] {
        assert!(bench.write(peer, at + from as u64, &command[from..to]));
    }
    let mut longer = command.to_vec();
    longer.push(0);
    assert!(!bench.write(peer, at, &longer));
    bench.engine.written(peer.tag(), at, 0);
    bench.engine.written(peer.tag(), u64::MAX, u64::MAX);
    assert_eq!(bench.tables.free(), 3);
}

#[test]
fn unknown_operations_are_answered() {
    let mut bench = Bench::new(4, 0, 1);
    let (peer, slot) = (Peer::Donee(1), bench.layout.first_slot(Peer::Donee(1)));
    for operation in (0..=255).filter(|operation| !(1..=3).contains(operation)) {
        let mut bytes = [0xff; COMMAND_BYTES];
        bytes[0] = operation;
        assert!(bench.write(peer, bench.layout.command(slot), &bytes));
        let answer = bench.read(peer, bench.layout.answer(slot), ANSWER_BYTES).unwrap();
        let answer = Answer::parse(&answer.try_into().unwrap()).unwrap();
        assert_eq!(answer, Answer::bare(u64::MAX, Status::Invalid));
    }
    assert_eq!(bench.tables.free(), 4);
}
