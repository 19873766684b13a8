//! Tests with a key that counts its drops. AddressSanitizer and Miri find a use after a drop.

use std::collections::{HashSet, VecDeque};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// A key on the heap. `alive` counts the keys that exist.
struct TestKey {
    name: Box<u64>,
    alive: Arc<AtomicUsize>,
}

impl TestKey {
    fn new(name: u64, alive: &Arc<AtomicUsize>) -> Self {
        alive.fetch_add(1, Ordering::Relaxed);
        Self { name: Box::new(name), alive: alive.clone() }
    }
}

impl Drop for TestKey {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Fixture {
    generations: Generations<TestKey>,
    alive: Arc<AtomicUsize>,
}

impl Fixture {
    fn new() -> Self {
        let alive = Arc::default();
        Self { generations: Generations::new(TestKey::new(0, &alive)), alive }
    }

    fn rekey(&self, name: u64) {
        let added =
            self.generations.replace(|| Ok::<_, Infallible>(TestKey::new(name, &self.alive)));
        assert_eq!(added, Ok(()));
    }

    /// Stores a content; returns the generation, the name of the key, and the store number.
    fn store(&self) -> (u16, u64, u64) {
        let pinned = self.generations.current().unwrap();
        let store = (pinned.generation(), *pinned.name, pinned.take_store_number().unwrap());
        pinned.keep();
        store
    }

