//! Who runs next: turns of ready QPs, wait lists, RNR timers, the error state and its flush.
//!
//! ```text
//!               schedule                     turn: up to `turn_wqes` WQEs or `slice_bytes` bytes
//!   work comes ---------> ready list (FIFO) ------------------------------------------------+
//!                            ^    ^                                                         |
//!                            |    +---- work left ------------------------------------------+
//!                            +--- wake --- wait list of a CQ (WAIT) or receive queue (RNR) <-+
//! ```

use super::Core;
use super::execute::{Fault, Progress};
use crate::cqe::{self, Cqe, Syndrome};
use crate::ids::{Cqn, Qpn, Srqn};
use crate::queue::{Fetched, WaitList, Waiting};
use crate::verbs::{AsyncEvent, Event, QpState};
use crate::wqe::Control;
use std::sync::atomic::{Ordering, fence};

/// The first and the longest wait between two looks at a receive record that has nothing new, when
/// nothing else makes the NIC run.
const RNR_NS_MIN: u64 = 10_000;
const RNR_NS_MAX: u64 = 2_000_000;
/// Records that one `poll` looks at, beside those whose time has come.
const RNR_LOOKS: usize = 16;

/// Receive queues that are filled by moving a record, of which nobody tells the NIC.
#[derive(Default)]
pub(super) struct RnrWatch {
    /// Queues that a sender waits for.
    wanted: Vec<u32>,
    /// QPs in Error that flush what is posted to their own receive queue.
    flushing: Vec<Qpn>,
    next_wanted: usize,
    next_flushing: usize,
    interval_ns: u64,
    deadline_ns: u64,
}

impl RnrWatch {
    pub fn deadline_ns(&self) -> Option<u64> {
        (!self.wanted.is_empty()).then_some(self.deadline_ns)
    }
}

/// What a QP's turn came to.
enum Step {
    /// One WQE done, there may be more.
    Executed,
    /// A slice of one; others first.
    Sliced,
    /// Nothing to do, or it waits.
    Stopped,
    /// A WQE failed.
    Failed,
}

impl Core {
    pub fn ring(&mut self, qpn: Qpn, producer: u16) {
        let Some(qp) = self.qps.get_mut(qpn.raw()) else { return };
        match &mut qp.send {
            Some(send) if !send.managed && qp.state != QpState::Reset => send.limit = producer,
            _ => return,
        }
        self.schedule(qpn);
    }

    /// Puts a QP into the ready list if it has work and is not there.
    pub fn schedule(&mut self, qpn: Qpn) {
        let Some(qp) = self.qps.get_mut(qpn.raw()) else { return };
        if qp.queued || qp.waiting != Waiting::No {
            return;
        }
        let work = match qp.state {
            QpState::ReadyToSend => qp.pending() > 0,
            QpState::Error => qp.pending() > 0 || self.flushable(qpn) > 0,
            _ => false,
        };
        if work {
            self.qps.get_mut(qpn.raw()).expect("just seen").queued = true;
            self.ready.push_back(qpn);
        }
    }

    pub fn poll(&mut self, wqe: &mut Fetched, now_ns: u64, budget: usize) -> usize {
        self.now_ns = now_ns;
        self.look_at_records();
        let mut executed = 0;
        while executed < budget {
            let Some(qpn) = self.ready.pop_front() else { break };
            executed += self.turn(qpn, wqe, budget - executed);
        }
        self.raise_completion_events();
        executed
    }

    pub fn has_ready(&self) -> bool {
        let credits = |n: &u32| self.recvs.get(*n).is_none_or(|r| r.credits() > 0);
        !self.ready.is_empty()
            || self.rnr.wanted.iter().take(RNR_LOOKS).any(credits)
            || self.rnr.flushing.iter().take(RNR_LOOKS).any(|&qpn| self.flushable(qpn) > 0)
    }

