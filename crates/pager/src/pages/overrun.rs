//! Pages beyond the limit, while no page can be taken out.
//!
//! A page that the kernel has pinned stays where it is ([`crate::memory::Stop::Pinned`]): a fixed
//! buffer of io_uring, a memory region of an RDMA NIC, memory that another process reads by
//! `process_vm_readv`. If pinned pages fill the limit, a fault finds no room, and the pins may last
//! until the fault is served: two processes that read each other's memory wait for each other.
//!
//! So the process may go beyond its limit, by as many pages as the faults need. It ends if it stays
//! beyond the limit for longer than [`Allowance::time_ns`], or needs more than twice the bound.

use std::sync::atomic::Ordering;

use crate::config::EXIT_PAGER;
use crate::descriptor;
use crate::memory::Memory;
use crate::pages::{Hand, Pages, State};
use crate::patience::{self, Patience};
use crate::policy::Policy;
use crate::sys::{self, PAGE_BYTES};

/// The reason of [`Pages::wait_for_others`] for a fault.
pub(super) const KEPT: &str = "other threads have kept all pages that a fault could replace";

/// Smallest number of pages that are granted together.
const GRANT_PAGES: u32 = 64;
/// Pages that may be granted under every bound: 256 MiB.
const GRANTED_MAX: u32 = 1 << 16;
/// Refusals in a row after which no resident page is expected to be movable. Fewer are enough if
/// fewer pages are resident.
const REFUSALS_MAX: u32 = 1 << 15;
/// Time between two reviews of the worker.
const REVIEW_NS: u64 = 100_000_000;
/// Batches that a review takes out at most.
const BATCHES: u32 = 64;
/// Pages of a batch.
const BATCH_PAGES: u32 = 64;

const PINNED_BY: &str = "fixed buffers of io_uring, memory of an RDMA NIC, or another process that \
                         reads or writes this memory";

/// Pages that a process may have beyond its bound, for how long, and the limit of other waits.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    /// The bound, in bytes.
    pub local_bytes: u64,
    /// Time after which the process ends, in ns.
    pub time_ns: u64,
    /// Time without progress after which a fault that finds no page ends the process, in seconds.
    pub wait_s: u32,
}

/// Pages beyond the limit.
#[derive(Debug, Default)]
pub(super) struct Overrun {
    /// Pages that may be present beyond the limit.
    pub(super) pages: u32,
    /// Pages that refused to be taken out since the last one was taken out.
    refusals: u32,
    /// Time beyond the limit. The worker counts it, so the time of a stopped process is not in it.
    spent_ns: u64,
    reviewed_ns: u64,
    is_told: bool,
}

impl Overrun {
    /// Counts an attempt to take pages out.
    pub(super) fn note(&mut self, taken_out: u32, refused: u32) {
        self.refusals = if taken_out > 0 { 0 } else { self.refusals.saturating_add(refused) };
    }

    /// Adds the time since the last review, and returns the time beyond the limit, in ns.
    fn spend(&mut self, now_ns: u64) -> u64 {
        if self.reviewed_ns > 0 {
            self.spent_ns += (now_ns - self.reviewed_ns).min(2 * REVIEW_NS);
        }
        self.reviewed_ns = now_ns;
        self.spent_ns
    }
}

impl State {
    /// Returns true if each page that could make room has refused to be taken out.
    fn is_stuck(&self) -> bool {
        let enough = self.policy.pages().saturating_mul(2).clamp(1, REFUSALS_MAX);
        self.overrun.refusals >= enough && self.shelf.clean() == 0 && self.shelf.dirty() == 0
    }
}

impl<M: Memory> Pages<M> {
    /// Sets what the process may have beyond its bound.
    pub fn with_allowance(mut self, allowance: Allowance) -> Self {
        self.allowance = allowance;
        self
    }

    /// Grants pages beyond the limit if no page can be taken out. Returns true if it has. Ends the
    /// process if it has too many.
    pub(super) fn exceed_limit(&self) -> bool {
        let (resident, is_first) = {
            let mut guard = self.state();
            let state = &mut *guard;
            if !state.is_stuck() {
                return false;
            }
            let more = GRANT_PAGES.max(state.limit / 8).max(state.overrun.pages / 2);
            let most = state.limit.max(GRANTED_MAX);
            if self.allowance.time_ns == 0 || state.overrun.pages.saturating_add(more) > most {
                let excess = state.overrun.pages + more;
                drop(guard);
                self.end_overrun(excess);
            }
            state.overrun.pages += more;
            state.overrun.refusals = 0;
            (state.resident, !std::mem::replace(&mut state.overrun.is_told, true))
        };
        if is_first {
            sys::say(&format!(
                "process {} ({}): no page of its {} MiB of local memory can be moved to the pool, \
                 because the kernel has pinned them ({PINNED_BY}); it goes beyond --local now, and \
                 ends if that lasts longer than {} s (GRANARY_PINNED_S)",
                descriptor::program(),
                sys::program_name_text(),
                mib(u64::from(resident) * PAGE_BYTES as u64),
                self.allowance.time_ns / 1_000_000_000
            ));
        }
        true
    }

