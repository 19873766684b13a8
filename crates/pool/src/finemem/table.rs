//! The initial metadata.

use super::header::{CHUNKS, Header, SPANS, Spread};
use super::layout::{Shape, Word};

/// Sets the nonzero words of an empty tree: chunks beyond the end of the pool, and their spans, are
/// marked as taken without an owner.
pub(super) fn initial(shape: Shape, mut set: impl FnMut(Word, u64)) {
    for section in 0..shape.sections() {
        let mut header = Header(0);
        for at in 0..SPANS {
            let span = section * SPANS + at;
            let there = shape.chunks.saturating_sub(span * CHUNKS).min(CHUNKS);
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
