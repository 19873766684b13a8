//! An index in objects of a scheme with leases.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use kv::blocks::{Length, SharedBlocks};
use kv::leased::{End, LeasedMemory, LeasedSettings, LeasedStore, Together};
use kv::memory::{Hand, Seeded};
use kv::place::{Address, Place};
use kv::reach::{Range, Reach, Step, Stopped};
use kv::{Error, Form, Operation, SetOptions, SharedSettings, SharedStore, SplitLock};
use pool::{DefaultNic, DomainToken, EmbeddedNode, GroupId, Object, Options, Pool, Scheme};
use verbs::executor::block_on;

type Memory = LeasedMemory<DefaultNic>;
type Store = LeasedStore<DefaultNic, Arc<Hand>>;

struct World {
    node: Arc<EmbeddedNode>,
    hand: Arc<Hand>,
}

fn schemes() -> impl Iterator<Item = Scheme> {
    pool::schemes::ALL.iter().copied().filter(|scheme| scheme.leases)
}

fn patronus() -> Scheme {
    pool::schemes::find("patronus").expect("a scheme")
}

impl World {
    fn new(scheme: Scheme, donate_bytes: u64) -> Self {
        let settings =
            pool::Settings { donate_bytes, chunk_bytes: 64 << 10, scheme, ..Default::default() };
        let node = EmbeddedNode::start(&settings).expect("a memory node");
        Self { node: Arc::new(node), hand: Hand::new(1_700_000_000_000, 1) }
    }

    fn connect(&self) -> Pool {
        let domain = Some(DomainToken([1; 32]));
        let options = Options { groups: Some(1), domain, ..Options::default() };
        Pool::embedded_in(&self.node, options).expect("a connection")
    }

    fn create(&self, settings: &LeasedSettings) -> Memory {
        let memory = Memory::create(self.connect(), 0, GroupId(0), settings.clone());
        block_on(memory).expect("memory")
    }

    fn join(&self, settings: &LeasedSettings, anchor: Object) -> Memory {
        let memory = Memory::join(self.connect(), GroupId(0), settings.clone(), anchor);
        block_on(memory).expect("memory")
    }

    /// The first of several clients, and the memory in which others join.
    fn first(&self, leased: &LeasedSettings, shared: &SharedSettings) -> Store {
        self.open(self.create(leased), shared)
    }

    fn another(&self, leased: &LeasedSettings, shared: &SharedSettings, first: &Store) -> Store {
        self.open(self.join(leased, first.reach().anchor()), shared)
    }

    fn open(&self, memory: Memory, shared: &SharedSettings) -> Store {
        block_on(Store::join_leased(memory, || self.hand.clone(), shared.clone())).expect("a store")
    }

    fn objects(&self) -> u64 {
        let status = self.connect().node_status().expect("a status");
        status.node.lease.expect("a scheme with leases").objects
    }
}

fn leased() -> LeasedSettings {
    LeasedSettings { slab: 4096, objects: 4096, ..LeasedSettings::default() }
}

fn shared(form: Form, groups: u16) -> SharedSettings {
    let lock = SplitLock::Exclusive;
    SharedSettings { form, groups: Some(groups), lock, ..SharedSettings::default() }
}

fn set(store: &Store, key: u64, value: &[u8]) -> Result<(), Error> {
    block_on(store.set(0, &key.to_be_bytes(), value, SetOptions::default())).map(drop)
}

fn get(store: &Store, key: u64) -> Option<Vec<u8>> {
    block_on(store.get(0, &key.to_be_bytes())).expect("a read")
}

/// Lets the epochs pass, so that unlinked blocks are free.
fn pass(world: &World, stores: &[&Store]) {
    for _ in 0..4 {
        world.hand.advance(1);
        for store in stores {
            block_on(store.tick()).expect("a tick");
            block_on(store.tend()).expect("frees");
        }
    }
}

/// Random operations of several clients, compared with a map.
fn compare(world: &World, stores: &[&Store], keys: u64, operations: u64) {
    let mut random = Seeded::new(7);
    let mut model = BTreeMap::new();
    for operation in 0..operations {
        let store = stores[random.below(stores.len() as u64) as usize];
        let key = random.below(keys);
        match random.below(8) {
            0..=2 => assert_eq!(get(store, key), model.get(&key).cloned(), "key {key}"),
            3 => {
                let was_there = block_on(store.delete(0, &key.to_be_bytes())).expect("a deletion");
                assert_eq!(was_there, model.remove(&key).is_some());
            }
            _ => {
                let length = [8, 100, 900, 3000, 9000][random.below(5) as usize];
                let value = vec![operation as u8; length];
                set(store, key, &value).expect("a write");
                model.insert(key, value);
            }
        }
        if operation % 64 == 0 {
            pass(world, stores);
        }
    }
    for key in 0..keys {
        assert_eq!(get(stores[0], key), model.get(&key).cloned(), "key {key}");
    }
}

