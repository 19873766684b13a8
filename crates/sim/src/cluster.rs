//! A memory node and compute nodes in a simulated world.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fabric::PeerAddress;
use parking_lot::Mutex;
use pool::client::control::ControlPlane;
use pool::protocol::{Status, VERSION, Welcome};
use pool::scheme::{Admission, Admitted, ClientId, GroupId, Lane, NodeScheme, Worker};
use pool::{AnyNode, Options, Pool, Settings};
use rnic::port::inline::InlineFunction;
use rnic::verbs::FunctionLimits;

use crate::Error;
use crate::fiber::{self, FiberId};
use crate::nic::{SimHooks, SimNic};
use crate::params::Params;
use crate::state::NodeId;
use crate::time::Time;
use crate::world::{Shared, Sim};

/// What a cluster is made of.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    /// The timing model's parameters.
    pub params: Arc<Params>,
    /// Decides all that is left to chance.
    pub seed: u64,
    /// What happens at the same moment happens in an order that the seed decides.
    pub shuffled: bool,
    /// Compute nodes; the memory node is node 0, they are 1 and up.
    pub compute_nodes: u16,
    /// The memory node's settings.
    pub settings: Settings,
}

/// A simulated memory node with its compute nodes.
pub struct Cluster {
    /// The world. It ends before the node, whose CPU lives in it.
    pub sim: Sim,
    node: Arc<NodeCpu>,
    nic: SimNic,
}

/// A compute node's process: what it uses, and what ends with it.
pub struct Process {
    /// Its connection to the memory node.
    pub pool: Pool<SimNic>,
    /// Its function of the NIC.
    pub function: InlineFunction,
    /// Its hooks: the clock.
    pub hooks: SimHooks,
    /// Its number at the memory node.
    pub client: ClientId,
}

/// Connects processes to a cluster's memory node, also from within fibers.
#[derive(Clone)]
pub struct Connector {
    shared: Arc<Shared>,
    node: Arc<NodeCpu>,
}

/// A process's control connection, as the memory node sees it.
#[derive(Clone, Default)]
pub struct Link(Arc<Mutex<LinkState>>);

#[derive(Default)]
struct LinkState {
    client: Option<ClientId>,
    /// It has ended.
    ended: bool,
    /// Its process has died: nobody waits for an answer.
    dead: bool,
}

impl Link {
    /// The number that the memory node gave its process.
    pub fn client(&self) -> Option<ClientId> {
        self.0.lock().client
    }
}

/// Something that the memory node's CPU is asked to do: true when it is done, false if it is to be asked
/// again after a turn.
type Job = Box<dyn FnMut(&mut Core) -> bool + Send>;

struct Core {
    scheme: AnyNode<SimNic>,
    last: u32,
}

struct NodeCpu {
    core: Mutex<Core>,
    jobs: Mutex<VecDeque<Job>>,
    /// The core that does jobs.
    fiber: OnceLock<FiberId>,
    /// Workers' cores, if there are several.
    workers: OnceLock<Vec<FiberId>>,
    /// Workers that are in a turn, and hold what jobs need.
    inside: AtomicU32,
    /// Workers are to stay outside.
    paused: AtomicBool,
    settings: Settings,
    /// Of its NIC, with windows.
    functions: u32,
    hooks: SimHooks,
    failure: Mutex<Option<String>>,
}

/// First and longest sleep of the memory node's CPU while it watches its free queue.
const WATCH_MIN: Duration = Duration::from_micros(100);
const WATCH_MAX: Duration = Duration::from_millis(4);
/// What a turn that did something takes at least.
const TURN: Time = Time(50_000);

