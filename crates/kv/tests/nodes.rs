//! Stores over several memory nodes, of which one is lost.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::{BEGIN, COLUMNS, TestStore, block_on, settings};
use kv::memory::{Arena, Client, Hand, Memory};
use kv::reach::Stopped;
use kv::{Error, Expiry, SetOptions, Settings, Store, Wanted};

const CHUNK: u32 = 4096;
const NODES: u8 = 3;
/// The memory node that is lost. Node 0 has the root.
const LOST: u8 = 1;

struct Nodes {
    memory: Arc<Memory>,
    client: Arc<Client>,
    arena: Arena,
}

impl Nodes {
    fn new(chunks: u64) -> Self {
        let memory = Memory::new(CHUNK);
        let client = Arc::new(Client::new(memory.clone(), false));
        let arena = Arena::over(memory.clone(), NODES, 0, chunks);
        Self { memory, client, arena }
    }

    fn create(&self, settings: Settings) -> TestStore {
        let (client, arena) = (self.client.clone(), self.arena.clone());
        block_on(Store::create(client, arena, Hand::new(BEGIN, 1), settings)).expect("a store")
    }
}

fn name(i: u32) -> Vec<u8> {
    format!("key-{i}").into_bytes()
}

fn value(i: u32, version: u32) -> Vec<u8> {
    // Some values are in pieces.
    let bytes = if i.is_multiple_of(37) { 20_000 } else { 10 + i as usize % 300 };
    (0..bytes).map(|byte| (byte as u32 * 7 + i + version) as u8).collect()
}

/// Four stripes, so that each memory node has one at least.
fn striped(form: kv::Form, mirror: bool) -> Settings {
    Settings { stripe_bits: 2, ..settings(form, mirror, 2) }
}

fn set(store: &TestStore, i: u32, version: u32) {
    let written = store.set(0, &name(i), &value(i, version), SetOptions::default());
    block_on(written).expect("a write");
}

#[test]
fn loss_of_a_memory_node_takes_its_keys_and_nothing_else() {
    for (what, form, mirror) in COLUMNS {
        let nodes = Nodes::new(1 << 20);
        let store = nodes.create(striped(form, mirror));
        (0..600).for_each(|i| set(&store, i, 0));
        nodes.memory.lose(LOST);
        let mut lost = 0;
        for i in 0..600 {
            match block_on(store.get(0, &name(i))).expect("a read") {
                Some(found) => assert_eq!(found, value(i, 0), "{what}: key {i}"),
                None => lost += 1,
            }
        }
        assert!((50..400).contains(&lost), "{what}: {lost} keys");
        assert_eq!(store.stats().lost, lost, "{what}");
        assert_eq!(store.len(0), 600 - lost, "{what}");

        // All stripes go on, and find all keys again in the memory that is left.
        (0..600).for_each(|i| set(&store, i, 1));
        let names: Vec<_> = (0..20).map(name).collect();
        let wanted: Vec<_> = names.iter().map(|key| Wanted { db: 0, key, is_read: true }).collect();
        let change = |call: &mut kv::Transaction| {
            (0..20).for_each(|i| call.put(i, value(i as u32, 2), Expiry::Never));
        };
        block_on(store.atomically(&wanted, change)).expect("a change");
        for i in 0..600 {
            let expected = value(i, if i < 20 { 2 } else { 1 });
            let found = block_on(store.get(0, &name(i))).expect("a read");
            assert_eq!(found, Some(expected), "{what}: key {i}");
        }
        for i in 100..600 {
            assert!(block_on(store.delete(0, &name(i))).expect("a deletion"), "{what}: key {i}");
        }
        block_on(store.merge(0)).expect("merges");
        assert_eq!((store.len(0), store.stats().lost), (100, lost), "{what}");
        assert_eq!(nodes.arena.wrong_frees(), 0, "{what}");

        // The successor finds the store without the memory node.
        let root = store.root();
        drop(store);
        let arena = Arena::over(nodes.memory.clone(), NODES, 0, 1 << 20);
        let (client, hand) = (nodes.client.clone(), Hand::new(BEGIN, 2));
        let opened = Store::open(client, arena, hand, striped(form, mirror), root);
        let store = block_on(opened).expect("a store");
        for i in 0..100 {
            let expected = value(i, if i < 20 { 2 } else { 1 });
            let found = block_on(store.get(0, &name(i))).expect("a read");
            assert_eq!(found, Some(expected), "{what}: key {i} of the successor");
        }
        assert_eq!(store.len(0), 100, "{what}");
    }
}

