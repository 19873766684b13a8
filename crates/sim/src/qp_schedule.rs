//! Timing of the work of queue pairs: when work starts, when it takes effect, and when its
//! completions are known.
//!
//! ```text
//! doorbell, SEND_EN, a WAIT's count ─plan─> Issue ─> Fetch ─> Enter ─> Land ─> Step ─> replies.rs
//!                                             │    (payload)  (the two links)    │
//!                  a plain queue's next WQE <─┘      a managed queue's next WQE <─┘
//! ```
//!
//! The WQEs of a plain queue are issued back to back: each is a *flight* until it takes effect.

use std::fmt::Write as _;

use rnic::engine::{Next, NextKind, StepOutcome};
use rnic::port::inline::InlineNic;
use verbs::{Cqn, Qpn};

use crate::ids::NodeId;
use crate::net::TRIES;
use crate::qp::{Flight, Observed, QpState};
use crate::replies::{Reply, Stage};
use crate::state::{Event, NUMBER, State};
use crate::time::Time;
use crate::timing::payload;

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
        qp.end_era();
        *qp = QpState { node, send_cq, managed, era: qp.era, ..QpState::default() };
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
            self.plan(nic, qpn, from);
        }
        self.ready = ready;
    }

    /// Plans the next WQE of a QP, which may start at `from` or later, unless it is planned.
    fn plan(&mut self, nic: &InlineNic, qpn: Qpn, from: Time) {
        if self.qp(qpn).planned {
            return;
        }
        let position = nic.with_engine(|e| e.position(qpn));
        let qp = self.qp(qpn);
        if qp.flights.front().is_some_and(|flight| Some(flight.next.at) != position) {
            // The QP has been reset.
            qp.end_era();
        }
        // A managed WQE is fetched when the one before has taken effect.
        let behind = qp.flights.back().map(|flight| flight.next.after);
        if qp.managed && behind.is_some() {
            return;
        }
        let (free, era) = (qp.free, qp.era);
        let Some(next) = nic.with_engine(|e| e.peek_at(qpn, behind)) else { return };
        let start = from.max(free);
        let planned = match next.kind {
            // They take effect behind all flights. The last flight plans them.
            NextKind::Flush | NextKind::Wait { .. } if behind.is_some() => false,
            NextKind::Flush | NextKind::Wait { reached: false, .. } => {
                self.arrives(qpn, next, start);
                false
            }
            NextKind::Wait { cqn, index, reached: true } => match self.known(cqn, index) {
                Some(known) => {
                    let at = start.max(known) + self.params.nic.wait;
                    self.arrives(qpn, next, at);
                    false
                }
                None => {
                    self.cq(cqn).waits.push((qpn, era));
                    true
                }
            },
            _ => {
                // A queue that is busy needs no doorbell to continue.
                let rings = !next.managed && start > free;
                let doorbell = if rings { self.params.pcie.doorbell } else { Time::ZERO };
                self.push((start + doorbell).max(self.now), Event::Issue(qpn, era));
                true
            }
        };
        self.qp(qpn).planned = planned;
    }

    /// Plans the next WQE of a QP that has waited for an event of this era, from `from` on.
    pub fn plan_again(&mut self, nic: &InlineNic, qpn: Qpn, era: u32, from: Time) {
        let qp = self.qp(qpn);
        if qp.era == era {
            qp.planned = false;
            self.plan(nic, qpn, from);
        }
    }

    /// Plans the QPs whose WAIT is for completions of a CQ: more times are final now.
    pub fn plan_waits(&mut self, nic: &InlineNic, cqn: Cqn) {
        for (qpn, era) in std::mem::take(&mut self.cq(cqn).waits) {
            self.plan_again(nic, qpn, era, self.now);
        }
    }

    /// Lets a unit take up the next WQE of a QP.
    pub fn issue(&mut self, nic: &InlineNic, qpn: Qpn, era: u32) {
        let (now, params) = (self.now, self.params.clone());
        let qp = self.qp(qpn);
        if qp.era != era {
            return;
        }
        qp.planned = false;
        let behind = qp.flights.back().map(|flight| flight.next.after);
        let Some(next) = nic.with_engine(|e| e.peek_at(qpn, behind)) else { return };
        if matches!(next.kind, NextKind::Flush | NextKind::Wait { .. }) {
            // The QP broke, or the WQE was overwritten.
            return self.plan(nic, qpn, now);
        }
        let node = self.qp(qpn).node;
        let issued = self.nodes[node.0 as usize].issue(&params, &next, now);
        let crosses = self.crosses(node, &next);
        let (bytes, inline) = payload(&next.kind);
        let fetches = crosses && bytes > 0 && !inline;
        if fetches {
            self.push(issued + params.pcie.read, Event::Fetch(qpn, era));
        }
        let qp = self.qp(qpn);
        qp.free = issued;
        if !crosses && qp.landed == qp.flights.len() {
            // No link and no earlier flight to wait for.
            self.arrives(qpn, next, issued);
        } else {
            let ready = (!fetches).then_some((issued, issued));
            qp.flights.push_back(Flight { next, ready, lost: false });
            self.enter_next(qpn);
        }
        self.plan(nic, qpn, issued);
    }

    /// Returns whether a WQE is a request to another node.
    fn crosses(&self, node: NodeId, next: &Next) -> bool {
        let moves = matches!(
            next.kind,
            NextKind::Send { .. }
                | NextKind::Write { .. }
                | NextKind::Read { .. }
                | NextKind::Atomic
        );
        moves && next.peer != Qpn::NONE && self.node_of(next.peer) != node
    }

    /// Lets the payload of a QP's first flight without data come from memory.
    pub fn fetch(&mut self, qpn: Qpn, era: u32) {
        let (now, qp) = (self.now, self.qp(qpn));
        if qp.era != era {
            return;
        }
        let (node, at) = (qp.node, qp.flights.iter().position(|flight| flight.ready.is_none()));
        let Some(at) = at else { return };
        let (bytes, _) = payload(&qp.flights[at].next.kind);
        let ready = self.nodes[node.0 as usize].fetch(now, bytes);
        self.qp(qpn).flights[at].ready = Some(ready);
        self.enter_next(qpn);
    }

    /// Plans the entry into the link of a QP's first flight that has not left, if its data is
    /// there.
    fn enter_next(&mut self, qpn: Qpn) {
        let (now, qp) = (self.now, self.qp(qpn));
        let ready = qp.flights.get(qp.sent).and_then(|flight| flight.ready);
        if let Some((from, _)) = ready.filter(|_| !qp.enters) {
            qp.enters = true;
            let era = qp.era;
            self.push(from.max(now), Event::Enter(qpn, era));
        }
    }

    /// Lets a QP's first flight that has not left enter the link, if it is for another node.
    pub fn enter(&mut self, qpn: Qpn, era: u32) {
        let (now, qp) = (self.now, self.qp(qpn));
        if qp.era != era {
            return;
        }
        qp.enters = false;
        let (node, at) = (qp.node, qp.sent);
        let Some(&Flight { next, ready: Some((_, ready)), .. }) = qp.flights.get(at) else {
            return;
        };
        qp.sent += 1;
        let (mut first, mut last) = (now, now);
        if self.crosses(node, &next) {
            let (bytes, _) = payload(&next.kind);
            (first, last) = self.nodes[node.0 as usize].send(now, ready, bytes);
            let way = match self.transit(node, self.node_of(next.peer), last) {
                Some(way) => way,
                None => {
                    self.qp(qpn).flights[at].lost = true;
                    Time(self.params.link.retry.0 * (TRIES as u64 + 1))
                }
            };
            (first, last) = (first + way, last + way);
        }
        let qp = self.qp(qpn);
        qp.flights[at].ready = Some((first, last));
        qp.arrival = first.max(qp.arrival);
        let arrival = qp.arrival;
        self.push(arrival, Event::Land(qpn, era));
        self.enter_next(qpn);
    }

    /// Lets a QP's first flight that has not arrived pass the responder's link.
    pub fn land(&mut self, qpn: Qpn, era: u32) {
        let (now, qp) = (self.now, self.qp(qpn));
        if qp.era != era {
            return;
        }
        let (node, at) = (qp.node, qp.landed);
        let Some(&Flight { next, ready: Some((_, last)), lost }) = qp.flights.get(at) else {
            return;
        };
        qp.landed += 1;
        let whole = match self.crosses(node, &next) && !lost {
            true => {
                let ((bytes, _), far) = (payload(&next.kind), self.node_of(next.peer));
                self.nodes[far.0 as usize].land(now, last, bytes)
            }
            false => last,
        };
        self.step_at(qpn, whole);
    }

    /// Adds a flight that takes effect at `at`, without a unit and a link.
    fn arrives(&mut self, qpn: Qpn, next: Next, at: Time) {
        let qp = self.qp(qpn);
        qp.flights.push_back(Flight { next, ready: Some((at, at)), lost: false });
        (qp.sent, qp.landed) = (qp.sent + 1, qp.landed + 1);
        self.step_at(qpn, at);
    }

    /// Plans the effect of the flight that has arrived last, at `at` and behind the one before.
    fn step_at(&mut self, qpn: Qpn, at: Time) {
        let (now, qp) = (self.now, self.qp(qpn));
        qp.effect = at.max(qp.effect).max(now);
        let (at, era) = (qp.effect, qp.era);
        self.push(at, Event::Step(qpn, era));
    }

    /// Returns the time of a request that leaves at `left` from link to link; none if it is lost.
    fn transit(&mut self, from: NodeId, to: NodeId, left: Time) -> Option<Time> {
        let late = self.net.delay(from, to, left, self.is_memory_node(from));
        if late != Some(Time::ZERO) {
            self.counters.delayed += 1;
        }
        Some(self.params.link.latency + late?)
    }

    /// Executes the first flight of a QP.
    pub fn step(&mut self, nic: &InlineNic, qpn: Qpn, era: u32) {
        let (now, params) = (self.now, self.params.clone());
        let qp = self.qp(qpn);
        if qp.era != era {
            return;
        }
        let (node, send_cq) = (qp.node, qp.send_cq);
        let Some(Flight { next, mut lost, .. }) = qp.flights.pop_front() else { return };
        (qp.sent, qp.landed) = (qp.sent - 1, qp.landed - 1);
        if nic.with_engine(|e| e.position(qpn)) != Some(next.at) {
            // The QP has been destroyed or reset.
            self.qp(qpn).end_era();
            return self.plan(nic, qpn, now);
        }
        if let NextKind::Wait { reached: false, .. } = next.kind {
            let again = nic.with_engine(|e| e.peek(qpn));
            if matches!(again, Some(Next { kind: NextKind::Wait { reached: true, .. }, .. })) {
                // The completion has been counted meanwhile, but the NIC may not know it yet.
                return self.plan(nic, qpn, now);
            }
        }
        let far = self.node_of(next.peer);
        let mut completed = std::mem::take(&mut self.completed);
        // The target word of an atomic determines the lock for which it waits.
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
        let crosses = self.crosses(node, &next);
        let mut back = match crosses && !lost && !self.is_memory_node(node) {
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
        let arrived = !lost && stepped != StepOutcome::NotReady;
        let mut received = now;
        let mut answer = None;
        if arrived && crosses {
            let responder = &mut self.nodes[far.0 as usize];
            let at = responder.receive(&params, &next, now);
            let (stage, begin) = match next.kind {
                NextKind::Read { .. } => (Stage::Memory, at + params.pcie.read),
                NextKind::Atomic => (Stage::Atomics(addr), at),
                _ => (Stage::Back(at), at),
            };
            received = match stage {
                Stage::Back(_) => responder.store(&next, at),
                _ => at,
            };
            // A lost answer is sent again; the request has been executed once.
            let mut late = back.unwrap_or(Time(params.link.retry.0 * (TRIES as u64 + 1)));
            self.counters.delayed += (late != Time::ZERO) as u64;
            if stepped == StepOutcome::Failed {
                // The requester's NIC reports the refusal of the responder after a while.
                late += params.nic.fault_report;
            }
            let (stage, begin) = match stage {
                Stage::Back(at) => {
                    let back = at + params.link.latency + late;
                    (Stage::Back(back), back)
                }
                _ => (stage, begin),
            };
            // A managed queue goes on when a request that needs data has taken effect.
            let waits = next.managed && !matches!(stage, Stage::Back(_));
            let continues =
                (waits && stepped == StepOutcome::Done).then_some((qpn, self.qp(qpn).era));
            let kind = next.kind;
            let reply = Reply { stage, kind, from: far, to: node, late, counts: None, continues };
            answer = Some((reply, begin));
        } else if arrived && next.peer != Qpn::NONE {
            received = self.nodes[node.0 as usize].loopback(&params, &next, addr, now);
        }
        for (cqn, count) in completed.drain(..) {
            let count = count & NUMBER;
            match &mut answer {
                Some((reply, _)) if cqn == send_cq => {
                    reply.counts = Some(self.count_pending(cqn, count));
                }
                _ => {
                    self.count(cqn, count, received);
                    self.plan_waits(nic, cqn);
                }
            }
        }
        self.completed = completed;
        let continues = answer.is_some_and(|(reply, _)| reply.continues.is_some());
        if let Some((reply, begin)) = answer {
            self.answer(reply, begin);
        }
        match stepped {
            StepOutcome::Done | StepOutcome::Failed => {
                self.counters.verbs += 1;
                self.counters.timeouts += (lost || back.is_none()) as u64;
                if stepped == StepOutcome::Failed {
                    // The WQEs behind it are flushed.
                    self.qp(qpn).end_era();
                }
                // A managed queue continues after the work has taken effect. Any other queue has
                // continued already, but for WQEs that take effect behind all flights.
                let qp = self.qp(qpn);
                let from = if next.managed { received } else { qp.free };
                match continues {
                    true => qp.planned = true,
                    false if qp.flights.is_empty() => self.plan(nic, qpn, from),
                    false => {}
                }
            }
            StepOutcome::NotReady => {
                // Retry after the RNR timer of the peer: the shortest possible. The requests behind
                // it are sent again too.
                let qp = self.qp(qpn);
                qp.end_era();
                qp.free = now + Time::us(10);
            }
            StepOutcome::Waits | StepOutcome::Nothing => {}
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
