//! Tests of the withdrawal of blocks.

use super::world::Memory;
use super::*;
use crate::finemem::log::FullLog;

/// After a withdrawal the logs of the block name no owner, the bitmaps still mark it as taken, and
/// a delayed flush of an older header does not restore the log.
#[test]
fn withdrawn_block_has_no_owner_but_stays_taken() {
    for order in [0, 1, 4, 5, 8, 9, 10] {
        let memory = Memory::new(TWO_SECTIONS);
        let (owner, node) = (Tree::new(TWO_SECTIONS, user(1)), Tree::new(TWO_SECTIONS, user(0)));
        let late = Tree::new(TWO_SECTIONS, user(2));
        let block = take(&owner, &memory, order).unwrap();
        let places: Vec<Place> = match block.parts() {
            Some(parts) => parts.iter().map(Place::Section).collect(),
            None => vec![block.place()],
        };
        let before: Vec<Seen> = places.iter().map(|p| run(late.read_header(&memory, *p))).collect();
        run(node.withdraw(&memory, block));
        let firsts = match block.parts() {
            Some(parts) => parts.iter().map(SectionIndex::first_chunk).collect(),
            None => vec![block.chunk],
        };
        let check = |when: &str| {
            for chunk in &firsts {
                let log = memory.log(*chunk);
                assert!(!log.taken, "{block:?} {when}: {log:?}");
                assert_eq!((log.user, log.block(*chunk)), (user(1), block), "its last owner");
            }
        };
        check("withdrawn");
        // With the headers read before, and with the current ones.
        for (place, seen) in places.iter().zip(before) {
            run(late.flush(&memory, *place, seen));
            let now = run(late.read_header(&memory, *place));
            run(late.flush(&memory, *place, now));
        }
        check("flushed late");
        for section in TWO_SECTIONS.each_section() {
            assert_eq!(run(late.taken_by(&memory, user(1), section)), [], "{block:?}");
        }
        // No client gets any part of the block.
        let mut others = Vec::new();
        while let Some(other) = take(&late, &memory, 0) {
            others.push(other);
        }
        assert_eq!(others.len() as u32, 1024 - block.order.chunks());
        assert!(others.iter().all(|b| !block.chunks().contains(&b.chunk)));
        others.iter().for_each(|b| run(late.give_back(&memory, &[*b], user(2))));
        run(node.give_back(&memory, &[block], user(1)));
        memory.check_empty();
    }
}

/// A withdrawal can be repeated, and does not affect the neighbouring block that the header's log
/// names.
#[test]
fn withdrawal_is_idempotent_and_affects_one_block() {
    let memory = Memory::new(SMALL);
    let (one, two, node) =
        (Tree::new(SMALL, user(1)), Tree::new(SMALL, user(2)), Tree::new(SMALL, User::NOBODY));
    let block = take(&one, &memory, 1).unwrap();
    let other = take(&two, &memory, 1).unwrap();
    run(node.withdraw(&memory, block));
    memory.check_log(other, user(2));
    let (log, header): (FullLog, Header) =
        (memory.log(block.chunk), memory.span(SpanIndex::new(0)));
    assert_eq!(header.record().user, user(2), "the last change was by the other user");
    run(node.withdraw(&memory, block));
    assert_eq!((memory.log(block.chunk), memory.span(SpanIndex::new(0))), (log, header));
    // The newest block: the header's log then names no user.
    run(node.withdraw(&memory, other));
    assert_eq!(memory.span(SpanIndex::new(0)).record().user, User::NOBODY);
    assert!(!memory.log(other.chunk).taken);
    run(node.give_back(&memory, &[block, other], user(2)));
    memory.check_empty();
}

/// Blocks that were withdrawn but not freed are found: they are taken in the bitmaps but have no
/// owner in a log.
#[test]
fn withdrawn_but_unfreed_blocks_are_repaired() {
    for order in [0, 3, 5, 9, 10] {
        let memory = Memory::new(TWO_SECTIONS);
        let (one, two) = (Tree::new(TWO_SECTIONS, user(1)), Tree::new(TWO_SECTIONS, user(2)));
        let node = Tree::new(TWO_SECTIONS, User::NOBODY);
        let lost = take(&one, &memory, order).unwrap();
        let kept: Vec<Block> = (0..5).filter_map(|order| take(&two, &memory, order)).collect();
        run(node.withdraw(&memory, lost));
        TWO_SECTIONS.each_section().for_each(|section| run(node.free_ownerless(&memory, section)));
        kept.iter().for_each(|block| memory.check_log(*block, user(2)));
        kept.iter().for_each(|block| run(two.give_back(&memory, &[*block], user(2))));
        memory.check_empty();
    }
}
