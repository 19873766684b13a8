//! A crash after every single verb of each operation, then recovery from the index alone.

mod common;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::task::{Context, Waker};

use common::{BEGIN, COLUMNS, TestStore, World, block_on, settings};
use kv::blocks::Blocks;
use kv::memory::{Arena, Client, Hand};
use kv::{Error, Expiry, Form, Operation, SetOptions, Settings, Store, Update, Wanted};

type Model = BTreeMap<Vec<u8>, (Vec<u8>, u64)>;
type Call = fn(&TestStore) -> Result<(), Error>;

/// Keys of each store before the crash.
const KEYS: u32 = 30;

fn name(i: u32) -> Vec<u8> {
    format!("key-{i}").into_bytes()
}

fn value(i: u32) -> Vec<u8> {
    // Every fifth value is in pieces.
    let bytes = if i.is_multiple_of(5) { 5000 } else { i as usize * 7 };
    (0..bytes).map(|byte| (byte as u32 * 31 + i) as u8).collect()
}

fn fill(store: &TestStore, keys: std::ops::Range<u32>) {
    for i in keys {
        let expiry = if i % 3 == 0 { Expiry::At(BEGIN + 1000) } else { Expiry::Never };
        let options = SetOptions { expiry, ..SetOptions::default() };
        block_on(store.set(0, &name(i), &value(i), options)).expect("a write");
    }
}

/// All keys of database 0, by name.
fn content(store: &TestStore) -> Model {
    let mut model = Model::new();
    for i in 0..1000 {
        if let Some(value) = block_on(store.get(0, &name(i))).expect("a read") {
            let expiry = block_on(store.expiry(0, &name(i))).expect("a read").expect("is there");
            model.insert(name(i), (value, expiry));
        }
    }
    assert_eq!(store.len(0), model.len() as u64);
    model
}

/// Opens the store of a crashed compute node with a new client and a new allocator.
fn recover(world: &World, form: Form, mirror: bool, groups: u16) -> (TestStore, Arena) {
    let client = Arc::new(Client::new(world.memory.clone(), false));
    let arena = Arena::new(world.memory.clone(), 0, 1 << 20);
    let root = kv::place::Place::default();
    let hand = Hand::new(BEGIN, 5);
    let opened = Store::open(client, arena.clone(), hand, settings(form, mirror, groups), root);
    (block_on(opened).expect("a recovered store"), arena)
}

/// Crashes `call` after each of its verbs, and compares the recovered content with that before and
/// after the call.
fn crash_everywhere(what: &str, groups: u16, prepare: fn(&TestStore), call: Call) {
    crash_in_stripes(what, 0, groups, prepare, call);
}

fn crash_in_stripes(what: &str, stripe_bits: u8, groups: u16, prepare: fn(&TestStore), call: Call) {
    for (column, form, mirror) in COLUMNS {
        let begin = || {
            let world = World::new(4096, 1 << 20, false, 1);
            let settings = settings(form, mirror, groups);
            let store = world.create(Settings { stripe_bits, ..settings });
            prepare(&store);
            (world, store)
        };
        let (_world, store) = begin();
        let before = content(&store);
        call(&store).expect("the call without a crash");
        let after = content(&store);
        let mut outcomes = BTreeSet::new();
        for verbs in 0.. {
            let (world, store) = begin();
            world.client.crash_after(verbs);
            let done = call(&store);
            if done.is_ok() && !world.client.is_crashed() {
                assert!(verbs > 0, "{what}, {column}: the call needs no verb");
                break;
            }
            drop(store);
            let (store, arena) = recover(&world, form, mirror, groups);
            let found = content(&store);
            assert!(found == before || found == after, "{what}, {column}: {verbs} verbs");
            outcomes.insert(found == after);
            assert!(done.is_err() || found == after, "{what}, {column}: acknowledged and lost");
            check_use(&store, &arena, found, stripe_bits, 2);
        }
        assert!(outcomes.contains(&false) || before == after, "{what}, {column}");
    }
}

/// A record that was carried out has no effect on changes that come later.
#[test]
fn record_is_carried_out_once() {
    for (column, form, mirror) in COLUMNS {
        let mut replays = 0;
        for verbs in 0.. {
            let world = World::new(4096, 1 << 20, false, 1);
            let store = world.create(settings(form, mirror, 21));
            fill(&store, 0..KEYS);
            let before = content(&store);
            let keys = [name(200), name(201)];
            let keys: Vec<_> =
                keys.iter().map(|key| Wanted { db: 0, key, is_read: false }).collect();
            world.client.crash_after(verbs);
            let call = store.atomically(&keys, |call| {
                (0..2).for_each(|key| call.put(key, value(7), Expiry::Never));
            });
            if block_on(call).is_ok() && !world.client.is_crashed() {
                break;
            }
            drop(store);
            let (store, arena) = recover(&world, form, mirror, 21);
            replays += u32::from(content(&store) != before);
            // The blocks that the record names stay whole.
            let _pin = arena.pin();
            for key in [200, 201] {
                block_on(store.delete(0, &name(key))).expect("a deletion");
            }
            assert_eq!(content(&store), before, "{column}: {verbs} verbs");
            drop(store);
            let (store, _) = recover(&world, form, mirror, 21);
            assert_eq!(content(&store), before, "{column}: {verbs} verbs, second successor");
        }
        assert!(replays >= 2, "{column}: {replays} replays");
    }
}

