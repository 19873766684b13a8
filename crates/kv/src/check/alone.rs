//! Tasks of one owner, and its successor after a crash.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use super::Counts;
use super::linear::{Did, History};
use super::values::{decode, encode, name, seen};
use crate::memory::{Arena, Client, Hand, Memory, Seeded, run as run_tasks};
use crate::store::trips::Operation;
use crate::{Ahead, Condition, Cursor, Error, Expiry, Form, SetOptions, Settings, Store, Update};

type Owner = Store<Arc<Client>, Arena, Arc<Hand>>;
type Task<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

const CHUNK: u32 = 4096;
const CHUNKS: u64 = 1 << 16;

/// The observations of the tasks of a run.
#[derive(Default)]
struct World {
    history: History,
    operations: Cell<u64>,
    wrong: RefCell<Option<String>>,
}

/// Runs `seed`.
pub(super) fn run(seed: u64, counts: &mut Counts) -> Result<(), String> {
    let mut random = Seeded::new(seed ^ 0xa10e);
    let world = World::default();
    let memory = Memory::new(CHUNK);
    let settings = Settings {
        form: if random.below(3) == 0 { Form::Published } else { Form::Fused },
        mirror: random.below(2) == 0,
        groups: Some(2),
        stripe_bits: random.below(3) as u8,
        ..Settings::default()
    };
    let keys = 8 + random.below(57);
    let begun = 1_700_000_000_000;
    let client = Arc::new(Client::new(memory.clone(), true));
    let arena = Arena::new(memory.clone(), 0, CHUNKS);
    let store = world.wait(
        seed,
        Store::create(client.clone(), arena.clone(), Hand::new(begun, seed), settings.clone()),
    )?;
    if random.below(2) == 0 {
        client.crash_after(random.below(2500));
    }
    let mut tasks: Vec<Task<'_>> = Vec::new();
    for task in 0..1 + random.below(4) {
        tasks.push(Box::pin(world.operate(&store, seed, task + 1, keys)));
    }
    tasks.push(Box::pin(world.maintain(&store, seed)));
    tasks.push(Box::pin(world.fill(&store, seed)));
    run_tasks(seed, tasks);
    // The reads at the end are without faults.
    client.stay_up();
    counts.verbs += client.verbs();
    counts.splits += store.trips(Operation::Split).operations;
    counts.operations += world.operations.get();
    let store = if client.is_crashed() {
        counts.crashes += 1;
        let root = store.root();
        let client = Arc::new(Client::new(memory.clone(), true));
        let arena = Arena::new(memory.clone(), 0, CHUNKS);
        world.wait(seed, Store::open(client, arena, Hand::new(begun, !seed), settings, root))?
    } else {
        store
    };
    run_tasks(seed, vec![Box::pin(world.read_all(&store, keys))]);
    if let Some(wrong) = world.wrong.borrow_mut().take() {
        return Err(wrong);
    }
    match world.history.violation() {
        Some(why) => Err(why),
        None if store.blocks().wrong_frees() > 0 => Err("a block was freed twice".to_owned()),
        None => Ok(()),
    }
}

impl World {
    fn fail(&self, what: impl Into<String>) {
        self.wrong.borrow_mut().get_or_insert(what.into());
    }

