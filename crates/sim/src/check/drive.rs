//! Runs one world event by event, with the oracle's check after each event and with injected
//! faults.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rnic::port::inline::InlineFunction;
use schemes::finemem;

use super::invariant::{Invariant, Violation};
use super::node_view::{NodeView, PageState};
use super::oracle::{ClientIndex, Leases, Oracle};
use super::scenario::{Role, Scenario};
use super::{Context, Outcome, honest, hostile, lessee};
use crate::cluster::{Cluster, ClusterSpec, Link};
use crate::fiber::FiberId;
use crate::ids::NodeId;
use crate::net::{Faults, Partition};
use crate::nic::SimNic;
use crate::params::Params;
use crate::random::Random;
use crate::state::VerbStall;
use crate::time::Time;

/// Deadline for reclaiming a departed client's chunks, if the memory node's CPU is not stalled.
pub(super) const RECLAIM: Time = Time::us(30_000);
/// Time in which clients must finish once no more faults are injected.
const FINISH: Time = Time::us(2_000_000);
/// Maximum number of events of a world.
const EVENTS: u64 = 200_000;

/// The process of a client.
struct ClientProcess {
    fiber: FiberId,
    client: ClientIndex,
    role: Role,
    node: NodeId,
    link: Link,
    function: Rc<RefCell<Option<InlineFunction>>>,
    dies: Rc<Cell<bool>>,
}

struct World<'a> {
    cluster: Cluster,
    scenario: &'a Scenario,
    oracle: Rc<RefCell<Oracle>>,
    processes: Vec<ClientProcess>,
    random: Random,
    seed: u64,
    /// Start and length in bytes of the donated memory.
    donated: (u64, u64),
    events: u64,
    /// Whether the network currently has faults.
    network_is_faulty: bool,
    crashes: u32,
    /// RNG for aborts of the memory node's background work, if enabled, and the event count of the
    /// next abort.
    aborts: Option<(Random, u64)>,
}

/// Runs a scenario.
pub(super) fn run(scenario: &Scenario, seed: u64, params: &Arc<Params>, trace: bool) -> Outcome {
    let mut oracle = None;
    let ran = catch_unwind(AssertUnwindSafe(|| {
        let mut world = World::new(scenario, seed, params)?;
        oracle = Some(world.oracle.clone());
        if trace {
            world.oracle.borrow_mut().start_trace();
            world.with_oracle(|o| o.note(|_| format!("{scenario:?}")));
        }
        world.run()
    }));
    let failed = match ran {
        Ok(result) => result.err(),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()));
            Some(broken(Invariant::GoesOn, format!("a panic: {}", text.unwrap_or_default())))
        }
    };
    let Some(oracle) = oracle else {
        let (counts, took) = Default::default();
        return Outcome { violation: failed, trace: None, counts, took };
    };
    let mut oracle = oracle.borrow_mut();
    if let Some(violation) = failed.filter(|_| oracle.violation.is_none()) {
        oracle.wrong(violation.invariant, violation.why);
    }
    let violation = oracle.violation.take();
    Outcome { violation, trace: oracle.take_trace(), counts: oracle.counts, took: oracle.now }
}

impl<'a> World<'a> {
    fn new(scenario: &'a Scenario, seed: u64, params: &Arc<Params>) -> Result<Self, Violation> {
        let settings = scenario.settings.clone();
        let chunk_bytes = settings.chunk_bytes;
        let chunks = settings.chunks() as u32;
        let spec = ClusterSpec {
            params: params.clone(),
            seed,
            shuffled: true,
            compute_nodes: scenario.clients.len() as u16,
            memory_nodes: 1,
            settings,
        };
        let mut cluster = Cluster::new(&spec).map_err(|e| broken(Invariant::GoesOn, e))?;
        let node_view = cluster.try_scheme(|s| NodeView::of(s)).expect("no fiber runs yet");
        let donated = (node_view.memory().addr(), chunks as u64 * chunk_bytes);
        let mut oracle =
            Oracle::new(scenario.case, cluster.functions(), node_view, (chunks, chunk_bytes));
        if let Some(plan) = &scenario.leases {
            oracle.expect_leases(Leases::new(plan, scenario.faults.stalls > Time::ZERO));
            for (node, clock) in (0..).map(NodeId).zip(&plan.clocks) {
                cluster.sim.set_clock(node, *clock);
            }
            cluster.sim.fail_windows(plan.window_faults, seed);
        }
        cluster.start();
        cluster.sim.watch();
        let mut world = Self {
            cluster,
            scenario,
            oracle: Rc::new(RefCell::new(oracle)),
            processes: Vec::new(),
            random: Random::new(seed, 101),
            seed,
            donated,
            events: 0,
            network_is_faulty: false,
            crashes: 0,
            aborts: scenario.aborts_enabled.then(|| (Random::new(seed, 103), 0)),
        };
        for (at, role) in scenario.clients.iter().enumerate() {
            world.spawn(*role, NodeId(1 + at as u16));
        }
        Ok(world)
    }

