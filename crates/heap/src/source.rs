//! Sources of chunks: the interface, and the pool as a source.

use std::future::Future;

use pool::scheme::info::AccessKind;
use pool::{Error, Grant, GroupId, Pool};
use verbs::Nic;

use crate::place::Place;

/// Gives chunks to a heap, and takes them back.
///
/// All chunks have the same length. The futures may be dropped at any time. A chunk that is
/// allocated after the drop of its future must go back to the source; a free whose future was
/// polled once must be executed nevertheless. [`Pool`] does both.
pub trait ChunkSource: Send + Sync {
    /// The right to use a chunk, e.g. a grant.
    type Chunk: Clone + Send;

    /// Bytes of a chunk: a power of two.
    fn chunk_bytes(&self) -> u64;

    /// Number of groups.
    fn groups(&self) -> u16;

    /// The group of a chunk.
    fn group(&self, chunk: &Self::Chunk) -> GroupId;

    /// The place of a chunk's first byte. `None` if no place names it.
    fn place(&self, chunk: &Self::Chunk) -> Option<Place>;

    /// Allocates a chunk for `group`.
    fn allocate(&self, group: GroupId) -> impl Future<Output = Result<Self::Chunk, Error>> + Send;

    /// Frees a chunk. If this fails, the heap calls it again later with the same chunk; a free that
    /// finds that the chunk is free already must succeed.
    fn free(&self, chunk: Self::Chunk) -> impl Future<Output = Result<(), Error>> + Send;
}

/// The chunks of a pool.
pub struct PoolChunks<N: Nic = pool::DefaultNic> {
    pool: Pool<N>,
    node: u8,
    first_chunk_addr: u64,
}

impl<N: Nic> Clone for PoolChunks<N> {
    fn clone(&self) -> Self {
        Self { pool: self.pool.clone(), ..*self }
    }
}

impl<N: Nic> PoolChunks<N> {
    /// The chunks of `pool`, whose first chunk lies at `first_chunk_addr`. `node` is the number of
    /// the memory node in places.
    ///
    /// # Errors
    /// [`Error::Setting`] for a scheme whose chunks are accessed by whole pages, because blocks are
    /// shorter than a page, or by requests, because a place then names no address.
    pub fn new(pool: Pool<N>, node: u8, first_chunk_addr: u64) -> Result<Self, Error> {
        let why = match pool.scheme().access {
            AccessKind::OneSided => return Ok(Self { pool, node, first_chunk_addr }),
            AccessKind::Pages => "transfers whole pages, and a heap has shorter blocks",
            AccessKind::ByRpc => "has grants without addresses, by which a heap names its blocks",
        };
        Err(Error::Setting {
            setting: "scheme",
            value: pool.scheme().to_string(),
            why: format!("the scheme {why}: serve with another scheme"),
        })
    }

    /// The pool.
    pub fn pool(&self) -> &Pool<N> {
        &self.pool
    }
}

impl<N: Nic> ChunkSource for PoolChunks<N> {
    type Chunk = Grant;

    fn chunk_bytes(&self) -> u64 {
        self.pool.chunk_bytes()
    }

    fn groups(&self) -> u16 {
        self.pool.groups()
    }

    fn group(&self, chunk: &Grant) -> GroupId {
        chunk.group
    }

    fn place(&self, chunk: &Grant) -> Option<Place> {
        Place::new(self.node, chunk.addr.checked_sub(self.first_chunk_addr)?)
    }

    async fn allocate(&self, group: GroupId) -> Result<Grant, Error> {
        self.pool.allocate_in(group).await
    }

    async fn free(&self, chunk: Grant) -> Result<(), Error> {
        match self.pool.free(chunk).await {
            // An earlier free was executed although it failed here.
            Err(Error::NotYours { .. }) => Ok(()),
            result => result,
        }
    }
}
