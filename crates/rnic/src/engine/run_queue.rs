//! The lists of QPs that are not executing: the ready QPs of a function, the waiters of a CQ's
//! count, and the waiters for a receive WQE.
//!
//! `qp_list.rs` implements the lists.

use super::Core;
use super::qp::Peer;
use super::qp_list::{InList, QpList};
use super::queue::Waiting;
use verbs::{Cqn, Qpn};

impl Core {
    /// Appends a QP that is in no list to its function's ready QPs.
    #[inline]
    pub fn make_ready(&mut self, qpn: Qpn) {
        let qp = self.qps.get_mut(qpn.raw()).expect("a QP that becomes ready exists");
        qp.in_list = InList::Ready;
        let sched_index = qp.sched_index;
        self.scheduler.function(sched_index).ready.push_back(&mut self.qps, qpn);
        self.scheduler.activate(sched_index);
    }

    /// Moves a ready QP to the back of its function's list.
    #[inline]
    pub fn requeue(&mut self, sched_index: u32, qpn: Qpn) {
        let ready = &mut self.scheduler.function(sched_index).ready;
        ready.remove(&mut self.qps, qpn);
        ready.push_back(&mut self.qps, qpn);
    }

    /// Removes and returns the first ready QP of a function.
    pub fn take_ready(&mut self, sched_index: u32) -> Option<Qpn> {
        let ready = &mut self.scheduler.function(sched_index).ready;
        let qpn = ready.first()?;
        ready.remove(&mut self.qps, qpn);
        self.qps.get_mut(qpn.raw()).expect("a ready QP exists").in_list = InList::None;
        Some(qpn)
    }

    /// Moves a QP to a list of waiters.
    pub fn wait(&mut self, qpn: Qpn, on: Waiting) {
        // The execution of its WQE may have made the QP ready.
        self.leave(qpn);
        let (list, in_list) = match on {
            Waiting::Count(cqn) => {
                let cq = self.cqs.get_mut(cqn.raw()).expect("the WAIT has looked up the CQ");
                (&mut cq.waiters, InList::CqWaiters { cqn, wakes: cq.wakes })
            }
            Waiting::Receive(n) => {
                let recv = self.recvs.get_mut(n).expect("the SEND has looked up the queue");
                if !recv.managed && !recv.polled {
                    recv.polled = true;
                    self.record_poller.add_blocked(n, self.now_ns);
                }
                (&mut recv.waiters, InList::RecvWaiters(n))
            }
        };
        list.push_back(&mut self.qps, qpn);
        self.qps.get_mut(qpn.raw()).expect("the executing QP exists").in_list = in_list;
    }

    /// Removes a QP from its list.
    pub fn leave(&mut self, qpn: Qpn) {
        let Some(qp) = self.qps.get_mut(qpn.raw()) else { return };
        let list = match std::mem::replace(&mut qp.in_list, InList::None) {
            InList::None => return,
            InList::Ready => &mut self.scheduler.function(qp.sched_index).ready,
            InList::CqWaiters { cqn, wakes } => match self.cqs.get_mut(cqn.raw()) {
                Some(cq) if cq.wakes == wakes => &mut cq.waiters,
                _ => &mut self.scheduler.function(qp.sched_index).ready,
            },
            InList::RecvWaiters(n) => {
                &mut self.recvs.get_mut(n).expect("a receive queue outlives its waiters").waiters
            }
        };
        list.remove(&mut self.qps, qpn);
    }

    /// Makes all waiters of this CQ ready. All of them belong to the CQ's function.
    #[inline(never)]
    pub fn wake_waiters(&mut self, cqn: Cqn) {
        let Some(cq) = self.cqs.get_mut(cqn.raw()).filter(|c| !c.waiters.is_empty()) else {
            return;
        };
        cq.wakes = cq.wakes.wrapping_add(1);
        let waiters = std::mem::replace(&mut cq.waiters, QpList::EMPTY);
        let sched_index = cq.sched_index;
        self.scheduler.function(sched_index).ready.append(&mut self.qps, waiters);
        self.scheduler.activate(sched_index);
    }

    /// Makes up to `max` waiters of a receive queue ready.
    pub fn wake_senders(&mut self, n: u32, max: u32) {
        for _ in 0..max {
            let Some(qpn) = self.recvs.get(n).and_then(|r| r.waiters.first()) else { return };
            self.leave(qpn);
            self.schedule(qpn);
        }
    }

    /// Makes the peer of `qpn` ready if the peer waits for a receive WQE of `qpn`. The peer then
    /// executes its WQE again and finds the new state of `qpn`.
    pub fn wake_peer(&mut self, qpn: Qpn) {
        let Some(qp) = self.qps.get(qpn.raw()) else { return };
        let (Peer::Local(peer), Some(n)) = (qp.peer, qp.recv) else { return };
        if self.qps.get(peer.raw()).is_some_and(|p| p.in_list == InList::RecvWaiters(n)) {
            self.leave(peer);
            self.schedule(peer);
        }
    }
}
