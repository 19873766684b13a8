//! Values on several memory nodes, one of which ends.

mod common;

use std::collections::HashMap;
use std::sync::Arc;

use common::spread::{Spread, SpreadStore, world};
use common::{BEGIN, block_on, cases};
use kv::blocks::Blocks;
use kv::memory::{Arena, Client, Hand, Memory};
use kv::{Candidates, Cursor, Error, Eviction, Expiry, SetOptions, Store, Wanted};

fn name(i: u32) -> Vec<u8> {
    format!("key-{i}").into_bytes()
}

fn value(i: u32, version: u32) -> Vec<u8> {
    // Some values are in pieces.
    let bytes = if i.is_multiple_of(10) { 9000 + i } else { 40 + i };
    (0..bytes).map(|byte| (byte + 7 * i + version) as u8).collect()
}

fn filled(
    memory: &Arc<Memory>,
    spread: &Spread,
    settings: kv::Settings,
) -> (SpreadStore, Arc<Hand>) {
    let client = Arc::new(Client::new(memory.clone(), false));
    let hand = Hand::new(BEGIN, 1);
    let store = block_on(Store::create(client, spread.clone(), hand.clone(), settings)).unwrap();
    for i in 0..200 {
        block_on(store.set(0, &name(i), &value(i, 0), SetOptions::default())).unwrap();
    }
    (store, hand)
}

#[test]
fn the_rest_of_the_keys_outlives_a_memory_node() {
    for (column, settings) in cases(2) {
        let (memory, spread) = world();
        let (store, _) = filled(&memory, &spread, settings);
        let parts = spread.arenas.iter().map(|arena| arena.usage().live).collect::<Vec<_>>();
        assert!(parts.iter().all(|live| *live > 50_000), "{column}: {parts:?}");
        memory.lose(1);

        let read = |i| block_on(store.get(0, &name(i))).unwrap();
        let there: Vec<u32> = (0..200).filter(|i| read(*i).is_some()).collect();
        assert!((110..160).contains(&there.len()), "{column}: {} keys are left", there.len());
        there.iter().for_each(|i| assert_eq!(read(*i), Some(value(*i, 0)), "{column}"));
        let names: Vec<_> = (0..200).map(name).collect();
        let many: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
        let found = block_on(store.get_many(0, &many)).unwrap();
        assert_eq!(found.iter().filter(|value| value.is_some()).count(), there.len());

        let lost = 200 - there.len() as u64;
        assert_eq!(block_on(store.forget_gone()).unwrap(), lost, "{column}");
        assert_eq!(block_on(store.forget_gone()).unwrap(), 0);
        let stats = store.stats();
        assert_eq!((store.len(0), stats.gone, stats.gone_nodes), (200 - lost, lost, 1));
        for i in 0..200 {
            block_on(store.set(0, &name(i), &value(i, 1), SetOptions::default())).unwrap();
            assert_eq!(read(i), Some(value(i, 1)), "{column}");
        }
        assert_eq!(store.len(0), 200);
        block_on(store.flush(0)).unwrap();
        let wrong: u64 = spread.arenas.iter().map(Arena::wrong_frees).sum();
        assert_eq!(wrong, 0, "{column}");
    }
}

#[test]
fn loss_of_a_key_is_seen_by_its_watch() {
    for (column, settings) in cases(2) {
        let (memory, spread) = world();
        let (store, _) = filled(&memory, &spread, settings);
        let watches: Vec<_> = (0..200).map(|i| store.watch(0, &name(i)).unwrap()).collect();
        let other = store.watch(1, &name(0)).unwrap();
        memory.lose(1);
        let read = |i| block_on(store.get(0, &name(i))).unwrap();
        let lost: Vec<usize> = (0..200).filter(|i| read(*i as u32).is_none()).collect();
        assert!(lost.len() > 40, "{column}");
        block_on(store.forget_gone()).unwrap();
        // Without a mirror the names of lost keys are not known, so all keys count as flushed.
        let is_seen = |watch: &kv::Watch| watch.is_changed() || watch.is_flushed();
        assert!(lost.iter().all(|i| is_seen(&watches[*i])), "{column}");
        assert!(!is_seen(&other), "{column}: another database");
        assert!(watches.iter().enumerate().all(|(i, own)| lost.contains(&i) || !own.is_changed()));
    }
}

