//! The worker thread: the asynchronous path of the pager.
//!
//! The worker takes pages out, writes them back, reclaims positions, frees and compacts chunks,
//! does its part of forks, and measures unpaged memory. Where the machine has two cores or fewer,
//! the program and the NIC's polling thread occupy them; the handler then does the work on pages in
//! slices ([`crate::fault`]), and the worker does the rest.

use std::sync::atomic::Ordering;

use crate::compactor::Compactor;
use crate::pager::Pager;
use crate::pages::Hand;
use crate::sys;
use crate::unpaged;

/// Maximum number of pages that the worker takes out at once.
const BATCH_PAGES: u32 = 64;

impl Pager {
    /// Runs the worker's loop.
    pub(crate) fn worker(self: &std::sync::Arc<Self>) {
        let mut hand = Hand::default();
        let mut pause_ms = unpaged::SAMPLE_MS_MIN;
        let mut compactor = Compactor::default();
        loop {
            let seen = self.worker_wakes.load(Ordering::Acquire);
            // A program without faults does not end the transfers of pages that it has dropped, and
            // these keep their slots until then.
            self.pages.reap(&mut hand);
            self.pages.free_emptied();
            self.take_out_advised(&mut hand);
            self.help_fork(&mut hand);
            if !self.evicts_inline {
                while self.pages.work(&mut hand, BATCH_PAGES) && !self.forks.is_asked() {}
            }
            let compaction_ms = self.compact(&mut hand, &mut compactor);
            self.pages.update_gauges();
            let wait_ms = pause_ms.min(compaction_ms);
            self.worker_sleeps.store(true, Ordering::SeqCst);
            if self.worker_wakes.load(Ordering::SeqCst) == seen {
                sys::futex_wait(&self.worker_wakes, seen, Some(wait_ms));
            }
            if wait_ms == pause_ms && self.worker_wakes.load(Ordering::SeqCst) == seen {
                pause_ms = self.sample_unpaged(pause_ms);
            }
            self.worker_sleeps.store(false, Ordering::SeqCst);
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

    /// Wakes the worker if there is work on pages for it, or in any case if `always`.
    pub(crate) fn wake_worker(&self, always: bool) {
        if !always && (self.evicts_inline || !self.pages.has_work()) {
            return;
        }
        self.worker_wakes.fetch_add(1, Ordering::AcqRel);
        if self.worker_sleeps.load(Ordering::SeqCst) {
            sys::futex_wake(&self.worker_wakes);
        }
    }
}
