//! The transport over memory nodes: a chunk is a chunk of the pool, and pages move by READ and
//! WRITE.
//!
//! `GRANARY_POOL` is a comma-separated list of [`pool::Address`]. Chunks are allocated from the
//! memory nodes in round-robin order; a node that is full or gone is skipped. The pages on a node
//! that is gone are lost. Each memory node's NIC has staging memory of its own. The pager uses the
//! staging memory of the first node. Pages on their way to or from another node are copied to or
//! from the same frames of that node's staging memory.
//!
//! A page on which a thread waits goes through lane 0 and batches go through lane 1, so that a READ
//! does not queue behind a write-back (OneSidedMW §5.1).
//!
//! All memory that the transport uses lies outside the paged region: the staging memory and the
//! queues are shared with the NIC, the rest is the library's own heap.

use std::sync::RwLock;
use std::time::{Duration, Instant};

use pool::{
    Address, Batch, Buffer, DefaultNic, Grant, Lane as PoolLane, MultiPool, NodeIndex, Options,
    PlacedGrant, Placement, Pool, Transfer,
};
use verbs::{DmaMemory, Nic};

use crate::Error;
use crate::sys::PAGE_BYTES;
use crate::transport::{
    ChunkHandle, Lane, PageIo, StagingMemory, Transport, TransportError, TransportStats,
};

/// Longest time that a process waits for a free client entry at a memory node that is full, and the
/// time between two attempts.
const FULL_RETRY_TIMEOUT: Duration = Duration::from_secs(60);
const FULL_RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// A transport over one or several memory nodes.
pub struct PoolTransport<N: Nic> {
    pools: MultiPool<N>,
    nodes: Vec<Node<N>>,
    frames: u32,
    chunks: RwLock<Chunks>,
}

/// A memory node, and the staging memory that its NIC accesses.
struct Node<N: Nic> {
    pool: Pool<N>,
    staging: Buffer<N>,
}

/// Grants by chunk handle, and a free list of handles.
#[derive(Default)]
struct Chunks {
    grants: Vec<Option<PlacedGrant>>,
    free: Vec<u32>,
}

/// Connects to memory nodes, with NICs that the addresses select, and allocates `frames` frames of
/// staging for each.
pub fn connect(nodes: &[Address], frames: u32) -> Result<PoolTransport<DefaultNic>, Error> {
    PoolTransport::over(connect_with_retry(nodes)?, nodes, frames)
}

impl<N: Nic> PoolTransport<N> {
    /// A transport over `pools`, which are connected to `nodes`, with `frames` frames of staging
    /// for each.
    pub fn over(pools: MultiPool<N>, nodes: &[Address], frames: u32) -> Result<Self, Error> {
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
        let node = |index| -> Result<Node<N>, Error> {
            let pool = pools.node(NodeIndex(index));
            let staging = pool.buffer(frames as usize * PAGE_BYTES)?;
            Ok(Node { pool, staging })
        };
        let nodes = (0..nodes.len() as u16).map(node).collect::<Result<_, _>>()?;
        Ok(Self { pools, nodes, frames, chunks: RwLock::default() })
    }

    /// Address of a chunk at its memory node.
    pub(crate) fn address(&self, chunk: ChunkHandle) -> u64 {
        self.grant(chunk).grant.addr
    }

    /// The staging memory that the first memory node's NIC accesses.
    pub(crate) fn staging_memory(&self) -> &DmaMemory {
        self.nodes[0].staging.memory()
    }

    /// Checks whether the first memory node is known to have ended. Never blocks.
    ///
    /// # Errors
    /// [`TransportError::Gone`].
    pub(crate) fn check_alive(&self) -> Result<(), TransportError> {
        self.nodes[0].pool.control().check_alive().map_err(gone)
    }

    fn grant(&self, chunk: ChunkHandle) -> PlacedGrant {
        let chunks = self.chunks.read().expect("no thread panics while it holds this lock");
        chunks.grants[chunk.0 as usize].expect("the pager uses only chunks that it holds")
    }

