//! Memory of the process in place of a pool, for tests, examples and fuzzing.
//!
//! [`Memory`] holds the bytes. [`Client`] reaches them, counts round trips, and can stop at any
//! verb as a compute node that crashes there. [`Arena`] allocates blocks. [`run`] executes several
//! tasks in an order that a seed chooses.

mod arena;
mod schedule;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

pub use arena::Arena;
pub(crate) use schedule::{GOLDEN, mixed};
pub use schedule::{Seeded, run, turn};

use crate::environment::Environment;
use crate::place::{Address, UNIT};
use crate::reach::{Range, Reach, Step, Stopped};

/// End of the addresses of a memory node.
const END: u64 = 1 << 32;

/// Number of the memory node that has the words of life.
const LIVES: u8 = 255;

/// Bytes of memory nodes.
#[derive(Debug, Default)]
pub struct Memory {
    nodes: Mutex<HashMap<u8, Vec<u8>>>,
    stripes: Mutex<HashMap<(u8, u64), u32>>,
    lost: Mutex<HashSet<u8>>,
    lives: AtomicU64,
    chunk: u64,
}

impl Memory {
    /// Memory whose chunks have `chunk` bytes.
    pub fn new(chunk: u32) -> Arc<Self> {
        Arc::new(Self { chunk: chunk.into(), ..Self::default() })
    }

    /// Bytes of a chunk.
    pub fn chunk(&self) -> u32 {
        self.chunk as u32
    }

    /// Ends a memory node: verbs on it fail from now on.
    pub fn lose(&self, node: u8) {
        self.lost.lock().insert(node);
        self.nodes.lock().remove(&node);
    }

    /// True if the memory node has ended.
    pub fn is_lost(&self, node: u8) -> bool {
        self.lost.lock().contains(&node)
    }

    /// Replaces the bytes at `at`.
    pub fn write(&self, at: Address, from: &[u8]) {
        let mut nodes = self.nodes.lock();
        let node = nodes.entry(at.node).or_default();
        let end = at.offset as usize + from.len();
        if node.len() < end {
            node.resize(end, 0);
        }
        node[at.offset as usize..end].copy_from_slice(from);
    }

    /// Copies the bytes at `at`. Bytes that were never written are 0.
    pub fn read(&self, at: Address, into: &mut [u8]) {
        into.fill(0);
        let nodes = self.nodes.lock();
        let Some(node) = nodes.get(&at.node) else { return };
        let start = (at.offset as usize).min(node.len());
        let end = (start + into.len()).min(node.len());
        into[..end - start].copy_from_slice(&node[start..end]);
    }

    fn word(&self, at: Address, change: impl FnOnce(u64) -> u64) -> u64 {
        let mut nodes = self.nodes.lock();
        let node = nodes.entry(at.node).or_default();
        let start = at.offset as usize;
        if node.len() < start + 8 {
            node.resize(start + 8, 0);
        }
        let old = crate::layout::word(node, start);
        crate::layout::put(node, start, change(old));
        old
    }

    fn set_stripe(&self, at: Address, stripe: u32) {
        self.stripes.lock().insert((at.node, at.offset / self.chunk), stripe);
    }

    fn stripe(&self, at: Address) -> Option<u32> {
        self.stripes.lock().get(&(at.node, at.offset / self.chunk)).copied()
    }
}

/// A compute node that reaches a [`Memory`].
#[derive(Debug)]
pub struct Client {
    memory: Arc<Memory>,
    waits: AtomicU64,
    verbs: AtomicU64,
    limit: AtomicU64,
    interleaved: bool,
    faults: Mutex<Faults>,
    /// Address of the word of life.
    life: Address,
}

/// Faults of a compute node, by seed.
#[derive(Debug)]
pub struct Faults {
    /// The random numbers.
    pub random: Seeded,
    /// One round trip of this many is lost: the first verbs of its list take effect, and the
    /// compute node gets no answer. 0: none.
    pub lost_one_in: u64,
    /// The compute node stalls before one verb of this many. 0: none.
    pub stall_one_in: u64,
    /// Maximum turns of other tasks during a stall.
    pub stall_turns: u64,
    /// Round trips lost so far.
    pub lost: u64,
    /// Stalls so far.
    pub stalls: u64,
}

impl Faults {
    /// No faults.
    pub const fn none(seed: u64) -> Self {
        let random = Seeded::new(seed);
        Self { random, lost_one_in: 0, stall_one_in: 0, stall_turns: 0, lost: 0, stalls: 0 }
    }

    /// The number of verbs of a list that take effect, if its round trip is lost.
    fn loses(&mut self, steps: usize) -> Option<usize> {
        let is_lost = self.lost_one_in != 0 && self.random.below(self.lost_one_in) == 0;
        self.lost += u64::from(is_lost);
        is_lost.then(|| self.random.below(steps as u64 + 1) as usize)
    }

    /// The number of turns for which the compute node stalls.
    fn stall(&mut self) -> u64 {
        let stalls = self.stall_one_in != 0 && self.random.below(self.stall_one_in) == 0;
        self.stalls += u64::from(stalls);
        if stalls { self.random.below(self.stall_turns) } else { 0 }
    }
}

impl Client {
    /// A compute node. `interleaved`: other tasks run between two verbs of this compute node.
    pub fn new(memory: Arc<Memory>, interleaved: bool) -> Self {
        let limit = AtomicU64::new(u64::MAX);
        let faults = Mutex::new(Faults::none(0));
        let (waits, verbs) = (AtomicU64::new(0), AtomicU64::new(0));
        // Place 0 is none.
        let number = 1 + memory.lives.fetch_add(1, Ordering::Relaxed);
        let life = Address { node: LIVES, offset: UNIT * number };
        Self { memory, waits, verbs, limit, interleaved, faults, life }
    }

