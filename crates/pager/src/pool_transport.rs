//! The transport over memory nodes: chunks are the pool's chunks, pages are READ and WRITTEN.
//!
//! `GRANARY_POOL` names them: [`pool::Address`], several behind commas. Chunks go to each in turn, and to the others
//! when one is full or gone; the pages of one that is gone are lost. Each memory node's NIC has staging memory of
//! its own: the first one's is the pager's, and pages on their way to and from others are copied into the same
//! frames of theirs. A page that somebody waits
//! for goes through lane 0, batches through lane 1, so that a READ does not queue behind a
//! write-back (OneSidedMW §5.1).
//!
//! Everything that this needs lies outside the paged region: the staging memory and the queues are
//! shared with the NIC, the rest is the library's own heap.

use std::sync::RwLock;
use std::time::{Duration, Instant};

use fabric::soft::SoftNic;
use pool::{
    Address, Batch, Buffer, Grant, Lane as PoolLane, NodeIndex, Options, Placed, Placement, Pool,
    Pools, Transfer,
};

use crate::Error;
use crate::sys::PAGE_BYTES;
use crate::transport::{
    ChunkHandle, Lane, PageIo, StagingMemory, Transport, TransportError, TransportStats,
};

/// How long a process waits for a place at a memory node that is full, and the time between two
/// attempts.
const PLACE_PATIENCE: Duration = Duration::from_secs(60);
const PLACE_PAUSE: Duration = Duration::from_millis(200);

/// A transport over one memory node or several.
pub struct PoolTransport {
    pools: Pools,
    nodes: Vec<Node>,
    frames: u32,
    chunks: RwLock<Chunks>,
}

/// A memory node, and the staging memory that its NIC reaches.
struct Node {
    pool: Pool,
    staging: Buffer<SoftNic>,
}

/// Grants by handle.
#[derive(Default)]
struct Chunks {
    grants: Vec<Option<Placed>>,
    free: Vec<u32>,
}

impl PoolTransport {
    /// Connects to memory nodes with `frames` frames of staging.
    pub fn connect(nodes: &[Address], frames: u32) -> Result<Self, Error> {
        let pools = connect_in_time(nodes)?;
        let chunk = pools.chunk_bytes();
        if chunk < PAGE_BYTES as u64 {
            return Err(Error::Setting {
                name: "GRANARY_POOL",
                value: Address::write_list(nodes),
                why: format!(
                    "its chunks have {chunk} bytes, less than a page of {PAGE_BYTES}: serve with \
                     --chunk 4KiB or more, best 1MiB"
                ),
            });
        }
        let node = |index| -> Result<Node, Error> {
            let pool = pools.node(NodeIndex(index));
            let staging = pool.buffer(frames as usize * PAGE_BYTES)?;
            Ok(Node { pool, staging })
        };
        let nodes = (0..nodes.len() as u16).map(node).collect::<Result<_, _>>()?;
        Ok(Self { pools, nodes, frames, chunks: RwLock::default() })
    }

    fn grant(&self, chunk: ChunkHandle) -> Placed {
        let chunks = self.chunks.read().expect("nobody panics with the chunks locked");
        chunks.grants[chunk.0 as usize].expect("the pager names chunks that it holds")
    }

