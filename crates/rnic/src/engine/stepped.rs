//! For who schedules QPs himself: which could run, what comes next, and one step of one of them.
//!
//! Two kinds of callers: a model checker, which asks which QPs could run and tries all orders; and a
//! simulator, which is told of a QP when it becomes ready ([`super::Engine::take_ready`]), looks at
//! what it would do ([`super::Engine::peek`]), says when that happens, and then has it done
//! ([`super::Engine::step_reported`]).

use super::Core;
use super::lists::Place;
use crate::ids::{Cqn, Qpn};
use crate::qp::{Peer, Qp};
use crate::queue::Fetched;
use crate::verbs::QpState;
use crate::wqe::{Wqe, decode};

/// What a QP would do next, as its ring has it now: it may change until it is executed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Next {
    /// What kind of work.
    pub kind: NextKind,
    /// The queue is a managed one: its WQEs are fetched one by one.
    pub managed: bool,
    /// It completes into the send CQ if it succeeds.
    pub signaled: bool,
    /// The QP that it is connected to.
    pub peer: Qpn,
}

/// A kind of work, with the bytes that it moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NextKind {
    /// The QP is in Error: something is flushed.
    Flush,
    /// NOP, or bytes that are no WQE.
    Nop,
    /// SEND; `inline` if the WQE holds the bytes.
    Send {
        /// Bytes.
        bytes: u64,
        /// The WQE holds them.
        inline: bool,
    },
    /// WRITE, with immediate or without.
    Write {
        /// Bytes.
        bytes: u64,
        /// The WQE holds them.
        inline: bool,
        /// It consumes a receive.
        imm: bool,
    },
    /// READ.
    Read {
        /// Bytes.
        bytes: u64,
    },
    /// CAS or FAA.
    Atomic,
    /// A bind or unbind.
    Window,
    /// LOCAL_INV.
    Invalidate,
    /// WAIT, for completion number `index` (24 bits) of `cqn`.
    Wait {
        /// The CQ.
        cqn: Cqn,
        /// The completion's running number.
        index: u32,
        /// It has been counted: the step would pass.
        reached: bool,
    },
    /// SEND_EN or RECV_EN.
    Enable,
}

/// What [`super::Engine::step_reported`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stepped {
    /// There was nothing to do.
    Nothing,
    /// A WQE, or a slice of one, was done; or something was flushed.
    Done,
    /// It waits for a CQ's count.
    Waits,
    /// It waits for a receive at its peer.
    NotReady,
    /// It failed: the QP is in Error.
    Failed,
}

impl Core {
    /// See [`super::Engine::ready_qps`].
    pub fn ready_qps(&self) -> Vec<Qpn> {
        let mut all: Vec<Qpn> = self
            .qps
            .iter()
            .filter(|(_, qp)| self.could_run(qp))
            .map(|(number, _)| Qpn::new(number))
            .collect();
        all.sort_unstable();
        all
    }

    fn could_run(&self, qp: &Qp) -> bool {
        match qp.place {
            Place::Nowhere => self.flushable(qp.qpn) > 0,
            Place::Ready => true,
            Place::Count { cqn, wakes } => {
                self.cqs.get(cqn.raw()).is_none_or(|cq| cq.wakes != wakes)
            }
            Place::Receive(n) => self.recvs.get(n).is_none_or(|r| r.credits() > 0),
        }
    }

    /// See [`super::Engine::step`].
    pub fn step_one(&mut self, wqe: &mut Fetched, now_ns: u64, qpn: Qpn) -> bool {
        self.now_ns = now_ns;
        if !self.qps.get(qpn.raw()).is_some_and(|qp| self.could_run(qp)) {
            return false;
        }
        self.leave(qpn);
        self.step(qpn, wqe);
        self.schedule(qpn);
        self.raise_completion_events();
        true
    }

    /// See [`super::Engine::take_ready`].
    pub fn drain_ready(&mut self, into: &mut Vec<Qpn>) {
        while let Some(share) = self.shares.next() {
            while let Some(qpn) = self.take_ready(share) {
                into.push(qpn);
            }
            self.shares.spend(share, 0);
        }
    }

