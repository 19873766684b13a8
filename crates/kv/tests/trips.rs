//! The round trips of each operation, to the number, in each form.

mod common;

use std::borrow::Cow;

use common::{BEGIN, COLUMNS, World, block_on, mirror_bytes, settings, store};
use kv::{Expiry, Form, Operation, SetOptions, Settings, Update, Wanted};

/// The table of the design: published; fused with a remote index; fused and mirrored.
const TABLE: [(&str, [u64; 3]); 9] = [
    ("get, hit", [2, 2, 1]),
    ("get, miss", [1, 1, 0]),
    ("set, new key", [3, 2, 1]),
    ("set, key there", [3, 3, 1]),
    ("delete", [3, 3, 1]),
    ("update", [4, 3, 2]),
    ("expire", [3, 3, 1]),
    ("persist", [3, 3, 1]),
    ("exists", [2, 2, 0]),
];

#[test]
fn round_trips_are_those_of_the_table() {
    for (column, (name, form, mirror)) in COLUMNS.into_iter().enumerate() {
        let (world, store) = store(form, mirror, 21);
        let mut taken = Vec::new();
        let set = |key: &'static [u8]| store.set(0, key, b"value", SetOptions::default());
        // The first write creates the directory.
        block_on(set(b"first")).expect("a write");
        let mut measure = |what: &'static str, operation: &mut dyn FnMut()| {
            let before = world.client.waits();
            operation();
            taken.push((what, world.client.waits() - before));
        };
        measure("set, new key", &mut || drop(block_on(set(b"key")).expect("a write")));
        measure("set, key there", &mut || drop(block_on(set(b"key")).expect("a write")));
        measure("get, hit", &mut || {
            assert_eq!(
                block_on(store.get(0, b"key")).expect("a read").as_deref(),
                Some(&b"value"[..])
            );
        });
        measure("get, miss", &mut || {
            assert_eq!(block_on(store.get(0, b"absent")).expect("a read"), None);
        });
        measure("update", &mut || {
            let append = |value: Option<&[u8]>, _| {
                let longer = [value.unwrap_or_default(), b"+"].concat();
                Update::Put(Cow::Owned(longer), Expiry::Keep)
            };
            block_on(store.update(0, b"key", append)).expect("an update");
        });
        measure("expire", &mut || {
            assert!(block_on(store.expire(0, b"key", BEGIN + 5, |_| true)).expect("a change"));
        });
        measure("persist", &mut || {
            assert!(block_on(store.expire(0, b"key", 0, |at| at == BEGIN + 5)).expect("a change"));
        });
        measure("exists", &mut || assert!(block_on(store.exists(0, b"key")).expect("a read")));
        measure("delete", &mut || assert!(block_on(store.delete(0, b"key")).expect("a deletion")));
        for (what, expected) in TABLE {
            let found = taken.iter().find(|(taken, _)| *taken == what).expect("measured");
            assert_eq!(found.1, expected[column], "{name}: {what}");
        }
        assert_eq!(store.trips(Operation::Delete).waits, TABLE[4].1[column]);
        assert_eq!(store.len(0), 1);
    }
}

#[test]
fn calls_of_several_keys_take_the_round_trips_of_one() {
    for (column, (name, form, mirror)) in COLUMNS.into_iter().enumerate() {
        let (world, store) = store(form, mirror, 21);
        let names: Vec<_> = (0..10_u8).map(|key| [key]).collect();
        for key in &names[..5] {
            block_on(store.set(0, key, b"value", SetOptions::default())).expect("a write");
        }
        let before = world.client.waits();
        let keys: Vec<_> = names.iter().map(|key| &key[..]).collect();
        let values = block_on(store.get_many(0, &keys)).expect("a read");
        assert_eq!(values.iter().flatten().count(), 5);
        let middle = world.client.waits();
        assert_eq!(middle - before, TABLE[0].1[column], "{name}: reads");
        let wanted =
            |is_read| -> Vec<_> { keys.iter().map(|key| Wanted { db: 0, key, is_read }).collect() };
        let put = |call: &mut kv::Transaction| {
            (0..10).for_each(|key| call.put(key, b"other".to_vec(), Expiry::Never));
        };
        block_on(store.atomically(&wanted(false), put)).expect("a change");
        let last = world.client.waits();
        assert_eq!(last - middle, [5, 4, 2][column], "{name}: writes");
        // Old values cost a round trip where they are not read for the look-up anyway.
        block_on(store.atomically(&wanted(true), put)).expect("a change");
        assert_eq!(world.client.waits() - last, [5, 4, 3][column], "{name}: reads and writes");
        assert_eq!(store.len(0), 10);
    }
}

