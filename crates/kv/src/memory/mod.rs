//! Memory of the process in place of a pool, for tests, examples and fuzzing.
//!
//! [`Memory`] holds the bytes. [`Client`] reaches them, counts round trips, and can stop at any
//! verb as a compute node that crashes there. [`Arena`] allocates blocks. [`run`] executes several
//! tasks in an order that a seed chooses.

mod arena;
mod schedule;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

pub use arena::Arena;
pub(crate) use schedule::{GOLDEN, mixed};
pub use schedule::{Seeded, run, turn};

use crate::environment::Environment;
use crate::place::Address;
use crate::reach::{Range, Reach, Step, Stopped};

/// End of the addresses of a memory node.
const END: u64 = 1 << 32;

/// Bytes of memory nodes.
#[derive(Debug, Default)]
pub struct Memory {
    nodes: Mutex<HashMap<u8, Vec<u8>>>,
    stripes: Mutex<HashMap<(u8, u64), u32>>,
    lost: Mutex<Vec<u8>>,
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

    /// Ends memory node `node`: all later verbs on its memory fail.
    pub fn lose(&self, node: u8) {
        self.lost.lock().push(node);
    }

    /// True if memory node `node` has ended.
    pub fn is_lost(&self, node: u8) -> bool {
        self.lost.lock().contains(&node)
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
    /// Number of the verb before which a memory node ends, and the memory node.
    loss: Mutex<Option<(u64, u8)>>,
    /// Number of the verb that breaks off, and whether the verb takes effect.
    broken: Mutex<Option<(u64, bool)>>,
    interleaved: bool,
}

impl Client {
    /// A compute node. `interleaved`: other tasks run between two verbs of this compute node.
    pub fn new(memory: Arc<Memory>, interleaved: bool) -> Self {
        let limit = AtomicU64::new(u64::MAX);
        let (waits, verbs) = (AtomicU64::new(0), AtomicU64::new(0));
        Self {
            memory,
            waits,
            verbs,
            limit,
            loss: Mutex::default(),
            broken: Mutex::default(),
            interleaved,
        }
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

    /// Ends memory node `node` after `verbs` more verbs of this compute node.
    pub fn lose_after(&self, node: u8, verbs: u64) {
        *self.loss.lock() = Some((self.verbs() + verbs, node));
    }

    /// Breaks the connection off at the verb after `verbs` more verbs: its list ends, and later
    /// lists are executed again. `has_effect`: the verb takes effect nevertheless.
    pub fn break_after(&self, verbs: u64, has_effect: bool) {
        *self.broken.lock() = Some((self.verbs() + verbs, has_effect));
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
        if let Some((at, node)) = *self.loss.lock()
            && at == verb
        {
            self.memory.lose(node);
        }
        if self.memory.is_lost(step.at().node) {
            return Err(Stopped::Gone {
                node: step.at().node,
                why: "its process has ended".into(),
            });
        }
        if step.at().offset >= END {
            return Err(Stopped::Refused("the address is beyond the memory".into()));
        }
        let broken = self.broken.lock().filter(|(at, _)| *at == verb);
        if broken.is_some_and(|(_, has_effect)| !has_effect) {
            return Err(Stopped::Lost("the connection broke off".into()));
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
        match broken {
            Some(_) => Err(Stopped::Lost("the connection broke off".into())),
            None => Ok(()),
        }
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
        for step in order {
            if self.interleaved {
                turn().await;
            }
            self.execute(&mut steps[step])?;
        }
        self.waits.fetch_add(1, Ordering::Relaxed);
        if self.interleaved {
            turn().await;
        }
        Ok(())
    }

    fn ordered(&self, a: Address, b: Address) -> bool {
        a.node == b.node && self.memory.stripe(a) == self.memory.stripe(b)
    }

    fn is_lost(&self, node: u8) -> bool {
        self.memory.is_lost(node)
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
