//! Eviction, expiry, compaction and statistics.

mod common;

use common::{BEGIN, COLUMNS, TestStore, World, block_on, settings, store};
use kv::blocks::Blocks;
use kv::{Candidates, Eviction, Expiry, Form, Measure, SetOptions, Settings, Wanted};

fn name(i: u32) -> Vec<u8> {
    format!("key-{i}").into_bytes()
}

#[test]
fn keys_used_least_are_evicted_first() {
    for (column, form, mirror) in COLUMNS {
        for measure in [Measure::Recency, Measure::Frequency] {
            let world = World::new(4096, 1 << 20, false, 3);
            let store = world.create(Settings { measure, ..settings(form, mirror, 2) });
            for i in 0..200 {
                block_on(store.set(0, &name(i), b"value", SetOptions::default())).expect("a write");
            }
            for round in 0..40 {
                world.hand.advance(10_000);
                for i in 0..100 {
                    if (round + i) % 2 == 0 {
                        block_on(store.get(0, &name(i))).expect("a read");
                    }
                }
            }
            for _ in 0..60 {
                let by = Eviction::LeastUsed;
                assert!(block_on(store.evict(Candidates::All, by)).expect("an eviction"));
            }
            assert_eq!((store.len(0), store.stats().evicted), (140, 60));
            let left =
                (0..100).filter(|i| block_on(store.exists(0, &name(*i))).expect("a read")).count();
            assert!(left >= 84, "{column}, {measure:?}: {left} of 100 used keys are left");
        }
    }
}

#[test]
fn volatile_keys_are_evicted_by_their_expiry() {
    for (column, form, mirror) in COLUMNS {
        let (_world, store) = store(form, mirror, 1);
        for i in 0..60 {
            let expiry =
                if i < 20 { Expiry::At(BEGIN + 1000 + u64::from(i)) } else { Expiry::Never };
            let options = SetOptions { expiry, ..SetOptions::default() };
            block_on(store.set(3, &name(i), b"value", options)).expect("a write");
        }
        for by in [Eviction::SoonestExpiry, Eviction::Random] {
            for _ in 0..10 {
                let found = block_on(store.evict(Candidates::Volatile, by)).expect("an eviction");
                assert!(found, "{column}");
            }
        }
        assert!(!block_on(store.evict(Candidates::Volatile, Eviction::Random)).expect("none"));
        for i in 20..60 {
            assert!(block_on(store.exists(3, &name(i))).expect("a read"), "{column}");
        }
        assert_eq!(store.len(3), 40);
        for _ in 0..40 {
            assert!(block_on(store.evict(Candidates::All, Eviction::Random)).expect("a key"));
        }
        assert!(!block_on(store.evict(Candidates::All, Eviction::Random)).expect("none"));
    }
}

#[test]
fn expired_keys_are_never_seen_and_are_swept() {
    for (column, form, mirror) in COLUMNS {
        let (world, store) = store(form, mirror, 2);
        for i in 0..50 {
            let expiry = Expiry::At(BEGIN + u64::from(i) + 1);
            let options = SetOptions { expiry, ..SetOptions::default() };
            block_on(store.set(0, &name(i), b"value", options)).expect("a write");
        }
        // A key whose expiry moved, and one that has none any more.
        assert!(block_on(store.expire(0, &name(3), BEGIN + 40, |_| true)).expect("a change"));
        assert!(block_on(store.expire(0, &name(4), 0, |_| true)).expect("a change"));
        world.hand.advance(30);
        let alive = |i: u32| block_on(store.get(0, &name(i))).expect("a read").is_some();
        assert!(!alive(29) && alive(30) && alive(3) && alive(4), "{column}");
        assert_eq!((store.len(0), store.next_expiry()), (50, Some(BEGIN + 1)));
        assert_eq!(block_on(store.sweep(1000)).expect("a sweep"), 28);
        assert_eq!((store.len(0), store.stats().expired), (22, 28));
        world.hand.advance(30);
        assert_eq!(block_on(store.sweep(1000)).expect("a sweep"), 21);
        assert_eq!((store.len(0), store.next_expiry()), (1, None));
    }
}

