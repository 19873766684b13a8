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

use scheme::index::{EntryId, IndexRange};
use scheme::index_type;

use super::block::{Block, CHUNKS, Layer, Order, Place, SECTION, SPANS, SectionIndex, SpanIndex};
use crate::blocks::ChunkIndex;
pub use crate::blocks::Shape;

index_type! {
    /// A word of the metadata.
    Word
}

impl Word {
    /// Offset in bytes.
    pub const fn offset(self) -> usize {
        8 * self.as_usize()
    }
}

impl Place {
    /// The header's word.
    pub fn word(self, shape: Shape) -> Word {
        match self {
            Self::Span(span) => shape.span(span),
            Self::Section(section) => shape.section(section),
        }
    }
}

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
    pub fn of(self, entry: EntryId) -> u32 {
        entry.raw() / self.share
    }

    /// Entries of a function.
    pub fn entries(self, shape: Shape, function: u32) -> Range<EntryId> {
        let at = |function: u32| self.share.saturating_mul(function).min(shape.entries());
        EntryId::new(at(function))..EntryId::new(at(function + 1))
    }
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

    /// All spans that have a header.
    pub fn each_span(self) -> impl DoubleEndedIterator<Item = SpanIndex> {
        (SpanIndex::new(0)..SpanIndex::new(self.spans())).iter()
    }

    /// All sections.
    pub fn each_section(self) -> impl DoubleEndedIterator<Item = SectionIndex> {
        (SectionIndex::new(0)..self.sections_end()).iter()
    }

    /// The section after the last one.
    pub fn sections_end(self) -> SectionIndex {
        SectionIndex::new(self.sections())
    }

    /// The chunks of a section that lie within the pool.
    pub fn chunks_in(self, section: SectionIndex) -> Range<ChunkIndex> {
        let chunks = section.chunks();
        chunks.start..chunks.end.min(self.end())
    }

    /// Number of chunks of a span that lie within the pool.
    pub fn chunks_of(self, span: SpanIndex) -> u32 {
        self.chunks.saturating_sub(span.first_chunk().raw()).min(CHUNKS)
    }

    /// A section's header.
    pub fn section(self, section: SectionIndex) -> Word {
        Word::new(section.raw())
    }

    /// A span's header.
    pub fn span(self, span: SpanIndex) -> Word {
        Word::new(self.sections() + span.raw())
    }

    /// A chunk's full log.
    pub fn log(self, chunk: ChunkIndex) -> Word {
        Word::new(self.sections() + self.spans() + chunk.raw())
    }

    fn capabilities(self) -> u32 {
        self.sections() + self.spans() + self.chunks
    }

    /// The headers that show whether any block of these entries is taken; never more headers than
    /// blocks. The entries are of blocks of one order, whose first entry is `base`. `None` for
    /// orders of several sections, which have few blocks.
    pub fn headers(
        self,
        (order, base): (Order, EntryId),
        entries: Range<EntryId>,
    ) -> Option<Range<Word>> {
        let chunk = |entry: EntryId| Block::nth(order, entry.raw() - base.raw()).chunk;
        let (first, last) = (chunk(entries.start), chunk(EntryId::new(entries.end.raw() - 1)));
        match order.layer() {
            Layer::Span => Some(self.span(first.span())..self.span(last.span()).plus(1)),
            Layer::Section if order.has_parts() => None,
            Layer::Section => {
                Some(self.section(first.section())..self.section(last.section()).plus(1))
            }
        }
    }

    /// The capability of an entry.
    pub fn capability(self, entry: EntryId) -> Word {
        Word::new(self.capabilities() + entry.raw())
    }

    /// Total number of words.
    pub fn words(self) -> u32 {
        self.capabilities() + self.entries()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::BLOCK_BYTES_MAX;
    use crate::finemem::header::Record;
    use crate::finemem::log::FullLog;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn entry_names_exactly_one_block(chunks in 1u32..3000, pick in any::<u32>()) {
            let shape = Shape { chunks, chunk_bytes: 4096 };
            let entry = EntryId::new(pick % shape.entries());
            let block = shape.block(entry).unwrap();
            prop_assert_eq!(shape.entry(block), entry);
            prop_assert_eq!(block.chunk.raw() % block.order.chunks(), 0);
            prop_assert!(block.end() <= shape.end());
            prop_assert_eq!(shape.block(shape.entries_end()), None);
            prop_assert!(shape.capability(entry).raw() < shape.words());
        }
    }

    proptest! {
        #[test]
        fn functions_partition_the_table(
            chunks in 1u32..3000, count in 1u32..130, pick in any::<u32>()
        ) {
            let shape = Shape { chunks, chunk_bytes: 4096 };
            let functions = Functions::new(shape, count);
            let entry = EntryId::new(pick % shape.entries());
            let function = functions.of(entry);
            prop_assert!(function < count && functions.entries(shape, function).contains(&entry));
            let all: Vec<_> = (0..count).flat_map(|f| functions.entries(shape, f).iter()).collect();
            prop_assert_eq!(all, Vec::from_iter(shape.each_entry()));
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
            let range = EntryId::new(a.min(b))..EntryId::new(a.max(b));
            let mut all = Vec::new();
            for (order, base, entries) in shape.by_order(range.clone()) {
                for some in entries.batches(len as usize) {
                    let headers = shape.headers((order, base), some.clone());
                    prop_assert!(headers.as_ref().is_none_or(|h| h.len() <= some.len()));
                    for entry in some.iter() {
                        let block = shape.block(entry).unwrap();
                        prop_assert_eq!(block.order, order);
                        let its = block.place().word(shape);
                        prop_assert!(headers.clone().is_none_or(|all| all.contains(&its)));
                        prop_assert_eq!(headers.is_none(), block.parts().is_some());
                        all.push(entry);
                    }
                }
            }
            prop_assert_eq!(all, Vec::from_iter(range.iter()));
        }
    }

    #[test]
    fn a_whole_section_has_twice_as_many_windows_as_chunks() {
        let shape = Shape { chunks: SECTION, chunk_bytes: 4096 };
        assert_eq!((shape.sections(), shape.spans(), shape.entries()), (1, 16, 2 * SECTION - 1));
        assert_eq!(shape.order_max(), Order::new(9));
        assert_eq!(shape.order_for(4097), Some(Order::new(1)));
        assert_eq!(shape.order_for(2 << 20), Some(Order::new(9)));
        assert_eq!(shape.order_for((2 << 20) + 1), None);
    }

    #[test]
    fn blocks_of_several_sections_are_aligned_and_within_the_pool() {
        let shape = Shape { chunks: 7 * SECTION + 5, chunk_bytes: 4096 };
        let [ten, eleven] = [10, 11].map(Order::new);
        assert_eq!((shape.blocks(eleven), shape.blocks(ten)), (1, 3));
        assert_eq!((shape.order_max(), shape.order_for((4 << 20) + 1)), (eleven, Some(eleven)));
        let log = FullLog {
            size: Record::PART,
            sections: 2,
            taken: true,
            layer: Layer::Section,
            ..FullLog::default()
        };
        let block = log.block(SectionIndex::new(3).first_chunk());
        let parts = SectionIndex::new(0)..SectionIndex::new(4);
        assert_eq!((block, block.parts()), (Block::nth(eleven, 0), Some(parts)));
        let large = Shape { chunks: 1 << 23, chunk_bytes: 4096 };
        assert_eq!(large.block_bytes(large.order_max()), BLOCK_BYTES_MAX);
    }

    #[test]
    fn largest_pool_fits_windows_and_keys() {
        let chunks = crate::finemem::FINEMEM.chunks_max as u32;
        let shape = Shape { chunks, chunk_bytes: 4096 };
        assert!(shape.words() as u64 * 8 <= BLOCK_BYTES_MAX, "one window covers the metadata");
        let last = EntryId::new(shape.entries() - 1);
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
        assert_eq!(shape.order_max(), Order::new(3));
    }
}