impl Cluster {
    /// Makes it; no time has passed for its programs then.
    pub fn new(spec: &ClusterSpec) -> Result<Self, Error> {
        let mut params = spec.params.clone();
        if let Some(windows) = spec.settings.nic_windows {
            Arc::make_mut(&mut params).nic.windows = windows;
        }
        let sim = Sim::new(&params, spec.compute_nodes + 1, spec.seed, spec.shuffled);
        let nic = SimHooks::nic(sim.shared(), NodeId(0), true, sim.shared().nic.physical());
        let scheme = AnyNode::new(&nic, &spec.settings)?;
        let functions = scheme.functions();
        let node = Arc::new(NodeCpu {
            core: Mutex::new(Core { scheme, last: 0 }),
            jobs: Mutex::default(),
            fiber: OnceLock::new(),
            workers: OnceLock::new(),
            inside: AtomicU32::new(0),
            paused: AtomicBool::new(false),
            settings: spec.settings.clone(),
            functions,
            hooks: nic.hooks().clone(),
            failure: Mutex::default(),
        });
        Ok(Self { sim, node, nic })
    }

    /// The memory node's NIC.
    pub fn nic(&self) -> &SimNic {
        &self.nic
    }

    /// Functions of the memory node's NIC that windows are in. They are the first ones of all.
    pub fn functions(&self) -> u32 {
        self.node.functions
    }

    /// What connects processes.
    pub fn connector(&self) -> Connector {
        Connector { shared: self.sim.shared().clone(), node: self.node.clone() }
    }

    /// Connects a process of compute node `node` (1 and up). Before [`Cluster::start`].
    pub fn connect(&self, node: NodeId, options: Options) -> Result<Process, Error> {
        let connector = self.connector();
        let function = connector.function()?;
        let nic = connector.nic(node, &function);
        let hooks = nic.hooks().clone();
        let control = connector.control(&nic, Link::default());
        let pool = Pool::over(nic, Box::new(control), options)?;
        let client = ClientId(pool.client());
        Ok(Process { pool, function, hooks, client })
    }

    /// Starts the memory node's CPU: one core, or as many as the scheme has workers.
    pub fn start(&mut self) {
        let workers = {
            let scheme = &mut self.node.core.lock().scheme;
            if scheme.workers() > 1 { scheme.take_workers() } else { Vec::new() }
        };
        let mut cores = Vec::new();
        for (i, worker) in workers.into_iter().enumerate() {
            let node = self.node.clone();
            let name = format!("memory node, core {i}");
            cores.push(self.sim.spawn(name, Time::ZERO, move || node.run(|n| n.serve(worker))));
        }
        let node = self.node.clone();
        let main = match cores.is_empty() {
            true => self.sim.spawn("memory node", Time::ZERO, move || node.run(NodeCpu::work)),
            false => self.sim.spawn("memory node", Time::ZERO, move || node.run(NodeCpu::manage)),
        };
        let first = self.node.fiber.set(main).and(self.node.workers.set(cores).map_err(|_| main));
        assert!(first.is_ok(), "a cluster starts once");
    }

    /// A process has died: its function is gone with all that it had; the memory node learns of it.
    pub fn crash(&mut self, fiber: FiberId, function: &InlineFunction, client: ClientId) {
        function.remove();
        self.sim.shared().look();
        self.sim.kill(fiber);
        self.node.leave(client);
    }

    /// A fiber of a process has died, and with it its function, if it has one by now, and its connection.
    pub fn crash_linked(&mut self, fiber: FiberId, function: Option<&InlineFunction>, link: &Link) {
        if let Some(function) = function {
            function.remove();
            self.sim.shared().look();
        }
        self.sim.kill(fiber);
        let client = {
            let mut link = link.0.lock();
            (link.ended, link.dead) = (true, true);
            link.client
        };
        if let Some(client) = client {
            self.node.leave(client);
        }
    }

    /// The fibers of the memory node's CPU, once it is started.
    pub fn node_fibers(&self) -> Vec<FiberId> {
        let workers = self.node.workers.get().into_iter().flatten();
        self.node.fiber.get().into_iter().chain(workers).copied().collect()
    }

