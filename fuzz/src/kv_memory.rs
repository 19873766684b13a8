//! A store whose remote memory has arbitrary bytes.

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, Waker};

use kv::layout::{block, root};
use kv::memory::{Arena, Client, Hand, Memory};
use kv::place::{Address, Place};
use kv::{Cursor, Expiry, Form, SetOptions, Settings, Store, Wanted};

use crate::input::Input;

const CHUNK: u32 = 4096;
const CHUNKS: u64 = 64;
const KEYS: u8 = 40;
/// Polls after which a call counts as one that does not end.
const POLLS: usize = 1000;

type TestStore = Store<Arc<Client>, Arena, Arc<Hand>>;

/// The memory of a store with some keys, one of them in pieces, after some splits.
static IMAGE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let memory = Memory::new(CHUNK);
    let (client, arena) = node(&memory);
    let store = Store::create(client, arena, Hand::new(1000, 1), settings(0));
    let store = block_on(store).expect("the memory is large enough");
    for key in 0..KEYS {
        let value = vec![key; if key == 9 { 10_000 } else { usize::from(key) }];
        let expiry = if key % 4 == 0 { Expiry::At(5000) } else { Expiry::Never };
        let options = SetOptions { expiry, ..SetOptions::default() };
        block_on(store.set(0, &[key], &value, options)).expect("the memory is large enough");
    }
    let mut bytes = vec![0; CHUNKS as usize * CHUNK as usize];
    memory.read(Address { node: 0, offset: 0 }, &mut bytes);
    bytes
});

fn node(memory: &Arc<Memory>) -> (Arc<Client>, Arena) {
    (Arc::new(Client::new(memory.clone(), false)), Arena::new(memory.clone(), 0, CHUNKS))
}

fn settings(choice: u8) -> Settings {
    let form = if choice & 1 == 0 { Form::Fused } else { Form::Published };
    Settings { form, mirror: choice & 2 == 0, groups: Some(1), ..Settings::default() }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let mut cx = Context::from_waker(Waker::noop());
    for _ in 0..POLLS {
        if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
            return output;
        }
    }
    panic!("a call waits, although nothing else runs");
}

/// Changes memory as the input says.
fn corrupt(memory: &Memory, input: &mut Input<'_>) {
    let at = Address { node: 0, offset: u64::from(input.short()) * 4 % (64 * 4096) };
    let word = Address { node: 0, offset: at.offset / 8 * 8 };
    match input.byte() % 6 {
        0 => memory.write(at, input.take(8)),
        1 => {
            let mut bytes = [0; 8];
            memory.read(word, &mut bytes);
            bytes[usize::from(input.byte() % 8)] ^= 1 << (input.byte() % 8);
            memory.write(word, &bytes);
        }
        2 => {
            let from = Address { node: 0, offset: u64::from(input.short()) / 8 * 32 };
            let mut bytes = vec![0; usize::from(input.byte())];
            memory.read(from, &mut bytes);
            memory.write(word, &bytes);
        }
        3 => {
            let mut bytes = [0; root::ROOT_BYTES];
            let start = Place::default().at(0);
            memory.read(start, &mut bytes);
            bytes[usize::from(input.short()) % 384] ^= input.byte();
            root::reseal(&mut bytes);
            memory.write(start, &bytes);
        }
        _ => {
            // A block whose checksum is right although its content is not.
            let place = Place::of(u64::from(input.short()) % (64 * 128));
            let mut bytes = vec![0; 32 + usize::from(input.byte())];
            memory.read(place.at(0), &mut bytes);
            bytes[4 + usize::from(input.byte() % 28)] ^= input.byte();
            block::reseal(place, &mut bytes);
            memory.write(place.at(0), &bytes);
        }
    }
}

/// Opens a store whose memory was changed, and uses it while its memory changes further.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let memory = Memory::new(CHUNK);
    memory.write(Address { node: 0, offset: 0 }, &IMAGE);
    let settings = settings(input.byte());
    let later = input.byte() & 1 != 0;
    if !later {
        (0..input.byte()).for_each(|_| corrupt(&memory, &mut input));
    }
    let (client, arena) = node(&memory);
    let opened = Store::open(client, arena, Hand::new(1000, 2), settings, Place::default());
    let Ok(store) = block_on(opened) else { return };
    while !input.is_empty() {
        if later {
            corrupt(&memory, &mut input);
        }
        step(&store, &mut input);
    }
}

/// Any result is right: the store cannot know what the memory had before.
fn step(store: &TestStore, input: &mut Input<'_>) {
    let key = [input.byte() % KEYS];
    let mut cursor = Cursor(u64::from(input.short()) << (8 * (input.byte() % 6)));
    match input.byte() % 11 {
        0 => drop(block_on(store.get(0, &key))),
        1 => drop(block_on(store.set(0, &key, &[1; 100], SetOptions::default()))),
        2 => drop(block_on(store.delete(0, &key))),
        3 => drop(block_on(store.get_many(0, &[&key, b"x", &[key[0] ^ 1]]))),
        4 => drop(block_on(store.expire(0, &key, 9000, |_| true))),
        5 => drop(block_on(store.sweep(3))),
        6 => drop(block_on(store.compact(70))),
        7 => drop(block_on(store.merge(0))),
        8 => drop(block_on(store.evict(kv::Candidates::All, kv::Eviction::LeastUsed))),
        9 => {
            let keys = [&key[..], &[key[0] ^ 3], b"new"];
            let keys = keys.map(|key| Wanted { db: 0, key, is_read: true });
            let put = |call: &mut kv::Transaction| {
                (0..3).for_each(|key| call.put(key, vec![2; 60], Expiry::Never));
            };
            drop(block_on(store.atomically(&keys, put)));
        }
        _ => {
            for _ in 0..20 {
                let Ok(scanned) = block_on(store.scan(0, cursor, 10)) else { break };
                cursor = scanned.next;
            }
        }
    }
}