    /// See [`super::Engine::peek`].
    pub fn peek(&self, wqe: &mut Fetched, qpn: Qpn) -> Option<Next> {
        let qp = self.qps.get(qpn.raw())?;
        let peer = match qp.peer {
            Peer::Local(peer) | Peer::Remote(peer) => peer,
            Peer::None => Qpn::NONE,
        };
        let managed = qp.send.as_ref().is_some_and(|s| s.managed);
        let next = |kind, signaled| Some(Next { kind, managed, signaled, peer });
        match qp.state {
            QpState::ReadyToSend => {}
            QpState::Error => return next(NextKind::Flush, true),
            _ => return None,
        }
        let send = qp.send.as_ref().filter(|s| s.pending() > 0)?;
        let (ctrl, done) = match &qp.long {
            Some(long) if long.active => {
                wqe.clone_from(&long.wqe);
                (wqe.control(), long.done)
            }
            _ => (send.fetch(wqe), 0),
        };
        let slice = |bytes: u64| (bytes - done.min(bytes)).min(self.slice);
        let is_inline = |sges: &crate::wqe::Sges<'_>| matches!(sges, crate::wqe::Sges::Inline(_));
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
                let reached = self.cqs.get(cqn.raw()).is_none_or(|cq| cq.reached(index));
                NextKind::Wait { cqn, index, reached }
            }
            Ok(Wqe::SendEnable { .. } | Wqe::ReceiveEnable { .. }) => NextKind::Enable,
        };
        next(kind, ctrl.signaled())
    }

    /// See [`super::Engine::step_reported`].
    pub fn step_told(
        &mut self,
        wqe: &mut Fetched,
        now_ns: u64,
        qpn: Qpn,
        completed: &mut Vec<(Cqn, u32)>,
    ) -> Stepped {
        use super::schedule::Step;
        self.now_ns = now_ns;
        self.leave(qpn);
        let step = self.step(qpn, wqe);
        let place = self.qps.get(qpn.raw()).map(|qp| qp.place);
        let stepped = match (step, place) {
            (Step::Executed, _) => Stepped::Done,
            (Step::Failed, _) => Stepped::Failed,
            (Step::Idle, Some(Place::Count { .. })) => Stepped::Waits,
            (Step::Idle, Some(Place::Receive(_))) => Stepped::NotReady,
            (Step::Idle, _) => Stepped::Nothing,
        };
        self.schedule(qpn);
        self.tell_completed(completed);
        stepped
    }

    /// See [`super::Engine::step_unanswered`].
    pub fn step_unanswered(
        &mut self,
        wqe: &mut Fetched,
        now_ns: u64,
        qpn: Qpn,
        completed: &mut Vec<(Cqn, u32)>,
    ) -> Stepped {
        use super::execute::{Progress, Requester};
        self.now_ns = now_ns;
        let Some(qp) = self.qps.get_mut(qpn.raw()) else { return Stepped::Nothing };
        let whole = qp.long.as_ref().is_none_or(|long| !long.active);
        let send = qp.send.as_mut().filter(|s| qp.state == QpState::ReadyToSend && s.pending() > 0);
        let Some(send) = send.filter(|_| whole) else {
            return self.step_told(wqe, now_ns, qpn, completed);
        };
        let ctrl = send.fetch(wqe);
        let me = Requester::of(qp, &ctrl);
        self.leave(qpn);
        let stepped = match self.execute(&me, &ctrl, wqe.bytes(), 0) {
            Ok(Progress::Done(_) | Progress::Part(_)) => {
                self.fail(qpn, &ctrl, crate::cqe::Syndrome::RetryExceeded.into());
                Stepped::Failed
            }
            Ok(Progress::Blocked { on, .. }) => {
                self.wait(qpn, on);
                Stepped::NotReady
            }
            Err(fault) => {
                self.fail(qpn, &ctrl, fault);
                Stepped::Failed
            }
        };
        self.schedule(qpn);
        self.tell_completed(completed);
        stepped
    }

    /// See [`super::Engine::time_out`].
    pub fn time_out(
        &mut self,
        wqe: &mut Fetched,
        qpn: Qpn,
        completed: &mut Vec<(Cqn, u32)>,
    ) -> Stepped {
        let Some(qp) = self.qps.get_mut(qpn.raw()) else { return Stepped::Nothing };
        let send = qp.send.as_mut().filter(|s| qp.state == QpState::ReadyToSend && s.pending() > 0);
        let Some(send) = send else { return Stepped::Nothing };
        let ctrl = send.fetch(wqe);
        self.leave(qpn);
        self.fail(qpn, &ctrl, crate::cqe::Syndrome::RetryExceeded.into());
        self.tell_completed(completed);
        Stepped::Failed
    }

    /// Appends the CQs that got completions since the last time.
    fn tell_completed(&mut self, completed: &mut Vec<(Cqn, u32)>) {
        let Core { touched, cqs, .. } = self;
        for cqn in touched.iter() {
            if let Some(cq) = cqs.get(cqn.raw()) {
                completed.push((*cqn, cq.count));
            }
        }
        self.raise_completion_events();
    }
}
