//! State of the world: pending events, waiting fibers, and completions that are not visible yet.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::task::Waker;

use verbs::{Cqn, Qpn};

use crate::clock::Clock;
use crate::fiber::{self, FiberId};
use crate::ids::NodeId;
use crate::net::Net;
use crate::params::Params;
use crate::qp::{Observed, QpState};
use crate::random::Random;
use crate::replies::{Replies, ReplyId};
use crate::resource::Servers;
use crate::time::Time;
use crate::timing::NicTiming;

/// An event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    /// A fiber resumes.
    Run(FiberId),
    /// A fiber's deadline is reached.
    Timer(FiberId),
    /// A processing unit takes up the next WQE of a QP, in this era of the QP.
    Issue(Qpn, u32),
    /// The first byte of a payload that a QP sends could come from memory.
    Fetch(Qpn, u32),
    /// The first byte of a request of a QP is at the link.
    Enter(Qpn, u32),
    /// The first byte of a request of a QP is at the responder's link.
    Land(Qpn, u32),
    /// The first flight of a QP takes effect.
    Step(Qpn, u32),
    /// An answer goes on.
    Reply(ReplyId),
    /// Completions of a CQ become visible to the waiting fibers.
    Visible(Cqn),
}

/// An event with its sort key: time, then a random number if the world is shuffled, then the order
/// of creation.
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

/// Event counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Events executed.
    pub events: u64,
    /// WQEs, or slices of them, that were executed.
    pub verbs: u64,
    /// Packets that were lost or late.
    pub delayed: u64,
    /// QPs that broke because the peer did not answer.
    pub timeouts: u64,
}

/// Counted completions of a CQ, and the times at which they become visible.
#[derive(Default)]
pub(crate) struct CqState {
    log: VecDeque<Counted>,
    /// Number of entries that have left the log.
    gone: u64,
    /// Number of entries at the front of the log whose times are final.
    settled: usize,
    /// Count of the visible completions.
    visible: u32,
    pub wakers: Vec<Waker>,
    /// QPs, with their eras, whose WAIT is for a completion whose times are not final.
    pub waits: Vec<(Qpn, u32)>,
    /// Time of the pending `Visible` event.
    pub visible_at: Option<Time>,
}

/// Counted completions of one step of a QP.
struct Counted {
    /// The CQ's count after them.
    count: u32,
    /// When the NIC knows them, and when the CPU can see them; `NEVER` while the answer is under
    /// way.
    known: Time,
    visible: Time,
}

/// An entry of a CQ's log whose times are set later.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    cqn: Cqn,
    number: u64,
}

impl Pending {
    /// Returns the CQ.
    pub fn cqn(self) -> Cqn {
        self.cqn
    }
}

/// A stall that begins before or after a coming verb of a fiber.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VerbStall {
    /// Beginnings and ends of verbs that pass before: with 0 the next verb is posted only after the
    /// stall.
    pub passes: u32,
    /// Length of the stall.
    pub time: Time,
    /// Whether the clock of the node stands still meanwhile.
    pub stops_clock: bool,
}

#[derive(Default)]
pub(crate) struct FiberState {
    /// Whether a `Run` event is pending.
    pub scheduled: bool,
    pub waits: bool,
    /// Whether the fiber was woken while it did not wait.
    pub notified: bool,
    pub ended: bool,
    /// Time at which the fiber must be woken.
    pub deadline: Option<Time>,
    /// Time of the earliest pending `Timer` event.
    pub timer: Option<Time>,
    /// A stall at a verb.
    pub verb_stall: Option<VerbStall>,
}

pub(crate) struct State {
    pub now: Time,
    /// Time that the memory nodes' CPUs have spent on requests and verbs.
    pub node_cpu: Time,
    pub number: u64,
    pub queue: BinaryHeap<Reverse<Entry>>,
    pub chance: Option<Random>,
    pub params: Arc<Params>,
    pub qps: Vec<QpState>,
    pub cqs: Vec<CqState>,
    pub nodes: Vec<NicTiming>,
    /// The lock that the cores of each memory node share.
    pub core_locks: Vec<Servers>,
    /// The clock that the programs of each node read.
    pub clocks: Vec<Clock>,
    compute_nodes: u16,
    pub fibers: Vec<FiberState>,
    /// Fibers that run next, at the current time, unless the world is shuffled.
    pub next: VecDeque<FiberId>,
    pub net: Net,
    /// Failures of the memory nodes' window operations, if there are any.
    pub window_faults: Option<WindowFaults>,
    pub counters: Counters,
    pub replies: Replies,
    pub ready: Vec<Qpn>,
    pub completed: Vec<(Cqn, u32)>,
    pub trace: Option<String>,
    pub watched: bool,
    pub observed: Option<Observed>,
}

