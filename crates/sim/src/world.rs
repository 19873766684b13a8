//! The simulated world: events in the order of time, the NIC's queues, and the fibers.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::fmt::Write as _;
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};

use corosensei::stack::DefaultStack;
use parking_lot::Mutex;
use rnic::engine::{Next, NextKind, Stepped};
use rnic::ids::{Cqn, Qpn};
use rnic::memory::DmaMemory;
use rnic::port::inline::InlineNic;
use rnic::verbs::Limits;

use crate::Error;
use crate::fiber::{self, Fiber, FiberId, Stand};
use crate::net::{Faults, Net, TRIES};
use crate::params::Params;
use crate::random::Random;
use crate::time::Time;
use crate::timing::NicTiming;

/// A node of the simulated cluster.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub u16);

/// What may happen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Event {
    /// A fiber goes on.
    Run(FiberId),
    /// A fiber's time-out.
    Timer(FiberId),
    /// What a QP does next takes effect.
    Step(Qpn),
    /// Completions of a CQ can be seen by who waits.
    Seen(Cqn),
}

/// An event with its place in the order: by time, then by chance if the world is shuffled, then as they
/// came about.
#[derive(PartialEq, Eq)]
struct Entry {
    at: Time,
    chance: u32,
    number: u64,
    event: Event,
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.chance, self.number).cmp(&(other.at, other.chance, other.number))
    }
}

/// What has happened, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Events.
    pub events: u64,
    /// WQEs, or slices of them, that were executed.
    pub verbs: u64,
    /// Packets that were lost or late.
    pub delayed: u64,
    /// QPs that broke because the peer did not answer.
    pub timeouts: u64,
}

#[derive(Default)]
struct QpState {
    node: NodeId,
    send_cq: Cqn,
    /// A step of it stands in the queue of events.
    held: bool,
    /// The NIC has told of it: more work than that of the step that it is held for.
    next: Option<Next>,
    /// When the WQE after the last may be taken up.
    free: Time,
    /// When the last request arrived: the next one does not arrive before.
    arrival: Time,
    managed: bool,
    /// It is told of as one that carries a chain.
    chained: bool,
    lost: bool,
}

impl Default for NodeId {
    fn default() -> Self {
        NodeId(u16::MAX)
    }
}

/// Completions of a CQ that were counted, and when they are seen.
#[derive(Default)]
struct CqState {
    /// Count after the completion; when the NIC knows it; when the CPU can see it.
    log: VecDeque<(u32, Time, Time)>,
    /// Count of the completions that can be seen.
    seen: u32,
    wakers: Vec<Waker>,
    /// A `Seen` stands in the queue of events for this moment.
    told: Option<Time>,
}

#[derive(Default)]
struct FiberState {
    /// A `Run` stands in the queue of events.
    scheduled: bool,
    waits: bool,
    /// Woken while it did not wait.
    notified: bool,
    ended: bool,
    /// When it is to be woken at the latest.
    deadline: Option<Time>,
    /// When its earliest `Timer` comes.
    timer: Option<Time>,
}

pub(crate) struct State {
    pub now: Time,
    number: u64,
    queue: BinaryHeap<Reverse<Entry>>,
    chance: Option<Random>,
    pub params: Arc<Params>,
    qps: Vec<QpState>,
    cqs: Vec<CqState>,
    nodes: Vec<NicTiming>,
    fibers: Vec<FiberState>,
    /// Fibers that run next, at this moment, unless the world is shuffled.
    next: VecDeque<FiberId>,
    net: Net,
    pub counters: Counters,
    ready: Vec<Qpn>,
    completed: Vec<(Cqn, u32)>,
    trace: Option<String>,
}

/// What hooks and fibers share with the world.
pub(crate) struct Shared {
    pub nic: Arc<InlineNic>,
    pub state: Mutex<State>,
}

/// The world. It runs on the thread that made it.
pub struct Sim {
    shared: Arc<Shared>,
    fibers: Vec<Option<Fiber>>,
    stacks: Vec<DefaultStack>,
}

struct FiberWaker {
    shared: Weak<Shared>,
    id: FiberId,
}

impl Wake for FiberWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(shared) = self.shared.upgrade() {
            shared.state.lock().wake(self.id);
        }
    }
}

/// Bit 23 of a difference of two running numbers of completions says that it is negative.
const HALF: u32 = 0x80_0000;
const NUMBER: u32 = 0xff_ffff;

/// Whether the running number `count` is `other` or later.
fn reaches(count: u32, other: u32) -> bool {
    count.wrapping_sub(other) & HALF == 0
}

