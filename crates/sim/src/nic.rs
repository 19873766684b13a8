//! The NIC of a program in the simulation: the traits of `verbs`, with virtual time.

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use rnic::nic::SoftNic;
use rnic::nic::interposed::{Call, Hooks, InterposedNic};
use rnic::port::Function;
use rnic::port::inline::InlineFunction;
use verbs::{Completion, CompletionKind, Cqn, DmaMemory, Error, Qpn, WcOpcode};

use crate::fiber;
use crate::ids::NodeId;
use crate::params::Params;
use crate::state::VerbStall;
use crate::time::Time;
use crate::world::Shared;

/// A simulated NIC.
pub type SimNic = InterposedNic<SimHooks>;

/// Hooks of a program's NIC: the node on which it runs, with its clock, and the CPU time of its
/// verbs.
#[derive(Clone)]
pub struct SimHooks {
    shared: Arc<Shared>,
    params: Arc<Params>,
    node: NodeId,
    /// Whether the program is a memory node's CPU, whose time per request is modelled.
    weak: bool,
}

impl SimHooks {
    pub(crate) fn nic(
        shared: &Arc<Shared>,
        node: NodeId,
        weak: bool,
        function: InlineFunction,
    ) -> SimNic {
        let params = shared.state.lock().params.clone();
        let hooks = SimHooks { shared: shared.clone(), params, node, weak };
        SimNic::new(SoftNic::new(Function::Inline(function)), hooks)
    }

    /// Returns the virtual time, including time that the running fiber has spent since time last
    /// passed. Programs read the clock of their node: [`SimHooks::local_now`].
    pub fn now(&self) -> Time {
        self.shared.state.lock().now + fiber::charged()
    }

    /// Returns the time that the memory nodes' CPUs have spent on requests and verbs.
    pub fn node_cpu(&self) -> Time {
        self.shared.state.lock().node_cpu
    }

    /// Charges time to the running fiber, and counts the time of a memory node's CPU.
    fn charge(&self, time: Time) {
        if self.weak {
            self.shared.state.lock().node_cpu += time;
        }
        fiber::charge(time);
    }

    /// Returns how long a core of the memory node waits until it can hold the lock of all cores for
    /// `length`. The time of the requests contains `length` itself.
    fn wait_for_lock(&self, length: Time) -> Time {
        let at = SimHooks::now(self);
        let lock = &mut self.shared.state.lock().core_locks[usize::from(self.node.0)];
        lock.serve(at, length).since(at + length)
    }

    /// Returns the time that the clock of the program's node shows.
    pub fn local_now(&self) -> Time {
        let state = self.shared.state.lock();
        state.clocks[self.node.0 as usize].read(state.now + fiber::charged())
    }

    /// Suspends the running fiber at one of its next verbs.
    pub(crate) fn stall_me_at_verb(&self, stall: VerbStall) {
        let me = fiber::current().expect("only fibers stall");
        self.shared.state.lock().fibers[me.0 as usize].verb_stall = Some(stall);
    }

    /// Suspends the running fiber if a stall begins at this point of its program.
    fn stall_at_verb(&self) {
        let Some(me) = fiber::current().filter(|_| !fiber::is_ending()) else { return };
        let stall = self.shared.state.lock().passes_verb(me, self.node);
        if let Some(time) = stall {
            fiber::sleep(time);
        }
    }

    /// Adds a line to the trace if one is recorded.
    pub fn note(&self, line: impl FnOnce() -> String) {
        self.shared.note(line);
    }

    /// Suspends the running fiber until it is woken or `deadline` is reached.
    pub(crate) fn wait_until(&self, deadline: Option<Time>) {
        let me = fiber::current().expect("only fibers wait");
        if let Some(deadline) = deadline {
            self.shared.state.lock().set_deadline(me, deadline);
        }
        fiber::wait();
    }

    /// Returns the one-way latency of a message on the control connection.
    pub(crate) fn control_latency(&self) -> Time {
        self.params.node_cpu.control
    }

    /// Wakes the running fiber at `at`, or before; at once if `at` has passed.
    pub(crate) fn wake_me_at(&self, at: Time) {
        let me = fiber::current().expect("only fibers wait");
        let mut state = self.shared.state.lock();
        let earlier = state.fibers[me.0 as usize].deadline;
        state.set_deadline(me, earlier.map_or(at, |earlier| earlier.min(at)));
    }

    pub(crate) fn wake(&self, id: fiber::FiberId) {
        self.shared.state.lock().wake(id);
    }

    /// Lets the NIC work while a world is set up, before any fiber runs.
    pub(crate) fn pump(&self) -> bool {
        self.shared.pump()
    }
}

fn gone(why: &str) -> Error {
    Error::Gone { attempt: "waiting for a completion".into(), why: why.into() }
}

/// Why a wait of a program that is being ended fails.
const ENDED: &str = "this simulated process has ended";

