//! The memory node's background work (recovery, ends of quarantines, repairs) one verb at a time:
//! aborted after any verb and restarted, next to clients that may crash meanwhile.
//!
//! The operations on the tree are the memory node's own code; their order is that of `node` and
//! `scan`.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use super::explore::{Explored, Held, explore_all, full};
use super::world::{Stepped, Task, window};
use super::*;
use crate::finemem::log::{Capability, FullLog};
use scheme::index::EntryId;
use verbs::Key;

/// The allocations of a client, and the number of verbs after which it crashes.
#[derive(Clone, Copy)]
struct Client {
    orders: &'static [u32],
    crash: Option<usize>,
}

/// Freed blocks, and the keys under which they were granted.
type Released = Arc<Mutex<Vec<(Block, Key)>>>;

struct World {
    memory: Memory,
    held: Arc<Held>,
    clients: Vec<Client>,
    /// The clients' tasks, then the memory node's.
    tasks: Vec<Task>,
    /// Crashed users that are not reclaimed yet.
    dead: Vec<User>,
    /// Users that the current pass reclaims.
    taking: Vec<User>,
    /// Number of verbs after which the memory node's pass is aborted.
    breaks: Option<usize>,
    /// A pass was aborted, and none has completed since.
    anew: bool,
}

fn overlap(a: Block, b: Block) -> bool {
    a.chunk < b.end() && b.chunk < a.end()
}

/// Allocates blocks, and frees each one into quarantine.
fn client(
    memory: Memory,
    me: User,
    orders: &'static [u32],
    held: Arc<Held>,
    released: Released,
) -> Task {
    let shape = memory.shape();
    Task::new(move |verbs: Stepped| async move {
        let verbs = verbs.with_keys();
        let tree = Tree::new(shape, me);
        for order in orders {
            let Ok(Some(taken)) = tree.allocate(&verbs, Order::new(*order)).await else { continue };
            let (block, key) = (taken.block, taken.capability.main);
            let entry = shape.entry(block);
            held.take(me, block);
            memory.check_log(block, me);
            assert_eq!(memory.window(entry), key, "{block:?} is granted under an invalid key");
            for (other, key) in released.lock().iter().filter(|(other, _)| overlap(*other, block)) {
                let now = memory.window(shape.entry(*other));
                assert_ne!(
                    now, *key,
                    "{block:?} is granted while the old key of {other:?} is valid"
                );
            }
            held.leave(me, block);
            released.lock().push((block, key));
            let (open, shut) = (Capability::open(key), Capability::quarantined(key));
            let at = shape.capability(entry);
            let Ok(found) = verbs.cas(at, open.to_word(), shut.to_word()).await;
            assert_eq!(found, open.to_word(), "the owner's free of {block:?} failed");
        }
    })
}

/// Does the memory node's pending work, until there is none.
fn pass(shape: Shape, dead: Vec<User>, anew: bool) -> Task {
    Task::new(move |verbs: Stepped| async move {
        let tree = Tree::new(shape, User::NOBODY);
        if anew {
            let Ok(()) = end_quarantines(&tree, &verbs).await;
            for section in shape.each_section() {
                let Ok(()) = tree.free_ownerless(&verbs, section).await;
            }
        }
        for user in dead {
            for section in shape.each_section() {
                let Ok(blocks) = tree.taken_by(&verbs, user, section).await;
                for block in blocks {
                    let at = shape.capability(shape.entry(block));
                    let word = read(&verbs, at).await;
                    let capability = Capability::parse(word);
                    if !capability.is_quarantined() {
                        let shut = Capability::quarantined(capability.main);
                        let Ok(_) = verbs.cas(at, word, shut.to_word()).await;
                    }
                }
                let Ok(_) = tree.repair_section(&verbs, section).await;
            }
        }
        let Ok(()) = end_quarantines(&tree, &verbs).await;
    })
}

async fn read(verbs: &Stepped, at: Word) -> u64 {
    let mut word = [0];
    let Ok(()) = verbs.read(at, &mut word).await;
    word[0]
}

