//! The owner's side of a work queue: the ring, the posted work, and the completed work.
//!
//! A queue allocates its entries in order. A send queue's entries also complete in order, so one
//! index tells which are free: a completion frees all building blocks up to the end of its WQE,
//! including those of preceding unsignaled WQEs. A shared receive queue's entries complete in any
//! order and to several CQs, so each entry has its own mark.
//!
//! A lock serializes posting threads. The thread that polls the CQ (one at a time) reads the tables
//! without the lock. A table entry that is written before the doorbell is visible to the thread
//! that sees the completion.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use verbs::wqe::{Builder, WQEBB};
use verbs::{DmaMemory, Error, Key, PrefetchFor, QpState, Qpn, ReceiveRequest, Sge, WorkRequest};

use super::work;
use crate::port::{Doorbell, Function};

/// Number of building blocks ahead of the write position that are prefetched for writing, because
/// the NIC's CPU had their cache lines last.
const AHEAD: u32 = 12;
/// Key that ends the list of a receive WQE with unused entries.
const END_OF_LIST: Key = Key(0x100);

/// A send queue.
pub(super) struct SendQueue {
    qpn: Qpn,
    ring: DmaMemory,
    blocks: u32,
    managed: bool,
    poster: Mutex<Poster>,
    /// Running index of the first building block in use; changed by the polling thread.
    done: AtomicU32,
    /// The queue pair's state, as set by its owner; Reset while the queue is lent.
    state: State,
    /// Another process posts to the queue.
    is_lent: AtomicBool,
    /// The posted work, by building block.
    posted: Box<[PostedSend]>,
}

/// A queue pair's state as set by its owner. It does not include an error state that the NIC
/// entered itself: work posted then is accepted and flushed.
struct State(AtomicU8);

impl State {
    const ALL: [QpState; 5] = [
        QpState::Reset,
        QpState::Init,
        QpState::ReadyToReceive,
        QpState::ReadyToSend,
        QpState::Error,
    ];

    fn new(state: QpState) -> Self {
        Self(AtomicU8::new(state as u8))
    }

    fn set(&self, state: QpState) {
        self.0.store(state as u8, Ordering::Relaxed);
    }

    #[inline]
    fn get(&self) -> QpState {
        Self::ALL[self.0.load(Ordering::Relaxed) as usize]
    }
}

struct Poster {
    /// Running index of the next free building block.
    head: u32,
    builder: Builder,
    doorbell: Doorbell,
}

#[derive(Default)]
struct PostedSend {
    id: AtomicU64,
    blocks: AtomicU32,
}

impl SendQueue {
    pub fn new(qpn: Qpn, ring: DmaMemory, blocks: u32, managed: bool, doorbell: Doorbell) -> Self {
        let slots = if managed { 0 } else { blocks };
        Self {
            qpn,
            ring,
            blocks,
            managed,
            poster: Mutex::new(Poster { head: 0, builder: Builder::new(qpn, 0), doorbell }),
            done: AtomicU32::new(0),
            state: State::new(QpState::Reset),
            is_lent: AtomicBool::new(false),
            posted: (0..slots).map(|_| PostedSend::default()).collect(),
        }
    }

    pub fn ring(&self) -> &DmaMemory {
        &self.ring
    }

    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Sets the state of the queue pair.
    pub fn set_state(&self, state: QpState) {
        if !self.is_lent.load(Ordering::Acquire) {
            self.state.set(state);
        }
    }

    /// Refuses posts from now on (true), or until the queue pair is connected again (false).
    pub fn set_lent(&self, is_lent: bool) {
        self.state.set(QpState::Reset);
        self.is_lent.store(is_lent, Ordering::Release);
    }

    /// Slot of the doorbell; `None` if the doorbell is not in a page.
    pub fn slot(&self) -> Option<u32> {
        match &self.poster.lock().doorbell {
            Doorbell::Mapped(doorbell) => Some(doorbell.slot()),
            Doorbell::Inline { .. } | Doorbell::None => None,
        }
    }

