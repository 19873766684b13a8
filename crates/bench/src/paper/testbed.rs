//! Testbeds of experiments, and the testbed on this machine.

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use pool::{EmbeddedNode, Options, Pool, Settings};
use rnic::nic::SoftNic;
use scheme::GroupId;
use verbs::executor::block_on;

use super::barrier::{self, BarrierMember};
use super::load::{self, Load};
use super::measure::{Outcome, Thread};
use super::verb_times::{self, VerbTimes};
use crate::Error;
use units::Random;

/// Environment of an experiment: a simulated cluster, or this machine.
pub trait Testbed {
    /// True under virtual time.
    fn simulated(&self) -> bool;
    /// Name of the NIC in records.
    fn nic(&self) -> &'static str;
    /// Runs one measurement.
    ///
    /// # Errors
    /// Errors of the pool or of the simulation.
    fn run(&self, load: &Load) -> Result<Outcome, Error>;
    /// Times verbs that the memory node's CPU calls, on regions of these sizes.
    ///
    /// # Errors
    /// Errors of the verbs.
    fn verbs(&self, sizes: &[u64], rounds: u32) -> Result<VerbTimes, Error>;
}

/// A memory node on this machine.
pub trait Node: Send {
    /// Connects a client to the node.
    ///
    /// # Errors
    /// If the node does not answer.
    fn connect(&self, options: Options) -> Result<Pool, Error>;
}

/// The testbed on this machine: the threads of a load are real threads.
pub struct Machine<S> {
    start: S,
    nic: &'static str,
    seed: u64,
}

impl<S: Fn(&Settings) -> Result<Box<dyn Node>, Error>> Machine<S> {
    /// A testbed whose memory nodes `start` starts. `nic` is the name of the NIC in records.
    pub fn new(nic: &'static str, seed: u64, start: S) -> Self {
        Self { start, nic, seed }
    }
}

struct RealThread<'a> {
    index: u32,
    pools: &'a [Pool],
    group: GroupId,
    member: BarrierMember,
    epoch: Instant,
}

impl Thread for RealThread<'_> {
    type Nic = SoftNic;

    fn pools(&self) -> &[Pool] {
        self.pools
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
        self.epoch.elapsed().as_nanos() as u64
    }

    fn wait<F: Future>(&self, request: F) -> F::Output {
        block_on(request)
    }

    fn pause_ns(&self, ns: u64) {
        // A sleep takes at least 60 us on most machines, too long for short pauses.
        if ns > 1_000_000 {
            thread::sleep(Duration::from_nanos(ns));
            return;
        }
        let until = Instant::now() + Duration::from_nanos(ns);
        while Instant::now() < until {
            thread::yield_now();
        }
    }
}

impl<S: Fn(&Settings) -> Result<Box<dyn Node>, Error>> Testbed for Machine<S> {
    fn simulated(&self) -> bool {
        false
    }

    fn nic(&self) -> &'static str {
        self.nic
    }

    fn run(&self, load: &Load) -> Result<Outcome, Error> {
        let nodes = (0..load.memory_nodes)
            .map(|_| (self.start)(&load.settings()))
            .collect::<Result<Vec<_>, _>>()?;
        let connect = |options: Options| {
            nodes.iter().map(|node| node.connect(options.clone())).collect::<Result<Vec<Pool>, _>>()
        };
        let _idle = (0..load.idle)
            .map(|_| connect(Options { groups: Some(1), ..load.options() }))
            .collect::<Result<Vec<_>, _>>()?;
        let pools = (0..load.connections())
            .map(|_| connect(load.options()))
            .collect::<Result<Vec<_>, _>>()?;
        let barrier = Barrier::new(load.threads as usize);
        let epoch = Instant::now();
        let outcomes = thread::scope(|scope| {
            let start = |(at, member): (u32, BarrierMember)| {
                let (barrier, each, seed) = (&barrier, load.threads_each(), self.seed);
                let pools = &pools[(at / each) as usize];
                let group = GroupId((at % each) as u16);
                let thread = RealThread { index: at, pools, group, member, epoch };
                scope.spawn(move || {
                    barrier.wait();
                    load::run(&thread, load, Random::stream(seed, at))
                })
            };
            let members = barrier::members(load.threads);
            let threads: Vec<_> = (0..load.threads).zip(members).map(start).collect();
            threads
                .into_iter()
                .map(|t| t.join().expect("a measured thread does not panic"))
                .collect::<Result<Vec<Outcome>, Error>>()
        })?;
        let mut joined = Outcome::default();
        outcomes.iter().for_each(|one| joined.join(one));
        Ok(joined)
    }

    fn verbs(&self, sizes: &[u64], rounds: u32) -> Result<VerbTimes, Error> {
        let settings = Settings { donate_bytes: 1 << 20, chunk_bytes: 4096, ..Settings::default() };
        let node = (self.start)(&settings)?;
        let pool = node.connect(Options { groups: Some(1), ..Options::default() })?;
        let epoch = Instant::now();
        verb_times::measure(pool.nic(), sizes, rounds, || epoch.elapsed().as_nanos() as u64)
    }
}

impl Node for Arc<EmbeddedNode> {
    fn connect(&self, options: Options) -> Result<Pool, Error> {
        Ok(Pool::embedded_in(self, options)?)
    }
}

/// The testbed on this machine with the memory node in the same process; the threads run the NIC.
pub fn inline(seed: u64) -> impl Testbed {
    Machine::new("inline", seed, |settings: &Settings| {
        Ok(Box::new(Arc::new(EmbeddedNode::start(settings)?)) as Box<dyn Node>)
    })
}
