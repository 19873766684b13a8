//! The load of one measurement: threads of compute nodes that run the same loop.
//!
//! The loop is the same code under virtual time and on a clock; the two differ in their [`Thread`].

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use pool::schemes::patronus::Extension;
use pool::{DomainToken, Object, Options, Scheme, Settings};
use scheme::info::AccessKind;
use serde_json::Value;

use super::churn::{self, Churn};
use super::measure::{Outcome, Thread};
use super::patronus::{self, IndexWork, LeaseWork, QueueWork};
use super::store::{self, StoreWork};
use super::traces::{self, Replay};
use crate::Error;
use units::Random;

/// Bytes of an access: a page, as in the papers.
pub const ACCESS_BYTES: u64 = 4096;

/// Size of an access QP's send queue in building blocks; a thread has one request in flight.
const SEND_BLOCKS: u32 = 16;

/// The same for a store, which posts lists of up to 16 requests.
const STORE_SEND_BLOCKS: u32 = 128;

/// Minimum of the requests that a connection may have in flight: the default of a memory node.
const CREDITS: u32 = 16;

/// Token of the domain of all connections of a load with leases. The memory nodes of a benchmark
/// are private.
const DOMAIN: DomainToken = DomainToken([0x7a; 32]);

/// The loop body of every thread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    /// Allocates a chunk and reads a page of it. Chunks are not freed during the measurement.
    AllocateAccess,
    /// Reads a page of a chunk that was allocated before the measurement, and pauses.
    Access {
        /// Mean pause between two accesses in microseconds: uniform from 0 to twice this value.
        pause_us: f64,
    },
    /// Allocates a chunk and frees it.
    AllocateFree,
    /// READs a word of a chunk that was allocated before the measurement, and CASes it.
    Words,
    /// Runs FineMem's microbenchmark.
    Churn(Churn),
    /// Replays the requests of a trace.
    Replay(Replay),
    /// Uses a key-value store.
    Store(StoreWork),
    /// Acquires, extends and ends permissions, in schemes with leases.
    Lease(LeaseWork),
    /// Uses an index in objects with leases, which all threads share.
    Index(IndexWork),
    /// Inserts into queues in objects with leases, which all threads share.
    Queue(QueueWork),
}

/// Names of objects that the threads of a load share. Clones share the names.
#[derive(Clone, Debug, Default)]
pub struct SharedObjects(Arc<Mutex<Vec<Object>>>);

impl SharedObjects {
    /// Replaces the names.
    pub fn set(&self, objects: Vec<Object>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = objects;
    }

    /// The names.
    pub fn get(&self) -> Vec<Object> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A shared value of any type.
type Posted = Arc<dyn Any + Send + Sync>;

/// Values that the threads of a load leave for each other, by number. Clones share the values.
#[derive(Clone, Default)]
pub struct Board(Arc<Mutex<HashMap<u32, Posted>>>);

impl fmt::Debug for Board {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Board")
    }
}

impl Board {
    /// Leaves a value.
    pub fn post(&self, number: u32, value: Posted) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(number, value);
    }

    /// The value with this number, if there is one of this type.
    pub fn find<T: Send + Sync + 'static>(&self, number: u32) -> Option<Arc<T>> {
        let values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        values.get(&number)?.clone().downcast().ok()
    }

    /// Drops all values.
    pub fn clear(&self) {
        let values = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        drop(values);
    }
}

