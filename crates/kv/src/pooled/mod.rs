//! Stores over one or several pools: remote memory and blocks of memory nodes.
//!
//! [`PoolMemory`] is both ways into a pool that a store needs: [`Reach`](crate::reach::Reach)
//! executes verbs on the grants that have the addresses, and [`Blocks`](crate::blocks::Blocks)
//! allocates from a heap over the pool's chunks.
//!
//! With several memory nodes, each stripe has one memory node for its subtables and blocks, so that
//! a block and its slot lie behind one QP. A stripe whose memory node is full or gone continues on
//! the next one.
//!
//! | module | content |
//! | --- | --- |
//! | `member` | a memory node of a store |
//! | `reach` | verbs by address |
//! | `lists` | the division of a round trip into lists of one QP |
//! | `blocks` | allocation, compaction, background work |

mod blocks;
mod lists;
mod member;
mod reach;

use std::sync::Arc;
use std::time::Duration;

use heap::{Heap, PoolChunks};
use pool::{Error, Grant, Pool};
use verbs::{Nic, executor};

use self::member::Member;

/// The memory of pools, as a store uses it. Clones share the heaps.
pub struct PoolMemory<N: Nic = pool::DefaultNic> {
    shared: Arc<Shared<N>>,
}

struct Shared<N: Nic> {
    members: Box<[Member<N>]>,
    /// Number of the first memory node in places.
    first: u8,
    settings: heap::Settings,
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

    /// The memory of several memory nodes, for a new store. The first one has the root and the
    /// directories.
    ///
    /// ```
    /// use kv::environment::System;
    /// use kv::pooled::PoolMemory;
    /// use kv::{SetOptions, Settings, Store};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let node = pool::Settings { donate_bytes: 8 << 20, ..Default::default() };
    /// let pools = vec![pool::Pool::embedded(node.clone())?, pool::Pool::embedded(node)?];
    /// let memory = PoolMemory::over(pools, heap::Settings::default())?;
    /// // Two stripes, so that each memory node has one.
    /// let settings = Settings { stripe_bits: 1, ..Settings::default() };
    /// let store = Store::create_blocking(memory.clone(), memory, System, settings)?;
    /// store.set_blocking(0, b"key", b"value", SetOptions::default())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`heap::Error::Source`] if there is no pool, there are more than 256, their chunks differ in
    /// size, or chunks are accessed by whole pages.
    pub fn over(pools: Vec<Pool<N>>, settings: heap::Settings) -> Result<Self, heap::Error> {
        let refused = |why: &str| {
            let (setting, value) = ("pool", format!("{} memory nodes", pools.len()));
            let source = Error::Setting { setting, value, why: why.into() };
            Err(heap::Error::Source { attempt: "using pools", source })
        };
        if pools.is_empty() || pools.len() > 256 {
            return refused("a store has 1 to 256 memory nodes");
        }
        if pools.iter().any(|pool| pool.chunk_bytes() != pools[0].chunk_bytes()) {
            return refused("their chunk sizes differ: serve all with the same --chunk");
        }
        let members =
            pools.into_iter().zip(0..=u8::MAX).map(|(pool, n)| Member::new(pool, n, Vec::new()));
        let members = members.collect::<Result<_, _>>()?;
        let memory = Self { shared: Arc::new(Shared { members, first: 0, settings }) };
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
        let members = Box::new([Member::new(pool, node, chunks)?]);
        Ok(Self { shared: Arc::new(Shared { members, first: node, settings }) })
    }

    /// The heap of the first memory node. `None`: the blocks of the predecessor are not known yet.
    pub fn heap(&self) -> Option<&Heap<PoolChunks<N>>> {
        self.shared.members[0].heap.get()
    }

    /// The heaps of all memory nodes.
    pub fn heaps(&self) -> impl Iterator<Item = &Heap<PoolChunks<N>>> {
        self.shared.members.iter().filter_map(|member| member.heap.get())
    }

    /// The pool of the first memory node.
    pub fn pool(&self) -> &Pool<N> {
        &self.shared.members[0].pool
    }

    /// Number of memory nodes, and how many of them are gone.
    pub fn nodes(&self) -> (usize, usize) {
        let lost = self.shared.members.iter().filter(|member| member.is_lost());
        (self.shared.members.len(), lost.count())
    }

    /// Polls the completions of all memory nodes: see [`Pool::poll`].
    pub fn poll(&self) -> usize {
        self.shared.members.iter().map(|member| member.pool.poll()).sum()
    }

    /// Waits for completions of all memory nodes: see [`Pool::park`].
    pub fn park(&self, timeout: Duration) -> usize {
        match &*self.shared.members {
            [one] => one.pool.park(timeout),
            _ => executor::park(timeout, || self.poll()),
        }
    }

    /// The memory node with this number in places.
    fn member(&self, node: u8) -> Option<&Member<N>> {
        self.shared.members.get(usize::from(node.checked_sub(self.shared.first)?))
    }

    fn adopt_all(&self, used: Vec<heap::Block>) -> Result<(), heap::Error> {
        let mut rest = used;
        for (member, node) in self.shared.members.iter().zip(self.shared.first..=u8::MAX) {
            let (own, others) = rest.into_iter().partition(|block| block.place.node() == node);
            member.adopt(self.shared.settings, own)?;
            rest = others;
        }
        match rest.first() {
            Some(heap::Block { place, bytes }) => {
                let why = "the store has no such memory node";
                Err(heap::Error::Used { place: *place, bytes: *bytes, why })
            }
            None => Ok(()),
        }
    }
}
