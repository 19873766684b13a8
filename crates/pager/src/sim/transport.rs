//! A simulated transport: chunks whose transfers take time and overtake each other.
//!
//! Each transfer is done page by page, in an order that the schedule and a seed decide, by a fiber
//! that plays the NIC. The slots and frames of a transfer are in use until the pager has polled or
//! waited for its end.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use super::fiber::{current, point, step, trace, wait_until};
use super::liar::Liar;
use super::random::Random;
use crate::memory::model::{Bytes, WORDS};
use crate::sys::{self, PAGE_BYTES};
use crate::transport::{
    ChunkHandle, Direction, FrameMemory, InFlight, Lane, PageIo, Ticket, Transport, TransportError,
    TransportStats,
};

/// Content of a frame into which a READ is in flight.
const IN_FLIGHT: u64 = 0xf11e_f11e_f11e_f11e;

/// A transfer of one page.
#[derive(Clone, Copy, Debug)]
struct PageMove {
    chunk: u32,
    page: u32,
    frame: u32,
    is_done: bool,
}

/// Transfers that were posted together.
struct Posted {
    id: u64,
    direction: Direction,
    moves: Vec<PageMove>,
    /// Content of a WRITE's frames at the time of the post.
    written: Vec<Box<Bytes>>,
}

/// A transfer as a memory node sees it.
#[derive(Clone, Debug)]
pub(crate) struct Post {
    /// Step of the simulation, in place of the time.
    pub step: u32,
    pub direction: Direction,
    /// The places of the pages that move together.
    pub slots: Vec<u32>,
}

struct Pool {
    /// Chunks by handle, and the content of their pages that were written.
    chunks: BTreeMap<u32, Vec<Option<Box<Bytes>>>>,
    next_chunk: u32,
    next_id: u64,
    capacity: u32,
    chunk_pages: u32,
    posted: Vec<Posted>,
    frames: FrameMemory,
    random: Random,
    allocations: u64,
    liar: Option<Liar>,
    is_watched: bool,
    seen: Vec<Post>,
}

// SAFETY: the frames' base is only used under the lock of the pool.
unsafe impl Send for Pool {}

impl Pool {
    /// Returns the words of a frame.
    fn frame(&self, frame: u32) -> *mut u64 {
        assert!(frame < self.frames.frames, "frame {frame}");
        // SAFETY: in bounds of the frames.
        unsafe { self.frames.base.add(frame as usize * PAGE_BYTES).cast() }
    }

    fn load(&self, frame: u32) -> Box<Bytes> {
        let mut content = Bytes::zeros();
        // SAFETY: both have a page of memory; one thread runs at a time.
        unsafe { self.frame(frame).copy_to_nonoverlapping(content.0.as_mut_ptr(), WORDS) };
        content
    }

    fn store(&self, frame: u32, content: &Bytes) {
        // SAFETY: as above.
        unsafe { self.frame(frame).copy_from_nonoverlapping(content.0.as_ptr(), WORDS) };
    }

    /// Moves one page of a random transfer.
    fn advance(&mut self) {
        let open: Vec<(usize, usize)> = self
            .posted
            .iter()
            .enumerate()
            .flat_map(|(at, posted)| {
                let open = posted.moves.iter().enumerate().filter(|(_, page)| !page.is_done);
                open.map(move |(index, _)| (at, index))
            })
            .collect();
        let (at, index) = self.random.pick(&open);
        let posted = &mut self.posted[at];
        let page = posted.moves[index];
        posted.moves[index].is_done = true;
        let (direction, id) = (posted.direction, posted.id);
        let written = posted.written.get(index).cloned();
        let now = self.load(page.frame);
        let chunk = self.chunks.get_mut(&page.chunk).expect("no chunk of a transfer is freed");
        match (direction, written) {
            (Direction::Write, Some(written)) => {
                assert!(*now == *written, "transfer {id}: frame {} changed", page.frame);
                if let Some(liar) = &mut self.liar {
                    liar.note((page.chunk, page.page), &written);
                }
                chunk[page.page as usize] = Some(written);
            }
            _ => {
                let content = chunk[page.page as usize].clone();
                let content = content.unwrap_or_else(|| {
                    panic!("transfer {id} reads {page:?}, which was never written")
                });
                assert!(now.0[0] == IN_FLIGHT, "transfer {id}: frame {} changed", page.frame);
                let told = match &mut self.liar {
                    Some(liar) => liar.answer((page.chunk, page.page), content, now),
                    None => content,
                };
                self.store(page.frame, &told);
            }
        }
    }