    /// Writes `list` into the ring, all or nothing, and writes the doorbell.
    #[inline]
    pub fn post(&self, list: &[WorkRequest<'_>]) -> Result<(), Error> {
        if self.managed {
            return Err(Error::BadRequest {
                what: format!("the send queue of QP {} is managed: program its ring", self.qpn),
            });
        }
        let state = self.state.get();
        if !matches!(state, QpState::ReadyToSend | QpState::Error) {
            return Err(self.not_ready(state));
        }
        let mut need = 0;
        for wr in list {
            need += work::blocks(&wr.op)?;
        }
        let mut poster = self.poster.lock();
        let Poster { head, builder, doorbell } = &mut *poster;
        let in_use = head.wrapping_sub(self.done.load(Ordering::Acquire));
        // Of a borrowed queue more could be in use: its CQ's ring is the owner's memory, too.
        if need > self.blocks.saturating_sub(in_use) {
            return Err(Error::QueueFull {
                queue: format!("the send queue of QP {}", self.qpn),
                capacity: self.blocks,
            });
        }
        for wr in list {
            builder.restart(*head as u16);
            work::build(builder, self.qpn, &wr.op);
            if wr.signaled {
                builder.signaled();
            }
            self.put(*head, builder.building_blocks());
            let posted = &self.posted[(*head & (self.blocks - 1)) as usize];
            posted.id.store(wr.id, Ordering::Relaxed);
            posted.blocks.store(builder.blocks(), Ordering::Relaxed);
            *head = head.wrapping_add(builder.blocks());
        }
        if need > 0 {
            doorbell.write(*head as u16);
        }
        Ok(())
    }

    #[cold]
    fn not_ready(&self, state: QpState) -> Error {
        if self.is_lent.load(Ordering::Acquire) {
            let why = format!("the send queue of QP {} is lent to another process", self.qpn);
            return Error::Refused { verb: "post_send", why };
        }
        Error::NotReady { queue: format!("the send queue of QP {}", self.qpn), state }
    }

    /// Copies a WQE into the ring, wrapping around at its end.
    #[inline]
    fn put(&self, head: u32, wqe: &[[u8; WQEBB]]) {
        let at = |i: u32| (head.wrapping_add(i) & (self.blocks - 1)) as usize * WQEBB;
        for (i, block) in (0..).zip(wqe) {
            self.ring.prefetch(at(i + AHEAD), PrefetchFor::Write);
            self.ring.write_block(at(i), block);
        }
    }

    /// Frees the WQE at `counter`, which has completed, and all before it. Returns its id. Called
    /// by the polling thread only.
    #[inline]
    pub fn complete(&self, counter: u16) -> u64 {
        if self.managed {
            return counter as u64;
        }
        let done = self.done.load(Ordering::Relaxed);
        let first = done.wrapping_add(counter.wrapping_sub(done as u16) as u32);
        let posted = &self.posted[(first & (self.blocks - 1)) as usize];
        let id = posted.id.load(Ordering::Relaxed);
        let end = first.wrapping_add(posted.blocks.load(Ordering::Relaxed));
        self.done.store(end, Ordering::Release);
        id
    }

    /// Returns the ids of work that was posted and has not completed, frees the queue, and restarts
    /// its indices at 0. Called by the polling thread after the NIC has dropped the queue's work.
    pub fn reset(&self) -> Vec<u64> {
        if self.managed {
            return Vec::new();
        }
        let mut poster = self.poster.lock();
        let mut ids = Vec::new();
        let mut at = self.done.load(Ordering::Relaxed);
        // More than the ring can be in use only in a borrowed queue, by wrong completions.
        while (1..=self.blocks).contains(&poster.head.wrapping_sub(at)) {
            let posted = &self.posted[(at & (self.blocks - 1)) as usize];
            ids.push(posted.id.load(Ordering::Relaxed));
            at = at.wrapping_add(posted.blocks.load(Ordering::Relaxed).max(1));
        }
        poster.head = 0;
        poster.doorbell.reset();
        self.done.store(0, Ordering::Release);
        ids
    }
}

/// A receive queue: a queue pair's own, or a shared one.
///
/// Entries are posted in ring order. If several CQs take the completions of a shared queue, a CQ
/// that is not polled blocks the entries of its completions, and the queue is full at the latest
/// when the ring has wrapped around.
pub(super) struct ReceiveRing {
    name: String,
    function: Function,
    ring: DmaMemory,
    record: DmaMemory,
    entries: u32,
    max_sges: u32,
    managed: bool,
    /// The queue pair's state; a shared queue is always ready.
    state: State,
    /// Running index of the next receive WQE.
    head: Mutex<u32>,
    /// Running index of the entry that completed last. Extends a completion's 16-bit counter to 32
    /// bits.
    last: AtomicU32,
    posted: Box<[PostedReceive]>,
}

#[derive(Default)]
struct PostedReceive {
    id: AtomicU64,
    in_use: AtomicBool,
}

impl ReceiveRing {
    /// Creates a receive queue in `memory`: the ring, then the record.
    pub fn new(
        function: Function,
        memory: &DmaMemory,
        entries: u32,
        max_sges: u32,
        managed: bool,
    ) -> Self {
        let bytes = Self::ring_bytes(entries, max_sges);
        Self {
            name: "a receive queue".to_string(),
            function,
            ring: memory.slice(0, bytes).expect("memory made for the ring"),
            record: memory.slice(Self::record_at(bytes), 8).expect("memory made for the record"),
            entries,
            max_sges,
            managed,
            state: State::new(QpState::Reset),
            head: Mutex::new(0),
            last: AtomicU32::new(0),
            posted: (0..entries).map(|_| PostedReceive::default()).collect(),
        }
    }

