//! The three kinds of queue: send queue, receive queue, completion queue.
//!
//! Rings and doorbell records lie in memory that their owner may change at any moment. The NIC
//! never reads its own indices back from that memory. Values that the owner writes (doorbells,
//! records) are taken modulo the ring, so that a wrong value harms only the owner.

use super::qp_list::QpList;
use crate::dma::Span;
use crate::error::Error;
use crate::spec::{CqSpec, RecvSpec, SendSpec};
use std::sync::atomic::Ordering;
use verbs::cqe::{self, Cqe};
use verbs::wqe::{Control, SEGMENT, WQEBB};
use verbs::{Cqn, DmaMemory, FunctionId, Pdn, PrefetchFor};

/// Maximum building blocks of a send ring: half the range of its 16-bit index.
pub(crate) const SEND_BLOCKS_MAX: u32 = 1 << 15;
/// Maximum receive WQEs of a queue with 16-bit indices.
pub(crate) const RECV_ENTRIES_MAX: u32 = 1 << 15;
/// Maximum receive WQEs of a queue with 32-bit indices: the number of keys.
pub(crate) const RECV_ENTRIES_WIDE_MAX: u32 = 1 << 24;
/// Maximum bytes of a receive WQE: the same number of segments as in a send WQE.
pub(crate) const RECV_STRIDE_MAX: u32 = 1024;
/// Maximum entries of a CQ: half the range of its 24-bit index.
pub(crate) const CQ_ENTRIES_MAX: u32 = 1 << 23;
/// Prefetch distance in building blocks and in completions. Another core wrote these cache lines
/// last, so a miss is slow.
const PREFETCH_AHEAD: u32 = 12;
/// Running indices of CQs have 24 bits.
pub(crate) const COUNT_MASK: u32 = 0xff_ffff;

/// A fetched WQE: copied out of the ring once, as a whole.
pub(crate) struct Fetched {
    bytes: [u8; verbs::wqe::MAX_BYTES],
}

impl Fetched {
    pub fn new() -> Self {
        Self { bytes: [0; verbs::wqe::MAX_BYTES] }
    }

    #[inline]
    pub fn control(&self) -> Control {
        Control::from_bytes(self.bytes[..SEGMENT].try_into().expect("16 bytes"))
    }

    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The buffer, to be filled with a saved WQE.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    pub fn clone_from(&mut self, other: &Fetched) {
        self.bytes = other.bytes;
    }
}

/// A send queue.
pub(crate) struct SendQueue {
    ring: Span,
    _memory: DmaMemory,
    blocks: u32,
    pub managed: bool,
    /// Index of the next building block to be executed.
    pub consumer: u16,
    /// Index up to which building blocks may be executed; set by the doorbell, or by SEND_EN.
    pub limit: u16,
}

impl SendQueue {
    pub fn new(spec: SendSpec) -> Result<Self, Error> {
        power_of_two("blocks of a send ring", spec.blocks, SEND_BLOCKS_MAX)?;
        check_memory("a send ring", &spec.ring, spec.blocks as u64 * WQEBB as u64, WQEBB)?;
        Ok(Self {
            ring: Span::of(&spec.ring),
            _memory: spec.ring,
            blocks: spec.blocks,
            managed: spec.managed,
            consumer: 0,
            limit: 0,
        })
    }

    pub fn reset(&mut self) {
        self.consumer = 0;
        self.limit = 0;
    }

    /// Number of building blocks that may be executed, 0 if the limit is below the consumer index.
    #[inline]
    pub fn pending(&self) -> u32 {
        let ahead = self.limit.wrapping_sub(self.consumer) as u32;
        if ahead > SEND_BLOCKS_MAX { 0 } else { ahead }
    }

    /// Handles a doorbell: building blocks up to `limit` may be executed.
    #[inline]
    pub fn doorbell(&mut self, limit: u16) {
        self.limit = limit;
        for i in 0..self.pending().min(PREFETCH_AHEAD) {
            let at = (self.consumer as u32 + i) & (self.blocks - 1);
            self.ring.prefetch(at as u64 * WQEBB as u64, PrefetchFor::Read);
        }
    }