#[test]
fn clients_change_one_index_in_each_scheme_with_leases() {
    for scheme in schemes() {
        for (form, end) in [(Form::Fused, End::Expire), (Form::Published, End::Revoke)] {
            let world = World::new(scheme, 8 << 20);
            let (leased, shared) = (LeasedSettings { end, ..leased() }, shared(form, 2));
            let first = world.first(&leased, &shared);
            let second = world.another(&leased, &shared, &first);
            compare(&world, &[&first, &second], 200, 600);
            let splits = [&first, &second].map(|store| store.trips(Operation::Split).operations);
            assert!(splits.iter().all(|splits| *splits > 0), "{}: {splits:?}", scheme.name);
        }
    }
}

/// All blocks that no key names are freed, also those that another client has allocated.
#[test]
fn freed_blocks_go_back_to_the_memory_node() {
    let world = World::new(patronus(), 8 << 20);
    let first = world.first(&leased(), &shared(Form::Fused, 21));
    let second = world.another(&leased(), &shared(Form::Fused, 21), &first);
    (0..100).for_each(|key| set(&first, key, &[1; 500]).expect("a write"));
    (0..100).for_each(|key| set(&second, key, &[2; 500]).expect("a write"));
    pass(&world, &[&first, &second]);
    assert_eq!((0..100).find(|key| get(&first, *key) != Some(vec![2; 500])), None);
    for key in 0_u64..100 {
        assert!(block_on(first.delete(0, &key.to_be_bytes())).expect("a deletion"));
    }
    pass(&world, &[&first, &second]);
    let index = block_on(first.index_blocks(0)).expect("a read") as u64;
    block_on(SharedBlocks::leave(first.blocks())).expect("frees");
    block_on(SharedBlocks::leave(second.blocks())).expect("frees");
    // The anchor and the table of names are not blocks.
    assert_eq!(world.objects(), index + 2);
}

/// An entry of the memory node's table has more objects than a place can distinguish.
#[test]
fn places_name_objects_after_many_generations() {
    let world = World::new(patronus(), 32 << 20);
    // A place has 7 bits of a generation.
    let leased =
        LeasedSettings { slab: 64 << 10, objects: 1 << 20, together: Together(1), ..leased() };
    let first = world.first(&leased, &shared(Form::Fused, 21));
    let second = world.another(&leased, &shared(Form::Fused, 21), &first);
    let mut largest = 0;
    for round in 0_u64..400 {
        set(&first, 1, &round.to_be_bytes()).expect("a write");
        pass(&world, &[&first, &second]);
        if round % 50 == 49 {
            assert_eq!(get(&second, 1), Some(round.to_be_bytes().to_vec()));
        }
        let terms = pool::LeaseTerms::shared_read(Duration::from_millis(1));
        let pool = first.reach().pool();
        let others = pool::Others::None;
        let (probe, _) = pool.allocate_object_blocking(64, others, &terms).expect("an object");
        pool.free_object_blocking(&probe).expect("a free");
        largest = largest.max(probe.generation);
    }
    assert!(largest > 2 << 7, "{largest}: the test reaches no second turn");
    // A client that knows nothing finds the block, too.
    let third = world.another(&leased, &shared(Form::Fused, 21), &first);
    assert_eq!(get(&third, 1), Some(399_u64.to_be_bytes().to_vec()));
}

/// A client that stops for ever after a number of verbs and requests. Nothing of it is sent
/// afterwards, and its connection stays.
struct Mortal {
    memory: Memory,
    /// Verbs and requests until the end.
    left: Rc<Cell<u64>>,
}

impl Mortal {
    fn spend(&self) -> Result<(), Stopped> {
        match self.left.get().checked_sub(1) {
            Some(left) => {
                self.left.set(left);
                Ok(())
            }
            None => Err(Stopped::Lost("the client has stopped".into())),
        }
    }
}

impl Reach for Mortal {
    type Right = <Memory as Reach>::Right;

    async fn open(&self, range: Range) -> Result<Self::Right, Stopped> {
        if range.exclusive {
            self.spend()?;
        }
        self.memory.open(range).await
    }

    async fn close(&self, right: Self::Right) {
        if right.is_some() && self.spend().is_ok() {
            self.memory.close(right).await;
        }
    }

    async fn run(&self, steps: &mut [Step<'_>]) -> Result<(), Stopped> {
        let most = usize::try_from(self.left.get()).unwrap_or(usize::MAX);
        let some = steps.len().min(most);
        if some > 0 {
            self.memory.run(&mut steps[..some]).await?;
        }
        steps.iter().try_for_each(|_| self.spend())
    }

    fn ordered(&self, a: Address, b: Address) -> bool {
        self.memory.ordered(a, b)
    }
}

impl SharedBlocks for Mortal {
    fn slab(&self) -> u32 {
        SharedBlocks::slab(&self.memory)
    }

