//! Who runs next, and what a turn does: WQE after WQE, each fetched when its time has come.
//!
//! ```text
//!               schedule                         turn: WQEs and slices until its work is used up
//!   work comes ---------> ready row of its function ------------------------------------------+
//!                            ^    ^                                                           |
//!                            |    +---- work left --------------------------------------------+
//!                            +--- wake --- row of a CQ (WAIT) or of a receive queue (RNR) <----+
//! ```
//!
//! `shares.rs` says whose turn it is, `lists.rs` has the rows.

use super::execute::{Fault, Progress, Requester};
use super::lists::Place;
use super::{Core, LOOK_WORK, WQE_WORK};
use crate::cqe::{self, Cqe, Syndrome};
use crate::ids::{Cqn, Qpn, Srqn};
use crate::qp::Qp;
use crate::queue::Fetched;
use crate::verbs::{AsyncEvent, Event, Limits, QpState};
use crate::wqe::Control;
use std::sync::atomic::{Ordering, fence};

/// What a step of a QP came to.
pub(super) enum Step {
    /// A WQE or a slice of one was done, there may be more.
    Executed,
    /// Nothing to do, or it waits.
    Idle,
    /// A WQE failed.
    Failed,
}

/// Turns that a `poll` gives at most to a function that has had all of them for a while. What is done for each `poll`, above
/// all to look at doorbells that clients write, takes as long as three READs of 64 B; a turn is six of them. Others are
/// heard later by that, which is half of a slice with the default limits.
const TURNS_ALONE: u64 = 8;

/// What a `poll` has done.
#[derive(Default)]
struct Done {
    /// Looks at a QP.
    steps: usize,
    /// WQEs and slices that were executed.
    executed: usize,
}

impl Core {
    #[inline]
    pub fn ring(&mut self, qpn: Qpn, producer: u16) -> bool {
        let Some(qp) = self.qps.get_mut(qpn.raw()) else { return false };
        match &mut qp.send {
            Some(send) if !send.managed && qp.state != QpState::Reset => send.allow(producer),
            _ => return false,
        }
        let Some(qp) = self.qps.get(qpn.raw()) else { return false };
        let work = self.has_work(qp);
        if work && qp.place == Place::Nowhere {
            self.make_ready(qpn);
        }
        work
    }

