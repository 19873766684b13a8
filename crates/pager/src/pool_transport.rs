//! The transport over memory nodes: a chunk is a chunk of the pool, and pages move by READ and
//! WRITE.
//!
//! `GRANARY_POOL` is a comma-separated list of [`pool::Address`]. Chunks are allocated from the
//! memory nodes in round-robin order; a node that is full or gone is skipped. The pages on a node
//! that is gone are lost. Each memory node's NIC has frames of its own. The pager uses the frames
//! of the first node. Pages on their way to or from another node are copied to or from the same
//! frames of that node.
//!
//! Each lane has a QP of its own where the memory node offers three lanes, so that a READ on which
//! a thread waits does not queue behind others (OneSidedMW §5.1). With two lanes, write-back and
//! read-ahead share one.
//!
//! All memory that the transport uses lies outside the paged region: the frames and the queues are
//! shared with the NIC, the rest is the library's own heap.

use std::os::fd::{BorrowedFd, RawFd};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use pool::scheme::info::AccessKind;
use pool::{
    Address, Batch, Buffer, DefaultNic, Lane as PoolLane, MultiPool, NodeIndex, Options,
    PlacedGrant, Placement, Pool, Transfer,
};
use smallvec::SmallVec;
use verbs::{DmaMemory, Nic};

use crate::Error;
use crate::sys::PAGE_BYTES;
use crate::transport::{
    ChunkHandle, Direction, FrameMemory, InFlight, Lane, PageIo, Ticket, Transport, TransportError,
    TransportStats,
};

mod by_requests;
mod lent;

pub(crate) use lent::connect_with_assist;

/// Longest time that a process waits for a free client entry at a memory node that is full, and the
/// time between two attempts.
const FULL_RETRY_TIMEOUT: Duration = Duration::from_secs(60);
const FULL_RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// The memory node whose frames the pager uses.
const FRAMES_OF: NodeIndex = NodeIndex(0);

/// Longest list of transfers that is posted without an allocation for the list.
const STACK_TRANSFERS: usize = 64;

/// A transport over one or several memory nodes.
pub struct PoolTransport<N: Nic> {
    nodes: Arc<Nodes<N>>,
    frames: u32,
    chunks: RwLock<Chunks>,
    /// The scheme's access is not one-sided: each page is a request ([`by_requests`]).
    by_requests: bool,
}

/// Memory nodes. Shared with the transfers in flight.
struct Nodes<N: Nic> {
    pools: MultiPool<N>,
    nodes: Vec<Node<N>>,
    /// Addresses of the memory nodes, for messages.
    names: Vec<String>,
}

/// A memory node, and the frames that its NIC accesses.
struct Node<N: Nic> {
    pool: Pool<N>,
    frames: Buffer<N>,
}

/// Grants by chunk handle, and a free list of handles.
#[derive(Default)]
struct Chunks {
    grants: Vec<Option<PlacedGrant>>,
    free: Vec<u32>,
}

/// Connects to memory nodes, with NICs that the addresses select, and allocates `frames` frames
/// for each.
pub fn connect(nodes: &[Address], frames: u32) -> Result<PoolTransport<DefaultNic>, Error> {
    connect_with(nodes, frames, &Options::default())
}

/// As [`connect`], with options of the connection to each memory node.
pub fn connect_with(
    nodes: &[Address],
    frames: u32,
    options: &Options,
) -> Result<PoolTransport<DefaultNic>, Error> {
    PoolTransport::over(connect_with_retry(|| connect_all(nodes, options))?, nodes, frames)
}

