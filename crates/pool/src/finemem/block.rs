//! Blocks of chunks: their orders, and the layers of the tree that hold them.

use std::ops::Range;

use super::header::{CHUNK_ORDER_MAX, CHUNKS, PARTS_ORDER_MAX, SPAN_ORDER_MAX, SPANS};
pub use crate::blocks::{BLOCK_BYTES_MAX, Block, ORDERS};

/// Chunks of a section.
pub const SECTION: u32 = CHUNKS * SPANS;
/// The order of a span.
pub const SPAN_ORDER: u32 = CHUNK_ORDER_MAX + 1;
/// The order of a section.
pub const SECTION_ORDER: u32 = SPAN_ORDER + SPAN_ORDER_MAX;
const _: () = assert!(ORDERS == SECTION_ORDER + PARTS_ORDER_MAX + 1);
const _: () = assert!(1 << SPAN_ORDER == CHUNKS && 1 << SECTION_ORDER == SECTION);

/// The kind of header that a log record comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Layer {
    /// A span's header: the block consists of chunks.
    #[default]
    Span,
    /// A section's header: the block consists of spans.
    Section,
}

impl Block {
    /// Sections of the block, if it has several.
    pub fn parts(self) -> Option<Range<u32>> {
        let first = self.chunk / SECTION;
        (self.order > SECTION_ORDER).then(|| first..first + (1 << (self.order - SECTION_ORDER)))
    }

    /// The section `index` as a block of its own.
    pub fn section(index: u32) -> Self {
        Self { chunk: index * SECTION, order: SECTION_ORDER }
    }

    /// The layer whose header holds the block: span or section.
    pub fn layer(self) -> Layer {
        if self.order < SPAN_ORDER { Layer::Span } else { Layer::Section }
    }
}
