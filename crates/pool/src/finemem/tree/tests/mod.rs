//! The tree, stopped and crashed between any two verbs.

mod explore;
mod random;
mod world;

use super::*;
use crate::finemem::layout::{Block, SPAN_ORDER};
use world::{Memory, run};

const SMALL: Shape = Shape { chunks: 32, chunk_bytes: 4096 };
const SECTION: Shape = Shape { chunks: 512, chunk_bytes: 4096 };

fn user(number: u16) -> User {
    User::new(number).unwrap()
}

#[test]
fn every_size_is_taken_and_given_back() {
    for order in 0..=9 {
        let memory = Memory::new(SECTION);
        let tree = Tree::new(SECTION, user(1));
        let mut blocks = Vec::new();
        while let Some(block) = run(tree.allocate(&memory, order)) {
            blocks.push(block);
        }
        assert_eq!(blocks.len(), 512 >> order, "order {order}");
        memory.check_distinct(&blocks);
        blocks.iter().for_each(|b| run(tree.give_back(&memory, &[*b], user(1))));
        memory.check_empty();
    }
}

#[test]
fn a_pool_that_ends_within_a_span_gives_out_what_it_has() {
    for chunks in [1, 2, 31, 33, 513, 530] {
        let shape = Shape { chunks, chunk_bytes: 4096 };
        let memory = Memory::new(shape);
        let tree = Tree::new(shape, user(3));
        let mut blocks = Vec::new();
        while let Some(block) = run(tree.allocate(&memory, 0)) {
            assert!(block.chunk < chunks);
            blocks.push(block);
        }
        assert_eq!(blocks.len() as u32, chunks);
        blocks.iter().for_each(|b| run(tree.give_back(&memory, &[*b], user(3))));
        memory.check_empty();
    }
}

/// One CAS commits: the others are the log, and the opening of the first.
#[test]
fn verbs_of_an_allocation() {
    let memory = Memory::new(SECTION);
    let tree = Tree::new(SECTION, user(1));
    run(tree.allocate(&memory, 0)).unwrap();
    memory.count();
    let block = run(tree.allocate(&memory, 0)).unwrap();
    assert_eq!(memory.count(), (2, 2), "reads and CASes of an allocation in a span that is known");
    run(tree.give_back(&memory, &[block], user(1)));
    assert_eq!(memory.count(), (2, 2), "reads and CASes of giving back");
    run(tree.allocate(&memory, SPAN_ORDER)).unwrap();
    memory.count();
    run(tree.allocate(&memory, SPAN_ORDER)).unwrap();
    assert_eq!(memory.count(), (2, 2), "reads and CASes of taking a span");
}

#[test]
fn several_blocks_of_a_span_are_given_back_by_one_cas() {
    let memory = Memory::new(SMALL);
    let tree = Tree::new(SMALL, user(1));
    let blocks: Vec<Block> = (0..4).map(|_| run(tree.allocate(&memory, 1)).unwrap()).collect();
    memory.count();
    run(tree.give_back(&memory, &blocks[..3], user(1)));
    assert_eq!(memory.count(), (2, 2));
    run(tree.give_back(&memory, &blocks[3..], user(1)));
    memory.check_empty();
}

#[test]
fn who_finds_a_full_span_says_so_and_who_finds_room_too() {
    let memory = Memory::new(SECTION);
    let (one, two) = (Tree::new(SECTION, user(1)), Tree::new(SECTION, user(2)));
    let blocks: Vec<Block> = (0..32).map(|_| run(one.allocate(&memory, 0)).unwrap()).collect();
    let span = blocks[0].chunk / 32;
    assert_eq!(memory.section(0).spread(span), Spread::Full);
    run(two.give_back(&memory, &blocks[..1], user(1)));
    assert_eq!(memory.section(0).spread(span), Spread::Normal);
    // As after a hint that was lost.
    memory.set(SECTION.section(0), memory.section(0).with_spread(span, Spread::Full));
    let all: Vec<Block> = (0..481).map(|_| run(two.allocate(&memory, 0)).unwrap()).collect();
    memory.check_distinct(&all);
    assert_eq!(run(one.allocate(&memory, 0)), None);
}

/// Where the CAS fails often the span is marked, and others prefer another one.
#[test]
fn contention_is_marked_avoided_and_forgotten() {
    let memory = Memory::new(SECTION);
    let one = Tree::new(SECTION, user(1));
    let span = run(one.allocate(&memory, 0)).unwrap().chunk / 32;
    let disturbed = world::Disturbed::new(&memory, SECTION.span(span), CONTENDED_FROM);
    let other = run(one.allocate(&disturbed, 0)).unwrap();
    assert_ne!(other.chunk / 32, span);
    assert_eq!(memory.section(0).spread(span), Spread::Contended);
    // Somebody who has nothing else.
    for at in (0..16).filter(|at| *at != span) {
        memory.set(SECTION.section(0), memory.section(0).with_spread(at, Spread::Full));
    }
    let two = Tree::new(SECTION, user(2));
    assert_eq!(run(two.allocate(&memory, 0)).unwrap().chunk / 32, span);
    assert_eq!(memory.section(0).spread(span), Spread::Normal);
}

/// The full log of a chunk may be as old as it likes: timestamps that have gone around do not lose a log.
#[test]
fn a_log_is_flushed_over_one_that_is_128_changes_old() {
    let memory = Memory::new(SMALL);
    let tree = Tree::new(SMALL, user(1));
    let old = run(tree.allocate(&memory, 0)).unwrap();
    run(tree.give_back(&memory, &[old], user(1)));
    for changes in [30, 60, 70, 100, 126] {
        let kept = run(tree.allocate(&memory, 4)).unwrap();
        for _ in 0..changes / 2 {
            let block = run(tree.allocate(&memory, 4)).unwrap();
            run(tree.give_back(&memory, &[block], user(1)));
        }
        let block = run(tree.allocate(&memory, 0)).unwrap();
        assert!(memory.log(block.chunk).taken, "{changes} changes later");
        run(tree.give_back(&memory, &[block], user(1)));
        run(tree.give_back(&memory, &[kept], user(1)));
    }
}
