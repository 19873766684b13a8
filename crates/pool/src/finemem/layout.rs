//! Where what is in the memory node's metadata, and which blocks there are.
//!
//! ```text
//! metadata (8-byte words, big-endian)                                   blocks of 2^order chunks
//! ┌────────────────┬──────────────────────┬────────────────┬────────────────────────────────┐
//! │ section headers│ span headers         │ full logs      │ capabilities                   │
//! │ one per section│ 16 per section       │ one per chunk  │ order 0 │ order 1 │ ...        │
//! └────────────────┴──────────────────────┴────────────────┴────────────────────────────────┘
//! ```
//!
//! A block is 2^order chunks, aligned to its length: orders 0 to 4 (1 to 16 chunks) lie within a span,
//! 5 to 9 (1 to 16 spans) within a section, larger ones are several sections. Each block has a window bound ahead, and an entry in the
//! capability table with its key. (FineMem §4.3 names windows for chunks, spans and sections; a block
//! between these would need several keys. One for each aligned block costs twice as many windows, and
//! each grant has one key.) A pool need not end with a section: chunks that it does not have are taken from
//! the start, by nobody.

use std::ops::Range;

use super::header::{CHUNK_ORDER_MAX, CHUNKS, PARTS_ORDER_MAX, Record, SPAN_ORDER_MAX, SPANS};
use super::log::{FullLog, Layer};

/// Orders that there are.
pub const ORDERS: u32 = SECTION_ORDER + PARTS_ORDER_MAX + 1;
/// Chunks of a section.
pub const SECTION: u32 = CHUNKS * SPANS;
/// The order of a span.
pub const SPAN_ORDER: u32 = CHUNK_ORDER_MAX + 1;
/// The order of a section.
pub const SECTION_ORDER: u32 = SPAN_ORDER + SPAN_ORDER_MAX;
/// Most bytes of a block: what the length of a window counts.
pub const BLOCK_BYTES_MAX: u64 = 1 << 31;
const _: () = assert!(1 << SPAN_ORDER == CHUNKS && 1 << SECTION_ORDER == SECTION);

/// Index of a word in the metadata.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Word(pub u32);

/// A block: an aligned run of 2^order chunks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Block {
    /// Its first chunk.
    pub chunk: u32,
    /// Logarithm of its length in chunks.
    pub order: u32,
}

impl Block {
    /// Its chunks.
    pub fn chunks(self) -> Range<u32> {
        self.chunk..self.chunk + (1 << self.order)
    }

    /// The block that the full log of a chunk is about: it begins there, or in an earlier section.
    pub fn of(chunk: u32, log: FullLog) -> Self {
        match log.layer {
            Layer::Span => Self { chunk, order: log.size },
            Layer::Section if log.size == Record::PART => {
                let order = SECTION_ORDER + log.sections.min(PARTS_ORDER_MAX);
                Self { chunk: chunk >> order << order, order }
            }
            Layer::Section => Self { chunk, order: log.size + SPAN_ORDER },
        }
    }

    /// Its sections, of one that has several.
    pub fn parts(self) -> Option<Range<u32>> {
        let first = self.chunk / SECTION;
        (self.order > SECTION_ORDER).then(|| first..first + (1 << (self.order - SECTION_ORDER)))
    }

    /// The section `index` as a block of its own.
    pub fn section(index: u32) -> Self {
        Self { chunk: index * SECTION, order: SECTION_ORDER }
    }

    /// Whether a span's header or a section's has it.
    pub fn layer(self) -> Layer {
        if self.order < SPAN_ORDER { Layer::Span } else { Layer::Section }
    }
}

/// In which function of the memory node's NIC the windows of a block are. Functions have equal runs of the capability
/// table, in its order:
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
    /// The windows of a pool in `count` functions.
    pub fn new(shape: Shape, count: u32) -> Self {
        Self { share: shape.entries().div_ceil(count.max(1)).max(1) }
    }

    /// The function of an entry.
    pub fn of(self, entry: u32) -> u32 {
        entry / self.share
    }

    /// Entries of a function.
    pub fn entries(self, shape: Shape, function: u32) -> Range<u32> {
        let at = |function: u32| self.share.saturating_mul(function).min(shape.entries());
        at(function)..at(function + 1)
    }
}

/// How large a tree is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Chunks.
    pub chunks: u32,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
}

impl Shape {
    /// Sections, the last of them maybe in part.
    pub fn sections(self) -> u32 {
        self.chunks.div_ceil(SECTION)
    }

