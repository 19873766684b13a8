//! A look into the memory node's metadata, for who checks it from outside.

use std::collections::HashMap;
use std::sync::Arc;

use fabric::DmaMemory;
use parking_lot::Mutex;

use super::array::Taker;
use super::header::{CHUNKS, Header, SPANS, Spread, User};
use super::layout::{Block, SECTION, SECTION_ORDER, Shape};
use super::log::{Capability, FullLog, Layer};
use super::tree::pending;
use super::words::Words;
use crate::scheme::ClientId;

/// Which compute node a user number was given to last.
pub(super) type Names = Arc<Mutex<HashMap<User, ClientId>>>;

/// Whose each chunk is, as headers and logs have it at any moment.
pub struct Books {
    pub(super) shape: Shape,
    pub(super) memory: DmaMemory,
    pub(super) words: Words,
    pub(super) names: Names,
    pub(super) is_array: bool,
}

impl Books {
    /// The donated memory.
    pub fn memory(&self) -> DmaMemory {
        self.memory.clone()
    }

    /// Chunks.
    pub fn chunks(&self) -> u32 {
        self.shape.chunks
    }

    /// What the array says of a chunk, if there is one in the tree's place.
    fn taker(&self, chunk: u32) -> Option<Taker> {
        Taker::parse(self.words.load(self.shape.log(chunk))).filter(|_| self.is_array)
    }

    /// The timestamps of all headers, sections' and spans'.
    pub fn timestamps(&self) -> impl Iterator<Item = u32> {
        let shape = self.shape;
        let sections = (0..shape.sections()).map(move |section| shape.section(section));
        let headers = sections.chain((0..shape.spans()).map(move |span| shape.span(span)));
        headers.map(|at| Header(self.words.load(at)).record().timestamp.raw())
    }

    /// True for an address in the metadata.
    pub fn is_metadata(&self, addr: u64) -> bool {
        let words = self.words.memory();
        (words.addr()..words.addr() + words.len() as u64).contains(&addr)
    }

    /// Who has a chunk, or had it until it was freed; nobody has one that is free.
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

    /// What the log of a chunk says: the one of its header, if that is newer.
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

    /// The block that a chunk is taken with, by the log of the chunk that it begins with.
    fn taken_with(&self, chunk: u32) -> Option<(Block, FullLog)> {
        (0..=self.shape.order_max()).find_map(|order| {
            // Of several sections each says so.
            let first = match order > SECTION_ORDER {
                true => chunk / SECTION * SECTION,
                false => chunk >> order << order,
            };
            let log = self.log(first);
            let block = Block::of(first, log);
            let fits = block.order == order && block.chunks().contains(&chunk);
            (log.taken && fits).then_some((block, log))
        })
    }

    /// True if the bitmaps have a chunk as taken.
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

    /// True if a chunk was freed, by itself or in a larger block, and its old key may still open it.
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
