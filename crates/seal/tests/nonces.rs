//! No key is used twice with the same nonce.
//!
//! The ciphertext of zeros is the key stream, which follows from key and nonce alone. So two stores
//! with the same key and nonce would have the same ciphertext.

use std::collections::HashSet;
use std::sync::Barrier;

use seal::{Cipher, Sealer};

type KeyStream = [u8; 32];

fn key_stream(sealer: &Sealer, place: u64) -> (u64, KeyStream) {
    let mut sealed = [0; 32];
    let seal = sealer.seal(place, &[0; 32], &mut sealed).unwrap();
    (seal.counter, sealed)
}

#[test]
fn stores_of_threads_and_generations_have_distinct_key_streams() {
    const THREADS: usize = 4;
    const STORES: usize = 100_000;
    const REKEYS: usize = 50;
    for cipher in Cipher::ALL {
        let sealer = Sealer::new(cipher).unwrap();
        let start = Barrier::new(THREADS + 1);
        let stores: Vec<_> = std::thread::scope(|scope| {
            let stores = || {
                start.wait();
                // The place is no part of the nonce: equal places in all threads.
                (0..STORES).map(|at| key_stream(&sealer, at as u64 % 3)).collect::<Vec<_>>()
            };
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(stores)).collect();
            start.wait();
            for _ in 0..REKEYS {
                sealer.rekey().unwrap();
                std::thread::yield_now();
            }
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        let counters: HashSet<_> = stores.iter().map(|(counter, _)| counter).collect();
        let streams: HashSet<_> = stores.iter().map(|(_, stream)| stream).collect();
        assert_eq!(stores.len(), THREADS * STORES);
        assert_eq!((counters.len(), streams.len()), (stores.len(), stores.len()), "{cipher}");
        assert_eq!(sealer.statistics().seals as usize, stores.len());
    }
}

#[test]
fn generations_and_sealers_have_distinct_keys() {
    let mut streams = HashSet::new();
    let mut stores = 0;
    for _ in 0..20 {
        let sealer = Sealer::new(Cipher::default()).unwrap();
        for _ in 0..20 {
            streams.insert(key_stream(&sealer, 0).1);
            stores += 1;
            sealer.rekey().unwrap();
        }
    }
    assert_eq!(streams.len(), stores);
}
