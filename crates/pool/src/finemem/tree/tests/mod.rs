//! The tree, stopped and crashed between any two verbs.

mod explore;
mod pass;
mod random;
mod withdraw;
mod world;

use std::convert::Infallible;

use super::allocate::{CROWDED, MOVES};
use super::*;
use crate::finemem::header::{CHUNKS, Record, SPANS, Spread};
use crate::finemem::layout::{Block, SPAN_ORDER};
use world::{Memory, run};

const SMALL: Shape = Shape { chunks: 32, chunk_bytes: 4096 };
const SECTION: Shape = Shape { chunks: 512, chunk_bytes: 4096 };
const TWO_SECTIONS: Shape = Shape { chunks: 1024, chunk_bytes: 4096 };

/// Takes a block.
fn take(tree: &Tree, memory: &impl Verbs<Error = Infallible>, order: u32) -> Option<Block> {
    run(tree.allocate(memory, order)).map(|taken| taken.block)
}

fn user(number: u16) -> User {
    User::new(number).unwrap()
}

#[test]
fn every_size_is_taken_and_given_back() {
    let eight = Shape { chunks: 8 * 512, chunk_bytes: 4096 };
    for (order, shape) in (0..=9).map(|o| (o, SECTION)).chain((9..=12).map(|o| (o, eight))) {
        let memory = Memory::new(shape);
        let tree = Tree::new(shape, user(1));
        let mut blocks = Vec::new();
        while let Some(block) = take(&tree, &memory, order) {
            blocks.push(block);
        }
        assert_eq!(blocks.len() as u32, shape.chunks >> order, "order {order}");
        blocks.iter().for_each(|b| memory.check_log(*b, user(1)));
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
        while let Some(block) = take(&tree, &memory, 0) {
            assert!(block.chunk < chunks);
            blocks.push(block);
        }
        assert_eq!(blocks.len() as u32, chunks);
        blocks.iter().for_each(|b| run(tree.give_back(&memory, &[*b], user(3))));
        memory.check_empty();
    }
}

/// A pool of any size of which everything is taken: what its headers say.
struct Full {
    shape: Shape,
    reads: std::sync::atomic::AtomicU32,
}

impl Verbs for Full {
    type Error = Infallible;

    async fn read(&self, at: Word, out: &mut [u64]) -> Result<(), Infallible> {
        self.reads.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let full = Header(0).with_bitmap(u32::MAX);
        for (word, at) in out.iter_mut().zip(at.0..) {
            *word = full.with_in_use(at >= self.shape.sections()).0;
        }
        Ok(())
    }

    async fn cas(&self, _: Word, _: u64, _: u64) -> Result<u64, Infallible> {
        panic!("there is nothing to be taken")
    }
}

/// A search that finds nothing costs one READ for 512 headers, in a large pool too.
#[test]
fn a_search_in_vain_reads_headers_in_batches() {
    for sections in [1, 1000, 100_000u32] {
        let shape = Shape { chunks: sections * 512, chunk_bytes: 4096 };
        let full = Full { shape, reads: Default::default() };
        let tree = Tree::new(shape, user(7));
        for order in [0, 4, SPAN_ORDER, 9, 10] {
            let began = std::time::Instant::now();
            assert_eq!(run(tree.allocate(&full, order)), None);
            let reads = full.reads.swap(0, std::sync::atomic::Ordering::Relaxed);
            println!("{sections} sections, order {order}: {reads} READs, {:?}", began.elapsed());
            let spans = if order < SPAN_ORDER { shape.spans().div_ceil(512) } else { 0 };
            assert!(reads <= 2 * sections.div_ceil(512) + spans);
        }
    }
}

