//! Runs one world: event by event, with the oracle's look after each, and with what goes wrong in
//! between.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;

use pool::AnyNode;
use pool::scheme::NodeScheme;
use rnic::port::inline::InlineFunction;

use super::books::{self, Books};
use super::invariant::{Invariant, Violation};
use super::oracle::{Oracle, Who};
use super::scenario::{Role, Scenario};
use super::{Context, Outcome, honest, hostile};
use crate::cluster::{Cluster, ClusterSpec, Link};
use crate::fiber::FiberId;
use crate::net::{Faults, Partition};
use crate::params::Params;
use crate::random::Random;
use crate::state::NodeId;
use crate::time::Time;

/// When nothing may be left of who has gone, if the memory node's CPU has the time.
pub(super) const RECLAIM: Time = Time::us(30_000);
/// How long clients may take to come to their end when nothing goes wrong any more.
const TO_THE_END: Time = Time::us(2_000_000);
/// Events of a world at most.
const EVENTS: u64 = 200_000;

/// A client's process.
struct Body {
    fiber: FiberId,
    who: Who,
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
    bodies: Vec<Body>,
    random: Random,
    seed: u64,
    /// First byte and length of the donated memory.
    donated: (u64, u64),
    events: u64,
    /// The network is as bad as it gets.
    bad: bool,
    crashes: u32,
    /// What the memory node's background work is broken off by, if it is, and the event after which that is next.
    breaks: Option<(Random, u64)>,
}

