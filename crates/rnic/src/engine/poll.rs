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
//! `scheduler.rs` selects the function, `queues.rs` has the lists.

use super::core::{Core, EMPTY_QUANTUM_WORK, WQE_WORK};
use super::execute::Progress;
use super::local_wqe::{Fault, LocalWqe};
use super::qp_list::InList;
use crate::engine::queue::{Fetched, Waiting};
use crate::limits::Limits;
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
    pub fn poll(&mut self, wqe: &mut Fetched, now_ns: u64, budget: usize) -> usize {
        self.now_ns = now_ns;
        self.record_poller.poll(&mut self.queues, now_ns);
        if self.wire.deadline_ns().is_some_and(|at| at <= now_ns) {
            self.run_timers();
        }
        let Limits { slice_bytes, shared_slice_bytes, .. } = self.limits;
        let (slice, quanta) = if self.queues.scheduler.is_shared() {
            (shared_slice_bytes, 1)
        } else {
            (slice_bytes, SOLE_QUANTA)
        };
        self.slice = slice.min(slice_bytes).max(1) as u64;
        let end = self.work + quanta * self.limits.function_turn.max(1) as u64;
        let mut done = Done::default();
        while done.steps < budget && self.work < end && !self.wire.outbox.is_stalled() {
            let Some(sched_index) = self.queues.scheduler.next() else { break };
            self.run_quantum(sched_index, wqe, budget, end, &mut done);
        }
        self.events.raise_completions(&mut self.queues.cqs);
        // Steps that executed nothing do not mean that no work is left.
        if done.executed == 0 && self.queues.scheduler.is_active() { 1 } else { done.executed }
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
        let queue = self.queues.scheduler.function(sched_index);
        let (ready_list, left) = (queue.ready, queue.deficit);
        let Some(qpn) = ready_list.first() else {
            self.queues.scheduler.spend(sched_index, 0);
            return;
        };
        let qp = self.queues.qps.get_mut(qpn.raw()).expect("a ready QP exists");
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
                self.queues.requeue(sched_index, qpn);
                self.queues.scheduler.spend(sched_index, WQE_WORK as i64);
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
        self.queues.end_qp_quantum(sched_index, qpn, work);
        self.queues.scheduler.spend(sched_index, work);
    }

    /// Executes the QP's next WQE, or the next slice of the WQE in progress.
    #[inline]
    pub(super) fn step(&mut self, qpn: Qpn, wqe: &mut Fetched) -> Step {
        let Some(qp) = self.queues.qps.get_mut(qpn.raw()) else { return Step::Idle };
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
                self.queues
                    .qps
                    .get_mut(qpn.raw())
                    .expect("the executing QP exists")
                    .suspend_wqe(wqe, done);
                Step::Executed
            }
            Ok(Progress::Blocked { on, done }) => {
                let qp = self.queues.qps.get_mut(qpn.raw()).expect("the executing QP exists");
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
        let qp = self.queues.qps.get_mut(me.qpn.raw()).expect("the executing QP exists");
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
        let qp = self.queues.qps.get_mut(qpn.raw()).expect("the executing QP exists");
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
        self.queues.schedule(qpn);
    }

    /// Makes a QP wait.
    pub(super) fn wait(&mut self, qpn: Qpn, on: Waiting) {
        if let Some(n) = self.queues.wait(qpn, on) {
            self.record_poller.add_blocked(n, self.now_ns);
        }
    }

    // --- completions ---------------------------------------------------------------------------

    /// Writes a completion and wakes the QPs that WAIT for it. Returns false if the CQ is full.
    #[inline]
    pub fn push_cqe(&mut self, cqn: Cqn, cqe: &Cqe) -> bool {
        self.work += WQE_WORK;
        let cq = self.queues.cqs.get_mut(cqn.raw()).expect("a CQ in use exists");
        let before = cq.overrun;
        if !cq.push(cqe) {
            if !before {
                self.events.raise(cq.function, AsyncEvent::CqOverrun { cqn });
            }
            return false;
        }
        self.stats.completions += 1;
        self.events.touch(cqn, cq);
        cq.solicited |= cqe.solicited || cqe.error.is_some();
        if !cq.waiters.is_empty() {
            self.queues.wake_waiters(cqn);
        }
        true
    }

    /// The SRQ number in completions: 0 if the queue is not shared.
    pub fn srqn_of(recv: u32, shared: bool) -> Srqn {
        Srqn::new(if shared { recv } else { 0 })
    }
}
