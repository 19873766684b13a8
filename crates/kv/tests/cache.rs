//! The value cache of a store whose values are on several memory nodes, some of which end.

mod common;

use std::collections::HashMap;
use std::sync::Arc;

use common::spread::{Spread, SpreadStore, world};
use common::{BEGIN, CACHE_BYTES, block_on, mirror_bytes, settings};
use kv::memory::{Client, Hand, Memory};
use kv::{Ahead, Candidates, Eviction, Expiry, Form, SetOptions, Settings, Store, Update, Wanted};
use proptest::collection::vec;
use proptest::prelude::*;

const KEYS: u32 = 80;

#[derive(Clone, Debug)]
enum Op {
    Set { key: u32, bytes: usize, expiry: u64 },
    Get(u32),
    GetMany(Vec<u32>),
    Delete(u32),
    Append(u32),
    Expire { key: u32, after: u64 },
    Swap(u32, u32),
    Advance(u64),
    Sweep,
    Evict,
    Flush,
    Compact,
    Merge,
    Resize(u64),
    Lose(u8),
    ForgetGone,
}

fn op() -> impl Strategy<Value = Op> {
    let key = 0..KEYS;
    let bytes = prop_oneof![20 => 0..300_usize, 2 => 1000..3000_usize, 1 => 5000..9000_usize];
    prop_oneof![
        30 => (key.clone(), bytes, 0..40_u64)
            .prop_map(|(key, bytes, expiry)| Op::Set { key, bytes, expiry }),
        40 => key.clone().prop_map(Op::Get),
        5 => vec(key.clone(), 1..6).prop_map(Op::GetMany),
        5 => key.clone().prop_map(Op::Delete),
        5 => key.clone().prop_map(Op::Append),
        5 => (key.clone(), 0..20_u64).prop_map(|(key, after)| Op::Expire { key, after }),
        5 => (key.clone(), key).prop_map(|(one, two)| Op::Swap(one, two)),
        5 => (1..5_u64).prop_map(Op::Advance),
        2 => Just(Op::Sweep),
        3 => Just(Op::Evict),
        1 => Just(Op::Flush),
        2 => Just(Op::Compact),
        2 => Just(Op::Merge),
        2 => (0..4_u64).prop_map(Op::Resize),
        1 => (1..3_u8).prop_map(Op::Lose),
        2 => Just(Op::ForgetGone),
    ]
}

fn name(key: u32) -> Vec<u8> {
    format!("key-{key}").into_bytes()
}

struct Check {
    memory: Arc<Memory>,
    spread: Spread,
    hand: Arc<Hand>,
    store: SpreadStore,
    /// Value and expiry of each key.
    model: HashMap<u32, (Vec<u8>, u64)>,
    now: u64,
    serial: u8,
}

impl Check {
    fn new(index_cache: u64) -> Self {
        let (memory, spread) = world();
        let client = Arc::new(Client::new(memory.clone(), false));
        let hand = Hand::new(BEGIN, 1);
        let settings =
            Settings { cache_bytes: CACHE_BYTES, index_cache, ..settings(Form::Fused, true, 1) };
        let store = block_on(Store::create(client, spread.clone(), hand.clone(), settings));
        let (model, store) = (HashMap::new(), store.expect("a store"));
        Self { memory, spread, hand, store, model, now: BEGIN, serial: 0 }
    }

    fn expected(&self, key: u32) -> Option<&[u8]> {
        let (value, expiry) = self.model.get(&key)?;
        (*expiry == 0 || *expiry > self.now).then_some(value)
    }

    fn content(&mut self, bytes: usize) -> Vec<u8> {
        self.serial = self.serial.wrapping_add(1);
        (0..bytes).map(|i| (i as u8).wrapping_mul(31).wrapping_add(self.serial)).collect()
    }

    fn get(&self, key: u32) -> Option<Vec<u8>> {
        block_on(self.store.get(0, &name(key))).expect("a read")
    }

    /// Takes the keys out of the model that the store has lost. Their number must fit.
    fn lose(&mut self, node: u8) {
        self.memory.lose(node);
        for key in 0..KEYS {
            match (self.expected(key), self.get(key)) {
                (Some(expected), Some(found)) => assert_eq!(found, expected, "key {key}"),
                (_, None) => drop(self.model.remove(&key)),
                (None, Some(_)) => panic!("key {key} came back"),
            }
        }
    }

    fn evict(&mut self) {
        let before = self.store.len(0);
        block_on(self.store.evict(Candidates::All, Eviction::LeastUsed)).expect("an eviction");
        assert!(self.store.len(0) + 1 >= before);
        let mut gone: Vec<u32> = (0..KEYS).filter(|key| self.expected(*key).is_some()).collect();
        gone.retain(|key| !block_on(self.store.exists(0, &name(*key))).expect("a read"));
        assert!(gone.len() <= 1, "an eviction has deleted {gone:?}");
        gone.iter().for_each(|key| drop(self.model.remove(key)));
    }