    /// See [`super::Engine::ready_qps`].
    pub fn ready_qps(&self) -> Vec<Qpn> {
        let ready = |qp: &crate::qp::Qp| match qp.waiting {
            Waiting::No => qp.queued || self.flushable(qp.qpn) > 0,
            Waiting::Count(_) => false,
            Waiting::Receive(n) => self.recvs.get(n).is_none_or(|r| r.credits() > 0),
        };
        let mut all: Vec<Qpn> =
            self.qps.iter().filter(|(_, qp)| ready(qp)).map(|(n, _)| Qpn::new(n)).collect();
        all.sort_unstable();
        all
    }

    /// See [`super::Engine::step`].
    pub fn step_one(&mut self, wqe: &mut Fetched, now_ns: u64, qpn: Qpn) -> bool {
        self.now_ns = now_ns;
        if let Some(Waiting::Receive(n)) = self.qps.get(qpn.raw()).map(|qp| qp.waiting)
            && self.recvs.get(n).is_none_or(|r| r.credits() > 0)
        {
            self.wake_receivers(n);
        }
        self.schedule(qpn);
        if !self.qps.get(qpn.raw()).is_some_and(|qp| qp.queued) {
            return false;
        }
        self.ready.retain(|&q| q != qpn);
        self.turn(qpn, wqe, 1);
        self.raise_completion_events();
        true
    }

    /// One QP's turn; gives how many WQEs it executed.
    fn turn(&mut self, qpn: Qpn, wqe: &mut Fetched, budget: usize) -> usize {
        let Some(qp) = self.qps.get_mut(qpn.raw()) else { return 0 };
        qp.queued = false;
        if qp.waiting != Waiting::No {
            // It came to wait after it was made ready; the wake-up puts it back.
            return 0;
        }
        let budget = budget.min(self.limits.turn_wqes.max(1) as usize);
        let bytes_end = self.stats.bytes + self.limits.slice_bytes as u64;
        if qp.state == QpState::Error {
            return self.flush(qpn, budget);
        }
        let mut executed = 0;
        while executed < budget && self.stats.bytes < bytes_end {
            match self.step(qpn, wqe) {
                Step::Executed => executed += 1,
                Step::Sliced => {
                    executed += 1;
                    break;
                }
                Step::Stopped => return executed,
                Step::Failed => return executed + 1,
            }
        }
        self.schedule(qpn);
        executed
    }

    /// Executes the QP's next WQE, or the next slice of the one under way.
    #[inline]
    fn step(&mut self, qpn: Qpn, wqe: &mut Fetched) -> Step {
        let Some(qp) = self.qps.get_mut(qpn.raw()) else { return Step::Stopped };
        if qp.state != QpState::ReadyToSend {
            return Step::Stopped;
        }
        let Some(send) = qp.send.as_mut().filter(|s| s.pending() > 0) else { return Step::Stopped };
        let (ctrl, done) = match &qp.long {
            Some(long) if long.active => {
                wqe.clone_from(&long.wqe);
                (wqe.control(), long.done)
            }
            _ => (send.fetch(wqe), 0),
        };
        let me = super::execute::Requester::of(qp, &ctrl);
        match self.execute(&me, &ctrl, wqe.bytes(), done) {
            Ok(Progress::Done(bytes)) => self.complete(&me, &ctrl, bytes),
            Ok(Progress::Part(done)) => {
                self.qps.get_mut(qpn.raw()).expect("it executes").put_aside(wqe, done);
                Step::Sliced
            }
            Ok(Progress::Blocked { on, done }) => {
                let qp = self.qps.get_mut(qpn.raw()).expect("it executes");
                if done > 0 {
                    qp.put_aside(wqe, done);
                }
                self.wait(qpn, on);
                Step::Stopped
            }
            Err(fault) => {
                self.fail(qpn, &ctrl, fault);
                Step::Failed
            }
        }
    }

