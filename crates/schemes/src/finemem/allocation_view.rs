//! A read-only view of the memory node's metadata, for external checkers.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use scheme::ClientId;
use verbs::DmaMemory;

use super::array::Taker;
use super::block::{Block, CHUNK_ORDER, Order, Place};
use super::header::{Header, Spread, User, chunk_mask};
use super::layout::Shape;
use super::log::{Capability, FullLog};
use super::tree::pending;
use super::words::Words;
use crate::blocks::ChunkIndex;

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

    /// All chunks.
    pub fn chunks(&self) -> impl Iterator<Item = ChunkIndex> {
        self.shape.each_chunk()
    }

    fn header(&self, place: Place) -> Header {
        Header(self.words.load(place.word(self.shape)))
    }

    /// The array's record of a chunk, in the scheme that has an array in place of the tree.
    fn taker(&self, chunk: ChunkIndex) -> Option<Taker> {
        Taker::parse(self.words.load(self.shape.log(chunk))).filter(|_| self.is_array)
    }

    /// The timestamps of all headers of sections and spans.
    pub fn timestamps(&self) -> impl Iterator<Item = u32> {
        let sections = self.shape.each_section().map(Place::Section);
        let headers = sections.chain(self.shape.each_span().map(Place::Span));
        headers.map(|place| self.header(place).record().timestamp.raw())
    }

    /// True if the address is in the metadata.
    pub fn is_metadata(&self, addr: u64) -> bool {
        let words = self.words.memory();
        (words.addr()..words.addr() + words.len() as u64).contains(&addr)
    }

    /// The owner of a chunk, or of a quarantined chunk its last owner; `None` if the chunk is free.
    pub fn owner(&self, chunk: ChunkIndex) -> Option<ClientId> {
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
    fn log(&self, chunk: ChunkIndex) -> FullLog {
        let (span, section) = (Place::Span(chunk.span()), Place::Section(chunk.section()));
        let place = if self.header(span).in_use() { span } else { section };
        let newest = pending(place, self.header(place)).filter(|(at, _)| *at == chunk);
        let full = || FullLog::parse(self.words.load(self.shape.log(chunk)));
        newest.map_or_else(full, |(_, log)| log)
    }

    /// The taken block that contains a chunk, according to the log of the block's first chunk.
    fn taken_with(&self, chunk: ChunkIndex) -> Option<(Block, FullLog)> {
        self.shape.order_max().up_to().find_map(|order: Order| {
            // In a block of several sections, each section has a log.
            let first = match order.has_parts() {
                true => chunk.section().first_chunk(),
                false => Block::around(chunk, order).chunk,
            };
            let log = self.log(first);
            let block = log.block(first);
            let fits = block.order == order && block.chunks().contains(&chunk);
            (log.taken && fits).then_some((block, log))
        })
    }

    /// True if the bitmaps mark a chunk as taken.
    pub fn is_taken(&self, chunk: ChunkIndex) -> bool {
        if self.is_array {
            return self.taker(chunk).is_some();
        }
        let index = chunk.span();
        let span = self.header(Place::Span(index));
        match span.in_use() {
            true => span.bitmap() & chunk_mask(chunk.in_span(), CHUNK_ORDER) != 0,
            false => {
                let section = self.header(Place::Section(index.section()));
                section.spread(index.in_section()) == Spread::Full
            }
        }
    }

    /// True if a chunk was freed, alone or in a larger block, and its old key may still grant
    /// access.
    pub fn is_quarantined(&self, chunk: ChunkIndex) -> bool {
        let alone = Block::of_chunk(chunk);
        let block = match self.is_array {
            true => alone,
            false => self.taken_with(chunk).map_or(alone, |(block, _)| block),
        };
        let entry = self.shape.entry(block);
        Capability::parse(self.words.load(self.shape.capability(entry))).is_quarantined()
    }
}
