//! A look into the memory node's metadata, for who checks it from outside.

use std::collections::HashMap;
use std::sync::Arc;

use fabric::DmaMemory;
use parking_lot::Mutex;

use super::array::Taker;
use super::header::{CHUNKS, Header, SPANS, Spread, User};
use super::layout::{Block, Shape};
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

    /// True for an address in the metadata.
    pub fn is_metadata(&self, addr: u64) -> bool {
        let words = &self.words.0;
        (words.addr()..words.addr() + words.len() as u64).contains(&addr)
    }

    /// Who has a chunk that was taken by itself, not in a larger block; nobody has one that is free.
    pub fn owner(&self, chunk: u32) -> Option<ClientId> {
        if !self.is_taken(chunk) {
            return None;
        }
        if let Some(taker) = self.taker(chunk) {
            return self.names.lock().get(&taker.user).copied();
        }
        let span = Header(self.words.load(self.shape.span(chunk / CHUNKS)));
        let log = match pending(Layer::Span, chunk / CHUNKS, span) {
            Some((at, log)) if at == chunk => log,
            _ => FullLog::parse(self.words.load(self.shape.log(chunk))),
        };
        self.names.lock().get(&log.user).copied()
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

    /// True if a chunk was freed, and its old key may still open it.
    pub fn is_quarantined(&self, chunk: u32) -> bool {
        let entry = self.shape.entry(Block { chunk, order: 0 });
        Capability::parse(self.words.load(self.shape.capability(entry))).is_quarantined()
    }
}