/// Two compute nodes take over at once. The one that counts itself too late learns that.
#[test]
fn one_of_two_successors_becomes_the_owner() {
    for (column, form, mirror) in COLUMNS {
        let mut deposed = 0;
        for polls in 0.. {
            let world = World::new(4096, 1 << 20, false, 1);
            let store = world.create(settings(form, mirror, 21));
            some_keys(&store);
            let before = content(&store);
            drop(store);
            let client = Arc::new(Client::new(world.memory.clone(), true));
            let arena = Arena::new(world.memory.clone(), 0, 1 << 20);
            let (hand, root) = (Hand::new(BEGIN, 5), kv::place::Place::default());
            let own = settings(form, mirror, 21);
            let mut late = std::pin::pin!(Store::open(client, arena, hand, own, root));
            let mut cx = Context::from_waker(Waker::noop());
            if (0..polls).any(|_| late.as_mut().poll(&mut cx).is_ready()) {
                break;
            }
            let (first, _) = recover(&world, form, mirror, 21);
            match block_on(late) {
                Err(error) => {
                    assert_eq!(error, Error::Deposed, "{column}: {polls} polls");
                    assert_eq!(block_on(first.check_owner()), Ok(()), "{column}: {polls} polls");
                    assert_eq!(content(&first), before, "{column}: {polls} polls");
                    deposed += 1;
                }
                // This successor was the first one, or came behind the other one.
                Ok(late) if late.generation() > first.generation() => {
                    assert_eq!(block_on(first.check_owner()), Err(Error::Deposed), "{column}");
                }
                Ok(late) => {
                    assert_eq!((late.generation(), first.generation()), (2, 3), "{column}");
                    assert_eq!(block_on(late.check_owner()), Err(Error::Deposed), "{column}");
                }
            }
        }
        assert!(deposed > 0, "{column}: no successor came too late");
    }
}

/// Uses a recovered store: fills it, empties it, and looks for blocks that were lost.
fn check_use(store: &TestStore, arena: &Arena, found: Model, stripe_bits: u8, generation: u64) {
    assert_eq!(store.generation(), generation);
    fill(store, 500..540);
    for key in found.keys() {
        assert!(block_on(store.delete(0, key)).expect("a deletion"));
    }
    for i in 500..540 {
        assert_eq!(block_on(store.get(0, &name(i))).expect("a read"), Some(value(i)));
        assert!(block_on(store.delete(0, &name(i))).expect("a deletion"));
    }
    block_on(store.flush(0)).expect("a flush");
    // Root and journal, and the journal's word and the reserved record of each stripe.
    let kept = 2 + (2 << stripe_bits);
    assert_eq!((arena.used().len(), arena.wrong_frees()), (kept, 0), "{:?}", arena.used());
}

fn some_keys(store: &TestStore) {
    fill(store, 0..KEYS);
}

/// Deleted keys leave nearly empty subtables and chunks.
fn few_of_many_keys(store: &TestStore) {
    fill(store, 0..90);
    for i in 700..720 {
        block_on(store.set(0, &name(i), &[i as u8; 950], SetOptions::default())).expect("a write");
    }
    for i in (8..90).chain((700..720).filter(|i| i % 4 != 0)) {
        block_on(store.delete(0, &name(i))).expect("a deletion");
    }
}

#[test]
fn set_of_a_new_key_survives_a_crash() {
    crash_everywhere("set, new", 21, some_keys, |store| {
        block_on(store.set(0, &name(200), &value(200), SetOptions::default())).map(drop)
    });
}

#[test]
fn set_of_a_key_survives_a_crash() {
    crash_everywhere("set, there", 21, some_keys, |store| {
        block_on(store.set(0, &name(10), b"other", SetOptions::default())).map(drop)
    });
}

#[test]
fn delete_survives_a_crash() {
    crash_everywhere("delete", 21, some_keys, |store| {
        block_on(store.delete(0, &name(10))).map(drop)
    });
}

