//! Blocks of chunks: aligned runs whose length is a power of two. An entry is the number of a
//! block; blocks of a single chunk come first.

use std::ops::Range;

use scheme::index::{EntryId, IndexRange};
use scheme::index_type;

index_type! {
    /// A chunk of the donated memory.
    ChunkIndex
}

/// The entry of a single chunk: in every scheme, these are the first entries.
impl From<ChunkIndex> for EntryId {
    fn from(chunk: ChunkIndex) -> Self {
        Self::new(chunk.raw())
    }
}

index_type! {
    /// Logarithm of a block's length in chunks.
    Order
}

/// Number of orders: the largest block has 2^23 chunks.
pub const ORDERS: u32 = 24;
/// The order of a chunk.
pub const CHUNK_ORDER: Order = Order::new(0);
/// Maximum bytes of a block: the largest length of a window.
pub const BLOCK_BYTES_MAX: u64 = 1 << 31;

impl Order {
    /// All orders, ascending.
    pub fn all() -> impl DoubleEndedIterator<Item = Self> + Clone {
        (CHUNK_ORDER..Self::new(ORDERS)).iter()
    }

    /// The orders up to this one, ascending.
    pub fn up_to(self) -> impl DoubleEndedIterator<Item = Self> {
        (CHUNK_ORDER..self.plus(1)).iter()
    }

    /// Number of chunks.
    pub const fn chunks(self) -> u32 {
        1 << self.raw()
    }
}

/// A block: an aligned run of 2^order chunks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Block {
    /// The block's first chunk.
    pub chunk: ChunkIndex,
    /// Logarithm of the block's length in chunks.
    pub order: Order,
}

impl Block {
    /// The block of an order with this number: its position among the blocks of the order.
    pub const fn nth(order: Order, number: u32) -> Self {
        Self { chunk: ChunkIndex::new(number << order.raw()), order }
    }

    /// The block of an order that contains a chunk.
    pub const fn around(chunk: ChunkIndex, order: Order) -> Self {
        Self::nth(order, chunk.raw() >> order.raw())
    }

    /// A chunk as a block of its own.
    pub const fn of_chunk(chunk: ChunkIndex) -> Self {
        Self { chunk, order: CHUNK_ORDER }
    }

    /// Position among the blocks of its order.
    pub const fn number(self) -> u32 {
        self.chunk.raw() >> self.order.raw()
    }

    /// The chunk after the block.
    pub const fn end(self) -> ChunkIndex {
        self.chunk.plus(self.order.chunks())
    }

    /// The block's chunks.
    pub const fn chunks(self) -> Range<ChunkIndex> {
        self.chunk..self.end()
    }

    /// The block of the same order with which this one merges into a block of the next order.
    pub const fn buddy(self) -> Self {
        Self::nth(self.order, self.number() ^ 1)
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
    /// All chunks.
    pub fn each_chunk(self) -> impl DoubleEndedIterator<Item = ChunkIndex> {
        (ChunkIndex::new(0)..self.end()).iter()
    }

    /// All entries.
    pub fn each_entry(self) -> impl DoubleEndedIterator<Item = EntryId> {
        (EntryId::new(0)..self.entries_end()).iter()
    }

    /// All blocks of an order that lie completely within the pool.
    pub fn each_block(self, order: Order) -> impl Iterator<Item = Block> {
        (0..self.blocks(order)).map(move |number| Block::nth(order, number))
    }

    /// The chunk after the last one.
    pub fn end(self) -> ChunkIndex {
        ChunkIndex::new(self.chunks)
    }

    /// The entry after the last one.
    pub fn entries_end(self) -> EntryId {
        EntryId::new(self.entries())
    }

    /// Number of blocks of an order that lie completely within the pool.
    pub fn blocks(self, order: Order) -> u32 {
        if self.block_bytes(order) > BLOCK_BYTES_MAX { 0 } else { self.chunks >> order.raw() }
    }

    /// True if a block has a window: it lies completely within the pool.
    pub fn has_block(self, block: Block) -> bool {
        block.number() < self.blocks(block.order)
    }

    /// Bytes of a block.
    pub fn block_bytes(self, order: Order) -> u64 {
        self.chunk_bytes << order.raw()
    }

    /// Offset of a block in the donated memory, and its bytes.
    pub fn range(self, block: Block) -> (u64, u64) {
        (u64::from(block.chunk.raw()) * self.chunk_bytes, self.block_bytes(block.order))
    }

    /// The order of the largest block.
    pub fn order_max(self) -> Order {
        Order::all().rev().find(|order| self.blocks(*order) > 0).unwrap_or_default()
    }

    /// The order of the smallest block of at least `bytes`; `None` if no block is as large.
    pub fn order_for(self, bytes: u64) -> Option<Order> {
        self.order_max().up_to().find(|order| self.block_bytes(*order) >= bytes)
    }

    /// The order in a message; `None` if no block has this order.
    pub fn order(self, word: u64) -> Option<Order> {
        let order = u32::try_from(word).ok().map(Order::new);
        order.filter(|order| *order <= self.order_max())
    }

    /// Number of entries: one for each block.
    pub fn entries(self) -> u32 {
        Order::all().map(|order| self.blocks(order)).sum()
    }

    /// The entry of a block.
    pub fn entry(self, block: Block) -> EntryId {
        let smaller = Order::all().take_while(|order| *order < block.order);
        EntryId::new(smaller.map(|order| self.blocks(order)).sum::<u32>() + block.number())
    }

    /// The block of an entry; `None` if the entry is beyond the table.
    pub fn block(self, entry: EntryId) -> Option<Block> {
        let mut left = entry.raw();
        for order in Order::all() {
            let blocks = self.blocks(order);
            if left < blocks {
                return Some(Block::nth(order, left));
            }
            left -= blocks;
        }
        None
    }

    /// Splits `range` by the order of the blocks. Yields each order, its first entry, and the
    /// entries of that order within the range.
    pub fn by_order(
        self,
        range: Range<EntryId>,
    ) -> impl Iterator<Item = (Order, EntryId, Range<EntryId>)> {
        Order::all().scan(EntryId::new(0), move |next, order| {
            let base = *next;
            *next = base.plus(self.blocks(order));
            Some((order, base, range.start.max(base)..range.end.min(*next)))
        })
    }
}
