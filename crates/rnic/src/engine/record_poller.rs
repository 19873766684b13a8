//! Polls doorbell records of receive queues, because posting a receive writes the record without
//! notifying the NIC.
//!
//! Two kinds of queue are polled: queues for which a sender waits (RNR), and queues of QPs in
//! Error, which flush posted receives. Each `poll` reads a few records in rotation, so the number
//! of polled queues does not change the cost of a `poll`.

use super::Core;
use verbs::{QpState, Qpn};

/// Minimum and maximum interval between two polling rounds over unchanged receive records, while
/// nothing else makes the NIC run. The interval doubles after each round.
const INTERVAL_NS_MIN: u64 = 10_000;
const INTERVAL_NS_MAX: u64 = 2_000_000;
/// Maximum number of records of either kind that one `poll` reads.
const RECORDS_PER_POLL: usize = 16;
/// Maximum number of senders to wake per read of a record. The next reads wake further senders.
const WAKES_PER_READ: u32 = 16;

#[derive(Default)]
pub(super) struct RecordPoller {
    /// Queues for which a sender waits.
    blocked: Vec<u32>,
    /// QPs in Error that flush receives posted to their own receive queue.
    flushing: Vec<Qpn>,
    next_blocked: usize,
    next_flushing: usize,
    /// Number of reads of `blocked` records since the last deadline. A round is complete when each
    /// record was read.
    round: usize,
    interval_ns: u64,
    deadline_ns: u64,
}

impl RecordPoller {
    pub fn deadline_ns(&self) -> Option<u64> {
        (!self.blocked.is_empty()).then_some(self.deadline_ns)
    }

    /// Starts to poll receive queue `n`, which is not polled yet.
    pub fn add_blocked(&mut self, n: u32, now_ns: u64) {
        let soon = now_ns + INTERVAL_NS_MIN;
        // A new waiter must not postpone the deadline of earlier waiters.
        self.deadline_ns = if self.blocked.is_empty() { soon } else { self.deadline_ns.min(soon) };
        self.interval_ns = INTERVAL_NS_MIN;
        self.blocked.push(n);
    }

    /// Starts to poll the receive queue of `qpn`, which is not polled yet.
    pub fn add_flushing(&mut self, qpn: Qpn) {
        self.flushing.push(qpn);
    }
}

impl Core {
    /// Returns whether any record is polled.
    pub fn polls_receive_records(&self) -> bool {
        !(self.record_poller.blocked.is_empty() && self.record_poller.flushing.is_empty())
    }

    pub fn has_ready(&self) -> bool {
        let credits = |n: &u32| self.recvs.get(*n).is_none_or(|r| r.credits() > 0);
        self.scheduler.is_active()
            || self.record_poller.blocked.iter().take(RECORDS_PER_POLL).any(credits)
            || self
                .record_poller
                .flushing
                .iter()
                .take(RECORDS_PER_POLL)
                .any(|&qpn| self.flushable(qpn) > 0)
    }

    #[inline]
    pub fn poll_records(&mut self) {
        if !self.record_poller.blocked.is_empty() {
            self.poll_blocked();
        }
        if !self.record_poller.flushing.is_empty() {
            self.poll_flushing();
        }
    }

    /// Polls every record once.
    pub fn poll_all_records(&mut self) {
        let records = self.record_poller.blocked.len().max(self.record_poller.flushing.len());
        for _ in 0..records.div_ceil(RECORDS_PER_POLL) {
            self.poll_records();
        }
    }

    fn poll_blocked(&mut self) {
        let reads = RECORDS_PER_POLL.min(self.record_poller.blocked.len());
        for _ in 0..reads {
            let at = self.record_poller.next_blocked % self.record_poller.blocked.len();
            let n = self.record_poller.blocked[at];
            let credits = match self.recvs.get(n) {
                Some(recv) if !recv.waiters.is_empty() => recv.credits(),
                _ => 0,
            };
            if credits > 0 {
                self.record_poller.interval_ns = INTERVAL_NS_MIN;
                self.wake_senders(n, credits.min(WAKES_PER_READ));
            }
            match self.recvs.get_mut(n) {
                Some(recv) if !recv.waiters.is_empty() => {
                    self.record_poller.next_blocked = at + 1;
                    continue;
                }
                Some(recv) => recv.polled = false,
                None => {}
            }
            self.record_poller.blocked.swap_remove(at);
        }
        let poller = &mut self.record_poller;
        if self.now_ns < poller.deadline_ns {
            return;
        }
        poller.round += reads;
        if poller.round >= poller.blocked.len() {
            poller.round = 0;
            poller.deadline_ns = self.now_ns + poller.interval_ns;
            poller.interval_ns = (2 * poller.interval_ns).min(INTERVAL_NS_MAX);
        }
    }

    fn poll_flushing(&mut self) {
        for _ in 0..RECORDS_PER_POLL.min(self.record_poller.flushing.len()) {
            let at = self.record_poller.next_flushing % self.record_poller.flushing.len();
            let qpn = self.record_poller.flushing[at];
            match self.qps.get_mut(qpn.raw()) {
                Some(qp) if qp.state == QpState::Error => {
                    self.record_poller.next_flushing = at + 1;
                    self.schedule(qpn);
                    continue;
                }
                Some(qp) => qp.flushing = false,
                None => {}
            }
            self.record_poller.flushing.swap_remove(at);
        }
    }
}
