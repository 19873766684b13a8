//! Layout of the memory node's metadata, and the set of blocks.
//!
//! ```text
//! metadata (8-byte words, big-endian)                                   blocks of 2^order chunks
//! ┌────────────────┬──────────────────────┬────────────────┬────────────────────────────────┐
//! │ section headers│ span headers         │ full logs      │ capabilities                   │
//! │ one per section│ 16 per section       │ one per chunk  │ order 0 │ order 1 │ ...        │
//! └────────────────┴──────────────────────┴────────────────┴────────────────────────────────┘
//! ```
//!
//! A block is 2^order chunks, aligned to its length. Blocks of orders 0 to 4 (1 to 16 chunks) lie
//! within a span, those of orders 5 to 9 (1 to 16 spans) within a section; larger blocks consist of
//! several sections. Each block has a pre-bound window, and an entry in the capability table with
//! its key. (FineMem §4.3 has windows for chunks, spans and sections; a block of another size would
//! need several keys. One window for each aligned block costs twice as many windows, but each grant
//! has one key.) A pool may end in the middle of a section: the missing chunks are marked as taken
//! from the start, without an owner.

use std::ops::Range;

use super::block::{BLOCK_BYTES_MAX, Block, ORDERS, SECTION, SECTION_ORDER, SPAN_ORDER};
use super::header::SPANS;

/// Index of a word in the metadata.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Word(pub u32);

/// Maps blocks to functions of the memory node's NIC: the function that has the windows of a block.
/// Each function has an equal run of the capability table:
///
/// ```text
/// entries   0 ... share-1 │ share ... 2*share-1 │ ...      share: entries / functions, rounded up
/// function         0      │          1          │ ...
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Functions {
    share: u32,
}

impl Functions {
    /// Distributes the windows of a pool over `count` functions.
    pub fn new(shape: Shape, count: u32) -> Self {
        Self { share: shape.entries().div_ceil(count.max(1)).max(1) }
    }

    /// The function that has an entry.
    pub fn of(self, entry: u32) -> u32 {
        entry / self.share
    }

    /// Entries of a function.
    pub fn entries(self, shape: Shape, function: u32) -> Range<u32> {
        let at = |function: u32| self.share.saturating_mul(function).min(shape.entries());
        at(function)..at(function + 1)
    }
}

/// Size of a tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Chunks.
    pub chunks: u32,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
}

impl Shape {
    /// Sections; the last section may be incomplete.
    pub fn sections(self) -> u32 {
        self.chunks.div_ceil(SECTION)
    }

    /// Spans that have a header.
    pub fn spans(self) -> u32 {
        self.sections() * SPANS
    }

    /// Blocks of an order that lie completely within the pool.
    pub fn blocks(self, order: u32) -> u32 {
        if self.block_bytes(order) > BLOCK_BYTES_MAX { 0 } else { self.chunks >> order }
    }

    /// Bytes of a block.
    pub fn block_bytes(self, order: u32) -> u64 {
        self.chunk_bytes << order
    }

    /// The order of the largest block.
    pub fn order_max(self) -> u32 {
        (0..ORDERS).rev().find(|order| self.blocks(*order) > 0).unwrap_or(0)
    }

    /// The order of the smallest block of at least `bytes`; `None` if no block is as large.
    pub fn order_for(self, bytes: u64) -> Option<u32> {
        (0..=self.order_max()).find(|order| self.block_bytes(*order) >= bytes)
    }

    /// A section's header.
    pub fn section(self, section: u32) -> Word {
        Word(section)
    }

    /// A span's header; spans are numbered through all sections.
    pub fn span(self, span: u32) -> Word {
        Word(self.sections() + span)
    }

    /// A chunk's full log.
    pub fn log(self, chunk: u32) -> Word {
        Word(self.sections() + self.spans() + chunk)
    }

    fn capabilities(self) -> u32 {
        self.sections() + self.spans() + self.chunks
    }

    /// Entries of the capability table.
    pub fn entries(self) -> u32 {
        (0..ORDERS).map(|order| self.blocks(order)).sum()
    }

    /// The entry of a block.
    pub fn entry(self, block: Block) -> u32 {
        (0..block.order).map(|order| self.blocks(order)).sum::<u32>() + (block.chunk >> block.order)
    }

    /// The block of an entry; `None` if the entry is beyond the table.
    pub fn block(self, entry: u32) -> Option<Block> {
        let mut left = entry;
        for order in 0..ORDERS {
            let blocks = self.blocks(order);
            if left < blocks {
                return Some(Block { chunk: left << order, order });
            }
            left -= blocks;
        }
        None
    }

    /// Splits `range` by the order of the blocks. Yields each order, its first entry, and the
    /// entries of that order within the range.
    pub fn by_order(self, range: Range<u32>) -> impl Iterator<Item = (u32, u32, Range<u32>)> {
        (0..ORDERS).scan(0, move |next, order| {
            let base = *next;
            *next += self.blocks(order);
            Some((order, base, range.start.max(base)..range.end.min(*next)))
        })
    }

    /// The headers that show whether any of these blocks of one order is taken; never more headers
    /// than blocks. `None` for orders of several sections, which have few blocks.
    pub fn headers(self, order: u32, blocks: Range<u32>) -> Option<Range<u32>> {
        let over = |each: u32| {
            let each = each - order;
            blocks.start >> each..((blocks.end - 1) >> each) + 1
        };
        let words = |first: Word, which: Range<u32>| first.0 + which.start..first.0 + which.end;
        match order {
            ..SPAN_ORDER => Some(words(self.span(0), over(SPAN_ORDER))),
            SPAN_ORDER..=SECTION_ORDER => Some(words(self.section(0), over(SECTION_ORDER))),
            _ => None,
        }
    }

