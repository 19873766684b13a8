//! Allocation of a block.
//!
//! ```text
//! CAS header, READ full log, READ header, READ capability   posted together; the CAS commits
//! CAS full log                                              flushed
//! ```
//!
//! A block of several sections is taken one section at a time, in descending order. If a section is
//! not free, the search frees the sections taken so far. The first section is the commit point: the
//! owner in its log owns the block, and the other sections then have the same log. If a crash
//! leaves parts behind, the first section is not among them.

use scheme::index::IndexRange;

use super::flush::{has_taken, pending};
use super::{BATCH, CONTENDED_BELOW, CONTENDED_FROM, Changed, Seen, Tree, Verbs};
use crate::finemem::block::{
    Block, Layer, Order, Place, SPAN_ORDER, SPANS, SectionIndex, SpanIndex,
};
use crate::finemem::header::{
    Header, Record, Spread, Timestamp, chunk_mask, find_chunks, find_spans, span_mask,
};
use crate::finemem::layout::Word;
use crate::finemem::log::Capability;

/// Order in which states of spans are tried (FineMem §4.1).
const PREFERENCE: [Spread; 3] = [Spread::Normal, Spread::Empty, Spread::Contended];

/// Timestamp of a change that allocates (or frees) a block: the next timestamp if the last change
/// was of the other kind, otherwise the same.
pub(super) fn timestamp(layer: Layer, header: Header, taking: bool) -> Timestamp {
    let last = header.record();
    let opened = layer == Layer::Section && last.size == Record::OPENED;
    let same_kind = !opened && has_taken(layer, header) == taking;
    if same_kind { last.timestamp } else { last.timestamp.next() }
}

/// Sections whose spans' headers one READ covers.
const SECTIONS_PER_READ: u32 = BATCH as u32 / SPANS;
/// Number of sections that are re-read, with their spans, when cached headers turn out to be
/// outdated: initially, and at most after repeated cases. Both are small, because many large READs
/// would saturate the memory node's link.
const REREAD_MIN: u32 = 1;
const REREAD_MAX: u32 = 16;
const _: () = assert!((REREAD_MAX * (SPANS + 1)) as usize <= BATCH);
/// Failed CASes of one search on one header after which the next search starts elsewhere. The first
/// failure only shows that the cached header was outdated.
pub(super) const COLLISION_FAILURES: u32 = 2;
/// Maximum number of times that a search moves to another position because of collisions.
pub(super) const RELOCATIONS_MAX: u32 = 3;

/// Mode of a search.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Search {
    /// Uses the cache; moves elsewhere after a collision.
    Relocating,
    /// Uses the cache; avoids contended spans.
    Cached,
    /// Reads all headers.
    Exhaustive,
}

/// An allocated block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Taken {
    /// The block.
    pub block: Block,
    /// The capability of the block.
    pub capability: Capability,
}

/// Spans of a section to be allocated.
#[derive(Clone, Copy)]
enum Wanted {
    /// A block of 2^order aligned spans.
    Spans(u32),
    /// All spans, as a part of this block of several sections.
    Part(Block),
}

impl Wanted {
    /// Finds room: the block, its bits in the header, and its log record.
    fn find(self, section: SectionIndex, header: Header) -> Option<(Block, u32, Record)> {
        match self {
            Self::Spans(size) => {
                let offset = find_spans(header.bitmap(), size)?;
                let chunk = section.span(offset).first_chunk();
                let block = Block { chunk, order: SPAN_ORDER.plus(size) };
                let record = Record { offset: offset.raw(), size, ..Record::default() };
                Some((block, span_mask(offset, size), record))
            }
            Self::Part(block) => {
                let record = part(block);
                (header.bitmap() == 0).then_some((block, u32::MAX, record))
            }
        }
    }
}

/// Log record of a section that is part of a block, without time and owner.
pub(super) fn part(block: Block) -> Record {
    let offset = block.order.in_sections();
    Record { offset, size: Record::PART, ..Record::default() }
}

