//! The transport over a memory node: chunks are the pool's chunks, pages are READ and WRITTEN.
//!
//! `GRANARY_POOL` names it: [`pool::Address`]. A page that somebody waits
//! for goes through lane 0, batches through lane 1, so that a READ does not queue behind a
//! write-back (OneSidedMW §5.1).
//!
//! Everything that this needs lies outside the paged region: the staging memory and the queues are
//! shared with the NIC, the rest is the library's own heap.

use std::sync::RwLock;

use fabric::soft::SoftNic;
use pool::{Address, Buffer, Grant, Lane as PoolLane, Options, Pool, Transfer};

use crate::Error;
use crate::sys::PAGE_BYTES;
use crate::transport::{
    ChunkHandle, Lane, PageIo, StagingMemory, Transport, TransportError, TransportStats,
};

/// A transport over a pool.
pub struct PoolTransport {
    pool: Pool,
    staging: Buffer<SoftNic>,
    frames: u32,
    chunks: RwLock<Chunks>,
}

/// Grants by handle.
#[derive(Default)]
struct Chunks {
    grants: Vec<Option<Grant>>,
    free: Vec<u32>,
}

impl PoolTransport {
    /// Connects to a memory node with `frames` frames of staging.
    pub fn connect(node: &Address, frames: u32) -> Result<Self, Error> {
        let pool = node.connect(Options::default())?;
        let chunk = pool.chunk_bytes();
        if chunk < PAGE_BYTES as u64 {
            return Err(Error::Setting {
                name: "GRANARY_POOL",
                value: node.to_string(),
                why: format!(
                    "its chunks have {chunk} bytes, less than a page of {PAGE_BYTES}: serve with \
                     --chunk 4KiB or more, best 1MiB"
                ),
            });
        }
        let staging = pool.buffer(frames as usize * PAGE_BYTES)?;
        Ok(Self { pool, staging, frames, chunks: RwLock::default() })
    }

    fn grant(&self, chunk: ChunkHandle) -> Grant {
        let chunks = self.chunks.read().expect("nobody panics with the chunks locked");
        chunks.grants[chunk.0 as usize].expect("the pager names chunks that it holds")
    }

    fn transfer(&self, lane: Lane, ios: &[PageIo], write: bool) -> Result<(), TransportError> {
        let lane = pool_lane(lane);
        let done = if let [io] = ios {
            let grant = self.grant(io.chunk);
            let transfer = transfer_of(io, &grant);
            if write {
                self.pool.write_from(&transfer, &self.staging, lane).and_then(|o| o.wait())
            } else {
                self.pool.read_into(&transfer, &self.staging, lane).and_then(|o| o.wait())
            }
        } else {
            let grants: Vec<Grant> = ios.iter().map(|io| self.grant(io.chunk)).collect();
            let all = transfers_of(ios, &grants);
            if write {
                self.pool.write_batch_blocking(&all, &self.staging, lane)
            } else {
                self.pool.read_batch_blocking(&all, &self.staging, lane)
            }
        };
        done.map_err(gone)
    }
}

impl Transport for PoolTransport {
    fn chunk_bytes(&self) -> usize {
        self.pool.chunk_bytes() as usize
    }

    fn staging(&self) -> StagingMemory {
        StagingMemory { base: self.staging.memory().as_ptr(), frames: self.frames }
    }

    fn allocate_chunk(&self) -> Result<ChunkHandle, TransportError> {
        let grant = self.pool.allocate_blocking().map_err(|error| match error {
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
        match self.pool.free_blocking(grant) {
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
        let lane = pool_lane(lane);
        let start = |ios: &Vec<PageIo>| {
            let grants: Vec<Grant> = ios.iter().map(|io| self.grant(io.chunk)).collect();
            self.pool.start_read_batch(&transfers_of(ios, &grants), &self.staging, lane)
        };
        let started: Vec<_> = parts.iter().map(start).collect::<Result<_, _>>().map_err(gone)?;
        for (part, batch) in started.into_iter().enumerate() {
            batch.wait().map_err(gone)?;
            arrived(part);
        }
        Ok(())
    }

    fn write(&self, lane: Lane, ios: &[PageIo]) -> Result<(), TransportError> {
        self.transfer(lane, ios, true)
    }

    fn stats(&self) -> TransportStats {
        let allocations = self.pool.stats().allocations;
        match self.pool.welcome().scheme.needs_cpu() {
            false => TransportStats { allocations_by_nic: allocations, allocations_by_cpu: 0 },
            true => TransportStats { allocations_by_nic: 0, allocations_by_cpu: allocations },
        }
    }

    fn descriptors(&self, keep: &mut Vec<i32>) {
        keep.extend(self.pool.control_descriptors());
        keep.extend(self.pool.nic().function().descriptors());
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