/// As [`connect`]. `show` is called with the memfd of the frames of each memory node, before the
/// NIC's process seals it.
pub(crate) fn connect_showing(
    nodes: &[Address],
    frames: u32,
    show: &mut dyn FnMut(BorrowedFd<'_>),
) -> Result<PoolTransport<DefaultNic>, Error> {
    let pools = connect_with_retry(|| connect_all(nodes, &Options::default()))?;
    PoolTransport::over_buffers(pools, nodes, frames, |pool, bytes| pool.buffer_shown(bytes, show))
}

impl<N: Nic> PoolTransport<N> {
    /// A transport over `pools`, which are connected to `nodes`, with `frames` frames for
    /// each.
    pub fn over(pools: MultiPool<N>, nodes: &[Address], frames: u32) -> Result<Self, Error> {
        Self::over_buffers(pools, nodes, frames, |pool, bytes| pool.buffer(bytes))
    }

    /// As [`PoolTransport::over`], with frames that `buffer` allocates at each memory node.
    fn over_buffers(
        pools: MultiPool<N>,
        nodes: &[Address],
        frames: u32,
        mut buffer: impl FnMut(&Pool<N>, usize) -> Result<Buffer<N>, pool::Error>,
    ) -> Result<Self, Error> {
        let chunk = pools.chunk_bytes();
        if chunk < PAGE_BYTES as u64 {
            return Err(Error::Setting {
                name: "GRANARY_POOL",
                value: Address::write_list(nodes),
                why: format!(
                    "the memory node's chunks have {chunk} bytes, less than a page ({PAGE_BYTES}); \
                     start it with `granary serve --chunk 4KiB` or more (best: 1MiB)"
                ),
            });
        }
        let names = nodes.iter().map(Address::to_string).collect();
        let mut node = |index| -> Result<Node<N>, Error> {
            let pool = pools.node(NodeIndex(index));
            let frames = buffer(&pool, frames as usize * PAGE_BYTES)?;
            Ok(Node { pool, frames })
        };
        let nodes = (0..nodes.len() as u16).map(&mut node).collect::<Result<_, _>>()?;
        let nodes: Vec<Node<N>> = nodes;
        let by_requests =
            nodes.iter().any(|node| node.pool.scheme().access != AccessKind::OneSided);
        let nodes = Arc::new(Nodes { pools, nodes, names });
        Ok(Self { nodes, frames, chunks: RwLock::default(), by_requests })
    }

    /// Address of a chunk at its memory node.
    pub(crate) fn address(&self, chunk: ChunkHandle) -> u64 {
        self.chunks().grant(chunk).grant.addr
    }

    /// The frames that the first memory node's NIC accesses.
    pub(crate) fn frame_memory(&self) -> &DmaMemory {
        self.nodes.nodes[0].frames.memory()
    }

    /// Checks whether the first memory node is known to have ended. Never blocks.
    ///
    /// # Errors
    /// [`TransportError::Gone`].
    pub(crate) fn check_alive(&self) -> Result<(), TransportError> {
        self.nodes.nodes[0].pool.control().check_alive().map_err(gone)
    }

    /// The connection to the first memory node's control thread, if there is one.
    pub(crate) fn control(&self) -> Option<RawFd> {
        self.nodes.nodes[0].pool.control().descriptors().first().copied()
    }

    fn chunks(&self) -> RwLockReadGuard<'_, Chunks> {
        self.chunks.read().expect("no thread panics while it holds this lock")
    }

    fn chunks_mut(&self) -> RwLockWriteGuard<'_, Chunks> {
        self.chunks.write().expect("no thread panics while it holds this lock")
    }

    fn lane(&self, lane: Lane) -> PoolLane {
        let lanes = self.nodes.nodes[0].pool.lanes();
        let lane = match lane {
            Lane::Demand => 0,
            Lane::Prefetch => 1,
            Lane::WriteBack => 2,
        };
        PoolLane(lane.min(lanes.saturating_sub(1)))
    }
}

impl Chunks {
    fn grant(&self, chunk: ChunkHandle) -> &PlacedGrant {
        self.grants[chunk.0 as usize].as_ref().expect("the pager uses only chunks that it holds")
    }

    fn add(&mut self, grant: PlacedGrant) -> ChunkHandle {
        let handle = match self.free.pop() {
            Some(handle) => handle,
            None => {
                self.grants.push(None);
                self.grants.len() as u32 - 1
            }
        };
        self.grants[handle as usize] = Some(grant);
        ChunkHandle(handle)
    }

    fn remove(&mut self, chunk: ChunkHandle) -> PlacedGrant {
        let grant = *self.grant(chunk);
        self.grants[chunk.0 as usize] = None;
        self.free.push(chunk.0);
        grant
    }
}

impl<N: Nic> Nodes<N> {
    /// Copies outgoing pages from the pager's frames to the frames that the memory node's NIC
    /// accesses.
    fn copy_out(&self, index: NodeIndex, io: &PageIo) {
        self.copy((FRAMES_OF, index), io);
    }

    /// Copies arrived pages from the frames that the memory node's NIC accesses to the pager's
    /// frames.
    fn copy_in(&self, index: NodeIndex, ios: &[PageIo]) {
        ios.iter().for_each(|io| self.copy((index, FRAMES_OF), io));
    }

    fn copy(&self, (from, to): (NodeIndex, NodeIndex), io: &PageIo) {
        if from == to {
            return;
        }
        let [from, to] = [from, to].map(|index| self.nodes[index.0 as usize].frames.memory());
        let mut page = [0; PAGE_BYTES];
        for at in 0..usize::from(io.pages) {
            let offset = (io.frame as usize + at) * PAGE_BYTES;
            from.read(offset, &mut page);
            to.write(offset, &page);
        }
    }