    /// Bytes of its ring.
    pub fn ring_bytes(&self) -> u64 {
        self.blocks as u64 * WQEBB as u64
    }

    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Copies the WQE at the consumer index out of the ring, wrapping around the ring's end.
    #[inline(always)]
    pub fn fetch(&self, into: &mut Fetched) -> Control {
        self.fetch_at(self.consumer, into)
    }

    /// Like [`SendQueue::fetch`], at another index.
    #[inline(always)]
    pub fn fetch_at(&self, index: u16, into: &mut Fetched) -> Control {
        let mask = self.blocks - 1;
        let first = index as u32;
        let at = |i: u32| ((first + i) & mask) as usize * WQEBB;
        if self.pending() > PREFETCH_AHEAD {
            self.ring.prefetch(at(PREFETCH_AHEAD) as u64, PrefetchFor::Read);
        }
        let (blocks, _) = into.bytes.as_chunks_mut::<WQEBB>();
        self.ring.fetch_block(at(0), &mut blocks[0]);
        let count =
            Control::from_bytes(blocks[0][..SEGMENT].try_into().expect("16 bytes")).blocks();
        for i in 1..count {
            self.ring.fetch_block(at(i), &mut blocks[i as usize]);
        }
        into.control()
    }

    /// Reads only the control segment of the WQE at the consumer index.
    pub fn fetch_control(&self) -> Control {
        let mut bytes = [0; SEGMENT];
        let at = (self.consumer as u32 & (self.blocks - 1)) as usize * WQEBB;
        self.ring.fetch(at, &mut bytes);
        Control::from_bytes(&bytes)
    }
}

/// A receive queue, a QP's own or shared.
pub(crate) struct RecvQueue {
    pub function: FunctionId,
    pub pd: Pdn,
    ring: Span,
    record: Span,
    _memory: [DmaMemory; 2],
    entries: u32,
    stride: u32,
    /// Indices are masked with this value: 16 bits, or 32 bits in larger queues.
    index_mask: u32,
    initial: u32,
    /// RECV_EN, not the doorbell record, sets the limit.
    pub managed: bool,
    /// Number of QPs that use this SRQ; 0 for a QP's own queue.
    pub users: u32,
    /// True for an SRQ.
    pub shared: bool,
    /// Index of the next receive WQE.
    pub consumer: u32,
    limit: u32,
    /// QPs whose WQE found no receive WQE here (RNR).
    pub waiters: QpList,
    /// The record poller polls this queue's record.
    pub polled: bool,
    /// An SRQ's limit: an event is raised when fewer receive WQEs are left. 0 if not armed.
    pub srq_limit: u32,
}

impl RecvQueue {
    pub fn new(
        function: FunctionId,
        pd: Pdn,
        spec: RecvSpec,
        managed: bool,
        shared: bool,
    ) -> Result<Self, Error> {
        let max = if managed { RECV_ENTRIES_MAX } else { RECV_ENTRIES_WIDE_MAX };
        power_of_two("entries of a receive ring", spec.entries, max)?;
        if spec.stride == 0
            || !spec.stride.is_multiple_of(SEGMENT as u32)
            || spec.stride > RECV_STRIDE_MAX
        {
            return Err(Error::Argument {
                what: "the stride of a receive ring",
                value: spec.stride as u64,
                must: "a multiple of 16 up to 1024",
            });
        }
        check_memory(
            "a receive ring",
            &spec.ring,
            spec.entries as u64 * spec.stride as u64,
            SEGMENT,
        )?;
        check_memory("a receive record", &spec.record, 8, 8)?;
        let index_mask = if spec.entries > RECV_ENTRIES_MAX { u32::MAX } else { 0xffff };
        let initial = spec.initial_consumer & index_mask;
        Ok(Self {
            function,
            pd,
            ring: Span::of(&spec.ring),
            record: Span::of(&spec.record),
            _memory: [spec.ring, spec.record],
            entries: spec.entries,
            stride: spec.stride,
            index_mask,
            initial,
            managed,
            users: 0,
            shared,
            consumer: initial,
            limit: initial,
            waiters: QpList::EMPTY,
            polled: false,
            srq_limit: 0,
        })
    }

