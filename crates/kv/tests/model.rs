//! Random operations against a `BTreeMap`.

mod common;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use common::{BEGIN, CACHE_BYTES, TestStore, World, block_on, cases};
use kv::{Candidates, Condition, Cursor, Eviction, Expiry, SetOptions, Update, Wanted};
use proptest::collection::vec;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Op {
    Set { key: u8, bytes: usize, expiry: u8, condition: u8, get: bool },
    Get(u8),
    Delete(u8),
    Append { key: u8, bytes: usize },
    Expire { key: u8, after: u8 },
    Exists(u8),
    Many(Vec<u8>),
    Move(u8, u8),
    Advance(u8),
    Sweep,
    Merge,
    Compact,
    ScanStep(u8),
    Flush,
    Burst(u8),
    Drain(u8),
    Evict,
    ResizeCache(u8),
}

fn op() -> impl Strategy<Value = Op> {
    let bytes = prop_oneof![8 => 0..200_usize, 1 => 3000..6000_usize, 1 => 9000..20_000_usize];
    let key = 0..60_u8;
    prop_oneof![
        12 => (key.clone(), bytes.clone(), 0..6_u8, 0..6_u8, any::<bool>()).prop_map(
            |(key, bytes, expiry, condition, get)| Op::Set { key, bytes, expiry, condition, get }),
        8 => key.clone().prop_map(Op::Get),
        5 => key.clone().prop_map(Op::Delete),
        4 => (key.clone(), bytes).prop_map(|(key, bytes)| Op::Append { key, bytes }),
        4 => (key.clone(), 0..6_u8).prop_map(|(key, after)| Op::Expire { key, after }),
        3 => key.clone().prop_map(Op::Exists),
        2 => vec(key.clone(), 0..5).prop_map(Op::Many),
        4 => (key.clone(), key.clone()).prop_map(|(from, to)| Op::Move(from, to)),
        4 => (0..4_u8).prop_map(Op::Advance),
        2 => Just(Op::Sweep),
        2 => Just(Op::Merge),
        2 => Just(Op::Compact),
        4 => (1..20_u8).prop_map(Op::ScanStep),
        1 => Just(Op::Flush),
        3 => any::<u8>().prop_map(Op::Burst),
        3 => any::<u8>().prop_map(Op::Drain),
        3 => Just(Op::Evict),
        1 => (0..3_u8).prop_map(Op::ResizeCache),
    ]
}

fn name(key: u8) -> Vec<u8> {
    // One key in ten is longer than what a scan reads at first.
    let long = if key % 10 == 7 { 300 } else { 0 };
    format!("{}{key}", "k".repeat(long)).into_bytes()
}

