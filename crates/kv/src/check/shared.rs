//! Several clients of one shared index.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use super::Counts;
use super::allocator::{Allocator, Shared};
use super::linear::{Did, History};
use super::values::{decode, encode, name, seen};
use crate::blocks::NoBlock;
use crate::memory::{Client, Faults, Hand, Memory, Seeded, run as run_tasks, turn};
use crate::shared::{SharedSettings, SharedStore, SplitLock};
use crate::store::trips::Operation;
use crate::{Condition, Error, Expiry, Form, SetOptions, Update};

type Store = SharedStore<Arc<Client>, Allocator, Arc<Hand>>;
type Task<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

const CHUNK: u32 = 4096;
/// More events of one key make the check slow.
const EVENTS_MAX: usize = 40;

/// The clients of a run, and what they have seen.
struct World {
    seed: u64,
    memory: Arc<Memory>,
    shared: Shared,
    hand: Arc<Hand>,
    stores: Vec<Store>,
    history: History,
    keys: u64,
    /// What each filler key must have: `None` if a write has no answer.
    fillers: RefCell<BTreeMap<u64, Option<u64>>>,
    wrong: RefCell<Option<String>>,
    operations: Cell<u64>,
    running: Cell<usize>,
}

/// An operation that broke off.
enum Broken {
    /// The client can go on.
    Lost,
    /// The client has crashed.
    Crashed,
}

/// Runs `seed`.
pub(super) fn run(seed: u64, counts: &mut Counts) -> Result<(), String> {
    let mut random = Seeded::new(seed ^ 0x5a5a);
    let world = World::new(seed, &mut random)?;
    let crashes = random.below(2) == 0;
    let lost_one_in = [0, 30, 100, 300][random.below(4) as usize];
    let stall_one_in = [0, 20, 100, 400][random.below(4) as usize];
    for store in &world.stores {
        let client = store.reach();
        client.set_faults(Faults {
            lost_one_in,
            stall_one_in,
            stall_turns: [50, 500, 3000][random.below(3) as usize],
            ..Faults::none(random.draw())
        });
        if crashes && random.below(2) == 0 {
            client.crash_after(random.below(600));
        }
    }
    let mut tasks: Vec<Task<'_>> = Vec::new();
    let each = 1 + random.below(2);
    for client in 0..world.stores.len() {
        for task in 0..each {
            let number = client as u64 * 8 + task;
            tasks.push(Box::pin(world.operate(client, number + 1)));
        }
        tasks.push(Box::pin(world.fill(client, 10 + random.below(90))));
    }
    world.running.set(tasks.len());
    tasks.push(Box::pin(world.tend()));
    run_tasks(seed, tasks);
    for store in &world.stores {
        // What follows is without faults.
        store.reach().stay_up();
        counts.verbs += store.reach().verbs();
        counts.splits += store.trips(Operation::Split).operations;
        counts.crashes += u64::from(store.reach().is_crashed());
        let (lost, stalls) = store.reach().faults();
        counts.lost += lost;
        counts.stalls += stalls;
    }
    run_tasks(seed, vec![Box::pin(world.read_all())]);
    counts.operations += world.operations.get();
    if let Some(wrong) = world.wrong.borrow_mut().take() {
        return Err(wrong);
    }
    if let Some(why) = world.history.violation() {
        return Err(why);
    }
    let is_clean = !world
        .stores
        .iter()
        .any(|store| store.reach().is_crashed() || store.reach().faults().0 > 0);
    run_tasks(seed, vec![Box::pin(world.empty(is_clean))]);
    match world.wrong.borrow_mut().take() {
        Some(wrong) => Err(wrong),
        None if world.shared.wrong_frees() > 0 => Err("a block was freed twice".to_owned()),
        None => Ok(()),
    }
}

/// Runs one future to its end.
fn wait<T>(seed: u64, future: impl Future<Output = Result<T, Error>>) -> Result<T, String> {
    let result = RefCell::new(None);
    let store = async { *result.borrow_mut() = Some(future.await) };
    run_tasks(seed, vec![Box::pin(store)]);
    match result.into_inner() {
        Some(Ok(value)) => Ok(value),
        Some(Err(error)) => Err(error.to_string()),
        None => Err("a future did not end".to_owned()),
    }
}

