//! Recovery after a crash, from headers and logs alone: the blocks of a user, and unfinished
//! operations (FineMem §4.2).
//!
//! Recovery processes one section at a time while other clients continue; no client waits for it.

use scheme::index::IndexRange;

use super::flush::pending;
use super::{BATCH, Tree, Verbs};
use crate::blocks::ChunkIndex;
use crate::finemem::block::{
    Block, CHUNK_ORDER_MAX, CHUNKS, ChunkOffset, Layer, Order, Place, SPAN_ORDER, SPAN_ORDER_MAX,
    SPANS, SectionIndex, SpanIndex, SpanOffset,
};
use crate::finemem::header::{Header, Record, Spread, User, chunk_mask, span_mask};
use crate::finemem::log::FullLog;

impl Tree {
    /// Blocks of `user` that begin in a section. The user must have stopped working.
    ///
    /// Parts of a block of several sections that was not taken completely are returned as blocks of
    /// one section each.
    pub async fn taken_by<V: Verbs>(
        &self,
        verbs: &V,
        user: User,
        section: SectionIndex,
    ) -> Result<Vec<Block>, V::Error> {
        let header = self.flush_section(verbs, section).await?;
        let chunks = self.shape.chunks_in(section);
        let mut blocks = Vec::new();
        let mut logs = vec![0; BATCH.min(chunks.len())];
        for some in chunks.batches(BATCH) {
            let logs = &mut logs[..some.len()];
            verbs.read(self.shape.log(some.start), logs).await?;
            for (chunk, log) in some.iter().zip(logs.iter()) {
                let log = FullLog::parse(*log);
                if log.user == user
                    && let Some(block) = self.block_of(header, chunk, log)
                {
                    match block.parts() {
                        None => blocks.push(block),
                        Some(_) => blocks.extend(self.part_of(verbs, user, section, block).await?),
                    }
                }
            }
        }
        Ok(blocks)
    }

    /// Determines what `user` owns, given that it owns `section` as a part of `block`. If the block
    /// begins here: the whole block, because its first section is taken last. If the user also owns
    /// the first section: nothing, because the block is found there. Otherwise: this section, which
    /// was left behind.
    async fn part_of<V: Verbs>(
        &self,
        verbs: &V,
        user: User,
        section: SectionIndex,
        block: Block,
    ) -> Result<Option<Block>, V::Error> {
        let first = block.chunk.section();
        if section == first {
            return Ok(Some(block));
        }
        let is_whole = self.has_part(verbs, user, first, block).await?;
        Ok((!is_whole).then(|| Block::section(section)))
    }

    async fn has_part<V: Verbs>(
        &self,
        verbs: &V,
        user: User,
        section: SectionIndex,
        block: Block,
    ) -> Result<bool, V::Error> {
        // The log may not have been flushed yet.
        let place = Place::Section(section);
        let seen = self.read_header(verbs, place).await?;
        self.flush(verbs, place, seen).await?;
        let mut log = [0];
        verbs.read(self.shape.log(section.first_chunk()), &mut log).await?;
        let log = FullLog::parse(log[0]);
        let says = log.taken && log.user == user && log.size == Record::PART;
        Ok(says && log.layer == Layer::Section && log.block(section.first_chunk()) == block)
    }

    /// Flushes the temporary logs of all headers of a section; returns the section's header.
    async fn flush_section<V: Verbs>(
        &self,
        verbs: &V,
        section: SectionIndex,
    ) -> Result<Header, V::Error> {
        for span in section.spans().iter() {
            let place = Place::Span(span);
            let seen = self.read_header(verbs, place).await?;
            self.flush(verbs, place, seen).await?;
        }
        let place = Place::Section(section);
        let seen = self.read_header(verbs, place).await?;
        self.flush(verbs, place, seen).await?;
        Ok(seen.header)
    }

    /// The block that a log names as taken, if the bitmaps agree.
    fn block_of(&self, section: Header, chunk: ChunkIndex, log: FullLog) -> Option<Block> {
        let span = self.known(Place::Span(chunk.span()))?.header;
        let block = log.block(chunk);
        if block.parts().is_some() {
            let fits = self.shape.has_block(block) && chunk.section().first_chunk() == chunk;
            let taken = log.taken && section.bitmap() == u32::MAX && !span.in_use();
            return (fits && taken).then_some(block);
        }
        let taken = match log.layer {
            Layer::Span => {
                let at = chunk.in_span();
                fits_in_span(at, log.size) && span.in_use() && {
                    let mask = chunk_mask(at, block.order);
                    span.bitmap() & mask == mask
                }
            }
            Layer::Section => {
                let at = chunk.span().in_section();
                let fits = log.size <= SPAN_ORDER_MAX && at.raw() + (1 << log.size) <= SPANS;
                fits && !span.in_use() && {
                    let mask = span_mask(at, log.size);
                    section.bitmap() & mask == mask
                }
            }
        };
        (log.taken && taken).then_some(block)
    }

