//! A whole pool as the memory of an index that several compute nodes change (`shared-region`).
//!
//! [`RegionKeeper`] allocates the chunks of a region, and owns them as long as it lives. Because
//! the memory node clears the chunks of a connection that ends, the chunks must not belong to one
//! of the clients. [`WholePool`] is a client's way to all chunks.

use std::sync::Arc;

use pool::{Grant, GroupId, Lane, Pool};
use smallvec::SmallVec;
use verbs::Nic;
use verbs::executor::block_on;

use super::NodeGrant;
use super::lists::{LIST, Located, Part, divide, join, stopped, to_pool};
use crate::blocks::NoBlock;
use crate::environment::System;
use crate::error::Error;
use crate::layout::class;
use crate::place::{Address, Place};
use crate::reach::{Range, Reach, Step, Stopped};
use crate::region::RegionBlocks;
use crate::shared::SharedStore;

/// Lists of READs and WRITEs in flight at once for one round trip.
const LISTS: usize = 3;

/// A client of a shared index over a pool of scheme `shared-region`.
pub type SharedPoolStore<N = pool::DefaultNic> =
    SharedStore<WholePool<N>, RegionBlocks<WholePool<N>>, System>;

const NOT_SHARED: Error = Error::Setting(
    "mode `shared` needs a pool in which every compute node reaches all memory; serve with \
     `--scheme shared-region`",
);

/// Reaches all chunks of a pool by one QP. Clones share the QP and the word of life.
///
/// A thread of its own should have a `WholePool` of its own, with another group of the pool.
pub struct WholePool<N: Nic = pool::DefaultNic> {
    shared: Arc<Shared<N>>,
}

struct Shared<N: Nic> {
    pool: Pool<N>,
    whole: Grant,
    node: u8,
    life: Address,
}

impl<N: Nic> Clone for WholePool<N> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<N: Nic> WholePool<N> {
    /// All memory of `pool`, reached by the first QP of `group`. `node` is the number of the memory
    /// node in places.
    ///
    /// The call allocates one chunk for the word of life. The chunk stays allocated as long as the
    /// connection of `pool` lives.
    ///
    /// # Errors
    /// [`Error::Setting`] for another scheme than `shared-region`, and [`NoBlock::Full`] if the
    /// pool has no free chunk.
    pub async fn new(pool: Pool<N>, node: u8, group: GroupId) -> Result<Self, Error> {
        let whole = pool.whole_pool(group).ok_or(NOT_SHARED)?;
        let chunk = pool.allocate_in(group).await.map_err(no_chunk)?;
        let life = Address { node, offset: chunk.addr - whole.addr };
        Ok(Self { shared: Arc::new(Shared { pool, whole, node, life }) })
    }

    /// [`WholePool::new`], blocking.
    pub fn new_blocking(pool: Pool<N>, node: u8, group: GroupId) -> Result<Self, Error> {
        block_on(Self::new(pool, node, group))
    }

    /// The pool.
    pub fn pool(&self) -> &Pool<N> {
        &self.shared.pool
    }

    fn locate(&self, at: Address) -> Result<Located, Stopped> {
        let Shared { whole, node, .. } = &*self.shared;
        if at.node != *node {
            return Err(Stopped::Refused(format!("the pool of memory node {node} has no {at}")));
        }
        Ok((NodeGrant { node: 0, grant: *whole }, at.offset))
    }

    async fn run_list(&self, part: &mut Part<'_>) -> Result<(), Stopped> {
        let mut steps: SmallVec<[pool::Step<'_, N>; LIST]> = SmallVec::new();
        for (verb, chunk, offset) in part.iter_mut() {
            steps.push(to_pool(verb, &chunk.grant, *offset));
        }
        self.shared.pool.run(Lane(0), &mut steps).await.map_err(stopped)
    }
}

impl<N: Nic> Reach for WholePool<N> {
    type Right = ();

    async fn open(&self, _range: Range) -> Result<(), Stopped> {
        Ok(())
    }

    async fn close(&self, (): ()) {}

    async fn run(&self, steps: &mut [Step<'_>]) -> Result<(), Stopped> {
        let mut lists = SmallVec::new();
        let has_atomics =
            steps.iter().any(|step| matches!(step, Step::Cas { .. } | Step::Add { .. }));
        for step in steps.iter_mut() {
            divide(step, &mut lists, |at| self.locate(at))?;
        }
        // All lists use one QP, in order. A fence within a list orders a WRITE behind an atomic,
        // but no fence stands between two lists.
        let at_once = if has_atomics { 1 } else { LISTS };
        for lists in lists.chunks_mut(at_once) {
            match lists {
                [(part, _)] => self.run_list(part).await?,
                lists => join(lists.iter_mut().map(|(part, _)| self.run_list(part))).await?,
            }
        }
        Ok(())
    }

    fn life(&self) -> Option<Address> {
        Some(self.shared.life)
    }

    fn ordered(&self, a: Address, b: Address) -> bool {
        a.node == b.node
    }
}

/// Owns the chunks of a region. When the keeper is dropped, or its process ends, the memory node
/// clears the chunks, and the index is gone.
pub struct RegionKeeper<N: Nic = pool::DefaultNic> {
    memory: WholePool<N>,
    region: Place,
}

impl<N: Nic> RegionKeeper<N> {
    /// Creates a region of `chunks` chunks of `pool`.
    ///
    /// # Errors
    /// [`Error::Setting`] for another scheme than `shared-region` and for chunks beyond 1 MiB, and
    /// [`NoBlock::Full`] if the pool has fewer free chunks.
    pub async fn start(pool: Pool<N>, node: u8, chunks: u64) -> Result<Self, Error> {
        let bytes = pool.chunk_bytes();
        if bytes > class::SLAB_MAX.into() {
            return Err(Error::Setting("a region has chunks of at most 1 MiB; use smaller chunks"));
        }
        let memory = WholePool::new(pool, node, GroupId(0)).await?;
        let mut numbers = Vec::new();
        for _ in 0..chunks {
            let grant = memory.pool().allocate_in(GroupId(0)).await.map_err(no_chunk)?;
            numbers.push((grant.addr - memory.shared.whole.addr) / bytes);
        }
        let region = RegionBlocks::create(&memory, node, bytes as u32, &numbers).await?;
        Ok(Self { memory, region })
    }

    /// [`RegionKeeper::start`], blocking.
    pub fn start_blocking(pool: Pool<N>, node: u8, chunks: u64) -> Result<Self, Error> {
        block_on(Self::start(pool, node, chunks))
    }

    /// Place of the region, by which clients [join](SharedStore::join) its index.
    pub fn region(&self) -> Place {
        self.region
    }

    /// The keeper's way to the pool.
    pub fn memory(&self) -> &WholePool<N> {
        &self.memory
    }
}

fn no_chunk(error: pool::Error) -> Error {
    match error {
        pool::Error::OutOfMemory { .. } | pool::Error::OverBudget { .. } => NoBlock::Full.into(),
        error => Error::Stopped(stopped(error)),
    }
}
