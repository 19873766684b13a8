//! The round trips of each operation, to the number, in each form.

mod common;

use std::borrow::Cow;

use common::{BEGIN, COLUMNS, TestStore, World, block_on, settings, store};
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

/// Round trips of `operation` with each of several settings.
fn taken(settings: &Settings, operation: impl Fn(&TestStore)) -> u64 {
    let world = World::new(4096, 1 << 20, false, 1);
    let store = world.create(settings.clone());
    for key in [&b"first"[..], b"key"] {
        block_on(store.set(0, key, b"value", SetOptions::default())).expect("a write");
    }
    let before = world.client.waits();
    operation(&store);
    world.client.waits() - before
}

fn mirrored() -> Settings {
    settings(Form::Fused, true, 21)
}

fn get(store: &TestStore) {
    let found = block_on(store.get(0, b"key")).expect("a read");
    assert_eq!(found.as_deref(), Some(&b"value"[..]));
}

#[test]
fn value_in_the_cache_takes_no_round_trip() {
    let cached = Settings { cache: 1 << 20, ..mirrored() };
    assert_eq!(taken(&cached, get), 0, "value cached");
    let several = |store: &TestStore| {
        let found = block_on(store.get_many(0, &[b"key", b"first", b"absent"])).expect("a read");
        assert_eq!(found, [Some(b"value".to_vec()), Some(b"value".to_vec()), None]);
    };
    assert_eq!(taken(&cached, several), 0, "values cached");
    let append = |store: &TestStore| {
        let change = |value: Option<&[u8]>, _| {
            let longer = [value.unwrap_or_default(), b"+"].concat();
            Update::Put(Cow::Owned(longer), Expiry::Keep)
        };
        block_on(store.update(0, b"key", change)).expect("an update");
    };
    assert_eq!(taken(&cached, append), 1, "update of a cached value");
    // A value that is no longer there is read once, and then kept again.
    let after_a_move = |store: &TestStore| {
        block_on(store.update(0, b"key", |_, _| Update::Delete)).expect("a deletion");
        block_on(store.set(0, b"key", b"value", SetOptions::default())).expect("a write");
        get(store);
    };
    assert_eq!(taken(&cached, after_a_move), 2, "deletion and write");
    let without_mirror = Settings { index_cache: 0, ..cached };
    assert_eq!(taken(&without_mirror, get), TABLE[0].1[1], "index remote");
}

#[test]
fn subtables_beyond_the_bound_take_the_round_trips_of_a_remote_index() {
    let subtable = 21 * 3 * 7 * 16;
    for (index_cache, column) in [(0, 1), (subtable - 1, 1), (subtable, 2)] {
        let bounded = Settings { index_cache, ..mirrored() };
        assert_eq!(taken(&bounded, get), TABLE[0].1[column], "{index_cache} bytes");
        let set = |store: &TestStore| {
            drop(block_on(store.set(0, b"key", b"other", SetOptions::default())).expect("a write"));
        };
        assert_eq!(taken(&bounded, set), TABLE[3].1[column], "{index_cache} bytes");
    }
}

#[test]
fn comparison_of_keys_takes_one_round_trip() {
    let verifying = Settings { verify_keys: true, ..mirrored() };
    let set = |key: &'static [u8]| {
        move |store: &TestStore| {
            drop(block_on(store.set(0, key, b"other", SetOptions::default())).expect("a write"));
        }
    };
    assert_eq!(taken(&verifying, set(b"key")), 2);
    assert_eq!(taken(&verifying, set(b"new")), 1);
    assert_eq!(taken(&verifying, get), 1);
    let exists = |store: &TestStore| assert!(block_on(store.exists(0, b"key")).expect("a read"));
    assert_eq!(taken(&verifying, exists), 1);
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