    /// Ends a WQE that succeeded.
    #[inline]
    fn complete(&mut self, me: &super::execute::Requester, ctrl: &Control, bytes: u64) -> Step {
        self.stats.wqes[(ctrl.opcode & 0x3f) as usize] += 1;
        let qp = self.qps.get_mut(me.qpn.raw()).expect("it executes");
        qp.executed += 1;
        qp.abandon();
        let send = qp.send.as_mut().expect("it executes");
        send.consumer = send.consumer.wrapping_add(ctrl.blocks() as u16);
        if ctrl.signaled() {
            let cqe = Cqe {
                opcode: cqe::opcode::REQ,
                qpn: me.qpn,
                wqe_opcode: ctrl.opcode,
                wqe_counter: me.consumer,
                byte_count: bytes as u32,
                timestamp_ns: self.now_ns,
                ..Cqe::default()
            };
            if !self.push_cqe(me.send_cq, &cqe) {
                self.enter_error(me.qpn, Some(Syndrome::LocalQpOperation));
                return Step::Failed;
            }
        }
        Step::Executed
    }

    /// Ends a WQE that failed: error completion, QP to Error, the rest is flushed in later turns.
    #[cold]
    fn fail(&mut self, qpn: Qpn, ctrl: &Control, fault: Fault) {
        self.stats.errors += 1;
        let qp = self.qps.get_mut(qpn.raw()).expect("it executes");
        let send_cq = qp.send_cq;
        let send = qp.send.as_mut().expect("it executes");
        let cqe = Cqe {
            opcode: cqe::opcode::REQ_ERR,
            qpn,
            wqe_opcode: ctrl.opcode,
            wqe_counter: send.consumer,
            error: Some(cqe::CqeError { syndrome: fault.syndrome as u8, vendor: fault.vendor }),
            ..Cqe::default()
        };
        send.consumer = send.consumer.wrapping_add(ctrl.blocks().min(send.pending()) as u16);
        self.push_cqe(send_cq, &cqe);
        self.enter_error(qpn, Some(fault.syndrome));
        // It may have been there already, as its own peer.
        self.schedule(qpn);
    }

    /// Moves a QP to Error. With a syndrome, its owner hears of it.
    #[cold]
    pub fn enter_error(&mut self, qpn: Qpn, why: Option<Syndrome>) {
        let Some(qp) = self.qps.get_mut(qpn.raw()) else { return };
        if qp.state == QpState::Error {
            return;
        }
        qp.state = QpState::Error;
        qp.abandon();
        let (function, recv, shared) = (qp.function, qp.recv, qp.recv_shared);
        if let Some(syndrome) = why {
            let event = AsyncEvent::QpError { qpn, syndrome };
            self.events.push_back(Event::Async { function, event });
        }
        self.unlink(qpn);
        if let Some(n) = recv {
            self.wake_receivers(n);
            let by_record = self.recvs.get(n).is_some_and(|r| !r.managed);
            if !shared && by_record && !self.rnr.flushing.contains(&qpn) {
                self.rnr.flushing.push(qpn);
            }
        }
        self.schedule(qpn);
    }

    /// Completes outstanding work of a QP in Error as flushed (IBTA vol. 1, §10.3.1), its send
    /// queue's first.
    #[cold]
    fn flush(&mut self, qpn: Qpn, budget: usize) -> usize {
        let mut flushed = 0;
        while flushed < budget {
            let Some(qp) = self.qps.get_mut(qpn.raw()) else { return flushed };
            let mut cqe = Cqe {
                qpn,
                error: Some(cqe::CqeError { syndrome: Syndrome::Flushed as u8, vendor: 0 }),
                ..Cqe::default()
            };
            let cqn;
            if qp.pending() > 0 {
                let send = qp.send.as_mut().expect("it has work");
                let ctrl = send.fetch_control();
                let blocks = ctrl.blocks().min(send.pending());
                cqe.opcode = cqe::opcode::REQ_ERR;
                cqe.wqe_opcode = ctrl.opcode;
                cqe.wqe_counter = send.consumer;
                send.consumer = send.consumer.wrapping_add(blocks as u16);
                cqn = qp.send_cq;
            } else {
                cqn = qp.recv_cq;
                let own = qp.recv.filter(|_| !qp.recv_shared);
                let Some(recv) = own.and_then(|n| self.recvs.get_mut(n)) else { break };
                if recv.managed || recv.credits() == 0 {
                    break;
                }
                cqe.opcode = cqe::opcode::RESP_ERR;
                cqe.wqe_counter = recv.consumer as u16;
                recv.advance();
            }
            self.stats.flushed += 1;
            flushed += 1;
            self.push_cqe(cqn, &cqe);
        }
        self.schedule(qpn);
        flushed
    }