    fn alive(&self) -> usize {
        self.alive.load(Ordering::Relaxed)
    }
}

#[test]
fn key_goes_with_its_last_seal_unless_it_is_current() {
    let f = Fixture::new();
    assert_eq!(f.store(), (0, 0, 1));
    assert_eq!(f.store(), (0, 0, 2));
    f.generations.forget(0);
    f.generations.forget(0);
    assert_eq!(f.alive(), 1, "the current key stays without seals");
    assert_eq!(f.store(), (0, 0, 3));
    f.rekey(1);
    assert_eq!(f.store(), (1, 1, 1), "numbers begin again under another key");
    assert_eq!(f.alive(), 2);
    assert_eq!(*f.generations.pin(0).unwrap().name, 0);
    f.generations.forget(0);
    assert_eq!(f.alive(), 1);
    assert!(f.generations.pin(0).is_none());
    assert_eq!(f.generations.totals(), Totals { stores: 4, opens: 0, keys: 1 });
}

#[test]
fn replaced_key_without_seals_goes_at_once() {
    let f = Fixture::new();
    f.rekey(1);
    assert_eq!(f.alive(), 1);
    assert!(f.generations.pin(0).is_none());
    assert!(f.generations.pin(2).is_none(), "a generation that does not exist yet");
    assert!(f.generations.pin(u16::MAX).is_none());
}

#[test]
fn pinned_key_outlives_wrong_counts() {
    let f = Fixture::new();
    f.store();
    let pinned = f.generations.pin(0).unwrap();
    f.rekey(1);
    for _ in 0..3 {
        f.generations.forget(0);
    }
    assert_eq!((*pinned.name, f.alive()), (0, 2));
    drop(pinned);
    assert_eq!(f.alive(), 1);
    f.generations.forget(0);
    f.generations.forget(1);
    f.generations.forget(7000);
    assert_eq!(f.store(), (1, 1, 1));
}

#[test]
fn numbers_end_at_48_bits() {
    let f = Fixture::new();
    let pinned = f.generations.current().unwrap();
    pinned.set_stores(STORES_MAX - 1);
    assert_eq!(pinned.take_store_number(), Some(STORES_MAX));
    for _ in 0..3 {
        assert_eq!(pinned.take_store_number(), None);
    }
    drop(pinned);
    f.rekey(1);
    assert_eq!(f.store(), (1, 1, 1));
}

#[test]
fn generations_end_at_16_bits() {
    let f = Fixture::new();
    // Under Miri the generations in between take too long.
    f.generations.current.store(u16::MAX as u32 - 1, Ordering::Relaxed);
    f.generations.add(u16::MAX - 1, TestKey::new(0, &f.alive));
    f.rekey(1);
    assert_eq!(f.store(), (u16::MAX, 1, 1));
    let mut made = false;
    let full = f.generations.replace(|| {
        made = true;
        Ok::<_, Infallible>(TestKey::new(2, &f.alive))
    });
    assert_eq!((full, made), (Err(NotAdded::Used), false));
    assert_eq!(f.store(), (u16::MAX, 1, 2), "the last generation goes on");
}

#[test]
fn failure_of_a_key_keeps_the_generation() {
    let f = Fixture::new();
    assert_eq!(
        f.generations.replace(|| Err("no randomness")),
        Err(NotAdded::Failed("no randomness"))
    );
    assert_eq!(f.store(), (0, 0, 1));
    let replace = |generation| {
        let key = || Ok::<_, Infallible>(TestKey::new(1, &f.alive));
        f.generations.replace_if_current(generation, key)
    };
    assert_eq!((replace(1), replace(0), replace(0)), (Ok(()), Ok(()), Ok(())));
    assert_eq!(f.store(), (1, 1, 1));
}

#[test]
fn wipe_drops_all_keys() {
    let mut f = Fixture::new();
    f.store();
    f.rekey(1);
    f.store();
    f.generations.wipe();
    assert_eq!(f.alive(), 0);
    assert!(f.generations.current().is_none());
    assert!(f.generations.pin(0).is_none() && f.generations.pin(1).is_none());
    f.generations.forget(0);
    let added = f.generations.replace(|| Ok::<_, Infallible>(TestKey::new(2, &f.alive)));
    assert_eq!(added, Err(NotAdded::Wiped));
    f.generations.wipe();
    assert_eq!(f.generations.totals(), Totals { stores: 2, opens: 0, keys: 0 });
}

#[test]
fn drop_drops_all_keys() {
    let f = Fixture::new();
    f.store();
    f.rekey(1);
    let alive = f.alive.clone();
    drop(f);
    assert_eq!(alive.load(Ordering::Relaxed), 0);
}

/// Threads store and forget while generations are replaced. With `twice`, they also forget seals
/// that are not theirs. Returns the number of distinct numbers, and of stores.
fn race(f: &Fixture, twice: bool) -> (usize, usize) {
    let (threads, stores, rekeys) = if cfg!(miri) { (3, 30, 4) } else { (4, 100_000, 200) };
    let work = || {
        let mut used = HashSet::new();
        let mut held = VecDeque::new();
        for number in 0..stores {
            let (generation, key, store) = f.store();
            assert_eq!(u64::from(generation), key);
            used.insert((key, store));
            held.push_back(generation);
            if number % 3 == 0 {
                continue;
            }
            let oldest = held.pop_front().expect("at least the seal of this store");
            match f.generations.pin(oldest) {
                Some(pinned) => assert_eq!(u64::from(oldest), *pinned.name),
                None => assert!(twice, "a seal names this generation"),
            }
            f.generations.forget(oldest);
            if twice {
                f.generations.forget(generation);
            }
        }
        held.into_iter().for_each(|generation| f.generations.forget(generation));
        used
    };
    let used: Vec<HashSet<_>> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for rekey in 1..=rekeys {
            f.rekey(rekey);
            std::thread::yield_now();
        }
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let all: HashSet<_> = used.iter().flatten().collect();
    (all.len(), threads * stores)
}

#[test]
fn threads_use_no_number_twice_and_release_all_keys() {
    let f = Fixture::new();
    let (distinct, stores) = race(&f, false);
    assert_eq!(distinct, stores, "a number was taken twice");
    assert_eq!((f.alive(), f.generations.totals().keys), (1, 1));
}

#[test]
fn seals_forgotten_twice_drop_no_key_in_use() {
    let f = Fixture::new();
    let (distinct, stores) = race(&f, true);
    assert_eq!(distinct, stores, "a number was taken twice");
    assert_eq!((f.alive(), f.generations.totals().keys), (1, 1));
}