fn level(failures: u32) -> u32 {
    (failures >= CONTENDED_BELOW) as u32 + (failures >= CONTENDED_FROM) as u32
}

/// State of a span after an allocation in it.
fn spread_after(header: Header, before: Spread, failures: u32) -> Spread {
    match before {
        _ if header.bitmap() == u32::MAX => Spread::Full,
        _ if failures >= CONTENDED_FROM => Spread::Contended,
        Spread::Contended if failures >= CONTENDED_BELOW => Spread::Contended,
        _ => Spread::Normal,
    }
}

impl Tree {
    /// Allocates a block of this order; `None` if there is none. On return this user owns the
    /// block, and the full log records that.
    ///
    /// # Errors
    /// Errors of the verbs, also after too many failed CASes. A block, or parts of one, may have
    /// been taken; the logs show which.
    pub async fn allocate<V: Verbs>(
        &self,
        verbs: &V,
        order: Order,
    ) -> Result<Option<Taken>, V::Error> {
        if self.shape.blocks(order) == 0 {
            return Ok(None);
        }
        for search in [Search::Cached, Search::Exhaustive] {
            self.load_sections(verbs, search).await?;
            let found = match search {
                _ if order.has_parts() => self.search_groups(verbs, order).await?,
                Search::Exhaustive => self.search_all(verbs, order).await?,
                Search::Relocating | Search::Cached => self.search_cached(verbs, order).await?,
            };
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    async fn load_sections<V: Verbs>(&self, verbs: &V, search: Search) -> Result<(), V::Error> {
        for some in (SectionIndex::new(0)..self.shape.sections_end()).batches(BATCH) {
            let first = Place::Section(some.start);
            if search == Search::Exhaustive || self.known(first).is_none() {
                self.read_headers(verbs, first, some.len()).await?;
            }
        }
        Ok(())
    }

    /// Searches by cache: all spans of the preferred state first, then those of the next state.
    async fn search_cached<V: Verbs>(
        &self,
        verbs: &V,
        order: Order,
    ) -> Result<Option<Taken>, V::Error> {
        let is_small = order.layer() == Layer::Span;
        let states = if is_small { &PREFERENCE[..] } else { &[Spread::Empty] };
        let (zero, start, end) =
            (SectionIndex::new(0), self.start_section(), self.shape.sections_end());
        // Sections whose headers this search has re-read, and the number to re-read next time.
        let (mut fresh, mut next_fresh) = (zero..zero, REREAD_MIN);
        let mut moves = if self.contention_control && is_small { RELOCATIONS_MAX } else { 0 };
        for &spread in states {
            for range in [start..end, zero..start] {
                let mut from = range.start;
                let next = |from| self.cache.lock().next(from, spread, order);
                while let Some(section) = next(from).filter(|section| *section < range.end) {
                    let search = if moves > 0 { Search::Relocating } else { Search::Cached };
                    let mut is_old = false;
                    let old = (!fresh.contains(&section)).then_some(&mut is_old);
                    let taken =
                        self.try_section(verbs, section, order, &[spread], search, old).await?;
                    if taken.is_some() {
                        if section != start && is_small {
                            self.set_start_section(section);
                        } else if section != start && self.contention_control {
                            self.start.relocate();
                        }
                        return Ok(taken);
                    }
                    if self.start.take_collision() && moves > 0 {
                        if let Some(taken) = self.search_elsewhere(verbs, order, &mut moves).await?
                        {
                            return Ok(Some(taken));
                        }
                        continue;
                    }
                    if is_old {
                        // Two READs refresh many headers; otherwise each outdated header would cost
                        // a failed CAS.
                        fresh = section..end.min(section.plus(next_fresh));
                        next_fresh = REREAD_MAX.min(4 * next_fresh);
                        self.read_whole_sections(verbs, fresh.clone()).await?;
                        continue;
                    }
                    self.cache.lock().found_none(section, spread, order);
                    from = section.plus(1);
                }
            }
        }
        Ok(None)
    }

    /// The section at which the next search begins.
    fn start_section(&self) -> SectionIndex {
        SectionIndex::new(self.start.scaled_to(self.shape.sections()))
    }

    fn set_start_section(&self, section: SectionIndex) {
        self.start.set_start(section.raw(), self.shape.sections());
    }

    /// Searches other sections after a collision, with re-read headers: first a section that is
    /// known to be in use, so that empty sections stay available for large blocks, then any
    /// section.
    async fn search_elsewhere<V: Verbs>(
        &self,
        verbs: &V,
        order: Order,
        moves: &mut u32,
    ) -> Result<Option<Taken>, V::Error> {
        loop {
            let from = self.start_section();
            let used = {
                let cache = self.cache.lock();
                let next = |from| cache.next(from, Spread::Normal, order);
                next(from)
                    .or_else(|| next(SectionIndex::new(0)))
                    .filter(|_| *moves == RELOCATIONS_MAX)
            };
            *moves -= 1;
            let section = used.unwrap_or(from);
            self.set_start_section(section);
            self.read_whole_sections(verbs, section..section.plus(1)).await?;
            let (spreads, search) = (&PREFERENCE[..2], Search::Relocating);
            let taken = self.try_section(verbs, section, order, spreads, search, None).await?;
            if taken.is_some() || *moves == 0 || !self.start.take_collision() {
                return Ok(taken);
            }
        }
    }

    /// Searches all sections: reads all headers of spans, many with one READ.
    async fn search_all<V: Verbs>(
        &self,
        verbs: &V,
        order: Order,
    ) -> Result<Option<Taken>, V::Error> {
        let end = self.shape.sections_end();
        let batches = end.raw().div_ceil(SECTIONS_PER_READ);
        for i in 0..batches {
            let first = (self.start.scaled_to(batches) + i) % batches * SECTIONS_PER_READ;
            let first = SectionIndex::new(first);
            let sections = first..end.min(first.plus(SECTIONS_PER_READ));
            if order.layer() == Layer::Section {
                for section in sections.iter() {
                    let (spread, search) = (Spread::Empty, Search::Exhaustive);
                    let taken =
                        self.try_section(verbs, section, order, &[spread], search, None).await?;
                    if taken.is_some() {
                        return Ok(taken);
                    }
                }
                continue;
            }
            let spans = sections.len() * SPANS as usize;
            self.read_headers(verbs, Place::Span(first.first_span()), spans).await?;
            // Includes spans marked full in the section's header, because that hint may be
            // outdated.
            for spread in PREFERENCE.into_iter().chain([Spread::Full]) {
                for section in sections.clone().iter() {
                    let search = Search::Exhaustive;
                    let taken =
                        self.try_section(verbs, section, order, &[spread], search, None).await?;
                    if taken.is_some() {
                        return Ok(taken);
                    }
                }
            }
        }
        Ok(None)
    }

    /// Allocates a block in a section: of chunks, in the section's spans of the states `spreads`,
    /// or of spans. If the cached headers of spans turn out to be outdated, sets `is_old` and skips
    /// the remaining spans.
    async fn try_section<V: Verbs>(
        &self,
        verbs: &V,
        index: SectionIndex,
        order: Order,
        spreads: &[Spread],
        search: Search,
        mut is_old: Option<&mut bool>,
    ) -> Result<Option<Taken>, V::Error> {
        if order.layer() == Layer::Section {
            let wanted = Wanted::Spans(order.in_spans());
            return self.try_spans(verbs, index, wanted, search).await;
        }
        // Of the spans marked full, only those whose own header shows room.
        let some = match spreads {
            [Spread::Full] => self.cache.lock().with_room(index, order),
            _ => u32::MAX,
        };
        for at in self.start.spans() {
            let Some(section) = self.known(Place::Section(index)) else { return Ok(None) };
            if !spreads.contains(&section.header.spread(at)) || some >> at.raw() & 1 == 0 {
                continue;
            }
            let span = index.span(at);
            let known = || self.known(Place::Span(span)).map(|seen| seen.header.bitmap());
            let before = known();
            let taken = self.try_span(verbs, span, order, section, search).await?;
            if taken.is_some() || search == Search::Relocating && self.start.has_collision() {
                return Ok(taken);
            }
            if let Some(is_old) = is_old.as_deref_mut()
                && before.is_some()
                && before != known()
            {
                *is_old = true;
                break;
            }
        }
        Ok(None)
    }

    /// Allocates a block in a span, if it has room. `section` was read before the span's header.
    async fn try_span<V: Verbs>(
        &self,
        verbs: &V,
        span: SpanIndex,
        order: Order,
        mut section: Seen,
        search: Search,
    ) -> Result<Option<Taken>, V::Error> {
        let (place, at) = (Place::Span(span), span.in_section());
        let mut seen = self.cached_or_read(verbs, place).await?;
        let mut failures = 0;
        let mut is_late = false;
        loop {
            let header = seen.header;
            let Some(offset) = find_chunks(header.bitmap(), order) else {
                if header.bitmap() != u32::MAX || failures > 0 {
                    return Ok(None);
                }
                if !is_late {
                    // The span may have been full before the section's header was read, and closed
                    // since. A hint "full" would then hide the span for ever, so its header is read
                    // again.
                    seen = self.read_header(verbs, place).await?;
                    is_late = true;
                    continue;
                }
                self.update_hint(verbs, span, section.header, Spread::Full).await?;
                return Ok(None);
            };
            if !header.in_use() {
                // The CAS below expects a header that was read before the section changes.
                match self.open(verbs, span).await? {
                    Some(opened) => section = opened,
                    None => return Ok(None),
                }
            }
            self.flush(verbs, place, seen).await?;
            let record = Record {
                offset: offset.raw(),
                size: order.raw(),
                timestamp: timestamp(Layer::Span, header, true),
                user: self.user,
            };
            let taken = header
                .with_bitmap(header.bitmap() | chunk_mask(offset, order))
                .with_record(record)
                .with_retry(level(self.effective_failures(failures)))
                .with_in_use(true);
            let block = Block { chunk: span.chunk(offset), order };
            match self.commit(verbs, place, header, taken, block).await? {
                Ok(capability) => {
                    let spread = spread_after(
                        taken,
                        section.header.spread(at),
                        self.effective_failures(failures),
                    );
                    self.update_hint(verbs, span, section.header, spread).await?;
                    return Ok(Some(Taken { block, capability }));
                }
                Err(found) => seen = found,
            }
            failures += 1;
            if failures >= COLLISION_FAILURES && search == Search::Relocating {
                self.start.record_collision();
                return Ok(None);
            }
            if self.effective_failures(failures) >= CONTENDED_FROM && search == Search::Cached {
                self.update_hint(verbs, span, section.header, Spread::Contended).await?;
                return Ok(None);
            }
            verbs.repeat(Changed::Header(place))?;
        }
    }

    /// Changes a header by CAS, which is the commit point of an allocation. On success, returns the
    /// capability of `block` after flushing the header's log; otherwise returns the header found.
    async fn commit<V: Verbs>(
        &self,
        verbs: &V,
        place: Place,
        from: Header,
        to: Header,
        block: Block,
    ) -> Result<Result<Capability, Seen>, V::Error> {
        let at = place.word(self.shape);
        let log = pending(place, to).map_or(block.chunk, |(chunk, _)| chunk);
        let capability = self.shape.capability(self.shape.entry(block));
        let then: [Word; 3] = [self.shape.log(log), at, capability];
        let (found, [full, now, capability]) = verbs.cas_and_read(at, from.0, to.0, then).await?;
        if found != from.0 {
            return Ok(Err(self.remember(place, Header(found), false)));
        }
        self.remember(place, to, false);
        let seen = Seen { header: to, flushed: false };
        self.flush_from(verbs, place, seen, Some((full, now))).await?;
        Ok(Ok(Capability::parse(capability)))
    }

    /// Opens a span for the allocation of chunks. Returns the section's header after that; `None`
    /// if the whole span is taken.
    async fn open<V: Verbs>(&self, verbs: &V, span: SpanIndex) -> Result<Option<Seen>, V::Error> {
        let (place, at) = (Place::Section(span.section()), span.in_section());
        let mut seen = self.cached_or_read(verbs, place).await?;
        loop {
            let header = seen.header;
            let spread = match header.spread(at) {
                Spread::Full => return Ok(None),
                Spread::Contended => Spread::Contended,
                Spread::Empty | Spread::Normal => Spread::Normal,
            };
            self.flush(verbs, place, seen).await?;
            let record = Record {
                offset: at.raw(),
                size: Record::OPENED,
                timestamp: header.record().timestamp.next(),
                user: self.user,
            };
            let opened = header.with_spread(at, spread).with_record(record);
            match self.change(verbs, place, header, opened).await? {
                Ok(()) => return Ok(Some(Seen { header: opened, flushed: true })),
                Err(found) => seen = found,
            }
            verbs.repeat(Changed::Header(place))?;
        }
    }

    /// Allocates spans of a section by one CAS, if they are free.
    async fn try_spans<V: Verbs>(
        &self,
        verbs: &V,
        index: SectionIndex,
        wanted: Wanted,
        search: Search,
    ) -> Result<Option<Taken>, V::Error> {
        let place = Place::Section(index);
        let mut seen = self.cached_or_read(verbs, place).await?;
        let mut failures = 0;
        loop {
            let header = seen.header;
            let Some((block, mask, record)) = wanted.find(index, header) else { return Ok(None) };
            self.flush(verbs, place, seen).await?;
            let timestamp = timestamp(Layer::Section, header, true);
            let taken = header
                .with_bitmap(header.bitmap() | mask)
                .with_record(Record { timestamp, user: self.user, ..record })
                .with_retry(level(self.effective_failures(failures)));
            match self.commit(verbs, place, header, taken, block).await? {
                Ok(capability) => {
                    if self.effective_failures(failures) >= COLLISION_FAILURES {
                        self.start.relocate();
                    }
                    return Ok(Some(Taken { block, capability }));
                }
                Err(found) => seen = found,
            }
            failures += 1;
            if self.effective_failures(failures) >= CONTENDED_FROM && search == Search::Cached {
                return Ok(None);
            }
            verbs.repeat(Changed::Header(place))?;
        }
    }

    /// Allocates a block of several sections, all of which are known to be empty.
    async fn search_groups<V: Verbs>(
        &self,
        verbs: &V,
        order: Order,
    ) -> Result<Option<Taken>, V::Error> {
        let total = self.shape.blocks(order);
        for i in 0..total {
            let block = Block::nth(order, (self.start.scaled_to(total) + i) % total);
            let Some(parts) = block.parts() else { return Ok(None) };
            let empty = self.cache.lock().are_empty(parts);
            if empty && let Some(taken) = self.try_group(verbs, block).await? {
                return Ok(Some(taken));
            }
        }
        Ok(None)
    }

    /// Takes all sections of a block, or none. The first section is taken last, because its log
    /// determines the owner.
    async fn try_group<V: Verbs>(
        &self,
        verbs: &V,
        block: Block,
    ) -> Result<Option<Taken>, V::Error> {
        let Some(parts) = block.parts() else { return Ok(None) };
        let mut taken_part = None;
        for section in parts.clone().iter().rev() {
            let wanted = Wanted::Part(block);
            taken_part = self.try_spans(verbs, section, wanted, Search::Exhaustive).await?;
            if taken_part.is_none() {
                for taken in (section.plus(1)..parts.end).iter() {
                    self.give_back_part(verbs, taken, block, self.user).await?;
                }
                break;
            }
        }
        Ok(taken_part)
    }
}