impl Sim {
    /// A world with `nodes` nodes. `shuffled`: what happens at the same moment happens in an order that
    /// the seed decides.
    pub fn new(params: &Arc<Params>, nodes: u16, seed: u64, shuffled: bool) -> Self {
        let limits = Limits { slice_bytes: 1 << 30, ..Limits::default() };
        let memory = Box::new(|bytes| DmaMemory::anonymous(bytes).expect("memory for the NIC"));
        let state = State {
            now: Time::ZERO,
            number: 0,
            queue: BinaryHeap::new(),
            chance: shuffled.then(|| Random::new(seed, 0)),
            qps: Vec::new(),
            cqs: Vec::new(),
            nodes: (0..nodes).map(|_| NicTiming::new(params)).collect(),
            fibers: Vec::new(),
            next: VecDeque::new(),
            net: Net::new(seed, params.link.retry),
            params: params.clone(),
            counters: Counters::default(),
            ready: Vec::new(),
            completed: Vec::new(),
            trace: None,
        };
        let shared = Shared { nic: InlineNic::stepped(limits, memory), state: Mutex::new(state) };
        Self { shared: Arc::new(shared), fibers: Vec::new(), stacks: Vec::new() }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The time.
    pub fn now(&self) -> Time {
        self.shared.state.lock().now
    }

    /// What has happened.
    pub fn counters(&self) -> Counters {
        self.shared.state.lock().counters
    }

    /// Time that a node's NIC's units worked, and bytes that it sent.
    pub fn nic_used(&self, node: NodeId) -> (Time, u64) {
        self.shared.state.lock().nodes[node.0 as usize].used()
    }

    /// Makes the network as bad as that from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.shared.state.lock().net.set(faults);
    }

    /// Writes down what happens from now on.
    pub fn start_trace(&self) {
        self.shared.state.lock().trace = Some(String::new());
    }

    /// What was written down.
    pub fn take_trace(&self) -> String {
        self.shared.state.lock().trace.replace(String::new()).unwrap_or_default()
    }

    /// Adds a line to the trace, if one is written.
    pub fn note(&self, line: impl FnOnce() -> String) {
        self.shared.note(line);
    }

    /// Starts `program` on a core of its own. What it spends passes when that is more than
    /// `patience`: 0 lets others run between any two verbs.
    pub fn spawn(
        &mut self,
        name: impl Into<String>,
        patience: Time,
        program: impl FnOnce() + 'static,
    ) -> FiberId {
        let id = FiberId(self.fibers.len() as u32);
        let waker = self.shared.waker(id);
        let fiber = Fiber::new(id, name.into(), patience, waker, self.stacks.pop(), program);
        self.fibers.push(Some(fiber));
        let mut state = self.shared.state.lock();
        state.fibers.push(FiberState { waits: true, ..FiberState::default() });
        state.wake(id);
        id
    }

    /// Wakes a fiber that waits.
    pub fn wake(&self, id: FiberId) {
        self.shared.state.lock().wake(id);
    }

    /// True if a fiber's program has ended.
    pub fn has_ended(&self, id: FiberId) -> bool {
        self.fibers[id.0 as usize].is_none()
    }

    /// Holds a fiber for `time` from where it stands, whatever wakes it.
    pub fn stall(&self, id: FiberId, time: Time) {
        let mut state = self.shared.state.lock();
        let until = state.now + time;
        let fiber = &mut state.fibers[id.0 as usize];
        if !fiber.scheduled && !fiber.ended {
            (fiber.scheduled, fiber.waits) = (true, false);
            state.push(until, Event::Run(id));
        }
    }

    /// Ends a fiber where it stands: what it holds is dropped.
    pub fn kill(&mut self, id: FiberId) {
        self.shared.state.lock().fibers[id.0 as usize].ended = true;
        if let Some(fiber) = self.fibers[id.0 as usize].take() {
            self.stacks.push(fiber.end());
        }
    }

    /// Lets the next event happen. False if there is none.
    pub fn step(&mut self) -> bool {
        let event = {
            let mut state = self.shared.state.lock();
            let Some(event) = state.pop() else { return false };
            event
        };
        match event {
            Event::Run(id) => self.run_fiber(id),
            other => self.shared.happen(other),
        }
        true
    }

    fn run_fiber(&mut self, id: FiberId) {
        self.shared.state.lock().fibers[id.0 as usize].scheduled = false;
        let Some(fiber) = &mut self.fibers[id.0 as usize] else { return };
        let stand = fiber.resume();
        let mut state = self.shared.state.lock();
        let now = state.now;
        let of = &mut state.fibers[id.0 as usize];
        match stand {
            None => {
                of.ended = true;
                drop(state);
                self.stacks.extend(self.fibers[id.0 as usize].take().map(Fiber::end));
            }
            Some(Stand::For(time)) => {
                of.scheduled = true;
                state.push(now + time, Event::Run(id));
            }
            Some(Stand::Waits) => {
                of.waits = true;
                if std::mem::take(&mut of.notified) {
                    state.wake(id);
                }
            }
        }
    }

