//! The doorbell page of a function: layout and handshakes.
//!
//! ```text
//! +0    sleeping (u32): written by the NIC. 0 awake, 1 asleep, 2 asleep and woken by posted
//!       receives, 3 ended
//! +4    where (u32): written by the NIC: the number of its CPU, plus 1
//! +64   waiter (u32): written by the client: the number of a CPU, plus 1, on which a thread of the
//!       client waits for the NIC (a yield request)
//! +68   events (u32): the client stores 1 before it waits for asynchronous events; the NIC swaps
//!       it to 0 and wakes the client
//! +128  doorbell 0 (u32) | doorbell 1 | ... 16 per cache line: written by the client
//!
//! doorbell:  31          16 15           0
//!           +--------------+--------------+
//!           |  generation  |   producer   |
//!           +--------------+--------------+
//! ```
//!
//! The page is memory of the client, which shares it with the NIC when it attaches. A doorbell
//! holds the index up to which the client has filled the send ring (producer). The generation
//! changes when the queue pair of the slot is reset or the slot gets another queue pair. So the
//! first doorbell value after the change differs from the last one before, even with the same
//! index.
//!
//! The NIC's sleep and a doorbell write are a store-buffer (Dekker) pair:
//!
//! ```text
//! client: store doorbell; fence; load sleeping          NIC: store sleeping; fence; load doorbells
//! ```
//!
//! Both fences are sequentially consistent, so at least one side sees the other's store: either the
//! client finds the NIC asleep and writes the NIC's eventfd, or the NIC finds the doorbell and does
//! not sleep.
//!
//! If a polling client and the NIC share a CPU, each keeps the other from running. The client sees
//! this in `where`, stores its CPU in `waiter` and yields; the NIC, when it has no work, finds its
//! own CPU there and yields back at once. Both words are hints.
//!
//! Everything in the page comes from a client that may be hostile. The NIC only compares a doorbell
//! with the value it saw last; the lower half is an index that the engine bounds by the ring.

use super::super::events::EventWord;
use verbs::DmaMemory;

/// The NIC polls.
pub(super) const AWAKE: u32 = 0;
/// The NIC sleeps.
pub(super) const ASLEEP: u32 = 1;
/// The NIC sleeps, and a posted receive must wake it: a SEND is blocked on a receive, or a QP in
/// the error state has to flush receives.
pub(super) const ASLEEP_RNR: u32 = 2;
/// The NIC has ended.
pub(super) const GONE: u32 = 3;

/// Offset of the word `sleeping`.
pub const SLEEPING: usize = 0;
/// Offset of the word `where`.
pub const WHERE: usize = 4;
/// Offset of the word `waiter`.
pub const WAITER: usize = 64;
/// Offset of the word `events`.
pub const EVENTS: usize = 68;
/// Offset of the first doorbell.
pub const DOORBELLS: usize = 128;

/// Bytes of a page with `slots` doorbells.
pub(super) fn page_bytes(slots: u32) -> usize {
    DOORBELLS + slots as usize * 4
}

/// Maximum bytes of a page: 16,384 doorbells, rounded up to whole pages.
pub(super) const PAGE_BYTES_MAX: usize = 68 << 10;

/// Number of doorbells that fit a page of `bytes`.
pub(super) fn doorbells_in(bytes: usize) -> u32 {
    (bytes.saturating_sub(DOORBELLS) / 4).try_into().unwrap_or(u32::MAX)
}

/// The CPU that the calling thread runs on, plus 1.
#[inline]
pub(super) fn this_cpu() -> u32 {
    // SAFETY: `sched_getcpu` takes no arguments and accesses no memory of this program.
    unsafe { libc::sched_getcpu() }.wrapping_add(1) as u32
}

/// The word for asynchronous events in a doorbell page.
pub(super) fn event_word(page: &DmaMemory) -> EventWord {
    EventWord::new(page.slice(EVENTS, 4).expect("a page has its words"))
}

/// Calls `f` with a CPU's number, in a thread that is pinned to that CPU.
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
    fn page_fits_the_doorbells_it_was_sized_for() {
        for slots in [0, 1, 2016, 16 << 10] {
            assert_eq!(doorbells_in(page_bytes(slots)), slots);
        }
        assert_eq!(doorbells_in(DOORBELLS + 3), 0);
        assert_eq!(doorbells_in(0), 0);
        assert!(doorbells_in(PAGE_BYTES_MAX) >= 16 << 10);
    }

    #[test]
    fn this_cpu_returns_the_cpu_number_plus_one() {
        on_one_cpu(|cpu| assert_eq!(this_cpu(), cpu + 1));
    }
}