    fn transfer(&self, lane: Lane, ios: &[PageIo], write: bool) -> Result<(), TransportError> {
        let [io] = ios else {
            return self
                .start(lane, ios, write)?
                .into_iter()
                .try_for_each(|part| self.wait_part(part));
        };
        let PlacedGrant { node: index, grant } = self.grant(io.chunk);
        let (node, lane) = (&self.nodes[index.0 as usize], pool_lane(lane));
        let transfer = transfer_of(io, &grant);
        let done = if write {
            self.copy_out(index, ios);
            node.pool.write_from(&transfer, &node.staging, lane).and_then(|o| o.wait())
        } else {
            node.pool.read_into(&transfer, &node.staging, lane).and_then(|o| o.wait())
        };
        done.map_err(|e| self.failed(index, e))?;
        if !write {
            self.copy_in(index, ios);
        }
        Ok(())
    }

    /// Starts transfers, in one batch per memory node.
    fn start(
        &self,
        lane: Lane,
        ios: &[PageIo],
        write: bool,
    ) -> Result<Vec<NodeBatch<'_, N>>, TransportError> {
        let placed: Vec<PlacedGrant> = ios.iter().map(|io| self.grant(io.chunk)).collect();
        let mut parts = Vec::new();
        for (index, node) in (0..).map(NodeIndex).zip(&self.nodes) {
            let here = ios.iter().zip(&placed).filter(|(_, placed)| placed.node == index);
            let (ios, grants): (Vec<PageIo>, Vec<Grant>) =
                here.map(|(io, placed)| (*io, placed.grant)).unzip();
            if ios.is_empty() {
                continue;
            }
            let (transfers, lane) = (transfers_of(&ios, &grants), pool_lane(lane));
            let batch = if write {
                self.copy_out(index, &ios);
                node.pool.start_write_batch(&transfers, &node.staging, lane)
            } else {
                node.pool.start_read_batch(&transfers, &node.staging, lane)
            };
            let batch = batch.map_err(|e| self.failed(index, e))?;
            parts.push(NodeBatch { node: index, ios: if write { Vec::new() } else { ios }, batch });
        }
        Ok(parts)
    }

    /// Waits for the batch of one memory node.
    fn wait_part(&self, part: NodeBatch<'_, N>) -> Result<(), TransportError> {
        part.batch.wait().map_err(|e| self.failed(part.node, e))?;
        self.copy_in(part.node, &part.ios);
        Ok(())
    }

    /// Copies outgoing pages from the pager's frames to the frames that the memory node's NIC
    /// accesses.
    fn copy_out(&self, index: NodeIndex, ios: &[PageIo]) {
        self.copy((NodeIndex(0), index), ios);
    }

    /// Copies arrived pages from the frames that the memory node's NIC accesses to the pager's
    /// frames.
    fn copy_in(&self, index: NodeIndex, ios: &[PageIo]) {
        self.copy((index, NodeIndex(0)), ios);
    }

    fn copy(&self, (from, to): (NodeIndex, NodeIndex), ios: &[PageIo]) {
        if from == to {
            return;
        }
        let [from, to] = [from, to].map(|index| self.nodes[index.0 as usize].staging.memory());
        let mut page = [0; PAGE_BYTES];
        for io in ios {
            for at in 0..usize::from(io.pages) {
                let offset = (io.frame as usize + at) * PAGE_BYTES;
                from.read(offset, &mut page);
                to.write(offset, &page);
            }
        }
    }

    /// Reports the failure to the pool and converts the error. A page that cannot be moved is lost,
    /// whatever the reason.
    fn failed(&self, index: NodeIndex, error: pool::Error) -> TransportError {
        self.pools.failed(index, &error);
        gone(error)
    }
}

/// Batch in flight at one memory node.
struct NodeBatch<'a, N: Nic> {
    node: NodeIndex,
    /// Reads whose pages are copied to the pager's frames when the batch is complete.
    ios: Vec<PageIo>,
    batch: Batch<'a, N>,
}

impl<N: Nic> Transport for PoolTransport<N> {
    fn chunk_bytes(&self) -> usize {
        self.pools.chunk_bytes() as usize
    }

    fn staging(&self) -> StagingMemory {
        let staging = &self.nodes[0].staging;
        StagingMemory { base: staging.memory().as_ptr(), frames: self.frames }
    }

