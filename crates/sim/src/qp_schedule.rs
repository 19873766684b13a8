//! Timing of the work of queue pairs: when work starts, when it takes effect, and when its
//! completions are known.
//!
//! ```text
//!  doorbell, SEND_EN, a count that a WAIT waits for ──> ready ──plan──> Step ──step──> completions
//!                                                         ^                    │
//!                                                         └──── more work ─────┘
//! ```

use std::fmt::Write as _;

use rnic::engine::{Next, NextKind, StepOutcome};
use rnic::port::inline::InlineNic;
use verbs::{Cqn, Qpn};

use crate::ids::NodeId;
use crate::net::TRIES;
use crate::qp::{Observed, QpState};
use crate::state::{Event, NUMBER, State};
use crate::time::Time;

impl State {
    fn qp(&mut self, qpn: Qpn) -> &mut QpState {
        let at = qpn.raw() as usize;
        if at >= self.qps.len() {
            self.qps.resize_with(at + 1, QpState::default);
        }
        &mut self.qps[at]
    }

    /// Returns the node of a QP, or the default `NodeId` if the QP does not exist.
    fn node_of(&self, qpn: Qpn) -> NodeId {
        self.qps.get(qpn.raw() as usize).map_or(NodeId::default(), |qp| qp.node)
    }

    /// Records that a QP was created on a node.
    pub fn made_qp(&mut self, qpn: Qpn, node: NodeId, send_cq: Cqn, managed: bool) {
        let qp = self.qp(qpn);
        if std::mem::take(&mut qp.chained) {
            let old = qp.node;
            self.nodes[old.0 as usize].chain_qps -= 1;
        }
        let qp = self.qp(qpn);
        // A pending `Step` of a destroyed QP with the same number will find no work.
        *qp = QpState { node, send_cq, managed, held: qp.held, ..QpState::default() };
    }

    /// Records that a QP is connected.
    pub fn connects(&mut self, qpn: Qpn, peer: Qpn) {
        let far = self.node_of(peer);
        let qp = self.qp(qpn);
        let node = qp.node;
        if qp.managed && !qp.chained && far != node {
            qp.chained = true;
            self.nodes[node.0 as usize].chain_qps += 1;
        }
    }

    /// Plans the work that has become ready, starting at `from`.
    pub fn collect(&mut self, nic: &InlineNic, from: Time) {
        let mut ready = std::mem::take(&mut self.ready);
        nic.with_engine(|e| e.take_ready(&mut ready));
        for qpn in ready.drain(..) {
            if !self.qp(qpn).held {
                self.plan(nic, qpn, from);
            }
        }
        self.ready = ready;
    }

    /// Schedules the next work of a QP, which may start at `from` or later.
    fn plan(&mut self, nic: &InlineNic, qpn: Qpn, from: Time) {
        let next = nic.with_engine(|e| e.peek(qpn));
        let params = self.params.clone();
        let Some(next) = next else {
            self.qp(qpn).held = false;
            return;
        };
        let (node, free) = (self.qp(qpn).node, self.qp(qpn).free);
        let start = from.max(free);
        let mut lost = false;
        let at = match next.kind {
            NextKind::Flush => start,
            NextKind::Wait { reached: false, .. } => start,
            NextKind::Wait { cqn, index, reached: true } => {
                start.max(self.known(cqn, index)) + params.nic.wait
            }
            kind => {
                let nic = &mut self.nodes[node.0 as usize];
                let doorbell = if next.managed { Time::ZERO } else { params.pcie.doorbell };
                // A queue that is busy needs no doorbell to continue.
                let start = if start > free { start + doorbell } else { start };
                let issued = nic.issue(&params, &next, start);
                self.qp(qpn).free = issued;
                let local = matches!(
                    kind,
                    NextKind::Nop | NextKind::Window | NextKind::Invalidate | NextKind::Enable
                );
                let far = self.node_of(next.peer);
                if local || far == node || next.peer == Qpn::NONE {
                    issued
                } else {
                    let left = self.nodes[node.0 as usize].depart(&params, &next, issued);
                    match self.transit(node, far, left) {
                        Some(at) => at,
                        None => {
                            lost = true;
                            left + Time(params.link.retry.0 * (TRIES as u64 + 1))
                        }
                    }
                }
            }
        };
        let qp = self.qp(qpn);
        qp.arrival = at.max(qp.arrival);
        (qp.held, qp.next, qp.lost) = (true, Some(next), lost);
        let at = qp.arrival.max(self.now);
        self.push(at, Event::Step(qpn));
    }

    fn transit(&mut self, from: NodeId, to: NodeId, left: Time) -> Option<Time> {
        let late = self.net.delay(from, to, left, self.is_memory_node(from));
        if late != Some(Time::ZERO) {
            self.counters.delayed += 1;
        }
        Some(left + self.params.link.latency + late?)
    }

