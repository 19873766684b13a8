//! Polls doorbell records of receive queues, because posting a receive writes the record without
//! notifying the NIC.
//!
//! Two kinds of queue are polled: queues for which a sender waits (RNR), and queues of QPs in
//! Error, which flush posted receives. Each `poll` reads a few records in rotation, so the number
//! of polled queues does not change the cost of a `poll`.

use super::queues::Queues;
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

    /// Returns whether any record is polled.
    pub fn is_polling(&self) -> bool {
        !(self.blocked.is_empty() && self.flushing.is_empty())
    }

    /// Returns whether any of the next records lets a QP execute.
    pub fn has_ready(&self, queues: &Queues) -> bool {
        let credits = |n: &u32| queues.recvs.get(*n).is_none_or(|r| r.credits() > 0);
        self.blocked.iter().take(RECORDS_PER_POLL).any(credits)
            || self.flushing.iter().take(RECORDS_PER_POLL).any(|&qpn| queues.flushable(qpn) > 0)
    }

    /// Polls the next records of either kind.
    #[inline]
    pub fn poll(&mut self, queues: &mut Queues, now_ns: u64) {
        if !self.blocked.is_empty() {
            self.poll_blocked(queues, now_ns);
        }
        if !self.flushing.is_empty() {
            self.poll_flushing(queues);
        }
    }

    /// Polls every record once.
    pub fn poll_all(&mut self, queues: &mut Queues, now_ns: u64) {
        let records = self.blocked.len().max(self.flushing.len());
        for _ in 0..records.div_ceil(RECORDS_PER_POLL) {
            self.poll(queues, now_ns);
        }
    }

    fn poll_blocked(&mut self, queues: &mut Queues, now_ns: u64) {
        let reads = RECORDS_PER_POLL.min(self.blocked.len());
        for _ in 0..reads {
            let at = self.next_blocked % self.blocked.len();
            let n = self.blocked[at];
            let credits = match queues.recvs.get(n) {
                Some(recv) if !recv.waiters.is_empty() => recv.credits(),
                _ => 0,
            };
            if credits > 0 {
                self.interval_ns = INTERVAL_NS_MIN;
                queues.wake_senders(n, credits.min(WAKES_PER_READ));
            }
            match queues.recvs.get_mut(n) {
                Some(recv) if !recv.waiters.is_empty() => {
                    self.next_blocked = at + 1;
                    continue;
                }
                Some(recv) => recv.polled = false,
                None => {}
            }
            self.blocked.swap_remove(at);
        }
        if now_ns < self.deadline_ns {
            return;
        }
        self.round += reads;
        if self.round >= self.blocked.len() {
            self.round = 0;
            self.deadline_ns = now_ns + self.interval_ns;
            self.interval_ns = (2 * self.interval_ns).min(INTERVAL_NS_MAX);
        }
    }

    fn poll_flushing(&mut self, queues: &mut Queues) {
        for _ in 0..RECORDS_PER_POLL.min(self.flushing.len()) {
            let at = self.next_flushing % self.flushing.len();
            let qpn = self.flushing[at];
            match queues.qps.get_mut(qpn.raw()) {
                Some(qp) if qp.state == QpState::Error => {
                    self.next_flushing = at + 1;
                    queues.schedule(qpn);
                    continue;
                }
                Some(qp) => qp.flushing = false,
                None => {}
            }
            self.flushing.swap_remove(at);
        }
    }
}
