//! Memory nodes and compute nodes in a simulated world; by default there is one memory node.

mod control;
mod cpu;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use parking_lot::Mutex;
use pool::{Options, Pool, Settings};
use rnic::limits::FunctionLimits;
use rnic::port::inline::InlineFunction;
use scheme::{ClientId, NodeScheme};

pub use control::SimControl;
use cpu::NodeCpu;

use crate::Error;
use crate::fiber::FiberId;
use crate::ids::NodeId;
use crate::nic::{SimHooks, SimNic};
use crate::params::Params;
use crate::world::{Shared, Sim};

/// Configuration of a cluster.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    /// The timing model's parameters.
    pub params: Arc<Params>,
    /// Determines all random decisions.
    pub seed: u64,
    /// The seed also decides the order of simultaneous events.
    pub shuffled: bool,
    /// Number of compute nodes. Node 0 is the first memory node, then come the compute nodes, then
    /// further memory nodes.
    pub compute_nodes: u16,
    /// Number of memory nodes, at least 1; must be 1 for schemes with privileged QPs
    /// (`onesidedmw`).
    pub memory_nodes: u16,
    /// The settings of each memory node.
    pub settings: Settings,
}

/// Simulated memory nodes with their compute nodes. Methods without a memory-node argument refer to
/// the first memory node.
pub struct Cluster {
    /// The world. It is dropped before the memory nodes, whose CPUs run in it.
    pub sim: Sim,
    node: Arc<NodeCpu>,
    nic: SimNic,
    /// Further memory nodes, with the NICs that keep their functions open.
    others: Vec<(Arc<NodeCpu>, SimNic)>,
}

/// A compute node's process, in relation to one memory node: its resources, which end with it.
pub struct Process {
    /// The connection to the memory node.
    pub pool: Pool<SimNic>,
    /// The process's function of the NIC.
    pub function: InlineFunction,
    /// The hooks, which contain the clock.
    pub hooks: SimHooks,
    /// The client number at the memory node.
    pub client: ClientId,
}

/// Connects processes to a memory node of a cluster; also usable within fibers.
#[derive(Clone)]
pub struct Connector {
    shared: Arc<Shared>,
    node: Arc<NodeCpu>,
}

/// A process's control connection, from the memory node's side.
#[derive(Clone, Default)]
pub struct Link(Arc<Mutex<LinkState>>);

#[derive(Default)]
struct LinkState {
    client: Option<ClientId>,
    /// Whether the connection has ended.
    ended: bool,
    /// Whether the process has died, so that it waits for no answer.
    dead: bool,
}

impl Link {
    /// Returns the client number that the memory node assigned.
    pub fn client(&self) -> Option<ClientId> {
        self.0.lock().client
    }
}

