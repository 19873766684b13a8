//! A source of chunks in this process, which checks what the heap asks of it.
#![allow(dead_code, reason = "each test uses a part")]

use std::collections::{BTreeSet, VecDeque};
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use heap::{Block, ChunkSource, Heap, Place, Settings};
use pool::{Error, GroupId};

/// Group 0.
pub const G: GroupId = GroupId(0);

/// A chunk of [`Ram`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RamChunk {
    pub node: u8,
    pub number: u64,
    pub group: GroupId,
}

#[derive(Default)]
struct State {
    held: BTreeSet<(u8, u64)>,
    free: VecDeque<(u8, u64)>,
    /// Frees that fail from now on, and whether they are executed nevertheless.
    failures: VecDeque<bool>,
    /// Chunks that the next allocations return instead of free ones.
    forged: VecDeque<RamChunk>,
    frees: u64,
    /// Chunks of all calls of `free`.
    freed: Vec<RamChunk>,
    /// Frees wait.
    is_stopped: bool,
}

/// Chunks of two memory nodes in turn. Clones share them.
#[derive(Clone)]
pub struct Ram {
    chunk_bytes: u64,
    groups: u16,
    state: Arc<Mutex<State>>,
}

impl Ram {
    pub fn new(chunk_bytes: u64, chunks: u64, groups: u16) -> Self {
        let free = (0..chunks).map(|number| ((number % 2) as u8, number / 2)).collect();
        let state = Arc::new(Mutex::new(State { free, ..State::default() }));
        Self { chunk_bytes, groups, state }
    }

    pub fn held(&self) -> usize {
        self.state.lock().unwrap().held.len()
    }

    pub fn frees(&self) -> u64 {
        self.state.lock().unwrap().frees
    }

    /// The chunks of all frees that were asked for.
    pub fn freed(&self) -> Vec<RamChunk> {
        self.state.lock().unwrap().freed.clone()
    }

    /// The next free fails; it is executed if `is_executed`.
    pub fn fail_next_free(&self, is_executed: bool) {
        self.state.lock().unwrap().failures.push_back(is_executed);
    }

    /// No free fails from now on.
    pub fn mend(&self) {
        self.state.lock().unwrap().failures.clear();
    }

    /// The next allocation returns `chunk`, which may be nonsense.
    pub fn forge_next(&self, chunk: RamChunk) {
        self.state.lock().unwrap().forged.push_back(chunk);
    }

    /// The source does not answer frees while `is_stopped`.
    pub fn stop(&self, is_stopped: bool) {
        self.state.lock().unwrap().is_stopped = is_stopped;
    }
}

fn broken() -> Error {
    Error::Refused { attempt: "freeing a chunk".into(), why: "the test says so".into() }
}

impl ChunkSource for Ram {
    type Chunk = RamChunk;

    fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    fn groups(&self) -> u16 {
        self.groups
    }

    fn group(&self, chunk: &RamChunk) -> GroupId {
        chunk.group
    }

    fn place(&self, chunk: &RamChunk) -> Option<Place> {
        Place::new(chunk.node, chunk.number.checked_mul(self.chunk_bytes)?)
    }

    async fn allocate(&self, group: GroupId) -> Result<RamChunk, Error> {
        let mut state = self.state.lock().unwrap();
        if let Some(forged) = state.forged.pop_front() {
            return Ok(forged);
        }
        let out_of_memory = Error::OutOfMemory { bytes: self.chunk_bytes };
        let (node, number) = state.free.pop_front().ok_or(out_of_memory)?;
        assert!(state.held.insert((node, number)));
        Ok(RamChunk { node, number, group })
    }

    async fn free(&self, chunk: RamChunk) -> Result<(), Error> {
        let is_stopped = || self.state.lock().unwrap().is_stopped;
        std::future::poll_fn(|_| if is_stopped() { Poll::Pending } else { Poll::Ready(()) }).await;
        let mut state = self.state.lock().unwrap();
        state.freed.push(chunk);
        let failure = state.failures.pop_front();
        if failure != Some(false) {
            let place = (chunk.node, chunk.number);
            if state.held.remove(&place) {
                state.free.push_back(place);
                state.frees += 1;
            }
        }
        if failure.is_some() { Err(broken()) } else { Ok(()) }
    }
}

/// The output of a future that does not wait.
pub fn now<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("the future waits"),
    }
}

/// A heap with one group over `chunks` chunks, without a reserve.
pub fn heap(chunk_bytes: u64, chunks: u64) -> Heap<Ram> {
    Heap::new(Ram::new(chunk_bytes, chunks, 1), Settings::NO_RESERVE).unwrap()
}

/// Allocates a block in group 0.
pub fn allocate<S: ChunkSource>(heap: &Heap<S>, bytes: u64) -> Block {
    now(heap.allocate(G, bytes)).unwrap()
}
