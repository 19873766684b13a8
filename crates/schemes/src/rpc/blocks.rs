//! The blocks that can be allocated, and the free list (a buddy allocator). A block is a chunk; in
//! schemes with several sizes it is any power of two of chunks, aligned to its length.
//!
//! An entry is the number of a block. Blocks of a single chunk come first, so that an entry below
//! the number of chunks is a chunk number in every scheme.

use scheme::NodeSettings;
use scheme::index::{EntryId, IndexRange};

use crate::blocks::ChunkIndex;
use crate::blocks::{Block, CHUNK_ORDER, Order, Shape};

/// The blocks of a memory node.
#[derive(Clone, Copy)]
pub struct Blocks {
    shape: Shape,
    order_max: Order,
}

impl Blocks {
    /// The blocks of a memory node with `settings`.
    pub fn of(settings: &NodeSettings) -> Self {
        Self::new(settings.chunks as u32, settings.chunk_bytes, settings.scheme.has_sizes())
    }

    /// The blocks of `chunks` chunks of `chunk_bytes`.
    pub fn new(chunks: u32, chunk_bytes: u64, sizes: bool) -> Self {
        let shape = Shape { chunks, chunk_bytes };
        Self { shape, order_max: if sizes { shape.order_max() } else { CHUNK_ORDER } }
    }

    /// Number of chunks.
    pub fn chunks(self) -> u32 {
        self.shape.chunks
    }

    /// Order of the largest block.
    pub fn order_max(self) -> Order {
        self.order_max
    }

    /// Size in bytes of the largest block.
    pub fn bytes_max(self) -> u64 {
        self.shape.block_bytes(self.order_max)
    }

    /// Order of the smallest block of at least `bytes`.
    pub fn order_for(self, bytes: u64) -> Option<Order> {
        self.shape.order_for(bytes).filter(|order| *order <= self.order_max)
    }

    /// Size in bytes of a block of this order.
    pub fn bytes(self, order: Order) -> u64 {
        self.shape.block_bytes(order)
    }

    /// Number of entries.
    pub fn count(self) -> u32 {
        if self.order_max == CHUNK_ORDER { self.shape.chunks } else { self.shape.entries() }
    }

    /// All entries.
    pub fn entries(self) -> impl Iterator<Item = EntryId> {
        (EntryId::new(0)..EntryId::new(self.count())).iter()
    }

    /// The block of an entry, which must exist.
    pub fn block(self, entry: EntryId) -> Block {
        self.shape.block(entry).expect("an entry of the table")
    }

    /// The entry of a block.
    pub fn entry(self, block: Block) -> EntryId {
        self.shape.entry(block)
    }

    /// Offset of a block in the donated memory, and its size in bytes.
    pub fn range(self, entry: EntryId) -> (u64, u64) {
        self.shape.range(self.block(entry))
    }

    /// The block of this order that contains a chunk, if all of the block is in the pool.
    fn around(self, chunk: ChunkIndex, order: Order) -> Option<Block> {
        let block = Block::around(chunk, order);
        (order <= self.order_max && self.shape.has_block(block)).then_some(block)
    }

    /// Entries of all blocks that contain a chunk.
    pub fn over(self, chunk: ChunkIndex) -> impl Iterator<Item = EntryId> {
        let around = move |order| self.around(chunk, order).map(|block| self.entry(block));
        self.order_max.up_to().filter_map(around)
    }
}

/// Position of an entry that is on no list.
const NOWHERE: u32 = u32::MAX;

/// The free blocks. Two free halves of a block are always merged.
#[derive(Clone)]
pub struct Free {
    blocks: Blocks,
    /// Entries of free blocks, by order; last in, first out.
    lists: Vec<Vec<EntryId>>,
    /// Position of each entry in its list.
    at: Vec<u32>,
    chunks: u64,
}

impl Free {
    /// All blocks are free.
    pub fn all(blocks: Blocks) -> Self {
        let orders = blocks.order_max().as_usize() + 1;
        let at = vec![NOWHERE; blocks.count() as usize];
        let mut free = Self { blocks, lists: vec![Vec::new(); orders], at, chunks: 0 };
        let mut largest = Vec::new();
        let mut chunk = ChunkIndex::new(0);
        while chunk < blocks.shape.end() {
            let begins = |block: &Block| block.chunk == chunk;
            let orders = blocks.order_max().up_to().rev();
            let mut begin_here =
                orders.filter_map(|order| blocks.around(chunk, order).filter(begins));
            let block = begin_here.next().expect("a chunk of the pool is a block");
            largest.push(block);
            chunk = block.end();
        }
        largest.into_iter().rev().for_each(|block| free.put(block));
        free
    }

