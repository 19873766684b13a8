//! The memory node's CPU: what it does in a turn, and who has it do something.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use pool::protocol::Welcome;
use pool::scheme::{ClientId, NodeScheme, Worker};
use pool::{AnyNode, Settings};

use crate::fiber::{self, FiberId};
use crate::nic::{SimHooks, SimNic};
use crate::time::Time;
use crate::world::Sim;

/// Something that the memory node's CPU is asked to do: true when it is done, false if it is to be asked
/// again after a turn.
pub(super) type Job = Box<dyn FnMut(&mut Core) -> bool + Send>;

/// What jobs and turns work on.
pub(super) struct Core {
    pub scheme: AnyNode<SimNic>,
    /// The number of the last client.
    pub last: u32,
}

/// A memory node's CPU.
pub(super) struct NodeCpu {
    pub core: Mutex<Core>,
    jobs: Mutex<VecDeque<Job>>,
    /// The core that does jobs.
    pub fiber: OnceLock<FiberId>,
    /// Workers' cores, if there are several.
    pub workers: OnceLock<Vec<FiberId>>,
    /// Workers that are in a turn, and hold what jobs need.
    pub inside: AtomicU32,
    /// Workers are to stay outside.
    paused: AtomicBool,
    pub settings: Settings,
    /// Of its NIC, with windows.
    pub functions: u32,
    hooks: SimHooks,
    /// Why it has given up.
    pub failure: Mutex<Option<String>>,
}

/// First and longest sleep of the memory node's CPU while it watches its free queue.
const WATCH_MIN: Duration = Duration::from_micros(100);
const WATCH_MAX: Duration = Duration::from_millis(4);
/// What a turn that did something takes at least.
const TURN: Time = Time(50_000);

impl NodeCpu {
    /// That of a memory node with this NIC.
    pub fn new(nic: &SimNic, settings: &Settings) -> Result<Self, pool::Error> {
        let scheme = AnyNode::new(nic, settings)?;
        let functions = scheme.functions();
        Ok(Self {
            core: Mutex::new(Core { scheme, last: 0 }),
            jobs: Mutex::default(),
            fiber: OnceLock::new(),
            workers: OnceLock::new(),
            inside: AtomicU32::new(0),
            paused: AtomicBool::new(false),
            settings: settings.clone(),
            functions,
            hooks: nic.hooks().clone(),
            failure: Mutex::default(),
        })
    }

    /// Starts it: one core, or as many as the scheme has workers.
    pub fn start(self: &Arc<Self>, sim: &mut Sim, name: &str) {
        let workers = {
            let scheme = &mut self.core.lock().scheme;
            if scheme.workers() > 1 { scheme.take_workers() } else { Vec::new() }
        };
        let mut cores = Vec::new();
        for (i, worker) in workers.into_iter().enumerate() {
            let node = self.clone();
            let name = format!("{name}, core {i}");
            cores.push(sim.spawn(name, Time::ZERO, move || node.run(|n| n.serve(worker))));
        }
        let node = self.clone();
        let main = match cores.is_empty() {
            true => sim.spawn(name, Time::ZERO, move || node.run(NodeCpu::work)),
            false => sim.spawn(name, Time::ZERO, move || node.run(NodeCpu::manage)),
        };
        let first = self.fiber.set(main).and(self.workers.set(cores).map_err(|_| main));
        assert!(first.is_ok(), "a cluster starts once");
    }

    /// What it says to who connects.
    pub fn welcome(&self) -> Welcome {
        Welcome::of(&self.settings, self.functions, 1)
    }

    fn run(&self, core: impl FnOnce(&Self) -> Result<(), pool::Error>) {
        if let Err(e) = core(self) {
            *self.failure.lock() = Some(e.to_string());
        }
    }

    /// A worker's core.
    fn serve(&self, mut worker: Box<dyn Worker>) -> Result<(), pool::Error> {
        let events = worker.events();
        while !fiber::is_ending() {
            while self.paused.load(Relaxed) && !fiber::is_ending() {
                fiber::wait();
            }
            self.inside.fetch_add(1, Relaxed);
            let busy = worker.turn();
            self.inside.fetch_sub(1, Relaxed);
            // Who manages waits for this turn to end, or for one that did something.
            let may_go_on = self.paused.load(Relaxed) || matches!(busy, Ok(true));
            if may_go_on && !self.jobs.lock().is_empty() {
                self.hooks.wake(*self.fiber.get().expect("it was started"));
            }
            match busy? {
                true => fiber::spend(TURN),
                false => _ = events.wait(Duration::MAX)?,
            }
        }
        Ok(())
    }

    /// The core that does jobs where others serve: none of them is in a turn meanwhile, since all of
    /// them run on one thread, and who stands in a turn keeps its locks.
    fn manage(&self) -> Result<(), pool::Error> {
        while !fiber::is_ending() {
            if self.jobs.lock().is_empty() {
                fiber::wait();
                continue;
            }
            self.paused.store(true, Relaxed);
            while self.inside.load(Relaxed) > 0 && !fiber::is_ending() {
                fiber::wait();
            }
            self.do_jobs(&mut self.core.lock());
            self.paused.store(false, Relaxed);
            for worker in self.workers.get().into_iter().flatten() {
                self.hooks.wake(*worker);
            }
            // What is left is asked again after somebody's turn, and when it may be too late.
            let asked = !self.jobs.lock().is_empty();
            let nap = asked.then(|| self.hooks.now() + Time::from(WATCH_MAX));
            self.hooks.wait_until(nap);
        }
        Ok(())
    }

    /// The only core.
    fn work(&self) -> Result<(), pool::Error> {
        let events = self.core.lock().scheme.events();
        let mut nap = WATCH_MIN;
        while !fiber::is_ending() {
            let (busy, timeout) = {
                let core = &mut *self.core.lock();
                self.do_jobs(core);
                let busy = core.scheme.turn()?;
                // What could not be answered yet may be by then, or too late.
                let asked = !self.jobs.lock().is_empty();
                let watch = (asked || core.scheme.is_watching()).then_some(nap);
                (busy, [watch, core.scheme.next_look()].into_iter().flatten().min())
            };
            if busy {
                nap = WATCH_MIN;
                fiber::spend(TURN);
                continue;
            }
            nap = (nap * 2).min(WATCH_MAX);
            match &events {
                Some(events) => _ = events.wait(timeout.unwrap_or(Duration::MAX))?,
                None => self.hooks.wait_until(timeout.map(|t| self.hooks.now() + Time::from(t))),
            }
        }
        Ok(())
    }

    fn do_jobs(&self, core: &mut Core) {
        let jobs = std::mem::take(&mut *self.jobs.lock());
        let left: Vec<Job> = jobs.into_iter().filter_map(|mut j| (!j(core)).then_some(j)).collect();
        self.jobs.lock().extend(left);
    }

    /// Has it do something.
    pub fn give(&self, job: Job) {
        self.jobs.lock().push_back(job);
        if let Some(fiber) = self.fiber.get() {
            self.hooks.wake(*fiber);
        }
    }

    /// A compute node's connection has ended.
    pub fn leave(self: &Arc<Self>, client: ClientId) {
        self.give(Box::new(move |core| {
            // One that is not known has left before.
            let _ = core.scheme.retire(client);
            true
        }));
    }
}
