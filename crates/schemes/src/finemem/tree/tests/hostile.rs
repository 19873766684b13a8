//! A client that changes one word for ever, beside a client that keeps the protocol.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};

use super::world::Memory;
use super::*;

/// A bit of a header that neither the log nor the bitmap uses: the client that changes the header
/// takes and frees nothing.
const RETRY: u64 = 1 << 30;
/// A bit of a full log without meaning.
const UNUSED: u64 = 1 << 40;

/// Memory in which a hostile client changes a word just before each CAS on it.
struct Storm<'a> {
    memory: &'a Memory,
    word: Word,
    mask: u64,
    repeats: Repeats,
    cases: AtomicU32,
}

impl<'a> Storm<'a> {
    fn on(memory: &'a Memory, word: Word, mask: u64) -> Self {
        Self { memory, word, mask, repeats: Repeats::default(), cases: AtomicU32::new(0) }
    }
}

impl Verbs for Storm<'_> {
    type Error = Changed;

    fn repeat(&self, word: Changed) -> Result<(), Changed> {
        if self.repeats.may_repeat() { Ok(()) } else { Err(word) }
    }

    async fn read(&self, at: Word, out: &mut [u64]) -> Result<(), Changed> {
        let Ok(()) = self.memory.read(at, out).await;
        Ok(())
    }

    async fn cas(&self, at: Word, expected: u64, new: u64) -> Result<u64, Changed> {
        let cases = self.cases.fetch_add(1, Ordering::Relaxed);
        assert!(cases < 4 * REPEATS_MAX, "a loop repeats its CAS without a bound");
        if at == self.word {
            self.memory.flip(at, self.mask);
        }
        let Ok(found) = self.memory.cas(at, expected, new).await;
        Ok(found)
    }
}

/// The word because of which an operation ends with an error.
fn undone<T>(operation: impl Future<Output = Result<T, Changed>>) -> Changed {
    match pin!(operation).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Err(word)) => word,
        Poll::Ready(Ok(_)) => panic!("the operation succeeded"),
        Poll::Pending => panic!("a verb on memory has waited"),
    }
}

/// Blocks of user 1, according to the logs.
fn owned(memory: &Memory) -> Vec<Block> {
    let tree = Tree::new(memory.shape(), user(100));
    let sections = memory.shape().each_section();
    sections.flat_map(|section| run(tree.taken_by(memory, user(1), section))).collect()
}

/// Checks the memory after an error of user 1: each chunk has one owner, and the memory node takes
/// back the blocks of user 1.
fn check_consistent(memory: &Memory) {
    let shape = memory.shape();
    let other = Tree::new(shape, user(2));
    let mut all = owned(memory);
    let mine = all.len();
    while let Some(block) = take(&other, memory, 0) {
        all.push(block);
    }
    memory.check_distinct(&all);
    let chunks: u32 = all.iter().map(|block| block.order.chunks()).sum();
    assert_eq!(chunks, shape.chunks, "chunks with an owner");
    for (i, block) in all.into_iter().enumerate() {
        let owner = user(if i < mine { 1 } else { 2 });
        run(other.give_back(memory, &[block], owner));
    }
    let node = Tree::new(shape, User::NOBODY);
    shape.each_section().for_each(|section| _ = run(node.repair_section(memory, section)));
    memory.check_empty();
}

#[test]
fn allocation_of_a_chunk_ends_with_an_error() {
    let memory = Memory::new(SMALL);
    let tree = Tree::new(SMALL, user(1));
    let kept = take(&tree, &memory, 0).unwrap();
    let storm = Storm::on(&memory, SMALL.span(span(0)), RETRY);
    let word = undone(tree.allocate(&storm, Order::new(0)));
    assert_eq!(word, Changed::Header(Place::Span(span(0))));
    assert_eq!(word.to_string(), "the header of span 0");
    assert_eq!(owned(&memory), [kept]);
    // The same client goes on.
    let next = take(&tree, &memory, 0).unwrap();
    memory.check_distinct(&[kept, next]);
    check_consistent(&memory);
}

#[test]
fn opening_of_a_span_ends_with_an_error() {
    let memory = Memory::new(SECTION);
    let tree = Tree::new(SECTION, user(1));
    let storm = Storm::on(&memory, SECTION.section(section(0)), RETRY);
    let word = undone(tree.allocate(&storm, Order::new(0)));
    assert_eq!(word.to_string(), "the header of section 0");
    assert_eq!(owned(&memory), []);
    check_consistent(&memory);
}

