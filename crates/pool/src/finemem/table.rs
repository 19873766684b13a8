//! The metadata as the memory node makes it.

use super::header::{CHUNKS, Header, SPANS, Spread};
use super::layout::{Shape, Word};

/// The words of a tree of which nothing is taken that are not zero: chunks that the pool does not have are
/// taken, by nobody, and so are their spans.
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