    fn swap(&mut self, one: u32, two: u32) {
        let names = [one, two].map(name);
        let wanted = [&names[0], &names[1]].map(|key| Wanted { db: 0, key, is_read: true });
        let swap = |call: &mut kv::Transaction| {
            let values = [0, 1].map(|key| call.get(key).map(<[u8]>::to_vec));
            for (key, value) in [0, 1].into_iter().zip(values.iter().rev()) {
                match value {
                    Some(value) => call.put(key, value.clone(), Expiry::Never),
                    None => drop(call.delete(key)),
                }
            }
            values
        };
        let values = block_on(self.store.atomically(&wanted, swap)).expect("a change");
        assert_eq!(values[0].as_deref(), self.expected(one));
        assert_eq!(values[1].as_deref(), self.expected(two));
        let [first, second] = values;
        for (key, value) in [(one, second), (two, first)] {
            match value {
                Some(value) => drop(self.model.insert(key, (value, 0))),
                None => drop(self.model.remove(&key)),
            }
        }
    }

    fn step(&mut self, op: Op) {
        match op {
            Op::Set { key, bytes, expiry } => {
                let value = self.content(bytes);
                let at = if expiry < 30 { 0 } else { self.now + expiry - 29 };
                let options = SetOptions {
                    expiry: if at == 0 { Expiry::Never } else { Expiry::At(at) },
                    ..SetOptions::default()
                };
                block_on(self.store.set(0, &name(key), &value, options)).expect("a write");
                self.model.insert(key, (value, at));
            }
            Op::Get(key) => assert_eq!(self.get(key).as_deref(), self.expected(key)),
            Op::GetMany(keys) => {
                let names: Vec<_> = keys.iter().map(|key| name(*key)).collect();
                let names: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
                let values = block_on(self.store.get_many(0, &names)).expect("a read");
                for (key, value) in keys.iter().zip(values) {
                    assert_eq!(value.as_deref(), self.expected(*key));
                }
                let mut ahead = Ahead::default();
                block_on(self.store.read_ahead(0, names.iter().copied(), &mut ahead));
                for key in keys {
                    ahead.begin_next();
                    if let Some(value) = ahead.value() {
                        assert_eq!(value.map(|(value, _)| value), self.expected(key));
                    }
                }
            }
            Op::Delete(key) => {
                let deleted = block_on(self.store.delete(0, &name(key))).expect("a deletion");
                assert_eq!(deleted, self.expected(key).is_some());
                self.model.remove(&key);
            }
            Op::Append(key) => {
                let more = self.content(10);
                let before = self.expected(key).map(<[u8]>::to_vec);
                let append = |value: Option<&[u8]>, _| {
                    assert_eq!(value, before.as_deref());
                    let value = [value.unwrap_or_default(), &more].concat();
                    Update::Put(value.into(), Expiry::Keep)
                };
                block_on(self.store.update(0, &name(key), append)).expect("an update");
                let expiry = before.as_ref().map_or(0, |_| self.model[&key].1);
                let value = [&before.unwrap_or_default()[..], &more].concat();
                self.model.insert(key, (value, expiry));
            }
            Op::Expire { key, after } => {
                let at = if after == 0 { 0 } else { self.now + after };
                let done = block_on(self.store.expire(0, &name(key), at, |_| true));
                assert_eq!(done.expect("a change"), self.expected(key).is_some());
                if self.expected(key).is_some() {
                    self.model.entry(key).and_modify(|(_, expiry)| *expiry = at);
                }
            }
            Op::Swap(one, two) if one == two => {}
            Op::Swap(one, two) => self.swap(one, two),
            Op::Advance(ms) => {
                self.hand.advance(ms);
                self.now += ms;
            }
            Op::Sweep => drop(block_on(self.store.sweep(usize::MAX)).expect("a sweep")),
            Op::Evict => self.evict(),
            Op::Flush => {
                block_on(self.store.flush(0)).expect("a flush");
                self.model.clear();
                assert_eq!(self.store.stats().cache.values, 0, "values of no key are cached");
            }
            Op::Compact => drop(block_on(self.store.compact(60)).expect("a compaction")),
            Op::Merge => drop(block_on(self.store.merge(0)).expect("a merge")),
            Op::Resize(part) => self.store.resize_cache(part * CACHE_BYTES / 2),
            Op::Lose(node) => self.lose(node),
            Op::ForgetGone => drop(block_on(self.store.forget_gone()).expect("a search")),
        }
        let cache = self.store.stats().cache;
        assert!(cache.bytes <= cache.limit, "{cache:?}");
        assert!(cache.values <= self.store.len(0), "more values are cached than there are keys");
    }

    fn end(self) {
        for key in (0..KEYS).chain(0..KEYS) {
            assert_eq!(self.get(key).as_deref(), self.expected(key));
        }
        block_on(self.store.flush(0)).expect("a flush");
        let wrong: u64 = self.spread.arenas.iter().map(kv::memory::Arena::wrong_frees).sum();
        assert_eq!((wrong, self.store.stats().cache.values), (0, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn cached_values_are_those_of_a_map_while_memory_nodes_end(ops in vec(op(), 1..400)) {
        let mut check = Check::new(u64::MAX);
        ops.into_iter().for_each(|op| check.step(op));
        check.end();
    }

    #[test]
    fn partly_mirrored_values_are_those_of_a_map(
        ops in vec(op(), 1..400), mirrors in 0..5_u64,
    ) {
        let mut check = Check::new(mirrors * mirror_bytes(1));
        ops.into_iter().for_each(|op| check.step(op));
        let stats = check.store.stats();
        assert_eq!(stats.mirror_bytes, stats.mirrored * mirror_bytes(1));
        assert!(stats.mirrored <= mirrors, "{stats:?}");
        check.end();
    }
}
