//! The limit of a process that shares the bound of its run with other processes.
//!
//! The limit follows from the pages that this process has leased ([`Lease`]):
//!
//! ```text
//!  leased = limit + owed + reserved + opened windows
//! ```
//!
//! | part | pages |
//! | --- | --- |
//! | limit | may be present |
//! | owed | to be given back, as soon as no more pages are present than the limit allows |
//! | reserved | frames of single pages and write-back batches, and the slack of the memory operations |
//! | opened windows | frames of the prefetch windows that have been used at least once |
//!
//! So at no time are more pages present than are leased, except those of a forking thread, those
//! that a promoted child has from its parent, and those beyond the limit while no page can be taken
//! out ([`crate::pages::overrun`]).

use crate::lease::Lease;
use crate::memory::Memory;
use crate::pages::{Hand, Pages, State};

/// Pages that the worker takes out at once.
const BATCH_PAGES: u32 = 64;

impl<M: Memory> Pages<M> {
    /// Takes the limit from a lease. `reserved` of its pages are never present. Called before any
    /// page exists.
    pub fn with_lease(mut self, lease: Lease, reserved: u32) -> Self {
        {
            let state = self.state.get_mut().expect("no thread has used the state yet");
            state.limit = lease.pages().saturating_sub(reserved);
            state.flights.close_windows();
        }
        self.lease = Some(lease);
        self
    }

    /// Returns the lease; `None` if this process has a bound of its own.
    pub fn lease(&self) -> Option<&Lease> {
        self.lease.as_ref()
    }

    /// Returns the number of blank positions to keep ready.
    pub(super) fn stock(&self, state: &State) -> u32 {
        let most = if self.lease.is_some() { state.limit / 4 } else { u32::MAX };
        self.sizes.stock.min(most)
    }

    /// Returns the number of clean positions to keep: pages that were evicted last, and pages that
    /// were read ahead for several streams.
    pub(super) fn keep(&self, state: &State) -> u32 {
        let most = if self.lease.is_some() { state.limit / 8 } else { u32::MAX };
        self.sizes.keep.min(most) + state.shelf.ahead().min(self.ahead_max(state))
    }

    /// Returns the number of pages that were read ahead and that stay on the shelf until the
    /// program needs them: the windows that may be in flight together.
    pub(super) fn ahead_max(&self, state: &State) -> u32 {
        self.sizes.window_frames().min(state.limit / 8)
    }

    /// Leases more pages if the room is low. Makes no system call.
    pub(super) fn extend(&self, state: &mut State) {
        let Some(lease) = &self.lease else { return };
        let low = (state.limit / 4).max(self.sizes.stock + self.sizes.keep);
        if state.owed > 0 || state.limit.saturating_sub(state.present()) > low {
            return;
        }
        let unit = lease.unit_pages();
        let got = lease.take((state.limit / 2 / unit).max(1));
        state.limit = state.limit.saturating_add(got.saturating_mul(unit));
    }

    /// Leases as many pages as are present, as far as the ledger allows: those of a promoted child.
    pub fn extend_to_present(&self) {
        let mut state = self.state();
        while state.present() > state.limit {
            let before = state.limit;
            self.extend(&mut state);
            if state.limit == before {
                return;
            }
        }
    }

    /// Decides how many pages to give back, and lowers the limit by them. `is_idle` is true if the
    /// process had no fault for a while.
    pub fn review_lease(&self, is_idle: bool) {
        let Some(lease) = &self.lease else { return };
        let mut state = self.state();
        if state.owed > 0 {
            return;
        }
        let unit = lease.unit_pages();
        // The stock is room that will be needed soon.
        let unused = state.room().saturating_sub(self.stock(&state));
        let units = lease.surplus(unused, is_idle).min(state.limit / unit);
        state.limit -= units * unit;
        state.owed = units;
    }

    /// Gives units back that the limit no longer needs, as far as their pages are not present any
    /// more. Returns true if some were given back.
    pub fn settle_lease(&self) -> bool {
        let Some(lease) = &self.lease else { return false };
        let mut state = self.state();
        let above = state.present().saturating_sub(state.limit).div_ceil(lease.unit_pages());
        let units = state.owed.saturating_sub(above);
        if units > 0 {
            lease.release(units);
            state.owed -= units;
        }
        units > 0
    }

    /// Takes pages out until no more are present than the limit allows, and gives them back.
    /// Returns early if a fork waits, or if no page can be taken out now.
    pub fn return_pages(&self, hand: &mut Hand, is_asked: impl Fn() -> bool) {
        let Some(lease) = &self.lease else { return };
        let mut fruitless = 0;
        while fruitless < FRUITLESS_MAX && !is_asked() {
            let before = self.excess();
            if before > 0 {
                self.work(hand, BATCH_PAGES);
            }
            if self.settle_lease() {
                lease.wake_wanting();
            }
            match self.excess() {
                0 => return,
                after if after < before => fruitless = 0,
                _ => fruitless += 1,
            }
            if self.is_standstill() {
                return;
            }
        }
    }

    /// Returns the number of present pages beyond the limit.
    pub fn excess(&self) -> u32 {
        let state = self.state();
        state.present().saturating_sub(state.limit)
    }
}

/// Rounds without an effect after which the worker tries again later: write-backs may be in flight.
const FRUITLESS_MAX: u32 = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{GUARANTEED_UNITS, Ledger, Owner, UNIT_PAGES};
    use crate::pages::model;

    #[test]
    fn process_that_owes_units_leases_no_more() {
        let ledger = Ledger::in_memory(2, 64 * UNIT_PAGES);
        let lease = Lease::claim(ledger, Owner::new(1, 1), UNIT_PAGES).expect("a slot is free");
        assert_eq!(lease.take(GUARANTEED_UNITS), GUARANTEED_UNITS);
        let pages = model::pages().with_lease(lease, 0);
        let mut state = pages.state();
        let before = state.limit;
        (state.resident, state.owed) = (before, 1);
        pages.extend(&mut state);
        assert_eq!(state.limit, before);
        state.owed = 0;
        pages.extend(&mut state);
        assert!(state.limit > before);
    }
}