    /// Returns the bytes of memory that the queue needs.
    pub fn bytes(entries: u32, max_sges: u32) -> usize {
        Self::record_at(Self::ring_bytes(entries, max_sges)) + 64
    }

    fn ring_bytes(entries: u32, max_sges: u32) -> usize {
        entries as usize * max_sges as usize * verbs::wqe::SEGMENT
    }

    /// Returns the offset of the record, on a cache line of its own behind the ring.
    fn record_at(ring_bytes: usize) -> usize {
        ring_bytes.next_multiple_of(64)
    }

    pub fn ring(&self) -> &DmaMemory {
        &self.ring
    }

    pub fn record(&self) -> &DmaMemory {
        &self.record
    }

    pub fn entries(&self) -> u32 {
        self.entries
    }

    pub fn stride(&self) -> u32 {
        self.max_sges * verbs::wqe::SEGMENT as u32
    }

    /// Sets the state of the queue pair. For a shared queue, any state but Reset allows posting.
    pub fn set_state(&self, state: QpState) {
        self.state.set(state);
    }

    /// Writes a receive WQE and advances the doorbell record.
    pub fn post(&self, wr: &ReceiveRequest<'_>) -> Result<(), Error> {
        if wr.to.len() > self.max_sges as usize {
            return Err(Error::BadRequest {
                what: format!(
                    "{} scatter entries; the receive queue was created for at most {}",
                    wr.to.len(),
                    self.max_sges
                ),
            });
        }
        if self.managed {
            return Err(Error::BadRequest {
                what: format!("{} is managed: program its ring", self.name),
            });
        }
        let state = self.state.get();
        if state == QpState::Reset {
            return Err(Error::NotReady { queue: self.name.clone(), state });
        }
        let mut head = self.head.lock();
        let slot = (*head & (self.entries - 1)) as usize;
        let posted = &self.posted[slot];
        if posted.in_use.load(Ordering::Acquire) {
            return Err(Error::QueueFull { queue: self.name.clone(), capacity: self.entries });
        }
        posted.id.store(wr.id, Ordering::Relaxed);
        posted.in_use.store(true, Ordering::Relaxed);
        let end = Sge { lkey: END_OF_LIST, ..Sge::default() };
        let list = wr.to.iter().chain(std::iter::once(&end)).take(self.max_sges as usize);
        for (i, sge) in list.enumerate() {
            let at = slot * self.stride() as usize + i * verbs::wqe::SEGMENT;
            self.ring.write(at, &sge.to_bytes());
        }
        *head = head.wrapping_add(1);
        self.record.store_be32(0, *head);
        self.function.receive_posted();
        Ok(())
    }

    /// Frees the receive WQE at `counter`, which has completed. Returns its id. Called by the
    /// polling thread only.
    pub fn complete(&self, counter: u16) -> u64 {
        if self.managed {
            return counter as u64;
        }
        // Several CQs may poll completions of a shared queue at once. `last` is only a hint then;
        // it is right while the indices of their completions are within 2^15 of each other.
        let last = self.last.load(Ordering::Relaxed);
        let index = last.wrapping_add(counter.wrapping_sub(last as u16) as i16 as u32);
        self.last.store(index, Ordering::Relaxed);
        let posted = &self.posted[(index & (self.entries - 1)) as usize];
        let id = posted.id.load(Ordering::Relaxed);
        posted.in_use.store(false, Ordering::Release);
        id
    }

    /// Returns the ids of receives that were posted and have not completed, frees the queue, and
    /// restarts its indices at 0. Called by the polling thread after the NIC has dropped the
    /// queue's work.
    pub fn reset(&self) -> Vec<u64> {
        if self.managed {
            return Vec::new();
        }
        let mut head = self.head.lock();
        let oldest = head.wrapping_sub(self.entries);
        let mut ids = Vec::new();
        for i in 0..self.entries {
            let slot = (oldest.wrapping_add(i) & (self.entries - 1)) as usize;
            let posted = &self.posted[slot];
            if posted.in_use.swap(false, Ordering::Relaxed) {
                ids.push(posted.id.load(Ordering::Relaxed));
            }
        }
        *head = 0;
        self.last.store(0, Ordering::Relaxed);
        self.record.store_be32(0, 0);
        ids
    }
}
