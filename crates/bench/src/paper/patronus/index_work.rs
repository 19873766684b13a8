//! The loops of a thread that uses RACE over objects with leases (Patronus §6.1).
//!
//! ```text
//! the first thread creates the index ─┬─ the others join ─┬─> keys ─┬─> measured operations
//!                                  barrier             barrier   barrier
//! ```
//!
//! Each thread is a client with a connection and permissions of its own. The threads of a compute
//! node are one client in the epochs of the index, of which there are 63.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ::kv::environment::Environment;
use ::kv::layout::block;
use ::kv::leased::{End, LeasedMemory, LeasedSettings};
use ::kv::{Form, SetOptions, SharedSettings, SharedStore, SplitLock};
use pool::LeaseTerms;
use pool::join::join;
use units::Random;
use verbs::Nic;

use super::mortal::{Fate, Mortal};
use crate::Error;
use crate::kv::workload::{KEY_BYTES, key_bytes};
use crate::kv::zipf::Zipf;
use crate::paper::load::Load;
use crate::paper::measure::{Outcome, Thread};
use bench_report::histogram::Latencies;

/// Slab of the index: four blocks of 4 KiB, or a subtable.
const SLAB: u32 = 16 << 10;
/// Number of blocks that are allocated together (§7.3.1).
const TOGETHER: ::kv::leased::Together = ::kv::leased::Together(4);
/// Windows that a client has before it inserts keys: those of a split's permissions.
const WINDOWS_OF_SPLITS: u32 = 192;
/// Windows that a client has before its measured operations. With fewer, the memory node allocates
/// further ones during the measurement, 32 at once, for which a core stands still for 3.2 ms.
const WINDOWS: u32 = 48;
/// Lease of permissions that only allocate windows.
const PREPARED: Duration = Duration::from_millis(500);
/// Requests in flight at once.
const CREDITS: usize = 8;
/// Bytes for blocks that wait for epochs: more than 40,000 writes of 4 KiB need. An epoch ends only
/// after each thread has looked at it, which takes long while the memory node is loaded.
const LIMBO_BYTES: u64 = 256 << 20;
/// Time between two calls of the work that no operation waits for, in nanoseconds.
const TEND_NS: u64 = 1_000_000;
/// Attempts of an insert until the thread looks at the time.
const ATTEMPTS: u32 = 20;

/// Parameters of the loop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexWork {
    /// The operations.
    pub task: Task,
    /// Keys of the index.
    pub keys: u64,
    /// Bytes of a block: header, key and value.
    pub block_bytes: u32,
    /// Groups of a subtable: each has 21 slots.
    pub groups: u16,
    /// See [`LeasedSettings::entry_unit`].
    pub entry_unit: u32,
    /// Lease of each permission, in microseconds.
    pub lease_us: u64,
    /// True: permissions for blocks of values are revoked. False: their leases end them.
    pub revokes: bool,
    /// The lock of a split.
    pub lock: SplitLock,
    /// Lease of the exclusive permission of a split, in microseconds.
    pub split_lease_us: u64,
}

/// The operations of a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Reads and writes keys that are there, by Zipf's distribution.
    Operate {
        /// Percent of reads.
        read_percent: u64,
    },
    /// Inserts all keys, at equal intervals. The client of the first split from `crash_us` on
    /// crashes.
    Insert {
        /// Time between the first and the last key, in microseconds.
        span_us: u64,
        /// Time of the crash.
        crash_us: u64,
        /// Verbs and requests between the lock of the split and the crash.
        verbs: u64,
        /// Time after which no client waits any more.
        end_us: u64,
    },
}

/// Measurements of a thread, or of all threads together.
#[derive(Clone, Debug, Default)]
pub struct IndexOutcome {
    /// Latencies of reads.
    pub read: Latencies,
    /// Latencies of writes.
    pub write: Latencies,
    /// Times at which keys were inserted, in microseconds.
    pub inserted_us: Vec<u64>,
    /// Clients that crashed.
    pub crashes: u64,
    /// Accesses that the NIC refused, each of which broke a QP.
    pub refused: u64,
}