/// And one that finds something looks at what it takes only, once it knows the sections.
#[test]
fn a_large_pool_is_searched_as_fast_as_a_small_one() {
    for sections in [1, 1000u32] {
        let shape = Shape { chunks: sections * 512, chunk_bytes: 4096 };
        let memory = Memory::new(shape);
        let tree = Tree::new(shape, user(7));
        take(&tree, &memory, 0).unwrap();
        memory.count();
        let began = std::time::Instant::now();
        for _ in 0..25 {
            take(&tree, &memory, 0).unwrap();
        }
        let (reads, cases) = memory.count();
        println!("{sections} sections: {reads} READs, {cases} CASes, {:?}", began.elapsed());
        assert_eq!((reads, cases), (25 * 3, 25 * 2));
    }
}

/// Of a block of several sections that are not all free nothing is taken, and nothing stays behind.
#[test]
fn sections_that_were_taken_in_vain_are_given_back() {
    let shape = Shape { chunks: 4 * 512, chunk_bytes: 4096 };
    let memory = Memory::new(shape);
    let (one, two) = (Tree::new(shape, user(1)), Tree::new(shape, user(2)));
    // One knows all as empty, and not that the second section is taken since.
    let block = take(&one, &memory, 11).unwrap();
    run(one.give_back(&memory, &[block], user(1)));
    for _ in 0..4 {
        take(&two, &memory, 9).unwrap();
    }
    [0, 2, 3].iter().for_each(|i| run(two.give_back(&memory, &[Block::section(*i)], user(2))));
    assert_eq!(take(&one, &memory, 11), None);
    for index in [0, 2, 3] {
        assert_eq!(memory.section(index).bitmap(), 0);
        assert!(!memory.log(index * 512).taken, "section {index}");
    }
    // Two of them were taken in between.
    assert_eq!(memory.section(2).record().user, user(1));
    memory.check_log(Block::section(1), user(2));
}

/// What a crash leaves of a block of several sections: all of it, or parts without its first.
#[test]
fn what_was_taken_in_part_is_found_as_sections() {
    let shape = Shape { chunks: 4 * 512, chunk_bytes: 4096 };
    let memory = Memory::new(shape);
    let one = Tree::new(shape, user(1));
    let block = take(&one, &memory, 11).unwrap();
    let found = |section| run(Tree::new(shape, user(9)).taken_by(&memory, user(1), section));
    assert_eq!(found(0), [block]);
    assert_eq!((found(1), found(3)), (vec![], vec![]));
    run(one.give_back_part(&memory, 0, block, user(1)));
    let sections: Vec<Block> = (0..4).flat_map(found).collect();
    assert_eq!(sections, [1, 2, 3].map(Block::section));
    run(one.give_back_part(&memory, 1, block, user(1)));
    assert_eq!((found(1), found(2)), (vec![], vec![Block::section(2)]));
}

/// What is full in the section's header and neither in use nor anybody's is lost to all.
fn check_not_lost(memory: &Memory, span: u32) {
    let (section, header) = (memory.section(span / SPANS), memory.span(span));
    let is_full = section.spread(span % SPANS) == Spread::Full;
    assert!(!is_full || header.in_use(), "span {span} is lost: {section:?}, {header:?}");
}

/// Somebody took a span for full just before it is closed: it is closed all the same, although the last log of the
/// section is still that of its opening.
#[test]
fn a_late_hint_does_not_keep_a_span_from_being_closed() {
    let memory = Memory::new(SECTION);
    let node = Tree::new(SECTION, User::NOBODY);
    let owner = Tree::new(SECTION, user(16));
    let block = take(&owner, &memory, 0).unwrap();
    assert_eq!(block.chunk, 0);
    run(node.look(&memory, Place::section(0)));
    memory.set(SECTION.section(0), memory.section(0).with_spread(0, Spread::Full));
    run(node.give_back(&memory, &[block], user(16)));
    check_not_lost(&memory, 0);
    memory.check_empty();
}

