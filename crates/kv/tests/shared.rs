//! An index that several clients change: round trips, and runs by seed.

mod common;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use common::{BEGIN, block_on, seeds};
use kv::check::{Case, Counts};
use kv::memory::{Arena, Client, Hand, Memory};
use kv::place::Address;
use kv::reach::{Range, Reach, Step, Stopped};
use kv::{
    Cursor, Error, Expiry, Form, Operation, SetOptions, SharedSettings, SharedStore, SplitLock,
    Update,
};

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

/// A client that ticks and does nothing else keeps words of a directory whose subtables were split
/// and whose blocks were used again.
#[test]
fn cached_words_are_verified_after_a_tick() {
    let world = World::new();
    let (_, busy) = world.create(World::settings(Form::Fused, 2));
    let (_, idle) = world.open(&busy, World::settings(Form::Fused, 2));
    let key = |i: u32| i.to_be_bytes();
    let set = |store: &Shared, i| {
        block_on(store.set(0, &key(i), &key(i), SetOptions::default())).expect("a write");
    };
    for i in 0..100 {
        set(&idle, i);
    }
    for i in 100..1000 {
        set(&busy, i);
        if i % 10 == 0 {
            world.hand.advance(1);
            block_on(busy.tend()).expect("a tick");
            block_on(idle.tick()).expect("a tick");
        }
    }
    assert!(busy.limbo_bytes() < 100_000, "{} bytes were not free", busy.limbo_bytes());
    for i in 0..1000 {
        let value = block_on(idle.get(0, &key(i))).expect("a read");
        assert_eq!(value.as_deref(), Some(&key(i)[..]));
    }
}

/// Keys that a client has written before it crashed after `verbs` verbs, and the index.
fn crashed(world: &World, verbs: u64, settings: &SharedSettings) -> (Shared, Vec<u32>) {
    let (client, store) = world.create(settings.clone());
    client.crash_after(verbs);
    let mut written = Vec::new();
    for i in 0..100_u32 {
        match block_on(store.set(0, &i.to_be_bytes(), b"value", SetOptions::default())) {
            Ok(_) => written.push(i),
            Err(Error::Stopped(_)) => break,
            Err(error) => panic!("{error}"),
        }
    }
    (store, written)
}

/// A value in pieces takes one round trip more, and two if its list continues.
#[test]
fn long_values_lie_in_pieces() {
    for form in [Form::Published, Form::Fused] {
        let world = World::new();
        let (client, store) = world.create(World::settings(form, 21));
        for (length, more) in [(4000, 0), (5000, 1), (3_000_000, 2)] {
            let value: Vec<u8> = (0..length).map(|i: u32| (i * 7 + length) as u8).collect();
            let set = store.set(0, b"key", &value, SetOptions::default());
            assert!(block_on(set).expect("a write").is_set);
            let before = client.waits();
            let found = block_on(store.get(0, b"key")).expect("a read");
            assert_eq!(client.waits() - before, 2 + more, "{form:?}: {length}");
            assert!(found.as_deref() == Some(&value[..]), "{form:?}: {length}");
            let longer = |value: Option<&[u8]>, _| {
                let value = value.expect("the key is there");
                Update::Put(Cow::Owned([value, b"+"].concat()), Expiry::Keep)
            };
            block_on(store.update(0, b"key", longer)).expect("an update");
            assert!(block_on(store.expire(0, b"key", BEGIN + 5, |_| true)).expect("a change"));
            let found = block_on(store.get(0, b"key")).expect("a read").expect("a value");
            assert!(found.len() == value.len() + 1 && found.starts_with(&value));
        }
        assert!(block_on(store.delete(0, b"key")).expect("a deletion"));
        for _ in 0..3 {
            world.hand.advance(1);
            block_on(store.tick()).expect("a tick");
        }
        let index = block_on(store.index_blocks(0)).expect("a read");
        assert_eq!((store.limbo_bytes(), world.arena.used().len()), (0, index));
    }
}

/// A client that ended without leaving holds blocks back until its connection has ended.
#[test]
fn client_that_has_ended_is_struck_by_the_others() {
    let world = World::new();
    let settings = World::settings(Form::Fused, 21);
    let (_, store) = world.create(settings.clone());
    let (gone, other) = world.open(&store, settings.clone());
    let line = other.client();
    drop(other);
    let set = || block_on(store.set(0, b"key", b"value", SetOptions::default()));
    let pass = || {
        for _ in 0..100 {
            world.hand.advance(1);
            block_on(store.tick()).expect("a tick");
        }
    };
    for _ in 0..3 {
        set().expect("a write");
        pass();
    }
    assert!(store.limbo_bytes() > 0);
    gone.end_life();
    pass();
    assert_eq!(store.limbo_bytes(), 0);
    // The line has a new client, which the end of the former one does not concern.
    let (_, next) = world.open(&store, settings);
    assert_eq!(next.client(), line);
    set().expect("a write");
    pass();
    assert!(store.limbo_bytes() > 0);
    for _ in 0..4 {
        block_on(next.tick()).expect("a tick");
        pass();
    }
    assert_eq!(store.limbo_bytes(), 0);
}