    async fn allocate(&self, bytes: u32) -> Result<Place, Error> {
        self.spend()?;
        self.memory.allocate(bytes).await
    }

    async fn allocate_value(&self, bytes: u32, length: Length) -> Result<Place, Error> {
        self.spend()?;
        self.memory.allocate_value(bytes, length).await
    }

    fn release(&self, place: Place, bytes: u32) {
        self.memory.release(place, bytes);
    }

    async fn tend(&self) -> Result<(), Error> {
        self.spend()?;
        SharedBlocks::tend(&self.memory).await
    }

    async fn rebuild(&self, used: &[(Place, u32)]) -> Result<u64, Error> {
        self.memory.rebuild(used).await
    }

    async fn leave(&self) -> Result<(), Error> {
        SharedBlocks::leave(&self.memory).await
    }
}

/// Lets a client stop after `verbs` verbs of its first split, and another one fill the index.
/// Returns true if the first client has ended the split before.
fn stop_in_split(verbs: u64, dies: bool) -> bool {
    const KEYS: u64 = 60;
    let world = World::new(patronus(), 4 << 20);
    let leased = LeasedSettings {
        slab: 1024,
        lease: Duration::from_millis(1),
        split_lease: Duration::from_millis(2),
        ..leased()
    };
    let settings = shared(Form::Fused, 1);
    let memory = world.create(&leased);
    let left = Rc::new(Cell::new(u64::MAX));
    let mortal = || Mortal { memory: memory.clone(), left: left.clone() };
    let created = SharedStore::create(mortal(), mortal(), world.hand.clone(), settings.clone());
    let first = block_on(created).expect("a store");
    let insert = |key: u64| {
        let key = key.to_be_bytes();
        block_on(first.set(0, &key, &key, SetOptions::default())).map(drop)
    };
    let splits = || first.trips(Operation::Split).operations;
    let mut acknowledged = Vec::new();
    // The insertion that splits is repeated in a world of its own, so its number is known.
    let before = (0..KEYS).take_while(|key| {
        let is_last = *key == keys_of_one_table();
        if !is_last {
            insert(*key).expect("a write");
            acknowledged.push(*key);
        }
        !is_last
    });
    let next = before.count() as u64;
    assert_eq!(splits(), 0);
    left.set(verbs);
    let stopped = match insert(next) {
        Ok(()) => {
            assert_eq!(splits(), 1);
            acknowledged.push(next);
            false
        }
        Err(Error::Stopped(Stopped::Lost(_))) => true,
        Err(error) => panic!("{error}"),
    };
    left.set(0);
    let root = first.root();
    let second = world.join(&leased, memory.anchor());
    let (reach, blocks) = (second.clone(), second);
    let second = Store::open(reach, blocks, world.hand.clone(), settings, root);
    let second = block_on(second).expect("a store");
    let first_client = first.client();
    if dies {
        drop((first, memory));
    }
    for key in next + 1..KEYS {
        set(&second, key, &key.to_be_bytes())
            .unwrap_or_else(|error| panic!("key {key} after {verbs} verbs: {error}"));
        acknowledged.push(key);
    }
    assert!(second.trips(Operation::Split).operations > 0);
    for key in acknowledged {
        let value = Some(key.to_be_bytes().to_vec());
        assert_eq!(get(&second, key), value, "key {key} after {verbs} verbs");
    }
    block_on(second.strike(first_client)).expect("a write");
    !stopped
}

/// Number of keys that one subtable of one group takes.
fn keys_of_one_table() -> u64 {
    thread_local! {
        static KEYS: Cell<u64> = const { Cell::new(0) };
    }
    if KEYS.get() == 0 {
        let world = World::new(patronus(), 4 << 20);
        let leased = LeasedSettings { slab: 1024, ..leased() };
        let store = world.first(&leased, &shared(Form::Fused, 1));
        let splits = |key: &u64| {
            set(&store, *key, &key.to_be_bytes()).expect("a write");
            store.trips(Operation::Split).operations > 0
        };
        KEYS.set((0..).find(splits).expect("a split"));
    }
    KEYS.get()
}

/// The lease ends the right to the split, and the next client that needs the subtable ends the
/// split.
#[test]
fn client_that_stops_at_any_verb_of_a_split_loses_no_key() {
    let mut ended = 0;
    let mut verbs = 0;
    while ended < 2 {
        ended = if stop_in_split(verbs, verbs % 2 == 0) { ended + 1 } else { 0 };
        verbs += 1;
    }
    assert!(verbs > 60, "a split of {verbs} verbs");
}