    pub fn reset(&mut self) {
        self.consumer = self.initial;
        self.limit = self.initial;
    }

    /// Bytes of its ring.
    pub fn ring_bytes(&self) -> u64 {
        self.entries as u64 * self.stride as u64
    }

    /// Index up to which receive WQEs may be used.
    #[inline]
    pub fn limit(&self) -> u32 {
        if self.managed {
            self.limit
        } else {
            self.record.load_be32(0, Ordering::Acquire) & self.index_mask
        }
    }

    /// Number of receive WQEs in the ring.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Bytes of a receive WQE.
    pub fn stride(&self) -> u32 {
        self.stride
    }

    pub fn set_limit(&mut self, limit: u32) {
        self.limit = limit & self.index_mask;
    }

    /// Number of receive WQEs that may be used, 0 if the limit is below the consumer index.
    #[inline]
    pub fn credits(&self) -> u32 {
        let ahead = self.limit().wrapping_sub(self.consumer) & self.index_mask;
        if ahead > self.index_mask / 2 + 1 { 0 } else { ahead }
    }

    /// Copies the receive WQE at the consumer index into `into` and returns its bytes.
    #[inline]
    pub fn fetch<'a>(&self, into: &'a mut [u8; RECV_STRIDE_MAX as usize]) -> &'a [u8] {
        let at = (self.consumer & (self.entries - 1)) as usize * self.stride as usize;
        let bytes = &mut into[..self.stride as usize];
        self.ring.fetch(at, bytes);
        bytes
    }

    /// Returns the index of the consumed WQE: `taken`, or the next WQE, which is then consumed.
    #[inline]
    pub fn consume(&mut self, taken: Option<u16>) -> u16 {
        taken.unwrap_or_else(|| {
            let index = self.consumer as u16;
            self.advance();
            index
        })
    }

    #[inline]
    pub fn advance(&mut self) {
        self.consumer = self.consumer.wrapping_add(1) & self.index_mask;
    }
}

/// A completion queue.
pub(crate) struct CompletionQueue {
    pub function: FunctionId,
    ring: Span,
    record: Span,
    _memory: [DmaMemory; 2],
    entries: u32,
    /// Running number of the next completion, 24 bits.
    pub count: u32,
    /// The consumer's index when the NIC last read it.
    consumer_seen: u32,
    ignore_overrun: bool,
    /// A completion found the ring full: no further completions are written.
    pub overrun: bool,
    /// Number of send and receive queues that complete to this CQ.
    pub users: u32,
    /// QPs that WAIT for this CQ; all belong to its function.
    pub waiters: QpList,
    /// Number of times that all waiters were woken. Distinguishes stale waiters.
    pub wakes: u32,
    /// Index of its function's entry in the scheduler.
    pub sched_index: u32,
    /// A `Completion` event was raised and not yet taken by the port.
    pub reported: bool,
    /// The engine's list of CQs to check at the end of `poll` contains this CQ.
    pub touched: bool,
    /// Since the last check of `armed`, a completion had an error or the solicited flag.
    pub solicited: bool,
}

impl CompletionQueue {
    pub fn new(function: FunctionId, sched_index: u32, spec: CqSpec) -> Result<Self, Error> {
        power_of_two("entries of a CQ", spec.entries, CQ_ENTRIES_MAX)?;
        check_memory("a CQ's ring", &spec.ring, spec.entries as u64 * cqe::CQE as u64, cqe::CQE)?;
        check_memory("a CQ's record", &spec.record, 8, 8)?;
        let count = spec.initial_count & COUNT_MASK;
        Ok(Self {
            function,
            ring: Span::of(&spec.ring),
            record: Span::of(&spec.record),
            _memory: [spec.ring, spec.record],
            entries: spec.entries,
            count,
            consumer_seen: count,
            ignore_overrun: spec.ignore_overrun,
            overrun: false,
            users: 0,
            waiters: QpList::EMPTY,
            wakes: 0,
            sched_index,
            reported: false,
            touched: false,
            solicited: false,
        })
    }