    /// Looks at the memory node's scheme, if its CPU stands between two turns.
    pub fn try_scheme<T>(&self, f: impl FnOnce(&mut AnyNode<SimNic>) -> T) -> Option<T> {
        let inside = self.node.inside.load(Relaxed) > 0;
        let core = self.node.core.try_lock().filter(|_| !inside);
        core.map(|mut core| f(&mut core.scheme))
    }

    /// Looks at the memory node's scheme, as soon as its CPU stands between two turns.
    pub fn with_scheme<T>(
        &mut self,
        f: impl FnOnce(&mut AnyNode<SimNic>) -> T,
    ) -> Result<T, Error> {
        let node = self.node.clone();
        self.sim.run_until(|_| !node.core.is_locked() && node.inside.load(Relaxed) == 0)?;
        let mut core = node.core.lock();
        Ok(f(&mut core.scheme))
    }

    /// Why the memory node's CPU has given up, if it has.
    pub fn failure(&self) -> Option<String> {
        self.node.failure.lock().clone()
    }
}

impl Connector {
    /// A function of the NIC for a new process.
    pub fn function(&self) -> Result<InlineFunction, Error> {
        let made = self.shared.nic.function(FunctionLimits::NONE);
        made.map_err(|e| Error::Failed { attempt: "a new process".into(), why: e.to_string() })
    }

    /// The verbs of a process on compute node `node` (1 and up).
    pub fn nic(&self, node: NodeId, function: &InlineFunction) -> SimNic {
        SimHooks::nic(&self.shared, node, false, function.clone())
    }

    /// A control connection.
    pub fn control(&self, nic: &SimNic, link: Link) -> SimControl {
        SimControl {
            node: self.node.clone(),
            welcome: self.node.welcome(),
            link,
            hooks: nic.hooks().clone(),
        }
    }
}

impl NodeCpu {
    fn welcome(&self) -> Welcome {
        let s = &self.settings;
        Welcome {
            version: VERSION,
            scheme: s.scheme,
            control: s.control,
            chunk_bytes: s.chunk_bytes,
            chunks: s.chunks(),
            group_size: s.group_size,
            functions: self.functions,
            credits: s.credits,
            groups_max: s.groups_max,
            incarnation: 1,
            budget_chunks: s.budget.chunks,
            separation: s.separation,
            contention_control: s.contention_control,
            roce: None,
            proof: None,
        }
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

    fn give(&self, job: Job) {
        self.jobs.lock().push_back(job);
        if let Some(fiber) = self.fiber.get() {
            self.hooks.wake(*fiber);
        }
    }

    /// A compute node's connection has ended.
    fn leave(self: &Arc<Self>, client: ClientId) {
        self.give(Box::new(move |core| {
            // One that is not known has left before.
            let _ = core.scheme.retire(client);
            true
        }));
    }
}

/// A compute node's control connection: messages to the memory node's CPU, which answers when it has
/// time.
pub struct SimControl {
    node: Arc<NodeCpu>,
    welcome: Welcome,
    link: Link,
    hooks: SimHooks,
}

impl SimControl {
    /// Has the memory node's CPU do `job`, which is asked again after each turn until it gives something.
    fn ask<T: Send + 'static>(
        &self,
        mut job: impl FnMut(&mut Core) -> Option<T> + Send + 'static,
    ) -> Result<T, pool::Error> {
        if fiber::is_ending() {
            return Err(gone());
        }
        if fiber::current().is_none() {
            let core = &mut *self.node.core.lock();
            loop {
                if let Some(result) = job(core) {
                    return Ok(result);
                }
                core.scheme.turn()?;
                self.hooks.pump();
            }
        }
        let latency = self.hooks.control_latency();
        fiber::sleep(latency);
        let answer = Arc::new(Mutex::new(None));
        let (told, waker, link) = (answer.clone(), fiber::waker(), self.link.clone());
        self.node.give(Box::new(move |core| {
            if link.0.lock().dead {
                return true;
            }
            let Some(result) = job(core) else { return false };
            *told.lock() = Some(result);
            waker.wake_by_ref();
            true
        }));
        loop {
            if fiber::is_ending() {
                return Err(gone());
            }
            if let Some(result) = answer.lock().take() {
                fiber::sleep(latency);
                return Ok(result);
            }
            fiber::wait();
        }
    }