/// Who knows a span as full from long ago, and the section as it is now, does not say that it is full.
#[test]
fn no_span_is_called_full_for_what_it_was_long_ago() {
    let memory = Memory::new(SECTION);
    let (others, late) = (Tree::new(SECTION, user(16)), Tree::new(SECTION, user(16)));
    let blocks: Vec<_> = (0..CHUNKS).map(|_| take(&others, &memory, 0).unwrap()).collect();
    run(late.look(&memory, Place::span(0)));
    run(others.give_back(&memory, &blocks, user(16)));
    // Somebody begins to open it, and goes no further.
    let section = memory.section(0);
    let record = Record { timestamp: section.record().timestamp.next(), ..section.record() };
    let opened = Record { offset: 0, size: Record::OPENED, ..record };
    let section = section.with_spread(0, Spread::Normal).with_record(opened);
    memory.set(SECTION.section(0), section);
    run(late.look(&memory, Place::section(0)));
    take(&late, &memory, 0).unwrap();
    check_not_lost(&memory, 0);
    assert_eq!(take(&Tree::new(SECTION, user(32)), &memory, 0).map(|b| b.chunk / CHUNKS), Some(0));
}

/// The header of a span that nobody has in chunks any more keeps its last log, while the span is taken whole: who
/// has never seen it before must not put it over the owner's.
#[test]
fn an_old_log_of_a_span_does_not_undo_that_of_who_has_it_whole() {
    let memory = Memory::new(SECTION);
    // Its searches begin with the first span.
    let before = Tree::new(SECTION, user(16));
    let chunk = take(&before, &memory, 0).unwrap();
    assert_eq!(chunk.chunk, 0);
    run(before.give_back(&memory, &[chunk], user(16)));
    let owner = Tree::new(SECTION, user(2));
    let block = take(&owner, &memory, SPAN_ORDER).unwrap();
    assert_eq!(block.chunk, 0);
    // The section's log is about another span now.
    take(&owner, &memory, SPAN_ORDER).unwrap();
    let fresh = Tree::new(SECTION, user(100));
    let found = run(fresh.taken_by(&memory, user(2), 0));
    memory.check_log(block, user(2));
    assert_eq!(found.len(), 2);
}

/// One CAS commits: the others are the log, and the opening of the first.
#[test]
fn verbs_of_an_allocation() {
    let memory = Memory::new(SECTION);
    let tree = Tree::new(SECTION, user(1));
    take(&tree, &memory, 0).unwrap();
    memory.count();
    let block = take(&tree, &memory, 0).unwrap();
    // READs of the full log, the header and the capability are posted with the first CAS.
    assert_eq!(memory.count(), (3, 2), "reads and CASes of an allocation in a span that is known");
    run(tree.give_back(&memory, &[block], user(1)));
    assert_eq!(memory.count(), (2, 2), "reads and CASes of giving back");
    take(&tree, &memory, SPAN_ORDER).unwrap();
    memory.count();
    take(&tree, &memory, SPAN_ORDER).unwrap();
    assert_eq!(memory.count(), (3, 2), "reads and CASes of taking a span");
}

#[test]
fn several_blocks_of_a_span_are_given_back_by_one_cas() {
    let memory = Memory::new(SMALL);
    let tree = Tree::new(SMALL, user(1));
    let blocks: Vec<Block> = (0..4).map(|_| take(&tree, &memory, 1).unwrap()).collect();
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
    let blocks: Vec<Block> = (0..32).map(|_| take(&one, &memory, 0).unwrap()).collect();
    let span = blocks[0].chunk / 32;
    assert_eq!(memory.section(0).spread(span), Spread::Full);
    run(two.give_back(&memory, &blocks[..1], user(1)));
    assert_eq!(memory.section(0).spread(span), Spread::Normal);
    // As after a hint that was lost.
    memory.set(SECTION.section(0), memory.section(0).with_spread(span, Spread::Full));
    let all: Vec<Block> = (0..481).map(|_| take(&two, &memory, 0).unwrap()).collect();
    memory.check_distinct(&all);
    assert_eq!(take(&one, &memory, 0), None);
}

