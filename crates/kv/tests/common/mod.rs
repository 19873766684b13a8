//! Stores in the memory of the test's process.
#![allow(dead_code)]

pub mod spread;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use kv::memory::{Arena, Client, Hand, Memory};
use kv::{Form, Settings, Store};

pub type TestStore = Store<Arc<Client>, Arena, Arc<Hand>>;

/// Milliseconds since 1970 at the begin of each test.
pub const BEGIN: u64 = 1_700_000_000_000;

/// Runs a future whose wake-ups come from itself.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let mut cx = Context::from_waker(Waker::noop());
    for _ in 0..1_000_000 {
        if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
            return output;
        }
    }
    panic!("the future waits for another task");
}

/// The columns of the table of round trips.
pub const COLUMNS: [(&str, Form, bool); 3] = [
    ("published", Form::Published, false),
    ("fused, index remote", Form::Fused, false),
    ("fused, mirrored", Form::Fused, true),
];

pub fn settings(form: Form, mirror: bool, groups: u16) -> Settings {
    Settings { form, mirror, groups: Some(groups), ..Settings::default() }
}

/// The columns, a mirrored store that caches values, and one that mirrors two subtables only. The
/// cache evicts values in most tests.
pub fn cases(groups: u16) -> [(&'static str, Settings); 5] {
    let [published, remote, mirrored] =
        COLUMNS.map(|(name, form, mirror)| (name, settings(form, mirror, groups)));
    let cached = Settings { cache_bytes: CACHE_BYTES, ..mirrored.1.clone() };
    let index_cache = 2 * mirror_bytes(groups);
    let partly = Settings { index_cache, ..cached.clone() };
    let cached = ("fused, mirrored, values cached", cached);
    [published, remote, mirrored, cached, ("fused, partly mirrored", partly)]
}

/// Bytes of the mirror of a subtable.
pub fn mirror_bytes(groups: u16) -> u64 {
    // Three buckets of seven slots of 16 bytes.
    u64::from(groups) * 3 * 7 * 16
}

/// Bytes of a value cache that has room for some hundred short values.
pub const CACHE_BYTES: u64 = 64 << 10;

pub struct World {
    pub memory: Arc<Memory>,
    pub client: Arc<Client>,
    pub arena: Arena,
    pub hand: Arc<Hand>,
}

impl World {
    pub fn new(chunk: u32, chunks: u64, interleaved: bool, seed: u64) -> Self {
        let memory = Memory::new(chunk);
        let client = Arc::new(Client::new(memory.clone(), interleaved));
        let arena = Arena::new(memory.clone(), 0, chunks);
        Self { memory, client, arena, hand: Hand::new(BEGIN, seed) }
    }

    pub fn create(&self, settings: Settings) -> TestStore {
        let (client, arena) = (self.client.clone(), self.arena.clone());
        block_on(Store::create(client, arena, self.hand.clone(), settings)).expect("a store")
    }
}

pub fn store(form: Form, mirror: bool, groups: u16) -> (World, TestStore) {
    let world = World::new(4096, 1 << 20, false, 1);
    let store = world.create(settings(form, mirror, groups));
    (world, store)
}

/// Number of seeds: 1,000, or the number in the environment.
pub fn seeds() -> u64 {
    std::env::var("GRANARY_KV_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(1000)
}
