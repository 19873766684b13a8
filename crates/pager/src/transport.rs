//! Interface between the pager and its backing memory: chunks, and transfers of pages to and from
//! them.
//!
//! The pager moves pages between *frames* of 4 KiB and *chunks*. Frames are memory that the
//! transport supplies, because its NIC must be able to access it. The transport allocates the
//! chunks.
//!
//! Transfers are split-phase: [`Transport::post`] starts them and returns a [`Ticket`], which is
//! polled or waited for.

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

/// Index of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrameId(pub u32);

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From a chunk to frames.
    Read,
    /// From frames to a chunk.
    Write,
}

/// Priority class of a transfer (OneSidedMW §5.1, with a lane of its own for write-back).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// A thread waits for this page.
    Demand,
    /// Pages that are read ahead.
    Prefetch,
    /// Pages that are written back.
    WriteBack,
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
    /// A memory node does not answer within the limit. Its memory is as it was, but the process
    /// cannot go on without it.
    #[error("the memory node does not answer: {0}")]
    Unanswered(String),
}

/// The frames.
#[derive(Clone, Copy, Debug)]
pub struct FrameMemory {
    /// First byte of frame 0: page-aligned, mapped as long as the transport lives.
    pub base: *mut u8,
    /// Number of frames.
    pub frames: u32,
}

/// Transfers in flight. An implementation whose NIC accesses the frames waits when it is dropped,
/// so that the owner of the frames may use them again.
pub trait InFlight: Send {
    /// Returns true if the transfers are complete. Makes no system call.
    fn poll(&mut self) -> Result<bool, TransportError>;

    /// Waits until the transfers are complete: spins, then sleeps.
    fn wait(self: Box<Self>) -> Result<(), TransportError>;
}

/// Transfers that were posted together. Dropping a ticket waits for them.
#[must_use = "dropping it waits for the transfers"]
pub struct Ticket(Option<Box<dyn InFlight>>);

impl Ticket {
    /// A ticket of transfers that are complete.
    pub fn complete() -> Self {
        Self(None)
    }

    /// A ticket of transfers in flight.
    pub fn in_flight(transfers: Box<dyn InFlight>) -> Self {
        Self(Some(transfers))
    }

    /// Returns true if the transfers are complete. Makes no system call.
    ///
    /// # Errors
    /// [`TransportError::Gone`].
    pub fn poll(&mut self) -> Result<bool, TransportError> {
        let Some(transfers) = &mut self.0 else { return Ok(true) };
        let done = transfers.poll()?;
        if done {
            self.0 = None;
        }
        Ok(done)
    }

    /// Waits until the transfers are complete.
    ///
    /// # Errors
    /// [`TransportError::Gone`].
    pub fn wait(self) -> Result<(), TransportError> {
        self.0.map_or(Ok(()), InFlight::wait)
    }
}

/// Counters of a transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransportStats {
    /// Chunks that the NIC allocated.
    pub allocations_by_nic: u64,
    /// Chunks that the memory node's CPU allocated.
    pub allocations_by_cpu: u64,
    /// True if the calling thread moves the pages, and not a NIC.
    pub is_direct: bool,
    /// Counters of the assist.
    pub assist: AssistStats,
}

/// Counters of the assist of a transport ([`crate::assist`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AssistStats {
    /// The process has a session with the assist, or had one.
    pub is_used: bool,
    /// The session has ended.
    pub is_lost: bool,
    /// Pages that the assist moved.
    pub pages: u64,
}

/// Backing memory of a pager. The handler, the worker and the program's threads call concurrently.
///
/// Implementations run inside the program's process. They must not touch the program's memory,
/// allocate with its allocator, or rely on descriptors that the program can close.
pub trait Transport: Send + Sync {
    /// Bytes of a chunk: a power of two, at least a page, at most 1 GiB.
    fn chunk_bytes(&self) -> usize;

    /// Returns the frames, always the same.
    fn frames(&self) -> FrameMemory;

    /// Allocates a chunk. Its content is unspecified until written.
    fn allocate_chunk(&self) -> Result<ChunkHandle, TransportError>;

    /// Allocates up to `count` chunks and appends them to `chunks`: at least one, or an error is
    /// returned. An implementation with requests to a memory node has several in flight at a time.
    fn allocate_chunks(
        &self,
        count: usize,
        chunks: &mut Vec<ChunkHandle>,
    ) -> Result<(), TransportError> {
        for at in 0..count {
            match self.allocate_chunk() {
                Ok(chunk) => chunks.push(chunk),
                Err(_) if at > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns the percentage of the pool that is allocated, by all clients. May ask the memory
    /// nodes. 0 if it is unknown.
    fn used_percent(&self) -> u8 {
        0
    }

    /// Frees a chunk. The caller no longer reads or writes it.
    fn free_chunk(&self, chunk: ChunkHandle) -> Result<(), TransportError>;

    /// Frees chunks, as [`Transport::free_chunk`], with several requests in flight at a time.
    fn free_chunks(&self, chunks: &[ChunkHandle]) -> Result<(), TransportError> {
        chunks.iter().try_for_each(|chunk| self.free_chunk(*chunk))
    }

    /// Starts transfers. May wait for room in the send queue, but not for a transfer.
    fn post(
        &self,
        lane: Lane,
        direction: Direction,
        ios: &[PageIo],
    ) -> Result<Ticket, TransportError>;

    /// Runs transfers and waits for them.
    fn run(&self, lane: Lane, direction: Direction, ios: &[PageIo]) -> Result<(), TransportError> {
        self.post(lane, direction, ios)?.wait()
    }

    /// Returns the name of the memory that a chunk lies in, for messages.
    fn origin(&self, _chunk: ChunkHandle) -> String {
        "the pool".into()
    }

    /// Returns true if the content of the chunks must be encrypted, whatever the settings say.
    fn must_seal(&self) -> bool {
        false
    }

    /// Returns the counters.
    fn stats(&self) -> TransportStats;

    /// Adds the descriptors that the transport needs to `keep`. The pager's threads keep these in a
    /// descriptor table of their own, and the program's copies are closed.
    fn descriptors(&self, keep: &mut Vec<i32>);

    /// Returns true if a thread must call [`Transport::watch`].
    fn is_watched(&self) -> bool {
        false
    }

    /// Runs the thread of a transport that needs one, until it needs it no more.
    fn watch(&self) {}
}