    /// Reports the failure to the pool and converts the error. A page that cannot be moved is lost,
    /// whatever the reason.
    fn failed(&self, index: NodeIndex, error: pool::Error) -> TransportError {
        self.pools.failed(index, &error);
        gone(error)
    }
}

/// Transfers in flight at one memory node.
struct NodeBatch<N: Nic> {
    node: NodeIndex,
    /// READs whose pages are copied to the pager's frames when the batch is complete.
    reads: Vec<PageIo>,
    batch: Batch<N>,
}

/// Transfers in flight at several memory nodes. Dropping it waits for them.
struct Batches<N: Nic> {
    nodes: Arc<Nodes<N>>,
    batches: SmallVec<[NodeBatch<N>; 1]>,
}

impl<N: Nic> Batches<N> {
    fn finish(&mut self) -> Result<(), TransportError> {
        let mut result = Ok(());
        for NodeBatch { node, reads, batch } in self.batches.drain(..) {
            match batch.wait() {
                Ok(()) => self.nodes.copy_in(node, &reads),
                Err(error) => result = result.and(Err(self.nodes.failed(node, error))),
            }
        }
        result
    }
}

impl<N: Nic> InFlight for Batches<N> {
    fn poll(&mut self) -> Result<bool, TransportError> {
        while let Some(NodeBatch { node, reads, batch }) = self.batches.last_mut() {
            if !batch.poll().map_err(|error| self.nodes.failed(*node, error))? {
                return Ok(false);
            }
            self.nodes.copy_in(*node, reads);
            self.batches.pop();
        }
        Ok(true)
    }

    fn wait(mut self: Box<Self>) -> Result<(), TransportError> {
        self.finish()
    }
}

impl<N: Nic> Drop for Batches<N> {
    fn drop(&mut self) {
        // Without a receiver of the pages, an error has no consequence.
        let _ = self.finish();
    }
}

impl<N: Nic> Transport for PoolTransport<N> {
    fn chunk_bytes(&self) -> usize {
        self.nodes.pools.chunk_bytes() as usize
    }

    fn frames(&self) -> FrameMemory {
        let frames = &self.nodes.nodes[FRAMES_OF.0 as usize].frames;
        FrameMemory { base: frames.memory().as_ptr(), frames: self.frames }
    }

    fn allocate_chunk(&self) -> Result<ChunkHandle, TransportError> {
        if self.by_requests {
            return self.allocate_by_requests();
        }
        let grant = self.nodes.pools.allocate_blocking().map_err(not_allocated)?;
        Ok(self.chunks_mut().add(grant))
    }

    fn allocate_chunks(
        &self,
        count: usize,
        chunks: &mut Vec<ChunkHandle>,
    ) -> Result<(), TransportError> {
        // A scheme without one-sided access allocates without a request, at the first WRITE.
        if count == 1 || self.by_requests {
            chunks.push(self.allocate_chunk()?);
            return Ok(());
        }
        let grants = self.nodes.pools.allocate_many_blocking(count).map_err(not_allocated)?;
        let mut held = self.chunks_mut();
        chunks.extend(grants.into_iter().map(|grant| held.add(grant)));
        Ok(())
    }

    fn used_percent(&self) -> u8 {
        self.nodes.pools.used_percent()
    }

    fn origin(&self, chunk: ChunkHandle) -> String {
        let index = self.chunks().grant(chunk).node;
        format!("the memory node {}", self.nodes.names[usize::from(index.0)])
    }

    fn free_chunk(&self, chunk: ChunkHandle) -> Result<(), TransportError> {
        let grant = self.chunks_mut().remove(chunk);
        freed(self.nodes.pools.free_blocking(grant))
    }

    fn free_chunks(&self, chunks: &[ChunkHandle]) -> Result<(), TransportError> {
        if let [chunk] = chunks {
            return self.free_chunk(*chunk);
        }
        let grants: SmallVec<[PlacedGrant; STACK_TRANSFERS]> = {
            let mut held = self.chunks_mut();
            chunks.iter().map(|chunk| held.remove(*chunk)).collect()
        };
        let failed = self.nodes.pools.free_many_blocking(&grants);
        failed.into_iter().try_for_each(|error| freed(Err(error)))
    }