    /// Bytes of its ring.
    pub fn ring_bytes(&self) -> u64 {
        self.entries as u64 * cqe::CQE as u64
    }

    /// Writes a completion. Returns false if the ring is full.
    #[inline]
    pub fn push(&mut self, cqe: &Cqe) -> bool {
        if !self.ignore_overrun && !self.has_room() {
            self.overrun = true;
            return false;
        }
        let at = (self.count & (self.entries - 1)) as u64 * cqe::CQE as u64;
        let owner = (self.count / self.entries) & 1;
        store(cqe, self.ring.part(at, cqe::CQE as u64), owner as u8);
        let ahead =
            (self.count.wrapping_add(PREFETCH_AHEAD) & (self.entries - 1)) as u64 * cqe::CQE as u64;
        self.ring.prefetch(ahead, PrefetchFor::Write);
        self.count = (self.count + 1) & COUNT_MASK;
        true
    }

    #[inline]
    fn has_room(&mut self) -> bool {
        let full = |seen: u32| (self.count.wrapping_sub(seen) & COUNT_MASK) >= self.entries;
        if self.overrun {
            return false;
        }
        if full(self.consumer_seen) {
            let seen = self.record.load_be32(0, Ordering::Acquire) & COUNT_MASK;
            if full(seen) {
                return false;
            }
            self.consumer_seen = seen;
        }
        true
    }

    /// Returns whether completion number `index` (24 bits) has been written.
    #[inline]
    pub fn reached(&self, index: u32) -> bool {
        self.count.wrapping_sub(1).wrapping_sub(index) & 0x80_0000 == 0
    }

    /// Clears `armed` if the completions since the last call match the armed kind; returns whether
    /// it was set. Requires a full fence before the call.
    pub fn disarm(&mut self) -> bool {
        let solicited = std::mem::take(&mut self.solicited);
        self.record.take_flag(4, solicited)
    }
}

/// Condition that a QP waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Waiting {
    /// The completion count of a CQ.
    Count(Cqn),
    /// A receive WQE in this receive queue.
    Receive(u32),
}

fn power_of_two(what: &'static str, value: u32, max: u32) -> Result<(), Error> {
    if !value.is_power_of_two() || value > max {
        let must = match max {
            SEND_BLOCKS_MAX => "a power of two up to 32768",
            CQ_ENTRIES_MAX => "a power of two up to 8388608",
            _ => "a power of two up to 16777216 (32768 if managed)",
        };
        return Err(Error::Argument { what, value: value as u64, must });
    }
    Ok(())
}

fn check_memory(
    what: &'static str,
    memory: &DmaMemory,
    need: u64,
    align: usize,
) -> Result<(), Error> {
    if (memory.len() as u64) < need {
        return Err(Error::TooSmall { what, need, have: memory.len() as u64 });
    }
    if !(memory.as_ptr() as usize).is_multiple_of(align) {
        let must = match align {
            64 => "aligned to 64 bytes",
            16 => "aligned to 16 bytes",
            _ => "aligned to 8 bytes",
        };
        return Err(Error::Argument { what, value: memory.addr(), must });
    }
    Ok(())
}

/// Stores an entry in a CQ's ring. The word that makes the entry valid is stored last.
#[inline]
fn store(cqe: &Cqe, entry: Span, owner: u8) {
    let [a, b, c, last] = cqe.words(owner);
    entry.store_be64(32, a, Ordering::Relaxed);
    entry.store_be64(40, b, Ordering::Relaxed);
    entry.store_be64(48, c, Ordering::Relaxed);
    entry.store_be64(56, last, Ordering::Release);
}
