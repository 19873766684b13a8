//! Interface between the pager and its backing memory: chunks, and transfers of pages to and from
//! them.
//!
//! The pager moves pages between *frames* of 4 KiB and *chunks*. Frames are parts of the staging
//! memory, which the transport supplies because its NIC must be able to access it. The transport
//! allocates the chunks.

use thiserror::Error;

/// Index by which the transport names a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkHandle(pub u32);

/// One contiguous transfer of whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageIo {
    /// Remote chunk.
    pub chunk: ChunkHandle,
    /// Byte offset in the chunk.
    pub offset_bytes: u32,
    /// First local frame.
    pub frame: u32,
    /// Number of pages, contiguous at both ends.
    pub pages: u16,
}

/// Priority class of a transfer (OneSidedMW §5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// A thread waits for this one page.
    Sync,
    /// Read-ahead and write-back, in batches.
    Async,
}

/// Errors of a transport.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum TransportError {
    /// No chunk is free now. A later attempt may succeed.
    #[error("the pool is full")]
    Full,
    /// The backing memory is gone permanently, and the pages with it.
    #[error("the memory pool is gone: {0}")]
    Gone(String),
}

/// Memory whose frames the transport can access.
#[derive(Clone, Copy, Debug)]
pub struct StagingMemory {
    /// First byte of frame 0: page-aligned, mapped as long as the transport lives.
    pub base: *mut u8,
    /// Number of frames.
    pub frames: u32,
}

/// Counters of a transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransportStats {
    /// Chunks that the NIC allocated.
    pub allocations_by_nic: u64,
    /// Chunks that the memory node's CPU allocated.
    pub allocations_by_cpu: u64,
    /// The calling thread moves the pages, not a NIC.
    pub is_direct: bool,
}

/// Backing memory of a pager. Each call blocks until all its transfers are done. The handler, the
/// evictor and the program's threads call concurrently.
///
/// Implementations run inside the program's process. They must not touch the program's memory,
/// allocate with its allocator, or rely on descriptors that the program can close.
pub trait Transport: Send + Sync {
    /// Bytes of a chunk: a power of two, at least a page, at most 1 GiB.
    fn chunk_bytes(&self) -> usize;

    /// Returns the staging memory, always the same.
    fn staging(&self) -> StagingMemory;

    /// Allocates a chunk. Its content is unspecified until written.
    fn allocate_chunk(&self) -> Result<ChunkHandle, TransportError>;

    /// Frees a chunk. The caller no longer reads or writes it.
    fn free_chunk(&self, chunk: ChunkHandle) -> Result<(), TransportError>;

    /// Reads pages from chunks into frames.
    fn read(&self, lane: Lane, ios: &[PageIo]) -> Result<(), TransportError>;

    /// Reads pages into frames part by part. Starts all parts at once and calls `arrived` with the
    /// number of each part, in order, when the part is complete; later parts may still be in flight
    /// then.
    fn read_parts(
        &self,
        lane: Lane,
        parts: &[Vec<PageIo>],
        arrived: &mut dyn FnMut(usize),
    ) -> Result<(), TransportError> {
        for (part, ios) in parts.iter().enumerate() {
            self.read(lane, ios)?;
            arrived(part);
        }
        Ok(())
    }

    /// Writes pages from frames to chunks.
    fn write(&self, lane: Lane, ios: &[PageIo]) -> Result<(), TransportError>;

    /// Returns the counters.
    fn stats(&self) -> TransportStats;

    /// Adds the descriptors that the transport needs to `keep`. The pager's threads keep these in a
    /// descriptor table of their own, and the program's copies are closed.
    fn descriptors(&self, keep: &mut Vec<i32>);
}
