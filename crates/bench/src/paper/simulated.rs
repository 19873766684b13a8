//! Testbed under virtual time: a model of a paper's cluster.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use pool::{Options, Pool, schemes};
use scheme::GroupId;
use sim::{Cluster, ClusterSpec, NodeId, Params, SimHooks, SimNic, Time, Waits, fiber};

use super::barrier::{self, BarrierMember};
use super::load::{self, Load, Work};
use super::measure::{Outcome, Thread};
use super::testbed::Testbed;
use super::verb_times::{self, VerbTimes};
use crate::Error;
use units::Random;

/// Quantum of a thread's fiber: virtual time that it may accumulate before it yields.
const QUANTUM: Time = Time::us(1);
/// Quantum of threads that share a connection: beyond the time between two waits of a thread. A
/// post takes place under a lock of the connection. A fiber that yields within a post keeps the
/// lock, and the next fiber that wants the lock stops the simulator, which is one thread.
const QUANTUM_SHARED: Time = Time::us(1_000);

/// A simulated cluster.
pub struct SimulatedCluster {
    params: Arc<Params>,
    seed: u64,
    resources: RefCell<Vec<Resource>>,
}

/// Waits at a resource of the NICs during a whole run, with its set-up.
#[derive(Clone, Debug)]
pub struct Resource {
    /// The first memory node, or all compute nodes together.
    pub nodes: &'static str,
    /// The resource's name.
    pub name: &'static str,
    /// The waits of all requests.
    pub waits: Waits,
}

impl SimulatedCluster {
    /// A cluster with these parameters of the timing model.
    pub fn new(params: Params, seed: u64) -> Self {
        Self { params: Arc::new(params), seed, resources: RefCell::default() }
    }

    /// The waits at the NICs' resources in the last run.
    pub fn resources(&self) -> Vec<Resource> {
        self.resources.borrow().clone()
    }

    /// The timing model's parameters.
    pub fn params(&self) -> &Params {
        &self.params
    }

    fn cluster(&self, load: &Load) -> Result<Cluster, Error> {
        Ok(Cluster::new(&ClusterSpec {
            params: self.params.clone(),
            seed: self.seed,
            shuffled: false,
            compute_nodes: load.compute_nodes,
            memory_nodes: load.memory_nodes,
            settings: load.settings(),
        })?)
    }
}

/// Returns the waits at the resources of a cluster's NICs.
fn resources(cluster: &Cluster, compute_nodes: u16) -> Vec<Resource> {
    let mut all: Vec<Resource> = Vec::new();
    for node in 0..=compute_nodes {
        let nodes = if node == 0 { "memory node" } else { "compute nodes" };
        for (name, waits) in cluster.sim.waits(NodeId(node)) {
            match all.iter_mut().find(|r| (r.nodes, r.name) == (nodes, name)) {
                Some(resource) => resource.waits.join(&waits),
                None => all.push(Resource { nodes, name, waits }),
            }
        }
    }
    all
}

struct SimThread {
    index: u32,
    pools: Vec<Pool<SimNic>>,
    hooks: SimHooks,
    group: GroupId,
    member: BarrierMember,
}

impl Thread for SimThread {
    type Nic = SimNic;

    fn pools(&self) -> &[Pool<SimNic>] {
        &self.pools
    }

    fn index(&self) -> u32 {
        self.index
    }

    fn group(&self) -> GroupId {
        self.group
    }

    fn barrier(&self) -> &BarrierMember {
        &self.member
    }

    fn now_ns(&self) -> u64 {
        self.hooks.now().as_ns()
    }

    fn wait<F: Future>(&self, request: F) -> F::Output {
        fiber::block_on(request)
    }

    fn pause_ns(&self, ns: u64) {
        fiber::sleep(Time(ns * 1_000));
    }
}

impl Testbed for SimulatedCluster {
    fn simulated(&self) -> bool {
        true
    }

    fn nic(&self) -> &'static str {
        "sim"
    }

    fn run(&self, load: &Load) -> Result<Outcome, Error> {
        let nodes = u32::from(load.compute_nodes);
        let mut cluster = self.cluster(load)?;
        let idle = Options { groups: Some(1), ..load.options() };
        let _idle = (0..load.idle)
            .map(|_| cluster.connect_to_all(NodeId(1), idle.clone()))
            .collect::<Result<Vec<_>, _>>()?;
        let processes = (0..load.connections())
            .map(|i| cluster.connect_to_all(NodeId(1 + (i % nodes) as u16), load.options()))
            .collect::<Result<Vec<_>, _>>()?;
        cluster.start();
        let joined = Rc::new(RefCell::new(Ok(Outcome::default())));
        let quantum = if load.shared { QUANTUM_SHARED } else { QUANTUM };
        let mut fibers = Vec::new();
        for (at, member) in (0..load.threads).zip(barrier::members(load.threads)) {
            let each = load.threads_each();
            let connections = &processes[(at / each) as usize];
            let thread = SimThread {
                index: at,
                pools: connections.iter().map(|process| process.pool.clone()).collect(),
                hooks: connections[0].hooks.clone(),
                group: GroupId((at % each) as u16),
                member,
            };
            let (joined, load, rng) = (joined.clone(), load.clone(), Random::stream(self.seed, at));
            fibers.push(cluster.sim.spawn(format!("thread {at}"), quantum, move || {
                let result = load::run(&thread, &load, rng);
                let joined = &mut *joined.borrow_mut();
                match (&mut *joined, result) {
                    (Ok(all), Ok(one)) => all.join(&one),
                    (Ok(_), Err(error)) => *joined = Err(error),
                    (Err(_), _) => {}
                }
            }));
        }
        let run = cluster.sim.run_to_end(&fibers);
        if let Some(why) = cluster.failure() {
            return Err(Error::Node(why));
        }
        run?;
        *self.resources.borrow_mut() = resources(&cluster, load.compute_nodes);
        joined.replace(Ok(Outcome::default()))
    }

    fn verbs(&self, sizes: &[u64], rounds: u32) -> Result<VerbTimes, Error> {
        let mut cluster = self.cluster(&Load::new(schemes::STATIC_MR, Work::AllocateFree, 1))?;
        let (nic, sizes) = (cluster.nic().clone(), sizes.to_vec());
        let times = Rc::new(RefCell::new(None));
        let written = times.clone();
        let fiber = cluster.sim.spawn("the memory node's CPU", Time::ZERO, move || {
            let now = || nic.hooks().now().as_ns();
            *written.borrow_mut() = Some(verb_times::measure(&nic, &sizes, rounds, now));
        });
        cluster.sim.run_to_end(&[fiber])?;
        times.take().expect("the fiber has ended")
    }
}