    /// Runs until `done`, which is asked after every event; an error if nothing can happen any more
    /// before that.
    pub fn run_until(&mut self, mut done: impl FnMut(&Sim) -> bool) -> Result<(), Error> {
        while !done(self) {
            if !self.step() {
                return Err(self.stuck());
            }
        }
        Ok(())
    }

    /// Runs until these fibers have ended.
    pub fn run_to_end(&mut self, fibers: &[FiberId]) -> Result<(), Error> {
        let mut left = fibers.len();
        while left > 0 {
            if self.fibers[fibers[left - 1].0 as usize].is_none() {
                left -= 1;
            } else if !self.step() {
                return Err(self.stuck());
            }
        }
        Ok(())
    }

    /// Runs until the time is `until`, or nothing can happen any more.
    pub fn run_for(&mut self, time: Time) {
        let until = self.now() + time;
        loop {
            let next = self.shared.state.lock().next_at();
            if next.is_none_or(|at| at > until) {
                break;
            }
            self.step();
        }
        let mut state = self.shared.state.lock();
        state.now = state.now.max(until);
    }

    fn stuck(&self) -> Error {
        let waits: Vec<&str> = self.fibers.iter().flatten().map(|f| f.name.as_str()).collect();
        Error::Stuck { at: self.now(), waits: waits.len(), who: waits.join(", ") }
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        for fiber in self.fibers.iter_mut().filter_map(Option::take) {
            fiber.end();
        }
    }
}

impl Shared {
    /// A waker for a fiber.
    pub fn waker(self: &Arc<Self>, id: FiberId) -> Waker {
        Waker::from(Arc::new(FiberWaker { shared: Arc::downgrade(self), id }))
    }

    /// Adds a line to the trace.
    pub fn note(&self, line: impl FnOnce() -> String) {
        let mut state = self.state.lock();
        let now = state.now;
        if let Some(trace) = &mut state.trace {
            let _ = writeln!(trace, "{now} {}", line());
        }
    }

    /// The NIC may have got work.
    pub fn look(&self) {
        let mut state = self.state.lock();
        // What the running fiber has done before has taken time that has not passed yet.
        let from = state.now + fiber::owed();
        state.collect(&self.nic, from);
    }

    /// Lets the NIC's next event happen, with nobody else about: for who makes a world ready.
    pub fn pump(&self) -> bool {
        let event = self.state.lock().pop();
        match event {
            None => false,
            Some(Event::Run(_)) => panic!("nobody runs before the world is ready"),
            Some(event) => {
                self.happen(event);
                true
            }
        }
    }

    fn happen(&self, event: Event) {
        let mut state = self.state.lock();
        match event {
            Event::Step(qpn) => state.step(&self.nic, qpn),
            Event::Timer(id) => state.timer(id),
            Event::Seen(cqn) => {
                let now = state.now;
                let cq = state.cq(cqn);
                cq.told = None;
                cq.advance(now);
                let wakers = std::mem::take(&mut cq.wakers);
                drop(state);
                wakers.into_iter().for_each(Waker::wake);
            }
            Event::Run(_) => unreachable!("the world runs fibers"),
        }
    }
}

impl State {
    fn push(&mut self, at: Time, event: Event) {
        self.number += 1;
        let chance = self.chance.as_mut().map_or(0, |c| c.bits() as u32);
        self.queue.push(Reverse(Entry { at, chance, number: self.number, event }));
    }

    /// When the next event is.
    fn next_at(&self) -> Option<Time> {
        match self.next.is_empty() {
            true => self.queue.peek().map(|e| e.0.at),
            false => Some(self.now),
        }
    }

    fn pop(&mut self) -> Option<Event> {
        if let Some(id) = self.next.pop_front() {
            self.counters.events += 1;
            return Some(Event::Run(id));
        }
        let Reverse(entry) = self.queue.pop()?;
        debug_assert!(entry.at >= self.now, "time goes on");
        self.now = entry.at;
        self.counters.events += 1;
        Some(entry.event)
    }

    // --- fibers --------------------------------------------------------------------------------