    fn transfer(&self, lane: Lane, ios: &[PageIo], write: bool) -> Result<(), TransportError> {
        let [io] = ios else {
            return self.start(lane, ios, write)?.into_iter().try_for_each(|part| self.end(part));
        };
        let Placed { node: index, grant } = self.grant(io.chunk);
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

    /// Starts transfers, those of each memory node together.
    fn start(
        &self,
        lane: Lane,
        ios: &[PageIo],
        write: bool,
    ) -> Result<Vec<Part<'_>>, TransportError> {
        let placed: Vec<Placed> = ios.iter().map(|io| self.grant(io.chunk)).collect();
        let mut parts = Vec::new();
        for (index, node) in (0..).map(NodeIndex).zip(&self.nodes) {
            let here = ios.iter().zip(&placed).filter(|(_, placed)| placed.node == index);
            let (ios, grants): (Vec<PageIo>, Vec<Grant>) =
                here.map(|(io, placed)| (*io, placed.grant)).unzip();
            if ios.is_empty() {
                continue;
            }
            let (all, lane) = (transfers_of(&ios, &grants), pool_lane(lane));
            let batch = if write {
                self.copy_out(index, &ios);
                node.pool.start_write_batch(&all, &node.staging, lane)
            } else {
                node.pool.start_read_batch(&all, &node.staging, lane)
            };
            let batch = batch.map_err(|e| self.failed(index, e))?;
            parts.push(Part { node: index, ios: if write { Vec::new() } else { ios }, batch });
        }
        Ok(parts)
    }

    /// Waits for them.
    fn end(&self, part: Part<'_>) -> Result<(), TransportError> {
        part.batch.wait().map_err(|e| self.failed(part.node, e))?;
        self.copy_in(part.node, &part.ios);
        Ok(())
    }

    /// From the pager's frames to those that a memory node's NIC reaches.
    fn copy_out(&self, index: NodeIndex, ios: &[PageIo]) {
        self.copy((NodeIndex(0), index), ios);
    }

    /// And back.
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

    /// A page that cannot be moved is lost, whatever the reason.
    fn failed(&self, index: NodeIndex, error: pool::Error) -> TransportError {
        self.pools.failed(index, &error);
        gone(error)
    }
}

/// Transfers under way, of one memory node.
struct Part<'a> {
    node: NodeIndex,
    /// What is to be copied when they are there.
    ios: Vec<PageIo>,
    batch: Batch<'a, SoftNic>,
}

impl Transport for PoolTransport {
    fn chunk_bytes(&self) -> usize {
        self.pools.chunk_bytes() as usize
    }

    fn staging(&self) -> StagingMemory {
        let staging = &self.nodes[0].staging;
        StagingMemory { base: staging.memory().as_ptr(), frames: self.frames }
    }

    fn allocate_chunk(&self) -> Result<ChunkHandle, TransportError> {
        let grant = self.pools.allocate_blocking().map_err(|error| match error {
            // Over its budget it gets no chunk either, and what it has stays usable.
            pool::Error::OutOfMemory { .. } | pool::Error::OverBudget { .. } => {
                TransportError::Full
            }
            other => gone(other),
        })?;
        let mut chunks = self.chunks.write().expect("nobody panics with the chunks locked");
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
            let mut chunks = self.chunks.write().expect("nobody panics with the chunks locked");
            chunks.grants[chunk.0 as usize] = None;
            chunks.free.push(chunk.0);
        }
        match self.pools.free_blocking(grant) {
            // The memory node keeps it for us until it listens again, or until we leave: no page is
            // lost.
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
            parts.into_iter().try_for_each(|part| self.end(part))?;
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
            match pool.welcome().scheme.needs_cpu() {
                false => stats.allocations_by_nic += allocations,
                true => stats.allocations_by_cpu += allocations,
            }
        }
        stats
    }

    fn descriptors(&self, keep: &mut Vec<i32>) {
        for Node { pool, .. } in &self.nodes {
            keep.extend(pool.control_descriptors());
            keep.extend(pool.nic().function().descriptors());
        }
    }
}

/// Connects to memory nodes. While one is full, waits for a place: other processes of a program
/// end.
fn connect_in_time(nodes: &[Address]) -> Result<Pools, pool::Error> {
    let start = Instant::now();
    loop {
        match Pools::connect(nodes, Options::default(), Placement::RoundRobin) {
            Err(pool::Error::Full { .. }) if start.elapsed() < PLACE_PATIENCE => {
                std::thread::sleep(PLACE_PAUSE);
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

/// A page that cannot be moved is lost, whatever the reason.
fn gone(error: pool::Error) -> TransportError {
    TransportError::Gone(error.to_string())
}