#[test]
fn value_in_pieces_takes_one_round_trip_more() {
    for (column, (name, form, mirror)) in COLUMNS.into_iter().enumerate() {
        let (world, store) = store(form, mirror, 21);
        let value: Vec<u8> = (0..40_000_u32).map(|i| (i * i) as u8).collect();
        let set = |key: &'static [u8]| store.set(0, key, &value, SetOptions::default());
        block_on(set(b"first")).expect("a write");
        let before = world.client.waits();
        block_on(set(b"key")).expect("a write");
        let middle = world.client.waits();
        assert_eq!(middle - before, TABLE[2].1[column] + 1, "{name}: set");
        assert_eq!(block_on(store.get(0, b"key")).expect("a read").as_ref(), Some(&value));
        assert_eq!(world.client.waits() - middle, TABLE[0].1[column] + 1, "{name}: get");
        block_on(store.delete(0, b"key")).expect("a deletion");
        block_on(store.delete(0, b"first")).expect("a deletion");
    }
}

#[test]
fn split_takes_the_round_trips_of_the_table() {
    for (column, (name, form, mirror)) in COLUMNS.into_iter().enumerate() {
        let (_world, store) = store(form, mirror, 2);
        for i in 0..2000_u32 {
            let key = i.to_be_bytes();
            block_on(store.set(0, &key, &key, SetOptions::default())).expect("a write");
        }
        let splits = store.trips(Operation::Split);
        assert!(splits.operations > 20, "{name}: {splits:?}");
        assert_eq!(splits.waits, splits.operations * [5, 5, 3][column], "{name}");
        for i in 0..2000_u32 {
            let key = i.to_be_bytes();
            assert_eq!(block_on(store.get(0, &key)).expect("a read").as_deref(), Some(&key[..]));
        }
    }
}