    /// Receive WQEs that a QP in Error has to flush. Those of a managed queue are not flushed: they
    /// are part of a program, and their completions would count as requests for who WAITs for
    /// them.
    fn flushable(&self, qpn: Qpn) -> u32 {
        let Some(qp) = self.qps.get(qpn.raw()) else { return 0 };
        let own = qp.recv.filter(|_| !qp.recv_shared && qp.state == QpState::Error);
        own.and_then(|n| self.recvs.get(n)).filter(|r| !r.managed).map_or(0, |r| r.credits())
    }

    // --- completions ---------------------------------------------------------------------------

    /// Writes a completion and wakes who waits for it. False if the CQ has no room.
    #[inline]
    pub fn push_cqe(&mut self, cqn: Cqn, cqe: &Cqe) -> bool {
        let cq = self.cqs.get_mut(cqn.raw()).expect("a CQ in use lives");
        let before = cq.overrun;
        if !cq.push(cqe) {
            if !before {
                let (function, event) = (cq.function, AsyncEvent::CqOverrun { cqn });
                self.events.push_back(Event::Async { function, event });
            }
            return false;
        }
        self.stats.completions += 1;
        if !cq.touched {
            cq.touched = true;
            self.touched.push(cqn);
        }
        if !cq.waiters.is_empty() {
            let waiters = std::mem::replace(&mut cq.waiters, WaitList::EMPTY);
            self.wake(waiters);
        }
        true
    }

    /// Raises an event for each armed CQ that got completions since the last call.
    ///
    /// The fence stands between the completion and the look at `armed`, as the consumer's stands
    /// between arming and its last poll: one of the two sees the other.
    #[inline]
    fn raise_completion_events(&mut self) {
        if self.touched.is_empty() {
            return;
        }
        fence(Ordering::SeqCst);
        while let Some(cqn) = self.touched.pop() {
            let Some(cq) = self.cqs.get_mut(cqn.raw()) else { continue };
            cq.touched = false;
            if cq.disarm() {
                self.events.push_back(Event::Completion(cqn));
            }
        }
    }

    // --- waiting -------------------------------------------------------------------------------

    /// Appends a QP to a wait list.
    fn wait(&mut self, qpn: Qpn, on: Waiting) {
        let list = match on {
            Waiting::No => return,
            Waiting::Count(cqn) => {
                &mut self.cqs.get_mut(cqn.raw()).expect("the WAIT found it").waiters
            }
            Waiting::Receive(n) => {
                let recv = self.recvs.get_mut(n).expect("the SEND found it");
                if !recv.managed && !recv.watched {
                    recv.watched = true;
                    self.rnr.wanted.push(n);
                    self.rnr.interval_ns = RNR_NS_MIN;
                    self.rnr.deadline_ns = self.now_ns + RNR_NS_MIN;
                }
                &mut recv.waiters
            }
        };
        let last = std::mem::replace(&mut list.last, qpn);
        if list.first == Qpn::NONE {
            list.first = qpn;
        }
        if let Some(last) = self.qps.get_mut(last.raw()) {
            last.next_waiter = qpn;
        }
        let qp = self.qps.get_mut(qpn.raw()).expect("it executes");
        qp.waiting = on;
        qp.next_waiter = Qpn::NONE;
    }

