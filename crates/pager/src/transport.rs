//! What the pager asks of the memory behind it: chunks, and pages moved to and from them.
//!
//! The pager moves pages between *frames* (4 KiB each) of the staging memory, which the transport
//! supplies because its NIC must reach it, and *chunks* that the transport allocates.

use thiserror::Error;

/// A chunk, by the index that the transport gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkHandle(pub u32);

/// One contiguous transfer of whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageIo {
    /// Chunk at the far end.
    pub chunk: ChunkHandle,
    /// Bytes from the chunk's start.
    pub offset_bytes: u32,
    /// First frame at our end.
    pub frame: u32,
    /// Pages, contiguous at both ends.
    pub pages: u16,
}

/// Who waits for a transfer (OneSidedMW §5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// A thread waits for this one page.
    Sync,
    /// Read-ahead and write-back: served in batches.
    Async,
}

/// Why a transport refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum TransportError {
    /// No chunk is free now; there may be one later.
    #[error("the pool is full")]
    Full,
    /// The far end is gone for good, and the pages with it.
    #[error("the memory pool is gone: {0}")]
    Gone(String),
}

/// Frames that the transport can reach.
#[derive(Clone, Copy, Debug)]
pub struct StagingMemory {
    /// First byte of frame 0; page-aligned, mapped as long as the transport lives.
    pub base: *mut u8,
    /// Number of frames.
    pub frames: u32,
}

/// What a transport counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransportStats {
    /// Chunks that the NIC allocated for us.
    pub allocations_by_nic: u64,
    /// Chunks that the memory node's CPU allocated for us.
    pub allocations_by_cpu: u64,
}

/// The memory behind the pager. Calls block until all that they were asked is done; the handler, the
/// write-back and the program's threads call at the same time.
///
/// Implementations run inside the program's process and must not touch its memory, allocate with its
/// allocator, or rely on descriptors that the program can close.
pub trait Transport: Send + Sync {
    /// Bytes of a chunk: a power of two, at least a page, at most 1 GiB.
    fn chunk_bytes(&self) -> usize;

    /// The frames. The same answer every time.
    fn staging(&self) -> StagingMemory;

    /// A new chunk; its content is unspecified until written.
    fn allocate_chunk(&self) -> Result<ChunkHandle, TransportError>;

    /// Gives a chunk back. Nothing of it is read or written any more.
    fn free_chunk(&self, chunk: ChunkHandle) -> Result<(), TransportError>;

    /// Fills frames from chunks.
    fn read(&self, lane: Lane, ios: &[PageIo]) -> Result<(), TransportError>;

    /// Fills frames part by part: starts all parts at once, and calls `arrived` with the number of
    /// each, in order, when it is there and while the next may be on their way.
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

    /// Stores frames to chunks.
    fn write(&self, lane: Lane, ios: &[PageIo]) -> Result<(), TransportError>;

    /// Counters.
    fn stats(&self) -> TransportStats;

    /// Called in every thread that the pager starts, before it does anything else, once the thread
    /// has its own descriptor table. `keep` collects the descriptors that the transport needs there.
    fn descriptors(&self, keep: &mut Vec<i32>);
}
