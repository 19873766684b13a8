//! Statistics of a heap.

/// Use of a size class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassStats {
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Blocks that are allocated and not freed.
    pub live_blocks: u64,
    /// Blocks that are freed, and that a reader may still know.
    pub limbo_blocks: u64,
    /// Slabs with blocks of this class.
    pub slabs: u64,
}

/// Use of a heap's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Chunks of the heap, without those on their way back.
    pub held_chunks: usize,
    /// Chunks among them without a block.
    pub empty_chunks: usize,
    /// Chunks on their way back to the source.
    pub returning_chunks: usize,
    /// The size classes, that of the longest blocks first.
    pub classes: Vec<ClassStats>,
}

impl Stats {
    /// Bytes of all chunks that the source counts as allocated.
    pub fn held_bytes(&self) -> u64 {
        (self.held_chunks + self.returning_chunks) as u64 * self.chunk_bytes
    }

    /// Bytes of the live blocks.
    pub fn live_bytes(&self) -> u64 {
        self.classes.iter().map(|class| class.live_blocks * class.block_bytes).sum()
    }

    /// Bytes of the blocks in limbo.
    pub fn limbo_bytes(&self) -> u64 {
        self.classes.iter().map(|class| class.limbo_blocks * class.block_bytes).sum()
    }
}
