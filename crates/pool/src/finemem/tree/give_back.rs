//! Giving blocks back, and closing a span that has become empty. A block of several sections is given back first
//! section first: from then on nobody has it.

use super::allocate::{part, timestamp};
use super::{Place, Seen, Tree, Verbs};
use crate::finemem::header::{CHUNKS, Header, Record, SPANS, Spread, User, chunk_mask, span_mask};
use crate::finemem::layout::{Block, SECTION, SPAN_ORDER};
use crate::finemem::log::Layer;

impl Tree {
    /// Gives back blocks of `owner`, all of one span or all of one section, by one CAS; or one of several sections,
    /// by one CAS each. They must be taken,
    /// and nobody else may be giving them back.
    ///
    /// The temporary log names the last of them only: where there are several, it is for the caller to have the
    /// others in the full log before the header changes again.
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
        let mask = blocks.iter().fold(0, |m, b| m | chunk_mask(b.chunk % CHUNKS, b.order));
        self.give_back_bits(verbs, mask, last, owner).await
    }

    /// Gives back chunks of a span, the block `last` among them.
    pub(super) async fn give_back_bits<V: Verbs>(
        &self,
        verbs: &V,
        mask: u32,
        last: Block,
        owner: User,
    ) -> Result<(), V::Error> {
        let span = last.chunk / CHUNKS;
        let (place, at) = (Place::span(span), span % SPANS);
        // As it was before the span changes.
        let mut section = self.see(verbs, Place::section(span / SPANS)).await?;
        let mut is_new = false;
        let mut seen = self.see(verbs, place).await?;
        let free = loop {
            let header = seen.header;
            self.flush(verbs, place, seen).await?;
            let bitmap = header.bitmap() & !mask;
            if bitmap == 0 && !is_new {
                // From an older word who closes would take an opening of long ago for one of just now.
                section = self.look(verbs, Place::section(span / SPANS)).await?;
                is_new = true;
            }
            let record = Record {
                offset: last.chunk % CHUNKS,
                size: last.order,
                timestamp: timestamp(Layer::Span, header, false),
                user: owner,
            };
            let free = header.with_bitmap(bitmap).with_record(record).with_in_use(bitmap != 0);
            match self.change(verbs, place, header, free).await? {
                Ok(()) => break free,
                Err(found) => seen = found,
            }
        };
        self.flush(verbs, place, Seen { header: free, flushed: false }).await?;
        if !free.in_use() {
            self.close(verbs, span, free, section.header).await?;
        } else if section.header.spread(at) == Spread::Full {
            self.hint(verbs, span, section.header, Spread::Normal).await?;
        }
        Ok(())
    }

    /// Closes a span whose header was left without bits and not in use. `section` was seen before that.
    /// Somebody who is opening it just now is left alone: he and who closes could hinder each other for ever.
    pub(super) async fn close<V: Verbs>(
        &self,
        verbs: &V,
        span: u32,
        mut header: Header,
        mut section: Header,
    ) -> Result<(), V::Error> {
        let (place, at) = (Place::section(span / SPANS), span % SPANS);
        loop {
            if section.spread(at) != Spread::Empty {
                let closed = section.with_spread(at, Spread::Empty);
                match self.change(verbs, place, section, closed).await? {
                    Ok(()) => return Ok(()),
                    Err(found) => section = found.header,
                }
                // That the span is full is a late hint: who opens it would have it as normal or contended.
                let last = section.record();
                let is_opened = last.size == Record::OPENED && last.offset == at;
                if is_opened && section.spread(at) != Spread::Full {
                    return Ok(());
                }
            } else {
                section = self.look(verbs, place).await?.header;
                if section.spread(at) == Spread::Empty {
                    return Ok(());
                }
            }
            // The section's word as it is now counts from the next change of the span's on.
            let Some(renewed) = self.renew(verbs, span, header).await? else { return Ok(()) };
            header = renewed;
        }
    }

    /// Changes the header of a span that is not in use, so that no opening that has begun succeeds; `None`
    /// if it has another header by now, and is in other hands.
    pub(super) async fn renew<V: Verbs>(
        &self,
        verbs: &V,
        span: u32,
        header: Header,
    ) -> Result<Option<Header>, V::Error> {
        let place = Place::span(span);
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
            for section in parts {
                self.give_back_part(verbs, section, last, owner).await?;
            }
            return Ok(());
        }
        let offset = |b: &Block| (b.chunk % SECTION) >> SPAN_ORDER;
        let mask = blocks.iter().fold(0, |m, b| m | span_mask(offset(b), b.order - SPAN_ORDER));
        let (offset, size) = (offset(&last), last.order - SPAN_ORDER);
        let record = Record { offset, size, user: owner, ..Record::default() };
        self.clear_spans(verbs, last.chunk / SECTION, mask, record).await
    }

    /// Gives back a section that is a part of `block`.
    pub(super) async fn give_back_part<V: Verbs>(
        &self,
        verbs: &V,
        section: u32,
        block: Block,
        owner: User,
    ) -> Result<(), V::Error> {
        let record = Record { user: owner, ..part(block) };
        self.clear_spans(verbs, section, u32::MAX, record).await
    }

    async fn clear_spans<V: Verbs>(
        &self,
        verbs: &V,
        index: u32,
        mask: u32,
        record: Record,
    ) -> Result<(), V::Error> {
        let place = Place::section(index);
        let mut seen = self.see(verbs, place).await?;
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
        };
        self.flush(verbs, place, Seen { header: free, flushed: false }).await
    }
}
