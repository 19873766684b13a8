//! Taking a block.
//!
//! ```text
//! CAS header, READ full log, READ header, READ capability   one post: committed, if the CAS says so
//! CAS full log                                              flushed
//! ```
//!
//! A block of several sections is taken a section at a time, its last first. Who finds one that is not free
//! gives back those that he has. The first one is the commit point: whose log it has owns the block, and the
//! other sections then have the same log. Where somebody left parts behind, the first is not among them.

use super::flush::{has_taken, pending};
use super::{BATCH, CONTENDED_BELOW, CONTENDED_FROM, Place, Seen, Tree, Verbs};
use crate::finemem::header::{
    CHUNKS, Header, Record, SPANS, Spread, Timestamp, chunk_mask, find_chunks, find_spans,
    span_mask,
};
use crate::finemem::layout::{Block, SECTION, SECTION_ORDER, SPAN_ORDER, Word};
use crate::finemem::log::{Capability, Layer};

/// What spans are tried in turn (FineMem §4.1).
const PREFERENCE: [Spread; 3] = [Spread::Normal, Spread::Empty, Spread::Contended];

/// The timestamp of a change that takes (or gives back) a block: the next one if the last change was of the
/// other kind.
pub(super) fn timestamp(layer: Layer, header: Header, taking: bool) -> Timestamp {
    let last = header.record();
    let opened = layer == Layer::Section && last.size == Record::OPENED;
    let same_kind = !opened && has_taken(layer, header) == taking;
    if same_kind { last.timestamp } else { last.timestamp.next() }
}

/// Sections whose spans' headers are read with one READ.
const AT_ONCE: u32 = BATCH as u32 / SPANS;
/// Sections that are read anew, with their spans, by who finds that what he knew of one is old; and at most, if he
/// finds that again and again. Many readers of many headers wait for each other on the memory node's link.
const FEW: u32 = 1;
const MANY: u32 = 16;
const _: () = assert!((MANY * (SPANS + 1)) as usize <= BATCH);
/// CASes of one search that fail on one header before the next search begins elsewhere. The first one says only that
/// what was known is old.
pub(super) const CROWDED: u32 = 2;
/// How often a search leaves a place for another because it met somebody there.
pub(super) const MOVES: u32 = 3;

/// How a search goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Search {
    /// By what is known; who meets others looks elsewhere.
    Fleeting,
    /// By what is known; what is contended is left to others.
    Known,
    /// Everything is looked at.
    All,
}

/// A block that was taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Taken {
    /// Which.
    pub block: Block,
    /// What opens it.
    pub capability: Capability,
}

/// What of a section's spans somebody wants.
#[derive(Clone, Copy)]
enum Wanted {
    /// 2^order of them, aligned, as a block.
    Spans(u32),
    /// All, as a part of that block of several sections.
    Part(Block),
}

impl Wanted {
    /// Where there is room: the block, its bits in the header, and what the log says of it.
    fn find(self, section: u32, header: Header) -> Option<(Block, u32, Record)> {
        match self {
            Self::Spans(size) => {
                let offset = find_spans(header.bitmap(), size)?;
                let chunk = section * SECTION + (offset << SPAN_ORDER);
                let block = Block { chunk, order: size + SPAN_ORDER };
                let record = Record { offset, size, ..Record::default() };
                Some((block, span_mask(offset, size), record))
            }
            Self::Part(block) => {
                let record = part(block);
                (header.bitmap() == 0).then_some((block, u32::MAX, record))
            }
        }
    }
}

/// What the log of a section says that is a part of a block; not when, and whose.
pub(super) fn part(block: Block) -> Record {
    let offset = block.order - SECTION_ORDER;
    Record { offset, size: Record::PART, ..Record::default() }
}

fn level(failures: u32) -> u32 {
    (failures >= CONTENDED_BELOW) as u32 + (failures >= CONTENDED_FROM) as u32
}

/// What a span's state is to be after an allocation there.
fn spread_after(header: Header, before: Spread, failures: u32) -> Spread {
    match before {
        _ if header.bitmap() == u32::MAX => Spread::Full,
        _ if failures >= CONTENDED_FROM => Spread::Contended,
        Spread::Contended if failures >= CONTENDED_BELOW => Spread::Contended,
        _ => Spread::Normal,
    }
}

