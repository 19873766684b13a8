//! A look into the memory node's books, for who checks them from outside.

use std::sync::Arc;

use fabric::{DmaMemory, MemoryRegion, Nic};

use super::worker::Shared;
use crate::scheme::ClientId;

/// Whose each chunk is.
pub struct Books<N: Nic>(pub(super) Arc<Shared<N>>);

/// What the books say of a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChunkState {
    /// The compute node that owns it.
    pub owner: Option<ClientId>,
    /// It is opened for its owner, who does not have it yet, or any more.
    pub aside: bool,
    /// A free of it has begun.
    pub leaving: bool,
}

impl<N: Nic> Books<N> {
    /// The donated memory.
    pub fn memory(&self) -> DmaMemory {
        self.0.memory.memory().clone()
    }

    /// What is said of a chunk; nothing while somebody writes in the books.
    pub fn chunk(&self, entry: u32) -> Option<ChunkState> {
        self.0.table.try_lock().map(|table| table.state_of(entry))
    }

    /// The free chunks; nothing while somebody writes in the books.
    pub fn free(&self) -> Option<Vec<u32>> {
        self.0.table.try_lock().map(|table| table.free_chunks())
    }
}