    /// Makes a QP ready if it has work and stands nowhere.
    #[inline(never)]
    pub fn schedule(&mut self, qpn: Qpn) {
        let Some(qp) = self.qps.get(qpn.raw()) else { return };
        if qp.place == Place::Nowhere && self.has_work(qp) {
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

    pub fn poll(&mut self, wqe: &mut Fetched, now_ns: u64, budget: usize) -> usize {
        self.now_ns = now_ns;
        self.look_at_records();
        if self.wire.deadline_ns().is_some_and(|at| at <= now_ns) {
            self.run_timers();
        }
        let Limits { slice_bytes, shared_slice_bytes, .. } = self.limits;
        let (slice, turns) = if self.shares.is_shared() {
            (shared_slice_bytes, 1)
        } else {
            (slice_bytes, TURNS_ALONE)
        };
        self.slice = slice.min(slice_bytes).max(1) as u64;
        let end = self.work + turns * self.limits.function_turn.max(1) as u64;
        let mut done = Done::default();
        while done.steps < budget && self.work < end && !self.wire.outbox.is_stalled() {
            let Some(share) = self.shares.next() else { break };
            self.turn(share, wqe, budget, end, &mut done);
        }
        self.raise_completion_events();
        // Steps that executed nothing are not the end.
        if done.executed == 0 && self.shares.any() { 1 } else { done.executed }
    }

    /// The turn, or a part of it, of the first ready QP of a function. The QP stays at the front of the
    /// row meanwhile: one that has the function to itself need not be taken out and put back.
    fn turn(&mut self, share: u32, wqe: &mut Fetched, budget: usize, end: u64, done: &mut Done) {
        let share_of = self.shares.of(share);
        let (row, left) = (share_of.ready, share_of.left);
        let Some(qpn) = row.first() else {
            self.shares.spend(share, 0);
            return;
        };
        let qp = self.qps.get_mut(qpn.raw()).expect("what is ready lives");
        // It may have come with a whole row of a CQ.
        qp.place = Place::Ready;
        let most = if row.has_one() {
            // Nobody to share with.
            left
        } else {
            if qp.left <= 0 {
                qp.left += self.limits.qp_turn.max(1) as i64;
            }
            if qp.left <= 0 {
                // It still owes. Passing it over counts too: a function may have many such.
                self.work += WQE_WORK;
                self.requeue(share, qpn);
                self.shares.spend(share, WQE_WORK as i64);
                done.steps += 1;
                return;
            }
            qp.left.min(left)
        };
        let start = self.work;
        let stop = end.min(start + most as u64);
        let (mut steps, mut executed) = (0, 0);
        while self.work < stop && steps < budget - done.steps {
            steps += 1;
            match self.step(qpn, wqe) {
                Step::Executed => executed += 1,
                Step::Failed => {
                    executed += 1;
                    break;
                }
                Step::Idle => break,
            }
        }
        done.steps += steps;
        done.executed += executed;
        if executed == 0 {
            self.work += LOOK_WORK;
        }
        let work = (self.work - start) as i64;
        self.end_turn(share, qpn, work);
        self.shares.spend(share, work);
    }

    /// After `work` of a QP: where it stands then.
    #[inline]
    fn end_turn(&mut self, share: u32, qpn: Qpn, work: i64) {
        let row = self.shares.of(share).ready;
        let qp = self.qps.get(qpn.raw()).expect("nothing ends a QP in its turn");
        // Else it waits, or has failed and has nothing to flush.
        let ready = qp.place == Place::Ready;
        let alone = if ready { row.has_one() } else { row.is_empty() };
        let left = if alone { 0 } else { qp.left - work };
        let goes_on = ready && self.has_work(qp);
        if ready && !goes_on {
            self.leave(qpn);
        } else if goes_on && !alone && left <= 0 {
            self.requeue(share, qpn);
        }
        // What a QP leaves is forgotten, unless it waits.
        let waits = !ready && self.qps.get(qpn.raw()).is_some_and(|qp| qp.place != Place::Nowhere);
        let qp = self.qps.get_mut(qpn.raw()).expect("as before");
        qp.left = if goes_on || waits { left } else { left.min(0) };
    }

    /// Executes the QP's next WQE, or the next slice of the one under way.
    #[inline]
    pub(super) fn step(&mut self, qpn: Qpn, wqe: &mut Fetched) -> Step {
        let Some(qp) = self.qps.get_mut(qpn.raw()) else { return Step::Idle };
        if qp.remote.is_some() {
            return self.step_remote(qpn, wqe);
        }
        if qp.state != QpState::ReadyToSend {
            let flushed = qp.state == QpState::Error && self.flush(qpn);
            return if flushed { Step::Executed } else { Step::Idle };
        }
        let Some(send) = qp.send.as_mut().filter(|s| s.pending() > 0) else { return Step::Idle };
        let (ctrl, done) = match &qp.long {
            Some(long) if long.active => {
                wqe.clone_from(&long.wqe);
                (wqe.control(), long.done)
            }
            _ => (send.fetch(wqe), 0),
        };
        self.work += WQE_WORK * (1 + ctrl.ds as u64);
        let me = Requester::of(qp, &ctrl);
        match self.execute(&me, &ctrl, wqe.bytes(), done) {
            Ok(Progress::Done(bytes)) => self.complete(&me, &ctrl, bytes),
            Ok(Progress::Part(done)) => {
                self.qps.get_mut(qpn.raw()).expect("it executes").put_aside(wqe, done);
                Step::Executed
            }
            Ok(Progress::Blocked { on, done }) => {
                let qp = self.qps.get_mut(qpn.raw()).expect("it executes");
                if done > 0 {
                    qp.put_aside(wqe, done);
                }
                self.wait(qpn, on);
                Step::Idle
            }
            Err(fault) => {
                self.fail(qpn, &ctrl, fault);
                Step::Failed
            }
        }
    }

    /// Ends a WQE that succeeded.
    #[inline]
    fn complete(&mut self, me: &Requester, ctrl: &Control, bytes: u64) -> Step {
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

    /// Ends a WQE that failed: error completion, QP to Error, the rest is flushed.
    #[cold]
    pub(super) fn fail(&mut self, qpn: Qpn, ctrl: &Control, fault: Fault) {
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

    // --- completions ---------------------------------------------------------------------------

    /// Writes a completion and wakes who waits for it. False if the CQ has no room.
    #[inline]
    pub fn push_cqe(&mut self, cqn: Cqn, cqe: &Cqe) -> bool {
        self.work += WQE_WORK;
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
        cq.solicited |= cqe.solicited || cqe.error.is_some();
        if !cq.waiters.is_empty() {
            self.wake_waiters(cqn);
        }
        true
    }

    /// Raises an event for each armed CQ that got completions since the last call.
    ///
    /// The fence stands between the completion and the look at `armed`, as the consumer's stands
    /// between arming and its last poll: one of the two sees the other.
    #[inline]
    pub(super) fn raise_completion_events(&mut self) {
        if self.touched.is_empty() {
            return;
        }
        fence(Ordering::SeqCst);
        while let Some(cqn) = self.touched.pop() {
            let Some(cq) = self.cqs.get_mut(cqn.raw()) else { continue };
            cq.touched = false;
            if cq.disarm() && !cq.reported {
                cq.reported = true;
                self.events.push_back(Event::Completion(cqn));
            }
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
            // Only its peer can wait here.
            self.wake_senders(n, 1);
        }
        self.schedule(qpn);
        true
    }

    /// The SRQ's number as completions carry it.
    pub fn srqn_of(recv: u32, shared: bool) -> Srqn {
        Srqn::new(if shared { recv } else { 0 })
    }
}