    /// Spans with a header.
    pub fn spans(self) -> u32 {
        self.sections() * SPANS
    }

    /// Blocks of an order that lie within the pool.
    pub fn blocks(self, order: u32) -> u32 {
        if self.block_bytes(order) > BLOCK_BYTES_MAX { 0 } else { self.chunks >> order }
    }

    /// Bytes of a block.
    pub fn block_bytes(self, order: u32) -> u64 {
        self.chunk_bytes << order
    }

    /// The largest block that there is.
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

    /// A span's header; spans are counted through all sections.
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

    /// The block of an entry; `None` if there is none.
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

    /// The entries of `range` by the order of their blocks: the order, its first entry, and those of its entries that
    /// are in the range.
    pub fn by_order(self, range: Range<u32>) -> impl Iterator<Item = (u32, u32, Range<u32>)> {
        (0..ORDERS).scan(0, move |next, order| {
            let base = *next;
            *next += self.blocks(order);
            Some((order, base, range.start.max(base)..range.end.min(*next)))
        })
    }

    /// The headers without which none of these blocks of an order is taken, no more of them than blocks; none are told of
    /// blocks of several sections, of which there are few.
    pub fn headers(self, order: u32, blocks: Range<u32>) -> Option<Range<u32>> {
        let over = |each: u32| {
            let each = each - order;
            blocks.start >> each..((blocks.end - 1) >> each) + 1
        };
        let of = |first: Word, which: Range<u32>| first.0 + which.start..first.0 + which.end;
        match order {
            ..SPAN_ORDER => Some(of(self.span(0), over(SPAN_ORDER))),
            SPAN_ORDER..=SECTION_ORDER => Some(of(self.section(0), over(SECTION_ORDER))),
            _ => None,
        }
    }

    /// The capability of an entry.
    pub fn capability(self, entry: u32) -> Word {
        Word(self.capabilities() + entry)
    }

    /// Words in all.
    pub fn words(self) -> u32 {
        self.capabilities() + self.entries()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_entry_names_one_block(chunks in 1u32..3000, pick in any::<u32>()) {
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
        fn functions_share_the_table(chunks in 1u32..3000, count in 1u32..130, pick in any::<u32>()) {
            let shape = Shape { chunks, chunk_bytes: 4096 };
            let functions = Functions::new(shape, count);
            let entry = pick % shape.entries();
            let of = functions.of(entry);
            prop_assert!(of < count && functions.entries(shape, of).contains(&entry));
            let all: Vec<u32> = (0..count).flat_map(|f| functions.entries(shape, f)).collect();
            prop_assert_eq!(all, Vec::from_iter(0..shape.entries()));
            let most = shape.entries().div_ceil(count) as usize;
            prop_assert!((0..count).all(|f| functions.entries(shape, f).len() <= most));
        }
    }

    proptest! {
        #[test]
        fn entries_by_order_are_all_of_them_and_their_headers_are_found(
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
                    prop_assert!(headers.as_ref().is_none_or(|all| all.len() as u32 <= end - first));
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
        let block = Block::of(3 * SECTION, log);
        assert_eq!((block, block.parts()), (Block { chunk: 0, order: 11 }, Some(0..4)));
        let large = Shape { chunks: 1 << 23, chunk_bytes: 4096 };
        assert_eq!(large.block_bytes(large.order_max()), BLOCK_BYTES_MAX);
    }

    #[test]
    fn the_largest_pool_has_numbers_for_all_that_it_has() {
        let chunks = crate::Settings::CHUNKS_MAX_BY_CAS as u32;
        let shape = Shape { chunks, chunk_bytes: 4096 };
        assert!(
            shape.words() as u64 * 8 <= BLOCK_BYTES_MAX,
            "the metadata is opened by one window"
        );
        let last = shape.entries() - 1;
        let block = shape.block(last).unwrap();
        assert_eq!((shape.entry(block), block.order), (last, shape.order_max()));
        // As many windows as a key can name in each function; two for each block.
        let functions = Functions::new(shape, 17);
        assert_eq!(functions.of(last), 16);
        assert!(functions.entries(shape, 0).len() * 2 < (1 << 24) - (1 << 16));
    }

    #[test]
    fn no_window_is_longer_than_its_length_can_say() {
        let shape = Shape { chunks: SECTION, chunk_bytes: 1 << 28 };
        assert_eq!(shape.order_max(), 3);
    }
}
