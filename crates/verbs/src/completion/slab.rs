//! Slots in which operations wait for their completions.
//!
//! A slot belongs to one operation. It is claimed before the operation is posted and released when
//! the completion has arrived and was either taken or abandoned. The work request's id holds the
//! slot's index and generation, so that a completion finds its slot, and a completion of an earlier
//! generation is dropped. The position tells the requests of a list apart, which share a slot.
//!
//! ```text
//! id:   63       32 31     26 25  0    word: 63       32 31    0
//!      +-----------+---------+------+       +-----------+-------+
//!      | generation| position| slot |       | generation| state |
//!      +-----------+---------+------+       +-----------+-------+
//!
//!            claim          filling            filled          take
//!  Free ──────────> Waiting ───────> Filling ─────────> Done ────────> Free
//!                    │   ▲ watch       ▲  │
//!                    ├──>Watched ──────┘  └──> (was Abandoned) Free
//!                    └──>Abandoned ────┘
//! ```
//!
//! Slots are never moved or deallocated: segments double in size, and a free list (with a counter
//! against ABA) links the free slots. No operation allocates memory.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::task::Waker;

use parking_lot::Mutex;

use crate::{Completion, CompletionKind, Key, Qpn, Status, WcOpcode};

/// Slots of the first segment; each further segment has twice as many.
const FIRST_SEGMENT: u32 = 64;
/// Maximum number of segments: 64 * (2^20 - 1) slots in total.
const SEGMENTS: usize = 20;
/// Lowest bit of the position in an id, and the mask of the slot's index below.
const POSITION_SHIFT: u32 = 26;
const INDEX: u32 = (1 << POSITION_SHIFT) - 1;
/// Number of positions that an id can hold.
pub(super) const POSITIONS: u32 = 1 << (u32::BITS - POSITION_SHIFT);
const _: () = assert!(FIRST_SEGMENT as u64 * ((1 << SEGMENTS) - 1) <= INDEX as u64 + 1);
/// End marker of the free list.
const NONE: u32 = u32::MAX;

const FREE: u32 = 0;
const WAITING: u32 = 1;
const WATCHED: u32 = 2;
const FILLING: u32 = 3;
const DONE: u32 = 4;
const ABANDONED: u32 = 5;

/// Slot table of a completer.
pub(super) struct Slab {
    segments: [OnceLock<Box<[Slot]>>; SEGMENTS],
    /// Index of the first free slot; the upper half counts changes.
    free: AtomicU64,
    /// Number of allocated segments.
    grown: Mutex<usize>,
}

/// Slot of one operation, on a cache line of its own.
#[repr(align(64))]
struct Slot {
    word: AtomicU64,
    result: [AtomicU64; 2],
    next_free: AtomicU32,
    waker: Mutex<Option<Waker>>,
}

/// Index and generation of a claimed slot: the id of its work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SlotId(pub u64);

impl SlotId {
    fn new(index: u32, generation: u32) -> Self {
        Self((generation as u64) << 32 | index as u64)
    }

    fn index(self) -> u32 {
        self.0 as u32 & INDEX
    }

    /// The same slot, for the request at `position` of a list.
    pub fn at(self, position: u32) -> Self {
        debug_assert!(position < POSITIONS, "position {position} of a list");
        Self(
            self.0 & !(((POSITIONS - 1) as u64) << POSITION_SHIFT)
                | (position as u64) << POSITION_SHIFT,
        )
    }

    /// Position of the request in its list.
    pub fn position(self) -> u32 {
        self.0 as u32 >> POSITION_SHIFT
    }

    fn word(self, state: u32) -> u64 {
        self.0 & !0xffff_ffff | state as u64
    }
}

/// Result of filling a slot.
pub(super) enum Filled {
    /// The completion is stored and will be taken by a waiting thread.
    Kept,
    /// The completion is stored and the watcher must be woken.
    Watched(Option<Waker>),
    /// The completion is dropped: its operation was abandoned, or the id is not of this completer.
    Unwanted,
}

impl Slab {
    pub fn new() -> Self {
        Self {
            segments: [const { OnceLock::new() }; SEGMENTS],
            free: AtomicU64::new(NONE as u64),
            grown: Mutex::new(0),
        }
    }