    /// The capability of an entry.
    pub fn capability(self, entry: u32) -> Word {
        Word(self.capabilities() + entry)
    }

    /// Total number of words.
    pub fn words(self) -> u32 {
        self.capabilities() + self.entries()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finemem::block::Layer;
    use crate::finemem::header::{CHUNKS, Record};
    use crate::finemem::log::FullLog;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn entry_names_exactly_one_block(chunks in 1u32..3000, pick in any::<u32>()) {
            let shape = Shape { chunks, chunk_bytes: 4096 };
            let entry = pick % shape.entries();
            let block = shape.block(entry).unwrap();
            prop_assert_eq!(shape.entry(block), entry);
            prop_assert_eq!(block.chunk % (1 << block.order), 0);
            prop_assert!(block.chunks().end <= chunks);
            prop_assert_eq!(shape.block(shape.entries()), None);
            prop_assert!(shape.capability(entry).0 < shape.words());
        }
    }

    proptest! {
        #[test]
        fn functions_partition_the_table(
            chunks in 1u32..3000, count in 1u32..130, pick in any::<u32>()
        ) {
            let shape = Shape { chunks, chunk_bytes: 4096 };
            let functions = Functions::new(shape, count);
            let entry = pick % shape.entries();
            let function = functions.of(entry);
            prop_assert!(function < count && functions.entries(shape, function).contains(&entry));
            let all: Vec<u32> = (0..count).flat_map(|f| functions.entries(shape, f)).collect();
            prop_assert_eq!(all, Vec::from_iter(0..shape.entries()));
            let share_max = shape.entries().div_ceil(count) as usize;
            prop_assert!((0..count).all(|f| functions.entries(shape, f).len() <= share_max));
        }
    }

    proptest! {
        #[test]
        fn entries_by_order_are_complete_and_have_headers(
            chunks in 1u32..5000, bytes in 12u32..27, pick in any::<(u32, u32)>(), len in 1u32..300
        ) {
            let shape = Shape { chunks, chunk_bytes: 1 << bytes };
            let end = shape.entries();
            let (a, b) = (pick.0 % (end + 1), pick.1 % (end + 1));
            let range = a.min(b)..a.max(b);
            let mut all = Vec::new();
            for (order, base, entries) in shape.by_order(range.clone()) {
                for first in entries.clone().step_by(len as usize) {
                    let end = entries.end.min(first + len);
                    let headers = shape.headers(order, first - base..end - base);
                    prop_assert!(headers.as_ref().is_none_or(|h| h.len() as u32 <= end - first));
                    for entry in first..end {
                        let block = shape.block(entry).unwrap();
                        prop_assert_eq!(block.order, order);
                        let its = match block.layer() {
                            Layer::Span => shape.span(block.chunk / CHUNKS),
                            Layer::Section => shape.section(block.chunk / SECTION),
                        };
                        prop_assert!(headers.clone().is_none_or(|all| all.contains(&its.0)));
                        prop_assert_eq!(headers.is_none(), block.parts().is_some());
                        all.push(entry);
                    }
                }
            }
            prop_assert_eq!(all, Vec::from_iter(range));
        }
    }

    #[test]
    fn a_whole_section_has_twice_as_many_windows_as_chunks() {
        let shape = Shape { chunks: SECTION, chunk_bytes: 4096 };
        assert_eq!((shape.sections(), shape.spans(), shape.entries()), (1, 16, 2 * SECTION - 1));
        assert_eq!(shape.order_max(), 9);
        assert_eq!(shape.order_for(4097), Some(1));
        assert_eq!(shape.order_for(2 << 20), Some(9));
        assert_eq!(shape.order_for((2 << 20) + 1), None);
    }

    #[test]
    fn blocks_of_several_sections_are_aligned_and_within_the_pool() {
        let shape = Shape { chunks: 7 * SECTION + 5, chunk_bytes: 4096 };
        assert_eq!((shape.order_max(), shape.blocks(11), shape.blocks(10)), (11, 1, 3));
        assert_eq!(shape.order_for((4 << 20) + 1), Some(11));
        let log = FullLog {
            size: Record::PART,
            sections: 2,
            taken: true,
            layer: Layer::Section,
            ..FullLog::default()
        };
        let block = log.block(3 * SECTION);
        assert_eq!((block, block.parts()), (Block { chunk: 0, order: 11 }, Some(0..4)));
        let large = Shape { chunks: 1 << 23, chunk_bytes: 4096 };
        assert_eq!(large.block_bytes(large.order_max()), BLOCK_BYTES_MAX);
    }

    #[test]
    fn largest_pool_fits_windows_and_keys() {
        let chunks = crate::finemem::FINEMEM.chunks_max as u32;
        let shape = Shape { chunks, chunk_bytes: 4096 };
        assert!(shape.words() as u64 * 8 <= BLOCK_BYTES_MAX, "one window covers the metadata");
        let last = shape.entries() - 1;
        let block = shape.block(last).unwrap();
        assert_eq!((shape.entry(block), block.order), (last, shape.order_max()));
        // Each function has at most as many windows as a key can name; two windows per block.
        let functions = Functions::new(shape, 17);
        assert_eq!(functions.of(last), 16);
        assert!(functions.entries(shape, 0).len() * 2 < (1 << 24) - (1 << 16));
    }

    #[test]
    fn no_window_exceeds_the_maximum_length() {
        let shape = Shape { chunks: SECTION, chunk_bytes: 1 << 28 };
        assert_eq!(shape.order_max(), 3);
    }
}
