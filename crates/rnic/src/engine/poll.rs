//! The poll loop: runs a scheduling quantum, which executes WQE after WQE, each fetched when it is
//! due.
//!
//! ```text
//!               schedule                             quantum: WQEs and slices until it is used up
//!   work comes ---------> ready list of the function -----------------------------------------+
//!                            ^    ^                                                           |
//!                            |    +---- work left --------------------------------------------+
//!                            +--- wake --- waiters of a CQ (WAIT) or of a receive queue (RNR) <+
//! ```
//!
//! `scheduler.rs` selects the function, `run_queue.rs` has the lists.

use super::execute::Progress;
use super::local_wqe::{Fault, LocalWqe};
use super::qp_list::InList;
use super::{Core, EMPTY_QUANTUM_WORK, WQE_WORK};
use crate::engine::qp::Qp;
use crate::engine::queue::Fetched;
use crate::limits::Limits;
use crate::spec::Event;
use std::sync::atomic::{Ordering, fence};
use verbs::cqe::{self, Cqe, Syndrome};
use verbs::wqe::Control;
use verbs::{AsyncEvent, Cqn, QpState, Qpn, Srqn};

/// Outcome of a step of a QP.
pub(super) enum Step {
    /// A WQE, or a slice of one, was executed; more may follow.
    Executed,
    /// The QP has no work, or waits.
    Idle,
    /// A WQE failed.
    Failed,
}

/// Maximum number of consecutive quanta per `poll` when a single function is active. The fixed cost
/// of a `poll`, mostly scanning the doorbells that clients write, is that of three READs of 64 B; a
/// quantum is six such READs. Other functions wait longer for their first quantum, by half of a
/// slice with the default limits.
const SOLE_QUANTA: u64 = 8;

/// Counters of one `poll`.
#[derive(Default)]
struct Done {
    /// Number of steps.
    steps: usize,
    /// Number of WQEs and slices executed.
    executed: usize,
}

impl Core {
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

    pub fn poll(&mut self, wqe: &mut Fetched, now_ns: u64, budget: usize) -> usize {
        self.now_ns = now_ns;
        self.poll_records();
        if self.wire.deadline_ns().is_some_and(|at| at <= now_ns) {
            self.run_timers();
        }
        let Limits { slice_bytes, shared_slice_bytes, .. } = self.limits;
        let (slice, quanta) = if self.scheduler.is_shared() {
            (shared_slice_bytes, 1)
        } else {
            (slice_bytes, SOLE_QUANTA)
        };
        self.slice = slice.min(slice_bytes).max(1) as u64;
        let end = self.work + quanta * self.limits.function_turn.max(1) as u64;
        let mut done = Done::default();
        while done.steps < budget && self.work < end && !self.wire.outbox.is_stalled() {
            let Some(sched_index) = self.scheduler.next() else { break };
            self.run_quantum(sched_index, wqe, budget, end, &mut done);
        }
        self.raise_completion_events();
        // Steps that executed nothing do not mean that no work is left.
        if done.executed == 0 && self.scheduler.is_active() { 1 } else { done.executed }
    }

