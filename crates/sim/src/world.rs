//! The simulated world: it executes events in time order and runs the fibers.

use std::fmt::Write as _;
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};

use corosensei::stack::DefaultStack;
use parking_lot::Mutex;
use rnic::engine::Reachability;
use rnic::limits::Limits;
use rnic::port::inline::InlineNic;
use verbs::DmaMemory;

use crate::Error;
use crate::clock::Clock;
use crate::fiber::{self, Fiber, FiberId, Suspension};
use crate::ids::NodeId;
use crate::net::Faults;
use crate::params::Params;
use crate::qp::Observed;
use crate::random::Random;
use crate::state::{Counters, Event, State, VerbStall, WindowFaults};
use crate::time::Time;
use crate::waits::Waits;

/// State that hooks and fibers share with the world.
pub(crate) struct Shared {
    pub nic: Arc<InlineNic>,
    pub state: Mutex<State>,
}

/// The world. It runs on the thread that created it.
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

impl Sim {
    /// Creates a world with the given numbers of nodes, numbered as in
    /// [`ClusterSpec`](crate::ClusterSpec).
    ///
    /// If `shuffled`, the seed decides the order of simultaneous events.
    pub fn new(
        params: &Arc<Params>,
        compute_nodes: u16,
        memory_nodes: u16,
        seed: u64,
        shuffled: bool,
    ) -> Self {
        let limits = Limits {
            slice_bytes: 1 << 30,
            windows: params.nic.windows,
            // One engine simulates all NICs; further memory nodes use functions of their own.
            owner_functions: params.nic.functions + u32::from(memory_nodes) - 1,
            ..Limits::default()
        };
        let memory = Box::new(|bytes| DmaMemory::anonymous(bytes).expect("memory for the NIC"));
        let state = State::new(params, compute_nodes, memory_nodes, seed, shuffled);
        let shared = Shared { nic: InlineNic::stepped(limits, memory), state: Mutex::new(state) };
        Self { shared: Arc::new(shared), fibers: Vec::new(), stacks: Vec::new() }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Returns the virtual time.
    pub fn now(&self) -> Time {
        self.shared.state.lock().now
    }

    /// Returns the event counters.
    pub fn counters(&self) -> Counters {
        self.shared.state.lock().counters
    }

    /// Returns the time that the units of a node's NIC worked, and the bytes that the NIC sent.
    pub fn nic_used(&self, node: NodeId) -> (Time, u64) {
        self.shared.state.lock().nodes[node.0 as usize].used()
    }

    /// Returns the waits of requests at each resource of a node, by the resource's name.
    pub fn waits(&self, node: NodeId) -> Vec<(&'static str, Waits)> {
        let state = self.shared.state.lock();
        let at = usize::from(node.0);
        let lock = ("lock of the cores", state.core_locks[at].waits());
        let all = state.nodes[at].waits().into_iter().chain([lock]);
        all.map(|(name, waits)| (name, waits.clone())).collect()
    }

    /// Sets the network's faults from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.shared.state.lock().net.set(faults);
    }

    /// Has one window operation in `one_in` of the memory nodes fail from now on, at random by
    /// `seed`; 0 for none. Half of those take effect nevertheless.
    pub fn fail_windows(&self, one_in: u64, seed: u64) {
        let random = Random::new(seed, 2);
        let faults = (one_in > 0).then_some(WindowFaults { random, one_in });
        self.shared.state.lock().window_faults = faults;
    }

    /// Sets the clock that the programs of a node read from now on.
    pub fn set_clock(&self, node: NodeId, clock: Clock) {
        self.shared.state.lock().clocks[node.0 as usize] = clock;
    }

    /// Returns the clock of a node.
    pub fn clock(&self, node: NodeId) -> Clock {
        self.shared.state.lock().clocks[node.0 as usize]
    }

    /// Starts to record a trace.
    pub fn start_trace(&self) {
        self.shared.state.lock().trace = Some(String::new());
    }

    /// Returns the trace recorded so far, and clears it.
    pub fn take_trace(&self) -> String {
        self.shared.state.lock().trace.replace(String::new()).unwrap_or_default()
    }

    /// Adds a line to the trace if one is recorded.
    pub fn note(&self, line: impl FnOnce() -> String) {
        self.shared.note(line);
    }

    /// Starts to record the steps of QPs for [`Sim::take_observed`].
    pub fn watch(&self) {
        self.shared.state.lock().watched = true;
    }

    /// Takes the record of the last step if a QP took one.
    pub fn take_observed(&self) -> Option<Observed> {
        self.shared.state.lock().observed.take()
    }

    /// Appends every way in which a QP could now access some of the `len` bytes at `start`.
    pub fn reaches(&self, start: u64, len: u64, into: &mut Vec<Reachability>) {
        self.shared.nic.with_engine(|e| e.reachability(start, len, into));
    }

    /// Returns the time of the next event.
    pub fn next_at(&self) -> Option<Time> {
        self.shared.state.lock().next_at()
    }

    /// Starts `program` on a core of its own.
    ///
    /// The time that the program spends passes once it exceeds `quantum`. With a quantum of 0,
    /// other fibers may run between any two verbs.
    pub fn spawn(
        &mut self,
        name: impl Into<String>,
        quantum: Time,
        program: impl FnOnce() + 'static,
    ) -> FiberId {
        let id = FiberId(self.fibers.len() as u32);
        let waker = self.shared.waker(id);
        let fiber = Fiber::new(id, name.into(), quantum, waker, self.stacks.pop(), program);
        self.fibers.push(Some(fiber));
        let mut state = self.shared.state.lock();
        state.add_fiber(id);
        id
    }

