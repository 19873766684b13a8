//! The transport of a host with an assist.
//!
//! Demand READs, on which a thread waits, go to the inner transport. Page lists of prefetch and
//! write-back go to the assist by the ring. The inner transport moves them if the ring is full, and
//! after the assist has ended.
//!
//! # End of the assist
//! A thread of the pager watches the connection ([`Transport::watch`]). When the assist ends, this
//! thread takes lent queues back, runs all requests that are not complete through the inner
//! transport, and completes them in place of the assist. Requests can be repeated, because frames
//! and slots stay reserved until their completion. So a ticket looks at completion words only.
//!
//! A thread that waits for the assist longer than [`Patience`] ends the assist's process, and goes
//! on waiting for the watching thread.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use smallvec::SmallVec;
use verbs::Backoff;

use super::link::Link;
use super::ring::{Completions, ENTRIES, ITEMS_MAX, Item, Number, Outcome, Producer, Request};
use crate::sys;
use crate::transport::{
    AssistStats, ChunkHandle, Direction, FrameMemory, InFlight, Lane, PageIo, Ticket, Transport,
    TransportError, TransportStats,
};

/// A transport whose transfers an assist can do.
///
/// While queues are lent, [`Lane::Demand`] is the only lane of the transport itself.
pub trait Assisted: Transport {
    /// Returns a transfer on a lane as an item of a request. `None` if the assist cannot do it.
    fn item(&self, lane: Lane, io: &PageIo) -> Option<Item>;

    /// Checks whether the memory node is known to have ended. Never blocks.
    ///
    /// # Errors
    /// [`TransportError::Gone`].
    fn check_alive(&self) -> Result<(), TransportError>;

    /// Copies pages, before the assist writes them, from the pager's frames to those that the
    /// memory node's NIC reaches.
    fn before_write(&self, _io: &PageIo) {}

    /// Copies pages that the assist has read to the pager's frames.
    fn after_read(&self, _io: &PageIo) {}

    /// Takes lent queues back. The session has ended.
    ///
    /// # Errors
    /// The NIC or a memory node is gone: the queues stay out of use.
    fn take_back(&self) -> Result<(), TransportError> {
        Ok(())
    }
}

/// Transfers of a post, with their items.
type Moves = SmallVec<[(PageIo, Item); ITEMS_MAX]>;

/// How long a thread waits for the assist before it ends the assist's process.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Length of one wait.
    pub slice_ms: u64,
    /// Number of waits. Several short waits, and not one long wait, because time in which the
    /// whole run was stopped is part of one wait only.
    pub slices: u32,
}

impl Default for Patience {
    /// Two seconds.
    fn default() -> Self {
        Self { slice_ms: 100, slices: 20 }
    }
}

/// A transport with an assist.
pub struct AssistTransport(Arc<Shared>);

/// State that the transport shares with its tickets.
struct Shared {
    inner: Box<dyn Assisted>,
    link: Arc<Link>,
    /// True until the queues are taken back.
    is_lent: AtomicBool,
    queue: Mutex<Queue>,
    /// [`Queue::is_open`], to be read without the lock.
    is_open: AtomicBool,
    completions: Completions,
    patience: Patience,
    pages: AtomicU64,
    is_lost: AtomicBool,
}

/// The ring, and the requests in it.
struct Queue {
    producer: Producer,
    /// True while a thread watches the assist. Requests are posted only then.
    is_open: bool,
    /// Requests by entry.
    requests: Vec<Option<Pending>>,
}

/// A request of which no ticket has seen the end.
#[derive(Clone)]
struct Pending {
    number: Number,
    lane: Lane,
    direction: Direction,
    ios: SmallVec<[PageIo; ITEMS_MAX]>,
    /// The inner transport has moved the pages, and not the assist.
    is_repeated: bool,
}

impl Queue {
    /// Returns true if the next `count` entries are free.
    fn has_room(&self, count: usize) -> bool {
        let first = self.producer.next().entry();
        let entry = |at| &self.requests[(first + at) % ENTRIES as usize];
        count <= ENTRIES as usize && (0..count).all(|at| entry(at).is_none())
    }
}

impl AssistTransport {
    /// A transport over `inner`, whose assist is at the other end of `link` and serves the ring of
    /// `producer`. The assist is not used before a thread calls [`Transport::watch`].
    pub fn new(inner: Box<dyn Assisted>, link: Arc<Link>, producer: Producer) -> Self {
        let completions = producer.completions();
        let requests = vec![None; ENTRIES as usize];
        Self(Arc::new(Shared {
            inner,
            link,
            is_lent: AtomicBool::new(true),
            queue: Mutex::new(Queue { producer, is_open: false, requests }),
            is_open: AtomicBool::new(false),
            completions,
            patience: Patience::default(),
            pages: AtomicU64::new(0),
            is_lost: AtomicBool::new(false),
        }))
    }