    /// Repairs what crashes have left in a section: spans that are open but empty (an unfinished
    /// opening or closing), and spans marked full that have no owner. Returns the number of
    /// repaired spans.
    pub async fn repair_section<V: Verbs>(
        &self,
        verbs: &V,
        index: SectionIndex,
    ) -> Result<u32, V::Error> {
        let mut closed = 0;
        for at in SpanOffset::all() {
            let span = index.span(at);
            let section = self.read_header(verbs, Place::Section(index)).await?.header;
            if section.spread(at) == Spread::Empty {
                continue;
            }
            let seen = self.read_header(verbs, Place::Span(span)).await?.header;
            if seen.in_use() || seen.bitmap() != 0 {
                continue;
            }
            if section.spread(at) == Spread::Full && self.has_owner(verbs, section, span).await? {
                continue;
            }
            // The section's header was read before this change, and must be unchanged after it.
            if self.renew(verbs, span, seen).await?.is_none() {
                continue;
            }
            let empty = section.with_spread(at, Spread::Empty);
            let done = self.change(verbs, Place::Section(index), section, empty).await?;
            closed += done.is_ok() as u32;
        }
        Ok(closed)
    }

    /// Frees blocks of a section that are taken in the headers but have no owner in a log: blocks
    /// whose withdrawal was not followed by the free. There must be no free of a withdrawn block in
    /// progress, and no withdrawn block in quarantine.
    pub async fn free_ownerless<V: Verbs>(
        &self,
        verbs: &V,
        index: SectionIndex,
    ) -> Result<(), V::Error> {
        for span in index.spans().iter() {
            let there = self.shape.chunks_of(span);
            let place = Place::Span(span);
            let seen = self.read_header(verbs, place).await?;
            if there == 0 || !seen.header.in_use() {
                continue;
            }
            // Afterwards every bit of the header has its full log, as of the time the header was
            // read.
            self.flush(verbs, place, seen).await?;
            let mut words = [0; CHUNKS as usize];
            verbs.read(self.shape.log(span.first_chunk()), &mut words[..there as usize]).await?;
            let logs = words.map(FullLog::parse);
            let positions = (0..there).map(ChunkOffset::new);
            let mut ownerless = positions.fold(seen.header.bitmap(), |bits, at| {
                let log = logs[at.as_usize()];
                match log.taken && log.layer == Layer::Span && fits_in_span(at, log.size) {
                    true => bits & !chunk_mask(at, Order::new(log.size)),
                    false => bits,
                }
            });
            // Chunks beyond the end of the pool are taken without an owner.
            ownerless &= ((1u64 << there) - 1) as u32;
            if ownerless != 0 {
                let at = ChunkOffset::new(ownerless.trailing_zeros());
                let log = logs[at.as_usize()];
                // A block's log is at its first chunk.
                let size = if log.layer == Layer::Span { log.size.min(CHUNK_ORDER_MAX) } else { 0 };
                let last = Block { chunk: span.chunk(at), order: Order::new(size) };
                self.give_back_bits(verbs, ownerless, last, log.user).await?;
            }
        }
        self.repair_section(verbs, index).await.map(drop)
    }

    /// True if the logs name an owner of the whole span.
    async fn has_owner<V: Verbs>(
        &self,
        verbs: &V,
        section: Header,
        span: SpanIndex,
    ) -> Result<bool, V::Error> {
        let place = Place::Section(span.section());
        for size in (0..=SPAN_ORDER_MAX).chain([Record::PART]) {
            let chunk = match size {
                Record::PART => span.section().first_chunk(),
                size => Block::around(span.first_chunk(), SPAN_ORDER.plus(size)).chunk,
            };
            let says = |log: FullLog| log.taken && log.layer == Layer::Section && log.size == size;
            let newest = pending(place, section);
            if newest.is_some_and(|(at, log)| at == chunk && says(log)) {
                return Ok(true);
            }
            let mut log = [0];
            verbs.read(self.shape.log(chunk), &mut log).await?;
            if says(FullLog::parse(log[0])) && newest.is_none_or(|(at, _)| at != chunk) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// True if a block of 2^`size` chunks from `at` on lies within a span.
fn fits_in_span(at: ChunkOffset, size: u32) -> bool {
    size <= CHUNK_ORDER_MAX && at.raw() + (1 << size) <= CHUNKS
}