impl Cluster {
    /// Creates a cluster. No time has passed for its programs.
    pub fn new(spec: &ClusterSpec) -> Result<Self, Error> {
        let mut params = spec.params.clone();
        if let Some(windows) = spec.settings.nic_windows {
            Arc::make_mut(&mut params).nic.windows = windows;
        }
        let further = spec.memory_nodes.saturating_sub(1);
        let sim = Sim::new(&params, spec.compute_nodes, 1 + further, spec.seed, spec.shuffled);
        let physical = sim.shared().nic.physical();
        let made = |id, function| {
            let nic = SimHooks::nic(sim.shared(), id, true, function);
            Ok::<_, Error>((Arc::new(NodeCpu::new(&nic, &spec.settings)?), nic))
        };
        let (node, nic) = made(NodeId(0), physical.clone())?;
        let other = |i| {
            let function = physical.open().map_err(|e| Error::Failed {
                attempt: "another memory node".into(),
                why: e.to_string(),
            })?;
            made(NodeId(spec.compute_nodes + i), function)
        };
        let others = (1..=further).map(other).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { sim, node, nic, others })
    }

    /// Returns the memory node's NIC.
    pub fn nic(&self) -> &SimNic {
        &self.nic
    }

    /// Returns the number of functions of the memory node's NIC that contain windows. They are the
    /// first functions.
    pub fn functions(&self) -> u32 {
        self.node.functions
    }

    /// Returns a connector to the first memory node.
    pub fn connector(&self) -> Connector {
        self.connector_to(0)
    }

    /// Returns a connector to a memory node. Panics if that node does not exist.
    pub fn connector_to(&self, memory_node: u16) -> Connector {
        let node = match memory_node {
            0 => &self.node,
            _ => &self.others[memory_node as usize - 1].0,
        };
        Connector { shared: self.sim.shared().clone(), node: node.clone() }
    }

    /// Connects a process of compute node `node` (1 and up). Must precede [`Cluster::start`].
    pub fn connect(&self, node: NodeId, options: Options) -> Result<Process, Error> {
        let connector = self.connector();
        connector.connect(node, connector.function()?, options)
    }

    /// Connects a process to every memory node, in order. Must precede [`Cluster::start`].
    pub fn connect_to_all(&self, node: NodeId, options: Options) -> Result<Vec<Process>, Error> {
        let function = self.connector().function()?;
        (0..=self.others.len() as u16)
            .map(|at| self.connector_to(at).connect(node, function.clone(), options.clone()))
            .collect()
    }

    /// Starts the memory nodes' CPUs, with one core each or with a core per worker of the scheme.
    pub fn start(&mut self) {
        self.node.start(&mut self.sim, "memory node");
        for (i, (node, _)) in (2..).zip(&self.others) {
            node.start(&mut self.sim, &format!("memory node {i}"));
        }
    }

    /// Kills a process: removes its function with all objects, and tells the memory node.
    pub fn crash(&mut self, fiber: FiberId, function: &InlineFunction, client: ClientId) {
        function.remove();
        self.sim.shared().collect_work();
        self.sim.kill(fiber);
        self.node.leave(client);
    }

    /// Kills a fiber of a process, and with it the process's function, if it has one yet, and
    /// connection.
    pub fn crash_linked(&mut self, fiber: FiberId, function: Option<&InlineFunction>, link: &Link) {
        if let Some(function) = function {
            function.remove();
            self.sim.shared().collect_work();
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

    /// Returns the fibers of the memory node's CPU, once it is started.
    pub fn node_fibers(&self) -> Vec<FiberId> {
        let workers = self.node.workers.get().into_iter().flatten();
        self.node.fiber.get().into_iter().chain(workers).copied().collect()
    }

    /// Calls `f` with the memory node's scheme if no core is within a quantum of work.
    pub fn try_scheme<T>(&self, f: impl FnOnce(&mut (dyn NodeScheme + 'static)) -> T) -> Option<T> {
        let inside = self.node.inside.load(Relaxed) > 0;
        let core = self.node.core.try_lock().filter(|_| !inside);
        core.map(|mut core| f(&mut *core.scheme))
    }

    /// Calls `f` with the memory node's scheme as soon as no core is within a quantum of work.
    pub fn with_scheme<T>(
        &mut self,
        f: impl FnOnce(&mut (dyn NodeScheme + 'static)) -> T,
    ) -> Result<T, Error> {
        let node = self.node.clone();
        self.sim.run_until(|_| !node.core.is_locked() && node.inside.load(Relaxed) == 0)?;
        let mut core = node.core.lock();
        Ok(f(&mut *core.scheme))
    }

    /// Returns the error that stopped a memory node's CPU, if any.
    pub fn failure(&self) -> Option<String> {
        let others = self.others.iter().map(|(node, _)| node);
        std::iter::once(&self.node).chain(others).find_map(|node| node.failure.lock().clone())
    }
}

impl Connector {
    /// Creates a function of the NIC for a new process.
    pub fn function(&self) -> Result<InlineFunction, Error> {
        let made = self.shared.nic.function(FunctionLimits::NONE);
        made.map_err(|e| Error::Failed { attempt: "a new process".into(), why: e.to_string() })
    }

    /// Returns the verbs of a process on compute node `node` (1 and up).
    pub fn nic(&self, node: NodeId, function: &InlineFunction) -> SimNic {
        SimHooks::nic(&self.shared, node, false, function.clone())
    }

    /// Connects a process that has this function.
    fn connect(
        &self,
        node: NodeId,
        function: InlineFunction,
        options: Options,
    ) -> Result<Process, Error> {
        let nic = self.nic(node, &function);
        let hooks = nic.hooks().clone();
        let control = self.control(&nic, Link::default());
        let pool = Pool::over(nic, Box::new(control), options)?;
        let client = ClientId(pool.client());
        Ok(Process { pool, function, hooks, client })
    }

    /// Creates a control connection.
    pub fn control(&self, nic: &SimNic, link: Link) -> SimControl {
        SimControl::new(&self.node, nic, link)
    }
}
