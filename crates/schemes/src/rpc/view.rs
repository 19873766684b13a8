//! A view of the memory node's allocations, for external checkers.

use std::sync::Arc;

use verbs::{DmaMemory, MemoryRegion, Nic};

use super::table::ChunkState;
use super::worker::Shared;
use crate::blocks::ChunkIndex;

/// View of the owner of each chunk.
pub struct AllocationView<N: Nic>(pub(super) Arc<Shared<N>>);

impl<N: Nic> AllocationView<N> {
    /// The donated memory.
    pub fn memory(&self) -> DmaMemory {
        self.0.memory.memory().clone()
    }

    /// State of a chunk; `None` while another thread holds the lock.
    pub fn chunk(&self, chunk: ChunkIndex) -> Option<ChunkState> {
        self.0.table.try_lock().map(|table| table.state_of(chunk))
    }

    /// The free chunks; `None` while another thread holds the lock.
    pub fn free(&self) -> Option<Vec<ChunkIndex>> {
        self.0.table.try_lock().map(|table| table.free_chunks())
    }
}