#[test]
fn cached_value_takes_no_round_trip() {
    let world = World::new(4096, 1 << 20, false, 1);
    let settings = Settings { cache_bytes: 1 << 20, ..settings(Form::Fused, true, 21) };
    let store = world.create(settings);
    let waits = || world.client.waits();
    let set = |value: &'static [u8]| {
        block_on(store.set(0, b"key", value, SetOptions::default())).expect("a write");
    };
    let get = |value: Option<&[u8]>, expected: u64, what: &str| {
        let before = waits();
        let found = block_on(store.get(0, b"key")).expect("a read");
        assert_eq!((found.as_deref(), waits() - before), (value, expected), "{what}");
    };
    set(b"one");
    get(Some(b"one"), 1, "a value that was not read before");
    get(Some(b"one"), 0, "a value that was read");
    let before = waits();
    let several = block_on(store.get_many(0, &[b"key", b"absent", b"key"])).expect("a read");
    assert_eq!(several, [Some(b"one".to_vec()), None, Some(b"one".to_vec())]);
    assert_eq!(waits(), before, "several reads");

    // A change of a cached value replaces the value.
    set(b"two");
    get(Some(b"two"), 0, "after a write");
    let before = waits();
    let append = |value: Option<&[u8]>, _| {
        Update::Put(Cow::Owned([value.unwrap_or_default(), b"+"].concat()), Expiry::Keep)
    };
    block_on(store.update(0, b"key", append)).expect("an update");
    assert_eq!(waits() - before, 1, "an update by the old value");
    get(Some(b"two+"), 0, "after an update");
    assert!(block_on(store.expire(0, b"key", BEGIN + 50, |_| true)).expect("a change"));
    get(Some(b"two+"), 0, "after a change of the expiry");
    let mut value = Vec::new();
    let expiry = block_on(store.get_into(0, b"key", &mut value)).expect("a read");
    assert_eq!((expiry, &value[..]), (Some(BEGIN + 50), &b"two+"[..]));
    let wanted = [b"key", b"new"].map(|key| Wanted { db: 0, key, is_read: true });
    let put = |call: &mut kv::Transaction| {
        assert_eq!(call.get(0), Some(&b"two+"[..]));
        (0..2).for_each(|key| call.put(key, b"three".to_vec(), Expiry::Never));
    };
    let before = waits();
    block_on(store.atomically(&wanted, put)).expect("a change");
    assert_eq!(waits() - before, 2, "a call of several keys");
    get(Some(b"three"), 0, "after a call of several keys");
    assert!(block_on(store.delete(0, b"key")).expect("a deletion"));
    get(None, 0, "after the deletion");
    assert_eq!(store.stats().cache.values, 0);

    // An expired value is not returned, and a value in pieces is not cached.
    set(b"four");
    get(Some(b"four"), 1, "a new value");
    block_on(store.expire(0, b"key", BEGIN + 50, |_| true)).expect("a change");
    world.hand.advance(50);
    get(None, 0, "after the expiry");
    let long = vec![7; 9000];
    block_on(store.set(0, b"key", &long, SetOptions::default())).expect("a write");
    get(Some(&long), 2, "a value in pieces");
    get(Some(&long), 2, "a value in pieces, again");
    let cache = store.stats().cache;
    assert_eq!((cache.values, cache.bytes), (0, 0));
    assert_eq!((cache.hits, cache.misses), (11, 2), "{cache:?}");
}

#[test]
fn keys_beyond_the_limit_of_the_mirrors_are_read_in_remote_memory() {
    let world = World::new(4096, 1 << 20, false, 1);
    let limit = 5 * mirror_bytes(2) + 7;
    let store = world.create(Settings { index_cache: limit, ..settings(Form::Fused, true, 2) });
    for i in 0..500_u32 {
        let key = i.to_be_bytes();
        block_on(store.set(0, &key, &key, SetOptions::default())).expect("a write");
    }
    let stats = store.stats();
    assert_eq!((stats.mirrored, stats.mirror_bytes), (5, 5 * mirror_bytes(2)));
    assert!(stats.tables > 15, "{stats:?}");
    let mut taken = [0; 3];
    for i in 0..500_u32 {
        let key = i.to_be_bytes();
        let before = world.client.waits();
        assert_eq!(block_on(store.get(0, &key)).expect("a read").as_deref(), Some(&key[..]));
        let waits = (world.client.waits() - before) as usize;
        taken[waits] += 1;
        let before = world.client.waits();
        block_on(store.set(0, &key, b"other", SetOptions::default())).expect("a write");
        assert_eq!(world.client.waits() - before, TABLE[3].1[if waits == 1 { 2 } else { 1 }]);
    }
    let [cached, mirrored, remote] = taken;
    assert!(cached == 0 && mirrored > 50 && remote > 200, "{taken:?}");
    // Keys of both kinds are read in the round trips of a key in remote memory.
    let names: Vec<_> = (0..500_u32).map(u32::to_be_bytes).collect();
    let keys: Vec<_> = names.iter().map(|key| &key[..]).collect();
    let before = world.client.waits();
    let values = block_on(store.get_many(0, &keys)).expect("a read");
    assert!(values.iter().all(|value| value.as_deref() == Some(b"other")));
    assert_eq!(world.client.waits() - before, 2);
    // A flush gives the memory of the mirrors back.
    block_on(store.flush_all()).expect("a flush");
    assert_eq!(store.stats().mirror_bytes, 0);
}