/// The first client crashes at each verb, also in a split; the second one goes on after the lease.
#[test]
fn client_may_crash_at_any_verb() {
    let settings = World::settings(Form::Fused, 1);
    for verbs in 0..700 {
        let world = World::new();
        let (first, written) = crashed(&world, verbs, &settings);
        world.hand.advance(1000);
        let (_, second) = world.open(&first, settings.clone());
        block_on(second.strike(first.client())).expect("a write");
        for i in 0..100_u32 {
            let key = i.to_be_bytes();
            let found = block_on(second.get(0, &key)).expect("a read");
            assert!(found.is_some() || !written.contains(&i), "key {i} after {verbs} verbs");
            let set = second.set(0, &key, b"other", SetOptions::default());
            block_on(set).unwrap_or_else(|error| panic!("key {i} after {verbs} verbs: {error}"));
        }
        for i in 0..100_u32 {
            let found = block_on(second.get(0, &i.to_be_bytes())).expect("a read");
            assert_eq!(found.as_deref(), Some(&b"other"[..]), "key {i} after {verbs} verbs");
        }
        assert_eq!(block_on(second.len(0)).expect("a scan"), 100, "after {verbs} verbs");
    }
}

/// As published: a subtable stays locked if its client crashes in a split. Readers go on.
#[test]
fn plain_lock_of_a_crashed_client_stays() {
    let lock = SplitLock::Plain;
    let settings = SharedSettings { lock, attempts: 20, ..World::settings(Form::Published, 1) };
    let mut locked = 0;
    for verbs in 0..400 {
        let world = World::new();
        let (first, written) = crashed(&world, verbs, &settings);
        world.hand.advance(1_000_000);
        let (_, second) = world.open(&first, settings.clone());
        let set =
            |i: u32| block_on(second.set(0, &i.to_be_bytes(), b"other", SetOptions::default()));
        locked += u64::from((0..100).any(|i| matches!(set(i), Err(Error::Contended { .. }))));
        for i in written {
            assert!(block_on(second.get(0, &i.to_be_bytes())).expect("a read").is_some());
        }
    }
    assert!(locked > 10, "{locked} of 400 crashes left a lock");
}

/// The way of a client beside a hostile one, which changes a slot before each CAS that freezes it.
#[derive(Clone)]
struct Storm {
    client: Arc<Client>,
    hostile: Arc<Hostile>,
}

#[derive(Default)]
struct Hostile {
    /// Offset of the slot, of the first CAS that freezes one; 0: none yet.
    slot: AtomicU64,
    word: AtomicU64,
    changes: AtomicU32,
    has_ended: AtomicU32,
}

const FROZEN: u64 = 1 << 47;
const TENTATIVE: u64 = 1 << 46;

impl Storm {
    fn word(&self, at: Address, change: impl FnOnce(u64) -> u64) -> u64 {
        let mut bytes = [0; 8];
        self.client.memory().read(at, &mut bytes);
        let word = u64::from_be_bytes(bytes);
        self.client.memory().write(at, &change(word).to_be_bytes());
        word
    }

    fn before(&self, step: &Step<'_>) {
        let Step::Cas { at, expected, new, .. } = step else { return };
        let hostile = &*self.hostile;
        let ended = hostile.has_ended.load(Ordering::Relaxed) != 0;
        if ended || expected & FROZEN != 0 || *new != expected | FROZEN {
            return;
        }
        let is_first = hostile.slot.load(Ordering::Relaxed) == 0;
        if is_first {
            hostile.slot.store(at.offset, Ordering::Relaxed);
        }
        if hostile.slot.load(Ordering::Relaxed) == at.offset {
            let changes = hostile.changes.fetch_add(1, Ordering::Relaxed);
            assert!(changes < 10_000, "a split freezes a slot without a bound");
            let word = self.word(*at, |word| word ^ TENTATIVE);
            if is_first {
                hostile.word.store(word, Ordering::Relaxed);
            }
        }
    }

    /// Ends the hostile client, which leaves the slot as it was.
    fn end(&self) {
        self.hostile.has_ended.store(1, Ordering::Relaxed);
        let at = Address { node: 0, offset: self.hostile.slot.load(Ordering::Relaxed) };
        self.word(at, |_| self.hostile.word.load(Ordering::Relaxed));
    }
}

