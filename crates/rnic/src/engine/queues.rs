//! The queues of the NIC, and the lists of QPs that are not executing: the ready QPs of a function,
//! the waiters of a CQ's count, and the waiters for a receive WQE.
//!
//! `qp_list.rs` implements the lists, `scheduler.rs` selects the function.

use super::owners::{owned, table_error};
use super::qp::{Peer, Qp};
use super::qp_list::{InList, QpList};
use super::queue::{CompletionQueue, RecvQueue, Waiting};
use super::remote::connection::Connection;
use super::scheduler::Scheduler;
use crate::error::{Error, Object};
use crate::limits::Limits;
use crate::table::Table;
use verbs::{Cqn, FunctionId, QpState, Qpn, Srqn};

/// The QPs, their queues, and the scheduler of the functions that have ready QPs.
pub(super) struct Queues {
    pub cqs: Table<CompletionQueue>,
    pub recvs: Table<RecvQueue>,
    pub qps: Table<Qp>,
    pub scheduler: Scheduler,
}

impl Queues {
    pub fn new(limits: &Limits) -> Self {
        Self {
            cqs: Table::new(limits.cqs),
            recvs: Table::new(limits.recvs),
            qps: match limits.random {
                None => Table::new(limits.qps),
                Some(random) => Table::scattered(limits.qps, random),
            },
            scheduler: Scheduler::new(limits),
        }
    }

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