impl Hooks for SimHooks {
    const VIRTUAL: bool = true;

    fn name(&self) -> &'static str {
        "simulated"
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.local_now().as_ns())
    }

    /// The time of the latest tick, as of a kernel with 250 ticks a second.
    fn now_coarse(&self) -> Duration {
        const TICK_NS: u64 = 4_000_000;
        Duration::from_nanos(self.local_now().as_ns() / TICK_NS * TICK_NS)
    }

    fn before(&self, call: Call) {
        if fiber::current().is_none() || fiber::is_ending() {
            return;
        }
        self.stall_at_verb();
        let params = &self.params;
        self.charge(match call {
            Call::PostSend(..) | Call::Enable => params.cpu.post,
            Call::DeregMr(_) if self.weak => params.node_cpu.deregister,
            Call::RegMr(bytes) if self.weak => {
                let pages = bytes.div_ceil(params.node_cpu.page_bytes);
                params.node_cpu.register + Time(params.node_cpu.register_page.0 * pages)
            }
            // One side of a copy is in the cache, so that memory limits it as it limits zeros.
            Call::Zero(bytes) | Call::Copied(bytes) if self.weak => {
                Time((bytes as f64 * 1e3 / params.node_cpu.clear_rate).round() as u64)
            }
            Call::AllocMws(count) if self.weak => Time(params.node_cpu.alloc_window.0 * count),
            // A call of the kernel, which takes as long at a compute node.
            Call::Modify => params.node_cpu.modify_qp,
            // Other verbs belong to the set-up or take a negligible time.
            _ => Time::ZERO,
        });
    }

    fn after(&self) {
        self.shared.collect_work();
        self.stall_at_verb();
    }

    fn made_qp(&self, qpn: Qpn, send_cq: Cqn, managed_ring: Option<DmaMemory>) {
        let managed = managed_ring.is_some();
        self.shared.state.lock().made_qp(qpn, self.node, send_cq, managed);
    }

    fn connects(&self, qpn: Qpn, peer: Qpn) {
        self.shared.state.lock().connects(qpn, peer);
    }

    fn made_cq(&self, cqn: Cqn) {
        self.shared.state.lock().made_cq(cqn);
    }

    fn horizon(&self, cqn: Cqn) -> Option<u32> {
        Some(self.shared.state.lock().visible(cqn))
    }

    fn polled(&self, all: &[Completion]) {
        if all.is_empty() || fiber::current().is_none() || fiber::is_ending() {
            return;
        }
        let mut cost = self.params.cpu.poll;
        if self.weak {
            let requests = all.iter().filter(|c| c.kind == CompletionKind::Receive).count();
            cost += Time(self.params.node_cpu.request.0 * requests as u64);
            cost += self.wait_for_lock(Time(self.params.node_cpu.lock.0 * requests as u64));
            let windows = all.iter().filter(|c| c.opcode == WcOpcode::Bind).count();
            cost += Time(self.params.node_cpu.window.0 * windows as u64);
        }
        self.charge(cost);
    }

    fn wait(&self, cqn: Cqn, next: u32, timeout: Duration) -> Result<bool, Error> {
        if fiber::is_ending() {
            return Err(gone(ENDED));
        }
        let visible = |shared: &Shared| shared.state.lock().is_visible(cqn, next);
        if fiber::current().is_none() {
            // A completion becomes visible later, and outside of fibers time passes only from event
            // to event, or to the end of a wait without one.
            if visible(&self.shared) {
                return Ok(true);
            }
            self.shared.state.lock().leave_waker(cqn, next, Waker::noop());
            let deadline = (timeout < Duration::MAX)
                .then(|| self.shared.state.lock().now + Time::from(timeout));
            while self.shared.pump_until(deadline) {
                if visible(&self.shared) {
                    return Ok(true);
                }
            }
            return match deadline {
                Some(_) => Ok(false),
                None => Err(gone("the simulated world has no event left")),
            };
        }
        if visible(&self.shared) {
            return Ok(true);
        }
        let deadline = match timeout {
            Duration::MAX => None,
            timeout => Some(SimHooks::now(self) + Time::from(timeout)),
        };
        self.shared.state.lock().leave_waker(cqn, next, &fiber::waker());
        self.wait_until(deadline);
        if fiber::is_ending() {
            return Err(gone(ENDED));
        }
        let visible = visible(&self.shared);
        if visible && self.weak {
            self.charge(self.params.node_cpu.wakeup);
        }
        Ok(visible)
    }

    fn nap(&self, time: Duration) -> bool {
        if fiber::current().is_none() || fiber::is_ending() {
            return false;
        }
        self.wait_until(Some(SimHooks::now(self) + Time::from(time)));
        true
    }

    fn leave_waker(&self, cqn: Cqn, next: u32, waker: &Waker) {
        self.shared.state.lock().leave_waker(cqn, next, waker);
    }
}