    /// Lets other threads run, because the caller cannot go on without them for the reason `why`.
    /// Ends the process if they make no progress for too long.
    pub(super) fn wait_for_others(&self, hand: &mut Hand, why: &str) {
        let wait_s = self.allowance.wait_s;
        let limit_ns = u64::from(wait_s) * 1_000_000_000;
        let progress = self.room_changes.load(Ordering::Relaxed);
        if self.backing.is_called() {
            // A memory node that does not answer is no fault of this process.
            hand.patience = Patience::default();
        } else if hand.patience.is_over(self.memory.now_ns(), limit_ns, progress) {
            patience::end(why, wait_s);
        }
        self.memory.pause();
    }

    /// Takes pages out that are beyond the limit because of `exceed_limit`. Returns the
    /// time until the next call, in ms; `None` if no more pages are present than the limit allows.
    /// Ends the process after [`Allowance::time_ns`].
    pub fn review_overrun(&self, hand: &mut Hand) -> Option<u64> {
        if self.state().overrun.pages == 0 {
            return None;
        }
        let _ = (0..BATCHES).all(|_| self.excess() > 0 && self.work(hand, BATCH_PAGES));
        let now = self.memory.now_ns();
        let mut state = self.state();
        let excess = state.present().saturating_sub(state.limit);
        let overrun = &mut state.overrun;
        if excess == 0 {
            *overrun = Overrun { is_told: overrun.is_told, ..Overrun::default() };
            return None;
        }
        overrun.pages = overrun.pages.min(excess + GRANT_PAGES);
        if overrun.spend(now) > self.allowance.time_ns {
            drop(state);
            self.end_overrun(excess);
        }
        Some(REVIEW_NS / 1_000_000)
    }

    /// Ends the process, with the bound under which its pages would have had room.
    fn end_overrun(&self, excess: u32) -> ! {
        // A quarter more, because a part of the bound is for frames and the shelf.
        let more = u64::from(excess) * PAGE_BYTES as u64;
        let enough = self.allowance.local_bytes + more + more / 4 + (1 << 20);
        sys::die(
            EXIT_PAGER,
            &format!(
                "process {} ({}) needs {} MiB more than --local, for longer than {} s or more than \
                 is lent for that time, because the kernel has pinned its memory ({PINNED_BY}); \
                 pinned pages cannot be moved to the pool, so the process ends now (status \
                 {EXIT_PAGER}): use --local {}MiB or more, or set GRANARY_PINNED_S to more seconds",
                descriptor::program(),
                sys::program_name_text(),
                mib(more),
                self.allowance.time_ns / 1_000_000_000,
                mib(enough)
            ),
        )
    }
}

/// Returns a number of bytes in MiB, rounded up.
fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page_table::PageId;
    use crate::pages::model;
    use crate::shelf::{NO_RECORD, Record, Use};
    use crate::slots::SlotId;

    #[test]
    fn process_with_pages_on_the_shelf_is_not_stuck() {
        let pages = model::pages();
        let mut state = pages.state();
        assert!(!state.is_stuck());
        state.overrun.note(0, REFUSALS_MAX);
        assert!(state.is_stuck());
        for used in [Use::Dirty, Use::Clean] {
            let (position, _) = state.shelf.take_empty(1).expect("an empty shelf");
            let record = Record { page: PageId(0), slot: Some(SlotId(0)), ..NO_RECORD };
            state.shelf.hold(position, used, record);
            assert!(!state.is_stuck());
            state.shelf.set(position, Use::Empty);
        }
        assert!(state.is_stuck());
    }

    #[test]
    fn page_that_is_taken_out_ends_the_refusals_in_a_row() {
        let mut overrun = Overrun::default();
        overrun.note(0, 5);
        overrun.note(0, 3);
        assert_eq!(overrun.refusals, 8);
        overrun.note(1, 9);
        assert_eq!(overrun.refusals, 0);
        overrun.note(0, 1);
        overrun.note(0, u32::MAX);
        assert_eq!(overrun.refusals, u32::MAX);
    }

    #[test]
    fn time_of_a_stopped_process_beyond_its_limit_does_not_count() {
        let mut overrun = Overrun::default();
        let at = |reviews: u64| 1_000_000_000 + reviews * REVIEW_NS;
        assert_eq!(
            [0, 1, 2].map(|review| overrun.spend(at(review))),
            [0, REVIEW_NS, 2 * REVIEW_NS]
        );
        assert_eq!(overrun.spend(at(36_000)), 4 * REVIEW_NS);
    }
}