impl World {
    fn new(seed: u64, random: &mut Seeded) -> Result<Self, String> {
        let memory = Memory::new(CHUNK);
        let shared = wait(seed, Shared::new(&memory, random))?;
        let hand = Hand::new(1_700_000_000_000, seed);
        let settings = SharedSettings {
            form: if random.below(2) == 0 { Form::Published } else { Form::Fused },
            groups: Some(2),
            lock: SplitLock::Lease(1 + random.below(20)),
            suspect_ms: random.below(20),
            attempts: 100_000,
            ..SharedSettings::default()
        };
        let mut stores: Vec<Store> = Vec::new();
        for _ in 0..1 + random.below(4) {
            let client = Arc::new(Client::new(memory.clone(), true));
            let (hand, settings) = (hand.clone(), settings.clone());
            let root = stores.first().map(Store::root);
            let open = async {
                let blocks = shared.join(&client).await?;
                match root {
                    None => SharedStore::create(client, blocks, hand, settings).await,
                    Some(root) => SharedStore::open(client, blocks, hand, settings, root).await,
                }
            };
            stores.push(wait(seed, open)?);
        }
        Ok(Self {
            seed,
            memory,
            shared,
            hand,
            stores,
            history: History::default(),
            keys: [8, 12, 24, 64][random.below(4) as usize],
            fillers: RefCell::default(),
            wrong: RefCell::default(),
            operations: Cell::default(),
            running: Cell::default(),
        })
    }

    fn fail(&self, what: impl Into<String>) {
        self.wrong.borrow_mut().get_or_insert(what.into());
    }

    /// What follows from an error. `None`: the run has failed.
    fn broken(&self, client: usize, error: &Error) -> Option<Broken> {
        match error {
            Error::Stopped(_) if self.stores[client].reach().is_crashed() => Some(Broken::Crashed),
            Error::Stopped(_) | Error::HeldBack(_) | Error::NoBlock(NoBlock::Full) => {
                Some(Broken::Lost)
            }
            _ => {
                self.fail(format!("client {client}: {error}"));
                None
            }
        }
    }

    /// Random operations of one task.
    async fn operate(&self, client: usize, task: u64) {
        let mut random = Seeded::new(self.seed ^ task << 32);
        let store = &self.stores[client];
        for step in 0..16 {
            // Two of the keys are hot.
            let hot = random.below(3) == 0;
            let mut key = random.below(if hot { 2 } else { self.keys });
            if self.history.events(key) >= EVENTS_MAX {
                key = random.below(self.keys);
            }
            let number = task << 32 | step << 16 | random.below(1000);
            let begin = self.history.tick();
            let (bytes, value) = (name(key), encode(number));
            // The entry of the history, with and without an answer.
            let (did, open) = match random.below(12) {
                0..=3 => {
                    let read = store.get(0, &bytes).await;
                    let read = read.map(|value| {
                        seen(value).unwrap_or_else(|wrong| {
                            self.fail(format!("key {key}: {wrong}"));
                            Did::Get(None)
                        })
                    });
                    (read, None)
                }
                4..=6 => {
                    let set = store.set(0, &bytes, &value, SetOptions::default()).await;
                    (set.map(|_| Did::Set(number)), Some(Did::Set(number)))
                }
                7 | 8 => {
                    let condition = Condition::IfAbsent;
                    let options = SetOptions { condition, ..SetOptions::default() };
                    let set = store.set(0, &bytes, &value, options).await;
                    let did = set.map(|outcome| Did::SetNew(number, outcome.is_set));
                    (did, Some(Did::SetNewOpen(number)))
                }
                9 | 10 => {
                    let deleted = store.delete(0, &bytes).await;
                    (deleted.map(Did::Delete), Some(Did::DeleteOpen))
                }
                _ => {
                    let mut old = Ok(None);
                    let swap = |before: Option<&[u8]>, _| {
                        old = before.map(decode).transpose();
                        Update::Put(Cow::Owned(encode(number)), Expiry::Never)
                    };
                    let swapped = store.update(0, &bytes, swap).await;
                    if let Err(wrong) = &old {
                        self.fail(format!("key {key}: {wrong}"));
                    }
                    let did = Did::Swap(number, old.unwrap_or(None));
                    (swapped.map(|()| did), Some(Did::Set(number)))
                }
            };
            self.operations.set(self.operations.get() + 1);
            let error = match did {
                Ok(did) => {
                    self.history.add(key, begin, did);
                    continue;
                }
                Err(error) => error,
            };
            if let Some(open) = open {
                self.history.add_open(key, begin, open);
            }
            if !matches!(self.broken(client, &error), Some(Broken::Lost)) {
                break;
            }
        }
        self.running.set(self.running.get() - 1);
    }