    /// Makes every QP of a list that was taken from its holder ready.
    pub fn wake(&mut self, list: WaitList) {
        let mut next = list.first;
        while let Some(qp) = self.qps.get_mut(next.raw()) {
            let qpn = next;
            next = std::mem::replace(&mut qp.next_waiter, Qpn::NONE);
            qp.waiting = Waiting::No;
            self.schedule(qpn);
        }
    }

    /// Makes every QP that waits at a receive queue ready.
    pub fn wake_receivers(&mut self, n: u32) {
        if let Some(recv) = self.recvs.get_mut(n) {
            let waiters = std::mem::replace(&mut recv.waiters, WaitList::EMPTY);
            self.wake(waiters);
        }
    }

    /// Takes a QP out of the wait list that it stands in.
    pub fn unlink(&mut self, qpn: Qpn) {
        let qp = self.qps.get_mut(qpn.raw()).expect("the QP was just seen");
        let list = match std::mem::replace(&mut qp.waiting, Waiting::No) {
            Waiting::No => return,
            Waiting::Count(cqn) => self.cqs.get_mut(cqn.raw()).map(|c| &mut c.waiters),
            Waiting::Receive(n) => self.recvs.get_mut(n).map(|r| &mut r.waiters),
        };
        let after = std::mem::replace(&mut qp.next_waiter, Qpn::NONE);
        let list = list.expect("a wait list outlives the waiting");
        let mut before = Qpn::NONE;
        let mut at = list.first;
        while at != qpn {
            before = at;
            at = self.qps.get(at.raw()).expect("a waiting QP lives").next_waiter;
        }
        if list.last == qpn {
            list.last = before;
        }
        match self.qps.get_mut(before.raw()) {
            None => list.first = after,
            Some(before) => before.next_waiter = after,
        }
    }

    /// RECV_EN: false if the QP has no managed receive queue.
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
            self.wake_receivers(n);
        }
        self.schedule(qpn);
        true
    }

    /// Looks whether receive records have moved: all whose time has come, else some in rotation.
    #[inline]
    fn look_at_records(&mut self) {
        if self.rnr.wanted.is_empty() && self.rnr.flushing.is_empty() {
            return;
        }
        self.look_at_wanted();
        self.look_at_flushing();
    }

    fn look_at_wanted(&mut self) {
        let due = self.now_ns >= self.rnr.deadline_ns;
        let looks = if due { usize::MAX } else { RNR_LOOKS }.min(self.rnr.wanted.len());
        for _ in 0..looks {
            let at = self.rnr.next_wanted % self.rnr.wanted.len();
            let n = self.rnr.wanted[at];
            let wanted = match self.recvs.get_mut(n) {
                None => false,
                Some(recv) if recv.waiters.is_empty() || recv.credits() > 0 => {
                    recv.watched = false;
                    false
                }
                Some(_) => true,
            };
            if wanted {
                self.rnr.next_wanted = at + 1;
                continue;
            }
            self.rnr.wanted.swap_remove(at);
            self.rnr.interval_ns = RNR_NS_MIN;
            self.wake_receivers(n);
        }
        if due {
            self.rnr.deadline_ns = self.now_ns + self.rnr.interval_ns;
            self.rnr.interval_ns = (2 * self.rnr.interval_ns).min(RNR_NS_MAX);
        }
    }

    fn look_at_flushing(&mut self) {
        for _ in 0..self.rnr.flushing.len().min(RNR_LOOKS) {
            let at = self.rnr.next_flushing % self.rnr.flushing.len();
            let qpn = self.rnr.flushing[at];
            match self.qps.get(qpn.raw()) {
                Some(qp) if qp.state == QpState::Error => {
                    self.rnr.next_flushing = at + 1;
                    self.schedule(qpn);
                }
                _ => {
                    self.rnr.flushing.swap_remove(at);
                }
            }
        }
    }

    /// The SRQ's number as completions carry it.
    pub fn srqn_of(recv: u32, shared: bool) -> Srqn {
        Srqn::new(if shared { recv } else { 0 })
    }
}
