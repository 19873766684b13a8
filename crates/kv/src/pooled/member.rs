//! A memory node of a store: its connection, and the heap over its chunks.

use std::collections::HashSet;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use heap::{Heap, PoolChunks};
use parking_lot::Mutex;
use pool::{Error, Grant, GroupId, Pool};
use verbs::Nic;

use super::lists::stopped;
use crate::place::{Address, Place, UNIT};
use crate::reach::Stopped;

/// A memory node of a store.
pub(super) struct Member<N: Nic> {
    pub pool: Pool<N>,
    /// The heap. None: the blocks of the predecessor are not known yet.
    pub heap: OnceLock<Heap<PoolChunks<N>>>,
    /// First places of the chunks that a compaction empties.
    pub leaving: Mutex<HashSet<Place>>,
    node: u8,
    chunks: PoolChunks<N>,
    /// Chunks of a predecessor, until the heap has taken them over.
    inherited: Mutex<Vec<Grant>>,
    first_chunk_addr: u64,
    is_lost: AtomicBool,
}

impl<N: Nic> Member<N> {
    /// The memory node that `pool` is connected to, as number `node` in places. `chunks`: all
    /// chunks of a predecessor.
    pub fn new(pool: Pool<N>, node: u8, chunks: Vec<Grant>) -> Result<Self, heap::Error> {
        // A scheme without a first chunk has no access at any offset, and is refused here.
        let first_chunk_addr = pool.first_chunk().unwrap_or_default();
        let source = PoolChunks::new(pool.clone(), node, first_chunk_addr)
            .map_err(|source| heap::Error::Source { attempt: "using a pool", source })?;
        Ok(Self {
            pool,
            heap: OnceLock::new(),
            leaving: Mutex::default(),
            node,
            chunks: source,
            inherited: Mutex::new(chunks),
            first_chunk_addr,
            is_lost: AtomicBool::new(false),
        })
    }

    /// Makes the heap, in which the blocks of `used` are live.
    pub fn adopt(
        &self,
        settings: heap::Settings,
        used: Vec<heap::Block>,
    ) -> Result<(), heap::Error> {
        let chunks = self.inherited.lock().clone();
        let heap = Heap::rebuild(self.chunks.clone(), settings, chunks, used)?;
        let _ = self.heap.set(heap);
        self.inherited.lock().clear();
        Ok(())
    }

    /// The grant that has `at`, and the offset of `at` in it.
    pub fn locate(&self, at: Address) -> Option<(Grant, u64)> {
        let rest = at.offset % UNIT;
        let place = heap::Place::new(at.node, at.offset - rest)?;
        if let Some((grant, offset)) = self.heap.get().and_then(|heap| heap.locate(place)) {
            return Some((grant, offset + rest));
        }
        let address = self.first_chunk_addr.checked_add(at.offset)?;
        let inherited = self.inherited.lock();
        let has_address = |grant: &&Grant| (grant.addr..grant.addr + grant.len).contains(&address);
        let grant = inherited.iter().find(has_address)?;
        Some((*grant, address - grant.addr))
    }

    /// The QP group of the `stripe`th stripe of this memory node.
    pub fn group(&self, stripe: u32) -> GroupId {
        GroupId((stripe % u32::from(self.pool.groups().max(1))) as u16)
    }

    /// True if a request has found that the memory node is gone.
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// Notes the loss of the memory node, if `error` is one.
    pub fn note(&self, error: &Error) {
        if matches!(error, Error::Gone { .. } | Error::NotAdmitted { .. }) {
            self.is_lost.store(true, Ordering::Release);
        }
    }

    /// The error of a round trip to this memory node.
    pub fn stopped(&self, error: Error) -> Stopped {
        self.note(&error);
        match self.is_lost() {
            true => Stopped::Gone { node: self.node, why: error.to_string() },
            false => stopped(error),
        }
    }
}
