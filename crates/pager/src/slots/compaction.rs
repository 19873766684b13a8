//! Compaction of chunks: the choice of the chunks whose slots move to other chunks.
//!
//! A *closed* chunk gives out no slot. The pages of its slots get slots of other chunks
//! ([`crate::pages::compact`]), and the chunk is freed with its last slot.

use super::{Chunk, Slots};

/// Maximum number of slots in the chunks that are closed at a time. Chunks that are closed for long
/// would make the program's own pages scatter over the other chunks.
const CLOSED_SLOTS_MAX: u32 = 16_384;

/// Number of slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Used slots.
    pub live: u64,
    /// Slots of all chunks.
    pub held: u64,
}

impl Slots {
    /// Returns the number of used slots and of all slots.
    pub fn usage(&self) -> Usage {
        let chunks = u64::from(self.pool_chunks) + u64::from(self.overflow_chunks);
        Usage { live: self.live, held: chunks << self.pages_log2 }
    }

    /// Closes the emptiest chunks, as many as the free slots of the others can replace. Chunks with
    /// frozen slots stay open, because these slots cannot move. Returns the number of closed
    /// chunks.
    pub fn close_sparse(&mut self) -> u32 {
        debug_assert!(self.closed.is_empty(), "one pass of compaction at a time");
        let Usage { live, held } = self.usage();
        let surplus = ((held - live).saturating_sub(self.spare()) >> self.pages_log2) as usize;
        if surplus == 0 {
            return 0;
        }
        let chunks = self.chunks.iter().enumerate();
        let mut sparse: Vec<(u32, u32)> = chunks
            .filter_map(|(index, chunk)| Some((chunk.as_ref()?, index as u32)))
            .filter(|(chunk, _)| chunk.live < self.chunk_pages() && !self.has_frozen(chunk))
            .map(|(chunk, index)| (chunk.live, index))
            .collect();
        sparse.sort_unstable();
        sparse.truncate(surplus);
        let mut moved = 0;
        let fits = |&(live, _): &(u32, u32)| {
            moved += live;
            moved <= CLOSED_SLOTS_MAX.max(live)
        };
        for (_, index) in sparse.into_iter().take_while(fits) {
            let chunk = self.chunks[index as usize].as_mut().expect("found above");
            chunk.is_closed = true;
            self.fill.remove(index);
            self.closed.push(index);
        }
        if self.open.is_some_and(|open| self.closed.contains(&open)) {
            self.open = None;
        }
        self.closed.len() as u32
    }

    /// Opens the closed chunks that still have slots.
    pub fn reopen(&mut self) {
        for index in std::mem::take(&mut self.closed) {
            // The index may belong to a new chunk by now, which is not closed.
            if let Some(chunk) = self.chunks[index as usize].as_mut().filter(|c| c.is_closed) {
                chunk.is_closed = false;
                self.fill.set(index, chunk.live, self.pages_log2);
            }
        }
    }

    /// Returns true if a slot's page must get another slot, because the chunk is closed.
    ///
    /// A caller without the page's lock may have an old slot, whose chunk may be freed already.
    pub fn is_closed(&self, slot: super::SlotId) -> bool {
        if !slot.has_place() || self.closed.is_empty() {
            return false;
        }
        self.chunks[self.split(slot).0].as_ref().is_some_and(|chunk| chunk.is_closed)
    }

    fn has_frozen(&self, chunk: &Chunk) -> bool {
        chunk.frozen.iter().any(|first| self.is_needed(super::Epoch(*first), self.epoch))
    }
}
