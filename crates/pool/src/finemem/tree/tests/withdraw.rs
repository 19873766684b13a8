//! Taking back what logs say, ahead of the block.

use super::world::Memory;
use super::*;
use crate::finemem::log::FullLog;

/// After a withdrawal every log of the block says that it is nobody's, the bitmaps have it as taken, and a flush of the
/// header as it was seen before, however late, does not bring it back.
#[test]
fn a_withdrawn_block_is_nobodys_and_still_taken() {
    for order in [0, 1, 4, 5, 8, 9, 10] {
        let memory = Memory::new(TWO_SECTIONS);
        let (owner, node) = (Tree::new(TWO_SECTIONS, user(1)), Tree::new(TWO_SECTIONS, user(0)));
        let late = Tree::new(TWO_SECTIONS, user(2));
        let block = take(&owner, &memory, order).unwrap();
        let sections = block.parts().unwrap_or(block.chunk / 512..block.chunk / 512 + 1);
        let places: Vec<Place> = match order < SPAN_ORDER {
            true => vec![Place::span(block.chunk / CHUNKS)],
            false => sections.clone().map(Place::section).collect(),
        };
        let before: Vec<Seen> = places.iter().map(|p| run(late.look(&memory, *p))).collect();
        run(node.withdraw(&memory, block));
        let firsts = match block.parts() {
            Some(parts) => parts.map(|index| index * 512).collect(),
            None => vec![block.chunk],
        };
        let check = |when: &str| {
            for chunk in &firsts {
                let log = memory.log(*chunk);
                assert!(!log.taken, "{block:?} {when}: {log:?}");
                assert_eq!((log.user, Block::of(*chunk, log)), (user(1), block), "its last owner");
            }
        };
        check("withdrawn");
        // With what was seen before, and with what is there now.
        for (place, seen) in places.iter().zip(before) {
            run(late.flush(&memory, *place, seen));
            let now = run(late.look(&memory, *place));
            run(late.flush(&memory, *place, now));
        }
        check("flushed late");
        for section in 0..2 {
            assert_eq!(run(late.taken_by(&memory, user(1), section)), [], "{block:?}");
        }
        // Nobody is given any of it.
        let mut others = Vec::new();
        while let Some(other) = take(&late, &memory, 0) {
            others.push(other);
        }
        assert_eq!(others.len() as u32, 1024 - (1 << order));
        assert!(others.iter().all(|b| !block.chunks().contains(&b.chunk)));
        others.iter().for_each(|b| run(late.give_back(&memory, &[*b], user(2))));
        run(node.give_back(&memory, &[block], user(1)));
        memory.check_empty();
    }
}

/// It can be done again, and does not touch the block beside it that the header's log is about.
#[test]
fn a_withdrawal_is_done_again_and_leaves_others() {
    let memory = Memory::new(SMALL);
    let (one, two, node) =
        (Tree::new(SMALL, user(1)), Tree::new(SMALL, user(2)), Tree::new(SMALL, User::NOBODY));
    let block = take(&one, &memory, 1).unwrap();
    let other = take(&two, &memory, 1).unwrap();
    run(node.withdraw(&memory, block));
    memory.check_log(other, user(2));
    let (log, header): (FullLog, Header) = (memory.log(block.chunk), memory.span(0));
    assert_eq!(header.record().user, user(2), "the last change was the other's");
    run(node.withdraw(&memory, block));
    assert_eq!((memory.log(block.chunk), memory.span(0)), (log, header));
    // The newest one: the header's log becomes one of nobody.
    run(node.withdraw(&memory, other));
    assert_eq!(memory.span(0).record().user, User::NOBODY);
    assert!(!memory.log(other.chunk).taken);
    run(node.give_back(&memory, &[block, other], user(2)));
    memory.check_empty();
}

/// What was withdrawn and not given back is found by that: bits that are taken and no log has as anybody's.
#[test]
fn what_was_withdrawn_and_not_given_back_is_mended() {
    for order in [0, 3, 5, 9, 10] {
        let memory = Memory::new(TWO_SECTIONS);
        let (one, two) = (Tree::new(TWO_SECTIONS, user(1)), Tree::new(TWO_SECTIONS, user(2)));
        let node = Tree::new(TWO_SECTIONS, User::NOBODY);
        let lost = take(&one, &memory, order).unwrap();
        let kept: Vec<Block> = (0..5).filter_map(|order| take(&two, &memory, order)).collect();
        run(node.withdraw(&memory, lost));
        (0..2).for_each(|section| run(node.mend(&memory, section)));
        kept.iter().for_each(|block| memory.check_log(*block, user(2)));
        kept.iter().for_each(|block| run(two.give_back(&memory, &[*block], user(2))));
        memory.check_empty();
    }
}