    fn with_oracle<T>(&self, f: impl FnOnce(&mut Oracle) -> T) -> T {
        f(&mut self.oracle.borrow_mut())
    }

    /// Starts a process.
    fn spawn(&mut self, role: Role, node: NodeId) {
        let number = self.with_oracle(|o| o.clients.len());
        let kind = if role.hostile { "hostile" } else { "client" };
        let link = Link::default();
        let client = self.with_oracle(|o| {
            o.add_client(format!("{kind} {number}"), !role.hostile, link.clone(), node)
        });
        let cx = Context {
            client,
            oracle: self.oracle.clone(),
            connector: self.cluster.connector(),
            link: link.clone(),
            function: Rc::default(),
            dies: Rc::default(),
            node,
            groups: self.scenario.groups,
            lanes: self.scenario.settings.lanes() as usize,
            case: self.scenario.case,
            leases: self.scenario.leases.clone(),
            domain: self.scenario.leases.as_ref().and_then(|plan| plan.domain(node)),
            nic_random: self
                .scenario
                .nic_abuse
                .then(|| Random::new(self.seed, 5000 + client as u64)),
        };
        self.with_oracle(|o| o.clients[client].domain = cx.domain);
        let (function, dies) = (cx.function.clone(), cx.dies.clone());
        let random = Random::new(self.seed, 1000 + client as u64);
        let name = self.with_oracle(|o| o.name(client).to_string());
        let quantum = if self.random.below(2) == 0 { Time::ZERO } else { Time::us(1) };
        let program = match role {
            Role { hostile: true, .. } => hostile::run,
            Role { leases: true, .. } => lessee::run,
            _ => honest::run,
        };
        let fiber = self.cluster.sim.spawn(name, quantum, move || program(cx, role, random));
        self.processes.push(ClientProcess { fiber, client, role, node, link, function, dies });
    }

    fn run(&mut self) -> Result<(), Violation> {
        let faults = self.scenario.faults;
        let length = 200 + self.random.below(6000);
        let mut next = self.pause();
        while self.events < length && !self.processes.is_empty() {
            self.step()?;
            if faults.gap > 0 && self.events >= next {
                self.inject_fault();
                next = self.events + self.pause();
            }
            self.arm_abort();
        }
        // Aborts that are armed still happen, and the clients must detect them.
        self.aborts = None;
        self.cluster.sim.set_faults(Faults::default());
        self.cluster.sim.fail_windows(0, self.seed);
        self.with_oracle(|o| o.note(|_| "nothing goes wrong from here on".into()));
        let by = self.cluster.sim.now() + FINISH;
        while !self.processes.is_empty() {
            self.step()?;
            if self.cluster.sim.now() > by || self.events > EVENTS {
                let client = self.with_oracle(|o| o.name(self.processes[0].client).to_string());
                return Err(broken(
                    Invariant::Answers,
                    format!("{client} has not finished in time"),
                ));
            }
        }
        self.settle()
    }

    fn pause(&mut self) -> u64 {
        1 + self.random.below(self.scenario.faults.gap.max(1))
    }

    /// Executes the next event and the oracle's check.
    fn step(&mut self) -> Result<(), Violation> {
        if !self.cluster.sim.step() {
            let waits =
                self.processes.first().map(|p| self.with_oracle(|o| o.name(p.client).to_string()));
            let why = format!("no event is left, but {waits:?} still waits");
            return Err(broken(Invariant::Answers, why));
        }
        self.run_oracle();
        self.events += 1;
        self.reap_ended()?;
        if let Some(why) = self.cluster.failure() {
            return Err(broken(Invariant::GoesOn, format!("the memory node's CPU failed: {why}")));
        }
        match self.with_oracle(|o| o.violation.clone()) {
            None => Ok(()),
            Some(violation) => Err(violation),
        }
    }

    fn run_oracle(&self) {
        let sim = &self.cluster.sim;
        let (start, len) = self.donated;
        let read = |into: &mut _| sim.reaches(start, len, into);
        let mut oracle = self.oracle.borrow_mut();
        oracle.now = sim.now();
        oracle.node_now = Duration::from_nanos(sim.clock(NodeId(0)).read(sim.now()).as_ns());
        if self.scenario.case.is_paged() {
            oracle.set_pages(self.cluster.try_scheme(|s| PageState::of(s)));
        }
        match sim.take_observed() {
            Some(observed) => oracle.after_step(&observed, read),
            None => oracle.after_cpu(read),
        }
    }

