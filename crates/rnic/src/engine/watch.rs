//! Receive queues that are filled by moving a record, of which nobody tells the NIC.
//!
//! Two kinds of record are looked at: those of queues that a sender waits for (RNR), and those of QPs
//! in Error, which flush what is posted to them. Each `poll` looks at a few, in rotation: how many
//! there are does not change what a `poll` costs.

use super::Core;
use crate::ids::Qpn;
use crate::verbs::QpState;

/// The first and the longest wait between two rounds of looks at receive records that have nothing
/// new, when nothing else makes the NIC run.
const RNR_NS_MIN: u64 = 10_000;
const RNR_NS_MAX: u64 = 2_000_000;
/// Records of either kind that one `poll` looks at.
const LOOKS: usize = 16;
/// Senders that are woken at once when receives were posted. More follow with the next looks.
const WAKES: u32 = 16;

#[derive(Default)]
pub(super) struct Watch {
    /// Queues that a sender waits for.
    wanted: Vec<u32>,
    /// QPs in Error that flush what is posted to their own receive queue.
    flushing: Vec<Qpn>,
    next_wanted: usize,
    next_flushing: usize,
    /// Looks at wanted queues since the deadline passed: a round is complete when all had one.
    round: usize,
    interval_ns: u64,
    deadline_ns: u64,
}

impl Watch {
    pub fn deadline_ns(&self) -> Option<u64> {
        (!self.wanted.is_empty()).then_some(self.deadline_ns)
    }

    /// Looks at receive queue `n`, which is not being looked at yet.
    pub fn want(&mut self, n: u32, now_ns: u64) {
        let soon = now_ns + RNR_NS_MIN;
        // Who waits anew does not put off the look for who waits already.
        self.deadline_ns = if self.wanted.is_empty() { soon } else { self.deadline_ns.min(soon) };
        self.interval_ns = RNR_NS_MIN;
        self.wanted.push(n);
    }

    /// Looks at the receive queue of `qpn`, which is not being looked at yet.
    pub fn flush(&mut self, qpn: Qpn) {
        self.flushing.push(qpn);
    }
}

impl Core {
    /// Whether somebody waits for receives to be posted: a sender, or who is told that they are flushed.
    pub fn minds_receives(&self) -> bool {
        !(self.watch.wanted.is_empty() && self.watch.flushing.is_empty())
    }

    pub fn has_ready(&self) -> bool {
        let credits = |n: &u32| self.recvs.get(*n).is_none_or(|r| r.credits() > 0);
        self.shares.any()
            || self.watch.wanted.iter().take(LOOKS).any(credits)
            || self.watch.flushing.iter().take(LOOKS).any(|&qpn| self.flushable(qpn) > 0)
    }

    #[inline]
    pub fn look_at_records(&mut self) {
        if !self.watch.wanted.is_empty() {
            self.look_at_wanted();
        }
        if !self.watch.flushing.is_empty() {
            self.look_at_flushing();
        }
    }

    /// Looks at every record, however many there are.
    pub fn look_at_all_records(&mut self) {
        let most = self.watch.wanted.len().max(self.watch.flushing.len());
        for _ in 0..most.div_ceil(LOOKS) {
            self.look_at_records();
        }
    }

    fn look_at_wanted(&mut self) {
        let looks = LOOKS.min(self.watch.wanted.len());
        for _ in 0..looks {
            let at = self.watch.next_wanted % self.watch.wanted.len();
            let n = self.watch.wanted[at];
            let credits = match self.recvs.get(n) {
                Some(recv) if !recv.waiters.is_empty() => recv.credits(),
                _ => 0,
            };
            if credits > 0 {
                self.watch.interval_ns = RNR_NS_MIN;
                self.wake_senders(n, credits.min(WAKES));
            }
            match self.recvs.get_mut(n) {
                Some(recv) if !recv.waiters.is_empty() => {
                    self.watch.next_wanted = at + 1;
                    continue;
                }
                Some(recv) => recv.watched = false,
                None => {}
            }
            self.watch.wanted.swap_remove(at);
        }
        let watch = &mut self.watch;
        if self.now_ns < watch.deadline_ns {
            return;
        }
        watch.round += looks;
        if watch.round >= watch.wanted.len() {
            watch.round = 0;
            watch.deadline_ns = self.now_ns + watch.interval_ns;
            watch.interval_ns = (2 * watch.interval_ns).min(RNR_NS_MAX);
        }
    }

    fn look_at_flushing(&mut self) {
        for _ in 0..LOOKS.min(self.watch.flushing.len()) {
            let at = self.watch.next_flushing % self.watch.flushing.len();
            let qpn = self.watch.flushing[at];
            match self.qps.get_mut(qpn.raw()) {
                Some(qp) if qp.state == QpState::Error => {
                    self.watch.next_flushing = at + 1;
                    self.schedule(qpn);
                    continue;
                }
                Some(qp) => qp.flushing = false,
                None => {}
            }
            self.watch.flushing.swap_remove(at);
        }
    }
}
