//! Walks through a database in short steps, with writers in between.

mod common;

use std::collections::BTreeMap;

use common::{World, block_on, cases};
use kv::SetOptions;

fn name(i: u32) -> Vec<u8> {
    format!("key-{i}").into_bytes()
}

/// Short values, and each hundredth value in pieces.
fn value(i: u32) -> Vec<u8> {
    vec![i as u8; if i.is_multiple_of(100) { 20_000 } else { 100 }]
}

/// A save keeps writers out for one step. Splits between the steps lose no key.
#[test]
fn steps_are_short_and_visit_each_key_once() {
    for (column, settings) in cases(21) {
        let world = World::new(4096, 1 << 20, false, 1);
        let store = world.create(settings);
        for i in 0..2000 {
            block_on(store.set(0, &name(i), &value(i), SetOptions::default())).expect("a write");
        }
        let mut visited = BTreeMap::<Vec<u8>, u32>::new();
        let (mut next, mut steps) = (Some(0), 0);
        while let Some(from) = next {
            let (mut keys, mut long) = (0, 0);
            let each = |own: kv::Visited<'_>| {
                assert_eq!(own.position, store.position(own.key), "{column}");
                assert!(own.position >= from, "{column}");
                keys += 1;
                long += u32::from(own.value.len() == 20_000);
                *visited.entry(own.key.to_vec()).or_default() += 1;
            };
            block_on(store.walk(0, from, each, |end| next = end)).expect("a step");
            assert!(next.is_none_or(|next| next > from), "{column}");
            assert!(keys <= 64 && long <= 1, "{column}: {keys} keys, {long} of them long");
            // New keys split subtables.
            for i in 0..40 {
                let key = [b'n', steps as u8, i];
                block_on(store.set(0, &key, b"new", SetOptions::default())).expect("a write");
            }
            steps += 1;
        }
        let known = |i: u32| visited.get(&name(i)) == Some(&1);
        assert!((0..2000).all(known), "{column}: a key was not visited once");
        assert!(visited.values().all(|times| *times == 1), "{column}");
        assert!(steps >= 2000 / 64, "{column}: {steps} steps");
    }
}
