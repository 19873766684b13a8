//! Recovery after a crash, from headers and logs alone: the blocks of a user, and unfinished
//! operations (FineMem §4.2).
//!
//! Recovery processes one section at a time while other clients continue; no client waits for it.

use super::flush::pending;
use super::{BATCH, Place, Tree, Verbs};
use crate::finemem::block::{Block, Layer, SECTION, SPAN_ORDER};
use crate::finemem::header::{
    CHUNKS, Header, Record, SPAN_ORDER_MAX, SPANS, Spread, User, chunk_mask, span_mask,
};
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
        section: u32,
    ) -> Result<Vec<Block>, V::Error> {
        let header = self.flush_section(verbs, section).await?;
        let end = self.shape.chunks.min((section + 1) * SECTION);
        let mut blocks = Vec::new();
        let mut logs = vec![0; BATCH.min((end - section * SECTION) as usize)];
        for first in (section * SECTION..end).step_by(BATCH) {
            let logs = &mut logs[..BATCH.min((end - first) as usize)];
            verbs.read(self.shape.log(first), logs).await?;
            for (chunk, log) in (first..).zip(logs.iter()) {
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
        section: u32,
        block: Block,
    ) -> Result<Option<Block>, V::Error> {
        let first = block.chunk / SECTION;
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
        section: u32,
        block: Block,
    ) -> Result<bool, V::Error> {
        // The log may not have been flushed yet.
        let place = Place::section(section);
        let seen = self.read_header(verbs, place).await?;
        self.flush(verbs, place, seen).await?;
        let mut log = [0];
        verbs.read(self.shape.log(section * SECTION), &mut log).await?;
        let log = FullLog::parse(log[0]);
        let says = log.taken && log.user == user && log.size == Record::PART;
        Ok(says && log.layer == Layer::Section && log.block(section * SECTION) == block)
    }

    /// Flushes the temporary logs of all headers of a section; returns the section's header.
    async fn flush_section<V: Verbs>(&self, verbs: &V, index: u32) -> Result<Header, V::Error> {
        for span in index * SPANS..(index + 1) * SPANS {
            let place = Place::span(span);
            let seen = self.read_header(verbs, place).await?;
            self.flush(verbs, place, seen).await?;
        }
        let place = Place::section(index);
        let seen = self.read_header(verbs, place).await?;
        self.flush(verbs, place, seen).await?;
        Ok(seen.header)
    }

    /// The block that a log names as taken, if the bitmaps agree.
    fn block_of(&self, section: Header, chunk: u32, log: FullLog) -> Option<Block> {
        let span = self.known(Place::span(chunk / CHUNKS))?.header;
        let block = log.block(chunk);
        if block.parts().is_some() {
            let fits = self.shape.blocks(block.order) > block.chunk >> block.order;
            let taken = log.taken && section.bitmap() == u32::MAX && !span.in_use();
            return (fits && taken && chunk.is_multiple_of(SECTION)).then_some(block);
        }
        let order = block.order;
        let (from, size) = match log.layer {
            Layer::Span => (chunk % CHUNKS, 1 << log.size),
            Layer::Section => (chunk % SECTION / CHUNKS, 1 << log.size),
        };
        let fits = match log.layer {
            Layer::Span => order < SPAN_ORDER && from + size <= CHUNKS,
            Layer::Section => log.size <= SPAN_ORDER_MAX && from + size <= SPANS,
        };
        let taken = log.taken
            && fits
            && match log.layer {
                Layer::Span => {
                    let mask = chunk_mask(from, log.size);
                    span.in_use() && span.bitmap() & mask == mask
                }
                Layer::Section => {
                    let mask = span_mask(from, log.size);
                    !span.in_use() && section.bitmap() & mask == mask
                }
            };
        taken.then_some(block)
    }

    /// Repairs what crashes have left in a section: spans that are open but empty (an unfinished
    /// opening or closing), and spans marked full that have no owner. Returns the number of
    /// repaired spans.
    pub async fn repair_section<V: Verbs>(&self, verbs: &V, index: u32) -> Result<u32, V::Error> {
        let mut closed = 0;
        for at in 0..SPANS {
            let span = index * SPANS + at;
            let section = self.read_header(verbs, Place::section(index)).await?.header;
            if section.spread(at) == Spread::Empty {
                continue;
            }
            let seen = self.read_header(verbs, Place::span(span)).await?.header;
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
            let done = self.change(verbs, Place::section(index), section, empty).await?;
            closed += done.is_ok() as u32;
        }
        Ok(closed)
    }

    /// Frees blocks of a section that are taken in the headers but have no owner in a log: blocks
    /// whose withdrawal was not followed by the free. There must be no free of a withdrawn block in
    /// progress, and no withdrawn block in quarantine.
    pub async fn free_ownerless<V: Verbs>(&self, verbs: &V, index: u32) -> Result<(), V::Error> {
        for span in index * SPANS..(index + 1) * SPANS {
            let first = span * CHUNKS;
            let there = self.shape.chunks.saturating_sub(first).min(CHUNKS);
            let place = Place::span(span);
            let seen = self.read_header(verbs, place).await?;
            if there == 0 || !seen.header.in_use() {
                continue;
            }
            // Afterwards every bit of the header has its full log, as of the time the header was
            // read.
            self.flush(verbs, place, seen).await?;
            let mut words = [0; CHUNKS as usize];
            verbs.read(self.shape.log(first), &mut words[..there as usize]).await?;
            let logs = words.map(FullLog::parse);
            let mut ownerless = (0..there).fold(seen.header.bitmap(), |bits, at| {
                let log = logs[at as usize];
                let whole = log.layer == Layer::Span && log.size < SPAN_ORDER;
                match log.taken && whole && at + (1 << log.size) <= CHUNKS {
                    true => bits & !chunk_mask(at, log.size),
                    false => bits,
                }
            });
            // Chunks beyond the end of the pool are taken without an owner.
            ownerless &= ((1u64 << there) - 1) as u32;
            if ownerless != 0 {
                let at = ownerless.trailing_zeros();
                let log = logs[at as usize];
                // A block's log is at its first chunk.
                let size = if log.layer == Layer::Span { log.size.min(SPAN_ORDER - 1) } else { 0 };
                let last = Block { chunk: first + at, order: size };
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
        span: u32,
    ) -> Result<bool, V::Error> {
        let index = span / SPANS;
        for size in (0..=SPAN_ORDER_MAX).chain([Record::PART]) {
            let first = if size == Record::PART { index * SPANS } else { span >> size << size };
            let chunk = first * CHUNKS;
            let says = |log: FullLog| log.taken && log.layer == Layer::Section && log.size == size;
            let newest = pending(Layer::Section, index, section);
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
