//! Round trips that break off: the store finds out what has taken effect, and goes on.

mod common;

use std::collections::BTreeMap;

use common::{BEGIN, COLUMNS, TestStore, World, block_on, settings};
use kv::reach::Stopped;
use kv::{Error, Expiry, SetOptions, Store, Wanted};

const KEYS: u32 = 60;

fn name(i: u32) -> Vec<u8> {
    format!("key-{i}").into_bytes()
}

fn value(i: u32, version: u32) -> Vec<u8> {
    let bytes = if i.is_multiple_of(17) { 9000 } else { 10 + i as usize };
    (0..bytes).map(|byte| (byte as u32 * 7 + i + version) as u8).collect()
}

/// A store beside its model.
struct Check {
    store: TestStore,
    model: BTreeMap<u32, u32>,
    errors: u32,
}

impl Check {
    /// Notes the result of a change of keys to new versions (`None`: deleted). A change that fails
    /// has changed all of them or none.
    fn changed<T>(&mut self, result: Result<T, Error>, to: &[(u32, Option<u32>)], what: &str) {
        let is_changed = match result {
            Ok(_) => true,
            Err(Error::Stopped(Stopped::Lost(_))) => {
                self.errors += 1;
                let (key, version) = to[0];
                let found = block_on(self.store.get(0, &name(key))).expect("a read");
                found == version.map(|version| value(key, version))
            }
            Err(error) => panic!("{what}: {error}"),
        };
        for (key, version) in to.iter().filter(|_| is_changed) {
            match version {
                Some(version) => self.model.insert(*key, *version),
                None => self.model.remove(key),
            };
        }
    }

    fn run(&mut self, what: &str) {
        for i in 0..KEYS {
            let bytes = value(i, 1);
            let written = block_on(self.store.set(0, &name(i), &bytes, SetOptions::default()));
            self.changed(written, &[(i, Some(1))], what);
            if i % 6 == 5 {
                let names: Vec<_> = (i - 4..i).map(name).collect();
                let wanted: Vec<_> =
                    names.iter().map(|key| Wanted { db: 0, key, is_read: false }).collect();
                let change = |call: &mut kv::Transaction| {
                    (0..4).for_each(|n| call.put(n, value(i - 4 + n as u32, 2), Expiry::Never));
                };
                let changed = block_on(self.store.atomically(&wanted, change));
                let to: Vec<_> = (i - 4..i).map(|i| (i, Some(2))).collect();
                self.changed(changed, &to, what);
            }
            if i % 7 == 6 {
                let deleted = block_on(self.store.delete(0, &name(i - 3)));
                self.changed(deleted, &[(i - 3, None)], what);
                let expiring = block_on(self.store.expire(0, &name(i - 1), BEGIN + 9, |_| true));
                let version = self.model.get(&(i - 1)).copied();
                self.changed(expiring, &[(i - 1, version)], what);
            }
        }
    }

    fn compare(&self, store: &TestStore, what: &str) {
        for i in 0..KEYS {
            let expected = self.model.get(&i).map(|version| value(i, *version));
            let found = block_on(store.get(0, &name(i))).expect("a read");
            assert_eq!(found, expected, "{what}: key {i}");
        }
        assert_eq!(store.len(0), self.model.len() as u64, "{what}");
    }
}

#[test]
fn store_goes_on_after_a_round_trip_that_broke_off_at_any_verb() {
    for (column, form, mirror) in COLUMNS {
        for (verbs, has_effect) in (0..700).flat_map(|verbs| [(verbs, false), (verbs, true)]) {
            if verbs % 5 != 0 && !mirror {
                continue;
            }
            let what = format!("{column}, verb {verbs}, effect {has_effect}");
            let world = World::new(4096, 1 << 20, false, 1);
            let store = world.create(settings(form, mirror, 1));
            let mut check = Check { store, model: BTreeMap::new(), errors: 0 };
            world.client.break_after(verbs, has_effect);
            check.run(&what);
            assert!(check.errors <= 1, "{what}: {} errors", check.errors);
            check.compare(&check.store, &what);
            assert_eq!(world.arena.wrong_frees(), 0, "{what}");

            // Remote memory is as the mirror says.
            let (client, hand) = (world.client.clone(), world.hand.clone());
            let arena = kv::memory::Arena::new(world.memory.clone(), 0, 1 << 20);
            let settings = settings(form, mirror, 1);
            let opened = Store::open(client, arena, hand, settings, check.store.root());
            check.compare(&block_on(opened).expect("a store"), &what);
        }
    }
}