impl Reach for Storm {
    type Right = ();

    async fn open(&self, range: Range) -> Result<(), Stopped> {
        self.client.open(range).await
    }

    async fn close(&self, (): ()) {}

    async fn run(&self, steps: &mut [Step<'_>]) -> Result<(), Stopped> {
        steps.iter().for_each(|step| self.before(step));
        self.client.run(steps).await
    }

    fn life(&self) -> Option<Address> {
        self.client.life()
    }

    fn ordered(&self, a: Address, b: Address) -> bool {
        self.client.ordered(a, b)
    }
}

/// A split that ends with the error leaves no lock and no block, and goes on when the slot rests.
#[test]
fn split_ends_beside_a_client_that_changes_a_slot() {
    for lock in [SplitLock::Lease(10), SplitLock::Plain, SplitLock::Exclusive] {
        let world = World::new();
        let settings = SharedSettings { lock, attempts: 1000, ..World::settings(Form::Fused, 1) };
        let client = Arc::new(Client::new(world.memory.clone(), false));
        let storm = Storm { client, hostile: Arc::default() };
        let (arena, hand) = (world.arena.clone(), world.hand.clone());
        let store = SharedStore::create(storm.clone(), arena, hand, settings.clone());
        let store = block_on(store).expect("a store");
        let key = |i: u32| i.to_be_bytes();
        let set = |i| block_on(store.set(0, &key(i), &key(i), SetOptions::default()));
        let failed = (0..100).find_map(|i| set(i).err().map(|error| (i, error)));
        let (end, error) = failed.expect("a split that ends with an error");
        assert!(matches!(error, Error::Contended { attempts: 1000, .. }), "{lock:?}: {error}");
        let text = "a slot of the key's subtable, which is being split, before each of 1000";
        assert!(error.to_string().contains(text), "{error}");
        let used = world.arena.used().len();
        assert_eq!(set(end), Err(error), "{lock:?}");
        assert_eq!(world.arena.used().len(), used, "{lock:?}");
        storm.end();
        // No time passes: no lease of a lock ends.
        let client = Arc::new(Client::new(world.memory.clone(), false));
        let (arena, hand) = (world.arena.clone(), world.hand.clone());
        let other = SharedStore::open(client, arena, hand, settings, store.root());
        let other = block_on(other).expect("a store");
        let bytes = key(end);
        let written = other.set(0, &bytes, &bytes, SetOptions::default());
        block_on(written).expect("a write of another client");
        (end..100).for_each(|i| _ = set(i).expect("a write"));
        for i in 0..100 {
            let value = block_on(other.get(0, &key(i))).expect("a read");
            assert_eq!(value.as_deref(), Some(&key(i)[..]), "{lock:?}: key {i}");
        }
    }
}

#[test]
fn client_that_does_not_tick_holds_splits_back() {
    let world = World::new();
    let limbo_max = 4096;
    let settings = SharedSettings { limbo_max, tick_ms: 0, ..World::settings(Form::Fused, 2) };
    let (_, store) = world.create(settings.clone());
    let (_, idle) = world.open(&store, settings);
    let set = |i: u32| block_on(store.set(0, &i.to_be_bytes(), b"value", SetOptions::default()));
    let held = (0..5000).find(|i| matches!(set(*i), Err(Error::HeldBack(_))));
    let held = held.expect("a split that was held back");
    assert!(store.limbo_bytes() > limbo_max);
    block_on(store.strike(idle.client())).expect("a write");
    assert!(set(held).expect("a write").is_set);
}

/// Seeds that have found a defect of the store or of the check.
const FOUND: [(Case, u64); 2] = [(Case::Alone, 44), (Case::Shared, 200)];

#[test]
fn seeds_that_found_a_defect_find_none() {
    for (case, seed) in FOUND {
        assert_eq!(kv::check::run(case, seed).violation, None, "{case}: seed {seed}");
    }
}

fn check_runs(case: Case, runs: u64) {
    let mut counts = Counts::default();
    for seed in 0..runs {
        let outcome = kv::check::run(case, seed);
        assert_eq!(outcome.violation, None, "{case}: seed {seed}");
        counts.add(&outcome.counts);
    }
    assert!(counts.splits > runs && counts.crashes > 0, "{case}: {counts:?}");
    println!("{case}: {counts:?}");
}

#[test]
fn runs_of_one_owner_are_linearizable() {
    check_runs(Case::Alone, seeds() / 2);
}

#[test]
fn runs_of_several_clients_are_linearizable() {
    check_runs(Case::Shared, seeds());
}