/// Runs a scenario.
pub(super) fn run(scenario: &Scenario, seed: u64, params: &Arc<Params>, trace: bool) -> Outcome {
    let mut oracle = None;
    let ran = catch_unwind(AssertUnwindSafe(|| {
        let mut world = World::new(scenario, seed, params)?;
        oracle = Some(world.oracle.clone());
        if trace {
            world.oracle.borrow_mut().start_trace();
            world.tell(|o| o.note(|_| format!("{scenario:?}")));
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
        let (seen, took) = Default::default();
        return Outcome { violation: failed, trace: None, seen, took };
    };
    let mut oracle = oracle.borrow_mut();
    if let Some(violation) = failed.filter(|_| oracle.violation.is_none()) {
        oracle.wrong(violation.invariant, violation.why);
    }
    let violation = oracle.violation.take();
    Outcome { violation, trace: oracle.take_trace(), seen: oracle.seen, took: oracle.now }
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
        let books = cluster.try_scheme(|s| Books::of(s)).expect("nobody else is about");
        let donated = (books.memory().addr(), chunks as u64 * chunk_bytes);
        let oracle = Oracle::new(scenario.case, cluster.functions(), books, (chunks, chunk_bytes));
        cluster.start();
        cluster.sim.watch();
        let mut world = Self {
            cluster,
            scenario,
            oracle: Rc::new(RefCell::new(oracle)),
            bodies: Vec::new(),
            random: Random::new(seed, 101),
            seed,
            donated,
            events: 0,
            bad: false,
            crashes: 0,
            breaks: scenario.breaks.then(|| (Random::new(seed, 103), 0)),
        };
        for (at, role) in scenario.clients.iter().enumerate() {
            world.spawn(*role, NodeId(1 + at as u16));
        }
        Ok(world)
    }

    fn tell<T>(&self, f: impl FnOnce(&mut Oracle) -> T) -> T {
        f(&mut self.oracle.borrow_mut())
    }

    /// A process begins.
    fn spawn(&mut self, role: Role, node: NodeId) {
        let number = self.tell(|o| o.clients.len());
        let kind = if role.hostile { "hostile" } else { "client" };
        let link = Link::default();
        let who = self.tell(|o| o.joins(format!("{kind} {number}"), !role.hostile, link.clone()));
        let cx = Context {
            who,
            oracle: self.oracle.clone(),
            connector: self.cluster.connector(),
            link: link.clone(),
            function: Rc::default(),
            dies: Rc::default(),
            node,
            groups: self.scenario.groups,
            lanes: self.scenario.settings.lanes() as usize,
            case: self.scenario.case,
            meddles: self.scenario.meddling.then(|| Random::new(self.seed, 5000 + who as u64)),
        };
        let (function, dies) = (cx.function.clone(), cx.dies.clone());
        let random = Random::new(self.seed, 1000 + who as u64);
        let name = self.tell(|o| o.name(who).to_string());
        let patience = if self.random.below(2) == 0 { Time::ZERO } else { Time::us(1) };
        let program = if role.hostile { hostile::run } else { honest::run };
        let fiber = self.cluster.sim.spawn(name, patience, move || program(cx, role, random));
        self.bodies.push(Body { fiber, who, role, node, link, function, dies });
    }

    fn run(&mut self) -> Result<(), Violation> {
        let trouble = self.scenario.trouble;
        let length = 200 + self.random.below(6000);
        let mut next = self.pause();
        while self.events < length && !self.bodies.is_empty() {
            self.step()?;
            if trouble.gap > 0 && self.events >= next {
                self.make_trouble();
                next = self.events + self.pause();
            }
            self.break_off();
        }
        // What is to be broken off still, is: somebody has to find out.
        self.breaks = None;
        self.cluster.sim.set_faults(Faults::default());
        self.tell(|o| o.note(|_| "nothing goes wrong from here on".into()));
        let by = self.cluster.sim.now() + TO_THE_END;
        while !self.bodies.is_empty() {
            self.step()?;
            if self.cluster.sim.now() > by || self.events > EVENTS {
                let who = self.tell(|o| o.name(self.bodies[0].who).to_string());
                return Err(broken(Invariant::Answers, format!("{who} has not come to its end")));
            }
        }
        self.settle()
    }

    fn pause(&mut self) -> u64 {
        1 + self.random.below(self.scenario.trouble.gap.max(1))
    }

    /// The next event, and the look after it.
    fn step(&mut self) -> Result<(), Violation> {
        if !self.cluster.sim.step() {
            let waits = self.bodies.first().map(|b| self.tell(|o| o.name(b.who).to_string()));
            let why = format!("nothing can happen any more, and {waits:?} still waits");
            return Err(broken(Invariant::Answers, why));
        }
        self.look();
        self.events += 1;
        self.bury()?;
        if let Some(why) = self.cluster.failure() {
            return Err(broken(Invariant::GoesOn, format!("the memory node's CPU gave up: {why}")));
        }
        match self.tell(|o| o.violation.clone()) {
            None => Ok(()),
            Some(violation) => Err(violation),
        }
    }

    fn look(&self) {
        let sim = &self.cluster.sim;
        let (start, len) = self.donated;
        let look = |into: &mut _| sim.reaches(start, len, into);
        let mut oracle = self.oracle.borrow_mut();
        oracle.now = sim.now();
        if self.scenario.case.is_paged() {
            oracle.tables_are(self.cluster.try_scheme(|s| books::tables(s)));
        }
        match sim.take_observed() {
            Some(observed) => oracle.after_step(&observed, look),
            None => oracle.after_cpu(look),
        }
    }

    /// Sees to who has come to his end, and whether those that went are forgotten in time.
    fn bury(&mut self) -> Result<(), Violation> {
        let mut at = 0;
        while at < self.bodies.len() {
            let ended = self.cluster.sim.has_ended(self.bodies[at].fiber);
            if self.bodies[at].dies.get() {
                self.kill(at, "dies");
            } else if ended {
                let body = self.bodies.remove(at);
                // It may have gone without a word.
                let by = self.cluster.sim.now() + RECLAIM;
                self.tell(|o| o.gone(body.who, by));
            } else {
                at += 1;
            }
        }
        if self.events.is_multiple_of(64) {
            self.check_gone()?;
        }
        Ok(())
    }

    fn check_gone(&mut self) -> Result<(), Violation> {
        let deaths = self.tell(|o| o.deaths.clone());
        let now = self.cluster.sim.now();
        for (by, id) in deaths {
            match self.cluster.try_scheme(|s| s.is_retired(id)) {
                Some(true) => self.tell(|o| o.deaths.retain(|(_, d)| *d != id)),
                Some(false) if now > by => {
                    let why = format!("{now} and compute node {} is still there", id.0);
                    return Err(broken(Invariant::Forgotten, why));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn kill(&mut self, at: usize, how: &str) {
        let body = self.bodies.remove(at);
        let by = self.cluster.sim.now() + RECLAIM;
        self.tell(|o| {
            o.note(|o| format!("{} {how}", o.name(body.who)));
            o.seen.deaths += 1;
            o.gone(body.who, by);
        });
        let function = body.function.borrow_mut().take();
        self.cluster.crash_linked(body.fiber, function.as_ref(), &body.link);
    }

    // --- trouble -------------------------------------------------------------------------------

    fn make_trouble(&mut self) {
        if self.bodies.is_empty() {
            return;
        }
        let trouble = self.scenario.trouble;
        match self.random.below(8) {
            0 | 1 if self.crashes < trouble.crashes => {
                self.crashes += 1;
                let at = self.random.below(self.bodies.len() as u64) as usize;
                let (role, node) = (self.bodies[at].role, self.bodies[at].node);
                self.kill(at, "crashes");
                self.spawn(role, node);
            }
            2 | 3 if trouble.stalls > Time::ZERO => {
                let at = self.random.below(self.bodies.len() as u64) as usize;
                let time = self.some(trouble.stalls);
                let body = &self.bodies[at];
                self.tell(|o| {
                    o.slack += time;
                    o.note(|o| format!("{} stands still for {time}", o.name(body.who)));
                });
                self.cluster.sim.stall(body.fiber, time);
            }
            4 | 5 if trouble.node_stalls > Time::ZERO => {
                let time = self.some(trouble.node_stalls);
                self.tell(|o| {
                    o.pardon(time);
                    o.note(|_| format!("the memory node's CPU stands still for {time}"));
                });
                for fiber in self.cluster.node_fibers() {
                    self.cluster.sim.stall(fiber, time);
                }
            }
            6 | 7 if trouble.of_network() => self.trouble_the_network(),
            _ => {}
        }
    }

    /// Has the memory node's background work broken off a few steps from here.
    fn break_off(&mut self) {
        let Some((random, next)) = &mut self.breaks else { return };
        if self.events < *next {
            return;
        }
        *next = self.events + 1 + random.below(300);
        // Few steps are as likely as many: what a death leaves to be done has some dozens.
        let shift = random.below(6);
        let steps = 1 + random.below(1 << shift);
        let broken = self.cluster.try_scheme(|scheme| match scheme {
            AnyNode::FineMem(node) => {
                node.break_off_after(steps);
                node.broken_off()
            }
            _ => 0,
        });
        self.tell(|o| {
            // It takes as long again as it took so far.
            o.pardon(Time::us(200));
            o.seen.broken_off = broken.unwrap_or(o.seen.broken_off);
            o.note(|_| format!("the memory node's background work breaks off in {steps} steps"));
        });
    }

    fn some(&mut self, most: Time) -> Time {
        // Short ones are as likely as long ones.
        let shift = self.random.below(8);
        Time(1 + self.random.below((most.0 >> shift).max(1)))
    }

    fn trouble_the_network(&mut self) {
        let trouble = self.scenario.trouble;
        self.bad = !self.bad;
        let mut faults = Faults::default();
        if self.bad {
            self.oracle.borrow_mut().calm = false;
            (faults.loss, faults.late) = (trouble.loss, trouble.late);
            faults.late_by = Time::us(1 + self.random.below(100));
            if trouble.partitions > Time::ZERO {
                let b = NodeId(1 + self.random.below(self.scenario.clients.len() as u64) as u16);
                let from = self.cluster.sim.now();
                let until = from + Time(1 + self.random.below(trouble.partitions.0));
                faults.partition =
                    Some(Partition { a: NodeId(0), b, from, until, one_way: trouble.one_way });
            }
        }
        self.tell(|o| o.note(|_| format!("the network: {faults:?}")));
        self.cluster.sim.set_faults(faults);
    }

    // --- the end -------------------------------------------------------------------------------

    /// All have gone: some time later all is as it was in the beginning.
    fn settle(&mut self) -> Result<(), Violation> {
        let slack = self.tell(|o| o.deaths.iter().map(|(by, _)| *by).max()).unwrap_or_default();
        let until = slack.max(self.cluster.sim.now()) + Time::us(1);
        while self.cluster.sim.next_at().is_some_and(|at| at <= until) {
            self.step()?;
        }
        let mut tries = 0;
        let result = loop {
            let asked = self.cluster.try_scheme(|s| (s.audit(), s.status()));
            match asked {
                Some(result) => break result,
                // The CPU is in the middle of something.
                None if tries < 10_000 && self.cluster.sim.step() => tries += 1,
                None => {
                    let why = "the memory node's CPU does not come to rest";
                    return Err(broken(Invariant::GoesOn, why));
                }
            }
        };
        let (audit, status) = result;
        audit.map_err(|e| broken(Invariant::Forgotten, e))?;
        let status = status.map_err(|e| broken(Invariant::GoesOn, e))?;
        if status.free != status.chunks || status.clients + status.leaving > 0 {
            let why = format!(
                "all have gone, and {} of {} chunks are free; {} are connected, {} leaving",
                status.free, status.chunks, status.clients, status.leaving
            );
            return Err(broken(Invariant::Forgotten, why));
        }
        let (sim, (start, len)) = (&self.cluster.sim, self.donated);
        // In a large memory it is not looked at after every step.
        self.tell(|o| o.look(|into| sim.reaches(start, len, into)));
        self.tell(|o| o.check_empty()).map_err(|why| broken(Invariant::Forgotten, why))
    }
}

fn broken(invariant: Invariant, why: impl ToString) -> Violation {
    Violation { invariant, why: why.to_string() }
}
