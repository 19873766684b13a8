//! Several tasks at one store, in an order that a seed chooses.

mod common;

use std::borrow::Cow;
use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use common::{TestStore, World, block_on, cases, seeds};
use kv::check::linear::{Did, History};
use kv::memory::{Arena, Client, Hand, Seeded, run};
use kv::{Ahead, Condition, Cursor, Error, Expiry, SetOptions, Settings, Store, Update, Wanted};

type Task<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

fn name(key: u64) -> Vec<u8> {
    format!("key-{key}").into_bytes()
}

/// A value of a length that depends on the number: short, or in pieces.
fn encode(number: u64) -> Vec<u8> {
    let mut bytes = number.to_be_bytes().to_vec();
    bytes.resize(
        if number.is_multiple_of(9) { 5000 } else { 8 + (number % 50) as usize },
        number as u8,
    );
    bytes
}

fn decode(bytes: &[u8]) -> u64 {
    let number = u64::from_be_bytes(bytes[..8].try_into().expect("eight bytes"));
    assert_eq!(bytes, encode(number));
    number
}

/// Reads a value, ahead if `number` is odd.
async fn read(store: &TestStore, key: &[u8], number: u64) -> Option<Vec<u8>> {
    let mut ahead = Ahead::default();
    if number % 2 == 1 {
        store.read_ahead(0, std::iter::once(key), &mut ahead).await;
        ahead.begin_next();
    }
    match ahead.value() {
        Some(value) => value.map(|(value, _)| value.to_vec()),
        None => store.get(0, key).await.expect("a read"),
    }
}

/// Random operations of one task. `serial` makes each written value unique.
async fn operate(store: &TestStore, history: &History, seed: u64, task: u64, keys: u64) {
    let mut random = Seeded::new(seed ^ task << 32);
    for step in 0..12 {
        let key = random.below(keys);
        let number = task << 32 | step << 16 | random.below(1000);
        let begin = history.tick();
        match random.below(10) {
            0..=2 => {
                let value = read(store, &name(key), number).await;
                history.add(key, begin, Did::Get(value.map(|value| decode(&value))));
            }
            3..=5 => {
                let options = SetOptions::default();
                store.set(0, &name(key), &encode(number), options).await.expect("a write");
                history.add(key, begin, Did::Set(number));
            }
            6 => {
                let condition = Condition::IfAbsent;
                let options = SetOptions { condition, ..SetOptions::default() };
                let set = store.set(0, &name(key), &encode(number), options).await;
                history.add(key, begin, Did::SetNew(number, set.expect("a write").is_set));
            }
            7 | 8 => {
                let was_there = store.delete(0, &name(key)).await.expect("a deletion");
                history.add(key, begin, Did::Delete(was_there));
            }
            _ => {
                let mut old = None;
                let swap = |value: Option<&[u8]>, _| {
                    old = value.map(decode);
                    Update::Put(Cow::Owned(encode(number)), Expiry::Never)
                };
                store.update(0, &name(key), swap).await.expect("an update");
                history.add(key, begin, Did::Swap(number, old));
            }
        }
    }
}

/// Merges, compacts and scans beside the others.
async fn maintain(store: &TestStore, seed: u64) {
    let mut random = Seeded::new(seed);
    let mut cursor = Cursor::default();
    for _ in 0..6 {
        match random.below(3) {
            0 => drop(store.merge(0).await.expect("a merge")),
            1 => drop(store.compact(60).await.expect("a compaction")),
            _ => cursor = store.scan(0, cursor, 5).await.expect("a scan").next,
        }
    }
}

/// Fills the store, so that subtables split and merge.
async fn churn(store: &TestStore, seed: u64) {
    let mut random = Seeded::new(seed);
    for i in 0..70 {
        let key = format!("filler-{i}");
        if random.below(9) == 0 {
            store.delete(0, key.as_bytes()).await.expect("a deletion");
        } else {
            let options = SetOptions::default();
            store.set(0, key.as_bytes(), b"filler", options).await.expect("a write");
        }
    }
}

#[test]
fn operations_are_linearizable_per_key() {
    let mut splits = 0;
    for seed in 0..seeds() {
        let cases = cases(1);
        let (_, settings) = cases[seed as usize % cases.len()].clone();
        let world = World::new(4096, 1 << 20, true, seed);
        let stripe_bits = (seed / cases.len() as u64 % 2) as u8;
        let store = world.create(Settings { stripe_bits, ..settings });
        let history = History::default();
        let (history, store) = (&history, &store);
        let keys = 2 + seed % 7;
        let mut tasks: Vec<Task<'_>> = Vec::new();
        for task in 0..2 + seed % 3 {
            tasks.push(Box::pin(operate(store, history, seed, task + 1, keys)));
        }
        tasks.push(Box::pin(maintain(store, seed)));
        tasks.push(Box::pin(churn(store, seed)));
        run(seed, tasks);
        history.check(seed);
        splits += store.trips(kv::Operation::Split).operations;
        block_on(store.flush_all()).expect("a flush");
        // Root and journal, and the journal's word and the reserved record of each stripe.
        assert_eq!(
            world.arena.used().len(),
            2 + (2 << stripe_bits),
            "seed {seed}: blocks were lost"
        );
        assert_eq!(world.arena.wrong_frees(), 0, "seed {seed}");
    }
    assert!(splits > seeds(), "{splits} splits in {} runs", seeds());
}

