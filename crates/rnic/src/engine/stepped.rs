//! Interface for callers that schedule QPs themselves: ready QPs, the next operation, single steps.
//!
//! There are two such callers. A model checker asks for the ready QPs and tries all orders. A
//! simulator learns which QPs have become ready ([`super::Engine::take_ready`]), reads the next
//! operation of each ([`super::Engine::peek`]), decides when it happens, and then executes it
//! ([`super::Engine::step_reported`]).

use super::core::Core;
use super::qp_list::InList;
use crate::engine::qp::Peer;
use crate::engine::queue::Fetched;
use verbs::wqe::{Wqe, decode};
use verbs::{Cqn, QpState, Qpn};

/// The next operation of a QP. The QP's owner may still change the ring before the operation is
/// executed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Next {
    /// Kind of operation.
    pub kind: NextKind,
    /// The send queue is managed: its WQEs are fetched one by one.
    pub managed: bool,
    /// A success produces a completion in the send CQ.
    pub signaled: bool,
    /// The peer QP.
    pub peer: Qpn,
    /// Index of its first building block in the send ring.
    pub at: u16,
    /// Index of the building block behind it.
    pub after: u16,
}

/// Kind of operation, with the number of bytes it moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NextKind {
    /// Flush of a WQE: the QP is in Error.
    Flush,
    /// NOP, or an invalid WQE.
    Nop,
    /// SEND.
    Send {
        /// Bytes.
        bytes: u64,
        /// The data is in the WQE.
        inline: bool,
    },
    /// WRITE, with immediate or without.
    Write {
        /// Bytes.
        bytes: u64,
        /// The data is in the WQE.
        inline: bool,
        /// The operation has immediate data and consumes a receive WQE.
        imm: bool,
    },
    /// READ.
    Read {
        /// Bytes.
        bytes: u64,
    },
    /// Atomic: CAS or FAA.
    Atomic,
    /// Bind or unbind of a window.
    Window,
    /// LOCAL_INV.
    Invalidate,
    /// WAIT, for completion number `index` (24 bits) of `cqn`.
    Wait {
        /// The CQ.
        cqn: Cqn,
        /// The completion's running number.
        index: u32,
        /// The completion has been counted, so the WAIT would succeed.
        reached: bool,
    },
    /// SEND_EN or RECV_EN.
    Enable,
}

/// Outcome of [`super::Engine::step_reported`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepOutcome {
    /// The QP had no work.
    Nothing,
    /// A WQE, or a slice of one, was executed or flushed.
    Done,
    /// The QP waits for a CQ's count.
    Waits,
    /// The QP waits for a receive WQE at its peer (RNR).
    NotReady,
    /// The WQE failed: the QP is in Error.
    Failed,
}

impl Core {
    /// See [`super::Engine::step`].
    pub fn step_one(&mut self, wqe: &mut Fetched, now_ns: u64, qpn: Qpn) -> bool {
        self.now_ns = now_ns;
        if !self.queues.qps.get(qpn.raw()).is_some_and(|qp| self.queues.could_run(qp)) {
            return false;
        }
        self.queues.leave(qpn);
        self.step(qpn, wqe);
        self.queues.schedule(qpn);
        self.events.raise_completions(&mut self.queues.cqs);
        true
    }

    /// See [`super::Engine::position`].
    pub fn position(&self, qpn: Qpn) -> Option<u16> {
        let send = self.queues.qps.get(qpn.raw())?.send.as_ref();
        Some(send.map_or(0, |s| s.consumer))
    }

    /// See [`super::Engine::peek_at`].
    pub fn peek(&self, wqe: &mut Fetched, qpn: Qpn, at: Option<u16>) -> Option<Next> {
        let qp = self.queues.qps.get(qpn.raw())?;
        let peer = match qp.peer {
            Peer::Local(peer) | Peer::Remote(peer) => peer,
            Peer::None => Qpn::NONE,
        };
        let managed = qp.send.as_ref().is_some_and(|s| s.managed);
        let first = qp.send.as_ref().map_or(0, |s| s.consumer);
        let at = at.unwrap_or(first);
        let next = |kind, signaled, blocks: u32| {
            let after = at.wrapping_add(blocks as u16);
            Some(Next { kind, managed, signaled, peer, at, after })
        };
        match qp.state {
            QpState::ReadyToSend => {}
            QpState::Error if at == first => return next(NextKind::Flush, true, 0),
            _ => return None,
        }
        // An index before the next operation is far ahead.
        let ahead = u32::from(at.wrapping_sub(first));
        let send = qp.send.as_ref().filter(|s| ahead < s.pending())?;
        let (ctrl, done) = match &qp.partial {
            Some(partial) if partial.active && ahead == 0 => {
                wqe.clone_from(&partial.wqe);
                (wqe.control(), partial.done)
            }
            _ => (send.fetch_at(at, wqe), 0),
        };
        let slice = |bytes: u64| (bytes - done.min(bytes)).min(self.slice);
        let is_inline = |sges: &verbs::wqe::Sges<'_>| matches!(sges, verbs::wqe::Sges::Inline(_));
        let kind = match decode(&ctrl, wqe.bytes()) {
            Err(_) | Ok(Wqe::Nop) => NextKind::Nop,
            Ok(Wqe::Send { from, .. }) => {
                NextKind::Send { bytes: from.total_len(), inline: is_inline(&from) }
            }
            Ok(Wqe::Write { from, imm, .. }) => NextKind::Write {
                bytes: slice(from.total_len()),
                inline: is_inline(&from),
                imm: imm.is_some(),
            },
            Ok(Wqe::Read { to, .. }) => NextKind::Read { bytes: slice(to.total_len()) },
            Ok(Wqe::CompareSwap { .. } | Wqe::FetchAdd { .. }) => NextKind::Atomic,
            Ok(Wqe::Umr(_)) => NextKind::Window,
            Ok(Wqe::LocalInvalidate { .. }) => NextKind::Invalidate,
            Ok(Wqe::Wait { cqn, index }) => {
                let reached = self.queues.cqs.get(cqn.raw()).is_none_or(|cq| cq.reached(index));
                NextKind::Wait { cqn, index, reached }
            }
            Ok(Wqe::SendEnable { .. } | Wqe::ReceiveEnable { .. }) => NextKind::Enable,
        };
        next(kind, ctrl.signaled(), ctrl.blocks())
    }

