//! An index that several clients change: round trips, and runs by seed.

mod common;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use common::{BEGIN, block_on, seeds};
use kv::check::{Case, Counts};
use kv::memory::{Arena, Client, Hand, Memory};
use kv::{Cursor, Expiry, Form, Operation, SetOptions, SharedSettings, SharedStore, Update};

type Shared = SharedStore<Arc<Client>, Arena, Arc<Hand>>;

struct World {
    memory: Arc<Memory>,
    arena: Arena,
    hand: Arc<Hand>,
}

impl World {
    fn new() -> Self {
        let memory = Memory::new(4096);
        let arena = Arena::new(memory.clone(), 0, 1 << 20);
        Self { memory, arena, hand: Hand::new(BEGIN, 1) }
    }

    fn settings(form: Form, groups: u16) -> SharedSettings {
        SharedSettings { form, groups: Some(groups), ..SharedSettings::default() }
    }

    fn create(&self, settings: SharedSettings) -> (Arc<Client>, Shared) {
        let client = Arc::new(Client::new(self.memory.clone(), false));
        let (arena, hand) = (self.arena.clone(), self.hand.clone());
        let store = SharedStore::create(client.clone(), arena, hand, settings);
        (client, block_on(store).expect("a store"))
    }

    fn open(&self, first: &Shared, settings: SharedSettings) -> (Arc<Client>, Shared) {
        let client = Arc::new(Client::new(self.memory.clone(), false));
        let (arena, hand) = (self.arena.clone(), self.hand.clone());
        let store = SharedStore::open(client.clone(), arena, hand, settings, first.root());
        (client, block_on(store).expect("a store"))
    }
}

/// Round trips: published, fused. A new key takes one more than in RACE, because its slot becomes
/// final by a CAS of its own.
const TABLE: [(&str, [u64; 2]); 9] = [
    ("get, hit", [2, 2]),
    ("get, miss", [1, 1]),
    ("set, new key", [4, 3]),
    ("set, key there", [3, 3]),
    ("delete", [3, 3]),
    ("update", [4, 3]),
    ("expire", [4, 3]),
    ("persist", [4, 3]),
    ("exists", [2, 2]),
];

#[test]
fn round_trips_are_those_of_the_table() {
    for (column, form) in [Form::Published, Form::Fused].into_iter().enumerate() {
        let world = World::new();
        let (client, store) = world.create(World::settings(form, 21));
        let mut taken = Vec::new();
        let set = |key: &'static [u8]| store.set(0, key, b"value", SetOptions::default());
        // The first write creates the directory.
        block_on(set(b"first")).expect("a write");
        let mut measure = |what: &'static str, operation: &mut dyn FnMut()| {
            let before = client.waits();
            operation();
            taken.push((what, client.waits() - before));
        };
        measure("set, new key", &mut || drop(block_on(set(b"key")).expect("a write")));
        measure("set, key there", &mut || drop(block_on(set(b"key")).expect("a write")));
        measure("get, hit", &mut || {
            let value = block_on(store.get(0, b"key")).expect("a read");
            assert_eq!(value.as_deref(), Some(&b"value"[..]));
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
            assert_eq!(found.1, expected[column], "{form:?}: {what}");
        }
        assert_eq!(store.trips(Operation::Delete).waits, TABLE[4].1[column]);
        assert_eq!(block_on(store.len(0)).expect("a scan"), 1);
    }
}

/// After a tick the cache is verified in the same round trip as the buckets are read.
#[test]
fn stale_cache_takes_no_round_trip_more() {
    let world = World::new();
    let (client, store) = world.create(World::settings(Form::Fused, 21));
    block_on(store.set(0, b"key", b"value", SetOptions::default())).expect("a write");
    world.hand.advance(5);
    block_on(store.tick()).expect("a tick");
    let before = client.waits();
    assert!(block_on(store.get(0, b"key")).expect("a read").is_some());
    assert_eq!(client.waits() - before, 2);
}

#[test]
fn clients_see_each_others_keys_over_splits() {
    let world = World::new();
    let settings = SharedSettings { tick_ms: 0, ..World::settings(Form::Fused, 2) };
    let (_, one) = world.create(settings.clone());
    let (_, two) = world.open(&one, settings);
    let key = |i: u32| i.to_be_bytes();
    for i in 0..2000 {
        let store = if i % 2 == 0 { &one } else { &two };
        block_on(store.set(0, &key(i), &key(i), SetOptions::default())).expect("a write");
    }
    for i in 0..2000 {
        let store = if i % 3 == 0 { &one } else { &two };
        let value = block_on(store.get(0, &key(i))).expect("a read");
        assert_eq!(value.as_deref(), Some(&key(i)[..]));
    }
    let splits = [&one, &two].map(|store| store.trips(Operation::Split).operations);
    assert!(splits.iter().all(|splits| *splits > 20), "{splits:?}");
    let (mut seen, mut cursor) = (BTreeSet::new(), Cursor::default());
    loop {
        let scanned = block_on(one.scan(0, cursor, 10)).expect("a scan");
        seen.extend(scanned.keys);
        cursor = scanned.next;
        if cursor.is_end() {
            break;
        }
    }
    assert_eq!(seen.len(), 2000);
    assert_eq!(block_on(two.len(0)).expect("a scan"), 2000);
}

#[test]
fn runs_are_linearizable() {
    for case in Case::ALL {
        let mut counts = Counts::default();
        for seed in 0..seeds() / 4 {
            let outcome = kv::check::run(case, seed);
            assert_eq!(outcome.violation, None, "{case}: seed {seed}");
            counts.add(&outcome.counts);
        }
        assert!(counts.splits > seeds() / 4 && counts.crashes > 0, "{case}: {counts:?}");
        println!("{case}: {counts:?}");
    }
}