/// Writers that wait at the gates of two subtables write to the one that replaces them.
#[test]
fn writes_beside_a_merge_are_not_lost() {
    const KEYS: u64 = 8;
    let merges = std::cell::Cell::new(0);
    for seed in 0..seeds() {
        let cases = cases(1);
        let (column, settings) = cases[seed as usize % cases.len()].clone();
        let world = World::new(4096, 1 << 20, true, seed);
        let store = world.create(settings);
        for key in 0..60 {
            let (name, value) = (name(key), encode(0));
            block_on(store.set(0, &name, &value, SetOptions::default())).expect("a write");
        }
        for key in KEYS..60 {
            assert!(block_on(store.delete(0, &name(key))).expect("a deletion"));
        }
        let (store, merges) = (&store, &merges);
        let write = |key: u64| async move {
            for number in 1..4 {
                let set = store.set(0, &name(key), &encode(number), SetOptions::default()).await;
                set.expect("a write");
            }
        };
        let merge =
            async move { merges.set(merges.get() + store.merge(0).await.expect("a merge")) };
        let mut tasks: Vec<Task<'_>> = vec![Box::pin(merge)];
        tasks.extend((0..KEYS).map(|key| -> Task<'_> { Box::pin(write(key)) }));
        run(seed, tasks);
        for key in 0..KEYS {
            let read = block_on(store.get(0, &name(key))).expect("a read");
            assert_eq!(read, Some(encode(3)), "{column}, seed {seed}, key {key}");
        }
        assert_eq!((store.len(0), world.arena.wrong_frees()), (KEYS, 0), "{column}, seed {seed}");
    }
    assert!(merges.get() as u64 > seeds(), "{} merges", merges.get());
}

/// A task writes one number to two keys; another reads both in one call.
#[test]
fn calls_of_several_keys_are_atomic() {
    let read_ahead = std::cell::Cell::new(0);
    for seed in 0..seeds() {
        let cases = cases(1);
        let (_, settings) = cases[seed as usize % cases.len()].clone();
        let world = World::new(4096, 1 << 20, true, seed);
        let store = world.create(settings);
        let store = &store;
        let write = |task: u64| async move {
            let (one, two) = (name(1), name(2));
            for step in 0..5 {
                let keys = [&one, &two].map(|key| Wanted { db: 0, key, is_read: false });
                let value = encode(task << 32 | step);
                let put = |call: &mut kv::Transaction| {
                    (0..2).for_each(|key| call.put(key, value.clone(), Expiry::Never));
                };
                store.atomically(&keys, put).await.expect("a change");
            }
        };
        let read = || async {
            let (one, two) = (name(1), name(2));
            for _ in 0..8 {
                let values = store.get_many(0, &[&one, &two]).await.expect("a read");
                assert_eq!(values[0], values[1], "seed {seed}");
                let mut ahead = Ahead::default();
                store.read_ahead(0, [&one[..], &two].into_iter(), &mut ahead).await;
                let [one, two] = [0, 1].map(|_| {
                    ahead.begin_next();
                    ahead.value().map(|value| value.map(|(value, _)| value.to_vec()))
                });
                if one.is_some() && two.is_some() {
                    assert_eq!(one, two, "read ahead, seed {seed}");
                    read_ahead.set(read_ahead.get() + 1);
                }
            }
        };
        let tasks: Vec<Task<'_>> = vec![
            Box::pin(write(1)),
            Box::pin(write(2)),
            Box::pin(read()),
            Box::pin(churn(store, seed)),
            Box::pin(maintain(store, seed)),
        ];
        run(seed, tasks);
    }
    assert!(read_ahead.get() > seeds() / 10, "{} pairs were read ahead", read_ahead.get());
}

/// The compute node crashes at a random verb, with several calls open; the successor's content must
/// have an order with the open calls done or not.
#[test]
fn crashed_operations_are_linearizable_with_their_successor() {
    for seed in 0..seeds() {
        let cases = cases(1);
        let (_, settings) = cases[seed as usize % cases.len()].clone();
        let world = World::new(4096, 1 << 20, true, seed);
        let store = world.create(settings.clone());
        let history = History::default();
        let opened = RefCell::new(Vec::new());
        let mut random = Seeded::new(seed);
        world.client.crash_after(random.below(150));
        {
            let (store, history, opened) = (&store, &history, &opened);
            let tasks = (1..4).map(|task| -> Task<'_> {
                Box::pin(async move {
                    let mut random = Seeded::new(seed ^ task << 40);
                    for step in 0..12 {
                        let (key, number) = (random.below(4), task << 32 | step);
                        let begin = history.tick();
                        let (key_bytes, value) = (name(key), encode(number));
                        let set = store.set(0, &key_bytes, &value, SetOptions::default());
                        match set.await {
                            Ok(_) => history.add(key, begin, Did::Set(number)),
                            Err(Error::Stopped(_) | Error::Interrupted) => {
                                opened.borrow_mut().push((key, begin, number));
                                return;
                            }
                            Err(error) => panic!("seed {seed}: {error}"),
                        }
                    }
                })
            });
            run(seed, tasks.chain([Box::pin(churn_until_crash(store)) as Task<'_>]).collect());
        }
        let client = Arc::new(Client::new(world.memory.clone(), false));
        let arena = Arena::new(world.memory.clone(), 0, 1 << 20);
        let (hand, root) = (Hand::new(0, 5), store.root());
        let opening = Store::open(client, arena, hand, settings, root);
        let successor = match block_on(opening) {
            Ok(successor) => successor,
            // The first owner ended before its store was whole.
            Err(error) => panic!("seed {seed}: {error}"),
        };
        for key in 0..4 {
            let begin = history.tick();
            let value = block_on(successor.get(0, &name(key))).expect("a read");
            history.add(key, begin, Did::Get(value.map(|value| decode(&value))));
        }
        for (key, begin, number) in opened.into_inner() {
            history.add_open(key, begin, Did::Set(number));
        }
        history.check(seed);
    }
}

async fn churn_until_crash(store: &TestStore) {
    for i in 0..60 {
        let key = format!("filler-{i}");
        if store.set(0, key.as_bytes(), b"filler", SetOptions::default()).await.is_err() {
            return;
        }
    }
}

/// A reader stops between slot and block; meanwhile the key is deleted and its memory used again.
#[test]
fn late_reader_sees_no_memory_that_is_used_again() {
    for (column, settings) in cases(21) {
        for (polls, writes) in (0..20).flat_map(|polls| [(polls, 0), (polls, 20)]) {
            let world = World::new(4096, 1 << 20, true, 1);
            let store = world.create(settings.clone());
            let value = encode(4);
            block_on(store.set(0, b"key", &value, SetOptions::default())).expect("a write");
            let mut reader = std::pin::pin!(store.get(0, b"key"));
            let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
            let mut early = None;
            for _ in 0..polls {
                if let std::task::Poll::Ready(read) = reader.as_mut().poll(&mut cx) {
                    early = Some(read);
                    break;
                }
            }
            if early.is_some() {
                break;
            }
            // Not by the key, for which the reader holds a ticket.
            block_on(store.flush(0)).expect("a flush");
            for i in 0..writes {
                let options = SetOptions::default();
                block_on(store.set(0, &name(i), &encode(4), options)).expect("a write");
            }
            let read = block_on(reader).expect("a read");
            if let Some(read) = read {
                assert_eq!(read, value, "{column}, {polls} polls");
            }
            // The reader does not know the memory any more, so it is used again.
            for i in writes..writes + 20 {
                let options = SetOptions::default();
                block_on(store.set(0, &name(i), &encode(4), options)).expect("a write");
            }
            for i in 0..writes + 20 {
                let read = block_on(store.get(0, &name(i))).expect("a read");
                assert_eq!(read, Some(encode(4)), "{column}, {polls} polls, key {i}");
            }
        }
    }
}

/// A key is chosen for eviction while a write replaces its block.
#[test]
fn eviction_beside_a_write_of_its_key() {
    for (column, settings) in cases(1) {
        let (mut between, mut polls) = (0, 0);
        loop {
            let world = World::new(4096, 1 << 20, true, 1);
            let store = world.create(settings.clone());
            block_on(store.set(0, b"key", b"old", SetOptions::default())).expect("a write");
            let mut write = std::pin::pin!(store.set(0, b"key", b"new", SetOptions::default()));
            let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
            if (0..polls).any(|_| write.as_mut().poll(&mut cx).is_ready()) {
                break;
            }
            polls += 1;
            let by = kv::Eviction::Random;
            let mut evict = std::pin::pin!(store.evict(kv::Candidates::All, by));
            let early = (0..20).find_map(|_| match evict.as_mut().poll(&mut cx) {
                std::task::Poll::Ready(evicted) => Some(evicted),
                std::task::Poll::Pending => None,
            });
            block_on(write).expect("a write");
            let left = || block_on(store.get(0, b"key")).expect("a read");
            match early {
                // The write has begun after the eviction.
                Some(evicted) => {
                    assert_eq!(evicted, Ok(true), "{column}: {polls} polls");
                    assert_eq!(left().as_deref(), Some(&b"new"[..]), "{column}: {polls} polls");
                }
                // The eviction has chosen the key, and waits for the write.
                None => {
                    assert_eq!(block_on(evict), Ok(true), "{column}: {polls} polls");
                    assert_eq!((left(), store.len(0)), (None, 0), "{column}: {polls} polls");
                    between += 1;
                }
            }
            assert!(!store.is_interrupted(), "{column}: {polls} polls");
        }
        assert!(between > 0, "{column}: the eviction never waited");
    }
}