/// All blocks are withdrawn, then rebound; all new keys are in the table before the first header
/// changes.
async fn end_quarantines(tree: &Tree, verbs: &Stepped) -> Result<(), Infallible> {
    let shape = tree.shape();
    let mut words = Vec::new();
    for entries in (EntryId::new(0)..shape.entries_end()).batches(BATCH) {
        let mut some = vec![0; entries.len()];
        verbs.read(shape.capability(entries.start), &mut some).await?;
        words.extend(some);
    }
    let found: Vec<(EntryId, u64)> = shape
        .each_entry()
        .zip(words)
        .filter(|(_, word)| Capability::parse(*word).is_quarantined())
        .collect();
    let block = |entry: EntryId| shape.block(entry).unwrap();
    for (entry, _) in &found {
        tree.withdraw(verbs, block(*entry)).await?;
    }
    let mut by_header: BTreeMap<Place, Vec<Block>> = BTreeMap::new();
    let mut keys = Vec::new();
    for (entry, _) in &found {
        let at = window(shape, *entry);
        let key = Key(read(verbs, at).await as u32);
        let next = Key::new(key.index(), key.tag().wrapping_add(1));
        verbs.cas(at, key.0 as u64, next.0 as u64).await?;
        keys.push(next);
    }
    for ((entry, word), key) in found.iter().zip(keys) {
        let open = Capability::open(key).to_word();
        verbs.cas(shape.capability(*entry), *word, open).await?;
        let block = block(*entry);
        by_header.entry(block.place()).or_default().push(block);
    }
    for blocks in by_header.values() {
        let log = FullLog::parse(read(verbs, shape.log(blocks[blocks.len() - 1].chunk)).await);
        tree.give_back(verbs, blocks, log.user).await?;
    }
    Ok(())
}

impl World {
    fn new(shape: Shape, clients: &[Client], breaks: Option<usize>) -> Self {
        let held = Arc::new(Held::default());
        let released = Released::default();
        let memory = Memory::with_windows(shape, 127);
        let mut tasks: Vec<Task> = (1..)
            .zip(clients)
            .map(|(n, c)| client(memory.clone(), user(n), c.orders, held.clone(), released.clone()))
            .collect();
        let mut idle = Task::new(|_| async {});
        idle.ended = true;
        tasks.push(idle);
        let clients = clients.to_vec();
        let (dead, taking) = (Vec::new(), Vec::new());
        Self { memory, held, clients, tasks, dead, taking, breaks, anew: false }
    }

    fn node(&self) -> usize {
        self.clients.len()
    }

    fn has_work(&self) -> bool {
        let quarantined = |entry| self.memory.capability(entry).is_quarantined();
        let mut entries = self.memory.shape().each_entry();
        !self.dead.is_empty() || self.anew || entries.any(quarantined)
    }
}

impl Explored for World {
    fn step(&mut self, at: usize) {
        let (shape, node) = (self.memory.shape(), self.node());
        if at == node && self.tasks[node].ended {
            self.taking = self.dead.clone();
            self.tasks[node] = pass(shape, self.taking.clone(), self.anew);
        }
        self.tasks[at].step(&self.memory);
        let (verbs, ended) = (self.tasks[at].history.len(), self.tasks[at].ended);
        if at == node {
            if let Some(breaks) = &mut self.breaks {
                *breaks -= 1;
                if *breaks == 0 {
                    (self.breaks, self.anew) = (None, !ended);
                    self.tasks[node].ended = true;
                }
            }
            if ended {
                self.anew = false;
                // Removes the reclaimed users; users that crashed meanwhile are handled by the next
                // pass.
                self.dead.retain(|user| !self.taking.contains(user));
            }
        } else if self.clients[at].crash == Some(verbs) && !ended {
            self.tasks[at].ended = true;
            self.held.forget(user(at as u16 + 1));
            self.dead.push(user(at as u16 + 1));
        }
    }

    fn ready(&self) -> Vec<usize> {
        let node = self.node();
        let can = |at: &usize| !self.tasks[*at].ended || *at == node && self.has_work();
        (0..=node).filter(can).collect()
    }