    /// Returns true while requests are posted to the assist.
    #[cfg(test)]
    pub(super) fn is_open(&self) -> bool {
        self.0.is_open.load(Ordering::Acquire)
    }

    /// The same with another patience. Called before the transport is used.
    #[cfg(test)]
    pub(super) fn with_patience(mut self, patience: Patience) -> Self {
        Arc::get_mut(&mut self.0).expect("not used yet").patience = patience;
        self
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("no thread panics while it holds this lock")
    }

    /// Returns the lane on which the inner transport itself moves pages.
    fn own_lane(&self, lane: Lane) -> Lane {
        if self.is_lent.load(Ordering::Acquire) { Lane::Demand } else { lane }
    }

    /// Posts page lists to the assist. `None` if the inner transport must move the pages.
    fn post(self: &Arc<Self>, lane: Lane, direction: Direction, ios: &[PageIo]) -> Option<Batch> {
        let mut all: Moves = SmallVec::new();
        for io in ios {
            all.push((*io, self.inner.item(lane, io)?));
        }
        all.sort_by_key(|(_, item)| item.node);
        let of_nodes = || all.chunk_by(|(_, a), (_, b)| a.node == b.node);
        let count = of_nodes().map(|moves| moves.len().div_ceil(ITEMS_MAX)).sum();
        let mut queue = self.queue();
        if count == 0 || !queue.is_open || !queue.has_room(count) {
            return None;
        }
        let (mut numbers, mut wakes) = (SmallVec::new(), false);
        for part in of_nodes().flat_map(|moves| moves.chunks(ITEMS_MAX)) {
            let items = part.iter().map(|(_, item)| *item).collect();
            let ios: SmallVec<_> = part.iter().map(|(io, _)| *io).collect();
            if direction == Direction::Write {
                ios.iter().for_each(|io| self.inner.before_write(io));
            }
            let number = queue.producer.next();
            let pending = Pending { number, lane, direction, ios, is_repeated: false };
            queue.requests[number.entry()] = Some(pending);
            wakes |= queue.producer.push(&Request { direction, items });
            numbers.push(number);
        }
        drop(queue);
        if wakes {
            self.link.wake();
        }
        Some(Batch { shared: self.clone(), numbers })
    }

    /// Takes the queues back, and runs the requests that are not complete through the inner
    /// transport. The session has ended.
    fn repeat_requests(&self) {
        let mut open: SmallVec<[Pending; 4]> = SmallVec::new();
        {
            let mut queue = self.queue();
            queue.is_open = false;
            self.is_open.store(false, Ordering::Release);
            for pending in queue.requests.iter_mut().flatten() {
                if self.completions.outcome(pending.number).is_none() {
                    pending.is_repeated = true;
                    open.push(pending.clone());
                }
            }
        }
        // After an error, transfers on the lane that was never lent report it.
        let is_lent = self.inner.take_back().is_err();
        self.is_lent.store(is_lent, Ordering::Release);
        for Pending { number, lane, direction, ios, .. } in open {
            // After an error the ticket repeats the request once more, and reports the error.
            let outcome = match self.inner.run(self.own_lane(lane), direction, &ios) {
                Ok(()) => Outcome::Moved,
                Err(_) => Outcome::Failed,
            };
            self.completions.complete(number, outcome);
        }
    }

    /// Waits until a request has ended.
    fn wait_for(&self, number: Number) {
        let (mut backoff, mut slices) = (Backoff::new(), 0);
        while self.completions.outcome(number).is_none() {
            if backoff.snooze() {
                continue;
            }
            let before = sys::now_ns();
            self.completions.sleep(number, self.patience.slice_ms);
            let is_whole = sys::now_ns() - before >= self.patience.slice_ms * 1_000_000;
            slices += u32::from(is_whole);
            if is_whole && slices == self.patience.slices {
                self.link.kill();
            }
        }
    }

