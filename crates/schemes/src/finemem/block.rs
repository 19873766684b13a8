//! Blocks of chunks: their orders, and the layers of the tree that hold them.
//!
//! ```text
//! section   span 0              │ span 1              │ ...         512 chunks
//!           chunk 0 ... 31      │ chunk 32 ... 63     │ ...          32 chunks each
//! ```

use std::ops::Range;

use scheme::index::IndexRange;
use scheme::index_type;

use crate::blocks::ChunkIndex;
pub use crate::blocks::{BLOCK_BYTES_MAX, Block, CHUNK_ORDER, ORDERS, Order};

index_type! {
    /// A span. Spans are numbered through all sections.
    SpanIndex
}

index_type! {
    /// A section.
    SectionIndex
}

index_type! {
    /// Position of a chunk in its span.
    ChunkOffset
}

index_type! {
    /// Position of a span in its section.
    SpanOffset
}

/// Chunks of a span.
pub const CHUNKS: u32 = 32;
/// Spans of a section.
pub const SPANS: u32 = 16;
/// Order of the largest block of chunks within a span: half a span.
pub const CHUNK_ORDER_MAX: u32 = 4;
/// Order of the largest block of spans: a section, as the logarithm of its spans.
pub const SPAN_ORDER_MAX: u32 = 4;
/// Maximum sections of a block, as a logarithm.
pub const PARTS_ORDER_MAX: u32 = 14;
/// Chunks of a section.
pub const SECTION: u32 = CHUNKS * SPANS;
/// The order of a span.
pub const SPAN_ORDER: Order = Order::new(CHUNK_ORDER_MAX + 1);
/// The order of a section.
pub const SECTION_ORDER: Order = SPAN_ORDER.plus(SPAN_ORDER_MAX);
const _: () = assert!(ORDERS == SECTION_ORDER.raw() + PARTS_ORDER_MAX + 1);
const _: () = assert!(SPAN_ORDER.chunks() == CHUNKS && SECTION_ORDER.chunks() == SECTION);

impl ChunkIndex {
    /// The span that contains the chunk.
    pub const fn span(self) -> SpanIndex {
        SpanIndex::new(self.raw() / CHUNKS)
    }

    /// The section that contains the chunk.
    pub const fn section(self) -> SectionIndex {
        SectionIndex::new(self.raw() / SECTION)
    }

    /// Position in the span.
    pub const fn in_span(self) -> ChunkOffset {
        ChunkOffset::new(self.raw() % CHUNKS)
    }
}

impl SpanIndex {
    /// The section that contains the span.
    pub const fn section(self) -> SectionIndex {
        SectionIndex::new(self.raw() / SPANS)
    }

    /// Position in the section.
    pub const fn in_section(self) -> SpanOffset {
        SpanOffset::new(self.raw() % SPANS)
    }

    /// The first chunk.
    pub const fn first_chunk(self) -> ChunkIndex {
        ChunkIndex::new(self.raw() * CHUNKS)
    }

    /// The chunk at a position.
    pub const fn chunk(self, at: ChunkOffset) -> ChunkIndex {
        self.first_chunk().plus(at.raw())
    }
}

impl SectionIndex {
    /// The first span.
    pub const fn first_span(self) -> SpanIndex {
        SpanIndex::new(self.raw() * SPANS)
    }

    /// The first chunk.
    pub const fn first_chunk(self) -> ChunkIndex {
        ChunkIndex::new(self.raw() * SECTION)
    }

    /// The span at a position.
    pub const fn span(self, at: SpanOffset) -> SpanIndex {
        self.first_span().plus(at.raw())
    }

    /// The spans.
    pub const fn spans(self) -> Range<SpanIndex> {
        self.first_span()..self.plus(1).first_span()
    }

    /// The chunks.
    pub const fn chunks(self) -> Range<ChunkIndex> {
        self.first_chunk()..self.plus(1).first_chunk()
    }
}

impl SpanOffset {
    /// The positions of all spans.
    pub fn all() -> impl DoubleEndedIterator<Item = Self> {
        (Self::new(0)..Self::new(SPANS)).iter()
    }
}

impl Order {
    /// The layer whose headers hold the blocks.
    pub const fn layer(self) -> Layer {
        if self.raw() < SPAN_ORDER.raw() { Layer::Span } else { Layer::Section }
    }

    /// True for a block of several sections.
    pub const fn has_parts(self) -> bool {
        self.raw() > SECTION_ORDER.raw()
    }

    /// Logarithm of the length in spans, of a block of spans.
    pub const fn in_spans(self) -> u32 {
        self.raw() - SPAN_ORDER.raw()
    }

    /// Logarithm of the length in sections, of a block of sections.
    pub const fn in_sections(self) -> u32 {
        self.raw() - SECTION_ORDER.raw()
    }
}

/// The kind of header that a log record comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Layer {
    /// A span's header: the block consists of chunks.
    #[default]
    Span,
    /// A section's header: the block consists of spans.
    Section,
}

/// A header of the tree.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Place {
    /// A span's header.
    Span(SpanIndex),
    /// A section's header.
    Section(SectionIndex),
}

impl Place {
    /// The layer.
    pub const fn layer(self) -> Layer {
        match self {
            Self::Span(_) => Layer::Span,
            Self::Section(_) => Layer::Section,
        }
    }

    /// The section that contains the span, or is the section.
    pub const fn section(self) -> SectionIndex {
        match self {
            Self::Span(span) => span.section(),
            Self::Section(section) => section,
        }
    }

    /// The header `count` after this one, in the same layer.
    pub const fn plus(self, count: u32) -> Self {
        match self {
            Self::Span(span) => Self::Span(span.plus(count)),
            Self::Section(section) => Self::Section(section.plus(count)),
        }
    }
}

impl Block {
    /// A section as a block of its own.
    pub const fn section(section: SectionIndex) -> Self {
        Self { chunk: section.first_chunk(), order: SECTION_ORDER }
    }

    /// Sections of the block, if it has several.
    pub fn parts(self) -> Option<Range<SectionIndex>> {
        let first = self.chunk.section();
        self.order.has_parts().then(|| first..first.plus(1 << self.order.in_sections()))
    }

    /// The layer whose header holds the block: span or section.
    pub const fn layer(self) -> Layer {
        self.order.layer()
    }

    /// The header that holds the block; of a block of several sections, that of the first one.
    pub const fn place(self) -> Place {
        match self.layer() {
            Layer::Span => Place::Span(self.chunk.span()),
            Layer::Section => Place::Section(self.chunk.section()),
        }
    }
}