    fn state(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.memory.words().hash(&mut hasher);
        (self.breaks, self.anew, &self.dead).hash(&mut hasher);
        for task in &self.tasks {
            (task.ended, &task.history).hash(&mut hasher);
        }
        hasher.finish()
    }

    fn check_end(&self) {
        let shape = self.memory.shape();
        let tree = Tree::new(shape, user(101));
        shape
            .each_section()
            .for_each(|section| _ = run(tree.repair_section(&self.memory, section)));
        self.memory.check_empty();
        for chunk in shape.each_chunk() {
            assert!(!self.memory.log(chunk).taken, "the log of chunk {chunk}");
        }
        for entry in shape.each_entry() {
            let open = Capability::open(self.memory.window(entry));
            assert_eq!(self.memory.capability(entry), open, "of {:?}", shape.block(entry));
        }
    }
}

fn working(orders: &'static [u32]) -> Client {
    Client { orders, crash: None }
}

fn crashing(orders: &'static [u32], after: usize) -> Client {
    Client { orders, crash: Some(after) }
}

/// Explores all `worlds`, and prints the numbers of states and ends.
fn explore(shape: Shape, worlds: impl Iterator<Item = (Vec<Client>, Option<usize>)>, most: usize) {
    let (mut states, mut ends, mut count) = (0, 0, 0);
    for (clients, breaks) in worlds {
        let found = explore_all(|| World::new(shape, &clients, breaks), Some(most));
        (states, ends, count) = (states + found.0, ends + found.1, count + 1);
    }
    println!("{count} worlds, {most} preemptions: {states} states, {ends} ends");
    assert!(states > 100 && ends >= count);
}

fn every(long: usize) -> usize {
    if full() { 1 } else { long }
}

/// Ends of quarantines are aborted after any verb, next to clients that allocate and free.
#[test]
fn ends_of_quarantines_survive_aborts_at_any_verb() {
    let breaks = |k| (vec![working(&[0, 1]), working(&[0])], Some(k));
    explore(SMALL, (1..60).step_by(every(4)).map(breaks), if full() { 2 } else { 1 });
    let breaks = |k| (vec![working(&[5]), working(&[0])], Some(k));
    explore(SMALL, (1..60).step_by(every(4)).map(breaks), if full() { 2 } else { 1 });
}

/// As above with a block of two sections, whose release has more steps.
#[test]
fn two_section_release_survives_aborts_at_any_verb() {
    let breaks = |k| (vec![working(&[10]), working(&[9])], Some(k));
    explore(TWO_SECTIONS, (1..60).step_by(every(5)).map(breaks), full() as usize);
}

/// A client crashes, and its recovery is aborted after any verb, next to another client.
#[test]
fn recovery_survives_aborts_at_any_verb() {
    for (orders, other) in [(&[0u32, 2] as &[u32], &[0u32] as &[u32]), (&[5], &[0])] {
        let worlds = |after: usize, every: usize| {
            (2..18).step_by(after).flat_map(move |crash| {
                let breaks = (1..110).step_by(every);
                breaks.map(move |k| (vec![crashing(orders, crash), working(other)], Some(k)))
            })
        };
        explore(SMALL, worlds(every(5), every(7)), 0);
        if full() {
            explore(SMALL, worlds(5, 7), 1);
        }
    }
}

/// Another client crashes while the first one is reclaimed, and that recovery is aborted too.
#[test]
fn recovery_of_two_crashes_survives_aborts() {
    let worlds = (2..16).step_by(every(6)).flat_map(|crash| {
        let breaks = (1..110).step_by(if full() { 3 } else { 13 });
        breaks.map(move |k| (vec![crashing(&[0, 1], crash), crashing(&[0, 0], 7)], Some(k)))
    });
    explore(SMALL, worlds, 1);
}

/// A client crashes while it takes two sections; the recovery of the parts is aborted.
#[test]
fn recovery_of_partial_blocks_survives_aborts() {
    let worlds = (6..20).step_by(every(6)).flat_map(|crash| {
        let breaks = (1..160).step_by(every(17));
        breaks.map(move |k| (vec![crashing(&[10], crash), working(&[9])], Some(k)))
    });
    explore(TWO_SECTIONS, worlds, 0);
}