impl Tree {
    /// Takes a block of 2^`order` chunks; `None` if there is none. When this returns the block is this
    /// user's, and the full log says so.
    ///
    /// # Errors
    /// Those of the verbs. It is open then whether a block was taken, or parts of one; the logs say.
    pub async fn allocate<V: Verbs>(
        &self,
        verbs: &V,
        order: u32,
    ) -> Result<Option<Taken>, V::Error> {
        if self.shape.blocks(order) == 0 {
            return Ok(None);
        }
        for search in [Search::Known, Search::All] {
            self.know_sections(verbs, search).await?;
            let found = match search {
                _ if order > SECTION_ORDER => self.search_groups(verbs, order).await?,
                Search::All => self.search_all(verbs, order).await?,
                Search::Fleeting | Search::Known => self.search_known(verbs, order).await?,
            };
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    async fn know_sections<V: Verbs>(&self, verbs: &V, search: Search) -> Result<(), V::Error> {
        for first in (0..self.shape.sections()).step_by(BATCH) {
            let count = self.shape.sections() - first;
            if search == Search::All || self.known(Place::section(first)).is_none() {
                self.read_headers(verbs, Place::section(first), count).await?;
            }
        }
        Ok(())
    }

    /// By what is known: in the spans of the preferred state, wherever they are, then in those of the next.
    async fn search_known<V: Verbs>(
        &self,
        verbs: &V,
        order: u32,
    ) -> Result<Option<Taken>, V::Error> {
        let states = if order < SPAN_ORDER { &PREFERENCE[..] } else { &[Spread::Empty] };
        let all = self.shape.sections();
        let start = self.begin.among(all);
        // Sections whose headers were read anew since the search began, and how many will be next time.
        let (mut fresh, mut next_fresh) = (0..0, FEW);
        let mut moves = if self.contention_control && order < SPAN_ORDER { MOVES } else { 0 };
        for &spread in states {
            for range in [start..all, 0..start] {
                let mut from = range.start;
                let next = |from| self.cache.lock().next(from, spread, order);
                while let Some(section) = next(from).filter(|section| *section < range.end) {
                    let search = if moves > 0 { Search::Fleeting } else { Search::Known };
                    let mut is_old = false;
                    let old = (!fresh.contains(&section)).then_some(&mut is_old);
                    let taken =
                        self.try_section(verbs, section, order, &[spread], search, old).await?;
                    if taken.is_some() {
                        if section != start && order < SPAN_ORDER {
                            self.begin.stay(section, all);
                        } else if section != start && self.contention_control {
                            self.begin.move_on();
                        }
                        return Ok(taken);
                    }
                    if self.begin.has_met() && moves > 0 {
                        if let Some(taken) = self.search_elsewhere(verbs, order, &mut moves).await?
                        {
                            return Ok(Some(taken));
                        }
                        continue;
                    }
                    if is_old {
                        // Two READs say of many what CASes that fail would say of one each.
                        fresh = section..all.min(section + next_fresh);
                        next_fresh = MANY.min(4 * next_fresh);
                        self.read_whole_sections(verbs, fresh.clone()).await?;
                        continue;
                    }
                    self.cache.lock().found_none(section, spread, order);
                    from = section + 1;
                }
            }
        }
        Ok(None)
    }

    /// In other sections than the one where others were met, by what they are like now: first in one that is
    /// known to be in use, so that empty ones stay empty for large blocks, then in any.
    async fn search_elsewhere<V: Verbs>(
        &self,
        verbs: &V,
        order: u32,
        moves: &mut u32,
    ) -> Result<Option<Taken>, V::Error> {
        let all = self.shape.sections();
        loop {
            let from = self.begin.among(all);
            let used = {
                let cache = self.cache.lock();
                let next = |from| cache.next(from, Spread::Normal, order);
                next(from).or_else(|| next(0)).filter(|_| *moves == MOVES)
            };
            *moves -= 1;
            let section = used.unwrap_or(from);
            self.begin.stay(section, all);
            self.read_whole_sections(verbs, section..section + 1).await?;
            let (spreads, search) = (&PREFERENCE[..2], Search::Fleeting);
            let taken = self.try_section(verbs, section, order, spreads, search, None).await?;
            if taken.is_some() || *moves == 0 || !self.begin.has_met() {
                return Ok(taken);
            }
        }
    }

    /// Everywhere: all headers of spans are read anew, many with one READ, some sections after the other.
    async fn search_all<V: Verbs>(&self, verbs: &V, order: u32) -> Result<Option<Taken>, V::Error> {
        let all = self.shape.sections();
        let batches = all.div_ceil(AT_ONCE);
        for i in 0..batches {
            let first = (self.begin.among(batches) + i) % batches * AT_ONCE;
            let sections = first..all.min(first + AT_ONCE);
            if order >= SPAN_ORDER {
                for section in sections {
                    let (spread, search) = (Spread::Empty, Search::All);
                    let taken =
                        self.try_section(verbs, section, order, &[spread], search, None).await?;
                    if taken.is_some() {
                        return Ok(taken);
                    }
                }
                continue;
            }
            let spans = (sections.end - sections.start) * SPANS;
            self.read_headers(verbs, Place::span(first * SPANS), spans).await?;
            // Also in what a section has as full: that may be an old hint.
            for spread in PREFERENCE.into_iter().chain([Spread::Full]) {
                for section in sections.clone() {
                    let search = Search::All;
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

    /// Takes a block in a section: one of chunks in its spans of those states, or one of spans. If what is known of
    /// its spans turns out to be old, `is_old` is set, and the others are left.
    async fn try_section<V: Verbs>(
        &self,
        verbs: &V,
        index: u32,
        order: u32,
        spreads: &[Spread],
        search: Search,
        mut is_old: Option<&mut bool>,
    ) -> Result<Option<Taken>, V::Error> {
        if order >= SPAN_ORDER {
            let wanted = Wanted::Spans(order - SPAN_ORDER);
            return self.try_spans(verbs, index, wanted, search).await;
        }
        // Of those that the section has as full only the ones where that is wrong.
        let some = match spreads {
            [Spread::Full] => self.cache.lock().with_room(index, order),
            _ => u32::MAX,
        };
        for at in self.begin.spans() {
            let Some(section) = self.known(Place::section(index)) else { return Ok(None) };
            if !spreads.contains(&section.header.spread(at)) || some >> at & 1 == 0 {
                continue;
            }
            let span = index * SPANS + at;
            let known = || self.known(Place::span(span)).map(|seen| seen.header.bitmap());
            let before = known();
            let taken = self.try_span(verbs, span, order, section, search).await?;
            if taken.is_some() || search == Search::Fleeting && self.begin.is_crowded() {
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

    /// Takes a block in a span, if it has one. `section` was seen before the span's header is looked at.
    async fn try_span<V: Verbs>(
        &self,
        verbs: &V,
        span: u32,
        order: u32,
        mut section: Seen,
        search: Search,
    ) -> Result<Option<Taken>, V::Error> {
        let (place, at) = (Place::span(span), span % SPANS);
        let mut seen = self.see(verbs, place).await?;
        let mut failures = 0;
        let mut is_late = false;
        loop {
            let header = seen.header;
            let Some(offset) = find_chunks(header.bitmap(), order, 0) else {
                if header.bitmap() != u32::MAX || failures > 0 {
                    return Ok(None);
                }
                if !is_late {
                    // It may have been full long before the section's word was seen, and be closed since: then
                    // nobody would ever look into it again.
                    seen = self.look(verbs, place).await?;
                    is_late = true;
                    continue;
                }
                self.hint(verbs, span, section.header, Spread::Full).await?;
                return Ok(None);
            };
            if !header.in_use() {
                // What the CAS below expects was seen before the section is changed.
                match self.open(verbs, span).await? {
                    Some(opened) => section = opened,
                    None => return Ok(None),
                }
            }
            self.flush(verbs, place, seen).await?;
            let record = Record {
                offset,
                size: order,
                timestamp: timestamp(Layer::Span, header, true),
                user: self.user,
            };
            let taken = header
                .with_bitmap(header.bitmap() | chunk_mask(offset, order))
                .with_record(record)
                .with_retry(level(self.counted(failures)))
                .with_in_use(true);
            let block = Block { chunk: span * CHUNKS + offset, order };
            match self.commit(verbs, place, header, taken, block).await? {
                Ok(capability) => {
                    let spread =
                        spread_after(taken, section.header.spread(at), self.counted(failures));
                    self.hint(verbs, span, section.header, spread).await?;
                    return Ok(Some(Taken { block, capability }));
                }
                Err(found) => seen = found,
            }
            failures += 1;
            if failures >= CROWDED && search == Search::Fleeting {
                self.begin.meet();
                return Ok(None);
            }
            if self.counted(failures) >= CONTENDED_FROM && search == Search::Known {
                self.hint(verbs, span, section.header, Spread::Contended).await?;
                return Ok(None);
            }
        }
    }

    /// Takes something by a change of a header: that is the commit point. What was found in its place, or
    /// what opens `block`, once the full log has what the header's log says.
    async fn commit<V: Verbs>(
        &self,
        verbs: &V,
        place: Place,
        from: Header,
        to: Header,
        block: Block,
    ) -> Result<Result<Capability, Seen>, V::Error> {
        let at = place.word(self.shape);
        let log = pending(place.layer, place.index, to).map_or(block.chunk, |(chunk, _)| chunk);
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

    /// Opens a span, to be given out in chunks; `None` if somebody has it whole. The section's header as it
    /// is then.
    async fn open<V: Verbs>(&self, verbs: &V, span: u32) -> Result<Option<Seen>, V::Error> {
        let (place, at) = (Place::section(span / SPANS), span % SPANS);
        let mut seen = self.see(verbs, place).await?;
        loop {
            let header = seen.header;
            let spread = match header.spread(at) {
                Spread::Full => return Ok(None),
                Spread::Contended => Spread::Contended,
                Spread::Empty | Spread::Normal => Spread::Normal,
            };
            self.flush(verbs, place, seen).await?;
            let record = Record {
                offset: at,
                size: Record::OPENED,
                timestamp: header.record().timestamp.next(),
                user: self.user,
            };
            let opened = header.with_spread(at, spread).with_record(record);
            match self.change(verbs, place, header, opened).await? {
                Ok(()) => return Ok(Some(Seen { header: opened, flushed: true })),
                Err(found) => seen = found,
            }
        }
    }

    /// Takes spans of a section by one CAS, if it has them.
    async fn try_spans<V: Verbs>(
        &self,
        verbs: &V,
        index: u32,
        wanted: Wanted,
        search: Search,
    ) -> Result<Option<Taken>, V::Error> {
        let place = Place::section(index);
        let mut seen = self.see(verbs, place).await?;
        let mut failures = 0;
        loop {
            let header = seen.header;
            let Some((block, mask, record)) = wanted.find(index, header) else { return Ok(None) };
            self.flush(verbs, place, seen).await?;
            let timestamp = timestamp(Layer::Section, header, true);
            let taken = header
                .with_bitmap(header.bitmap() | mask)
                .with_record(Record { timestamp, user: self.user, ..record })
                .with_retry(level(self.counted(failures)));
            match self.commit(verbs, place, header, taken, block).await? {
                Ok(capability) => {
                    if self.counted(failures) >= CROWDED {
                        self.begin.move_on();
                    }
                    return Ok(Some(Taken { block, capability }));
                }
                Err(found) => seen = found,
            }
            failures += 1;
            if self.counted(failures) >= CONTENDED_FROM && search == Search::Known {
                return Ok(None);
            }
        }
    }

    /// Takes a block of several sections where all of them are known to be empty.
    async fn search_groups<V: Verbs>(
        &self,
        verbs: &V,
        order: u32,
    ) -> Result<Option<Taken>, V::Error> {
        let all = self.shape.blocks(order);
        for i in 0..all {
            let block = Block { chunk: ((self.begin.among(all) + i) % all) << order, order };
            let Some(parts) = block.parts() else { return Ok(None) };
            let empty = self.cache.lock().are_empty(parts);
            if empty && let Some(taken) = self.try_group(verbs, block).await? {
                return Ok(Some(taken));
            }
        }
        Ok(None)
    }

    /// Takes the sections of a block, or none of them: the first one is taken last, and says whose the block is.
    async fn try_group<V: Verbs>(
        &self,
        verbs: &V,
        block: Block,
    ) -> Result<Option<Taken>, V::Error> {
        let parts = block.parts().unwrap_or_default();
        let mut all = None;
        for section in parts.clone().rev() {
            let wanted = Wanted::Part(block);
            all = self.try_spans(verbs, section, wanted, Search::All).await?;
            if all.is_none() {
                for taken in section + 1..parts.end {
                    self.give_back_part(verbs, taken, block, self.user).await?;
                }
                break;
            }
        }
        Ok(all)
    }
}
