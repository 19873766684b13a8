//! What the world knows: which events come, who waits, and what can be seen of completions.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::task::Waker;

use rnic::ids::{Cqn, Qpn};

use crate::fiber::FiberId;
use crate::net::Net;
use crate::params::Params;
use crate::queues::{Observed, QpState};
use crate::random::Random;
use crate::time::Time;
use crate::timing::NicTiming;

/// A node of the simulated cluster.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub u16);

/// What may happen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
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
pub(crate) struct Entry {
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

impl Default for NodeId {
    fn default() -> Self {
        NodeId(u16::MAX)
    }
}

/// Completions of a CQ that were counted, and when they are seen.
#[derive(Default)]
pub(crate) struct CqState {
    /// Count after the completion; when the NIC knows it; when the CPU can see it.
    log: VecDeque<(u32, Time, Time)>,
    /// Count of the completions that can be seen.
    seen: u32,
    pub wakers: Vec<Waker>,
    /// A `Seen` stands in the queue of events for this moment.
    pub told: Option<Time>,
}

#[derive(Default)]
pub(crate) struct FiberState {
    /// A `Run` stands in the queue of events.
    pub scheduled: bool,
    pub waits: bool,
    /// Woken while it did not wait.
    pub notified: bool,
    pub ended: bool,
    /// When it is to be woken at the latest.
    pub deadline: Option<Time>,
    /// When its earliest `Timer` comes.
    pub timer: Option<Time>,
}

pub(crate) struct State {
    pub now: Time,
    pub number: u64,
    pub queue: BinaryHeap<Reverse<Entry>>,
    pub chance: Option<Random>,
    pub params: Arc<Params>,
    pub qps: Vec<QpState>,
    pub cqs: Vec<CqState>,
    pub nodes: Vec<NicTiming>,
    compute_nodes: u16,
    pub fibers: Vec<FiberState>,
    /// Fibers that run next, at this moment, unless the world is shuffled.
    pub next: VecDeque<FiberId>,
    pub net: Net,
    pub counters: Counters,
    pub ready: Vec<Qpn>,
    pub completed: Vec<(Cqn, u32)>,
    pub trace: Option<String>,
    pub watched: bool,
    pub observed: Option<Observed>,
}

/// Bit 23 of a difference of two running numbers of completions says that it is negative.
const HALF: u32 = 0x80_0000;
pub(crate) const NUMBER: u32 = 0xff_ffff;

/// Whether the running number `count` is `other` or later.
fn reaches(count: u32, other: u32) -> bool {
    count.wrapping_sub(other) & HALF == 0
}

impl State {
    pub fn new(
        params: &Arc<Params>,
        compute_nodes: u16,
        memory_nodes: u16,
        seed: u64,
        shuffled: bool,
    ) -> Self {
        Self {
            compute_nodes,
            now: Time::ZERO,
            number: 0,
            queue: BinaryHeap::new(),
            chance: shuffled.then(|| Random::new(seed, 0)),
            qps: Vec::new(),
            cqs: Vec::new(),
            nodes: (0..compute_nodes + memory_nodes).map(|_| NicTiming::new(params)).collect(),
            fibers: Vec::new(),
            next: VecDeque::new(),
            net: Net::new(seed, params.link.retry),
            params: params.clone(),
            counters: Counters::default(),
            ready: Vec::new(),
            completed: Vec::new(),
            trace: None,
            watched: false,
            observed: None,
        }
    }

    /// True for the first node, and those behind the compute nodes.
    pub fn is_memory_node(&self, node: NodeId) -> bool {
        let NodeId(at) = node;
        at == 0 || at > self.compute_nodes && usize::from(at) < self.nodes.len()
    }

    pub fn push(&mut self, at: Time, event: Event) {
        self.number += 1;
        let chance = self.chance.as_mut().map_or(0, |c| c.bits() as u32);
        self.queue.push(Reverse(Entry { at, chance, number: self.number, event }));
    }

    /// When the next event is.
    pub fn next_at(&self) -> Option<Time> {
        match self.next.is_empty() {
            true => self.queue.peek().map(|e| e.0.at),
            false => Some(self.now),
        }
    }

    pub fn pop(&mut self) -> Option<Event> {
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

    /// A new fiber runs from now on.
    pub fn add_fiber(&mut self, id: FiberId) {
        debug_assert_eq!(id.0 as usize, self.fibers.len());
        self.fibers.push(FiberState { waits: true, ..FiberState::default() });
        self.wake(id);
    }

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

    pub fn timer(&mut self, id: FiberId) {
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

    pub fn cq(&mut self, cqn: Cqn) -> &mut CqState {
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

    /// Whether a completion from the running number `next` on can be seen. Who takes a QP through Reset
    /// takes in what completed before: he may be ahead of what can be seen.
    pub fn is_seen(&mut self, cqn: Cqn, next: u32) -> bool {
        let seen = self.seen(cqn);
        seen != next && reaches(seen, next)
    }

    /// Calls `waker` when a completion from the running number `next` on can be seen.
    pub fn leave_waker(&mut self, cqn: Cqn, next: u32, waker: &Waker) {
        let now = self.now;
        let is_seen = self.is_seen(cqn, next);
        let cq = self.cq(cqn);
        if !cq.wakers.iter().any(|w| w.will_wake(waker)) {
            cq.wakers.push(waker.clone());
        }
        let at = match is_seen {
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
    pub fn count(&mut self, cqn: Cqn, count: u32, known: Time, seen: Time) {
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
    pub fn known(&mut self, cqn: Cqn, index: u32) -> Time {
        let cq = self.cq(cqn);
        let entry = cq.log.iter().find(|(count, ..)| reaches(count.wrapping_sub(1), index));
        entry.map_or(Time::ZERO, |(_, known, _)| *known)
    }
}

impl CqState {
    /// Forgets the completions that everybody can see at `now`.
    pub fn advance(&mut self, now: Time) {
        while let Some((count, _, seen)) = self.log.front()
            && *seen <= now
        {
            self.seen = *count;
            self.log.pop_front();
        }
    }
}