    /// Moves a QP to a list of waiters. Returns the receive queue whose record must be polled from
    /// now on, if there is one.
    #[must_use]
    pub fn wait(&mut self, qpn: Qpn, on: Waiting) -> Option<u32> {
        let mut poll = None;
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
                    poll = Some(n);
                }
                (&mut recv.waiters, InList::RecvWaiters(n))
            }
        };
        list.push_back(&mut self.qps, qpn);
        self.qps.get_mut(qpn.raw()).expect("the executing QP exists").in_list = in_list;
        poll
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

    /// See [`super::Engine::doorbell`].
    #[inline]
    pub fn doorbell(&mut self, qpn: Qpn, producer: u16) -> bool {
        let Some(qp) = self.qps.get_mut(qpn.raw()) else { return false };
        match &mut qp.send {
            Some(send) if !send.managed && qp.state != QpState::Reset => send.doorbell(producer),
            _ => return false,
        }
        let Some(qp) = self.qps.get(qpn.raw()) else { return false };
        let work = self.has_work(qp);
        if work && qp.in_list == InList::None {
            self.make_ready(qpn);
        }
        work
    }

    /// Makes a QP ready if it has work and is in no list.
    #[inline(never)]
    pub fn schedule(&mut self, qpn: Qpn) {
        let Some(qp) = self.qps.get(qpn.raw()) else { return };
        if qp.in_list == InList::None && self.has_work(qp) {
            self.make_ready(qpn);
        }
    }

    #[inline]
    fn has_work(&self, qp: &Qp) -> bool {
        if let Some(connection) = &qp.remote {
            return self.remote_has_work(qp, connection);
        }
        match qp.state {
            QpState::ReadyToSend => qp.pending() > 0,
            QpState::Error => qp.pending() > 0 || self.flushable(qp.qpn) > 0,
            _ => false,
        }
    }

    /// Updates a QP's list and the rest of its quantum after `work`.
    #[inline]
    pub fn end_qp_quantum(&mut self, sched_index: u32, qpn: Qpn, work: i64) {
        let ready_list = self.scheduler.function(sched_index).ready;
        let qp = self.qps.get(qpn.raw()).expect("a QP is not destroyed during its quantum");
        // Otherwise the QP waits, or has failed and has nothing to flush.
        let ready = qp.in_list == InList::Ready;
        let alone = if ready { ready_list.has_one() } else { ready_list.is_empty() };
        let left = if alone { 0 } else { qp.deficit - work };
        let continues = ready && self.has_work(qp);
        if ready && !continues {
            self.leave(qpn);
        } else if continues && !alone && left <= 0 {
            self.requeue(sched_index, qpn);
        }
        // A QP without work loses the rest of its quantum; a waiting QP keeps it.
        let waits = !ready && self.qps.get(qpn.raw()).is_some_and(|qp| qp.in_list != InList::None);
        let qp = self.qps.get_mut(qpn.raw()).expect("a QP is not destroyed during its quantum");
        qp.deficit = if continues || waits { left } else { left.min(0) };
    }

    /// Executes RECV_EN. Returns false if the QP has no managed receive queue.
    pub fn enable_receive(&mut self, qpn: Qpn, limit: u32) -> bool {
        let Some(qp) = self.qps.get(qpn.raw()) else { return false };
        let own = qp.recv.filter(|_| !qp.recv_shared);
        let Some((n, recv)) = own.and_then(|n| Some((n, self.recvs.get_mut(n)?))) else {
            return false;
        };
        if !recv.managed {
            return false;
        }
        recv.set_limit(limit);
        if !recv.waiters.is_empty() && recv.credits() > 0 {
            // Only the peer of the QP can wait for this queue.
            self.wake_senders(n, 1);
        }
        self.schedule(qpn);
        true
    }

    /// Returns the number of receive WQEs that a QP in Error has to flush. The WQEs of a managed
    /// queue are not flushed: they are part of a chain, and a QP that WAITs for requests would
    /// count their completions as requests.
    pub fn flushable(&self, qpn: Qpn) -> u32 {
        let Some(qp) = self.qps.get(qpn.raw()) else { return 0 };
        let own = qp.recv.filter(|_| !qp.recv_shared && qp.state == QpState::Error);
        own.and_then(|n| self.recvs.get(n)).filter(|r| !r.managed).map_or(0, |r| r.credits())
    }

    /// See [`super::Engine::ready_qps`].
    pub fn ready_qps(&self) -> Vec<Qpn> {
        let mut qps: Vec<Qpn> = self
            .qps
            .iter()
            .filter(|(_, qp)| self.could_run(qp))
            .map(|(number, _)| Qpn::new(number))
            .collect();
        qps.sort_unstable();
        qps
    }

    pub fn could_run(&self, qp: &Qp) -> bool {
        match qp.in_list {
            InList::None => self.flushable(qp.qpn) > 0,
            InList::Ready => true,
            InList::CqWaiters { cqn, wakes } => {
                self.cqs.get(cqn.raw()).is_none_or(|cq| cq.wakes != wakes)
            }
            InList::RecvWaiters(n) => self.recvs.get(n).is_none_or(|r| r.credits() > 0),
        }
    }

    /// See [`super::Engine::take_ready`].
    pub fn drain_ready(&mut self, into: &mut Vec<Qpn>) {
        while let Some(sched_index) = self.scheduler.next() {
            while let Some(qpn) = self.take_ready(sched_index) {
                into.push(qpn);
            }
            self.scheduler.spend(sched_index, 0);
        }
    }

    /// See `Queues::has_work`. `#[inline(never)]`, here and on the step, keeps the fast path of
    /// local QPs small.
    #[inline(never)]
    fn remote_has_work(&self, qp: &Qp, connection: &Connection) -> bool {
        connection.has_packets(qp.state)
            || match qp.state {
                QpState::ReadyToSend => qp.pending() > 0 && connection.may_fetch(),
                QpState::Error => {
                    qp.pending() > 0
                        || !connection.requester.is_empty()
                        || self.flushable(qp.qpn) > 0
                }
                _ => false,
            }
    }

    // --- lookups of control verbs ---------------------------------------------------------------

    pub fn cq(&self, f: FunctionId, cqn: Cqn) -> Result<&CompletionQueue, Error> {
        owned(self.cqs.get(cqn.raw()), |c| c.function, f, Object::Cq(cqn))
    }

    pub fn cq_mut(&mut self, cqn: Cqn) -> &mut CompletionQueue {
        self.cqs.get_mut(cqn.raw()).expect("a CQ in use exists")
    }

    pub fn srq(&self, f: FunctionId, srqn: Srqn) -> Result<&RecvQueue, Error> {
        let shared = self.recvs.get(srqn.raw()).filter(|r| r.shared);
        owned(shared, |r| r.function, f, Object::Srq(srqn))
    }

    pub fn qp(&self, f: FunctionId, qpn: Qpn) -> Result<&Qp, Error> {
        owned(self.qps.get(qpn.raw()), |q| q.function, f, Object::Qp(qpn))
    }

    pub fn qp_mut(&mut self, qpn: Qpn) -> &mut Qp {
        self.qps.get_mut(qpn.raw()).expect("the QP was looked up above")
    }

    pub fn insert_recv(&mut self, queue: RecvQueue) -> Result<u32, Error> {
        let made = self.recvs.insert(|_| true, |_| queue);
        made.map_err(table_error("receive queues of the NIC", self.recvs.capacity()))
    }
}
