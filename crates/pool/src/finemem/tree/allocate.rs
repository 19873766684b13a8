//! Taking a block.

use super::flush::has_taken;
use super::{CONTENDED_BELOW, CONTENDED_FROM, Place, Seen, Tree, Verbs};
use crate::finemem::header::{
    Header, Record, SPANS, Spread, Timestamp, chunk_mask, find_chunks, find_spans, span_mask,
};
use crate::finemem::layout::{Block, SECTION, SPAN_ORDER};
use crate::finemem::log::Layer;

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

/// How a search goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Search {
    /// By what is known; what is contended is left to others.
    Known,
    /// Everything is looked at.
    All,
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
    /// Those of the verbs. It is open then whether a block was taken; its log says.
    pub async fn allocate<V: Verbs>(
        &self,
        verbs: &V,
        order: u32,
    ) -> Result<Option<Block>, V::Error> {
        if self.shape.blocks(order) == 0 {
            return Ok(None);
        }
        for search in [Search::Known, Search::All] {
            self.know_sections(verbs, search).await?;
            let found = match order < SPAN_ORDER {
                true => self.search_spans(verbs, order, search).await?,
                false => self.search_sections(verbs, order - SPAN_ORDER, search).await?,
            };
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    async fn know_sections<V: Verbs>(&self, verbs: &V, search: Search) -> Result<(), V::Error> {
        for first in (0..self.shape.sections()).step_by(super::BATCH) {
            let count = (self.shape.sections() - first) as usize;
            if search == Search::All || self.known(Place::section(first)).is_none() {
                self.read_headers(verbs, Place::section(first), count).await?;
            }
        }
        Ok(())
    }

    /// Where this user begins to search, so that users do not all meet.
    fn start(&self) -> u32 {
        self.user.raw() as u32
    }

    async fn search_spans<V: Verbs>(
        &self,
        verbs: &V,
        order: u32,
        search: Search,
    ) -> Result<Option<Block>, V::Error> {
        let all = self.shape.spans();
        let first = self.start() * SPANS + self.start() % SPANS;
        let also: &[Spread] = if search == Search::All { &[Spread::Full] } else { &[] };
        for &spread in PREFERENCE.iter().chain(also) {
            for i in 0..all {
                let span = (first + i) % all;
                let Some(section) = self.known(Place::section(span / SPANS)) else { continue };
                if section.header.spread(span % SPANS) != spread {
                    continue;
                }
                if let Some(block) = self.try_span(verbs, span, order, section, search).await? {
                    return Ok(Some(block));
                }
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
    ) -> Result<Option<Block>, V::Error> {
        let (place, at) = (Place::span(span), span % SPANS);
        let mut seen = match search {
            Search::Known => self.see(verbs, place).await?,
            Search::All => self.look(verbs, place).await?,
        };
        let mut failures = 0;
        loop {
            let header = seen.header;
            let Some(offset) = find_chunks(header.bitmap(), order, 0) else {
                if header.bitmap() == u32::MAX {
                    self.hint(verbs, span, section.header, Spread::Full).await?;
                }
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
                .with_retry(level(failures))
                .with_in_use(true);
            match self.change(verbs, place, header, taken).await? {
                Ok(()) => {
                    self.flush(verbs, place, Seen { header: taken, flushed: false }).await?;
                    let spread = spread_after(taken, section.header.spread(at), failures);
                    self.hint(verbs, span, section.header, spread).await?;
                    let chunk = span * crate::finemem::header::CHUNKS + offset;
                    return Ok(Some(Block { chunk, order }));
                }
                Err(found) => seen = found,
            }
            failures += 1;
            if failures >= CONTENDED_FROM && search == Search::Known {
                self.hint(verbs, span, section.header, Spread::Contended).await?;
                return Ok(None);
            }
        }
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

    async fn search_sections<V: Verbs>(
        &self,
        verbs: &V,
        order: u32,
        search: Search,
    ) -> Result<Option<Block>, V::Error> {
        let all = self.shape.sections();
        for i in 0..all {
            let index = (self.start() + i) % all;
            if let Some(block) = self.try_section(verbs, index, order, search).await? {
                return Ok(Some(block));
            }
        }
        Ok(None)
    }

    /// Takes 2^`order` spans of a section by one CAS, if it has them.
    async fn try_section<V: Verbs>(
        &self,
        verbs: &V,
        index: u32,
        order: u32,
        search: Search,
    ) -> Result<Option<Block>, V::Error> {
        let place = Place::section(index);
        let mut seen = self.see(verbs, place).await?;
        let mut failures = 0;
        loop {
            let header = seen.header;
            let Some(offset) = find_spans(header.bitmap(), order) else { return Ok(None) };
            self.flush(verbs, place, seen).await?;
            let timestamp = timestamp(Layer::Section, header, true);
            let record = Record { offset, size: order, timestamp, user: self.user };
            let taken = header
                .with_bitmap(header.bitmap() | span_mask(offset, order))
                .with_record(record)
                .with_retry(level(failures));
            match self.change(verbs, place, header, taken).await? {
                Ok(()) => {
                    self.flush(verbs, place, Seen { header: taken, flushed: false }).await?;
                    let chunk = index * SECTION + (offset << SPAN_ORDER);
                    return Ok(Some(Block { chunk, order: order + SPAN_ORDER }));
                }
                Err(found) => seen = found,
            }
            failures += 1;
            if failures >= CONTENDED_FROM && search == Search::Known {
                return Ok(None);
            }
        }
    }
}