    fn check_free(&self, page: &PageMove, direction: Direction) {
        for posted in &self.posted {
            let is_read = posted.direction == Direction::Read && direction == Direction::Read;
            for other in &posted.moves {
                assert!(other.frame != page.frame, "frame {} is used twice", page.frame);
                let same = (other.chunk, other.page) == (page.chunk, page.page);
                assert!(
                    is_read || !same,
                    "a {direction:?} of {page:?} meets a {:?} in flight",
                    posted.direction
                );
            }
        }
    }
}

/// Access to the simulated transport, for the simulation and the pager's logic.
#[derive(Clone)]
pub(crate) struct ModelTransport(Arc<Mutex<Pool>>);

impl ModelTransport {
    /// A pool of at most `capacity` chunks of `chunk_pages` pages.
    pub(crate) fn new(frames: u32, chunk_pages: u32, capacity: u32, random: Random) -> Self {
        let base = sys::map_anonymous(frames as usize * PAGE_BYTES).expect("memory for frames");
        let pool = Pool {
            chunks: BTreeMap::new(),
            next_chunk: 0,
            next_id: 0,
            capacity,
            chunk_pages,
            posted: Vec::new(),
            frames: FrameMemory { base: base as *mut u8, frames },
            random,
            allocations: 0,
            liar: None,
            is_watched: false,
            seen: Vec::new(),
        };
        Self(Arc::new(Mutex::new(pool)))
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.0.lock().expect("no thread panics while it holds this lock")
    }

    /// Returns true if a transfer has pages to move.
    pub(crate) fn is_active(&self) -> bool {
        self.pool().posted.iter().any(|posted| posted.moves.iter().any(|page| !page.is_done))
    }

    /// Moves one page of a transfer, which the seed chooses.
    pub(crate) fn advance(&self) {
        self.pool().advance();
    }

    /// Returns the number of chunks that are allocated.
    pub(crate) fn chunks_held(&self) -> usize {
        self.pool().chunks.len()
    }

    /// Returns the number of transfers for whose end the pager has not polled or waited.
    pub(crate) fn in_flight(&self) -> usize {
        self.pool().posted.len()
    }

    /// Makes READ number `read` return other bytes than were written.
    pub(crate) fn lie_at(&self, read: u64, random: Random) {
        self.pool().liar = Some(Liar::new(read, random));
    }

    /// Begins or ends the record of transfers.
    pub(crate) fn watch(&self, is_on: bool) {
        self.pool().is_watched = is_on;
    }

    /// Takes the recorded transfers.
    pub(crate) fn take_seen(&self) -> Vec<Post> {
        std::mem::take(&mut self.pool().seen)
    }

    /// Returns the content of a page of a chunk.
    pub(crate) fn content(&self, chunk: ChunkHandle, offset_bytes: u32) -> Option<Box<Bytes>> {
        let pool = self.pool();
        pool.chunks.get(&chunk.0)?[offset_bytes as usize / PAGE_BYTES].clone()
    }

    fn is_complete(&self, id: u64) -> bool {
        let pool = self.pool();
        let posted = pool.posted.iter().find(|posted| posted.id == id);
        posted.expect("a ticket is used once").moves.iter().all(|page| page.is_done)
    }

    fn end(&self, id: u64) {
        self.pool().posted.retain(|posted| posted.id != id);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let bytes = self.frames.frames as usize * PAGE_BYTES;
        // SAFETY: the pool owns the frames, and no transfer uses them any more.
        let _ = unsafe { sys::unmap_anonymous(self.frames.base as usize, bytes) };
    }
}

/// A ticket's transfers.
struct Flight {
    id: u64,
    transport: ModelTransport,
}