    /// Claims a free slot for an operation. Returns `None` if all slots are in use.
    #[inline]
    pub fn claim(&self) -> Option<SlotId> {
        loop {
            let head = self.free.load(Ordering::Acquire);
            let index = head as u32;
            if index == NONE {
                self.grow()?;
                continue;
            }
            let slot = self.slot(index).expect("a slot of the free list");
            let next = slot.next_free.load(Ordering::Relaxed);
            if self.swap_free(head, next) {
                let generation = (slot.word.load(Ordering::Relaxed) >> 32) as u32;
                let id = SlotId::new(index, generation);
                slot.word.store(id.word(WAITING), Ordering::Release);
                return Some(id);
            }
        }
    }

    /// Releases a slot whose operation was not posted.
    pub fn unclaim(&self, id: SlotId) {
        self.release(id);
    }

    /// Stores a completion in its slot.
    #[inline]
    pub fn fill(&self, id: SlotId, completion: &Completion) -> Filled {
        let Some(slot) = self.slot(id.index()) else { return Filled::Unwanted };
        let mut before = slot.word.load(Ordering::Acquire);
        loop {
            let state = before as u32;
            // Several completions may carry one id, when the requests of a list fail one by one.
            // Only the first is stored.
            if before != id.word(state) || !matches!(state, WAITING | WATCHED | ABANDONED) {
                return Filled::Unwanted;
            }
            match slot.word.compare_exchange_weak(
                before,
                id.word(FILLING),
                Ordering::Acquire,
                Ordering::Acquire,
            ) {
                Ok(_) => break,
                Err(now) => before = now,
            }
        }
        if before as u32 == ABANDONED {
            self.release(id);
            return Filled::Unwanted;
        }
        let [a, b] = pack(completion);
        slot.result[0].store(a, Ordering::Relaxed);
        slot.result[1].store(b, Ordering::Relaxed);
        slot.word.store(id.word(DONE), Ordering::SeqCst);
        if before as u32 == WATCHED {
            // `None` if the watcher has just seen the state Done.
            return Filled::Watched(slot.waker.lock().take());
        }
        Filled::Kept
    }

    /// Returns whether the completion has arrived.
    #[inline]
    pub fn is_done(&self, id: SlotId) -> bool {
        self.claimed_slot(id).word.load(Ordering::SeqCst) as u32 == DONE
    }

    /// Takes the completion if it has arrived, and releases the slot.
    #[inline]
    pub fn take(&self, id: SlotId) -> Option<Completion> {
        let slot = self.claimed_slot(id);
        if slot.word.load(Ordering::Acquire) as u32 != DONE {
            return None;
        }
        let packed = [0, 1].map(|i| slot.result[i].load(Ordering::Relaxed));
        self.release(id);
        Some(unpack(id.0, packed))
    }

    /// Registers a waker for the completion.
    ///
    /// The first result is false if the completion has already arrived. The second is true if the
    /// slot had no waker before.
    pub fn watch(&self, id: SlotId, waker: &Waker) -> (bool, bool) {
        let slot = self.claimed_slot(id);
        {
            let mut place = slot.waker.lock();
            match &mut *place {
                Some(old) => old.clone_from(waker),
                None => *place = Some(waker.clone()),
            }
        }
        let before = id.word(WAITING);
        match slot.word.compare_exchange(
            before,
            id.word(WATCHED),
            Ordering::SeqCst,
            Ordering::SeqCst,
        ) {
            Ok(_) => (true, true),
            Err(now) if now as u32 == WATCHED => (true, false),
            Err(_) => {
                // The completion has arrived or is just being stored.
                while slot.word.load(Ordering::Acquire) as u32 == FILLING {
                    std::thread::yield_now();
                }
                *slot.waker.lock() = None;
                (false, false)
            }
        }
    }

    /// Abandons the operation. The slot stays reserved until the completion arrives. Returns
    /// whether the slot had a waker.
    pub fn abandon(&self, id: SlotId) -> bool {
        let slot = self.claimed_slot(id);
        loop {
            let now = slot.word.load(Ordering::Acquire);
            match now as u32 {
                FILLING => std::thread::yield_now(),
                DONE => {
                    self.release(id);
                    return false;
                }
                state => {
                    let abandoned = id.word(ABANDONED);
                    let (ok, relaxed) = (Ordering::AcqRel, Ordering::Relaxed);
                    if slot.word.compare_exchange(now, abandoned, ok, relaxed).is_ok() {
                        *slot.waker.lock() = None;
                        return state == WATCHED;
                    }
                }
            }
        }
    }