/// Failures of the memory nodes' window operations: one in a number of them, at random.
pub(crate) struct WindowFaults {
    pub random: Random,
    pub one_in: u64,
}

/// Sign bit of the difference of two sequence numbers of completions.
const HALF: u32 = 0x80_0000;
pub(crate) const NUMBER: u32 = 0xff_ffff;

/// Returns whether the sequence number `count` is `other` or later.
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
            node_cpu: Time::ZERO,
            number: 0,
            queue: BinaryHeap::new(),
            chance: shuffled.then(|| Random::new(seed, 0)),
            qps: Vec::new(),
            cqs: Vec::new(),
            nodes: (0..compute_nodes + memory_nodes).map(|_| NicTiming::new(params)).collect(),
            core_locks: vec![Servers::new(1); usize::from(compute_nodes + memory_nodes)],
            clocks: vec![Clock::default(); usize::from(compute_nodes + memory_nodes)],
            fibers: Vec::new(),
            next: VecDeque::new(),
            net: Net::new(seed, params.link.retry),
            window_faults: None,
            params: params.clone(),
            counters: Counters::default(),
            replies: Replies::default(),
            ready: Vec::new(),
            completed: Vec::new(),
            trace: None,
            watched: false,
            observed: None,
        }
    }

    /// Returns whether the next window operation of a node fails; if so, whether it takes effect
    /// nevertheless.
    pub fn window_fault(&mut self, node: NodeId) -> Option<bool> {
        if !self.is_memory_node(node) {
            return None;
        }
        let faults = self.window_faults.as_mut()?;
        let fails = faults.random.once_in(faults.one_in);
        fails.then(|| faults.random.below(2) == 0)
    }

    /// Returns whether a node is a memory node: the first node, or a node behind the compute nodes.
    pub fn is_memory_node(&self, node: NodeId) -> bool {
        let NodeId(at) = node;
        at == 0 || at > self.compute_nodes && usize::from(at) < self.nodes.len()
    }

    pub fn push(&mut self, at: Time, event: Event) {
        self.number += 1;
        let chance = self.chance.as_mut().map_or(0, |c| c.bits() as u32);
        self.queue.push(Reverse(Entry { at, chance, number: self.number, event }));
    }

    /// Returns the time of the next event.
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
        debug_assert!(entry.at >= self.now, "time never goes back");
        self.now = entry.at;
        self.counters.events += 1;
        Some(entry.event)
    }

    // --- fibers --------------------------------------------------------------------------------

    /// Adds a fiber, which runs from now on.
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

    /// Wakes a fiber at `deadline` unless it is woken before; now if `deadline` has passed.
    pub fn set_deadline(&mut self, id: FiberId, deadline: Time) {
        // A moment that a clock of a node gave may have passed: the fiber wakes now.
        let deadline = deadline.max(self.now);
        let fiber = &mut self.fibers[id.0 as usize];
        fiber.deadline = Some(deadline);
        // Only one timer is pending; when it fires, a later one is set.
        if fiber.timer.is_none_or(|t| t > deadline) {
            fiber.timer = Some(deadline);
            self.push(deadline, Event::Timer(id));
        }
    }

    /// Counts a beginning or an end of a verb of a fiber on a node, and returns the length of the
    /// stall that begins there.
    pub fn passes_verb(&mut self, id: FiberId, node: NodeId) -> Option<Time> {
        let stall = &mut self.fibers[id.0 as usize].verb_stall;
        let VerbStall { passes, time, stops_clock } = (*stall)?;
        if let Some(passes) = passes.checked_sub(1) {
            *stall = Some(VerbStall { passes, time, stops_clock });
            return None;
        }
        *stall = None;
        if stops_clock {
            self.clocks[node.0 as usize].stop(self.now + fiber::charged(), time);
        }
        Some(time)
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

    /// Resets the state of a CQ that was created; its number may be reused.
    pub fn made_cq(&mut self, cqn: Cqn) {
        let cq = self.cq(cqn);
        let (gone, waits) = (cq.gone + cq.log.len() as u64, std::mem::take(&mut cq.waits));
        *cq = CqState { gone, waits, ..CqState::default() };
    }

    /// Returns the count of a CQ's completions that are visible now.
    pub fn visible(&mut self, cqn: Cqn) -> u32 {
        let now = self.now;
        let cq = self.cq(cqn);
        cq.advance(now);
        cq.visible
    }

    /// Returns whether the completion with sequence number `next` is visible.
    ///
    /// Resetting a QP takes all earlier completions, so `next` may be ahead of the visible ones.
    pub fn is_visible(&mut self, cqn: Cqn, next: u32) -> bool {
        let visible = self.visible(cqn);
        visible != next && reaches(visible, next)
    }

    /// Calls `waker` when the completion with sequence number `next` becomes visible.
    pub fn leave_waker(&mut self, cqn: Cqn, next: u32, waker: &Waker) {
        let now = self.now;
        let is_visible = self.is_visible(cqn, next);
        let cq = self.cq(cqn);
        if !cq.wakers.iter().any(|w| w.will_wake(waker)) {
            cq.wakers.push(waker.clone());
        }
        let at = match is_visible {
            true => Some(now),
            false => cq.first_visible(),
        };
        if let Some(at) = at {
            self.schedule_visible(cqn, at);
        }
    }

    fn schedule_visible(&mut self, cqn: Cqn, at: Time) {
        let cq = self.cq(cqn);
        if !cq.wakers.is_empty() && cq.visible_at.is_none_or(|visible_at| visible_at > at) {
            cq.visible_at = Some(at);
            self.push(at, Event::Visible(cqn));
        }
    }

    /// Records that a CQ has counted up to `count`: the NIC knows at `known`, and the CPU sees it
    /// when the completion has been written.
    pub fn count(&mut self, cqn: Cqn, count: u32, known: Time) {
        let pending = self.count_pending(cqn, count);
        self.settle(pending, known);
    }

    /// Like [`State::count`], but the answer is still under way: [`State::settle`] sets the times.
    pub fn count_pending(&mut self, cqn: Cqn, count: u32) -> Pending {
        let now = self.now;
        let cq = self.cq(cqn);
        cq.advance(now);
        cq.log.push_back(Counted { count, known: Time::NEVER, visible: Time::NEVER });
        Pending { cqn, number: cq.gone + cq.log.len() as u64 - 1 }
    }

    /// Sets the time at which the NIC knows of completions.
    pub fn settle(&mut self, Pending { cqn, number }: Pending, known: Time) {
        let (now, write) = (self.now, self.params.pcie.write);
        let cq = self.cq(cqn);
        let at = number.checked_sub(cq.gone).map(|at| at as usize);
        // The CQ may have been destroyed.
        let Some(entry) = at.and_then(|at| cq.log.get_mut(at)) else { return };
        (entry.known, entry.visible) = (known, known + write);
        // Completions become visible in order.
        let mut earlier = match cq.settled.checked_sub(1).and_then(|at| cq.log.get(at)) {
            Some(last) => (last.known, last.visible),
            None => (Time::ZERO, Time::ZERO),
        };
        for entry in cq.log.iter_mut().skip(cq.settled) {
            if entry.visible == Time::NEVER {
                break;
            }
            (entry.known, entry.visible) =
                (entry.known.max(earlier.0), entry.visible.max(earlier.1));
            earlier = (entry.known, entry.visible);
            cq.settled += 1;
        }
        cq.advance(now);
        if let Some(at) = cq.first_visible() {
            self.schedule_visible(cqn, at);
        }
    }

    /// Returns when the NIC knows that completion number `index` has been counted; `None` if the
    /// answer is still under way.
    pub fn known(&mut self, cqn: Cqn, index: u32) -> Option<Time> {
        let cq = self.cq(cqn);
        let reached = |c: &Counted| reaches(c.count.wrapping_sub(1), index);
        match cq.log.iter().position(reached) {
            None => Some(Time::ZERO),
            Some(at) if at < cq.settled => Some(cq.log[at].known),
            Some(_) => None,
        }
    }
}

impl CqState {
    /// Removes the completions that are visible at `now` from the log.
    pub fn advance(&mut self, now: Time) {
        while let Some(first) = self.log.front()
            && first.visible <= now
            && self.settled > 0
        {
            self.visible = first.count;
            self.log.pop_front();
            (self.gone, self.settled) = (self.gone + 1, self.settled - 1);
        }
    }

    /// Returns when the first completion of the log becomes visible, if that is known.
    fn first_visible(&self) -> Option<Time> {
        self.log.front().filter(|_| self.settled > 0).map(|first| first.visible)
    }
}
