//! Times of operations on the embedded pool, printed.
//!
//! `cargo test --release -p granary-kv --test cost -- --ignored --nocapture`

use std::time::Instant;

use kv::environment::System;
use kv::pooled::PoolMemory;
use kv::{Operation, SetOptions, Settings, Store};
use pool::Pool;
use verbs::executor::block_on;

const KEYS: u64 = 20_000;

fn store() -> Store<PoolMemory, PoolMemory, System> {
    let settings = pool::Settings {
        donate_bytes: 128 << 20,
        chunk_bytes: 64 << 10,
        ..pool::Settings::default()
    };
    let pool = Pool::embedded(settings).unwrap();
    let memory = PoolMemory::new(pool, 0, heap::Settings::default()).unwrap();
    Store::create_blocking(memory.clone(), memory, System, Settings::default()).unwrap()
}

fn key(i: u64) -> [u8; 16] {
    let mut key = [b'k'; 16];
    key[8..].copy_from_slice(&i.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
    key
}

#[test]
#[ignore = "prints times and asserts nothing; make test-full runs it"]
fn cost_of_operations() {
    let store = store();
    let mut value = Vec::with_capacity(4096);
    let measure = |what: &str, operation: &mut dyn FnMut(u64)| {
        let begin = Instant::now();
        (0..KEYS).for_each(operation);
        println!("{what}: {:.0} ns", begin.elapsed().as_nanos() as f64 / KEYS as f64);
    };
    measure("set, new key, 1 KB", &mut |i| {
        drop(block_on(store.set(0, &key(i), &[1; 1000], SetOptions::default())).unwrap());
    });
    measure("set, key there, 1 KB", &mut |i| {
        drop(block_on(store.set(0, &key(i), &[2; 1000], SetOptions::default())).unwrap());
    });
    measure("get, 1 KB", &mut |i| {
        value.clear();
        block_on(store.get_into(0, &key(i), &mut value)).unwrap();
    });
    store.resize_cache(64 << 20);
    for what in ["get, 1 KB, to be cached", "get, 1 KB, cached"] {
        measure(what, &mut |i| {
            value.clear();
            block_on(store.get_into(0, &key(i), &mut value)).unwrap();
        });
    }
    assert_eq!(store.stats().cache.hits, KEYS);
    store.resize_cache(0);
    measure("exists", &mut |i| assert!(block_on(store.exists(0, &key(i))).unwrap()));
    measure("a READ of 1 KB of the pool", &mut |_| {
        let (heap, pool) = (store.blocks().heap().unwrap(), store.blocks().pool());
        let place = heap::Place::from_raw(store.root().bits()).unwrap();
        let (grant, offset) = heap.locate(place).unwrap();
        let mut bytes = [0; 1000];
        pool.read_blocking(&grant.grant, offset, &mut bytes).unwrap();
    });
    println!("splits: {:?}", store.trips(Operation::Split));
}
