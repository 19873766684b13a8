//! Permissions that end at any moment.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use parking_lot::Mutex;
use pool::{DefaultNic, DomainToken, EmbeddedNode, Options};
use verbs::executor::block_on;

use super::*;
use crate::blocks::SharedBlocks;
use crate::memory::{Hand, Seeded};
use crate::{Form, SetOptions, SplitLock};

type Memory = LeasedMemory<DefaultNic>;

/// A way to remote memory whose permissions end before some of its accesses, by seed.
struct Losing {
    memory: Memory,
    random: Mutex<Seeded>,
}

impl Losing {
    /// Ends all permissions at the memory node, or by the compute node's belief.
    async fn lose(&self) {
        let chance = self.random.lock().below(6);
        let held = self.memory.shared.held.lock().all();
        for permission in held {
            match chance {
                // The compute node believes in the permission, and the NIC refuses the access.
                0 => {
                    let until = permission.grant().until;
                    self.memory.pool().revoke(&permission).await.expect("a revocation");
                    permission.update(|lease| {
                        lease.ended = false;
                        lease.grant.until = until;
                    });
                }
                1 => permission.update(|lease| lease.grant.until = Duration::ZERO),
                _ => {}
            }
        }
    }
}

impl Reach for Losing {
    type Right = Option<Open>;

    async fn open(&self, range: Range) -> Result<Self::Right, Stopped> {
        self.memory.open(range).await
    }

    async fn close(&self, right: Self::Right) {
        self.memory.close(right).await;
    }

    async fn run(&self, steps: &mut [Step<'_>]) -> Result<(), Stopped> {
        // Between the look at a permission and its use, too.
        for step in steps {
            self.lose().await;
            self.memory.run(std::slice::from_mut(step)).await?;
        }
        Ok(())
    }

    fn ordered(&self, a: Address, b: Address) -> bool {
        self.memory.ordered(a, b)
    }
}

fn memory(node: &Arc<EmbeddedNode>) -> Memory {
    let settings = LeasedSettings { slab: 4096, objects: 4096, ..LeasedSettings::default() };
    memory_of(node, settings)
}

fn memory_of(node: &Arc<EmbeddedNode>, settings: LeasedSettings) -> Memory {
    let domain = Some(DomainToken([1; 32]));
    let options = Options { groups: Some(1), domain, ..Options::default() };
    let pool = Pool::embedded_in(node, options).expect("a connection");
    block_on(Memory::create(pool, 0, GroupId(0), settings)).expect("memory")
}

fn node() -> Arc<EmbeddedNode> {
    node_of("patronus")
}

fn node_of(scheme: &str) -> Arc<EmbeddedNode> {
    let scheme = pool::schemes::find(scheme).expect("a scheme");
    let settings = pool::Settings {
        donate_bytes: 8 << 20,
        chunk_bytes: 64 << 10,
        scheme,
        ..Default::default()
    };
    Arc::new(EmbeddedNode::start(&settings).expect("a memory node"))
}

#[test]
fn permission_that_has_ended_costs_a_new_one_only() {
    let node = node();
    let memory = memory(&node);
    let losing = Losing { memory: memory.clone(), random: Mutex::new(Seeded::new(3)) };
    let lock = SplitLock::Exclusive;
    let settings =
        SharedSettings { form: Form::Fused, groups: Some(2), lock, ..Default::default() };
    let store = SharedStore::create(losing, memory.clone(), Hand::new(1, 1), settings);
    let store = block_on(store).expect("a store");
    let (mut random, mut model) = (Seeded::new(5), BTreeMap::new());
    for operation in 0..400_u64 {
        let key = random.below(100).to_be_bytes();
        let value = operation.to_be_bytes();
        block_on(store.set(0, &key, &value, SetOptions::default())).expect("a write");
        model.insert(key, value.to_vec());
    }
    for (key, value) in model {
        assert_eq!(block_on(store.get(0, &key)).expect("a read"), Some(value));
    }
    assert!(memory.pool().stats().promotions > 10, "the NIC refused no access");
}

/// As with a loaded memory node, whose replies come after the ends of their leases.
#[test]
fn lease_that_ends_before_its_use_becomes_longer() {
    let settings = pool::Settings {
        donate_bytes: 8 << 20,
        chunk_bytes: 64 << 10,
        scheme: pool::schemes::PATRONUS,
        ..Default::default()
    };
    // No acquisition takes less than a microsecond.
    let settings = settings.with("lease_min_us", 1);
    let node = Arc::new(EmbeddedNode::start(&settings).expect("a memory node"));
    let lease = Duration::from_micros(1);
    let memory = memory_of(&node, LeasedSettings { slab: 4096, lease, ..Default::default() });
    let block = block_on(crate::blocks::SharedBlocks::allocate(&memory, 1024)).expect("a block");
    let mut old = 0;
    let mut steps = [Step::Add { at: block.at(0), amount: 3, old: &mut old }];
    block_on(memory.run(&mut steps)).expect("an access");
    assert!(memory.pool().stats().expiries > 0, "each lease was long enough");
}

/// In a scheme without leases, only an access finds out about a generation.
#[test]
fn refused_access_without_leases_learns_the_generation() {
    let node = node_of("rpc-data");
    // With many entries, places have room for few bits of a generation.
    let settings = LeasedSettings { slab: 64 << 10, objects: 1 << 18, ..LeasedSettings::default() };
    let memory = memory_of(&node, settings);
    let allocate =
        || block_on(crate::blocks::SharedBlocks::allocate(&memory, 1024)).expect("a block").at(0);
    let read = |at| block_on(memory.run(&mut [Step::Read { at, into: &mut [0; 8] }]));
    let object = |at| {
        let Spot { name, kind, .. } = memory.shared.layout.spot(at);
        (name.entry, memory.object(name, kind))
    };
    // The entry of a freed object is used again, until the upper bits of its generation change.
    let at = loop {
        let at = allocate();
        let (entry, object) = object(at);
        if memory.shared.upper.lock().get(&entry).is_some_and(|upper| *upper > 0) {
            break at;
        }
        block_on(memory.pool().free_object(&object)).expect("a free");
    };
    let (entry, object) = object(at);
    memory.shared.upper.lock().remove(&entry);
    read(at).expect("the upper bits are in the table of names");
    block_on(memory.pool().free_object(&object)).expect("a free");
    assert!(matches!(read(at), Err(Stopped::Freed(_))));
}

/// The steps before a refused one are not repeated.
#[test]
fn refused_list_goes_on_where_it_stopped() {
    let node = node();
    let memory = memory(&node);
    let [counter, other] = [(); 2].map(|()| {
        let place = block_on(crate::blocks::SharedBlocks::allocate(&memory, 1024));
        place.expect("a block")
    });
    for round in 0..3 {
        let name = memory.shared.layout.spot(other.at(0)).name;
        let found = memory.shared.held.lock().find(name, &(0..8), pool::Right::Write);
        let permission = found.expect("the permission of the allocation").0;
        let until = permission.grant().until;
        block_on(memory.pool().revoke(&permission)).expect("a revocation");
        permission.update(|lease| {
            lease.ended = false;
            lease.grant.until = until;
        });
        let (mut old, mut last, word) = (0, 0, 7_u64.to_be_bytes());
        let mut steps = [
            Step::Add { at: counter.at(0), amount: 1, old: &mut old },
            Step::Write { at: other.at(0), from: &word },
            Step::Add { at: counter.at(0), amount: 0, old: &mut last },
        ];
        block_on(memory.run(&mut steps)).expect("a list");
        assert_eq!((old, last), (round, round + 1));
    }
    assert!(memory.pool().stats().promotions > 0, "the NIC refused no access");
}

/// Runs `access` beside a client that writes another generation of an object into the table of
/// names before each poll.
fn beside_renames<T>(hostile: &Memory, entry: u32, access: impl Future<Output = T>) -> T {
    let at = hostile.shared.layout.word(entry);
    let rename = async |upper: u64| {
        let word = (upper << 32).to_be_bytes();
        hostile.run(&mut [Step::Write { at, from: &word }]).await.expect("a write")
    };
    let (mut access, mut upper, begin) = (pin!(access), 1 << 20, Instant::now());
    let mut write = Box::pin(rename(upper));
    block_on(poll_fn(|cx| {
        if write.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "attempts without a bound");
        upper += 1;
        write = Box::pin(rename(upper));
        cx.waker().wake_by_ref();
        access.as_mut().poll(cx)
    }))
}