    /// Gives the compute node faults. Stalls need an interleaved compute node.
    pub fn set_faults(&self, faults: Faults) {
        *self.faults.lock() = faults;
    }

    /// Numbers of lost round trips and of stalls so far.
    pub fn faults(&self) -> (u64, u64) {
        let faults = self.faults.lock();
        (faults.lost, faults.stalls)
    }

    /// Number of round trips so far.
    pub fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    /// Number of verbs so far.
    pub fn verbs(&self) -> u64 {
        self.verbs.load(Ordering::Relaxed)
    }

    /// Stops the compute node after `verbs` more verbs: all later verbs fail and have no effect. Of
    /// the first of them, if it is a long WRITE, one half takes effect.
    pub fn crash_after(&self, verbs: u64) {
        self.limit.store(self.verbs() + verbs, Ordering::Relaxed);
    }

    /// Takes [`Client::crash_after`] back, unless the compute node has stopped already.
    pub fn stay_up(&self) {
        if !self.is_crashed() {
            self.limit.store(u64::MAX, Ordering::Relaxed);
        }
    }

    /// Overwrites the compute node's word of life, as a memory node does after a connection has
    /// ended.
    pub fn end_life(&self) {
        self.memory.write(self.life, &[0; 8]);
    }

    /// True if the compute node has stopped.
    pub fn is_crashed(&self) -> bool {
        self.verbs() > self.limit.load(Ordering::Relaxed)
    }

    /// The memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    fn execute(&self, step: &mut Step<'_>) -> Result<(), Stopped> {
        let verb = self.verbs.fetch_add(1, Ordering::Relaxed);
        let limit = self.limit.load(Ordering::Relaxed);
        if verb >= limit {
            if let (Step::Write { at, from }, true) = (&*step, verb == limit) {
                self.write_half(*at, from, verb.is_multiple_of(2));
            }
            return Err(Stopped::Lost("the compute node has crashed".into()));
        }
        let node = step.at().node;
        if self.memory.is_lost(node) {
            return Err(Stopped::Gone { node, why: "the memory node has ended".into() });
        }
        if step.at().offset >= END {
            return Err(Stopped::Refused("the address is beyond the memory".into()));
        }
        match step {
            Step::Read { at, into } => self.memory.read(*at, into),
            Step::Write { at, from } => self.memory.write(*at, from),
            Step::Cas { at, expected, new, old } => {
                **old = self.memory.word(*at, |old| if old == *expected { *new } else { old });
            }
            Step::Add { at, amount, old } => {
                **old = self.memory.word(*at, |old| old.wrapping_add(*amount));
            }
        }
        Ok(())
    }

    fn write_half(&self, at: Address, from: &[u8], first: bool) {
        let middle = from.len() / 16 * 8;
        if middle == 0 {
            return;
        }
        if first {
            self.memory.write(at, &from[..middle]);
        } else {
            self.memory.write(at.plus(middle as u64), &from[middle..]);
        }
    }
}

impl Reach for Arc<Client> {
    type Right = ();

    async fn open(&self, _range: Range) -> Result<(), Stopped> {
        Ok(())
    }

    async fn close(&self, (): ()) {}

    async fn run(&self, steps: &mut [Step<'_>]) -> Result<(), Stopped> {
        // Steps of different stripes have no order, so each second list begins with the last
        // stripe.
        let is_reversed = !self.waits().is_multiple_of(2);
        let mut order: Vec<usize> = (0..steps.len()).collect();
        order.sort_by_key(|step| {
            let stripe = self.memory.stripe(steps[*step].at()).unwrap_or(0);
            if is_reversed { u32::MAX - stripe } else { stripe }
        });
        let lost = self.faults.lock().loses(steps.len());
        for step in order.into_iter().take(lost.unwrap_or(usize::MAX)) {
            if self.interleaved {
                let stall = self.faults.lock().stall();
                for _ in 0..=stall {
                    turn().await;
                }
            }
            self.execute(&mut steps[step])?;
        }
        if lost.is_some() {
            return Err(Stopped::Lost("the round trip was lost".into()));
        }
        self.waits.fetch_add(1, Ordering::Relaxed);
        if self.interleaved {
            turn().await;
        }
        Ok(())
    }

    fn life(&self) -> Option<Address> {
        Some(self.life)
    }

    fn ordered(&self, a: Address, b: Address) -> bool {
        a.node == b.node && self.memory.stripe(a) == self.memory.stripe(b)
    }
}

/// A clock that the caller turns, and random numbers by seed.
#[derive(Debug)]
pub struct Hand {
    now: AtomicU64,
    random: AtomicU64,
}

impl Hand {
    /// A clock at `now`.
    pub fn new(now: u64, seed: u64) -> Arc<Self> {
        Arc::new(Self { now: AtomicU64::new(now), random: AtomicU64::new(seed) })
    }

    /// Turns the clock on by `ms`.
    pub fn advance(&self, ms: u64) {
        self.now.fetch_add(ms, Ordering::Relaxed);
    }
}

impl Environment for Arc<Hand> {
    fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    fn random(&self) -> u64 {
        let state = self.random.fetch_add(GOLDEN, Ordering::Relaxed);
        mixed(state)
    }
}