    fn post(
        &self,
        lane: Lane,
        direction: Direction,
        ios: &[PageIo],
    ) -> Result<Ticket, TransportError> {
        if self.by_requests {
            return self.move_by_requests(direction, ios).map(|()| Ticket::complete());
        }
        let (nodes, lane) = (&self.nodes, self.lane(lane));
        let mut batches = SmallVec::new();
        // Held while the transfers are posted, which copies nothing of the grants.
        let chunks = self.chunks();
        for (index, node) in (0..).map(NodeIndex).zip(&nodes.nodes) {
            let here = |io: &&PageIo| chunks.grant(io.chunk).node == index;
            let transfer = |io| transfer_of(io, &chunks.grant(io.chunk).grant);
            let transfers: SmallVec<[Transfer<'_>; STACK_TRANSFERS]> =
                ios.iter().filter(here).map(transfer).collect();
            if transfers.is_empty() {
                continue;
            }
            let is_copied = index != FRAMES_OF;
            let copied = || ios.iter().filter(|io| is_copied && here(io)).copied();
            let (batch, reads) = match direction {
                Direction::Read => {
                    (node.pool.start_read_batch(&transfers, &node.frames, lane), copied().collect())
                }
                Direction::Write => {
                    copied().for_each(|io| nodes.copy_out(index, &io));
                    (node.pool.start_write_batch(&transfers, &node.frames, lane), Vec::new())
                }
            };
            let batch = batch.map_err(|error| nodes.failed(index, error))?;
            batches.push(NodeBatch { node: index, reads, batch });
        }
        Ok(Ticket::in_flight(Box::new(Batches { nodes: nodes.clone(), batches })))
    }

    /// One run of pages, on which a thread waits, is moved without an allocation.
    fn run(&self, lane: Lane, direction: Direction, ios: &[PageIo]) -> Result<(), TransportError> {
        let [io] = ios else { return self.post(lane, direction, ios)?.wait() };
        if self.by_requests {
            return self.move_by_requests(direction, ios);
        }
        let PlacedGrant { node: index, grant } = *self.chunks().grant(io.chunk);
        let (node, lane) = (&self.nodes.nodes[index.0 as usize], self.lane(lane));
        let transfer = transfer_of(io, &grant);
        let posted = match direction {
            Direction::Write => {
                self.nodes.copy_out(index, io);
                node.pool.write_from(&transfer, &node.frames, lane)
            }
            Direction::Read => node.pool.read_into(&transfer, &node.frames, lane),
        };
        posted
            .and_then(|operation| operation.wait())
            .map_err(|error| self.nodes.failed(index, error))?;
        if direction == Direction::Read {
            self.nodes.copy_in(index, ios);
        }
        Ok(())
    }

    fn stats(&self) -> TransportStats {
        let mut stats = TransportStats::default();
        for Node { pool, .. } in &self.nodes.nodes {
            let allocations = pool.stats().allocations;
            match pool.scheme().needs_cpu() {
                false => stats.allocations_by_nic += allocations,
                true => stats.allocations_by_cpu += allocations,
            }
        }
        stats
    }

    fn descriptors(&self, keep: &mut Vec<i32>) {
        for Node { pool, .. } in &self.nodes.nodes {
            keep.extend(pool.descriptors());
        }
    }
}

/// Connects to memory nodes. While a node is full, retries for [`FULL_RETRY_TIMEOUT`], because
/// other processes of the program may end and free their client entries.
fn connect_with_retry(
    connect: impl Fn() -> Result<MultiPool, pool::Error>,
) -> Result<MultiPool, pool::Error> {
    let start = Instant::now();
    loop {
        match connect() {
            Err(pool::Error::Full { .. }) if start.elapsed() < FULL_RETRY_TIMEOUT => {
                std::thread::sleep(FULL_RETRY_INTERVAL);
            }
            other => return other,
        }
    }
}

fn connect_all(nodes: &[Address], options: &Options) -> Result<MultiPool, pool::Error> {
    MultiPool::connect(nodes, options.clone(), Placement::RoundRobin)
}

fn transfer_of<'a>(io: &PageIo, grant: &'a pool::Grant) -> Transfer<'a> {
    Transfer {
        grant,
        offset: u64::from(io.offset_bytes),
        buffer_offset: io.frame as usize * PAGE_BYTES,
        len: u32::from(io.pages) * PAGE_BYTES as u32,
    }
}

fn not_allocated(error: pool::Error) -> TransportError {
    match error {
        // A client over its time budget gets no chunk either; its chunks stay usable.
        pool::Error::OutOfMemory { .. } | pool::Error::OverBudget { .. } => TransportError::Full,
        other => gone(other),
    }
}

fn freed(result: Result<(), pool::Error>) -> Result<(), TransportError> {
    match result {
        // Over the budget, the memory node keeps the chunk for this client until it serves the
        // client again, or until the client disconnects. No page is lost.
        Ok(()) | Err(pool::Error::OverBudget { .. }) => Ok(()),
        Err(other) => Err(gone(other)),
    }
}

/// Converts an error of the pool. A page that cannot be moved is lost, whatever the reason.
fn gone(error: pool::Error) -> TransportError {
    let text = error.to_string();
    match error {
        pool::Error::Unanswered { .. } => TransportError::Unanswered(text),
        _ => TransportError::Gone(text),
    }
}
