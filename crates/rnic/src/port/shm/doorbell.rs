//! The doorbell page of a function, as both sides see it.
//!
//! ```text
//! +0    sleeping (u32): written by the NIC. 0 awake, 1 asleep, 2 asleep with a SEND that waits
//!       for a receive, 3 ended
//! +4    where (u32): written by the NIC: the CPU that it runs on, plus 1
//! +64   waiter (u32): written by the client: a CPU, plus 1, where somebody waits for the NIC
//! +68   events (u32): the client stores 1 when it waits for asynchronous events, the NIC swaps it to 0
//!       and wakes it
//! +128  doorbell 0 (u32) | doorbell 1 | ... 16 of them per cache line: written by the client
//!
//! doorbell:  31          16 15           0
//!           +--------------+--------------+
//!           |  generation  |   producer   |
//!           +--------------+--------------+
//! ```
//!
//! The page is memory of the client, given to the NIC when it attaches. A doorbell holds the index up to
//! which the client has filled the send ring. The generation changes when the queue pair in the
//! slot is reset or another one takes the slot, so that the first doorbell after it differs from
//! the last one before, whatever its index.
//!
//! Going to sleep and ringing are a store-buffer (Dekker) pair:
//!
//! ```text
//! client: store doorbell; fence; load sleeping          NIC: store sleeping; fence; load doorbells
//! ```
//!
//! Where a client that polls for a completion and the NIC share a CPU, each keeps the other from
//! running: the client sees that in `where`, leaves its CPU in `waiter` and yields; the NIC, when it
//! has nothing to do, finds its own CPU there and yields back at once. Both words are hints.
//!
//! With both fences sequentially consistent at least one of them sees the other's store: either
//! the client finds the NIC asleep and writes its eventfd, or the NIC finds the doorbell and does not
//! sleep. Everything in the page comes from a client that may be hostile; it is only ever compared
//! with the value seen last, and its lower half is an index that the engine bounds by the ring.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::events::EventWord;
use super::super::handshake::must_wake_nic;
use super::seat::Seat;
use crate::memory::DmaMemory;

/// The NIC polls.
pub(super) const AWAKE: u32 = 0;
/// The NIC sleeps.
pub(super) const ASLEEP: u32 = 1;
/// The NIC sleeps, and a receive that is posted wakes it: a SEND waits for one, or a QP in Error flushes them.
pub(super) const ASLEEP_RNR: u32 = 2;

/// The NIC has ended.
pub(super) const GONE: u32 = 3;

/// Offset of the word `sleeping`.
pub const SLEEPING: usize = 0;
/// Offset of the word `where`.
pub const WHERE: usize = 4;
/// Offset of the word `waiter`.
pub const WAITER: usize = 64;
/// Offset of the word that who waits for asynchronous events sleeps on.
pub const EVENTS: usize = 68;
/// Offset of the first doorbell.
pub const DOORBELLS: usize = 128;
/// Bytes of a page with `slots` doorbells.
pub(super) fn page_bytes(slots: u32) -> usize {
    DOORBELLS + slots as usize * 4
}

/// The most bytes of a page: 16384 doorbells, in whole pages.
pub(super) const PAGE_BYTES_MAX: usize = 68 << 10;

/// Doorbells for which a page of `bytes` has room.
pub(super) fn doorbells_in(bytes: usize) -> u32 {
    (bytes.saturating_sub(DOORBELLS) / 4).try_into().unwrap_or(u32::MAX)
}

/// The CPU that the calling thread runs on, plus 1.
#[inline]
pub(super) fn this_cpu() -> u32 {
    // SAFETY: takes no arguments and touches no memory of ours.
    unsafe { libc::sched_getcpu() }.wrapping_add(1) as u32
}

/// The word for asynchronous events in a doorbell page.
pub(super) fn event_word(page: &DmaMemory) -> EventWord {
    EventWord::new(page.slice(EVENTS, 4).expect("a page has its words"))
}

/// A client's view of its function's doorbell page, with the eventfd that wakes the NIC.
pub(super) struct Page {
    pub memory: DmaMemory,
    pub slots: u32,
    pub wake: OwnedFd,
    /// Where callers may run the NIC themselves.
    pub seat: Option<Arc<Seat>>,
}

impl Page {
    /// To be called after a store that the NIC should see: wakes it if it sleeps as deep as
    /// `from`.
    #[inline]
    pub fn wake_if_asleep(&self, from: u32) {
        if must_wake_nic(self.memory.word32(SLEEPING), from) {
            self.wake_nic();
        }
    }