impl IndexOutcome {
    /// Adds the measurements of a concurrent thread.
    pub fn join(&mut self, other: &Self) {
        self.read.merge(&other.read);
        self.write.merge(&other.write);
        self.inserted_us.extend_from_slice(&other.inserted_us);
        self.crashes += other.crashes;
        self.refused += other.refused;
    }

    /// Number of keys that were inserted up to a time.
    pub fn inserted(&self, until_us: u64) -> usize {
        self.inserted_us.iter().filter(|at| **at <= until_us).count()
    }
}

impl IndexWork {
    /// Bytes that the memory node donates for `threads` threads.
    pub fn donated(&self, threads: u32, chunk_bytes: u64) -> u64 {
        let all = self.used(threads) + 8 * self.objects(threads);
        all.next_multiple_of(chunk_bytes)
    }

    /// Bytes of the objects, without the table of names.
    fn used(&self, threads: u32) -> u64 {
        let together = u64::from(TOGETHER.0);
        let least = if self.entry_unit > 1 { 16 * u64::from(self.entry_unit) } else { 0 };
        let object = (together * u64::from(self.block_bytes)).max(least);
        // Twice, as written blocks replace others that wait for epochs. Each subtable is half full
        // in the worst case, and a split needs two more.
        // A quarter more, for slots of the next size.
        let blocks = 5 * self.keys.div_ceil(together) * object / 2;
        let slots = u64::from(self.groups) * 21;
        let tables = (4 * self.keys / slots + 64) * u64::from(SLAB);
        blocks + tables + u64::from(threads) * 4 * u64::from(SLAB) + LIMBO_BYTES
    }

    /// Objects for which places have names.
    fn objects(&self, threads: u32) -> u64 {
        let entries = match self.entry_unit {
            1 => 4 * self.keys + 64 * u64::from(threads) + 8192,
            unit => 2 * self.used(threads) / (16 * u64::from(unit)),
        };
        entries.next_power_of_two()
    }

    fn leased(&self, threads: u32) -> LeasedSettings {
        LeasedSettings {
            slab: SLAB,
            objects: self.objects(threads) as u32,
            together: TOGETHER,
            entry_unit: self.entry_unit,
            lease: Duration::from_micros(self.lease_us),
            split_lease: Duration::from_micros(self.split_lease_us),
            end: if self.revokes { End::Revoke } else { End::Expire },
        }
    }

    fn shared(&self) -> SharedSettings {
        SharedSettings {
            form: Form::Published,
            groups: Some(self.groups),
            lock: self.lock,
            limbo_max: u64::MAX,
            attempts: match self.task {
                Task::Operate { .. } => SharedSettings::default().attempts,
                Task::Insert { .. } => ATTEMPTS,
            },
            ..SharedSettings::default()
        }
    }

    fn value(&self) -> Vec<u8> {
        vec![0x5a; (self.block_bytes as usize).saturating_sub(block::HEADER_BYTES + KEY_BYTES)]
    }
}

/// The clock of a NIC, which virtual time drives in a simulation.
struct Clock<N> {
    nic: N,
    random: AtomicU64,
}

impl<N: Nic> Clock<N> {
    fn new(nic: &N, random: u64) -> Self {
        Self { nic: nic.clone(), random: AtomicU64::new(random) }
    }
}

impl<N: Nic> Environment for Clock<N> {
    fn now(&self) -> u64 {
        1 + self.nic.now().as_millis() as u64
    }

    fn random(&self) -> u64 {
        Random::new(self.random.fetch_add(1, Ordering::Relaxed)).bits()
    }
}

type Store<N> = SharedStore<Mortal<N>, Mortal<N>, Clock<N>>;

/// The board's number of the fate of all clients.
const FATE: u32 = u32::MAX;
/// The board's number of the next key to insert.
const NEXT: u32 = u32::MAX - 1;

/// The index as one thread uses it.
struct Client<'a, T: Thread> {
    thread: &'a T,
    store: Store<T::Nic>,
    value: Vec<u8>,
    /// Time of the next call of the work that no operation waits for.
    tend_ns: u64,
}

