//! Tests of the tree, stopped and crashed between any two verbs.

mod explore;
mod hostile;
mod pass;
mod random;
mod withdraw;
mod world;

use std::convert::Infallible;

use super::allocate::{COLLISION_FAILURES, RELOCATIONS_MAX};
use super::*;
use crate::blocks::ChunkIndex;
use crate::finemem::block::{Block, CHUNKS, Order, SPAN_ORDER, SpanOffset};
use crate::finemem::header::{Record, Spread};
use world::{Memory, run};

const SMALL: Shape = Shape { chunks: 32, chunk_bytes: 4096 };
const SECTION: Shape = Shape { chunks: 512, chunk_bytes: 4096 };
const TWO_SECTIONS: Shape = Shape { chunks: 1024, chunk_bytes: 4096 };

/// Allocates a block.
fn take(tree: &Tree, memory: &impl Verbs<Error = Infallible>, order: u32) -> Option<Block> {
    run(tree.allocate(memory, Order::new(order))).map(|taken| taken.block)
}

fn section(index: u32) -> SectionIndex {
    SectionIndex::new(index)
}

fn span(index: u32) -> SpanIndex {
    SpanIndex::new(index)
}

fn user(number: u16) -> User {
    User::new(number).unwrap()
}

#[test]
fn every_order_is_allocated_and_freed() {
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
fn partial_span_at_the_end_is_fully_allocated() {
    for chunks in [1, 2, 31, 33, 513, 530] {
        let shape = Shape { chunks, chunk_bytes: 4096 };
        let memory = Memory::new(shape);
        let tree = Tree::new(shape, user(3));
        let mut blocks = Vec::new();
        while let Some(block) = take(&tree, &memory, 0) {
            assert!(block.chunk < shape.end());
            blocks.push(block);
        }
        assert_eq!(blocks.len() as u32, chunks);
        blocks.iter().for_each(|b| run(tree.give_back(&memory, &[*b], user(3))));
        memory.check_empty();
    }
}

/// The headers of a pool of any size in which everything is taken.
struct Full {
    shape: Shape,
    reads: std::sync::atomic::AtomicU32,
}

impl Verbs for Full {
    type Error = Infallible;

    fn repeat(&self, _: Changed) -> Result<(), Infallible> {
        Ok(())
    }

    async fn read(&self, at: Word, out: &mut [u64]) -> Result<(), Infallible> {
        self.reads.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let full = Header(0).with_bitmap(u32::MAX);
        for (word, at) in out.iter_mut().zip(at.raw()..) {
            *word = full.with_in_use(at >= self.shape.sections()).0;
        }
        Ok(())
    }

    async fn cas(&self, _: Word, _: u64, _: u64) -> Result<u64, Infallible> {
        panic!("a search of a full pool must not CAS")
    }
}

/// A failed search costs one READ for 512 headers, also in a large pool.
#[test]
fn failed_search_reads_headers_in_batches() {
    for sections in [1, 1000, 100_000u32] {
        let shape = Shape { chunks: sections * 512, chunk_bytes: 4096 };
        let full = Full { shape, reads: Default::default() };
        let tree = Tree::new(shape, user(7));
        for order in [0, 4, SPAN_ORDER.raw(), 9, 10].map(Order::new) {
            let began = std::time::Instant::now();
            assert_eq!(run(tree.allocate(&full, order)), None);
            let reads = full.reads.swap(0, std::sync::atomic::Ordering::Relaxed);
            println!("{sections} sections, order {order}: {reads} READs, {:?}", began.elapsed());
            let spans = if order < SPAN_ORDER { shape.spans().div_ceil(512) } else { 0 };
            assert!(reads <= 2 * sections.div_ceil(512) + spans);
        }
    }
}

/// A successful search reads only what it takes, once the section headers are cached.
#[test]
fn large_pool_search_costs_as_much_as_small() {
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

/// If some sections of a block are not free, nothing is taken, and no part is left behind.
#[test]
fn failed_multi_section_allocation_frees_its_parts() {
    let shape = Shape { chunks: 4 * 512, chunk_bytes: 4096 };
    let memory = Memory::new(shape);
    let (one, two) = (Tree::new(shape, user(1)), Tree::new(shape, user(2)));
    // Tree `one` caches all sections as empty, and does not know that the second one is taken
    // since.
    let block = take(&one, &memory, 11).unwrap();
    run(one.give_back(&memory, &[block], user(1)));
    for _ in 0..4 {
        take(&two, &memory, 9).unwrap();
    }
    for section in [0, 2, 3].map(section) {
        run(two.give_back(&memory, &[Block::section(section)], user(2)));
    }
    assert_eq!(take(&one, &memory, 11), None);
    for index in [0, 2, 3] {
        assert_eq!(memory.section(index).bitmap(), 0);
        assert!(!memory.log(section(index).first_chunk()).taken, "section {index}");
    }
    // Two of the sections were taken and freed again.
    assert_eq!(memory.section(2).record().user, user(1));
    memory.check_log(Block::section(section(1)), user(2));
}

/// States that a crash leaves of a block of several sections: all of it, or parts without the first
/// one.
#[test]
fn partly_taken_block_is_found_as_sections() {
    let shape = Shape { chunks: 4 * 512, chunk_bytes: 4096 };
    let memory = Memory::new(shape);
    let one = Tree::new(shape, user(1));
    let block = take(&one, &memory, 11).unwrap();
    let found = |index| run(Tree::new(shape, user(9)).taken_by(&memory, user(1), section(index)));
    assert_eq!(found(0), [block]);
    assert_eq!((found(1), found(3)), (vec![], vec![]));
    run(one.give_back_part(&memory, section(0), block, user(1)));
    let sections: Vec<Block> = (0..4).flat_map(found).collect();
    assert_eq!(sections, [1, 2, 3].map(section).map(Block::section));
    run(one.give_back_part(&memory, section(1), block, user(1)));
    assert_eq!((found(1), found(2)), (vec![], vec![Block::section(section(2))]));
}

/// A span that is full in its section's header, but neither in use nor owned, is lost.
fn check_not_lost(memory: &Memory, span: SpanIndex) {
    let (section, header) = (memory.section(span.section().raw()), memory.span(span));
    let is_full = section.spread(span.in_section()) == Spread::Full;
    assert!(!is_full || header.in_use(), "span {span} is lost: {section:?}, {header:?}");
}

/// A client marks a span full just before it is closed: it is closed nevertheless, although the
/// last log of the section is still that of the span's opening.
#[test]
fn late_full_hint_does_not_prevent_closing() {
    let memory = Memory::new(SECTION);
    let node = Tree::new(SECTION, User::NOBODY);
    let owner = Tree::new(SECTION, user(16));
    let block = take(&owner, &memory, 0).unwrap();
    assert_eq!(block.chunk, ChunkIndex::new(0));
    run(node.read_header(&memory, Place::Section(section(0))));
    let full = memory.section(0).with_spread(SpanOffset::new(0), Spread::Full);
    memory.set(SECTION.section(section(0)), full);
    run(node.give_back(&memory, &[block], user(16)));
    check_not_lost(&memory, span(0));
    memory.check_empty();
}

/// A client with an outdated full span and a current section header must not mark the span full.
#[test]
fn outdated_span_is_not_marked_full() {
    let memory = Memory::new(SECTION);
    let (others, late) = (Tree::new(SECTION, user(16)), Tree::new(SECTION, user(16)));
    let blocks: Vec<_> = (0..CHUNKS).map(|_| take(&others, &memory, 0).unwrap()).collect();
    run(late.read_header(&memory, Place::Span(span(0))));
    run(others.give_back(&memory, &blocks, user(16)));
    // A client starts to open the span, and stops.
    let before = memory.section(0);
    let record = Record { timestamp: before.record().timestamp.next(), ..before.record() };
    let opened = Record { offset: 0, size: Record::OPENED, ..record };
    let opened = before.with_spread(SpanOffset::new(0), Spread::Normal).with_record(opened);
    memory.set(SECTION.section(section(0)), opened);
    run(late.read_header(&memory, Place::Section(section(0))));
    take(&late, &memory, 0).unwrap();
    check_not_lost(&memory, span(0));
    let block = take(&Tree::new(SECTION, user(32)), &memory, 0);
    assert_eq!(block.map(|b| b.chunk.span()), Some(span(0)));
}

/// A closed span's header keeps its last log while the whole span is taken. A client that reads
/// this header for the first time must not flush that log over the owner's.
#[test]
fn old_span_log_does_not_overwrite_the_section_log() {
    let memory = Memory::new(SECTION);
    // User 16 starts its searches at the first span.
    let before = Tree::new(SECTION, user(16));
    let chunk = take(&before, &memory, 0).unwrap();
    assert_eq!(chunk.chunk, ChunkIndex::new(0));
    run(before.give_back(&memory, &[chunk], user(16)));
    let owner = Tree::new(SECTION, user(2));
    let block = take(&owner, &memory, SPAN_ORDER.raw()).unwrap();
    assert_eq!(block.chunk, ChunkIndex::new(0));
    // The section's log names another span now.
    take(&owner, &memory, SPAN_ORDER.raw()).unwrap();
    let fresh = Tree::new(SECTION, user(100));
    let found = run(fresh.taken_by(&memory, user(2), section(0)));
    memory.check_log(block, user(2));
    assert_eq!(found.len(), 2);
}

/// One CAS commits; the other CASes write the log, and open the first span.
#[test]
fn allocation_costs_the_expected_verbs() {
    let memory = Memory::new(SECTION);
    let tree = Tree::new(SECTION, user(1));
    take(&tree, &memory, 0).unwrap();
    memory.count();
    let block = take(&tree, &memory, 0).unwrap();
    // READs of the full log, the header and the capability are posted with the first CAS.
    assert_eq!(memory.count(), (3, 2), "reads and CASes of an allocation in a span that is known");
    run(tree.give_back(&memory, &[block], user(1)));
    assert_eq!(memory.count(), (2, 2), "reads and CASes of giving back");
    take(&tree, &memory, SPAN_ORDER.raw()).unwrap();
    memory.count();
    take(&tree, &memory, SPAN_ORDER.raw()).unwrap();
    assert_eq!(memory.count(), (3, 2), "reads and CASes of taking a span");
}

#[test]
fn several_blocks_of_a_span_are_freed_by_one_cas() {
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
fn full_and_normal_hints_are_corrected() {
    let memory = Memory::new(SECTION);
    let (one, two) = (Tree::new(SECTION, user(1)), Tree::new(SECTION, user(2)));
    let blocks: Vec<Block> = (0..32).map(|_| take(&one, &memory, 0).unwrap()).collect();
    let span = blocks[0].chunk.span();
    assert_eq!(memory.section(0).spread(span.in_section()), Spread::Full);
    run(two.give_back(&memory, &blocks[..1], user(1)));
    assert_eq!(memory.section(0).spread(span.in_section()), Spread::Normal);
    // As after a lost hint.
    memory.set(
        SECTION.section(section(0)),
        memory.section(0).with_spread(span.in_section(), Spread::Full),
    );
    let all: Vec<Block> = (0..481).map(|_| take(&two, &memory, 0).unwrap()).collect();
    memory.check_distinct(&all);
    assert_eq!(take(&one, &memory, 0), None);
}

/// A client that collides at a span takes from another span.
#[test]
fn collision_moves_the_search_to_another_span() {
    let memory = Memory::new(SECTION);
    let one = Tree::new(SECTION, user(1));
    let span = take(&one, &memory, 0).unwrap().chunk.span();
    let disturbed = world::Disturbed::new(&memory, SECTION.span(span), COLLISION_FAILURES);
    assert_ne!(take(&one, &disturbed, 0).unwrap().chunk.span(), span);
    assert_eq!(memory.section(0).spread(span.in_section()), Spread::Normal);
}

/// Where there is no alternative and CASes fail often, the span is marked contended, and other
/// clients avoid it.
#[test]
fn contention_is_marked_avoided_and_forgotten() {
    let memory = Memory::new(SECTION);
    let one = Tree::new(SECTION, user(1));
    let span = take(&one, &memory, 0).unwrap().chunk.span();
    let set = |at, spread| {
        memory.set(SECTION.section(section(0)), memory.section(0).with_spread(at, spread));
    };
    SpanOffset::all().filter(|at| *at != span.in_section()).for_each(|at| set(at, Spread::Full));
    let failures = COLLISION_FAILURES * (1 + RELOCATIONS_MAX) + CONTENDED_FROM + CONTENDED_BELOW;
    let disturbed = world::Disturbed::new(&memory, SECTION.span(span), failures);
    assert_eq!(take(&one, &disturbed, 0).unwrap().chunk.span(), span);
    assert_eq!(memory.section(0).spread(span.in_section()), Spread::Contended);
    let other = SpanIndex::new((span.raw() + 1) % 16);
    set(other.in_section(), Spread::Empty);
    assert_eq!(take(&Tree::new(SECTION, user(2)), &memory, 0).unwrap().chunk.span(), other);
    // A client without an alternative.
    set(other.in_section(), Spread::Full);
    assert_eq!(take(&Tree::new(SECTION, user(3)), &memory, 0).unwrap().chunk.span(), span);
    assert_eq!(memory.section(0).spread(span.in_section()), Spread::Normal);
}

/// Without contention control a client retries in place, however often its CAS fails.
#[test]
fn without_contention_control_cas_is_retried_in_place() {
    let memory = Memory::new(SECTION);
    let tree = Tree::without_contention_control(SECTION, user(1));
    let span = take(&tree, &memory, 0).unwrap().chunk.span();
    let failures = 2 * CONTENDED_FROM;
    let disturbed = world::Disturbed::new(&memory, SECTION.span(span), failures);
    assert_eq!(take(&tree, &disturbed, 0).unwrap().chunk.span(), span);
    assert_eq!(memory.section(0).spread(span.in_section()), Spread::Normal);
    let disturbed = world::Disturbed::new(&memory, SECTION.section(section(0)), failures);
    assert!(take(&tree, &disturbed, SPAN_ORDER.raw()).is_some());
    // The search still finds all free chunks.
    let rest: Vec<Block> = std::iter::from_fn(|| take(&tree, &memory, 0)).collect();
    assert_eq!(rest.len() as u32, 512 - CHUNKS - 2);
    memory.check_distinct(&rest);
}

/// The full log of a chunk may be arbitrarily old: no log is lost when timestamps wrap around.
#[test]
fn log_is_flushed_over_one_128_changes_old() {
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
