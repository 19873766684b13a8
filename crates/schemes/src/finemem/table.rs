//! The initial metadata.

use super::block::{CHUNKS, SpanOffset};
use super::header::{Header, Spread};
use super::layout::{Shape, Word};

/// Sets the nonzero words of an empty tree: chunks beyond the end of the pool, and their spans, are
/// marked as taken without an owner.
pub(super) fn initial(shape: Shape, mut set: impl FnMut(Word, u64)) {
    for section in shape.each_section() {
        let mut header = Header(0);
        for at in SpanOffset::all() {
            let span = section.span(at);
            let there = shape.chunks_of(span);
            if there == CHUNKS {
                continue;
            }
            let missing = (u32::MAX as u64) << there;
            set(shape.span(span), Header(0).with_bitmap(missing as u32).with_in_use(true).0);
            header = header.with_spread(at, if there == 0 { Spread::Full } else { Spread::Normal });
        }
        set(shape.section(section), header.0);
    }
}
