//! Stores over an embedded pool, for every scheme with access at any offset.

use std::sync::Arc;

use kv::environment::System;
use kv::pooled::PoolMemory;
use kv::{Expiry, Form, SetOptions, Settings, Store, Wanted};
use pool::scheme::info::AccessKind;
use pool::{Grant, GroupId, Pool, Scheme, schemes};
use verbs::executor::block_on;

const CHUNK: u64 = 4096;
const CHUNKS: u64 = 512;
const GROUPS: u16 = 2;

type PoolStore = Store<PoolMemory, PoolMemory, System>;

fn pool(scheme: Scheme) -> Pool {
    let settings = pool::Settings {
        donate_bytes: CHUNKS * CHUNK,
        chunk_bytes: CHUNK,
        scheme,
        clients_max: 4,
        ..pool::Settings::default()
    };
    let node = pool::EmbeddedNode::start(&settings).unwrap();
    let options = pool::Options { groups: Some(GROUPS), ..pool::Options::default() };
    Pool::embedded_in(&node.into(), options).unwrap()
}

fn one_sided() -> impl Iterator<Item = Scheme> {
    schemes::ALL.iter().copied().filter(|scheme| scheme.access == AccessKind::OneSided)
}

fn name(i: u32) -> Vec<u8> {
    format!("key-{i}").into_bytes()
}

fn value(i: u32) -> Vec<u8> {
    // Some values are in pieces, one of them in more than one list.
    let bytes = if i == 7 { 300_000 } else { i as usize * i as usize % 9000 };
    (0..bytes).map(|byte| (byte as u32 * 17 + i) as u8).collect()
}

fn check(store: &PoolStore, keys: std::ops::Range<u32>) {
    for i in keys {
        assert_eq!(store.get_blocking(0, &name(i)).unwrap(), Some(value(i)), "key {i}");
    }
}

/// All chunks of the heap that have blocks.
fn chunks(memory: &PoolMemory) -> Vec<Grant> {
    let heap: &heap::Heap<kv::pooled::Nodes> = memory.heap().unwrap();
    let groups = (0..GROUPS).map(GroupId);
    let used = groups.flat_map(|group| heap.sparse(group, 1.0, usize::MAX).unwrap());
    used.map(|chunk| heap.locate(chunk.place).unwrap().0.grant).collect()
}

#[test]
fn store_over_each_scheme_reads_what_was_written() {
    for scheme in one_sided() {
        let pool = pool(scheme);
        let memory = PoolMemory::new(pool.clone(), 0, heap::Settings::NO_RESERVE).unwrap();
        let settings = Settings { stripe_bits: 1, ..Settings::default() };
        let store =
            Store::create_blocking(memory.clone(), memory.clone(), System, settings.clone());
        let store = store.unwrap();
        for i in 0..60 {
            store.set_blocking(0, &name(i), &value(i), SetOptions::default()).unwrap();
        }
        check(&store, 0..60);
        // Keys of both stripes, so that the slots are not of one QP.
        let names: Vec<_> = (0..8).map(name).collect();
        let wanted: Vec<_> =
            names.iter().map(|key| Wanted { db: 0, key, is_read: false }).collect();
        let swap = |call: &mut kv::Transaction| {
            (0..8).for_each(|i| call.put(i, value(i as u32), Expiry::Never));
        };
        store.atomically_blocking(&wanted, swap).unwrap();
        for i in 20..60 {
            assert!(store.delete_blocking(0, &name(i)).unwrap());
        }
        store.compact_blocking(80).unwrap();
        check(&store, 0..20);
        let root = store.root();
        drop(store);

        // The successor inherits the chunks, and finds the store from its root.
        let inherited = chunks(&memory);
        drop(memory);
        let memory = PoolMemory::inheriting(pool.clone(), 0, heap::Settings::NO_RESERVE, inherited);
        let memory = memory.unwrap();
        let store =
            Store::open_blocking(memory.clone(), memory.clone(), System, settings, root).unwrap();
        check(&store, 0..20);
        assert_eq!((store.len(0), store.generation()), (20, 2));
        memory.heap().unwrap().audit().unwrap();
        store.flush_blocking(0).unwrap();
        for _ in 0..4 {
            block_on(kv::blocks::Blocks::tend(&memory)).unwrap();
        }
        // Root, journal, and the words and reserved records of two stripes.
        assert_eq!(memory.heap().unwrap().stats().held_chunks, 5, "{scheme}");
    }
}

#[test]
fn threads_share_a_store() {
    let cases = [
        (Form::Fused, true, 32 << 10),
        (Form::Fused, true, 0),
        (Form::Fused, false, 0),
        (Form::Published, false, 0),
    ];
    for (form, mirror, cache_bytes) in cases {
        let pool = pool(schemes::ALL[0]);
        let memory = PoolMemory::new(pool, 0, heap::Settings::default()).unwrap();
        let groups = Some(1);
        let settings = Settings { form, mirror, groups, cache_bytes, ..Settings::default() };
        let settings = Settings { stripe_bits: 1, ..settings };
        let store = Store::create_blocking(memory.clone(), memory, System, settings).unwrap();
        let store = Arc::new(store);
        let threads: Vec<_> = (0..4_u32)
            .map(|thread| {
                let store = store.clone();
                std::thread::spawn(move || {
                    let mut last = 0;
                    for i in 0..150 {
                        let key = name(thread * 1000 + i);
                        let value = [thread as u8; 50];
                        store.set_blocking(0, &key, &value, SetOptions::default()).unwrap();
                        let add = |value: Option<&[u8]>, _| {
                            let count = value.map_or(0, |value| value[0]) + 1;
                            kv::Update::Put(vec![count].into(), Expiry::Never)
                        };
                        if i < 50 {
                            store.update_blocking(0, b"shared", add).unwrap();
                        }
                        // Changes of one key are read in their order.
                        let count = store.get_blocking(0, b"shared").unwrap().unwrap()[0];
                        assert!(count >= last, "{count} behind {last}");
                        last = count;
                        assert_eq!(
                            store.get_blocking(0, &key).unwrap().as_deref(),
                            Some(&value[..])
                        );
                        if i == 75 && thread == 0 && cache_bytes > 0 {
                            store.resize_cache(0);
                            store.resize_cache(cache_bytes);
                        }
                        if i % 3 == 0 {
                            assert!(store.delete_blocking(0, &key).unwrap());
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(store.get_blocking(0, b"shared").unwrap(), Some(vec![200]));
        assert_eq!(store.len(0), 401);
        for thread in 0..4 {
            for i in 0..150 {
                let found = store.get_blocking(0, &name(thread * 1000 + i)).unwrap();
                assert_eq!(found.is_some(), i % 3 != 0);
            }
        }
    }
}
