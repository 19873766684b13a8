//! The memory nodes of a store, and their chunks as one source for the heap.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use heap::{ChunkSource, PoolChunks};
use pool::{Grant, GroupId, Pool};
use verbs::Nic;

/// A memory node.
pub(super) struct Node<N: Nic> {
    pub pool: Pool<N>,
    pub first_chunk_addr: u64,
    /// The first of the heap's groups that lie on this memory node.
    first_group: u16,
    chunks: PoolChunks<N>,
    is_gone: AtomicBool,
}

impl<N: Nic> Node<N> {
    pub fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    /// Notes that the memory node is gone. Returns true at the first call.
    pub fn set_gone(&self) -> bool {
        !self.is_gone.swap(true, Ordering::AcqRel)
    }

    /// The heap's group for the blocks of a stripe.
    pub fn group(&self, stripe: u32) -> GroupId {
        GroupId(self.first_group + (stripe % u32::from(self.pool.groups())) as u16)
    }
}

/// The memory nodes of a store. The first one has the index.
pub struct Nodes<N: Nic = pool::DefaultNic> {
    list: Arc<[Node<N>]>,
    /// Number of the first memory node in places.
    first: u8,
}

impl<N: Nic> Clone for Nodes<N> {
    fn clone(&self) -> Self {
        Self { list: self.list.clone(), first: self.first }
    }
}

/// A chunk, and the index of its memory node.
#[derive(Clone, Copy, Debug)]
pub struct NodeGrant {
    /// Index of the memory node.
    pub node: u8,
    /// The chunk.
    pub grant: Grant,
}

/// Maximum number of memory nodes of a store.
const NODES_MAX: usize = 64;

fn refused(setting: &'static str, value: String, why: &str) -> pool::Error {
    pool::Error::Setting { setting, value, why: why.into() }
}

impl<N: Nic> Nodes<N> {
    /// The memory nodes of `pools`, which have the numbers from `first` on in places.
    ///
    /// # Errors
    /// [`pool::Error::Setting`] for no pool or more than 64, for pools whose chunks differ in
    /// length, and for a scheme whose chunks are accessed by whole pages.
    pub fn new(pools: Vec<Pool<N>>, first: u8) -> Result<Self, pool::Error> {
        let count = pools.len();
        if count == 0 || count > NODES_MAX || usize::from(first) + count > 256 {
            return Err(refused("pool", count.to_string(), "a store has 1 to 64 memory nodes"));
        }
        let mut list: Vec<Node<N>> = Vec::with_capacity(count);
        let mut first_group = 0_u16;
        for (index, pool) in pools.into_iter().enumerate() {
            let bytes = pool.chunk_bytes();
            if list.first().is_some_and(|node| node.pool.chunk_bytes() != bytes) {
                let why = "the memory nodes of a store need chunks of one length: serve with the \
                           same --chunk";
                return Err(refused("chunk_bytes", bytes.to_string(), why));
            }
            // A scheme without a first chunk has no access at any offset, and is refused here.
            let first_chunk_addr = pool.first_chunk().unwrap_or_default();
            let number = first + index as u8;
            let chunks = PoolChunks::new(pool.clone(), number, first_chunk_addr)?;
            let (groups, is_gone) = (pool.groups().max(1), AtomicBool::new(false));
            list.push(Node { pool, first_chunk_addr, first_group, chunks, is_gone });
            first_group += groups;
        }
        Ok(Self { list: list.into(), first })
    }

    pub(super) fn index(&self) -> &Node<N> {
        &self.list[0]
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn get(&self, index: usize) -> &Node<N> {
        &self.list[index]
    }

    /// The memory node with this number in places, and its index.
    pub(super) fn by_number(&self, number: u8) -> Option<(usize, &Node<N>)> {
        let index = usize::from(number.checked_sub(self.first)?);
        self.list.get(index).map(|node| (index, node))
    }

    /// Number of the memory node `index` in places.
    pub(super) fn number(&self, index: usize) -> u8 {
        self.first + index as u8
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Node<N>> {
        self.list.iter()
    }

    /// The memory node of one of the heap's groups, and the group there.
    fn of_group(&self, group: GroupId) -> (usize, GroupId) {
        let is_before = |node: &Node<N>| node.first_group <= group.0;
        let index = self.list.iter().rposition(is_before).unwrap_or(0);
        (index, GroupId(group.0 - self.list[index].first_group))
    }

    /// The memory node of one of the heap's groups.
    pub(super) fn node_of(&self, group: GroupId) -> &Node<N> {
        &self.list[self.of_group(group).0]
    }
}

impl<N: Nic> ChunkSource for Nodes<N> {
    type Chunk = NodeGrant;

    fn chunk_bytes(&self) -> u64 {
        self.index().pool.chunk_bytes()
    }

    fn groups(&self) -> u16 {
        self.list.last().map_or(1, |last| last.first_group + last.pool.groups().max(1))
    }

    fn group(&self, chunk: &NodeGrant) -> GroupId {
        GroupId(self.list[usize::from(chunk.node)].first_group + chunk.grant.group.0)
    }

    fn place(&self, chunk: &NodeGrant) -> Option<heap::Place> {
        self.list[usize::from(chunk.node)].chunks.place(&chunk.grant)
    }

    async fn allocate(&self, group: GroupId) -> Result<NodeGrant, pool::Error> {
        let (index, group) = self.of_group(group);
        let grant = self.list[index].chunks.allocate(group).await?;
        Ok(NodeGrant { node: index as u8, grant })
    }

    async fn free(&self, chunk: NodeGrant) -> Result<(), pool::Error> {
        let node = &self.list[usize::from(chunk.node)];
        match node.chunks.free(chunk.grant).await {
            // The chunk is gone too.
            Err(_) if node.is_gone() => Ok(()),
            result => result,
        }
    }
}