    /// Runs one future to its end.
    fn wait<T>(
        &self,
        seed: u64,
        future: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, String> {
        let result = RefCell::new(None);
        let store = async { *result.borrow_mut() = Some(future.await) };
        run_tasks(seed, vec![Box::pin(store)]);
        match result.into_inner() {
            Some(Ok(value)) => Ok(value),
            Some(Err(error)) => Err(error.to_string()),
            None => Err("a future did not end".to_owned()),
        }
    }

    /// True if the task ends because its owner has crashed.
    fn is_end(&self, error: &Error) -> bool {
        if !matches!(error, Error::Stopped(_) | Error::Interrupted) {
            self.fail(error.to_string());
        }
        true
    }

    async fn operate(&self, store: &Owner, seed: u64, task: u64, keys: u64) {
        let mut random = Seeded::new(seed ^ task << 32);
        for step in 0..14 {
            let hot = random.below(3) == 0;
            let key = random.below(if hot { 2 } else { keys });
            let number = task << 32 | step << 16 | random.below(1000);
            let begin = self.history.tick();
            let (bytes, value) = (name(key), encode(number));
            let (did, open) = match random.below(10) {
                0..=2 => {
                    let read = self.read(store, &bytes, number).await;
                    let read = read.map(|value| {
                        seen(value).unwrap_or_else(|wrong| {
                            self.fail(format!("key {key}: {wrong}"));
                            Did::Get(None)
                        })
                    });
                    (read, None)
                }
                3..=5 => {
                    let set = store.set(0, &bytes, &value, SetOptions::default()).await;
                    (set.map(|_| Did::Set(number)), Some(Did::Set(number)))
                }
                6 => {
                    let condition = Condition::IfAbsent;
                    let options = SetOptions { condition, ..SetOptions::default() };
                    let set = store.set(0, &bytes, &value, options).await;
                    let did = set.map(|outcome| Did::SetNew(number, outcome.is_set));
                    (did, Some(Did::SetNewOpen(number)))
                }
                7 | 8 => {
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
                    let did = Did::Swap(number, old.unwrap_or(None));
                    (swapped.map(|_| did), Some(Did::Set(number)))
                }
            };
            self.operations.set(self.operations.get() + 1);
            match (did, open) {
                (Ok(did), _) => self.history.add(key, begin, did),
                (Err(error), open) => {
                    if let Some(open) = open {
                        self.history.add_open(key, begin, open);
                    }
                    if self.is_end(&error) {
                        return;
                    }
                }
            }
        }
    }

    /// Reads a value, ahead if `number` is odd.
    async fn read(&self, store: &Owner, key: &[u8], number: u64) -> Result<Option<Vec<u8>>, Error> {
        let mut ahead = Ahead::default();
        if number % 2 == 1 {
            store.read_ahead(0, [key; 2].into_iter(), &mut ahead).await;
            ahead.begin_next();
        }
        match ahead.value() {
            Some(value) => Ok(value.map(|(value, _)| value.to_vec())),
            None => store.get(0, key).await,
        }
    }

    /// Merges, compacts and scans beside the others.
    async fn maintain(&self, store: &Owner, seed: u64) {
        let mut random = Seeded::new(seed ^ 0x3a3a);
        let mut cursor = Cursor::default();
        for _ in 0..6 {
            let done = match random.below(3) {
                0 => store.merge(0).await.map(|_| ()),
                1 => store.compact(60).await.map(|_| ()),
                _ => store.scan(0, cursor, 5).await.map(|scanned| cursor = scanned.next),
            };
            if let Err(error) = done
                && self.is_end(&error)
            {
                return;
            }
        }
    }

    /// Fills the store, so that subtables split and merge.
    async fn fill(&self, store: &Owner, seed: u64) {
        let mut random = Seeded::new(seed ^ 0xf111);
        for i in 0..40 + random.below(260) {
            let key = format!("filler-{i}");
            let done = if random.below(9) == 0 {
                store.delete(0, key.as_bytes()).await.map(|_| ())
            } else {
                store.set(0, key.as_bytes(), b"filler", SetOptions::default()).await.map(|_| ())
            };
            if let Err(error) = done
                && self.is_end(&error)
            {
                return;
            }
        }
    }

    async fn read_all(&self, store: &Owner, keys: u64) {
        for key in 0..keys {
            let begin = self.history.tick();
            match store.get(0, &name(key)).await {
                Ok(value) => match value.map(|value| decode(&value)).transpose() {
                    Ok(value) => self.history.add(key, begin, Did::Get(value)),
                    Err(wrong) => self.fail(format!("key {key}: {wrong}")),
                },
                Err(error) => self.fail(format!("reading at the end: {error}")),
            }
        }
    }
}