    /// Removes the processes that have ended, kills those that are to die, and checks that departed
    /// clients are forgotten in time.
    fn reap_ended(&mut self) -> Result<(), Violation> {
        let mut at = 0;
        while at < self.processes.len() {
            let ended = self.cluster.sim.has_ended(self.processes[at].fiber);
            if self.processes[at].dies.get() {
                self.kill(at, "dies");
            } else if ended {
                let process = self.processes.remove(at);
                // The process may have ended without closing its connection.
                let by = self.cluster.sim.now() + RECLAIM;
                self.with_oracle(|o| o.departed(process.client, by));
            } else {
                at += 1;
            }
        }
        if self.events.is_multiple_of(64) {
            self.check_departed()?;
            if self.scenario.case.has_leases()
                && let Some(Err(why)) = self.cluster.try_scheme(|s| s.audit())
            {
                return Err(broken(Invariant::Accounts, why));
            }
        }
        Ok(())
    }

    fn check_departed(&mut self) -> Result<(), Violation> {
        let deaths = self.with_oracle(|o| o.deaths.clone());
        let now = self.cluster.sim.now();
        for (by, id) in deaths {
            match self.cluster.try_scheme(|s| s.is_retired(id)) {
                Some(true) => self.with_oracle(|o| o.deaths.retain(|(_, d)| *d != id)),
                Some(false) if now > by => {
                    let why = format!("compute node {} is not forgotten at {now}", id.0);
                    return Err(broken(Invariant::Forgotten, why));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn kill(&mut self, at: usize, how: &str) {
        let process = self.processes.remove(at);
        let by = self.cluster.sim.now() + RECLAIM;
        self.with_oracle(|o| {
            o.note(|o| format!("{} {how}", o.name(process.client)));
            o.counts.deaths += 1;
            o.departed(process.client, by);
        });
        let function = process.function.borrow_mut().take();
        self.cluster.crash_linked(process.fiber, function.as_ref(), &process.link);
    }

    // --- faults -------------------------------------------------------------------------------

    fn inject_fault(&mut self) {
        if self.processes.is_empty() {
            return;
        }
        if self.scenario.leases.is_some() && self.random.below(2) == 0 {
            return self.inject_pause();
        }
        let faults = self.scenario.faults;
        match self.random.below(8) {
            0 | 1 if self.crashes < faults.crashes => {
                self.crashes += 1;
                let at = self.random.below(self.processes.len() as u64) as usize;
                let (role, node) = (self.processes[at].role, self.processes[at].node);
                self.kill(at, "crashes");
                self.spawn(role, node);
            }
            2 | 3 if faults.stalls > Time::ZERO => {
                let at = self.random.below(self.processes.len() as u64) as usize;
                let time = self.some(faults.stalls);
                let process = &self.processes[at];
                self.with_oracle(|o| {
                    o.slack += time;
                    o.note(|o| format!("{} stands still for {time}", o.name(process.client)));
                });
                self.cluster.sim.stall(process.fiber, time);
            }
            4 | 5 if faults.node_stalls > Time::ZERO => {
                let time = self.some(faults.node_stalls);
                self.with_oracle(|o| {
                    o.extend_deadlines(time);
                    o.note(|_| format!("the memory node's CPU stands still for {time}"));
                });
                for fiber in self.cluster.node_fibers() {
                    self.cluster.sim.stall(fiber, time);
                }
            }
            6 | 7 if faults.of_network() => self.toggle_network_faults(),
            _ => {}
        }
    }

    /// In a scheme with leases: has a client or the memory node's CPU stand still at a coming verb,
    /// or a client's clock leap.
    fn inject_pause(&mut self) {
        let Some(plan) = self.scenario.leases.as_ref().filter(|plan| plan.pauses) else { return };
        let time = plan.some_pause(&mut self.random);
        let passes = self.random.below(40) as u32;
        let sim = &self.cluster.sim;
        if self.random.below(4) == 0 {
            let time = time.min(Time::us(plan.lease_max_us));
            let cores = self.cluster.node_fibers();
            let core = *self.random.pick(&cores);
            sim.stall_at_verb(core, VerbStall { passes, time, stops_clock: false });
            return self.with_oracle(|o| {
                o.extend_deadlines(time);
                o.note(|_| format!("a core of the memory node will stand still for {time}"));
            });
        }
        let process = &self.processes[self.random.below(self.processes.len() as u64) as usize];
        if self.random.below(8) == 0 {
            let mut clock = sim.clock(process.node);
            clock.leap(time);
            sim.set_clock(process.node, clock);
            return self.with_oracle(|o| {
                o.note(|o| format!("the clock of {} leaps by {time}", o.name(process.client)));
            });
        }
        let stops_clock = self.random.below(3) == 0;
        sim.stall_at_verb(process.fiber, VerbStall { passes, time, stops_clock });
        self.with_oracle(|o| {
            o.slack += time;
            o.clients[process.client].clock_stopped |= stops_clock;
            o.note(|o| {
                let clock = if stops_clock { ", and its clock" } else { "" };
                format!("{}{clock} will stand still for {time}", o.name(process.client))
            });
        });
    }

    /// Arms an abort of the memory node's background work a few steps from now.
    fn arm_abort(&mut self) {
        let Some((random, next)) = &mut self.aborts else { return };
        if self.events < *next {
            return;
        }
        *next = self.events + 1 + random.below(300);
        // Small numbers are as likely as large ones: the recovery after a death has a few dozen
        // steps.
        let shift = random.below(6);
        let steps = 1 + random.below(1 << shift);
        let broken = self.cluster.try_scheme(|scheme| {
            let any: &mut dyn Any = scheme;
            any.downcast_mut::<finemem::Node<SimNic>>().map_or(0, |node| {
                node.abort_after(steps);
                node.aborts()
            })
        });
        self.with_oracle(|o| {
            // After an abort the work takes as long again.
            o.extend_deadlines(Time::us(200));
            o.counts.aborts = broken.unwrap_or(o.counts.aborts);
            o.note(|_| format!("the memory node's background work breaks off in {steps} steps"));
        });
    }

    fn some(&mut self, most: Time) -> Time {
        // Short times are as likely as long ones.
        let shift = self.random.below(8);
        Time(1 + self.random.below((most.0 >> shift).max(1)))
    }

    fn toggle_network_faults(&mut self) {
        let plan = self.scenario.faults;
        self.network_is_faulty = !self.network_is_faulty;
        let mut faults = Faults::default();
        if self.network_is_faulty {
            self.oracle.borrow_mut().calm = false;
            (faults.loss, faults.late) = (plan.loss, plan.late);
            faults.late_by = Time::us(1 + self.random.below(100));
            if plan.partitions > Time::ZERO {
                let b = NodeId(1 + self.random.below(self.scenario.clients.len() as u64) as u16);
                let from = self.cluster.sim.now();
                let until = from + Time(1 + self.random.below(plan.partitions.0));
                faults.partition =
                    Some(Partition { a: NodeId(0), b, from, until, one_way: plan.one_way });
            }
        }
        self.with_oracle(|o| o.note(|_| format!("the network: {faults:?}")));
        self.cluster.sim.set_faults(faults);
    }

    // --- the end -------------------------------------------------------------------------------

    /// After all clients have departed, checks that the pool returns to its initial state.
    fn settle(&mut self) -> Result<(), Violation> {
        let slack =
            self.with_oracle(|o| o.deaths.iter().map(|(by, _)| *by).max()).unwrap_or_default();
        let until = slack.max(self.cluster.sim.now()) + Time::us(1);
        while self.cluster.sim.next_at().is_some_and(|at| at <= until) {
            self.step()?;
        }
        let mut tries = 0;
        let result = loop {
            let asked = self.cluster.try_scheme(|s| (s.audit(), s.status()));
            match asked {
                Some(result) => break result,
                // The CPU is within a quantum of work.
                None if tries < 10_000 && self.cluster.sim.step() => tries += 1,
                None => {
                    let why = "the memory node's CPU does not become idle";
                    return Err(broken(Invariant::GoesOn, why));
                }
            }
        };
        let (audit, status) = result;
        let accounts = match self.scenario.case.has_leases() {
            true => Invariant::Accounts,
            false => Invariant::Forgotten,
        };
        audit.map_err(|e| broken(accounts, e))?;
        let status = status.map_err(|e| broken(Invariant::GoesOn, e))?;
        if status.free != status.chunks || status.clients + status.leaving > 0 {
            let why = format!(
                "after all clients have departed, {} of {} chunks are free; {} clients are \
                 connected, {} leaving",
                status.free, status.chunks, status.clients, status.leaving
            );
            return Err(broken(Invariant::Forgotten, why));
        }
        let (sim, (start, len)) = (&self.cluster.sim, self.donated);
        // Large memories are not checked after every step, so check here.
        self.with_oracle(|o| o.check_access_rights(|into| sim.reaches(start, len, into)));
        self.with_oracle(|o| o.check_empty()).map_err(|why| broken(Invariant::Forgotten, why))
    }
}

fn broken(invariant: Invariant, why: impl ToString) -> Violation {
    Violation { invariant, why: why.to_string() }
}