impl<'a, T: Thread> Client<'a, T> {
    /// Creates or joins the index.
    fn open(
        thread: &'a T,
        load: &Load,
        work: &IndexWork,
        random: &mut Random,
    ) -> Result<Self, Error> {
        let pool = thread.pool();
        let settings = work.leased(load.threads);
        let (index, group) = (thread.index(), thread.group());
        let memory = match index {
            0 => {
                let memory = LeasedMemory::create(pool.clone(), 0, group, settings);
                let memory = thread.wait(memory)?;
                load.objects.set(vec![memory.anchor()]);
                load.board.post(FATE, Arc::new(Fate::default()));
                load.board.post(NEXT, Arc::new(AtomicU64::new(0)));
                thread.wait(thread.barrier().wait());
                memory
            }
            _ => {
                thread.wait(thread.barrier().wait());
                let Some(&anchor) = load.objects.get().first() else {
                    return Err(Error::Node("the first thread has created no index".into()));
                };
                thread.wait(LeasedMemory::join(pool.clone(), group, settings, anchor))?
            }
        };
        let fate = load.board.find::<Fate>(FATE).expect("the first thread has posted it");
        let mortal = Mortal::new(memory.clone(), 1 + index, fate);
        let compute_node = index % u32::from(load.compute_nodes);
        let mut clock = || Clock::new(pool.nic(), random.bits());
        if index == compute_node {
            let (reach, blocks) = (mortal.clone(), mortal.clone());
            let shared = work.shared();
            let store: Store<T::Nic> = match index {
                0 => thread.wait(Store::create(reach, blocks, clock(), shared))?,
                _ => {
                    thread.wait(thread.barrier().wait());
                    let root = thread.wait(memory.root())?.expect("the first thread has set it");
                    thread.wait(Store::open(reach, blocks, clock(), shared, root))?
                }
            };
            if index == 0 {
                thread.wait(memory.set_root(store.root()))?;
                thread.wait(thread.barrier().wait());
            }
            load.board.post(compute_node, Arc::new(store));
        } else {
            thread.wait(thread.barrier().wait());
        }
        if let Task::Insert { .. } = work.task {
            prepare_windows(thread, load, WINDOWS_OF_SPLITS)?;
        }
        thread.wait(thread.barrier().wait());
        let store = load.board.find::<Store<T::Nic>>(compute_node);
        let store = store.expect("a thread of the compute node has posted it");
        // Both ways of one client into memory end at once.
        let store = store.fork(mortal.clone(), mortal, clock());
        Ok(Self { thread, store, value: work.value(), tend_ns: 0 })
    }

    fn write(&self, key: u64) -> Result<(), ::kv::Error> {
        let key = key_bytes(key);
        let set = self.store.set(0, &key, &self.value, SetOptions::default());
        self.thread.wait(set).map(drop)
    }

    /// Does the work that no operation waits for, if it is due.
    fn tend(&mut self) -> Result<(), ::kv::Error> {
        let now = self.thread.now_ns();
        if now < self.tend_ns {
            return Ok(());
        }
        self.tend_ns = now + TEND_NS;
        // In a real program, a thread of the pool does this.
        while self.thread.pool().restore_spares() {}
        self.thread.wait(self.store.tend())
    }
}

/// Lets the memory node allocate the windows that a client needs at once: an allocation takes 100
/// us, and the paper's memory node fills its pool of windows in advance (§5.6).
fn prepare_windows<T: Thread>(thread: &T, load: &Load, windows: u32) -> Result<(), Error> {
    let pool = thread.pool();
    let anchor = load.objects.get()[0];
    let terms = LeaseTerms::shared_read(PREPARED);
    let acquired = (0..windows).map(|_| pool.acquire_in(thread.group(), &anchor, &terms));
    let acquired = thread.wait(join(acquired, CREDITS));
    let permissions = acquired.into_iter().collect::<Result<Vec<_>, _>>()?;
    let revoked = permissions.iter().map(|permission| pool.revoke(permission));
    thread.wait(join(revoked, CREDITS)).into_iter().collect::<Result<(), _>>()?;
    Ok(())
}