    /// Number of free chunks.
    pub fn chunks(&self) -> u64 {
        self.chunks
    }

    /// Entries of the free blocks.
    pub fn entries(&self) -> impl Iterator<Item = EntryId> {
        self.lists.iter().flatten().copied()
    }

    /// Takes a block of this order, split from the smallest free block that is large enough.
    pub fn take(&mut self, order: Order) -> Option<EntryId> {
        let from = (order.as_usize()..self.lists.len()).find(|at| !self.lists[*at].is_empty())?;
        let entry = *self.lists[from].last().expect("just seen");
        self.remove(entry);
        let Block { chunk, order: whole } = self.blocks.block(entry);
        for order in (order..whole).iter().rev() {
            self.put(Block { chunk, order }.buddy());
        }
        Some(self.blocks.entry(Block { chunk, order }))
    }

    /// Returns a block to the free list, and merges it with its free neighbours.
    pub fn give(&mut self, entry: EntryId) {
        let mut block = self.blocks.block(entry);
        while let Some(whole) = self.blocks.around(block.chunk, block.order.plus(1)) {
            let other = self.blocks.entry(block.buddy());
            if self.at[other.as_usize()] == NOWHERE {
                break;
            }
            self.remove(other);
            block = whole;
        }
        self.put(block);
    }

    fn put(&mut self, block: Block) {
        let entry = self.blocks.entry(block);
        let list = &mut self.lists[block.order.as_usize()];
        self.at[entry.as_usize()] = list.len() as u32;
        list.push(entry);
        self.chunks += u64::from(block.order.chunks());
    }

    fn remove(&mut self, entry: EntryId) {
        let order = self.blocks.block(entry).order;
        let list = &mut self.lists[order.as_usize()];
        let at = std::mem::replace(&mut self.at[entry.as_usize()], NOWHERE) as usize;
        list.swap_remove(at);
        if let Some(moved) = list.get(at) {
            self.at[moved.as_usize()] = at as u32;
        }
        self.chunks -= u64::from(order.chunks());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn free_list_allocates_in_order_and_last_freed_first() {
        let mut free = Free::all(Blocks::new(5, 4096, false));
        assert_eq!(
            Vec::from_iter((0..5).flat_map(|_| free.take(CHUNK_ORDER)).map(EntryId::raw)),
            [0, 1, 2, 3, 4]
        );
        assert_eq!((free.take(CHUNK_ORDER), free.chunks()), (None, 0));
        let [one, three] = [1, 3].map(EntryId::new);
        free.give(three);
        free.give(one);
        assert_eq!((free.take(CHUNK_ORDER), free.take(CHUNK_ORDER)), (Some(one), Some(three)));
    }

    proptest! {
        /// For any sequence of takes and returns: no chunk is taken twice, and all merge into one
        /// block.
        #[test]
        fn free_halves_merge_into_their_block(
            chunks in 1u32..1500,
            steps in prop::collection::vec(
                (any::<bool>(), 0u32..10, any::<prop::sample::Index>()),
                1..200,
            ),
        ) {
            let blocks = Blocks::new(chunks, 4096, true);
            let mut free = Free::all(blocks);
            let mut whole: Vec<_> = free.entries().collect();
            whole.sort_unstable();
            let mut taken = vec![false; chunks as usize];
            let mut held = Vec::new();
            for (take, order, which) in steps {
                if take {
                    let Some(entry) = free.take(Order::new(order)) else { continue };
                    let block = blocks.block(entry);
                    prop_assert_eq!(block.order.raw(), order);
                    for chunk in block.chunks().iter() {
                        prop_assert!(!std::mem::replace(&mut taken[chunk.as_usize()], true));
                    }
                    held.push(entry);
                } else if !held.is_empty() {
                    let entry = held.swap_remove(which.index(held.len()));
                    let chunks = blocks.block(entry).chunks();
                    chunks.iter().for_each(|chunk| taken[chunk.as_usize()] = false);
                    free.give(entry);
                }
                prop_assert_eq!(free.chunks(), taken.iter().filter(|t| !**t).count() as u64);
            }
            held.into_iter().for_each(|entry| free.give(entry));
            let mut now: Vec<_> = free.entries().collect();
            now.sort_unstable();
            prop_assert_eq!(now, whole);
        }
    }
}
