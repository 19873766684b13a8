//! A user's cache of headers, with indexes of the sections worth searching.
//!
//! Failed CASes refresh the cache; headers are re-read only as a last resort (FineMem §4.1, lazy
//! updates). Sections are indexed by the states of their spans, so that a search of a pool of a
//! hundred thousand sections need not visit them all.

use std::ops::Range;

use super::Seen;
use crate::finemem::block::{Layer, Order, Place, SECTION_ORDER, SectionIndex, SpanOffset};
use crate::finemem::header::{Header, Spread, find_chunks, find_spans};
use crate::finemem::layout::Shape;

/// Combinations of a span's state and an order within a section.
const KINDS: usize = 4 * (SECTION_ORDER.as_usize() + 1);
const _: () = assert!(KINDS <= 64);

/// A set of sections.
#[derive(Default)]
struct Sections(Vec<u64>);

impl Sections {
    fn new(count: u32) -> Self {
        Self(vec![0; count.div_ceil(64) as usize])
    }

    fn set(&mut self, section: SectionIndex, is_in: bool) {
        let at = section.as_usize();
        let (word, bit) = (&mut self.0[at / 64], 1u64 << (at % 64));
        *word = if is_in { *word | bit } else { *word & !bit };
    }
}

/// The cache (see the module documentation).
pub(super) struct Cache {
    sections: Vec<Option<Seen>>,
    spans: Vec<Option<Seen>>,
    /// Sections that have a span of each state, by [`Spread`].
    having: [Sections; 4],
    /// Sections whose spans of a state have no room for a block of an order, by [`kind`]. Valid
    /// until any header of the section changes.
    without: Vec<Sections>,
    /// The kinds under which each section is in `without`.
    kinds: Vec<u64>,
}

impl Cache {
    /// An empty cache.
    pub fn new(shape: Shape) -> Self {
        let (sections, spans) = (shape.sections(), shape.spans());
        Self {
            sections: vec![None; sections as usize],
            spans: vec![None; spans as usize],
            having: std::array::from_fn(|_| Sections::new(sections)),
            without: (0..KINDS).map(|_| Sections::new(sections)).collect(),
            kinds: vec![0; sections as usize],
        }
    }

    pub fn known(&self, place: Place) -> Option<Seen> {
        match place {
            Place::Section(section) => self.sections[section.as_usize()],
            Place::Span(span) => self.spans[span.as_usize()],
        }
    }

    pub fn remember(&mut self, place: Place, header: Header, flushed: bool) -> Seen {
        let slot = match place {
            Place::Section(section) => &mut self.sections[section.as_usize()],
            Place::Span(span) => &mut self.spans[span.as_usize()],
        };
        // A flushed log stays flushed while other fields of the header change.
        let same = |seen: &Seen| seen.header.record() == header.record();
        let flushed = flushed || slot.is_some_and(|seen| seen.flushed && same(&seen));
        let before = slot.map(|seen| seen.header.bitmap());
        let seen = Seen { header, flushed };
        *slot = Some(seen);
        if before != Some(header.bitmap()) {
            let section = place.section();
            let mut kinds = std::mem::take(&mut self.kinds[section.as_usize()]);
            while kinds != 0 {
                self.without[kinds.trailing_zeros() as usize].set(section, false);
                kinds &= kinds - 1;
            }
            if place.layer() == Layer::Section {
                let states = states(header);
                let by_state = (0..).zip(&mut self.having);
                by_state.for_each(|(at, having)| having.set(section, states >> at & 1 == 1));
            }
        }
        seen
    }

    /// The first section from `from` on that has spans of this state, and possibly room for a block
    /// of `order`.
    pub fn next(&self, from: SectionIndex, spread: Spread, order: Order) -> Option<SectionIndex> {
        let (having, without) =
            (&self.having[spread as usize].0, &self.without[kind(spread, order)].0);
        let mut mask = u64::MAX << (from.raw() % 64);
        for at in from.as_usize() / 64..having.len() {
            let found = having[at] & !without[at] & mask;
            if found != 0 {
                return Some(SectionIndex::new(at as u32 * 64 + found.trailing_zeros()));
            }
            mask = u64::MAX;
        }
        None
    }