    /// Wakes all watchers.
    pub fn wake_all(&self) {
        for slot in self.segments.iter().filter_map(OnceLock::get).flatten() {
            let waker = slot.waker.lock().clone();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    fn release(&self, id: SlotId) {
        let slot = self.claimed_slot(id);
        let generation = ((id.0 >> 32) as u32).wrapping_add(1);
        slot.word.store((generation as u64) << 32 | FREE as u64, Ordering::Release);
        loop {
            let head = self.free.load(Ordering::Relaxed);
            slot.next_free.store(head as u32, Ordering::Relaxed);
            if self.swap_free(head, id.index()) {
                return;
            }
        }
    }

    /// Makes `index` the first free slot. Fails if the list has changed since `head` was read.
    #[inline]
    fn swap_free(&self, head: u64, index: u32) -> bool {
        let new = ((head >> 32).wrapping_add(1)) << 32 | index as u64;
        self.free.compare_exchange(head, new, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    #[cold]
    fn grow(&self) -> Option<()> {
        let mut grown = self.grown.lock();
        if self.free.load(Ordering::Acquire) as u32 != NONE {
            return Some(());
        }
        let segment = *grown;
        if segment == SEGMENTS {
            return None;
        }
        let count = FIRST_SEGMENT << segment;
        let first = count - FIRST_SEGMENT;
        let slots = (0..count)
            .map(|i| Slot {
                word: AtomicU64::new(FREE as u64),
                result: [const { AtomicU64::new(0) }; 2],
                next_free: AtomicU32::new(if i + 1 < count { first + i + 1 } else { NONE }),
                waker: Mutex::new(None),
            })
            .collect();
        assert!(self.segments[segment].set(slots).is_ok(), "a segment is made once");
        *grown += 1;
        let last = self.slot(first + count - 1).expect("a slot made just now");
        loop {
            let head = self.free.load(Ordering::Relaxed);
            last.next_free.store(head as u32, Ordering::Relaxed);
            if self.swap_free(head, first) {
                return Some(());
            }
        }
    }

    #[inline]
    fn slot(&self, index: u32) -> Option<&Slot> {
        let segment = (index / FIRST_SEGMENT).checked_add(1)?.ilog2();
        let first = (FIRST_SEGMENT << segment) - FIRST_SEGMENT;
        self.segments.get(segment as usize)?.get()?.get((index - first) as usize)
    }

    /// Returns the slot of an id that was claimed and not released.
    #[inline]
    fn claimed_slot(&self, id: SlotId) -> &Slot {
        self.slot(id.index()).expect("a claimed slot")
    }
}

/// Packs a completion into two words:
///
/// ```text
/// bytes (32) | immediate data, or the invalidated key (32)
/// 0 (10) | position (6) | vendor error (8) | 0 | opcode (4) | flags: invalidated, imm, receive (3)
///        | syndrome (8) | QPN (24)
/// ```
fn pack(c: &Completion) -> [u64; 2] {
    let flag = |set: bool, bit: u32| (set as u64) << bit;
    let word = c.imm.or(c.invalidated.map(|key| key.0)).unwrap_or(0);
    [
        (c.bytes as u64) << 32 | word as u64,
        c.qpn.raw() as u64
            | (c.status.syndrome() as u64) << 24
            | flag(c.kind == CompletionKind::Receive, 32)
            | flag(c.imm.is_some(), 33)
            | flag(c.invalidated.is_some(), 34)
            | (c.opcode as u64) << 35
            | (c.vendor_error as u64) << 40
            | (SlotId(c.id).position() as u64) << 48,
    ]
}

fn unpack(id: u64, [a, b]: [u64; 2]) -> Completion {
    let flag = |bit: u32| b >> bit & 1 == 1;
    Completion {
        id: SlotId(id).at((b >> 48) as u32).0,
        qpn: Qpn::new(b as u32),
        status: Status::from_syndrome((b >> 24) as u8),
        kind: if flag(32) { CompletionKind::Receive } else { CompletionKind::Send },
        opcode: WcOpcode::ALL.get((b >> 35 & 0xf) as usize).copied().unwrap_or(WcOpcode::Unknown),
        bytes: (a >> 32) as u32,
        imm: flag(33).then_some(a as u32),
        invalidated: flag(34).then_some(Key(a as u32)),
        vendor_error: (b >> 40) as u8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn completion(id: SlotId, bytes: u32) -> Completion {
        Completion { id: id.0, bytes, ..Completion::EMPTY }
    }

    #[test]
    fn a_slot_takes_one_completion_of_its_generation() {
        let slab = Slab::new();
        let id = slab.claim().unwrap();
        assert!(slab.take(id).is_none());
        assert!(matches!(slab.fill(id, &completion(id, 5)), Filled::Kept));
        assert!(matches!(slab.fill(id, &completion(id, 6)), Filled::Unwanted));
        assert_eq!(slab.take(id).unwrap().bytes, 5);
        assert!(matches!(slab.fill(id, &completion(id, 7)), Filled::Unwanted));
        let again = slab.claim().unwrap();
        assert_eq!(again.index(), id.index());
        assert_ne!(again, id);
        assert!(matches!(slab.fill(id, &completion(id, 8)), Filled::Unwanted));
        assert!(slab.take(again).is_none());
    }

    #[test]
    fn completion_of_a_list_keeps_its_position() {
        let slab = Slab::new();
        let id = slab.claim().unwrap();
        let third = id.at(2);
        assert_eq!((third.index(), third.position(), third.at(0)), (id.index(), 2, id));
        assert!(matches!(slab.fill(third, &completion(third, 5)), Filled::Kept));
        assert!(matches!(slab.fill(id.at(3), &completion(id.at(3), 6)), Filled::Unwanted));
        let taken = slab.take(id).unwrap();
        assert_eq!((SlotId(taken.id).position(), taken.bytes), (2, 5));
        let last = id.at(POSITIONS - 1);
        assert_eq!((last.index(), last.position()), (id.index(), POSITIONS - 1));
    }

    #[test]
    fn abandoned_slot_is_freed_by_its_completion() {
        let slab = Slab::new();
        let id = slab.claim().unwrap();
        slab.abandon(id);
        let many = if cfg!(miri) { 100 } else { 1000 };
        let others: Vec<_> = (0..many).map(|_| slab.claim().unwrap()).collect();
        assert!(others.iter().all(|o| o.index() != id.index()));
        assert!(matches!(slab.fill(id, &completion(id, 1)), Filled::Unwanted));
        assert_eq!(slab.claim().unwrap().index(), id.index());
    }

    #[test]
    fn threads_never_share_a_slot() {
        let slab = Slab::new();
        let (rounds, at_a_time) = if cfg!(miri) { (10, 5) } else { (2000, 50) };
        std::thread::scope(|s| {
            for t in 0..4 {
                let slab = &slab;
                s.spawn(move || {
                    for i in 0..rounds {
                        let ids: Vec<_> = (0..at_a_time).map(|_| slab.claim().unwrap()).collect();
                        let bytes = t << 20 | i;
                        ids.iter().for_each(|id| drop(slab.fill(*id, &completion(*id, bytes))));
                        assert!(ids.iter().all(|id| slab.take(*id).unwrap().bytes == bytes));
                    }
                });
            }
        });
        assert!(*slab.grown.lock() <= 3, "200 slots at a time");
    }

    proptest! {
        #[test]
        fn a_completion_survives_packing(
            id: u64, qpn: u32, syndrome: u8, receive: bool, bytes: u32, word: u32, what in 0..3,
            opcode in 0..WcOpcode::ALL.len(), vendor_error: u8,
        ) {
            let c = Completion {
                id,
                qpn: Qpn::new(qpn),
                status: Status::from_syndrome(syndrome),
                kind: if receive { CompletionKind::Receive } else { CompletionKind::Send },
                opcode: WcOpcode::ALL[opcode],
                bytes,
                imm: (what == 1).then_some(word),
                invalidated: (what == 2).then_some(Key(word)),
                vendor_error,
            };
            prop_assert_eq!(unpack(SlotId(id).at(0).0, pack(&c)), c);
        }
    }
}