#[test]
fn loss_at_any_verb_leaves_each_key_whole_or_lost() {
    for (what, form, mirror) in COLUMNS {
        for verbs in (0..900).step_by(7) {
            let nodes = Nodes::new(1 << 20);
            let store = nodes.create(striped(form, mirror));
            (0..40).for_each(|i| set(&store, i, 0));
            nodes.client.lose_after(LOST, verbs);
            let mut model: BTreeMap<u32, u32> = (0..40).map(|i| (i, 0)).collect();
            for i in 0..60 {
                set(&store, i, 1);
                model.insert(i, 1);
                if i % 5 == 4 {
                    let names: Vec<_> = (i - 4..i).map(name).collect();
                    let wanted: Vec<_> =
                        names.iter().map(|key| Wanted { db: 0, key, is_read: false }).collect();
                    let change = |call: &mut kv::Transaction| {
                        let put = |n| call.put(n, value(i - 4 + n as u32, 2), Expiry::Never);
                        (0..4).for_each(put);
                    };
                    block_on(store.atomically(&wanted, change)).expect("a change");
                    model.extend((i - 4..i).map(|i| (i, 2)));
                }
                if i % 7 == 6 {
                    block_on(store.delete(0, &name(i - 3))).expect("a deletion");
                    model.remove(&(i - 3));
                }
            }
            block_on(store.drop_lost()).expect("the loss");
            let mut there = 0;
            for i in 0..60 {
                let found = block_on(store.get(0, &name(i))).expect("a read");
                if let Some(found) = found {
                    let version = model.get(&i).unwrap_or_else(|| panic!("{what} {verbs}: {i}"));
                    assert_eq!(found, value(i, *version), "{what}, verb {verbs}: key {i}");
                    there += 1;
                }
            }
            assert_eq!(store.len(0), there, "{what}, verb {verbs}");
            assert_eq!(nodes.arena.wrong_frees(), 0, "{what}, verb {verbs}");
        }
    }
}

#[test]
fn loss_of_the_first_memory_node_ends_the_store() {
    let nodes = Nodes::new(1 << 20);
    let store = nodes.create(striped(kv::Form::Fused, true));
    (0..50).for_each(|i| set(&store, i, 0));
    nodes.memory.lose(0);
    let results = (0..50).map(|i| block_on(store.get(0, &name(i))));
    let lost = results
        .filter(|result| matches!(result, Err(Error::Stopped(Stopped::Gone { node: 0, .. }))));
    assert!(lost.count() > 5);
}

#[test]
fn stripe_of_a_full_memory_node_continues_on_the_next() {
    let nodes = Nodes::new(40);
    let store = nodes.create(striped(kv::Form::Fused, true));
    let mut written = 0;
    for i in 0..1000_u32 {
        let key = name(i);
        match block_on(store.set(0, &key, &[i as u8; 1000], SetOptions::default())) {
            Ok(_) => written += 1,
            Err(error) => {
                assert!(matches!(error, Error::NoBlock(kv::blocks::NoBlock::Full)), "{error}");
                break;
            }
        }
    }
    // A memory node has 40 chunks, and a chunk has room for three blocks.
    assert!(written > 240, "{written} keys");
    for i in 0..written {
        let found = block_on(store.get(0, &name(i))).expect("a read");
        assert_eq!(found, Some(vec![i as u8; 1000]));
    }
}

#[test]
fn stripe_of_a_full_memory_node_loses_what_lies_elsewhere() {
    for mirror in [true, false] {
        let nodes = Nodes::new(40);
        let store =
            nodes.create(Settings { stripe_bits: 0, ..settings(kv::Form::Fused, mirror, 2) });
        // One stripe, on memory node 0, until that is full.
        let written = 200;
        (0..written).for_each(|i| {
            let value = [i as u8; 1000];
            block_on(store.set(0, &name(i), &value, SetOptions::default())).expect("a write");
        });
        nodes.memory.lose(LOST);
        block_on(store.drop_lost()).expect("the loss");
        let lost = store.stats().lost;
        assert!(lost > 40, "{lost}");
        let found = (0..written).filter(|i| {
            let value = block_on(store.get(0, &name(*i))).expect("a read");
            assert!(value.is_none() || value == Some(vec![*i as u8; 1000]));
            value.is_some()
        });
        assert_eq!(found.count() as u64, u64::from(written) - lost);
        assert_eq!(store.len(0), u64::from(written) - lost);
    }
}