/// Parameters of one measurement.
#[derive(Clone, Debug)]
pub struct Load {
    /// The scheme.
    pub scheme: Scheme,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Cores of the memory node's CPU.
    pub cores: u32,
    /// Compute nodes.
    pub compute_nodes: u16,
    /// Memory nodes; each thread is connected to all of them. [`Work::Churn`] uses them
    /// round-robin; other work uses the first.
    pub memory_nodes: u16,
    /// Threads, spread over the compute nodes.
    pub threads: u32,
    /// True: the threads of a compute node share its connections, each with a QP group of its own.
    /// False: each thread has a connection of its own, and so its own management QPs.
    pub shared: bool,
    /// Connections of each compute node whose threads share them.
    pub connections_each: u32,
    /// See [`schemes::onesidedmw::Options::separation`].
    pub separation: bool,
    /// See [`schemes::finemem::Options::contention_control`].
    pub contention_control: bool,
    /// Further settings of each memory node, by name: see [`Settings::with`].
    pub node_options: Vec<(&'static str, Value)>,
    /// See [`schemes::patronus::ClientOptions::extend`].
    pub extension: Extension,
    /// Names that the threads share, of [`Work::Lease`] and [`Work::Queue`].
    pub objects: SharedObjects,
    /// Values that the threads share, of [`Work::Index`].
    pub board: Board,
    /// Additional idle connections.
    pub idle: u32,
    /// The threads' loop body.
    pub work: Work,
    /// Measured rounds of each thread.
    pub rounds: u32,
}

impl Load {
    /// A load of one thread on one compute node with 4 KiB chunks.
    pub fn new(scheme: Scheme, work: Work, rounds: u32) -> Self {
        Self {
            scheme,
            chunk_bytes: ACCESS_BYTES,
            cores: 1,
            compute_nodes: 1,
            memory_nodes: 1,
            threads: 1,
            shared: false,
            connections_each: 1,
            separation: true,
            contention_control: true,
            node_options: Vec::new(),
            extension: Extension::default(),
            objects: SharedObjects::default(),
            board: Board::default(),
            idle: 0,
            work,
            rounds,
        }
    }

    /// Rounds before the measured ones.
    pub fn warm_up(&self) -> u32 {
        (self.rounds / 10).clamp(2, 64)
    }

    /// Connections to each memory node.
    pub fn connections(&self) -> u32 {
        match self.shared {
            true => u32::from(self.compute_nodes) * self.connections_each,
            false => self.threads,
        }
    }

    /// Threads of each connection.
    pub fn threads_each(&self) -> u32 {
        self.threads.div_ceil(self.connections())
    }

    /// Requests that a connection may have in flight: one for each of its clients.
    fn credits(&self) -> u32 {
        let clients = match self.work {
            Work::Lease(work) => work.clients,
            Work::Queue(work) => work.clients,
            _ => 1,
        };
        let all = self.threads_each() * clients;
        all.next_power_of_two().clamp(CREDITS, Settings::CREDITS_MAX)
    }

    /// Each memory node's settings.
    pub fn settings(&self) -> Settings {
        let each = match self.work {
            Work::AllocateAccess => self.rounds + self.warm_up(),
            Work::Churn(_)
            | Work::Replay(_)
            | Work::Store(_)
            | Work::Lease(_)
            | Work::Index(_)
            | Work::Queue(_) => 0,
            Work::Access { .. } | Work::AllocateFree | Work::Words => 1,
        };
        // Extra chunks, because some are pre-registered or are being freed.
        let chunks = u64::from(self.threads * each + 4 * (self.connections() + self.idle) + 8);
        let donate_bytes = match self.work {
            Work::Churn(churn) => churn.donated(self.threads, self.memory_nodes),
            Work::Replay(replay) => replay.donated(self.threads),
            Work::Store(work) => {
                let each = work.chunks(self.rounds.into(), self.chunk_bytes);
                (chunks + u64::from(self.threads) * each) * self.chunk_bytes
            }
            Work::Index(work) => work.donated(self.threads, self.chunk_bytes),
            Work::Queue(work) => {
                let inserts = self.rounds + work.warm_up(self.threads);
                work.donated(self.threads, inserts, self.chunk_bytes)
            }
            Work::Lease(work) => {
                chunks * self.chunk_bytes + work.donated(self.threads, self.chunk_bytes)
            }
            _ => chunks * self.chunk_bytes,
        };
        let mut settings = Settings {
            donate_bytes: donate_bytes.next_multiple_of(self.chunk_bytes),
            chunk_bytes: self.chunk_bytes,
            // One lane: each thread works on memory of its own.
            group_size: 2,
            // A chain restarts after this many requests, which costs a few extra steps.
            credits: self.credits(),
            groups_max: self.threads_each(),
            clients_max: self.connections() + self.idle,
            scheme: self.scheme,
            ..Settings::default()
        };
        let cores = self.cores.min(self.connections());
        for (name, is_set, value) in [
            ("cores", cores != 1, Value::from(cores)),
            ("separation", !self.separation, false.into()),
            ("contention_control", !self.contention_control, false.into()),
        ] {
            if is_set {
                settings = settings.with(name, value);
            }
        }
        let more = self.node_options.iter();
        more.fold(settings, |settings, (name, value)| settings.with(name, value.clone()))
    }

