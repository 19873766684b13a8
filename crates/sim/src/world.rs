//! The simulated world: it lets events happen in their order, and runs the fibers.

use std::fmt::Write as _;
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};

use corosensei::stack::DefaultStack;
use parking_lot::Mutex;
use rnic::engine::Reach;
use rnic::memory::DmaMemory;
use rnic::port::inline::InlineNic;
use rnic::verbs::Limits;

use crate::Error;
use crate::fiber::{self, Fiber, FiberId, Stand};
use crate::net::Faults;
use crate::params::Params;
use crate::queues::Observed;
use crate::state::{Counters, Event, NodeId, State};
use crate::time::Time;

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

impl Sim {
    /// A world with so many nodes, numbered as [`ClusterSpec`](crate::ClusterSpec) says. `shuffled`: what happens at
    /// the same moment happens in an order that the seed decides.
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
            // One engine is all NICs: those of further memory nodes are functions of their own.
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

    /// From now on [`Sim::take_observed`] tells what QPs do.
    pub fn watch(&self) {
        self.shared.state.lock().watched = true;
    }

    /// What a QP did in the last step, if one did anything.
    pub fn take_observed(&self) -> Option<Observed> {
        self.shared.state.lock().observed.take()
    }

    /// Appends every way in which a QP could reach some of the `len` bytes from `start` on now.
    pub fn reaches(&self, start: u64, len: u64, into: &mut Vec<Reach>) {
        self.shared.nic.with_engine(|e| e.reaches(start, len, into));
    }

    /// When the next event is.
    pub fn next_at(&self) -> Option<Time> {
        self.shared.state.lock().next_at()
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
        state.add_fiber(id);
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