    /// Wakes a fiber.
    pub fn wake(&mut self, id: FiberId) {
        let now = self.now;
        let fiber = &mut self.fibers[id.0 as usize];
        if fiber.ended {
            return;
        }
        if !fiber.waits {
            fiber.notified = true;
        } else if !fiber.scheduled {
            (fiber.scheduled, fiber.waits, fiber.deadline) = (true, false, None);
            match self.chance {
                Some(_) => self.push(now, Event::Run(id)),
                None => self.next.push_back(id),
            }
        }
    }

    /// Wakes a fiber at `deadline` if nobody has before.
    pub fn set_deadline(&mut self, id: FiberId, deadline: Time) {
        let fiber = &mut self.fibers[id.0 as usize];
        fiber.deadline = Some(deadline);
        // One timer at a time: a later one is set when it comes.
        if fiber.timer.is_none_or(|t| t > deadline) {
            fiber.timer = Some(deadline);
            self.push(deadline, Event::Timer(id));
        }
    }

    fn timer(&mut self, id: FiberId) {
        let now = self.now;
        let fiber = &mut self.fibers[id.0 as usize];
        if fiber.timer != Some(now) {
            return;
        }
        fiber.timer = None;
        match fiber.deadline {
            Some(deadline) if deadline <= now => self.wake(id),
            Some(deadline) => self.set_deadline(id, deadline),
            None => {}
        }
    }

    // --- completions ---------------------------------------------------------------------------

    fn cq(&mut self, cqn: Cqn) -> &mut CqState {
        let at = cqn.raw() as usize;
        if at >= self.cqs.len() {
            self.cqs.resize_with(at + 1, CqState::default);
        }
        &mut self.cqs[at]
    }

    /// A CQ was made; another one may have had its number.
    pub fn made_cq(&mut self, cqn: Cqn) {
        *self.cq(cqn) = CqState::default();
    }

    /// Count of a CQ's completions that can be seen now.
    pub fn seen(&mut self, cqn: Cqn) -> u32 {
        let now = self.now;
        let cq = self.cq(cqn);
        cq.advance(now);
        cq.seen
    }

    /// Calls `waker` when a completion from the running number `next` on can be seen.
    pub fn leave_waker(&mut self, cqn: Cqn, next: u32, waker: &Waker) {
        let now = self.now;
        let cq = self.cq(cqn);
        cq.advance(now);
        if !cq.wakers.iter().any(|w| w.will_wake(waker)) {
            cq.wakers.push(waker.clone());
        }
        let at = match cq.seen != next {
            true => Some(now),
            false => cq.log.front().map(|(_, _, seen)| *seen),
        };
        if let Some(at) = at {
            self.tell_seen(cqn, at);
        }
    }

    fn tell_seen(&mut self, cqn: Cqn, at: Time) {
        let cq = self.cq(cqn);
        if !cq.wakers.is_empty() && cq.told.is_none_or(|told| told > at) {
            cq.told = Some(at);
            self.push(at, Event::Seen(cqn));
        }
    }

    /// A CQ has counted up to `count`: the NIC knows at `known`, the CPU at `seen`.
    fn count(&mut self, cqn: Cqn, count: u32, known: Time, seen: Time) {
        let now = self.now;
        let cq = self.cq(cqn);
        cq.advance(now);
        // Completions are seen in their order.
        let (known, seen) = match cq.log.back() {
            Some((_, k, s)) => (known.max(*k), seen.max(*s)),
            None => (known, seen),
        };
        cq.log.push_back((count, known, seen));
        self.tell_seen(cqn, seen);
    }

    /// When the NIC knows that completion number `index` has been counted.
    fn known(&mut self, cqn: Cqn, index: u32) -> Time {
        let cq = self.cq(cqn);
        let entry = cq.log.iter().find(|(count, ..)| reaches(count.wrapping_sub(1), index));
        entry.map_or(Time::ZERO, |(_, known, _)| *known)
    }

    // --- queue pairs ---------------------------------------------------------------------------

    fn qp(&mut self, qpn: Qpn) -> &mut QpState {
        let at = qpn.raw() as usize;
        if at >= self.qps.len() {
            self.qps.resize_with(at + 1, QpState::default);
        }
        &mut self.qps[at]
    }

    /// A QP was made on a node.
    pub fn made_qp(&mut self, qpn: Qpn, node: NodeId, send_cq: Cqn, managed: bool) {
        let qp = self.qp(qpn);
        if std::mem::take(&mut qp.chained) {
            let old = qp.node;
            self.nodes[old.0 as usize].chain_qps -= 1;
        }
        let qp = self.qp(qpn);
        // A step that its predecessor is held for finds nothing to do.
        *qp = QpState { node, send_cq, managed, held: qp.held, ..QpState::default() };
    }