/// Runs the loop on one thread.
///
/// # Errors
/// Errors of the pool and of the index.
pub fn run<T: Thread>(
    thread: &T,
    load: &Load,
    work: &IndexWork,
    mut random: Random,
) -> Result<Outcome, Error> {
    let mut client = Client::open(thread, load, work, &mut random)?;
    let outcome = match work.task {
        Task::Operate { read_percent } => {
            operate(&mut client, load, work, read_percent, &mut random)?
        }
        Task::Insert { .. } => insert(&mut client, load, work)?,
    };
    // A thread that has ended would let its neighbours run faster.
    thread.wait(thread.barrier().wait());
    drop(client);
    // The stores end before the world does.
    load.board.clear();
    Ok(outcome)
}

fn operate<T: Thread>(
    client: &mut Client<'_, T>,
    load: &Load,
    work: &IndexWork,
    read_percent: u64,
    random: &mut Random,
) -> Result<Outcome, Error> {
    let thread = client.thread;
    for key in (u64::from(thread.index())..work.keys).step_by(load.threads as usize) {
        client.write(key)?;
        client.tend()?;
    }
    prepare_windows(thread, load, WINDOWS)?;
    thread.wait(thread.barrier().wait());
    // A random delay, so that the threads do not run in lockstep.
    thread.pause_ns(random.below(20_000));
    let zipf = Zipf::new(work.keys);
    let mut index = IndexOutcome::default();
    let refused = || thread.pool().stats().promotions;
    let (begin, refused_before) = (thread.now_ns(), refused());
    for _ in 0..load.rounds {
        let (start, key) = (thread.now_ns(), zipf.draw(random));
        if random.below(100) < read_percent {
            let found = thread.wait(client.store.get(0, &key_bytes(key)))?;
            if found.is_none() {
                // The error of that thread comes before this one.
                return Err(Error::Node("a thread has ended before it inserted its keys".into()));
            }
            index.read.record_ns(thread.now_ns() - start);
        } else {
            client.write(key)?;
            index.write.record_ns(thread.now_ns() - start);
        }
        client.tend()?;
    }
    let elapsed_ns = (thread.now_ns() - begin).max(1);
    index.refused = refused() - refused_before;
    let rate_per_s = f64::from(load.rounds) * 1e9 / elapsed_ns as f64;
    Ok(Outcome { index, rate_per_s, ..Outcome::default() })
}

fn insert<T: Thread>(
    client: &mut Client<'_, T>,
    load: &Load,
    work: &IndexWork,
) -> Result<Outcome, Error> {
    let Task::Insert { span_us, crash_us, verbs, end_us } = work.task else {
        unreachable!("the loop of inserts")
    };
    let thread = client.thread;
    let fate = client.store.reach().fate().clone();
    thread.wait(thread.barrier().wait());
    let begin = thread.now_ns();
    fate.plan(thread.pool().nic().now() + Duration::from_micros(crash_us), verbs);
    let mut index = IndexOutcome::default();
    let since_us = || (thread.now_ns() - begin) / 1_000;
    let next = load.board.find::<AtomicU64>(NEXT).expect("the first thread has posted it");
    'keys: loop {
        // A client that does not go on leaves no other keys to others than its latest one.
        let key = next.fetch_add(1, Ordering::Relaxed);
        if key >= work.keys {
            break;
        }
        let due_us = span_us * key / work.keys;
        thread.pause_ns(due_us.saturating_sub(since_us()) * 1_000);
        loop {
            match client.write(key).and_then(|()| client.tend()) {
                Ok(()) => break,
                Err(_) if client.store.reach().has_crashed() => {
                    index.crashes = 1;
                    break 'keys;
                }
                // Another client blocks the subtable of the key.
                Err(::kv::Error::Contended { .. }) if since_us() < end_us => {}
                Err(::kv::Error::Contended { .. }) => break 'keys,
                Err(error) => return Err(error.into()),
            }
        }
        index.inserted_us.push(since_us());
    }
    Ok(Outcome { index, ..Outcome::default() })
}