    /// Writes keys that no other client writes, so that subtables split.
    async fn fill(&self, client: usize, count: u64) {
        let mut random = Seeded::new(self.seed ^ (client as u64 + 77) << 24);
        let store = &self.stores[client];
        for _ in 0..count {
            let number = random.below(count);
            let key = (client as u64 + 1) << 32 | number;
            let value = random.below(1 << 20);
            let delete = random.below(8) == 0;
            let bytes = name(key);
            let done = match delete {
                true => store.delete(0, &bytes).await.map(|_| ()),
                false => {
                    let set = store.set(0, &bytes, &encode(value), SetOptions::default()).await;
                    set.map(|_| ())
                }
            };
            let mut fillers = self.fillers.borrow_mut();
            match done {
                Ok(()) if delete => drop(fillers.remove(&key)),
                Ok(()) => drop(fillers.insert(key, Some(value))),
                Err(error) => {
                    fillers.insert(key, None);
                    if !matches!(self.broken(client, &error), Some(Broken::Lost)) {
                        break;
                    }
                }
            }
        }
        self.running.set(self.running.get() - 1);
    }

    /// Turns the clock, ticks idle clients, and strikes crashed ones.
    async fn tend(&self) {
        let mut random = Seeded::new(self.seed ^ 0xc10c);
        let mut struck = vec![false; self.stores.len()];
        while self.running.get() > 0 {
            turn().await;
            if random.below(40) == 0 {
                self.hand.advance(1);
            }
            if random.below(200) == 0 {
                let client = random.below(self.stores.len() as u64) as usize;
                if !self.stores[client].reach().is_crashed() {
                    // A tick may be lost; another follows.
                    let store = &self.stores[client];
                    let _ = match random.below(2) {
                        0 => store.tick().await,
                        _ => store.tend().await,
                    };
                }
            }
            for (client, store) in self.stores.iter().enumerate() {
                if store.reach().is_crashed() && !struck[client] && random.below(100) == 0 {
                    struck[client] = true;
                    store.reach().end_life();
                }
            }
        }
    }

    /// A client without faults.
    async fn another(&self) -> Option<Store> {
        let client = Arc::new(Client::new(self.memory.clone(), true));
        let settings = SharedSettings {
            groups: Some(2),
            tick_ms: 0,
            attempts: 100_000,
            ..SharedSettings::default()
        };
        let root = self.stores[0].root();
        let hand = self.hand.clone();
        let open = async {
            let blocks = self.shared.join(&client).await?;
            SharedStore::open(client, blocks, hand, settings, root).await
        };
        match open.await {
            Ok(store) => Some(store),
            Err(error) => {
                self.fail(format!("opening at the end: {error}"));
                None
            }
        }
    }

    /// Reads all keys at the end.
    async fn read_all(&self) {
        let Some(store) = self.another().await else { return };
        for key in 0..self.keys {
            let begin = self.history.tick();
            match store.get(0, &name(key)).await {
                Ok(value) => match value.map(|value| decode(&value)).transpose() {
                    Ok(value) => self.history.add(key, begin, Did::Get(value)),
                    Err(wrong) => self.fail(format!("key {key}: {wrong}")),
                },
                Err(error) => self.fail(format!("reading at the end: {error}")),
            }
        }
        let fillers = self.fillers.borrow().clone();
        for (key, expected) in fillers {
            let Some(expected) = expected else { continue };
            match store.get(0, &name(key)).await {
                Ok(Some(value)) if value == encode(expected) => {}
                found => self.fail(format!("filler {key:#x}: {found:x?}, not {expected}")),
            }
        }
        if let Err(error) = store.leave().await {
            self.fail(format!("leaving: {error}"));
        }
    }