#[test]
fn allocation_of_spans_ends_with_an_error() {
    for contention_control in [true, false] {
        let memory = Memory::new(SECTION);
        let tree = match contention_control {
            true => Tree::new(SECTION, user(1)),
            false => Tree::without_contention_control(SECTION, user(1)),
        };
        let storm = Storm::on(&memory, SECTION.section(section(0)), RETRY);
        let word = undone(tree.allocate(&storm, SPAN_ORDER));
        assert_eq!(word, Changed::Header(Place::Section(section(0))));
        assert_eq!(owned(&memory), []);
        check_consistent(&memory);
    }
}

/// The sections that were taken before stay taken, until the logs are searched.
#[test]
fn allocation_of_sections_ends_with_an_error() {
    let memory = Memory::new(TWO_SECTIONS);
    let tree = Tree::new(TWO_SECTIONS, user(1));
    let storm = Storm::on(&memory, TWO_SECTIONS.section(section(0)), RETRY);
    let word = undone(tree.allocate(&storm, Order::new(10)));
    assert_eq!(word, Changed::Header(Place::Section(section(0))));
    assert_eq!(owned(&memory), [Block::section(section(1))]);
    check_consistent(&memory);
}

/// The block is taken, and the header has its log.
#[test]
fn flush_of_a_log_ends_with_an_error() {
    let memory = Memory::new(SMALL);
    let tree = Tree::new(SMALL, user(1));
    let chunk = ChunkIndex::new(0);
    let storm = Storm::on(&memory, SMALL.log(chunk), UNUSED);
    let word = undone(tree.allocate(&storm, Order::new(0)));
    assert_eq!(word.to_string(), "the log of chunk 0");
    assert_eq!(owned(&memory), [Block::of_chunk(chunk)]);
    check_consistent(&memory);
}

/// The block stays taken, and the client can free it later.
#[test]
fn free_of_a_block_ends_with_an_error() {
    for (order, later) in [(0, true), (0, false), (5, true), (5, false), (9, true), (9, false)] {
        let memory = Memory::new(TWO_SECTIONS);
        let tree = Tree::new(TWO_SECTIONS, user(1));
        let block = take(&tree, &memory, order).unwrap();
        let storm = Storm::on(&memory, block.place().word(TWO_SECTIONS), RETRY);
        let word = undone(tree.give_back(&storm, &[block], user(1)));
        assert_eq!(word, Changed::Header(block.place()));
        assert_eq!(owned(&memory), [block]);
        if later {
            run(tree.give_back(&memory, &[block], user(1)));
            assert_eq!(owned(&memory), []);
        }
        check_consistent(&memory);
    }
}

/// The chunk is free, and its span stays open for chunks.
#[test]
fn closing_of_a_span_ends_with_an_error() {
    let memory = Memory::new(SECTION);
    let tree = Tree::new(SECTION, user(1));
    let chunk = take(&tree, &memory, 0).unwrap();
    // The section's log is not that of the opening any more.
    let kept = take(&tree, &memory, SPAN_ORDER.raw()).unwrap();
    let storm = Storm::on(&memory, SECTION.section(section(0)), RETRY);
    let word = undone(tree.give_back(&storm, &[chunk], user(1)));
    assert_eq!(word, Changed::Header(Place::Section(section(0))));
    assert_eq!(owned(&memory), [kept]);
    assert_eq!(memory.section(0).spread(chunk.chunk.span().in_section()), Spread::Normal);
    check_consistent(&memory);
}

/// The memory node's part of a free: the block stays taken, and the pass is repeated.
#[test]
fn withdrawal_of_a_block_ends_with_an_error() {
    let memory = Memory::new(SMALL);
    let (tree, node) = (Tree::new(SMALL, user(1)), Tree::new(SMALL, User::NOBODY));
    let block = take(&tree, &memory, 0).unwrap();
    let storm = Storm::on(&memory, SMALL.span(span(0)), RETRY);
    let word = undone(node.withdraw(&storm, block));
    assert_eq!(word, Changed::Header(Place::Span(span(0))));
    run(node.withdraw(&memory, block));
    assert_eq!(owned(&memory), []);
    run(node.give_back(&memory, &[block], user(1)));
    check_consistent(&memory);
}

/// Half of the bound does not end an operation.
#[test]
fn long_contention_ends_with_success() {
    let memory = Memory::new(SMALL);
    let tree = Tree::new(SMALL, user(1));
    let header = SMALL.span(span(0));
    let kept = take(&tree, &memory, 0).unwrap();
    let disturbed = world::Disturbed::new(&memory, header, REPEATS_MAX / 2);
    let next = take(&tree, &disturbed, 0).unwrap();
    memory.check_distinct(&[kept, next]);
}