    /// Ends requests, which are complete. Runs those again that the assist could not run.
    fn finish(&self, numbers: &[Number]) -> Result<(), TransportError> {
        let mut result = Ok(());
        for &number in numbers {
            let outcome = self.completions.outcome(number);
            let pending = self.queue().requests[number.entry()].take();
            let Some(pending) = pending.filter(|pending| pending.number == number) else {
                continue;
            };
            match outcome {
                Some(Outcome::Moved) if pending.is_repeated => {}
                Some(Outcome::Moved) => {
                    if pending.direction == Direction::Read {
                        pending.ios.iter().for_each(|io| self.inner.after_read(io));
                    }
                    let pages: u64 = pending.ios.iter().map(|io| u64::from(io.pages)).sum();
                    self.pages.fetch_add(pages, Ordering::Relaxed);
                }
                Some(Outcome::Failed) | None => {
                    let Pending { lane, direction, ios, .. } = &pending;
                    result = result.and(self.inner.run(self.own_lane(*lane), *direction, ios));
                }
            }
        }
        result
    }
}

/// Requests that were posted together. Dropping it waits for them.
struct Batch {
    shared: Arc<Shared>,
    numbers: SmallVec<[Number; 4]>,
}

impl Batch {
    fn is_complete(&self) -> bool {
        self.numbers.iter().all(|number| self.shared.completions.outcome(*number).is_some())
    }

    fn finish(&mut self) -> Result<(), TransportError> {
        let numbers = std::mem::take(&mut self.numbers);
        numbers.iter().for_each(|number| self.shared.wait_for(*number));
        self.shared.finish(&numbers)
    }
}

impl InFlight for Batch {
    fn poll(&mut self) -> Result<bool, TransportError> {
        match self.is_complete() {
            true => self.finish().map(|()| true),
            false => Ok(false),
        }
    }

    fn wait(mut self: Box<Self>) -> Result<(), TransportError> {
        self.finish()
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        // Without a receiver of the pages, an error has no consequence.
        let _ = self.finish();
    }
}

impl Transport for AssistTransport {
    fn chunk_bytes(&self) -> usize {
        self.0.inner.chunk_bytes()
    }

    fn frames(&self) -> FrameMemory {
        self.0.inner.frames()
    }

    fn allocate_chunk(&self) -> Result<ChunkHandle, TransportError> {
        self.0.inner.allocate_chunk()
    }

    fn allocate_chunks(
        &self,
        count: usize,
        chunks: &mut Vec<ChunkHandle>,
    ) -> Result<(), TransportError> {
        self.0.inner.allocate_chunks(count, chunks)
    }

    fn used_percent(&self) -> u8 {
        self.0.inner.used_percent()
    }

    fn origin(&self, chunk: ChunkHandle) -> String {
        self.0.inner.origin(chunk)
    }

    fn must_seal(&self) -> bool {
        self.0.inner.must_seal()
    }

    fn free_chunk(&self, chunk: ChunkHandle) -> Result<(), TransportError> {
        self.0.inner.free_chunk(chunk)
    }

    fn free_chunks(&self, chunks: &[ChunkHandle]) -> Result<(), TransportError> {
        self.0.inner.free_chunks(chunks)
    }

    fn post(
        &self,
        lane: Lane,
        direction: Direction,
        ios: &[PageIo],
    ) -> Result<Ticket, TransportError> {
        if lane != Lane::Demand && self.0.is_open.load(Ordering::Acquire) {
            self.0.inner.check_alive()?;
            if let Some(batch) = self.0.post(lane, direction, ios) {
                return Ok(Ticket::in_flight(Box::new(batch)));
            }
        }
        self.0.inner.post(self.0.own_lane(lane), direction, ios)
    }

    /// A thread waits for the pages, so the inner transport moves them.
    fn run(&self, lane: Lane, direction: Direction, ios: &[PageIo]) -> Result<(), TransportError> {
        self.0.inner.run(self.0.own_lane(lane), direction, ios)
    }

    fn stats(&self) -> TransportStats {
        let assist = AssistStats {
            is_used: true,
            is_lost: self.0.is_lost.load(Ordering::Relaxed),
            pages: self.0.pages.load(Ordering::Relaxed),
        };
        TransportStats { assist, ..self.0.inner.stats() }
    }

    fn descriptors(&self, keep: &mut Vec<i32>) {
        self.0.inner.descriptors(keep);
        keep.extend(self.0.link.descriptors());
    }

    fn is_watched(&self) -> bool {
        true
    }

    fn watch(&self) {
        let shared = &self.0;
        shared.queue().is_open = true;
        shared.is_open.store(true, Ordering::Release);
        let reason = shared.link.wait_for_end();
        shared.is_lost.store(true, Ordering::Relaxed);
        shared.repeat_requests();
        if let Some(why) = reason {
            sys::say(&format!(
                "the assist has ended the session of process {}, which goes on without: {why}",
                crate::descriptor::program()
            ));
        }
    }
}