    /// Runs the quantum, or a part of it, of the first ready QP of a function. The QP stays at the
    /// front of the list meanwhile: the only ready QP of a function need not be removed and
    /// reinserted.
    fn run_quantum(
        &mut self,
        sched_index: u32,
        wqe: &mut Fetched,
        budget: usize,
        end: u64,
        done: &mut Done,
    ) {
        let queue = self.scheduler.function(sched_index);
        let (ready_list, left) = (queue.ready, queue.deficit);
        let Some(qpn) = ready_list.first() else {
            self.scheduler.spend(sched_index, 0);
            return;
        };
        let qp = self.qps.get_mut(qpn.raw()).expect("a ready QP exists");
        // The QP may come from the waiters of a CQ, which are appended without changing each QP.
        qp.in_list = InList::Ready;
        let quantum = if ready_list.has_one() {
            // No other QP of the function is ready.
            left
        } else {
            if qp.deficit <= 0 {
                qp.deficit += self.limits.qp_turn.max(1) as i64;
            }
            if qp.deficit <= 0 {
                // The QP still has debt. Skipping it also costs work, because a function may have
                // many QPs with debt.
                self.work += WQE_WORK;
                self.requeue(sched_index, qpn);
                self.scheduler.spend(sched_index, WQE_WORK as i64);
                done.steps += 1;
                return;
            }
            qp.deficit.min(left)
        };
        let start = self.work;
        let stop = end.min(start + quantum as u64);
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
            self.work += EMPTY_QUANTUM_WORK;
        }
        let work = (self.work - start) as i64;
        self.end_qp_quantum(sched_index, qpn, work);
        self.scheduler.spend(sched_index, work);
    }

    /// Updates a QP's list and the rest of its quantum after `work`.
    #[inline]
    fn end_qp_quantum(&mut self, sched_index: u32, qpn: Qpn, work: i64) {
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

    /// Executes the QP's next WQE, or the next slice of the WQE in progress.
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
        let (ctrl, done) = match &qp.partial {
            Some(partial) if partial.active => {
                wqe.clone_from(&partial.wqe);
                (wqe.control(), partial.done)
            }
            _ => (send.fetch(wqe), 0),
        };
        self.work += WQE_WORK * (1 + ctrl.ds as u64);
        let me = LocalWqe::new(qp, &ctrl);
        match self.execute(&me, &ctrl, wqe.bytes(), done) {
            Ok(Progress::Done(bytes)) => self.complete(&me, &ctrl, bytes),
            Ok(Progress::Part(done)) => {
                self.qps
                    .get_mut(qpn.raw())
                    .expect("the executing QP exists")
                    .suspend_wqe(wqe, done);
                Step::Executed
            }
            Ok(Progress::Blocked { on, done }) => {
                let qp = self.qps.get_mut(qpn.raw()).expect("the executing QP exists");
                if done > 0 {
                    qp.suspend_wqe(wqe, done);
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

    /// Completes a WQE that succeeded.
    #[inline]
    fn complete(&mut self, me: &LocalWqe, ctrl: &Control, bytes: u64) -> Step {
        self.stats.wqes[(ctrl.opcode & 0x3f) as usize] += 1;
        let qp = self.qps.get_mut(me.qpn.raw()).expect("the executing QP exists");
        qp.executed += 1;
        qp.drop_partial();
        let send = qp.send.as_mut().expect("the executing QP exists");
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

    /// Completes a WQE that failed: error completion, QP to Error, flush of the remaining WQEs.
    #[cold]
    pub(super) fn fail(&mut self, qpn: Qpn, ctrl: &Control, fault: Fault) {
        self.stats.errors += 1;
        let qp = self.qps.get_mut(qpn.raw()).expect("the executing QP exists");
        let send_cq = qp.send_cq;
        let send = qp.send.as_mut().expect("the executing QP exists");
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
        // If the QP is its own peer, it may already have been in Error.
        self.schedule(qpn);
    }

    // --- completions ---------------------------------------------------------------------------

    /// Writes a completion and wakes the QPs that WAIT for it. Returns false if the CQ is full.
    #[inline]
    pub fn push_cqe(&mut self, cqn: Cqn, cqe: &Cqe) -> bool {
        self.work += WQE_WORK;
        let cq = self.cqs.get_mut(cqn.raw()).expect("a CQ in use exists");
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

    /// Raises an event for each armed CQ that received completions since the last call.
    ///
    /// The fence separates writing the completions from reading `armed`; the consumer has a fence
    /// between writing `armed` and its last poll. So either the NIC sees `armed`, or the consumer
    /// sees the completion.
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

    /// The SRQ number in completions: 0 if the queue is not shared.
    pub fn srqn_of(recv: u32, shared: bool) -> Srqn {
        Srqn::new(if shared { recv } else { 0 })
    }
}