fn content(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

#[derive(Clone, Debug, PartialEq)]
struct Kept {
    value: Vec<u8>,
    expiry: u64,
}

/// A scan that runs beside the other operations.
#[derive(Default)]
struct Scan {
    cursor: Cursor,
    seen: BTreeSet<Vec<u8>>,
    /// Keys that have been there since the scan began.
    constant: BTreeSet<Vec<u8>>,
}

struct Check {
    world: World,
    store: TestStore,
    model: BTreeMap<Vec<u8>, Kept>,
    now: u64,
    scan: Scan,
    serial: u8,
}

impl Check {
    fn alive(&mut self, key: &[u8]) -> Option<Kept> {
        let now = self.now;
        let kept = self.model.get(key)?.clone();
        (kept.expiry == 0 || kept.expiry > now).then_some(kept)
    }

    fn put(&mut self, key: Vec<u8>, value: Vec<u8>, expiry: u64) {
        self.model.insert(key, Kept { value, expiry });
    }

    fn remove(&mut self, key: &[u8]) {
        self.model.remove(key);
        self.scan.constant.remove(key);
    }

    fn set(&mut self, key: u8, bytes: usize, expiry: u8, condition: u8, get: bool) {
        let key = name(key);
        self.serial = self.serial.wrapping_add(1);
        let value = content(bytes, self.serial);
        let before = self.alive(&key);
        let condition = match condition {
            4 => Condition::IfAbsent,
            5 => Condition::IfPresent,
            _ => Condition::Always,
        };
        let (expiry, at) = match expiry {
            4 => (Expiry::At(self.now + 2), self.now + 2),
            5 => (Expiry::Keep, before.as_ref().map_or(0, |kept| kept.expiry)),
            _ => (Expiry::Never, 0),
        };
        let options = SetOptions { condition, expiry, get };
        let outcome = block_on(self.store.set(0, &key, &value, options)).expect("a write");
        let is_set = match condition {
            Condition::Always => true,
            Condition::IfAbsent => before.is_none(),
            Condition::IfPresent => before.is_some(),
        };
        assert_eq!(outcome.is_set, is_set);
        assert_eq!(outcome.old, before.filter(|_| get).map(|kept| kept.value));
        if is_set {
            self.put(key, value, at);
        }
    }

    fn get(&mut self, key: u8) {
        let key = name(key);
        let expected = self.alive(&key);
        let value = block_on(self.store.get(0, &key)).expect("a read");
        assert_eq!(value, expected.clone().map(|kept| kept.value));
        let expiry = block_on(self.store.expiry(0, &key)).expect("a read");
        assert_eq!(expiry, expected.map(|kept| kept.expiry));
    }

    fn append(&mut self, key: u8, bytes: usize) {
        let (key, more) = (name(key), content(bytes, key));
        let before = self.alive(&key);
        let change = |value: Option<&[u8]>, _| {
            Update::Put(Cow::Owned([value.unwrap_or_default(), &more].concat()), Expiry::Keep)
        };
        block_on(self.store.update(0, &key, change)).expect("an update");
        let (mut value, expiry) = before.map_or_else(Default::default, |k| (k.value, k.expiry));
        value.extend(&more);
        self.put(key, value, expiry);
    }

    fn expire(&mut self, key: u8, after: u8) {
        let (key, before) = (name(key), self.alive(&name(key)));
        let at = if after == 0 { 0 } else { self.now + u64::from(after) - 1 };
        let done = block_on(self.store.expire(0, &key, at, |_| true)).expect("a change");
        assert_eq!(done, before.is_some());
        match before {
            Some(_) if at != 0 && at <= self.now => self.remove(&key),
            Some(kept) => self.put(key, kept.value, at),
            None => {}
        }
    }

    fn rename(&mut self, from: u8, to: u8) {
        let (from, to) = (name(from), name(to));
        let before = self.alive(&from);
        let keys = [
            Wanted { db: 0, key: &from, is_read: true },
            Wanted { db: 0, key: &to, is_read: false },
        ];
        let change = |call: &mut kv::Transaction| {
            let Some(value) = call.get(0).map(<[u8]>::to_vec) else { return false };
            let expiry = call.expiry(0).map_or(Expiry::Never, Expiry::At);
            call.delete(0);
            call.put(1, value, expiry);
            true
        };
        let done = block_on(self.store.atomically(&keys, change)).expect("a change");
        assert_eq!(done, before.is_some());
        if let Some(kept) = before {
            self.remove(&from);
            self.put(to, kept.value, kept.expiry);
        }
    }

    fn scan_step(&mut self, count: u8) {
        if self.scan.cursor.is_end() {
            self.scan = Scan::default();
            let now = self.now;
            let alive = self.model.iter().filter(|(_, k)| k.expiry == 0 || k.expiry > now);
            self.scan.constant = alive.map(|(key, _)| key.clone()).collect();
        }
        let scanned = block_on(self.store.scan(0, self.scan.cursor, count.into()));
        let scanned = scanned.expect("a scan");
        for key in &scanned.keys {
            assert!(self.alive(key).is_some(), "a scan returned a key that is not there");
        }
        self.scan.seen.extend(scanned.keys);
        self.scan.cursor = scanned.next;
        if self.scan.cursor.is_end() {
            let missed: Vec<_> = self.scan.constant.difference(&self.scan.seen).collect();
            assert!(missed.is_empty(), "a scan missed {missed:?}");
        }
    }

    fn advance(&mut self, ms: u8) {
        self.world.hand.advance(ms.into());
        self.now += u64::from(ms);
        let now = self.now;
        let model = &self.model;
        self.scan
            .constant
            .retain(|key| model.get(key).is_some_and(|kept| kept.expiry == 0 || kept.expiry > now));
    }

    /// Evicts a key. The model finds which one.
    fn evict(&mut self) {
        let before = self.store.len(0);
        let evicted = block_on(self.store.evict(Candidates::All, Eviction::Random));
        assert_eq!(evicted.expect("an eviction"), before > 0);
        assert_eq!(self.store.len(0), before.saturating_sub(1));
        let alive: Vec<_> = (0..60).map(name).filter(|key| self.alive(key).is_some()).collect();
        let mut gone = Vec::new();
        for key in alive {
            if !block_on(self.store.exists(0, &key)).expect("a read") {
                gone.push(key);
            }
        }
        assert!(gone.len() <= 1, "an eviction has deleted {gone:?}");
        gone.iter().for_each(|key| self.remove(key));
        if gone.is_empty() && before > 0 {
            // An expired key, which is in the model until the next sweep.
            self.step(Op::Sweep);
        }
    }

    fn step(&mut self, op: Op) {
        match op {
            Op::Set { key, bytes, expiry, condition, get } => {
                self.set(key, bytes, expiry, condition, get);
            }
            Op::Get(key) => self.get(key),
            Op::Exists(key) => {
                let expected = self.alive(&name(key)).is_some();
                assert_eq!(block_on(self.store.exists(0, &name(key))).expect("a read"), expected);
            }
            Op::Delete(key) => {
                let expected = self.alive(&name(key)).is_some();
                let deleted = block_on(self.store.delete(0, &name(key))).expect("a deletion");
                assert_eq!(deleted, expected);
                self.remove(&name(key));
            }
            Op::Append { key, bytes } => self.append(key, bytes),
            Op::Expire { key, after } => self.expire(key, after),
            Op::Many(keys) => {
                let names: Vec<_> = keys.iter().map(|key| name(*key)).collect();
                let keys: Vec<_> = names.iter().map(Vec::as_slice).collect();
                let values = block_on(self.store.get_many(0, &keys)).expect("a read");
                let expected: Vec<_> =
                    names.iter().map(|key| self.alive(key).map(|kept| kept.value)).collect();
                assert_eq!(values, expected);
            }
            Op::Move(from, to) => self.rename(from, to),
            Op::Advance(ms) => self.advance(ms),
            Op::Sweep => {
                block_on(self.store.sweep(usize::MAX)).expect("a sweep");
                let now = self.now;
                self.model.retain(|_, kept| kept.expiry == 0 || kept.expiry > now);
                assert_eq!(self.store.len(0), self.model.len() as u64);
            }
            Op::Merge => drop(block_on(self.store.merge(0)).expect("a merge")),
            Op::Compact => drop(block_on(self.store.compact(50)).expect("a compaction")),
            Op::ScanStep(count) => self.scan_step(count),
            Op::Flush => {
                block_on(self.store.flush(0)).expect("a flush");
                self.model.clear();
                self.scan.constant.clear();
                assert_eq!(self.store.len(0), 0);
            }
            Op::Evict => self.evict(),
            Op::ResizeCache(part) => {
                self.store.resize_cache(u64::from(part) * CACHE_BYTES);
                let cache = self.store.stats().cache;
                assert!(cache.bytes <= cache.limit, "{cache:?}");
            }
            Op::Burst(seed) => {
                (0..60).for_each(|i| self.set(i, usize::from(seed % 90), 0, 0, false))
            }
            Op::Drain(seed) => (0..60).filter(|i| i % 7 != seed % 7).for_each(|i| {
                block_on(self.store.delete(0, &name(i))).expect("a deletion");
                self.remove(&name(i));
            }),
        }
    }

    /// Compares everything, then empties the store and looks for lost blocks.
    fn end(mut self) {
        (0..60).for_each(|key| self.get(key));
        (0..60).for_each(|key| self.get(key));
        let cache = self.store.stats().cache;
        assert!(cache.bytes <= cache.limit, "{cache:?}");
        assert!(!self.scan.cursor.is_end() || self.scan.seen.len() <= 60);
        block_on(self.store.flush_all()).expect("a flush");
        assert_eq!(self.world.arena.used().len(), 4, "blocks were lost");
        assert_eq!(self.world.arena.wrong_frees(), 0);
        assert_eq!(self.store.stats().cache.values, 0, "values of no key are cached");
    }
}

fn check(case: usize, ops: Vec<Op>) {
    let [.., (_, settings)] = &cases(1)[..=case] else { return };
    let world = World::new(4096, 1 << 20, false, 9);
    let store = world.create(settings.clone());
    let (model, scan) = (BTreeMap::new(), Scan::default());
    let mut check = Check { world, store, model, now: BEGIN, scan, serial: 0 };
    ops.into_iter().for_each(|op| check.step(op));
    check.end();
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn published_store_agrees_with_a_map(ops in vec(op(), 1..200)) {
        check(0, ops);
    }

    #[test]
    fn fused_store_agrees_with_a_map(ops in vec(op(), 1..200)) {
        check(1, ops);
    }

    #[test]
    fn mirrored_store_agrees_with_a_map(ops in vec(op(), 1..200)) {
        check(2, ops);
    }

    #[test]
    fn store_that_caches_values_agrees_with_a_map(ops in vec(op(), 1..200)) {
        check(3, ops);
    }

    #[test]
    fn partly_mirrored_store_agrees_with_a_map(ops in vec(op(), 1..200)) {
        check(4, ops);
    }
}