    /// Wakes a waiting fiber.
    pub fn wake(&self, id: FiberId) {
        self.shared.state.lock().wake(id);
    }

    /// Returns whether a fiber's program has ended.
    pub fn has_ended(&self, id: FiberId) -> bool {
        self.fibers[id.0 as usize].is_none()
    }

    /// Suspends a fiber for `time` from now, regardless of wake-ups.
    pub fn stall(&self, id: FiberId, time: Time) {
        let mut state = self.shared.state.lock();
        let until = state.now + time;
        let fiber = &mut state.fibers[id.0 as usize];
        if !fiber.scheduled && !fiber.ended {
            (fiber.scheduled, fiber.waits) = (true, false);
            state.push(until, Event::Run(id));
        }
    }

    /// Suspends a fiber at a coming verb.
    ///
    /// [`Sim::stall`] suspends a fiber only while it waits. This method also separates two verbs of
    /// a fiber, and a verb from the decision to post it.
    pub fn stall_at_verb(&self, id: FiberId, stall: VerbStall) {
        self.shared.state.lock().fibers[id.0 as usize].verb_stall = Some(stall);
    }

    /// Ends a suspended fiber and drops the values on its stack.
    pub fn kill(&mut self, id: FiberId) {
        self.shared.state.lock().fibers[id.0 as usize].ended = true;
        if let Some(fiber) = self.fibers[id.0 as usize].take() {
            self.stacks.push(fiber.end());
        }
    }

    /// Executes the next event. Returns false if there is none.
    pub fn step(&mut self) -> bool {
        let event = {
            let mut state = self.shared.state.lock();
            let Some(event) = state.pop() else { return false };
            event
        };
        match event {
            Event::Run(id) => self.run_fiber(id),
            other => self.shared.execute(other),
        }
        true
    }

    fn run_fiber(&mut self, id: FiberId) {
        self.shared.state.lock().fibers[id.0 as usize].scheduled = false;
        let Some(fiber) = &mut self.fibers[id.0 as usize] else { return };
        let suspension = fiber.resume();
        let mut state = self.shared.state.lock();
        let now = state.now;
        let fiber_state = &mut state.fibers[id.0 as usize];
        match suspension {
            None => {
                fiber_state.ended = true;
                drop(state);
                self.stacks.extend(self.fibers[id.0 as usize].take().map(Fiber::end));
            }
            Some(Suspension::For(time)) => {
                fiber_state.scheduled = true;
                state.push(now + time, Event::Run(id));
            }
            Some(Suspension::Waits) => {
                fiber_state.waits = true;
                if std::mem::take(&mut fiber_state.notified) {
                    state.wake(id);
                }
            }
        }
    }

    /// Runs until `done` returns true; `done` is called after each event. Fails if no event is left
    /// before that.
    pub fn run_until(&mut self, mut done: impl FnMut(&Sim) -> bool) -> Result<(), Error> {
        while !done(self) {
            if !self.step() {
                return Err(self.stuck());
            }
        }
        Ok(())
    }

    /// Runs until the given fibers have ended.
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

    /// Runs for `time`, or until no event is left.
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
        Error::Stuck { at: self.now(), waits: waits.len(), names: waits.join(", ") }
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
    /// Returns a waker for a fiber.
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

    /// Collects work that a verb may have given to the NIC.
    pub fn collect_work(&self) {
        let mut state = self.state.lock();
        // The running fiber has spent time that has not passed yet.
        let from = state.now + fiber::charged();
        state.collect(&self.nic, from);
    }

    /// Executes the NIC's next event outside of any fiber, while a world is set up.
    pub fn pump(&self) -> bool {
        let event = self.state.lock().pop();
        match event {
            None => false,
            Some(Event::Run(_)) => panic!("a fiber runs while the world is set up"),
            Some(event) => {
                self.execute(event);
                true
            }
        }
    }

    /// Like [`Shared::pump`], but lets time pass to `deadline` and returns false if no event comes
    /// before that.
    pub fn pump_until(&self, deadline: Option<Time>) -> bool {
        {
            let mut state = self.state.lock();
            if let Some(deadline) = deadline
                && state.next_at().is_none_or(|at| at > deadline)
            {
                state.now = state.now.max(deadline);
                return false;
            }
        }
        self.pump()
    }

    fn execute(&self, event: Event) {
        let mut state = self.state.lock();
        match event {
            Event::Issue(qpn, era) => state.issue(&self.nic, qpn, era),
            Event::Fetch(qpn, era) => state.fetch(qpn, era),
            Event::Enter(qpn, era) => state.enter(qpn, era),
            Event::Land(qpn, era) => state.land(qpn, era),
            Event::Step(qpn, era) => state.step(&self.nic, qpn, era),
            Event::Reply(id) => state.reply(&self.nic, id),
            Event::Timer(id) => state.timer(id),
            Event::Visible(cqn) => {
                let now = state.now;
                let cq = state.cq(cqn);
                cq.visible_at = None;
                cq.advance(now);
                let wakers = std::mem::take(&mut cq.wakers);
                drop(state);
                wakers.into_iter().for_each(Waker::wake);
            }
            Event::Run(_) => unreachable!("the world runs fibers"),
        }
    }
}
