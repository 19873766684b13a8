//! The memory node's CPU: its cores, and the jobs that other fibers give it.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use pool::protocol::NodeHello;
use pool::{Settings, schemes};
use scheme::{ClientId, CpuEvents, NodeScheme, Offer, Worker};

use crate::fiber::{self, FiberId};
use crate::nic::{SimHooks, SimNic};
use crate::time::Time;
use crate::world::Sim;

/// A job for the memory node's CPU. Returns true when it is done; false to be called again after
/// the next quantum.
pub(super) type Job = Box<dyn FnMut(&mut Core) -> bool + Send>;

/// State that jobs and quanta work on.
pub(super) struct Core {
    pub scheme: Box<dyn NodeScheme>,
    /// The number of the last client.
    pub last: u32,
}

/// A memory node's CPU.
pub(super) struct NodeCpu {
    pub core: Mutex<Core>,
    jobs: Mutex<VecDeque<Job>>,
    /// The core that does jobs.
    pub fiber: OnceLock<FiberId>,
    /// The cores of the workers, if there are several.
    pub workers: OnceLock<Vec<FiberId>>,
    /// Number of workers within a quantum, which hold locks that jobs need.
    pub inside: AtomicU32,
    /// Whether workers must not start a quantum.
    paused: AtomicBool,
    pub settings: Settings,
    /// Functions of the node's NIC that contain windows.
    pub functions: u32,
    welcome: NodeHello,
    events: Option<Arc<dyn CpuEvents>>,
    /// The workers until they are started.
    parts: Mutex<Vec<Box<dyn Worker>>>,
    hooks: SimHooks,
    /// The error that stopped the CPU.
    pub failure: Mutex<Option<String>>,
}

/// First and longest sleep of the memory node's CPU while it polls its free queue.
const WATCH_MIN: Duration = Duration::from_micros(100);
const WATCH_MAX: Duration = Duration::from_millis(4);
/// Minimum duration of a quantum that did work.
const TURN: Time = Time(50_000);

impl NodeCpu {
    /// Creates the CPU of a memory node with this NIC.
    pub fn new(nic: &SimNic, settings: &Settings) -> Result<Self, pool::Error> {
        let node = settings.node()?;
        let mut scheme = schemes::nodes().node(nic, &node)?;
        let functions = scheme.functions();
        let hello = NodeHello::of(&node, functions, 1, scheme.terms());
        let offer = Offer { spares: scheme.spares(), ..hello.offer };
        let welcome = NodeHello { offer, ..hello };
        let cpu = scheme.cpu();
        Ok(Self {
            core: Mutex::new(Core { scheme, last: 0 }),
            jobs: Mutex::default(),
            fiber: OnceLock::new(),
            workers: OnceLock::new(),
            inside: AtomicU32::new(0),
            paused: AtomicBool::new(false),
            settings: settings.clone(),
            functions,
            welcome,
            events: cpu.events,
            parts: Mutex::new(cpu.workers),
            hooks: nic.hooks().clone(),
            failure: Mutex::default(),
        })
    }

    /// Starts the CPU, with one core or with a core per worker of the scheme.
    pub fn start(self: &Arc<Self>, sim: &mut Sim, name: &str) {
        let workers = std::mem::take(&mut *self.parts.lock());
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

    /// Returns the greeting for a connecting client.
    pub fn welcome(&self) -> NodeHello {
        self.welcome.clone()
    }

    fn run(&self, core: impl FnOnce(&Self) -> Result<(), pool::Error>) {
        if let Err(e) = core(self) {
            *self.failure.lock() = Some(e.to_string());
        }
    }

    /// The main loop of a worker's core.
    fn serve(&self, mut worker: Box<dyn Worker>) -> Result<(), pool::Error> {
        let events = worker.events();
        while !fiber::is_ending() {
            while self.paused.load(Relaxed) && !fiber::is_ending() {
                fiber::wait();
            }
            self.inside.fetch_add(1, Relaxed);
            let busy = worker.poll();
            self.inside.fetch_sub(1, Relaxed);
            // The managing core waits for this quantum to end, or for a quantum that did work.
            let may_go_on = self.paused.load(Relaxed) || matches!(busy, Ok(true));
            if may_go_on && !self.jobs.lock().is_empty() {
                self.hooks.wake(*self.fiber.get().expect("it was started"));
            }
            match busy? {
                true => fiber::charge(TURN),
                false => _ = events.wait(worker.next_poll().unwrap_or(Duration::MAX))?,
            }
        }
        Ok(())
    }

    /// The main loop of the core that does jobs while other cores serve.
    ///
    /// During jobs no worker is within a quantum, because all fibers run on one thread and a worker
    /// that is suspended within a quantum keeps its locks.
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
            // Unfinished jobs are called again after a worker's quantum, and when their time-out
            // may have passed.
            let asked = !self.jobs.lock().is_empty();
            let nap = asked.then(|| self.hooks.now() + Time::from(WATCH_MAX));
            self.hooks.wait_until(nap);
        }
        Ok(())
    }

    /// The main loop of the only core.
    fn work(&self) -> Result<(), pool::Error> {
        let events = self.events.clone();
        let mut nap = WATCH_MIN;
        while !fiber::is_ending() {
            let (busy, timeout) = {
                let core = &mut *self.core.lock();
                self.do_jobs(core);
                let busy = core.scheme.poll()?;
                // Unfinished jobs may finish after `nap`, or their time-out may have passed.
                let asked = !self.jobs.lock().is_empty();
                let watch = (asked || core.scheme.is_watching()).then_some(nap);
                (busy, [watch, core.scheme.next_poll()].into_iter().flatten().min())
            };
            if busy {
                nap = WATCH_MIN;
                fiber::charge(TURN);
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

    /// Gives the CPU a job.
    pub fn give(&self, job: Job) {
        self.jobs.lock().push_back(job);
        if let Some(fiber) = self.fiber.get() {
            self.hooks.wake(*fiber);
        }
    }

    /// Handles the end of a compute node's connection.
    pub fn leave(self: &Arc<Self>, client: ClientId) {
        self.give(Box::new(move |core| {
            // An unknown client has left before.
            let _ = core.scheme.retire(client);
            true
        }));
    }
}