    /// Records that a search for a block of `order` in a section's spans of this state failed. If
    /// the cached headers confirm that there is no room, later searches skip the section.
    pub fn found_none(&mut self, section: SectionIndex, spread: Spread, order: Order) {
        let Some(seen) = self.sections[section.as_usize()] else { return };
        let has_room = |at: SpanOffset| match self.known(Place::Span(section.span(at))) {
            Some(span) => find_chunks(span.header.bitmap(), order).is_some(),
            None => true,
        };
        let mut spans = SpanOffset::all().filter(|at| seen.header.spread(*at) == spread);
        let room = match order.layer() {
            Layer::Span => spans.any(has_room),
            Layer::Section => find_spans(seen.header.bitmap(), order.in_spans()).is_some(),
        };
        if !room {
            self.without[kind(spread, order)].set(section, true);
            self.kinds[section.as_usize()] |= 1 << kind(spread, order);
        }
    }

    /// Bitmap of the section's spans that are known to have room for a block of this order.
    pub fn with_room(&self, section: SectionIndex, order: Order) -> u32 {
        let Range { start, end } = section.spans();
        let spans = &self.spans[start.as_usize()..end.as_usize()];
        let room = |seen: &Seen| {
            let bitmap = seen.header.bitmap();
            bitmap != u32::MAX && find_chunks(bitmap, order).is_some()
        };
        (0..)
            .zip(spans)
            .fold(0, |all, (at, seen)| all | (seen.as_ref().is_some_and(room) as u32) << at)
    }

    /// True if all these sections are known to be empty.
    pub fn are_empty(&self, sections: Range<SectionIndex>) -> bool {
        let mut all = self.sections[sections.start.as_usize()..sections.end.as_usize()].iter();
        all.all(|seen| seen.is_some_and(|seen| seen.header.bitmap() == 0))
    }
}

fn kind(spread: Spread, order: Order) -> usize {
    order.as_usize() * 4 + spread as usize
}

/// The states of a section's spans: one bit for each [`Spread`].
fn states(section: Header) -> u32 {
    const LOW: u32 = 0x5555_5555;
    let (low, high) = (section.bitmap() & LOW, section.bitmap() >> 1 & LOW);
    let any = |spans: u32| (spans != 0) as u32;
    any(!low & !high & LOW) | any(low & !high) << 1 | any(!low & high) << 2 | any(low & high) << 3
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finemem::block::{CHUNK_ORDER, SPAN_ORDER};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn section_states_match_its_spans(word in any::<u64>(), mask in any::<u64>()) {
            let header = Header(word & mask);
            let all = SpanOffset::all().fold(0, |all, span| all | 1 << header.spread(span) as u32);
            prop_assert_eq!(states(header), all);
        }
    }

    #[test]
    fn section_is_skipped_until_it_changes() {
        let shape = Shape { chunks: 200 * 512, chunk_bytes: 4096 };
        let mut cache = Cache::new(shape);
        let next = |cache: &Cache, from, spread, order| {
            cache.next(SectionIndex::new(from), spread, order).map(SectionIndex::raw)
        };
        assert_eq!(next(&cache, 0, Spread::Empty, CHUNK_ORDER), None);
        for index in [3, 70, 199].map(SectionIndex::new) {
            cache.remember(Place::Section(index), Header(0), false);
        }
        assert_eq!(next(&cache, 0, Spread::Empty, CHUNK_ORDER), Some(3));
        assert_eq!(next(&cache, 4, Spread::Empty, CHUNK_ORDER), Some(70));
        let half = SpanOffset::all().fold(Header(0), |h, at| match at.raw() % 2 {
            0 => h.with_spread(at, Spread::Full),
            _ => h,
        });
        let seventy = SectionIndex::new(70);
        cache.remember(Place::Section(seventy), half, false);
        let two = SPAN_ORDER.plus(1);
        cache.found_none(seventy, Spread::Empty, two);
        assert_eq!(next(&cache, 4, Spread::Empty, two), Some(199));
        assert_eq!(next(&cache, 4, Spread::Empty, SPAN_ORDER), Some(70));
        cache.remember(Place::Section(seventy), Header(0), false);
        assert_eq!(next(&cache, 4, Spread::Empty, two), Some(70));
        // The headers of its spans are not cached: there may be room.
        cache.found_none(seventy, Spread::Empty, CHUNK_ORDER);
        assert_eq!(next(&cache, 4, Spread::Empty, CHUNK_ORDER), Some(70));
        assert_eq!(next(&cache, 0, Spread::Full, CHUNK_ORDER), None);
    }
}
