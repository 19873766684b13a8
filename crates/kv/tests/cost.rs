//! Times of operations on the embedded pool, printed.
//!
//! `cargo test --release -p granary-kv --test cost -- --ignored --nocapture`

use std::time::Instant;

use kv::environment::System;
use kv::pooled::PoolMemory;
use kv::{Operation, SetOptions, Settings, Store};
use pool::{Lane, Pool, Step};
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

/// The least time of an operation in some hundred of them, over all rounds: other programs run on
/// the machine.
fn least(mut operation: impl FnMut(u64)) -> f64 {
    const ROUND: u64 = 200;
    let rounds = (0..KEYS / ROUND).map(|round| {
        let begin = Instant::now();
        (round * ROUND..(round + 1) * ROUND).for_each(&mut operation);
        begin.elapsed().as_nanos() as f64 / ROUND as f64
    });
    rounds.fold(f64::MAX, f64::min)
}

#[test]
#[ignore = "prints times and asserts nothing; make test-full runs it"]
fn cost_of_operations() {
    let store = store();
    let heap = store.blocks().heap().unwrap();
    let pool = store.blocks().pool();
    let mut value = Vec::with_capacity(4096);
    let mut bytes = [0; 1048];

    // Bare verbs, on a block of as many bytes, and on the root's last word but one.
    let block = block_on(heap.allocate(pool::GroupId(0), 1048)).unwrap().place;
    let (grant, offset) = heap.locate(block).unwrap();
    let read = least(|_| {
        let into = &mut bytes;
        block_on(pool.run(Lane(0), &mut [Step::Read { grant: &grant, offset, into }])).unwrap();
    });
    println!("bare READ of 1 KB: {read:.0} ns");
    let mut word = 0;
    pool.write_blocking(&grant, offset, &[0; 8]).unwrap();
    let from = [1; 1048];
    let write = least(|_| {
        let mut old = 0;
        let (expected, new) = (word, word + 1);
        let swap = Step::CompareAndSwap { grant: &grant, offset, expected, new, old: &mut old };
        let write = Step::Write { grant: &grant, offset: offset + 8, from: &from[8..] };
        block_on(pool.run(Lane(0), &mut [write, swap])).unwrap();
        assert_eq!(old, word);
        word += 1;
    });
    println!("bare WRITE of 1 KB and CAS in one list: {write:.0} ns");

    let new = least(|i| {
        drop(block_on(store.set(0, &key(i), &[1; 1000], SetOptions::default())).unwrap());
    });
    println!("set, new key, 1 KB: {new:.0} ns, {:.2} of the bare verbs", new / write);
    let there = least(|i| {
        drop(block_on(store.set(0, &key(i), &[2; 1000], SetOptions::default())).unwrap());
    });
    println!("set, key there, 1 KB: {there:.0} ns, {:.2} of the bare verbs", there / write);
    let get = least(|i| {
        value.clear();
        block_on(store.get_into(0, &key(i), &mut value)).unwrap();
    });
    println!("get, 1 KB: {get:.0} ns, {:.2} of the bare READ", get / read);
    let exists = least(|i| assert!(block_on(store.exists(0, &key(i))).unwrap()));
    println!("exists: {exists:.0} ns");
    println!("splits: {:?}", store.trips(Operation::Split));
}
