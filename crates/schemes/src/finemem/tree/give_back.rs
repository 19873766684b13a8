//! Frees blocks, and closes spans that have become empty. A block of several sections is freed
//! beginning with its first section: from then on it has no owner.

use scheme::index::IndexRange;

use super::allocate::{part, timestamp};
use super::{Changed, Seen, Tree, Verbs};
use crate::finemem::block::{Block, Layer, Place, SectionIndex, SpanIndex};
use crate::finemem::header::{Header, Record, Spread, User, chunk_mask, span_mask};

impl Tree {
    /// Frees blocks of `owner`: several of one span or of one section by one CAS, or one block of
    /// several sections by one CAS per section. The blocks must be taken, and there must be no
    /// concurrent free of them.
    ///
    /// The temporary log names only the last block. If there are several, the caller must have
    /// written the full logs of the other blocks before the header changes again.
    ///
    /// # Errors
    /// Errors of the verbs, also after too many failed CASes. The blocks may still be taken, and
    /// the logs show which are.
    pub async fn give_back<V: Verbs>(
        &self,
        verbs: &V,
        blocks: &[Block],
        owner: User,
    ) -> Result<(), V::Error> {
        match blocks.last() {
            Some(last) if last.layer() == Layer::Span => {
                self.give_back_chunks(verbs, blocks, *last, owner).await
            }
            Some(last) => self.give_back_spans(verbs, blocks, *last, owner).await,
            None => Ok(()),
        }
    }

    async fn give_back_chunks<V: Verbs>(
        &self,
        verbs: &V,
        blocks: &[Block],
        last: Block,
        owner: User,
    ) -> Result<(), V::Error> {
        let mask = blocks.iter().fold(0, |m, b| m | chunk_mask(b.chunk.in_span(), b.order));
        self.give_back_bits(verbs, mask, last, owner).await
    }

    /// Frees chunks of a span, including the block `last`.
    pub(super) async fn give_back_bits<V: Verbs>(
        &self,
        verbs: &V,
        mask: u32,
        last: Block,
        owner: User,
    ) -> Result<(), V::Error> {
        let span = last.chunk.span();
        let (place, above) = (Place::Span(span), Place::Section(span.section()));
        // The section's header as it was before the span changes.
        let mut section = self.cached_or_read(verbs, above).await?;
        let mut is_new = false;
        let mut seen = self.cached_or_read(verbs, place).await?;
        let free = loop {
            let header = seen.header;
            self.flush(verbs, place, seen).await?;
            let bitmap = header.bitmap() & !mask;
            if bitmap == 0 && !is_new {
                // With an outdated section header, the closing would mistake an old opening for a
                // concurrent one.
                section = self.read_header(verbs, above).await?;
                is_new = true;
            }
            let record = Record {
                offset: last.chunk.in_span().raw(),
                size: last.order.raw(),
                timestamp: timestamp(Layer::Span, header, false),
                user: owner,
            };
            let free = header.with_bitmap(bitmap).with_record(record).with_in_use(bitmap != 0);
            match self.change(verbs, place, header, free).await? {
                Ok(()) => break free,
                Err(found) => seen = found,
            }
            verbs.repeat(Changed::Header(place))?;
        };
        self.flush(verbs, place, Seen { header: free, flushed: false }).await?;
        if !free.in_use() {
            self.close(verbs, span, free, section.header).await?;
        } else if section.header.spread(span.in_section()) == Spread::Full {
            self.update_hint(verbs, span, section.header, Spread::Normal).await?;
        }
        Ok(())
    }

    /// Closes a span whose header has no bits and is not in use. `section` was read before that. A
    /// concurrent opening has priority; otherwise opening and closing could obstruct each other for
    /// ever.
    pub(super) async fn close<V: Verbs>(
        &self,
        verbs: &V,
        span: SpanIndex,
        mut header: Header,
        mut section: Header,
    ) -> Result<(), V::Error> {
        let (place, at) = (Place::Section(span.section()), span.in_section());
        loop {
            if section.spread(at) != Spread::Empty {
                let closed = section.with_spread(at, Spread::Empty);
                match self.change(verbs, place, section, closed).await? {
                    Ok(()) => return Ok(()),
                    Err(found) => section = found.header,
                }
                // State full is an outdated hint here: an opening would leave state normal or
                // contended.
                let last = section.record();
                let is_opened = last.size == Record::OPENED && last.offset == at.raw();
                if is_opened && section.spread(at) != Spread::Full {
                    return Ok(());
                }
                verbs.repeat(Changed::Header(place))?;
            } else {
                section = self.read_header(verbs, place).await?.header;
                if section.spread(at) == Spread::Empty {
                    return Ok(());
                }
            }
            // The section's header as read now is valid for the next change of the span.
            let Some(renewed) = self.renew(verbs, span, header).await? else { return Ok(()) };
            header = renewed;
        }
    }

    /// Changes the header of a span that is not in use, so that every opening in progress fails.
    /// `None` if the header has changed meanwhile, and the span is used again.
    pub(super) async fn renew<V: Verbs>(
        &self,
        verbs: &V,
        span: SpanIndex,
        header: Header,
    ) -> Result<Option<Header>, V::Error> {
        let place = Place::Span(span);
        self.flush(verbs, place, Seen { header, flushed: false }).await?;
        let record = header.record();
        let record = Record { timestamp: record.timestamp.next(), ..record };
        let renewed = header.with_record(record);
        Ok(self.change(verbs, place, header, renewed).await?.is_ok().then_some(renewed))
    }

    async fn give_back_spans<V: Verbs>(
        &self,
        verbs: &V,
        blocks: &[Block],
        last: Block,
        owner: User,
    ) -> Result<(), V::Error> {
        if let Some(parts) = last.parts() {
            for section in parts.iter() {
                self.give_back_part(verbs, section, last, owner).await?;
            }
            return Ok(());
        }
        let offset = |b: &Block| b.chunk.span().in_section();
        let mask = blocks.iter().fold(0, |m, b| m | span_mask(offset(b), b.order.in_spans()));
        let (offset, size) = (offset(&last).raw(), last.order.in_spans());
        let record = Record { offset, size, user: owner, ..Record::default() };
        self.clear_spans(verbs, last.chunk.section(), mask, record).await
    }

    /// Frees a section that is part of `block`.
    pub(super) async fn give_back_part<V: Verbs>(
        &self,
        verbs: &V,
        section: SectionIndex,
        block: Block,
        owner: User,
    ) -> Result<(), V::Error> {
        let record = Record { user: owner, ..part(block) };
        self.clear_spans(verbs, section, u32::MAX, record).await
    }

    async fn clear_spans<V: Verbs>(
        &self,
        verbs: &V,
        index: SectionIndex,
        mask: u32,
        record: Record,
    ) -> Result<(), V::Error> {
        let place = Place::Section(index);
        let mut seen = self.cached_or_read(verbs, place).await?;
        let free = loop {
            let header = seen.header;
            self.flush(verbs, place, seen).await?;
            let timestamp = timestamp(Layer::Section, header, false);
            let free = header
                .with_bitmap(header.bitmap() & !mask)
                .with_record(Record { timestamp, ..record });
            match self.change(verbs, place, header, free).await? {
                Ok(()) => break free,
                Err(found) => seen = found,
            }
            verbs.repeat(Changed::Header(place))?;
        };
        self.flush(verbs, place, Seen { header: free, flushed: false }).await
    }
}
