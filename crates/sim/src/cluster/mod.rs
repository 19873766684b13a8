//! Memory nodes and compute nodes in a simulated world: one memory node, unless it is said that there are more.

mod control;
mod cpu;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use parking_lot::Mutex;
use pool::scheme::ClientId;
use pool::{AnyNode, Options, Pool, Settings};
use rnic::port::inline::InlineFunction;
use rnic::verbs::FunctionLimits;

pub use control::SimControl;
use cpu::NodeCpu;

use crate::Error;
use crate::fiber::FiberId;
use crate::nic::{SimHooks, SimNic};
use crate::params::Params;
use crate::state::NodeId;
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
    /// Compute nodes; the memory node is node 0, they are 1 and up, and further memory nodes follow.
    pub compute_nodes: u16,
    /// Memory nodes, at least 1; 1 for schemes with privileged QPs (`onesidedmw`).
    pub memory_nodes: u16,
    /// The settings of each memory node.
    pub settings: Settings,
}

/// A simulated memory node with its compute nodes. Where a cluster has several memory nodes, what does not name one is
/// about the first.
pub struct Cluster {
    /// The world. It ends before the memory nodes, whose CPUs live in it.
    pub sim: Sim,
    node: Arc<NodeCpu>,
    nic: SimNic,
    /// Memory nodes besides, with the NICs that keep their functions.
    others: Vec<(Arc<NodeCpu>, SimNic)>,
}

/// A compute node's process, as far as one memory node is concerned: what it uses, and what ends with it.
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

/// Connects processes to a memory node of a cluster, also from within fibers.
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

impl Cluster {
    /// Makes it; no time has passed for its programs then.
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
        self.connector_to(0)
    }

    /// What connects processes to a memory node. Panics if there is no such one.
    pub fn connector_to(&self, memory_node: u16) -> Connector {
        let node = match memory_node {
            0 => &self.node,
            _ => &self.others[memory_node as usize - 1].0,
        };
        Connector { shared: self.sim.shared().clone(), node: node.clone() }
    }

    /// Connects a process of compute node `node` (1 and up). Before [`Cluster::start`].
    pub fn connect(&self, node: NodeId, options: Options) -> Result<Process, Error> {
        let connector = self.connector();
        connector.connect(node, connector.function()?, options)
    }

    /// Connects a process to every memory node, the first one first. Before [`Cluster::start`].
    pub fn connect_to_all(&self, node: NodeId, options: Options) -> Result<Vec<Process>, Error> {
        let function = self.connector().function()?;
        (0..=self.others.len() as u16)
            .map(|at| self.connector_to(at).connect(node, function.clone(), options.clone()))
            .collect()
    }

    /// Starts the memory nodes' CPUs: one core each, or as many as the scheme has workers.
    pub fn start(&mut self) {
        self.node.start(&mut self.sim, "memory node");
        for (i, (node, _)) in (2..).zip(&self.others) {
            node.start(&mut self.sim, &format!("memory node {i}"));
        }
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

    /// Why a memory node's CPU has given up, if one has.
    pub fn failure(&self) -> Option<String> {
        let others = self.others.iter().map(|(node, _)| node);
        std::iter::once(&self.node).chain(others).find_map(|node| node.failure.lock().clone())
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

    /// A control connection.
    pub fn control(&self, nic: &SimNic, link: Link) -> SimControl {
        SimControl::new(&self.node, nic, link)
    }
}
