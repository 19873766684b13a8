//! Blocks of chunks: aligned runs whose length is a power of two. An entry is the number of a
//! block; blocks of a single chunk come first.

use std::ops::Range;

/// Number of orders: the largest block has 2^23 chunks.
pub const ORDERS: u32 = 24;
/// Maximum bytes of a block: the largest length of a window.
pub const BLOCK_BYTES_MAX: u64 = 1 << 31;

/// A block: an aligned run of 2^order chunks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Block {
    /// The block's first chunk.
    pub chunk: u32,
    /// Logarithm of the block's length in chunks.
    pub order: u32,
}

impl Block {
    /// The block's chunks.
    pub fn chunks(self) -> Range<u32> {
        self.chunk..self.chunk + (1 << self.order)
    }
}

/// The chunks of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Chunks.
    pub chunks: u32,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
}

impl Shape {
    /// Blocks of an order that lie completely within the pool.
    pub fn blocks(self, order: u32) -> u32 {
        if self.block_bytes(order) > BLOCK_BYTES_MAX { 0 } else { self.chunks >> order }
    }

    /// Bytes of a block.
    pub fn block_bytes(self, order: u32) -> u64 {
        self.chunk_bytes << order
    }

    /// The order of the largest block.
    pub fn order_max(self) -> u32 {
        (0..ORDERS).rev().find(|order| self.blocks(*order) > 0).unwrap_or(0)
    }

    /// The order of the smallest block of at least `bytes`; `None` if no block is as large.
    pub fn order_for(self, bytes: u64) -> Option<u32> {
        (0..=self.order_max()).find(|order| self.block_bytes(*order) >= bytes)
    }

    /// Entries: one for each block.
    pub fn entries(self) -> u32 {
        (0..ORDERS).map(|order| self.blocks(order)).sum()
    }

    /// The entry of a block.
    pub fn entry(self, block: Block) -> u32 {
        (0..block.order).map(|order| self.blocks(order)).sum::<u32>() + (block.chunk >> block.order)
    }

    /// The block of an entry; `None` if the entry is beyond the table.
    pub fn block(self, entry: u32) -> Option<Block> {
        let mut left = entry;
        for order in 0..ORDERS {
            let blocks = self.blocks(order);
            if left < blocks {
                return Some(Block { chunk: left << order, order });
            }
            left -= blocks;
        }
        None
    }

    /// Splits `range` by the order of the blocks. Yields each order, its first entry, and the
    /// entries of that order within the range.
    pub fn by_order(self, range: Range<u32>) -> impl Iterator<Item = (u32, u32, Range<u32>)> {
        (0..ORDERS).scan(0, move |next, order| {
            let base = *next;
            *next += self.blocks(order);
            Some((order, base, range.start.max(base)..range.end.min(*next)))
        })
    }
}