    /// Deletes all keys with a client of its own, after locks have ended. All blocks but those of
    /// the index must be free if `is_clean`: no client has crashed or lost a round trip.
    async fn empty(&self, is_clean: bool) {
        self.hand.advance(1000);
        let Some(store) = self.another().await else { return };
        for client in &self.stores {
            client.reach().set_faults(Faults::none(0));
            if client.reach().is_crashed() {
                client.reach().end_life();
            }
        }
        let fillers: Vec<u64> = self.fillers.borrow().keys().copied().collect();
        for key in (0..self.keys).chain(fillers) {
            if let Err(error) = store.delete(0, &name(key)).await {
                self.fail(format!("deleting key {key:#x} at the end: {error}"));
                return;
            }
            match store.exists(0, &name(key)).await {
                Ok(false) => {}
                found => self.fail(format!("key {key:#x} after its deletion: {found:?}")),
            }
        }
        if !is_clean {
            self.collect(store).await;
            return;
        }
        for _ in 0..12 {
            self.hand.advance(10);
            for client in self.stores.iter().chain([&store]) {
                if let Err(error) = client.settle(0).await {
                    self.fail(format!("ending: {error}"));
                }
            }
        }
        self.check_used(&store, self.stores.iter()).await;
    }

    /// Ends all clients but `store`, which collects the blocks that they have left behind. All
    /// blocks but those of the index must be free then, and those of the index must not.
    async fn collect(&self, mut store: Store) {
        let kept = |i: u64| (name(1 << 40 | i), encode(i << 9));
        let mut written = Vec::new();
        for i in 0..8 {
            let (key, value) = kept(i);
            match store.set(0, &key, &value, SetOptions::default()).await {
                Ok(_) => written.push(i),
                // Blocks that were left behind may fill the region.
                Err(Error::NoBlock(NoBlock::Full) | Error::HeldBack(_)) => break,
                Err(error) => self.fail(format!("writing before the collection: {error}")),
            }
        }
        match store.collect().await {
            Err(Error::NotAlone(_)) if self.stores.iter().any(|one| !one.reach().is_crashed()) => {}
            Ok(_) if self.stores.iter().all(|one| one.reach().is_crashed()) => {}
            found => self.fail(format!("collecting beside other clients: {found:?}")),
        }
        self.stores.iter().for_each(|client| client.reach().end_life());
        if let Err(error) = store.collect().await {
            self.fail(format!("collecting: {error}"));
            return;
        }
        let others = self.fillers.borrow().len() as u64 + self.keys;
        for i in 0..others {
            let (key, value) = (name(2 << 40 | i), encode(i));
            if let Err(error) = store.set(0, &key, &value, SetOptions::default()).await {
                self.fail(format!("writing after the collection: {error}"));
            }
        }
        for i in written {
            let (key, value) = kept(i);
            match store.get(0, &key).await {
                Ok(Some(found)) if found == value => {}
                found => self.fail(format!("key {i} after the collection: {found:x?}")),
            }
        }
        for key in (0..8).map(|i| 1 << 40 | i).chain((0..others).map(|i| 2 << 40 | i)) {
            if let Err(error) = store.delete(0, &name(key)).await {
                self.fail(format!("deleting after the collection: {error}"));
            }
        }
        for _ in 0..12 {
            self.hand.advance(10);
            if let Err(error) = store.settle(0).await {
                self.fail(format!("ending: {error}"));
            }
        }
        self.check_used(&store, std::iter::empty()).await;
    }

    /// Compares the blocks in use with those of the index.
    async fn check_used<'a>(&self, store: &Store, others: impl Iterator<Item = &'a Store>) {
        let others = others.map(Store::blocks);
        let (used, index) = (store.blocks().used(others).await, store.index_blocks(0).await);
        match (used, index) {
            (Ok(used), Ok(index)) if used == index => {}
            (used, index) => {
                self.fail(format!("{used:?} blocks are in use, the index has {index:?}"));
            }
        }
    }
}
