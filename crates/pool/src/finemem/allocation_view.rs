//! A read-only view of the memory node's metadata, for external checkers.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use verbs::DmaMemory;

use super::array::Taker;
use super::block::{Block, Layer, SECTION, SECTION_ORDER};
use super::header::{CHUNKS, Header, SPANS, Spread, User};
use super::layout::Shape;
use super::log::{Capability, FullLog};
use super::tree::pending;
use super::words::Words;
use crate::scheme::ClientId;

/// The client to which each user number was last assigned.
pub(super) type ClientsByUser = Arc<Mutex<HashMap<User, ClientId>>>;

/// The owner of each chunk, according to headers and logs.
pub struct AllocationView {
    pub(super) shape: Shape,
    pub(super) memory: DmaMemory,
    pub(super) words: Words,
    pub(super) names: ClientsByUser,
    pub(super) is_array: bool,
}

impl AllocationView {
    /// The donated memory.
    pub fn memory(&self) -> DmaMemory {
        self.memory.clone()
    }

    /// Number of chunks.
    pub fn chunks(&self) -> u32 {
        self.shape.chunks
    }

    /// The array's record of a chunk, in the scheme that has an array in place of the tree.
    fn taker(&self, chunk: u32) -> Option<Taker> {
        Taker::parse(self.words.load(self.shape.log(chunk))).filter(|_| self.is_array)
    }

    /// The timestamps of all headers of sections and spans.
    pub fn timestamps(&self) -> impl Iterator<Item = u32> {
        let shape = self.shape;
        let sections = (0..shape.sections()).map(move |section| shape.section(section));
        let headers = sections.chain((0..shape.spans()).map(move |span| shape.span(span)));
        headers.map(|at| Header(self.words.load(at)).record().timestamp.raw())
    }

    /// True if the address is in the metadata.
    pub fn is_metadata(&self, addr: u64) -> bool {
        let words = self.words.memory();
        (words.addr()..words.addr() + words.len() as u64).contains(&addr)
    }

    /// The owner of a chunk, or of a quarantined chunk its last owner; `None` if the chunk is free.
    pub fn owner(&self, chunk: u32) -> Option<ClientId> {
        if !self.is_taken(chunk) {
            return None;
        }
        let user = match self.taker(chunk) {
            Some(taker) => taker.user,
            None => {
                self.taken_with(chunk).map_or_else(|| self.log(chunk).user, |(_, log)| log.user)
            }
        };
        self.names.lock().get(&user).copied()
    }

    /// The log of a chunk: the temporary log of its header if that is newer, otherwise the full
    /// log.
    fn log(&self, chunk: u32) -> FullLog {
        let (span, section) = (chunk / CHUNKS, chunk / SECTION);
        let header = |at| Header(self.words.load(at));
        let of_span = pending(Layer::Span, span, header(self.shape.span(span)));
        let of_section = pending(Layer::Section, section, header(self.shape.section(section)));
        let in_use = header(self.shape.span(span)).in_use();
        let of_section = of_section.filter(|_| !in_use);
        let newest = [of_span.filter(|_| in_use), of_section].into_iter().flatten();
        let newest = newest.into_iter().find(|(at, _)| *at == chunk);
        let full = || FullLog::parse(self.words.load(self.shape.log(chunk)));
        newest.map_or_else(full, |(_, log)| log)
    }

    /// The taken block that contains a chunk, according to the log of the block's first chunk.
    fn taken_with(&self, chunk: u32) -> Option<(Block, FullLog)> {
        (0..=self.shape.order_max()).find_map(|order| {
            // In a block of several sections, each section has a log.
            let first = match order > SECTION_ORDER {
                true => chunk / SECTION * SECTION,
                false => chunk >> order << order,
            };
            let log = self.log(first);
            let block = log.block(first);
            let fits = block.order == order && block.chunks().contains(&chunk);
            (log.taken && fits).then_some((block, log))
        })
    }

    /// True if the bitmaps mark a chunk as taken.
    pub fn is_taken(&self, chunk: u32) -> bool {
        if self.is_array {
            return self.taker(chunk).is_some();
        }
        let index = chunk / CHUNKS;
        let span = Header(self.words.load(self.shape.span(index)));
        match span.in_use() {
            true => span.bitmap() >> (chunk % CHUNKS) & 1 == 1,
            false => {
                let section = Header(self.words.load(self.shape.section(index / SPANS)));
                section.spread(index % SPANS) == Spread::Full
            }
        }
    }

    /// True if a chunk was freed, alone or in a larger block, and its old key may still grant
    /// access.
    pub fn is_quarantined(&self, chunk: u32) -> bool {
        let alone = Block { chunk, order: 0 };
        let block = match self.is_array {
            true => alone,
            false => self.taken_with(chunk).map_or(alone, |(block, _)| block),
        };
        let entry = self.shape.entry(block);
        Capability::parse(self.words.load(self.shape.capability(entry))).is_quarantined()
    }
}