    /// A QP is connected.
    pub fn connects(&mut self, qpn: Qpn, peer: Qpn) {
        let far = self.qp(peer).node;
        let qp = self.qp(qpn);
        let node = qp.node;
        if qp.managed && !qp.chained && far != node {
            qp.chained = true;
            self.nodes[node.0 as usize].chain_qps += 1;
        }
    }

    /// Takes up what has become ready, from `from` on.
    fn collect(&mut self, nic: &InlineNic, from: Time) {
        let mut ready = std::mem::take(&mut self.ready);
        nic.with_engine(|e| e.take_ready(&mut ready));
        for qpn in ready.drain(..) {
            if !self.qp(qpn).held {
                self.plan(nic, qpn, from);
            }
        }
        self.ready = ready;
    }

    /// Sets when the next work of a QP takes effect, which may be taken up from `from` on.
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
                // A queue that is at work needs no doorbell to go on.
                let start = if start > free { start + doorbell } else { start };
                let issued = nic.issue(&params, &next, start);
                self.qp(qpn).free = issued;
                let local = matches!(
                    kind,
                    NextKind::Nop | NextKind::Window | NextKind::Invalidate | NextKind::Enable
                );
                let far = self.qp(next.peer).node;
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
        let late = self.net.delay(from, to, left);
        if late != Some(Time::ZERO) {
            self.counters.delayed += 1;
        }
        Some(left + self.params.link.latency + late?)
    }

    /// What a QP does next takes effect.
    fn step(&mut self, nic: &InlineNic, qpn: Qpn) {
        let (now, params) = (self.now, self.params.clone());
        let qp = self.qp(qpn);
        let (node, send_cq) = (qp.node, qp.send_cq);
        let Some(next) = qp.next.take() else {
            qp.held = false;
            return;
        };
        let lost = std::mem::take(&mut qp.lost);
        let far = self.qp(next.peer).node;
        let moves = matches!(
            next.kind,
            NextKind::Send { .. }
                | NextKind::Write { .. }
                | NextKind::Read { .. }
                | NextKind::Atomic
        );
        let mut completed = std::mem::take(&mut self.completed);
        let stepped = nic.with_engine(|e| match lost {
            true => e.time_out(qpn, &mut completed),
            false => e.step_reported(qpn, now.as_ns(), &mut completed),
        });
        self.trace_step(qpn, &next, stepped);
        let moved = moves && next.peer != Qpn::NONE && !lost && stepped != Stepped::NotReady;
        let (received, answered) = if !moved {
            (now, now)
        } else if far == node {
            let service = self.nodes[node.0 as usize].loopback(&params, &next, now);
            (service.received, service.completed)
        } else {
            let (received, answer) = self.nodes[far.0 as usize].respond(&params, &next, now);
            // An answer that is lost is sent again; the request has been executed, once.
            let there = self
                .transit(far, node, answer)
                .unwrap_or(answer + Time(params.link.retry.0 * TRIES as u64));
            (received, self.nodes[node.0 as usize].answered(&next, there))
        };
        for (cqn, count) in completed.drain(..) {
            let known = if cqn == send_cq { answered } else { received };
            self.count(cqn, count & NUMBER, known, known + params.pcie.write);
        }
        self.completed = completed;
        match stepped {
            Stepped::Done | Stepped::Failed => {
                self.counters.verbs += 1;
                self.counters.timeouts += lost as u64;
                // A managed queue goes on when this has taken effect; another one has gone on already.
                let from = if next.managed { received } else { self.qp(qpn).free };
                self.plan(nic, qpn, from);
            }
            Stepped::NotReady => {
                // The peer says when it may be tried again: the shortest that there is.
                let qp = self.qp(qpn);
                qp.free = now + Time::us(10);
                qp.held = false;
            }
            Stepped::Waits | Stepped::Nothing => self.qp(qpn).held = false,
        }
        self.collect(nic, now);
    }

    fn trace_step(&mut self, qpn: Qpn, next: &Next, stepped: Stepped) {
        let (now, node) = (self.now, self.qp(qpn).node);
        if let Some(trace) = &mut self.trace {
            let _ = writeln!(
                trace,
                "{now} node {} QP {} -> {}: {:?} {:?}",
                node.0,
                qpn.raw(),
                next.peer.raw(),
                next.kind,
                stepped
            );
        }
    }
}

impl CqState {
    /// Forgets the completions that everybody can see at `now`.
    fn advance(&mut self, now: Time) {
        while let Some((count, _, seen)) = self.log.front()
            && *seen <= now
        {
            self.seen = *count;
            self.log.pop_front();
        }
    }
}