#[test]
fn change_of_an_expiry_is_seen_by_a_watch() {
    for (column, form, mirror) in COLUMNS {
        let (_world, store) = store(form, mirror, 2);
        for key in [b"key", b"two"] {
            block_on(store.set(0, key, b"value", SetOptions::default())).expect("a write");
        }
        for at in [BEGIN + 100, BEGIN + 200, 0, 1] {
            let watch = |key| store.watch(0, key).expect("a watch");
            let [key, other] = [watch(b"key"), watch(b"two")];
            assert_eq!(block_on(store.expire(0, b"key", at, |_| false)), Ok(false), "{column}");
            assert!(!key.is_changed(), "{column}: unchanged");
            assert_eq!(block_on(store.expire(0, b"key", at, |_| true)), Ok(true), "{column}");
            assert!(key.is_changed() && !other.is_changed(), "{column}: {at}");
        }
    }
}

#[test]
fn expiry_at_the_present_time_deletes_the_key() {
    for (column, form, mirror) in COLUMNS {
        let (_world, store) = store(form, mirror, 2);
        for (at, is_left) in [(BEGIN - 1, 0), (BEGIN, 0), (BEGIN + 1, 1)] {
            block_on(store.set(0, b"key", b"value", SetOptions::default())).expect("a write");
            assert_eq!(block_on(store.expire(0, b"key", at, |_| true)), Ok(true), "{column}");
            assert_eq!(store.len(0), is_left, "{column}: {at}");
        }
    }
}

#[test]
fn call_of_several_keys_is_seen_by_watches_and_keeps_expiries() {
    for (column, form, mirror) in COLUMNS {
        let (_world, store) = store(form, mirror, 2);
        let at = BEGIN + 5000;
        for key in [b"one", b"two", b"six"] {
            let options = SetOptions { expiry: Expiry::At(at), ..SetOptions::default() };
            block_on(store.set(0, key, b"value", options)).expect("a write");
        }
        let watch = |key| store.watch(0, key).expect("a watch");
        let [one, two, six] = [watch(b"one"), watch(b"two"), watch(b"six")];
        let wanted = [&b"one"[..], b"two"].map(|key| Wanted { db: 0, key, is_read: false });
        let call = |transaction: &mut kv::Transaction| {
            transaction.put(0, b"new".to_vec(), Expiry::Keep);
            transaction.put(1, b"new".to_vec(), Expiry::Never);
        };
        block_on(store.atomically(&wanted, call)).expect("a change");
        assert!(one.is_changed() && two.is_changed() && !six.is_changed(), "{column}");
        let expiry = |key: &[u8]| block_on(store.expiry(0, key)).expect("a read");
        assert_eq!((expiry(b"one"), expiry(b"two")), (Some(at), Some(0)), "{column}");
    }
}

#[test]
fn compaction_gives_chunks_back() {
    for (column, form, mirror) in COLUMNS {
        let (world, store) = store(form, mirror, 21);
        let value = [7; 976];
        for i in 0..1000 {
            block_on(store.set(0, &name(i), &value, SetOptions::default())).expect("a write");
        }
        let full = store.stats();
        assert!(full.usage.chunks >= 250, "{column}: {full:?}");
        for i in (0..1000).filter(|i| i % 10 != 0) {
            block_on(store.delete(0, &name(i))).expect("a deletion");
        }
        let sparse = store.stats();
        while block_on(store.compact(90)).expect("a compaction") > 0 {}
        let compact = store.stats();
        let freed = full.usage.chunks - compact.usage.chunks;
        assert!(freed * 100 >= (full.usage.chunks - sparse.index_bytes / 4096) * 85, "{column}");
        assert_eq!(compact.usage.live, sparse.usage.live);
        assert!(compact.moved > 50, "{column}: {compact:?}");
        for i in (0..1000).step_by(10) {
            let read = block_on(store.get(0, &name(i))).expect("a read");
            assert_eq!(read.as_deref(), Some(&value[..]), "{column}");
        }
        block_on(store.flush_all()).expect("a flush");
        let empty = store.stats();
        assert_eq!((empty.index_bytes, empty.tables, empty.keys), (0, 0, [0; 16]));
        assert_eq!(world.arena.used().len(), 4);
    }
}