impl InFlight for Flight {
    fn poll(&mut self) -> Result<bool, TransportError> {
        let is_complete = self.transport.is_complete(self.id);
        if is_complete {
            self.transport.end(self.id);
        }
        Ok(is_complete)
    }

    fn wait(self: Box<Self>) -> Result<(), TransportError> {
        if current().is_some() {
            wait_until("waits for a transfer", || self.transport.is_complete(self.id));
        }
        while !self.transport.is_complete(self.id) {
            self.transport.advance();
        }
        self.transport.end(self.id);
        Ok(())
    }
}

impl Transport for ModelTransport {
    fn chunk_bytes(&self) -> usize {
        self.pool().chunk_pages as usize * PAGE_BYTES
    }

    fn frames(&self) -> FrameMemory {
        self.pool().frames
    }

    fn allocate_chunk(&self) -> Result<ChunkHandle, TransportError> {
        point();
        let mut pool = self.pool();
        if pool.chunks.len() as u32 >= pool.capacity {
            return Err(TransportError::Full);
        }
        let handle = pool.next_chunk;
        pool.next_chunk += 1;
        pool.allocations += 1;
        let pages = vec![None; pool.chunk_pages as usize];
        pool.chunks.insert(handle, pages);
        Ok(ChunkHandle(handle))
    }

    fn free_chunk(&self, chunk: ChunkHandle) -> Result<(), TransportError> {
        point();
        let mut pool = self.pool();
        let is_used = |posted: &Posted| posted.moves.iter().any(|page| page.chunk == chunk.0);
        assert!(!pool.posted.iter().any(is_used), "{chunk:?} is freed with a transfer in flight");
        pool.chunks.remove(&chunk.0).unwrap_or_else(|| panic!("{chunk:?} is freed twice"));
        Ok(())
    }

    fn post(
        &self,
        lane: Lane,
        direction: Direction,
        ios: &[PageIo],
    ) -> Result<Ticket, TransportError> {
        point();
        let mut pool = self.pool();
        let page_of = |io: &PageIo, at: u32| PageMove {
            chunk: io.chunk.0,
            page: io.offset_bytes / PAGE_BYTES as u32 + at,
            frame: io.frame + at,
            is_done: false,
        };
        let moves: Vec<PageMove> = ios
            .iter()
            .flat_map(|io| (0..u32::from(io.pages)).map(move |at| page_of(io, at)))
            .collect();
        let mut written = Vec::new();
        for (at, page) in moves.iter().enumerate() {
            pool.check_free(page, direction);
            let same = |other: &PageMove| (other.chunk, other.page) == (page.chunk, page.page);
            assert!(!moves[..at].iter().any(same), "{page:?} is moved twice by one transfer");
            let place = pool.chunks.get(&page.chunk).expect("a transfer's chunk is allocated");
            assert!((page.page as usize) < place.len(), "{page:?} leaves its chunk");
            match direction {
                Direction::Write => written.push(pool.load(page.frame)),
                Direction::Read => {
                    let content = Bytes([IN_FLIGHT; WORDS]);
                    pool.store(page.frame, &content);
                }
            }
        }
        if direction == Direction::Write {
            for page in &moves {
                let chunk = pool.chunks.get_mut(&page.chunk).expect("checked above");
                chunk[page.page as usize] = None;
            }
        }
        if pool.is_watched {
            let slot = |page: &PageMove| page.chunk * pool.chunk_pages + page.page;
            let slots = moves.iter().map(slot).collect();
            pool.seen.push(Post { step: step().unwrap_or(0), direction, slots });
        }
        let id = pool.next_id;
        pool.next_id += 1;
        trace(|| format!("post {id}: {lane:?} {direction:?} {ios:?}"));
        pool.posted.push(Posted { id, direction, moves, written });
        drop(pool);
        point();
        Ok(Ticket::in_flight(Box::new(Flight { id, transport: self.clone() })))
    }

    fn stats(&self) -> TransportStats {
        TransportStats { allocations_by_nic: self.pool().allocations, ..TransportStats::default() }
    }

    fn descriptors(&self, _keep: &mut Vec<i32>) {}
}