    /// Options of each connection.
    pub fn options(&self) -> Options {
        let groups = Some(self.threads_each() as u16);
        let send_blocks = match self.work {
            Work::Store(_) | Work::Index(_) => STORE_SEND_BLOCKS,
            // A request of each client.
            Work::Lease(LeaseWork { clients, .. }) | Work::Queue(QueueWork { clients, .. }) => {
                (SEND_BLOCKS * clients).next_power_of_two()
            }
            _ => SEND_BLOCKS,
        };
        let mut options = Options { groups, send_blocks, ..Options::default() };
        if let Work::Lease(_) | Work::Index(_) | Work::Queue(_) = self.work {
            options.domain = Some(DOMAIN);
            options.scheme.set("extend", self.extension);
        }
        options
    }
}

/// Runs the loop of one thread.
///
/// # Errors
/// Errors of the pool and of the store.
pub fn run<T: Thread>(thread: &T, load: &Load, mut rng: Random) -> Result<Outcome, Error> {
    match &load.work {
        Work::Churn(churn) => return Ok(churn::run(thread, load.rounds, churn, &mut rng)?),
        Work::Replay(replay) => return Ok(traces::run(thread, replay, &mut rng)?),
        Work::Store(work) => return store::run(thread, load.rounds, work, rng),
        Work::Lease(work) => return patronus::run(thread, load, *work, rng),
        Work::Index(work) => return patronus::run_index(thread, load, work, rng),
        Work::Queue(work) => return patronus::run_queue(thread, load, *work, rng),
        _ => {}
    }
    let pool = thread.pool();
    let mut page = vec![0; ACCESS_BYTES as usize];
    let mut outcome = Outcome::default();
    let blank = vec![0; ACCESS_BYTES as usize];
    let allocate = || {
        let grant = thread.wait(pool.allocate_in(thread.group()))?;
        if load.scheme.access == AccessKind::Pages {
            // Odrp allocates the page at its first write: the paper's AllocWrite.
            thread.wait(pool.write(&grant, 0, &blank))?;
        }
        Ok::<_, pool::Error>(grant)
    };
    let held = match load.work {
        Work::Access { .. } | Work::Words => Some(allocate()?),
        _ => None,
    };
    // A random delay, so that the threads do not run in lockstep.
    thread.pause_ns(rng.below(20_000));
    let warm_up = load.warm_up();
    let mut begin = thread.now_ns();
    for round in 0..warm_up + load.rounds {
        if round == warm_up {
            outcome = Outcome::default();
            begin = thread.now_ns();
        }
        let start = thread.now_ns();
        match load.work {
            Work::AllocateAccess => {
                let grant = allocate()?;
                let granted = thread.now_ns();
                thread.wait(pool.read(&grant, 0, &mut page))?;
                outcome.allocate.record_ns(granted - start);
                outcome.access.record_ns(thread.now_ns() - granted);
            }
            Work::Access { pause_us } => {
                let held = held.as_ref().expect("it was allocated before");
                thread.wait(pool.read(held, 0, &mut page))?;
                outcome.access.record_ns(thread.now_ns() - start);
                let longest = (pause_us * 2e3) as u64;
                if longest > 0 {
                    thread.pause_ns(rng.below(longest));
                }
            }
            Work::Words => {
                let held = held.as_ref().expect("it was allocated before");
                thread.wait(pool.read(held, 0, &mut page[..8]))?;
                let read = thread.now_ns();
                thread.wait(pool.compare_and_swap(held, 0, 0, 0))?;
                outcome.access.record_ns(read - start);
                outcome.atomic.record_ns(thread.now_ns() - read);
            }
            Work::AllocateFree => {
                let grant = allocate()?;
                let granted = thread.now_ns();
                thread.wait(pool.free(grant))?;
                outcome.allocate.record_ns(granted - start);
                outcome.free.record_ns(thread.now_ns() - granted);
            }
            Work::Churn(_)
            | Work::Replay(_)
            | Work::Store(_)
            | Work::Lease(_)
            | Work::Index(_)
            | Work::Queue(_) => unreachable!("their loops are run above"),
        }
    }
    let elapsed_ns = (thread.now_ns() - begin).max(1);
    outcome.rate_per_s = f64::from(load.rounds) * 1e9 / elapsed_ns as f64;
    Ok(outcome)
}