#[test]
fn full_pool_is_an_error_and_the_store_goes_on() {
    let world = World::new(4096, 12, false, 1);
    let store = world.create(settings(Form::Fused, true, 21));
    let mut written = 0;
    let full = loop {
        match block_on(store.set(0, &name(written), &[1; 900], SetOptions::default())) {
            Ok(_) => written += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(full, kv::Error::NoBlock(kv::blocks::NoBlock::Full));
    assert!(block_on(store.evict(Candidates::All, Eviction::Random)).expect("an eviction"));
    block_on(store.set(0, b"another", &[1; 900], SetOptions::default())).expect("a write");
    assert_eq!(store.len(0), u64::from(written));
}

/// Sets keys of 100 bytes until the pool is full, then takes the rest of its memory. Returns the
/// number of keys.
fn fill(world: &World, store: &TestStore) -> u32 {
    let mut written = 0;
    while block_on(store.set(0, &name(written), &[1; 100], SetOptions::default())).is_ok() {
        written += 1;
    }
    for bytes in [4096, 1024, 256, 64, 32] {
        while block_on(world.arena.allocate(0, bytes)).is_ok() {}
    }
    written
}

#[test]
fn full_pool_deletes_any_number_of_keys() {
    for (column, form, mirror) in COLUMNS {
        let world = World::new(4096, 24, false, 1);
        let store = world.create(settings(form, mirror, 21));
        let written = fill(&world, &store);
        assert!(written > 110, "{column}: {written}");
        // A reserved record of 1 KiB names 42 keys.
        for keys in [0..2, 2..44, 44..110] {
            let names: Vec<_> = keys.clone().map(name).collect();
            let wanted: Vec<_> =
                names.iter().map(|key| Wanted { db: 0, key, is_read: false }).collect();
            let deleted = block_on(store.atomically(&wanted, |transaction| {
                (0..wanted.len()).filter(|key| transaction.delete(*key)).count()
            }));
            assert_eq!(deleted, Ok(keys.len()), "{column}");
            assert_eq!(store.len(0), u64::from(written - keys.end), "{column}");
            for i in 0..written {
                let is_there = block_on(store.exists(0, &name(i))).expect("a read");
                assert_eq!(is_there, i >= keys.end, "{column}: key {i}");
            }
        }
        assert_eq!(world.arena.wrong_frees(), 0);
    }
}

/// A crash between two records would leave a part of the writes done.
#[test]
fn full_pool_refuses_a_write_of_more_keys_than_a_record_names() {
    for (column, form, mirror) in COLUMNS {
        let world = World::new(4096, 24, false, 1);
        let store = world.create(settings(form, mirror, 21));
        let written = fill(&world, &store);
        assert!(written > 60, "{column}: {written}");
        // Room for one new value, and none for a record of another length.
        assert!(block_on(store.delete(0, &name(0))).expect("a deletion"));
        // A reserved record of 1 KiB names 42 keys.
        for (keys, is_done) in [(1..44, false), (1..43, true)] {
            let names: Vec<_> = keys.clone().map(name).collect();
            let wanted: Vec<_> =
                names.iter().map(|key| Wanted { db: 0, key, is_read: false }).collect();
            let changed = block_on(store.atomically(&wanted, |transaction| {
                let deleted = (1..wanted.len()).filter(|key| transaction.delete(*key)).count();
                transaction.put(0, vec![2; 100], Expiry::Never);
                deleted
            }));
            let full = Err(kv::Error::NoBlock(kv::blocks::NoBlock::Full));
            assert_eq!(changed, if is_done { Ok(41) } else { full }, "{column}");
            let read = |i: u32| block_on(store.get(0, &name(i))).expect("a read");
            let first = Some(vec![1 + u8::from(is_done); 100]);
            assert_eq!(read(1), first, "{column}");
            assert!((2..43).all(|i| read(i).is_some() != is_done), "{column}: {keys:?}");
            assert!((43..written).all(|i| read(i).is_some()), "{column}: {keys:?}");
        }
        assert_eq!(world.arena.wrong_frees(), 0);
    }
}

#[test]
fn read_of_several_keys_is_a_use_of_each_key() {
    for (column, form, mirror) in COLUMNS {
        for measure in [Measure::Recency, Measure::Frequency] {
            let world = World::new(4096, 1 << 20, false, 3);
            let store = world.create(Settings { measure, ..settings(form, mirror, 2) });
            for i in 0..3 {
                block_on(store.set(0, &name(i), b"value", SetOptions::default())).expect("a write");
            }
            world.hand.advance(200_000);
            let told = |i| block_on(store.worth(0, &name(i))).expect("a read").expect("a key");
            let before = [0, 1, 2].map(told);
            for _ in 0..30 {
                let keys = [&name(0)[..], &name(1), b"absent"];
                let values = block_on(store.get_many(0, &keys)).expect("a read");
                assert_eq!(values.iter().flatten().count(), 2);
            }
            let after = [0, 1, 2].map(told);
            let is_used = |i: usize| match measure {
                // Seconds since the last use.
                Measure::Recency => before[i] >= 190 && after[i] < 10,
                Measure::Frequency => after[i] > before[i],
            };
            let used = [0, 1, 2].map(is_used);
            assert_eq!(used, [true, true, false], "{column}, {measure:?}: {before:?} {after:?}");
        }
    }
}

#[test]
fn evicted_key_is_told_with_its_database() {
    for (column, form, mirror) in COLUMNS {
        let world = World::new(4096, 1 << 20, false, 4);
        let store = world.create(settings(form, mirror, 2));
        let long = [b'k'; 300];
        for (db, key) in [(0, &b"short"[..]), (3, &long), (3, b"")] {
            block_on(store.set(db, key, b"value", SetOptions::default())).expect("a write");
        }
        let mut told = Vec::new();
        let mut tell = |db: u8, key: &[u8]| told.push((db, key.to_vec()));
        for _ in 0..3 {
            let call = store.evict_and_tell(Candidates::All, Eviction::Random, Some(&mut tell));
            assert!(block_on(call).expect("an eviction"), "{column}");
        }
        told.sort();
        assert_eq!(told, [(0, b"short".to_vec()), (3, Vec::new()), (3, long.to_vec())], "{column}");
    }
}

#[test]
fn worth_that_was_set_is_told_by_the_same_measure() {
    for (measure, other, told) in
        [(Measure::Recency, Measure::Frequency, 106), (Measure::Frequency, Measure::Recency, 100)]
    {
        let world = World::new(4096, 1 << 20, false, 3);
        let store = world.create(Settings { measure, ..settings(Form::Fused, true, 2) });
        block_on(store.set(0, b"key", b"value", SetOptions::default())).expect("a write");
        for key in [&b"key"[..], b"absent"] {
            block_on(store.set_worth(0, key, measure, 100)).expect("a change");
            block_on(store.set_worth(0, key, other, 7)).expect("no change");
        }
        assert_eq!(block_on(store.worth(0, b"key")), Ok(Some(told)), "{measure:?}");
        assert_eq!(block_on(store.worth(0, b"absent")), Ok(None));
    }
}

/// A value of three slabs and a list.
const LONG: [u8; 12_000] = [9; 12_000];

#[test]
fn whole_slabs_make_room_for_a_long_value() {
    for (column, form, mirror) in COLUMNS {
        for by in [Eviction::LeastUsed, Eviction::Random] {
            let world = World::new(4096, 64, false, 1);
            let store = world.create(settings(form, mirror, 21));
            let mut written = 0;
            while block_on(store.set(0, &name(written), &[1; 100], SetOptions::default())).is_ok() {
                written += 1;
            }
            while block_on(world.arena.allocate(0, 4096)).is_ok() {}
            let set = || block_on(store.set(0, b"long", &LONG, SetOptions::default()));
            let full = Err(kv::Error::NoBlock(kv::blocks::NoBlock::Full));
            assert_eq!(set(), full, "{column}");
            // Single keys leave holes that a long value cannot use.
            for _ in 0..100 {
                assert!(block_on(store.evict(Candidates::All, by)).expect("an eviction"));
            }
            assert_eq!(set(), full, "{column}");
            let before = store.len(0);
            let mut told = 0;
            let mut tell = |_: u8, _: &[u8]| told += 1;
            let call = store.evict_slabs(4, Candidates::All, by, Some(&mut tell));
            let cleared = block_on(call).expect("an eviction");
            assert_eq!(cleared.slabs, 4, "{column}");
            // 28 blocks of 144 B fit a slab.
            assert!((1..=4 * 28).contains(&cleared.keys), "{column}: {cleared:?}");
            assert_eq!((store.len(0), told), (before - cleared.keys, cleared.keys), "{column}");
            set().unwrap_or_else(|error| panic!("{column}: {error}"));
            let read = block_on(store.get(0, b"long")).expect("a read");
            assert_eq!(read.as_deref(), Some(&LONG[..]), "{column}");
            assert_eq!(world.arena.wrong_frees(), 0);
        }
    }
}

#[test]
fn slabs_with_keys_that_stay_are_not_emptied() {
    for (column, form, mirror) in COLUMNS {
        let (_world, store) = store(form, mirror, 2);
        // One key of each slab of 28 blocks stays: the choice of a slab may not see it.
        let volatile = |i: u32| i >= 200 && (i >= 400 || !i.is_multiple_of(28));
        for i in 0..600 {
            let at = Expiry::At(BEGIN + 1000 + u64::from(i));
            let expiry = if volatile(i) { at } else { Expiry::Never };
            let options = SetOptions { expiry, ..SetOptions::default() };
            block_on(store.set(0, &name(i), &[1; 100], options)).expect("a write");
        }
        let by = Eviction::SoonestExpiry;
        let call = store.evict_slabs(1000, Candidates::Volatile, by, None);
        let cleared = block_on(call).expect("an eviction");
        let there = |i: u32| block_on(store.exists(0, &name(i))).expect("a read");
        assert!((0..600).all(|i| volatile(i) || there(i)), "{column}");
        let count = (0..600).filter(|i| volatile(*i)).count() as u64;
        let left = (0..600).filter(|i| volatile(*i) && there(*i)).count() as u64;
        assert!(cleared.slabs > 3 && left < 300, "{column}: {cleared:?}, {left} left");
        assert_eq!(cleared.keys, count - left, "{column}");
    }
}

/// New keys of the same length take each free place of a full pool, but none of a slab that is
/// being emptied.
#[test]
fn slab_is_emptied_beside_writers() {
    for (column, form, mirror) in COLUMNS {
        let world = World::new(4096, 64, true, 1);
        let store = world.create(settings(form, mirror, 21));
        let mut written = 0;
        while block_on(store.set(0, &name(written), &[1; 100], SetOptions::default())).is_ok() {
            written += 1;
        }
        while block_on(world.arena.allocate(0, 4096)).is_ok() {}
        let is_done = std::cell::Cell::new(false);
        let (cleared, refused) = (std::cell::Cell::default(), std::cell::Cell::new(0));
        let evict = async {
            let call = store.evict_slabs(3, Candidates::All, Eviction::Random, None);
            cleared.set(call.await.expect("an eviction"));
            is_done.set(true);
        };
        let write = async {
            for i in written.. {
                if is_done.get() {
                    break;
                }
                let key = name(i);
                let set = store.set(0, &key, &[1; 100], SetOptions::default());
                refused.set(refused.get() + u32::from(set.await.is_err()));
                kv::memory::turn().await;
            }
        };
        kv::memory::run(1, vec![Box::pin(evict), Box::pin(write)]);
        assert_eq!(cleared.get().slabs, 3, "{column}");
        assert!(refused.get() > 0, "{column}: no write came in between");
    }
}

/// A value in pieces has slabs of its own, which its eviction frees.
#[test]
fn long_values_are_evicted_for_their_slabs() {
    for (column, form, mirror) in COLUMNS {
        let (world, store) = store(form, mirror, 2);
        for i in 0..20 {
            block_on(store.set(0, &name(i), &LONG, SetOptions::default())).expect("a write");
        }
        let before = store.stats().usage.chunks;
        let call = store.evict_slabs(12, Candidates::All, Eviction::LeastUsed, None);
        let cleared = block_on(call).expect("an eviction");
        assert!((4..=5).contains(&cleared.keys), "{column}: {cleared:?}");
        assert_eq!(store.len(0), 20 - cleared.keys, "{column}");
        assert!(before - store.stats().usage.chunks >= 12, "{column}");
        assert_eq!(world.arena.wrong_frees(), 0);
    }
}