    /// See [`super::Engine::step_reported`].
    pub fn step_reported(
        &mut self,
        wqe: &mut Fetched,
        now_ns: u64,
        qpn: Qpn,
        completed: &mut Vec<(Cqn, u32)>,
    ) -> StepOutcome {
        use super::poll::Step;
        self.now_ns = now_ns;
        self.queues.leave(qpn);
        let step = self.step(qpn, wqe);
        let in_list = self.queues.qps.get(qpn.raw()).map(|qp| qp.in_list);
        let stepped = match (step, in_list) {
            (Step::Executed, _) => StepOutcome::Done,
            (Step::Failed, _) => StepOutcome::Failed,
            (Step::Idle, Some(InList::CqWaiters { .. })) => StepOutcome::Waits,
            (Step::Idle, Some(InList::RecvWaiters(_))) => StepOutcome::NotReady,
            (Step::Idle, _) => StepOutcome::Nothing,
        };
        self.queues.schedule(qpn);
        self.report_completed(completed);
        stepped
    }

    /// See [`super::Engine::step_unanswered`].
    pub fn step_unanswered(
        &mut self,
        wqe: &mut Fetched,
        now_ns: u64,
        qpn: Qpn,
        completed: &mut Vec<(Cqn, u32)>,
    ) -> StepOutcome {
        use super::execute::Progress;
        use super::local_wqe::LocalWqe;
        self.now_ns = now_ns;
        let Some(qp) = self.queues.qps.get_mut(qpn.raw()) else { return StepOutcome::Nothing };
        let whole = qp.partial.as_ref().is_none_or(|partial| !partial.active);
        let send = qp.send.as_mut().filter(|s| qp.state == QpState::ReadyToSend && s.pending() > 0);
        let Some(send) = send.filter(|_| whole) else {
            return self.step_reported(wqe, now_ns, qpn, completed);
        };
        let ctrl = send.fetch(wqe);
        let me = LocalWqe::new(qp, &ctrl);
        self.queues.leave(qpn);
        let stepped = match self.execute(&me, &ctrl, wqe.bytes(), 0) {
            Ok(Progress::Done(_) | Progress::Part(_)) => {
                self.fail(qpn, &ctrl, verbs::cqe::Syndrome::RetryExceeded.into());
                StepOutcome::Failed
            }
            Ok(Progress::Blocked { on, .. }) => {
                self.wait(qpn, on);
                StepOutcome::NotReady
            }
            Err(fault) => {
                self.fail(qpn, &ctrl, fault);
                StepOutcome::Failed
            }
        };
        self.queues.schedule(qpn);
        self.report_completed(completed);
        stepped
    }

    /// See [`super::Engine::time_out`].
    pub fn time_out(
        &mut self,
        wqe: &mut Fetched,
        now_ns: u64,
        qpn: Qpn,
        completed: &mut Vec<(Cqn, u32)>,
    ) -> StepOutcome {
        let Some(qp) = self.queues.qps.get_mut(qpn.raw()) else { return StepOutcome::Nothing };
        let send = qp.send.as_mut().filter(|s| qp.state == QpState::ReadyToSend && s.pending() > 0);
        let Some(send) = send else {
            // An access of the peer may have broken the QP meanwhile: the WQE is flushed.
            return self.step_reported(wqe, now_ns, qpn, completed);
        };
        let ctrl = send.fetch(wqe);
        self.queues.leave(qpn);
        self.fail(qpn, &ctrl, verbs::cqe::Syndrome::RetryExceeded.into());
        self.report_completed(completed);
        StepOutcome::Failed
    }

    /// Appends the CQs that received completions since the last call.
    fn report_completed(&mut self, completed: &mut Vec<(Cqn, u32)>) {
        for cqn in self.events.touched() {
            if let Some(cq) = self.queues.cqs.get(cqn.raw()) {
                completed.push((*cqn, cq.count));
            }
        }
        self.events.raise_completions(&mut self.queues.cqs);
    }
}