#[test]
fn access_ends_beside_a_client_that_changes_generations() {
    let node = node();
    let memory = memory(&node);
    let domain = Some(DomainToken([1; 32]));
    let options = Options { groups: Some(1), domain, ..Options::default() };
    let pool = Pool::embedded_in(&node, options).expect("a connection");
    let settings = memory.shared.settings.clone();
    let hostile = block_on(Memory::join(pool, GroupId(0), settings, memory.anchor()));
    let hostile = hostile.expect("memory");
    let allocate = || block_on(SharedBlocks::allocate(&memory, 1024)).expect("a block");
    let [gone, kept] = [(); 2].map(|()| allocate());
    let Spot { name, kind, .. } = memory.shared.layout.spot(gone.at(0));
    let object = memory.object(name, kind);
    memory.shared.held.lock().forget_object(name);
    block_on(memory.pool().free_object(&object)).expect("a free");
    let is_renamed = |stopped: &Stopped| match stopped {
        Stopped::Renamed { entry, attempts: TRIES } => *entry == name.entry,
        // The hostile client has missed a turn.
        Stopped::Freed(_) => false,
        stopped => panic!("{stopped}"),
    };
    let mut into = [0; 8];
    let mut read = || {
        let mut steps = [Step::Read { at: gone.at(0), into: &mut into }];
        let access = async { memory.run(&mut steps).await };
        beside_renames(&hostile, name.entry, access).expect_err("the object is not there")
    };
    let stopped = (0..20).map(|_| read()).find(is_renamed).expect("a bound");
    let text = format!("the generation of object {} before each of 64 attempts", name.entry);
    assert!(stopped.to_string().contains(&text), "{stopped}");
    let free = || {
        memory.release(gone, 1024);
        match beside_renames(&hostile, name.entry, memory.tend()) {
            Ok(()) => false,
            Err(Error::Stopped(stopped)) => is_renamed(&stopped),
            Err(error) => panic!("{error}"),
        }
    };
    assert!((0..20).any(|_| free()), "a free without a bound");
    // The other objects are not affected.
    let word = 7_u64.to_be_bytes();
    for place in [kept, allocate()] {
        let mut steps = [Step::Write { at: place.at(0), from: &word }];
        block_on(memory.run(&mut steps)).expect("an access");
        memory.release(place, 1024);
    }
    block_on(memory.tend()).expect("frees");
}