    /// Executes the next work of a QP.
    pub fn step(&mut self, nic: &InlineNic, qpn: Qpn) {
        let (now, params) = (self.now, self.params.clone());
        let qp = self.qp(qpn);
        let (node, send_cq) = (qp.node, qp.send_cq);
        let Some(next) = qp.next.take() else {
            // The event was scheduled for a destroyed QP with the same number.
            return self.plan(nic, qpn, now);
        };
        let mut lost = std::mem::take(&mut qp.lost);
        if let NextKind::Wait { reached: false, .. } = next.kind {
            let again = nic.with_engine(|e| e.peek(qpn));
            if matches!(again, Some(Next { kind: NextKind::Wait { reached: true, .. }, .. })) {
                // The completion has been counted meanwhile, but the NIC may not know it yet.
                return self.plan(nic, qpn, now);
            }
        }
        let far = self.node_of(next.peer);
        let moves = matches!(
            next.kind,
            NextKind::Send { .. }
                | NextKind::Write { .. }
                | NextKind::Read { .. }
                | NextKind::Atomic
        );
        let mut completed = std::mem::take(&mut self.completed);
        // The target word of an atomic determines the lock for which it waits at the responder.
        let addr = match next.kind {
            NextKind::Atomic if params.nic.atomic_same != Time::ZERO => {
                nic.with_engine(|e| e.next_target(qpn)).map_or(0, |aim| aim.addr)
            }
            _ => 0,
        };
        let aim = match self.watched {
            true => nic.with_engine(|e| {
                e.function_of(qpn).map(|f| (f, e.function_of(next.peer), e.next_target(qpn)))
            }),
            false => None,
        };
        // The next request of a compute node acknowledges all responses that it has received from
        // the memory node, so a lost acknowledgement in that direction has no effect.
        let crosses = moves && next.peer != Qpn::NONE && far != node && !self.is_memory_node(node);
        let mut back = match crosses && !lost {
            true => self.net.delay(far, node, now, false),
            false => Some(Time::ZERO),
        };
        if next.kind == NextKind::Window
            && let Some(takes_effect) = self.window_fault(node)
        {
            lost = !takes_effect;
            back = back.filter(|_| lost);
        }
        let stepped = nic.with_engine(|e| match (lost, back) {
            (true, _) => e.time_out(qpn, now.as_ns(), &mut completed),
            (false, None) => e.step_unanswered(qpn, now.as_ns(), &mut completed),
            (false, Some(_)) => e.step_reported(qpn, now.as_ns(), &mut completed),
        });
        self.trace_step(qpn, &next, stepped, (lost, back.is_none()));
        self.observed = aim.map(|(function, towards, aim)| {
            let unanswered = back.is_none();
            Observed { qpn, function, towards, next, stepped, lost, unanswered, aim }
        });
        let moved = moves && next.peer != Qpn::NONE && !lost && stepped != StepOutcome::NotReady;
        let (received, answered) = if !moved {
            (now, now)
        } else if far == node {
            let service = self.nodes[node.0 as usize].loopback(&params, &next, now);
            (service.received, service.completed)
        } else {
            let (received, answer) = self.nodes[far.0 as usize].respond(&params, &next, addr, now);
            // A lost answer is sent again; the request has been executed once.
            let late = back.unwrap_or(Time(params.link.retry.0 * (TRIES as u64 + 1)));
            self.counters.delayed += (late != Time::ZERO) as u64;
            let there = answer + params.link.latency + late;
            (received, self.nodes[node.0 as usize].answered(&next, there))
        };
        // The requester's NIC reports the refusal of the responder after a while.
        let answered = match stepped {
            StepOutcome::Failed if moved => answered + params.nic.fault_report,
            _ => answered,
        };
        for (cqn, count) in completed.drain(..) {
            let known = if cqn == send_cq { answered } else { received };
            self.count(cqn, count & NUMBER, known, known + params.pcie.write);
        }
        self.completed = completed;
        match stepped {
            StepOutcome::Done | StepOutcome::Failed => {
                self.counters.verbs += 1;
                self.counters.timeouts += (lost || back.is_none()) as u64;
                // A managed queue continues after the work has taken effect; any other queue has
                // continued already.
                let from = if next.managed { received } else { self.qp(qpn).free };
                self.plan(nic, qpn, from);
            }
            StepOutcome::NotReady => {
                // Retry after the RNR timer of the peer: the shortest possible.
                let qp = self.qp(qpn);
                qp.free = now + Time::us(10);
                qp.held = false;
            }
            StepOutcome::Waits | StepOutcome::Nothing => self.qp(qpn).held = false,
        }
        self.collect(nic, now);
    }

    fn trace_step(
        &mut self,
        qpn: Qpn,
        next: &Next,
        stepped: StepOutcome,
        (lost, unanswered): (bool, bool),
    ) {
        let (now, node) = (self.now, self.qp(qpn).node);
        if let Some(trace) = &mut self.trace {
            let (from, peer) = (qpn.raw(), next.peer.raw());
            let lost = match (lost, unanswered) {
                (true, _) => ", lost",
                (_, true) => ", the answer lost",
                _ => "",
            };
            let _ = writeln!(
                trace,
                "{now} node {} QP {from} -> {peer}: {:?} {stepped:?}{lost}",
                node.0, next.kind,
            );
        }
    }
}
