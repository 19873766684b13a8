//! The worker thread: the asynchronous path of the pager.
//!
//! The worker takes pages out, writes them back, reclaims positions, frees and compacts chunks,
//! does its part of forks, and measures unpaged memory. Where the machine has two cores or fewer,
//! the program and the NIC's polling thread occupy them; the handler then does the work on pages in
//! slices ([`crate::fault`]), and the worker does the rest.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::compactor::Compactor;
use crate::lease;
use crate::ledger::GUARANTEED_UNITS;
use crate::pager::{Pager, Reclaimer};
use crate::pages::Hand;
use crate::stats::Counter;
use crate::sys;
use crate::unpaged;
use crate::wake::{end_sleep, may_sleep, must_wake};

/// Maximum number of pages that the worker takes out at once.
const BATCH_PAGES: u32 = 64;

impl Pager {
    /// Runs the worker's loop.
    pub(crate) fn worker(self: &std::sync::Arc<Self>) {
        let mut hand = Hand::default();
        let mut pause_ms = unpaged::SAMPLE_MS_MIN;
        let mut sample_due_ns = sys::now_ns() + 1_000_000 * pause_ms;
        let mut review = Review::default();
        let mut compactor = Compactor::default();
        loop {
            let seen = self.worker_event().load(Ordering::Acquire);
            // A program without faults does not end the transfers of pages that it has dropped, and
            // these keep their slots until then.
            self.pages.reap(&mut hand);
            self.pages.free_emptied();
            self.take_out_advised(&mut hand);
            self.bring_in_advised(&mut hand);
            self.help_fork(&mut hand);
            let relief_ms = self.pages.relieve_refused().unwrap_or(u64::MAX);
            if self.reclaimer == Reclaimer::Worker {
                while self.pages.work(&mut hand, BATCH_PAGES) && !self.forks.is_asked() {}
            }
            let overrun_ms = self.pages.review_overrun(&mut hand).unwrap_or(u64::MAX);
            let relief_ms = relief_ms.min(overrun_ms);
            self.tend_lease(&mut review, &mut hand);
            let compaction_ms = self.compact(&mut hand, &mut compactor);
            self.pages.update_gauges();
            let compaction_due_ns = sys::now_ns() + 1_000_000 * compaction_ms;
            let mut sleeps = may_sleep(&self.worker_sleeps, self.worker_event(), seen);
            while sleeps {
                let next_ms = ms_until(sample_due_ns.min(compaction_due_ns));
                self.wait_for_work(seen, next_ms.min(review.pause_ms(self)).min(relief_ms));
                sleeps = self.worker_event().load(Ordering::Acquire) == seen;
                if sleeps && sys::now_ns() >= sample_due_ns {
                    pause_ms = self.sample_unpaged(pause_ms);
                    sample_due_ns = sys::now_ns() + 1_000_000 * pause_ms;
                    break;
                }
                if relief_ms < u64::MAX || review.is_due() || sys::now_ns() >= compaction_due_ns {
                    break;
                }
            }
            end_sleep(&self.worker_sleeps);
        }
    }

    /// Measures unpaged memory if it seems to have changed. Returns the time until the next call,
    /// in milliseconds.
    pub(crate) fn sample_unpaged(&self, pause_ms: u64) -> u64 {
        match self.measure_unpaged(false) {
            true => unpaged::SAMPLE_MS_MIN,
            false => (2 * pause_ms).min(unpaged::SAMPLE_MS_MAX),
        }
    }

    /// Returns the futex on which the worker waits. Other processes of the run wake it too if they
    /// share the bound.
    fn worker_event(&self) -> &AtomicU32 {
        self.pages.lease().map_or(&self.worker_wakes, |lease| lease.event())
    }

    fn wait_for_work(&self, seen: u32, timeout_ms: u64) {
        match self.pages.lease() {
            Some(_) => sys::futex_wait_shared(self.worker_event(), seen, Some(timeout_ms)),
            None => sys::futex_wait(self.worker_event(), seen, Some(timeout_ms)),
        }
    }

    /// Wakes the worker if there is work on pages for it, or in any case if `always`.
    pub(crate) fn wake_worker(&self, always: bool) {
        if !always && (self.reclaimer != Reclaimer::Worker || !self.pages.has_work()) {
            return;
        }
        if must_wake(&self.worker_sleeps, self.worker_event()) {
            match self.pages.lease() {
                Some(_) => sys::futex_wake_shared(self.worker_event()),
                None => sys::futex_wake(self.worker_event()),
            }
        }
    }

    /// Gives pages back to the run's ledger: those that this process does not need, and those that
    /// others may have instead.
    fn tend_lease(&self, review: &mut Review, hand: &mut Hand) {
        let Some(lease) = self.pages.lease() else { return };
        let now = sys::now_ns();
        if now >= review.due_ns {
            lease.announce();
            let faults = self.stats().get(Counter::Faults);
            review.is_idle = faults == review.faults;
            review.faults = faults;
            review.due_ns = now + lease::IDLE_NS;
        }
        self.pages.review_lease(review.is_idle);
        self.pages.return_pages(hand, || self.forks.is_asked());
    }
}

/// Returns the time until a moment, in milliseconds, at least one.
fn ms_until(due_ns: u64) -> u64 {
    due_ns.saturating_sub(sys::now_ns()).div_ceil(1_000_000).max(1)
}

/// When the lease is looked at, and what was seen last.
#[derive(Default)]
struct Review {
    due_ns: u64,
    faults: u64,
    /// The process had no fault between the last two reviews.
    is_idle: bool,
}

impl Review {
    /// Returns the time until the next review, in milliseconds. A process that neither wants units
    /// nor has more than the guaranteed ones waits for its worker's futex.
    fn pause_ms(&self, pager: &Pager) -> u64 {
        let needs_review = |lease: &lease::Lease| {
            lease.is_short() || lease.own() > GUARANTEED_UNITS || pager.pages.excess() > 0
        };
        match pager.pages.lease().is_some_and(needs_review) {
            true => ms_until(self.due_ns),
            false => u64::MAX,
        }
    }

    fn is_due(&self) -> bool {
        self.due_ns > 0 && sys::now_ns() >= self.due_ns
    }
}