/// Each kind of operation meets keys whose values are gone, before they are forgotten.
#[test]
fn operations_do_without_a_memory_node_that_is_gone() {
    for (column, settings) in cases(2) {
        let (memory, spread) = world();
        let (store, hand) = filled(&memory, &spread, settings);
        let mut expected: HashMap<u32, Vec<u8>> = HashMap::new();
        memory.lose(2);
        for i in 0..200 {
            if let Some(value) = block_on(store.get(0, &name(i))).unwrap() {
                expected.insert(i, value);
            }
        }
        let lost = (0..200).filter(|i| !expected.contains_key(i)).collect::<Vec<u32>>();
        let [a, b, c, d] = lost[..4] else { panic!("four keys are lost") };

        assert!(!block_on(store.exists(0, &name(a))).unwrap());
        assert!(!block_on(store.delete(0, &name(a))).unwrap(), "{column}");
        assert!(!block_on(store.expire(0, &name(b), BEGIN + 1000, |_| true)).unwrap());
        let append = |old: Option<&[u8]>, _| {
            assert_eq!(old, None);
            kv::Update::Put(b"new".to_vec().into(), Expiry::Never)
        };
        block_on(store.update(0, &name(b), append)).unwrap();
        expected.insert(b, b"new".to_vec());
        let wanted = [c, d, 0, 1].map(name);
        let wanted: Vec<_> =
            wanted.iter().map(|key| Wanted { db: 0, key, is_read: true }).collect();
        let call = |call: &mut kv::Transaction| {
            assert_eq!((call.get(0), call.get(1)), (None, None));
            (0..4).for_each(|key| call.put(key, vec![key as u8; 100], Expiry::At(BEGIN + 5000)));
        };
        block_on(store.atomically(&wanted, call)).unwrap();
        for (key, i) in [c, d, 0, 1].into_iter().enumerate() {
            expected.insert(i, vec![key as u8; 100]);
        }
        // Splits, and compaction.
        for i in 200..800 {
            block_on(store.set(0, &name(i), &value(i, 0), SetOptions::default())).unwrap();
            expected.insert(i, value(i, 0));
        }
        block_on(store.compact(60)).unwrap();
        for i in 0..800 {
            assert_eq!(block_on(store.get(0, &name(i))).unwrap(), expected.get(&i).cloned());
        }
        let mut scanned = std::collections::BTreeSet::new();
        let mut cursor = Cursor::default();
        loop {
            let step = block_on(store.scan(0, cursor, 10)).unwrap();
            scanned.extend(step.keys);
            cursor = step.next;
            if cursor.is_end() {
                break;
            }
        }
        assert_eq!(scanned.len(), expected.len(), "{column}");
        let mut walked = 0;
        let mut from = Some(0);
        while let Some(at) = from {
            block_on(store.walk(0, at, |_| walked += 1, |next| from = next)).unwrap();
        }
        assert_eq!(walked, expected.len(), "{column}");
        for _ in 0..50 {
            assert!(block_on(store.evict(Candidates::All, Eviction::Random)).unwrap(), "{column}");
        }
        hand.advance(10_000);
        block_on(store.sweep(100)).unwrap();
        for i in [c, d, 0, 1] {
            assert_eq!(block_on(store.get(0, &name(i))).unwrap(), None, "{column}");
        }
        block_on(store.forget_gone()).unwrap();
        let there = (0..800).filter(|i| block_on(store.exists(0, &name(*i))).unwrap()).count();
        assert_eq!(store.len(0), there as u64, "{column}");
    }
}

/// Each kind of read ends with an error if the allocator denies that a memory node is gone.
#[test]
fn reads_end_if_the_loss_of_a_memory_node_is_denied() {
    for (column, settings) in cases(2) {
        let (memory, mut spread) = world();
        spread.denies = true;
        let (store, _) = filled(&memory, &spread, settings);
        memory.lose(1);
        let is_again = |error: &Error| matches!(error, Error::GoneAgain { node: 1, .. });
        let before = store.reach().verbs();
        let mut failed = 0;
        for i in 0..200 {
            let name = name(i);
            let results = [
                block_on(store.get(0, &name)).map(drop),
                block_on(store.get_many(0, &[&name, b"absent"])).map(drop),
                block_on(store.update(0, &name, |_, _| kv::Update::Keep)).map(drop),
                block_on(store.atomically(&[Wanted { db: 0, key: &name, is_read: true }], |_| ())),
            ];
            let errors = results.iter().filter(|result| result.is_err()).count();
            assert!(errors == 0 || errors == results.len(), "{column}: {results:?}");
            for error in results.into_iter().filter_map(Result::err) {
                assert!(is_again(&error), "{column}: {error}");
            }
            failed += errors / 4;
        }
        assert!((40..90).contains(&failed), "{column}: {failed} keys are lost");
        // Two attempts of four operations, each of at most 16 verbs.
        let verbs = store.reach().verbs() - before;
        assert!(verbs < 200 * 2 * 4 * 16, "{column}: {verbs} verbs");
    }
}

#[test]
fn value_is_lost_with_any_of_its_pieces() {
    for (column, settings) in cases(2) {
        let (memory, mut spread) = world();
        spread.scattered = Some(Arc::default());
        let (store, _) = filled(&memory, &spread, settings);
        memory.lose(2);
        let read = |i| block_on(store.get(0, &name(i))).unwrap();
        // Values of three pieces and a list have blocks on each memory node.
        for i in (0..200).step_by(10) {
            assert_eq!(read(i), None, "{column}: key {i}");
        }
        let left = (0..200).filter(|i| read(*i).is_some()).count() as u64;
        block_on(store.set(0, &name(0), b"new", SetOptions::default())).unwrap();
        assert_eq!(read(0).as_deref(), Some(&b"new"[..]), "{column}");
        let absent = |value: Option<&[u8]>, _| {
            assert_eq!(value, None);
            kv::Update::Keep
        };
        block_on(store.update(0, &name(10), absent)).unwrap();
        assert_eq!(block_on(store.forget_gone()).unwrap(), 199 - left, "{column}");
        assert_eq!(block_on(store.forget_gone()).unwrap(), 0, "{column}");
        assert_eq!(store.len(0), left + 1, "{column}");
        block_on(store.flush(0)).unwrap();
        let left_over = spread.arenas.iter().map(|arena| arena.used().len()).sum::<usize>();
        let wrong: u64 = spread.arenas.iter().map(Arena::wrong_frees).sum();
        // The pieces of the 20 values in pieces are not known where the list is lost.
        assert!(
            wrong == 0 && left_over < 4 + 20 * 3,
            "{column}: {left_over} blocks, {wrong} frees"
        );
    }
}