    fn client(&self) -> Result<ClientId, pool::Error> {
        self.link.client().ok_or_else(gone)
    }
}

fn gone() -> pool::Error {
    pool::Error::Gone {
        attempt: "asking the memory node".into(),
        why: "this simulated process has ended".into(),
    }
}

impl ControlPlane for SimControl {
    fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    fn admit(&self, admission: &Admission) -> Result<Admitted, pool::Error> {
        let (admission, link) = (admission.clone(), self.link.clone());
        self.ask(move |core| {
            if link.0.lock().ended {
                return Some(Err(gone()));
            }
            core.last += 1;
            let admitted = core.scheme.admit(ClientId(core.last), &admission);
            if let Ok(admitted) = &admitted {
                let client = ClientId(admitted.client);
                let mut link = link.0.lock();
                link.client = Some(client);
                // It died while it was admitted.
                if link.ended {
                    let _ = core.scheme.retire(client);
                }
            }
            Some(admitted)
        })?
    }

    fn await_memory(&self, timeout: Duration) -> Result<bool, pool::Error> {
        let client = self.client()?;
        let (hooks, deadline) = (self.hooks.clone(), self.hooks.now() + Time::from(timeout));
        self.ask(move |core| match core.scheme.client_waits(client) {
            Ok(false) => Some(Ok(true)),
            Ok(true) if hooks.now() >= deadline => Some(Ok(false)),
            Ok(true) => None,
            Err(e) => Some(Err(e)),
        })?
    }

    fn reset_management(&self) -> Result<Vec<PeerAddress>, pool::Error> {
        let client = self.client()?;
        let peers = self.ask(move |core| core.scheme.reset_management(client).transpose())??;
        Ok(peers.into_iter().map(|qpn| self.peer(qpn)).collect())
    }

    fn reset_access(&self, group: GroupId, lane: Lane) -> Result<PeerAddress, pool::Error> {
        let client = self.client()?;
        let peer = self.ask(move |core| Some(core.scheme.reset_access(client, group, lane)))??;
        Ok(self.peer(peer))
    }

    fn status(&self) -> Result<Status, pool::Error> {
        let node = self.ask(|core| Some(core.scheme.status()))??;
        let settings = &self.node.settings;
        let donated_bytes = settings.chunks() * settings.chunk_bytes;
        Ok(Status { node, donated_bytes, nic: "simulated".into(), ..Status::default() })
    }

    fn audit(&self) -> Result<(), pool::Error> {
        self.ask(|core| Some(core.scheme.audit()))?
    }

    fn goodbye(&self) -> Result<(), pool::Error> {
        let client = {
            let mut link = self.link.0.lock();
            if std::mem::replace(&mut link.ended, true) {
                return Ok(());
            }
            link.client
        };
        let Some(client) = client else { return Ok(()) };
        // A world that ends, or a process that died, has nobody to say goodbye to.
        if fiber::current().is_none() || fiber::is_ending() {
            return Ok(());
        }
        let mut begun = false;
        self.ask(move |core| {
            if !begun {
                begun = true;
                if let Err(e) = core.scheme.retire(client) {
                    return Some(Err(e));
                }
            }
            core.scheme.is_retired(client).then_some(Ok(()))
        })?
    }

    fn check_alive(&self) -> Result<(), pool::Error> {
        match &*self.node.failure.lock() {
            None => Ok(()),
            Some(why) => Err(pool::Error::Gone {
                attempt: "looking for the memory node".into(),
                why: why.clone(),
            }),
        }
    }

    fn descriptors(&self) -> Vec<i32> {
        Vec::new()
    }
}