    fn allocate_chunk(&self) -> Result<ChunkHandle, TransportError> {
        let grant = self.pools.allocate_blocking().map_err(|error| match error {
            // A client over its time budget gets no chunk either; its chunks stay usable.
            pool::Error::OutOfMemory { .. } | pool::Error::OverBudget { .. } => {
                TransportError::Full
            }
            other => gone(other),
        })?;
        let mut chunks = self.chunks.write().expect("no thread panics while it holds this lock");
        let handle = match chunks.free.pop() {
            Some(handle) => handle,
            None => {
                chunks.grants.push(None);
                chunks.grants.len() as u32 - 1
            }
        };
        chunks.grants[handle as usize] = Some(grant);
        Ok(ChunkHandle(handle))
    }

    fn free_chunk(&self, chunk: ChunkHandle) -> Result<(), TransportError> {
        let grant = self.grant(chunk);
        {
            let mut chunks =
                self.chunks.write().expect("no thread panics while it holds this lock");
            chunks.grants[chunk.0 as usize] = None;
            chunks.free.push(chunk.0);
        }
        match self.pools.free_blocking(grant) {
            // Over the budget, the memory node keeps the chunk for this client until it serves the
            // client again, or until the client disconnects. No page is lost.
            Ok(()) | Err(pool::Error::OverBudget { .. }) => Ok(()),
            Err(other) => Err(gone(other)),
        }
    }

    fn read(&self, lane: Lane, ios: &[PageIo]) -> Result<(), TransportError> {
        self.transfer(lane, ios, false)
    }

    fn read_parts(
        &self,
        lane: Lane,
        parts: &[Vec<PageIo>],
        arrived: &mut dyn FnMut(usize),
    ) -> Result<(), TransportError> {
        let start = |ios: &Vec<PageIo>| self.start(lane, ios, false);
        let started: Vec<_> = parts.iter().map(start).collect::<Result<_, _>>()?;
        for (number, parts) in started.into_iter().enumerate() {
            parts.into_iter().try_for_each(|part| self.wait_part(part))?;
            arrived(number);
        }
        Ok(())
    }

    fn write(&self, lane: Lane, ios: &[PageIo]) -> Result<(), TransportError> {
        self.transfer(lane, ios, true)
    }

    fn stats(&self) -> TransportStats {
        let mut stats = TransportStats::default();
        for Node { pool, .. } in &self.nodes {
            let allocations = pool.stats().allocations;
            match pool.scheme().needs_cpu() {
                false => stats.allocations_by_nic += allocations,
                true => stats.allocations_by_cpu += allocations,
            }
        }
        stats
    }

    fn descriptors(&self, keep: &mut Vec<i32>) {
        for Node { pool, .. } in &self.nodes {
            keep.extend(pool.descriptors());
        }
    }
}

/// Connects to memory nodes. While a node is full, retries for [`FULL_RETRY_TIMEOUT`], because
/// other processes of the program may end and free their client entries.
fn connect_with_retry(nodes: &[Address]) -> Result<MultiPool, pool::Error> {
    let start = Instant::now();
    loop {
        match MultiPool::connect(nodes, Options::default(), Placement::RoundRobin) {
            Err(pool::Error::Full { .. }) if start.elapsed() < FULL_RETRY_TIMEOUT => {
                std::thread::sleep(FULL_RETRY_INTERVAL);
            }
            other => return other,
        }
    }
}

fn pool_lane(lane: Lane) -> PoolLane {
    match lane {
        Lane::Sync => PoolLane(0),
        Lane::Async => PoolLane(1),
    }
}

fn transfer_of<'a>(io: &PageIo, grant: &'a Grant) -> Transfer<'a> {
    Transfer {
        grant,
        offset: u64::from(io.offset_bytes),
        buffer_offset: io.frame as usize * PAGE_BYTES,
        len: u32::from(io.pages) * PAGE_BYTES as u32,
    }
}

fn transfers_of<'a>(ios: &[PageIo], grants: &'a [Grant]) -> Vec<Transfer<'a>> {
    ios.iter().zip(grants).map(|(io, grant)| transfer_of(io, grant)).collect()
}

/// Converts an error of the pool. A page that cannot be moved is lost, whatever the reason.
fn gone(error: pool::Error) -> TransportError {
    TransportError::Gone(error.to_string())
}
