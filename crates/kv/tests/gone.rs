//! Values on several memory nodes, one of which ends.

mod common;

use std::collections::HashMap;
use std::sync::Arc;

use common::{BEGIN, COLUMNS, block_on, settings};
use kv::blocks::{Blocks, NoBlock, Usage};
use kv::memory::{Arena, Client, Hand, Memory};
use kv::place::Place;
use kv::{Candidates, Cursor, Eviction, Expiry, SetOptions, Store, Wanted};

const CHUNK: u32 = 4096;
const NODES: u8 = 3;

/// An arena on each memory node.
#[derive(Clone)]
struct Spread {
    memory: Arc<Memory>,
    arenas: Vec<Arena>,
}

impl Spread {
    fn arena(&self, place: Place) -> &Arena {
        &self.arenas[usize::from(place.node())]
    }
}

impl Blocks for Spread {
    type Pin = Vec<<Arena as Blocks>::Pin>;

    fn slab(&self) -> u32 {
        CHUNK
    }

    async fn allocate(&self, stripe: u32, bytes: u32) -> Result<Place, NoBlock> {
        self.arenas[0].allocate(stripe, bytes).await
    }

    async fn allocate_value(&self, stripe: u32, spread: u64, bytes: u32) -> Result<Place, NoBlock> {
        let nodes = (0..NODES).map(|step| ((spread + u64::from(step)) % u64::from(NODES)) as u8);
        for node in nodes.filter(|node| !self.memory.is_lost(*node)) {
            if let Ok(place) = self.arenas[usize::from(node)].allocate(stripe, bytes).await {
                return Ok(place);
            }
        }
        Err(NoBlock::Full)
    }

    fn is_gone(&self, place: Place) -> bool {
        self.memory.is_lost(place.node())
    }

    fn gone_nodes(&self) -> u32 {
        (0..NODES).filter(|node| self.memory.is_lost(*node)).count() as u32
    }

    fn release(&self, place: Place) {
        self.arena(place).release(place);
    }

    fn retire(&self, place: Place) {
        self.arena(place).retire(place);
    }

    fn pin(&self) -> Self::Pin {
        self.arenas.iter().map(Blocks::pin).collect()
    }

    fn adopt(&self, _: &[(Place, u32, u32)]) -> Result<(), NoBlock> {
        Ok(())
    }

    async fn tend(&self) -> Result<(), NoBlock> {
        Ok(())
    }

    fn evacuate(&self, share: u32) -> usize {
        self.arenas
            .iter()
            .filter(|arena| !self.is_gone_arena(arena))
            .map(|a| a.evacuate(share))
            .sum()
    }

    fn is_leaving(&self, place: Place) -> bool {
        self.arena(place).is_leaving(place)
    }

    fn settle(&self) {
        self.arenas.iter().for_each(Blocks::settle);
    }

    fn usage(&self) -> Usage {
        let add = |sum: Usage, arena: &Arena| {
            let usage = arena.usage();
            Usage {
                live: sum.live + usage.live,
                limbo: sum.limbo + usage.limbo,
                held: sum.held + usage.held,
                chunks: sum.chunks + usage.chunks,
            }
        };
        self.arenas.iter().fold(Usage::default(), add)
    }
}

impl Spread {
    fn is_gone_arena(&self, arena: &Arena) -> bool {
        arena.used().first().is_some_and(|place| self.is_gone(*place))
    }
}

type SpreadStore = Store<Arc<Client>, Spread, Arc<Hand>>;

fn name(i: u32) -> Vec<u8> {
    format!("key-{i}").into_bytes()
}

fn value(i: u32, version: u32) -> Vec<u8> {
    // Some values are in pieces.
    let bytes = if i.is_multiple_of(10) { 9000 + i } else { 40 + i };
    (0..bytes).map(|byte| (byte + 7 * i + version) as u8).collect()
}

fn world() -> (Arc<Memory>, Spread) {
    let memory = Memory::new(CHUNK);
    let arena = |node| Arena::on(memory.clone(), node, 0, 1 << 20);
    let arenas = (0..NODES).map(arena).collect();
    (memory.clone(), Spread { memory, arenas })
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
    for (column, form, mirror) in COLUMNS {
        let (memory, spread) = world();
        let (store, _) = filled(&memory, &spread, settings(form, mirror, 2));
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

/// Each kind of operation meets keys whose values are gone, before they are forgotten.
#[test]
fn operations_do_without_a_memory_node_that_is_gone() {
    for (column, form, mirror) in COLUMNS {
        let (memory, spread) = world();
        let (store, hand) = filled(&memory, &spread, settings(form, mirror, 2));
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
