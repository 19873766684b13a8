//! Stores over a pool: remote memory and blocks of a memory node.
//!
//! [`PoolMemory`] is both ways into a pool that a store needs: [`Reach`](crate::reach::Reach)
//! executes verbs on the grants that have the addresses, and [`Blocks`](crate::blocks::Blocks)
//! allocates from a heap over the pool's chunks.
//!
//! | module | content |
//! | --- | --- |
//! | `reach` | verbs by address |
//! | `lists` | the division of a round trip into lists of one QP |
//! | `blocks` | allocation, compaction, background work |

mod blocks;
mod lists;
mod reach;

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

use heap::{Heap, PoolChunks};
use parking_lot::Mutex;
use pool::{Grant, GroupId, Pool};
use verbs::Nic;

use crate::place::{Address, Place, UNIT};

/// The memory of a pool, as a store uses it. Clones share the heap.
pub struct PoolMemory<N: Nic = pool::DefaultNic> {
    shared: Arc<Shared<N>>,
}

struct Shared<N: Nic> {
    pool: Pool<N>,
    node: u8,
    heap: OnceLock<Heap<PoolChunks<N>>>,
    chunks: PoolChunks<N>,
    settings: heap::Settings,
    /// Chunks of a predecessor, until the heap has taken them over.
    inherited: Mutex<Vec<Grant>>,
    first_chunk_addr: u64,
    leaving: Mutex<HashSet<Place>>,
}

impl<N: Nic> Clone for PoolMemory<N> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<N: Nic> PoolMemory<N> {
    /// The memory of `pool`, for a new store. `node` is the number of the memory node in places.
    ///
    /// # Errors
    /// [`heap::Error::Source`] for a scheme whose chunks are accessed by whole pages.
    pub fn new(pool: Pool<N>, node: u8, settings: heap::Settings) -> Result<Self, heap::Error> {
        let memory = Self::inheriting(pool, node, settings, Vec::new())?;
        memory.adopt_all(Vec::new())?;
        Ok(memory)
    }

    /// The memory of `pool`, for a store whose owner has ended. `chunks`: all chunks of the
    /// predecessor. [`Store::open`](crate::Store::open) finds the blocks in them.
    pub fn inheriting(
        pool: Pool<N>,
        node: u8,
        settings: heap::Settings,
        chunks: Vec<Grant>,
    ) -> Result<Self, heap::Error> {
        // A scheme without a first chunk has no access at any offset, and is refused here.
        let first_chunk_addr = pool.first_chunk().unwrap_or_default();
        let source = PoolChunks::new(pool.clone(), node, first_chunk_addr)
            .map_err(|source| heap::Error::Source { attempt: "using a pool", source })?;
        let shared = Shared {
            pool,
            node,
            heap: OnceLock::new(),
            chunks: source,
            settings,
            inherited: Mutex::new(chunks),
            first_chunk_addr,
            leaving: Mutex::default(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The heap. `None`: the blocks of the predecessor are not known yet.
    pub fn heap(&self) -> Option<&Heap<PoolChunks<N>>> {
        self.shared.heap.get()
    }

    /// The pool.
    pub fn pool(&self) -> &Pool<N> {
        &self.shared.pool
    }

    fn adopt_all(&self, used: Vec<heap::Block>) -> Result<(), heap::Error> {
        let chunks = self.shared.inherited.lock().clone();
        let source = self.shared.chunks.clone();
        let heap = Heap::rebuild(source, self.shared.settings, chunks, used)?;
        let _ = self.shared.heap.set(heap);
        self.shared.inherited.lock().clear();
        Ok(())
    }

    /// The grant that has `at`, and the offset of `at` in it.
    fn locate(&self, at: Address) -> Option<(Grant, u64)> {
        let rest = at.offset % UNIT;
        let place = heap::Place::new(at.node, at.offset - rest)?;
        if let Some((grant, offset)) = self.heap().and_then(|heap| heap.locate(place)) {
            return Some((grant, offset + rest));
        }
        let address = self.shared.first_chunk_addr.checked_add(at.offset)?;
        let inherited = self.shared.inherited.lock();
        let grant = inherited.iter().find(|grant| {
            at.node == self.shared.node && (grant.addr..grant.addr + grant.len).contains(&address)
        })?;
        Some((*grant, address - grant.addr))
    }

    fn group(&self, stripe: u32) -> GroupId {
        GroupId((stripe % u32::from(self.shared.pool.groups().max(1))) as u16)
    }
}