#[test]
fn expire_survives_a_crash() {
    crash_everywhere("expire", 21, some_keys, |store| {
        block_on(store.expire(0, &name(4), BEGIN + 77, |_| true)).map(drop)
    });
}

#[test]
fn update_survives_a_crash() {
    crash_everywhere("update", 21, some_keys, |store| {
        let double = |value: Option<&[u8]>, _| {
            let value = value.unwrap_or_default();
            Update::Put(Cow::Owned([value, value].concat()), Expiry::Keep)
        };
        block_on(store.update(0, &name(5), double)).map(drop)
    });
}

#[test]
fn call_of_three_keys_survives_a_crash() {
    crash_everywhere("atomically", 21, some_keys, |store| {
        let keys = [name(3), name(200), name(5)];
        let keys: Vec<_> = keys.iter().map(|key| Wanted { db: 0, key, is_read: true }).collect();
        let change = |call: &mut kv::Transaction| {
            let moved = call.get(0).expect("is there").to_vec();
            call.put(1, moved, Expiry::Never);
            call.delete(0);
            call.put(2, value(45), Expiry::At(BEGIN + 9));
        };
        block_on(store.atomically(&keys, change))
    });
}

#[test]
fn call_over_several_stripes_survives_a_crash() {
    crash_in_stripes("atomically", 2, 4, some_keys, |store| {
        let keys: Vec<_> = (0..8).chain([200, 201]).map(name).collect();
        let keys: Vec<_> = keys.iter().map(|key| Wanted { db: 0, key, is_read: false }).collect();
        let change = |call: &mut kv::Transaction| {
            (0..10).for_each(|key| call.put(key, value(key as u32 + 40), Expiry::Never));
            call.delete(3);
        };
        block_on(store.atomically(&keys, change))
    });
}

#[test]
fn merge_survives_a_crash() {
    crash_everywhere("merge", 1, few_of_many_keys, |store| {
        let merges = block_on(store.merge(0))?;
        assert!(merges > 0);
        Ok(())
    });
}

#[test]
fn compaction_survives_a_crash() {
    crash_everywhere("compact", 21, few_of_many_keys, |store| {
        let moved = block_on(store.compact(90))?;
        assert!(moved > 0);
        Ok(())
    });
}

#[test]
fn flush_survives_a_crash() {
    crash_everywhere("flush", 2, some_keys, |store| block_on(store.flush(0)));
}

#[test]
fn split_survives_a_crash() {
    // One group has 21 slots.
    for (column, form, mirror) in COLUMNS {
        let crash = |keys: &u32| crash_in_split(column, (form, mirror), *keys, false);
        let splits = (15..90).filter(crash).count();
        assert!(splits >= 5, "{column}: {splits} splits");
    }
}

/// The subtables of a successor have greater numbers than those of its predecessor.
#[test]
fn split_by_a_successor_survives_a_crash() {
    for (column, form, mirror) in COLUMNS {
        let crash = |keys: &u32| crash_in_split(column, (form, mirror), *keys, true);
        let splits = (15..90).filter(crash).count();
        assert!(splits >= 5, "{column}: {splits} splits");
    }
}

/// Crashes at each verb of a SET behind `keys` keys, by the store's creator or by a successor.
/// False if this SET splits no subtable.
fn crash_in_split(
    column: &str,
    (form, mirror): (Form, bool),
    keys: u32,
    by_successor: bool,
) -> bool {
    for verbs in 0.. {
        let world = World::new(4096, 1 << 20, false, 1);
        let mut store = world.create(settings(form, mirror, 1));
        fill(&store, 0..keys);
        if by_successor {
            let arena = Arena::new(world.memory.clone(), 0, 1 << 20);
            let (client, hand) = (world.client.clone(), Hand::new(BEGIN, 5));
            let root = kv::place::Place::default();
            let opened = Store::open(client, arena, hand, settings(form, mirror, 1), root);
            store = block_on(opened).expect("a successor");
        }
        let before = content(&store);
        let set = || store.set(0, b"key-300", b"new", SetOptions::default());
        if verbs == 0 {
            let splits = || store.trips(Operation::Split).operations;
            let counted = splits();
            block_on(set()).expect("a write");
            if splits() == counted {
                return false;
            }
            continue;
        }
        world.client.crash_after(verbs - 1);
        let done = block_on(set());
        if done.is_ok() && !world.client.is_crashed() {
            break;
        }
        drop(store);
        let (store, arena) = recover(&world, form, mirror, 1);
        let mut found = content(&store);
        let new = found.remove(&name(300));
        assert_eq!(found, before, "{column}: {keys} keys, {verbs} verbs");
        found.extend(new.map(|new| (name(300), new)));
        check_use(&store, &arena, found, 0, 2 + u64::from(by_successor));
    }
    true
}