/// Who meets others at a span takes from another one.
#[test]
fn who_meets_others_goes_elsewhere() {
    let memory = Memory::new(SECTION);
    let one = Tree::new(SECTION, user(1));
    let span = take(&one, &memory, 0).unwrap().chunk / 32;
    let disturbed = world::Disturbed::new(&memory, SECTION.span(span), CROWDED);
    assert_ne!(take(&one, &disturbed, 0).unwrap().chunk / 32, span);
    assert_eq!(memory.section(0).spread(span), Spread::Normal);
}

/// Where there is nothing else, and the CAS fails often, the span is marked, and others prefer another one.
#[test]
fn contention_is_marked_avoided_and_forgotten() {
    let memory = Memory::new(SECTION);
    let one = Tree::new(SECTION, user(1));
    let span = take(&one, &memory, 0).unwrap().chunk / 32;
    let set = |at, spread| {
        memory.set(SECTION.section(0), memory.section(0).with_spread(at, spread));
    };
    (0..16).filter(|at| *at != span).for_each(|at| set(at, Spread::Full));
    let failures = CROWDED * (1 + MOVES) + CONTENDED_FROM + CONTENDED_BELOW;
    let disturbed = world::Disturbed::new(&memory, SECTION.span(span), failures);
    assert_eq!(take(&one, &disturbed, 0).unwrap().chunk / 32, span);
    assert_eq!(memory.section(0).spread(span), Spread::Contended);
    let other = (span + 1) % 16;
    set(other, Spread::Empty);
    assert_eq!(take(&Tree::new(SECTION, user(2)), &memory, 0).unwrap().chunk / 32, other);
    // Somebody who has nothing else.
    set(other, Spread::Full);
    assert_eq!(take(&Tree::new(SECTION, user(3)), &memory, 0).unwrap().chunk / 32, span);
    assert_eq!(memory.section(0).spread(span), Spread::Normal);
}

/// Who is to be compared with stays where he is, however often his CAS fails.
#[test]
fn without_contention_control_nobody_gives_way() {
    let memory = Memory::new(SECTION);
    let tree = Tree::without_contention_control(SECTION, user(1));
    let span = take(&tree, &memory, 0).unwrap().chunk / CHUNKS;
    let failures = 2 * CONTENDED_FROM;
    let disturbed = world::Disturbed::new(&memory, SECTION.span(span), failures);
    assert_eq!(take(&tree, &disturbed, 0).unwrap().chunk / CHUNKS, span);
    assert_eq!(memory.section(0).spread(span), Spread::Normal);
    let disturbed = world::Disturbed::new(&memory, SECTION.section(0), failures);
    assert!(take(&tree, &disturbed, SPAN_ORDER).is_some());
    // It finds all there is nevertheless.
    let rest: Vec<Block> = std::iter::from_fn(|| take(&tree, &memory, 0)).collect();
    assert_eq!(rest.len() as u32, 512 - CHUNKS - 2);
    memory.check_distinct(&rest);
}

/// The full log of a chunk may be as old as it likes: timestamps that have gone around do not lose a log.
#[test]
fn a_log_is_flushed_over_one_that_is_128_changes_old() {
    let memory = Memory::new(SMALL);
    let tree = Tree::new(SMALL, user(1));
    let old = take(&tree, &memory, 0).unwrap();
    run(tree.give_back(&memory, &[old], user(1)));
    for changes in [30, 60, 70, 100, 126] {
        let kept = take(&tree, &memory, 4).unwrap();
        for _ in 0..changes / 2 {
            let block = take(&tree, &memory, 4).unwrap();
            run(tree.give_back(&memory, &[block], user(1)));
        }
        let block = take(&tree, &memory, 0).unwrap();
        assert!(memory.log(block.chunk).taken, "{changes} changes later");
        run(tree.give_back(&memory, &[block], user(1)));
        run(tree.give_back(&memory, &[kept], user(1)));
    }
}