    /// A doorbell was rung: wakes the NIC if it sleeps, or runs it.
    #[inline]
    pub fn rung(&self) {
        match &self.seat {
            None => self.wake_if_asleep(ASLEEP),
            Some(seat) => {
                if !seat.rung(|| self.memory.word32(SLEEPING).load(Ordering::Relaxed) >= ASLEEP) {
                    self.wake_nic();
                }
            }
        }
    }

    /// Yields the calling thread's CPU to the NIC if that runs there; false if it does not.
    #[inline]
    pub fn offer_cpu(&self) -> bool {
        let here = this_cpu();
        if self.memory.word32(WHERE).load(Ordering::Relaxed) != here {
            return false;
        }
        self.memory.word32(WAITER).store(here, Ordering::Relaxed);
        rustix::thread::sched_yield();
        true
    }

    /// The word that who waits for asynchronous events sleeps on.
    pub fn event_word(&self) -> EventWord {
        event_word(&self.memory)
    }

    #[cold]
    fn wake_nic(&self) {
        // The descriptor does not block; if its counter is full, the NIC is woken already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// The doorbell of one send queue.
pub struct MappedDoorbell {
    page: Arc<Page>,
    at: usize,
    generation: u16,
}

impl MappedDoorbell {
    /// The doorbell in `slot`, where there is one.
    pub(super) fn new(page: Arc<Page>, slot: u32) -> Option<Self> {
        if slot >= page.slots {
            return None;
        }
        let at = DOORBELLS + slot as usize * 4;
        let last = page.memory.word32(at).load(Ordering::Relaxed);
        Some(Self { page, at, generation: ((last >> 16) as u16).wrapping_add(1) })
    }

    /// Stores the producer index and wakes the NIC if it sleeps.
    #[inline]
    pub fn ring(&mut self, producer: u16) {
        let value = (self.generation as u32) << 16 | producer as u32;
        self.page.memory.word32(self.at).store(value, Ordering::Release);
        self.page.rung();
    }

    /// Starts a new generation.
    pub fn reset(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }
}

/// Calls `f` in a thread that stays on one CPU, with the number of that.
#[cfg(test)]
pub(super) fn on_one_cpu(f: impl FnOnce(u32) + Send) {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let pinned = || {
        let allowed = sched_getaffinity(None).unwrap();
        let cpu = (0..CpuSet::MAX_CPU).rev().find(|cpu| allowed.is_set(*cpu)).unwrap();
        let mut only = CpuSet::new();
        only.set(cpu);
        sched_setaffinity(None, &only).unwrap();
        f(cpu as u32);
    };
    std::thread::scope(|scope| scope.spawn(pinned).join()).expect("the thread has panicked");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_room_for_the_doorbells_that_it_was_made_for() {
        for slots in [0, 1, 2016, 16 << 10] {
            assert_eq!(doorbells_in(page_bytes(slots)), slots);
        }
        assert_eq!(doorbells_in(DOORBELLS + 3), 0);
        assert_eq!(doorbells_in(0), 0);
        assert!(doorbells_in(PAGE_BYTES_MAX) >= 16 << 10);
    }

    #[test]
    fn each_generation_of_a_doorbell_differs_from_the_one_before() {
        let memory = DmaMemory::anonymous(page_bytes(2)).unwrap();
        let wake = super::super::nic_thread::eventfd().unwrap();
        let page = Arc::new(Page { memory, slots: 2, wake, seat: None });
        let word = page.memory.word32(DOORBELLS + 4);
        word.store(0x0007_1234, Ordering::Relaxed);
        let mut bell = MappedDoorbell::new(page.clone(), 1).unwrap();
        bell.ring(0x1235);
        assert_eq!(word.load(Ordering::Relaxed), 0x0008_1235);
        bell.reset();
        bell.ring(0);
        assert_eq!(word.load(Ordering::Relaxed), 0x0009_0000);
        assert!(MappedDoorbell::new(page.clone(), 2).is_none());
        // Another owner of the slot, with the same index.
        MappedDoorbell::new(page.clone(), 1).unwrap().ring(0);
        assert_eq!(word.load(Ordering::Relaxed), 0x000a_0000);
    }

    #[test]
    fn this_cpu_is_the_one_that_the_thread_runs_on_plus_1() {
        on_one_cpu(|cpu| assert_eq!(this_cpu(), cpu + 1));
    }
}
