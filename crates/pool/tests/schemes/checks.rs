//! The checks that run for each scheme.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use pool::{Error, Grant, GroupId, Lane, Pool, Step, Transfer};
use scheme::index::EntryId;
use scheme::info::AccessKind;
use verbs::executor::block_on;
use verbs::{Key, Status};

use crate::Setup;
pub use crate::batches::{batches_are_polled_to_their_end, batches_over_groups};
use crate::place::Node;

const CHUNK: u64 = 4096;

impl Setup {
    fn node(&self, chunks: u64) -> Node {
        self.node_of(CHUNK, chunks)
    }

    /// Starts a memory node with `chunks` chunks of `chunk_bytes`.
    pub fn node_of(&self, chunk_bytes: u64, chunks: u64) -> Node {
        Node::start(self.place, self.how, chunk_bytes, chunks)
    }
}

/// A grant whose keys are dead.
pub fn dead_grant(pool: &Pool, setup: &Setup) -> Grant {
    let grant = pool.allocate_in_blocking(GroupId(0)).unwrap();
    pool.free_blocking(grant).unwrap();
    if setup.dies_with_its_free() {
        return grant;
    }
    let keys: Vec<Key> = grant.keys().iter().map(|_| Key(0xdead_be00)).collect();
    copy(&grant, GroupId(0), &keys)
}

/// A copy of a grant with other keys, which belongs to no connection.
fn copy(grant: &Grant, group: GroupId, keys: &[Key]) -> Grant {
    Grant::new(grant.addr, grant.len, grant.entry, group, keys).in_function(grant.function)
}

pub fn is_refused<T: std::fmt::Debug>(result: Result<T, Error>) -> bool {
    match result {
        Err(Error::Access { status: Status::RemoteAccess, .. }) => true,
        // By the memory node's CPU.
        Err(Error::NoSuchObject { .. }) => true,
        Err(e) => panic!("another error: {e}"),
        Ok(_) => false,
    }
}

fn read(pool: &Pool, grant: &Grant, offset: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0xee; len];
    pool.read_blocking(grant, offset, &mut out).unwrap();
    out
}

pub fn chunk_is_zero_and_keeps_written_data(setup: &Setup) {
    let node = setup.node(8);
    let pool = node.connect();
    for group in 0..pool.groups() {
        let grant = pool.allocate_in_blocking(GroupId(group)).unwrap();
        assert_eq!((grant.len, grant.group), (CHUNK, GroupId(group)));
        assert_eq!(grant.keys().len(), pool.lanes() as usize);
        if !setup.clears() {
            pool.write_blocking(&grant, 0, &[0; CHUNK as usize]).unwrap();
        }
        assert_eq!(read(&pool, &grant, 0, CHUNK as usize), vec![0; CHUNK as usize]);
        pool.write_blocking(&grant, 17, b"short").unwrap();
        pool.write_blocking(&grant, 1000, &[7; 3000]).unwrap();
        assert_eq!(read(&pool, &grant, 17, 5), b"short");
        assert_eq!(read(&pool, &grant, 1000, 3000), [7; 3000]);
        assert_eq!(pool.fetch_and_add_blocking(&grant, 0, u64::MAX).unwrap(), 0);
        assert_eq!(pool.fetch_and_add_blocking(&grant, 0, 6).unwrap(), u64::MAX);
        assert_eq!(pool.compare_and_swap_blocking(&grant, 0, 4, 9).unwrap(), 5);
        assert_eq!(pool.compare_and_swap_blocking(&grant, 0, 5, 0x0102).unwrap(), 5);
        assert_eq!(read(&pool, &grant, 0, 8), [0, 0, 0, 0, 0, 0, 1, 2], "big-endian in memory");
        block_on(async {
            pool.write(&grant, 8, b"awaited!").await.unwrap();
            let mut out = [0; 8];
            pool.read(&grant, 8, &mut out).await.unwrap();
            assert_eq!(&out, b"awaited!");
            assert_eq!(pool.fetch_and_add(&grant, 0, 1).await.unwrap(), 0x0102);
            assert_eq!(pool.compare_and_swap(&grant, 0, 0x0103, 1).await.unwrap(), 0x0103);
            pool.free(grant).await.unwrap();
        });
    }
    drop(pool);
    node.check_whole(8);
}

/// An offset from the first chunk names the same memory for every compute node.
pub fn chunks_are_named_by_their_offset(setup: &Setup) {
    let node = setup.node(8);
    let pools = [node.connect(), node.connect()];
    let first = pools[0].first_chunk().unwrap();
    assert_eq!(pools[1].first_chunk(), Some(first));
    let grants: Vec<_> = (0..8).map(|i| pools[i % 2].allocate_blocking().unwrap()).collect();
    let mut offsets: Vec<_> = grants.iter().map(|grant| grant.addr - first).collect();
    offsets.sort_unstable();
    assert_eq!(offsets, Vec::from_iter((0..8).map(|i| i * CHUNK)));
}

/// In `shared-region` a compute node reaches every byte by its offset, with and without the chunk,
/// and nothing beyond the pool. Other schemes have no such grant.
pub fn only_a_shared_region_is_one_grant(setup: &Setup) {
    let node = setup.node(4);
    let (a, b) = (node.connect(), node.connect());
    let (one, two) = (a.whole_pool(GroupId(0)), b.whole_pool(GroupId(1)));
    if setup.keys_are_for_one_grant() {
        assert_eq!((one, two), (None, None));
        return;
    }
    let (one, two) = (one.unwrap(), two.unwrap());
    assert_eq!((one.keys(), one.addr, one.len), (two.keys(), a.first_chunk().unwrap(), 4 * CHUNK));
    let chunk = a.allocate_blocking().unwrap();
    assert_eq!(chunk.keys(), one.keys(), "one key for all");
    let offset = chunk.addr - one.addr;
    b.write_blocking(&two, offset, b"from b").unwrap();
    assert_eq!(read(&a, &chunk, 0, 6), b"from b");
    for lane in [Lane(0), Lane(1)] {
        let (mut old, mut back) = (0, [0; 8]);
        let last = 4 * CHUNK - 8;
        let mut steps = [
            Step::FetchAndAdd { grant: &two, offset: last, add: 1, old: &mut old },
            Step::Read { grant: &two, offset: last, into: &mut back },
        ];
        b.run_blocking(lane, &mut steps).unwrap();
        assert_eq!((old, back), (lane.0.into(), (u64::from(lane.0) + 1).to_be_bytes()));
    }
    a.write_blocking(&one, 4 * CHUNK - 8, &[0; 8]).unwrap();
    let beyond = Grant::new(one.addr, one.len + CHUNK, one.entry, GroupId(0), one.keys());
    assert!(is_refused(a.read_blocking(&beyond, 4 * CHUNK, &mut [0; 8])));
    assert!(matches!(a.free_blocking(one), Err(Error::NotYours { .. })));
    a.free_blocking(chunk).unwrap();
    assert_eq!(read(&b, &two, offset, 6), [0; 6], "a free clears");
    drop((a, b));
    node.check_whole(4);
}

pub fn the_next_owner_reads_zeros(setup: &Setup) {
    let node = setup.node(1);
    let (a, b) = (node.connect(), node.connect());
    for round in 1..20u8 {
        for pool in [&a, &b] {
            let grant = pool.allocate_blocking().unwrap();
            let found = read(pool, &grant, 0, CHUNK as usize);
            if setup.clears() {
                assert_eq!(found, vec![0; CHUNK as usize]);
            } else if (round, pool.client()) != (1, a.client()) {
                assert_ne!(
                    found,
                    vec![0; CHUNK as usize],
                    "the scheme is unsafe because it does not clear"
                );
            }
            pool.write_blocking(&grant, 0, &vec![round; CHUNK as usize]).unwrap();
            pool.free_blocking(grant).unwrap();
        }
    }
    drop((a, b));
    node.check_whole(1);
}

pub fn keys_are_dead_after_free(setup: &Setup) {
    if !setup.dies_with_its_free() {
        return; // src/rpc/tests covers their lifetime
    }
    let node = setup.node(2);
    let (pool, other) = (node.connect(), node.connect());
    let old = pool.allocate_blocking().unwrap();
    pool.free_blocking(old).unwrap();
    assert!(is_refused(pool.read_blocking(&old, 0, &mut [0; 8])));
    assert!(is_refused(pool.write_blocking(&old, 0, &[1; 8])));
    assert!(is_refused(pool.fetch_and_add_blocking(&old, 0, 1)));
    // The keys stay dead when the chunk has an owner again.
    let grants = [other.allocate_blocking().unwrap(), pool.allocate_blocking().unwrap()];
    assert!(grants.iter().any(|g| g.addr == old.addr));
    assert!(is_refused(pool.write_blocking(&old, 0, &[1; 8])));
    assert_eq!(read(&other, &grants[0], 0, 8), [0; 8]);
    assert_eq!(read(&pool, &grants[1], 0, 8), [0; 8]);
    drop((pool, other));
    node.check_whole(2);
}

pub fn accesses_beyond_the_grant_are_refused(setup: &Setup) {
    let node = setup.node(4);
    let pool = node.connect();
    let grants: Vec<Grant> =
        (0..3).map(|_| pool.allocate_in_blocking(GroupId(0)).unwrap()).collect();
    let grant = grants[1];
    for (offset, len) in [(CHUNK, 1), (CHUNK - 4, 5), (u64::MAX, 2), (0, CHUNK as usize + 1)] {
        let result = pool.read_blocking(&grant, offset, &mut vec![0; len]);
        assert!(matches!(result, Err(Error::OutOfRange { .. })), "{offset} {len}: {result:?}");
    }
    let result = pool.fetch_and_add_blocking(&grant, CHUNK - 7, 1);
    assert!(matches!(result, Err(Error::OutOfRange { .. })), "{result:?}");
    let result = pool.fetch_and_add_blocking(&grant, 4, 1);
    assert!(matches!(result, Err(Error::Setting { .. })), "{result:?}");
    pool.read_blocking(&grant, CHUNK, &mut []).unwrap();

    if !setup.keys_are_for_one_grant() {
        return;
    }
    // The NIC stops a forged larger grant, at both ends and for each operation.
    let forged = |addr: u64, len: u64| {
        let forged = Grant::new(addr, len, grant.entry, grant.group, grant.keys());
        forged.in_function(grant.function)
    };
    let wide = forged(grant.addr - 8, CHUNK + 16);
    for offset in [0, CHUNK + 8, CHUNK + 1, 1] {
        assert!(is_refused(pool.read_blocking(&wide, offset, &mut [0; 8])), "{offset}");
        assert!(is_refused(pool.write_blocking(&wide, offset, &[1; 8])), "{offset}");
    }
    assert!(is_refused(pool.fetch_and_add_blocking(&wide, 0, 1)));
    assert!(is_refused(pool.compare_and_swap_blocking(&wide, CHUNK + 8, 0, 1)));
    for other in [&grants[0], &grants[2]] {
        assert!(is_refused(pool.read_blocking(&forged(other.addr, CHUNK), 0, &mut [0; 8])));
    }
    for g in &grants {
        assert_eq!(read(&pool, g, 0, CHUNK as usize), vec![0; CHUNK as usize]);
        pool.free_blocking(*g).unwrap();
    }
    drop(pool);
    node.check_whole(4);
}

pub fn grant_is_useless_to_another_client(setup: &Setup) {
    if !setup.keys_are_for_one_client() {
        return; // src/rpc/tests covers these schemes
    }
    let node = setup.node(4);
    let (owner, thief) = (node.connect(), node.connect());
    let grant = owner.allocate_blocking().unwrap();
    owner.write_blocking(&grant, 0, b"mine").unwrap();
    for group in 0..thief.groups() {
        let copy = copy(&grant, GroupId(group), grant.keys());
        assert!(is_refused(thief.read_blocking(&copy, 0, &mut [0; 4])));
        assert!(is_refused(thief.write_blocking(&copy, 0, b"gone")));
        assert!(is_refused(thief.fetch_and_add_blocking(&copy, 0, 1)));
    }
    // Another group of the owner cannot use it either, if the key is bound to a QP.
    let elsewhere = GroupId(1 - grant.group.0);
    let moved = copy(&grant, elsewhere, grant.keys());
    let refused = owner.read_blocking(&moved, 0, &mut [0; 4]).is_err();
    assert_eq!(refused, setup.keys_are_for_one_qp());
    // All tags of its keys.
    let own = thief.allocate_in_blocking(GroupId(0)).unwrap();
    for tag in 0..=255 {
        let keys: Vec<Key> = grant.keys().iter().map(|k| Key::new(k.index(), tag)).collect();
        let guess = copy(&grant, GroupId(0), &keys);
        assert!(is_refused(thief.read_blocking(&guess, 0, &mut [0; 4])));
    }
    thief.write_blocking(&own, 0, b"still works").unwrap();
    assert_eq!(read(&owner, &grant, 0, 4), b"mine");
    drop((owner, thief));
    node.check_whole(4);
}

pub fn key_is_valid_on_its_lane_only(setup: &Setup) {
    let node = setup.node(2);
    let pool = node.connect();
    let grant = pool.allocate_blocking().unwrap();
    let buffer = pool.buffer(4096).unwrap();
    let transfer = |grant| Transfer { grant, offset: 0, buffer_offset: 0, len: 64 };
    for lane in 0..pool.lanes() {
        pool.write_from(&transfer(&grant), &buffer, Lane(lane)).unwrap().wait().unwrap();
        pool.read_into(&transfer(&grant), &buffer, Lane(lane)).unwrap().wait().unwrap();
    }
    if !setup.keys_are_for_one_qp() {
        return;
    }
    let mut keys = grant.keys().to_vec();
    keys.rotate_left(1);
    let swapped = copy(&grant, grant.group, &keys);
    for lane in 0..pool.lanes() {
        assert!(is_refused(
            pool.read_into(&transfer(&swapped), &buffer, Lane(lane)).unwrap().wait()
        ));
        pool.read_into(&transfer(&grant), &buffer, Lane(lane)).unwrap().wait().unwrap();
    }
    pool.free_blocking(grant).unwrap();
    drop(pool);
    node.check_whole(2);
}

pub fn foreign_chunk_is_not_freed(setup: &Setup) {
    let node = setup.node(8);
    let (a, b) = (node.connect(), node.connect());
    for round in 0..20 {
        let grant = a.allocate_blocking().unwrap();
        a.write_blocking(&grant, 0, b"kept").unwrap();
        let not_yours = |result: Result<(), Error>| match result {
            Err(Error::NotYours { entry }) => assert_eq!(entry, grant.entry),
            other => panic!("round {round}: {other:?}"),
        };
        let by_hand = copy(&grant, GroupId(0), grant.keys());
        not_yours(b.free_blocking(by_hand));
        // The library itself detects that the grant belongs to another connection.
        let stale = b.free_blocking(grant);
        assert!(matches!(stale, Err(Error::Stale { what: "grant", .. })), "{stale:?}");
        assert_eq!(read(&a, &grant, 0, 4), b"kept");
        let own = b.allocate_blocking().unwrap();
        b.write_blocking(&own, 0, &[round; 64]).unwrap();
        b.free_blocking(own).unwrap();
        a.free_blocking(grant).unwrap();
        not_yours(a.free_blocking(grant));
        not_yours(b.free_blocking(by_hand));
        let again = a.allocate_blocking().unwrap();
        a.free_blocking(again).unwrap();
    }
    drop((a, b));
    node.check_whole(8);
}

pub fn empty_pool_wait_ends_when_a_chunk_is_freed(setup: &Setup) {
    let node = setup.node(4);
    let (a, b) = (node.connect(), node.connect());
    let mut held: Vec<Grant> = (0..4).map(|_| a.allocate_blocking().unwrap()).collect();
    for pool in [&a, &b, &b] {
        match pool.allocate_blocking() {
            Err(Error::OutOfMemory { bytes }) => assert_eq!(bytes, CHUNK),
            other => panic!("{other:?}"),
        }
    }
    let start = Instant::now();
    assert!(!b.wait_for_memory_blocking(Duration::from_millis(30)).unwrap());
    assert!(start.elapsed() >= Duration::from_millis(30));
    thread::scope(|s| {
        let waiter = s.spawn(|| {
            loop {
                assert!(b.wait_for_memory_blocking(Duration::from_secs(20)).unwrap());
                match b.allocate_blocking() {
                    Ok(grant) => return grant,
                    Err(Error::OutOfMemory { .. }) => {}
                    Err(e) => panic!("{e}"),
                }
            }
        });
        thread::sleep(Duration::from_millis(30));
        a.free_blocking(held.pop().unwrap()).unwrap();
        let grant = waiter.join().unwrap();
        b.free_blocking(grant).unwrap();
    });
    assert!(b.wait_for_memory_blocking(Duration::from_secs(20)).unwrap());
    for grant in held {
        a.free_blocking(grant).unwrap();
    }
    drop((a, b));
    node.check_whole(4);
}

/// Clients on a nearly empty pool. Each owner increments a word once: it must be 0 after the
/// allocation, and keep the owner's value.
pub fn chunk_has_one_owner_at_a_time(setup: &Setup) {
    const CLIENTS: u64 = 3;
    const ROUNDS: u64 = 400;
    let node = setup.node(4);
    let empty = AtomicU64::new(0);
    thread::scope(|s| {
        for client in 1..=CLIENTS {
            let (node, empty) = (&node, &empty);
            s.spawn(move || {
                let pool = node.connect();
                let mut held: Vec<(Grant, u64)> = Vec::new();
                let mut done = 0;
                let free = |grant: Grant| {
                    if !setup.clears() {
                        pool.write_blocking(&grant, 8, &[0; 8]).unwrap();
                    }
                    pool.free_blocking(grant).unwrap();
                };
                while done < ROUNDS {
                    match pool.allocate_in_blocking(GroupId((done % 2) as u16)) {
                        Ok(grant) => {
                            let mark = client << 32 | done;
                            let old = pool.compare_and_swap_blocking(&grant, 8, 0, mark).unwrap();
                            assert_eq!(old, 0, "chunk {} has another owner", grant.entry);
                            held.push((grant, mark));
                            done += 1;
                        }
                        Err(Error::OutOfMemory { .. }) => {
                            empty.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(e) => panic!("{e}"),
                    }
                    if held.len() == 2 || done % 3 == 0 {
                        for (grant, mark) in held.drain(..) {
                            let found = pool.fetch_and_add_blocking(&grant, 8, 0).unwrap();
                            assert_eq!(
                                found, mark,
                                "another client wrote to chunk {}",
                                grant.entry
                            );
                            free(grant);
                        }
                    }
                }
                held.into_iter().for_each(|(grant, _)| free(grant));
            });
        }
    });
    node.check_whole(4);
}

pub fn threads_share_a_pool(setup: &Setup) {
    const ADDS: u64 = 300;
    let node = setup.node(16);
    let pool = node.connect();
    let shared = pool.allocate_blocking().unwrap();
    thread::scope(|s| {
        for t in 0..4u64 {
            let pool = pool.clone();
            s.spawn(move || {
                for i in 0..ADDS {
                    pool.fetch_and_add_blocking(&shared, 0, 1).unwrap();
                    let own = pool.allocate_blocking().unwrap();
                    pool.write_blocking(&own, 128, &(t << 32 | i).to_le_bytes()).unwrap();
                    assert_eq!(read(&pool, &own, 128, 8), (t << 32 | i).to_le_bytes());
                    pool.free_blocking(own).unwrap();
                }
            });
        }
    });
    assert_eq!(pool.fetch_and_add_blocking(&shared, 0, 0).unwrap(), 4 * ADDS);
    pool.free_blocking(shared).unwrap();
    drop(pool);
    node.check_whole(16);
}

pub fn long_and_odd_lengths(setup: &Setup) {
    const BIG: u64 = 1 << 20;
    let node = setup.node_of(BIG, 2);
    let pool = node.connect();
    let grant = pool.allocate_blocking().unwrap();
    let pattern: Vec<u8> = (0..BIG).map(|i| (i * 7 + i / 251) as u8).collect();
    let mut expected = vec![0u8; BIG as usize];
    for (offset, len) in
        [(0, 1), (1, 63), (100, 128), (300, 129), (4095, 4097), (9999, 262_144), (1, 700_001)]
    {
        pool.write_blocking(&grant, offset as u64, &pattern[..len]).unwrap();
        expected[offset..offset + len].copy_from_slice(&pattern[..len]);
        assert_eq!(read(&pool, &grant, offset as u64, len), &pattern[..len]);
    }
    assert!(read(&pool, &grant, 0, BIG as usize) == expected);
    pool.free_blocking(grant).unwrap();
    let grant = pool.allocate_blocking().unwrap();
    let clear = read(&pool, &grant, 0, BIG as usize).iter().all(|b| *b == 0);
    assert!(clear || !setup.clears());
    drop(pool);
    node.check_whole(2);
}

pub fn abandoned_operations_have_no_side_effect(setup: &Setup) {
    let node = setup.node_of(1 << 20, 2);
    let pool = node.connect();
    let grant = pool.allocate_blocking().unwrap();
    for round in 0..50u8 {
        {
            let buffer = pool.buffer(1 << 20).unwrap();
            let whole = Transfer { grant: &grant, offset: 0, buffer_offset: 0, len: 1 << 20 };
            drop(pool.read_into(&whole, &buffer, Lane(1)).unwrap());
            drop(pool.start_read_batch(&[whole, whole], &buffer, Lane(0)).unwrap());
        }
        let mut one = std::pin::pin!(pool.fetch_and_add(&grant, 0, 1));
        let cx = &mut std::task::Context::from_waker(std::task::Waker::noop());
        let _ = one.as_mut().poll(cx);
        pool.write_blocking(&grant, 64, &[round; 100]).unwrap();
        assert_eq!(read(&pool, &grant, 64, 100), [round; 100]);
    }
    assert_eq!(pool.fetch_and_add_blocking(&grant, 0, 0).unwrap(), 50);
    pool.free_blocking(grant).unwrap();
    drop(pool);
    node.check_whole(2);
}

pub fn abandoned_requests_leak_no_chunk(setup: &Setup) {
    let node = setup.node(256);
    let pool = node.connect();
    let cx = &mut std::task::Context::from_waker(std::task::Waker::noop());
    for _ in 0..100 {
        // On some NICs the first poll completes the allocation.
        if let Poll::Ready(grant) = std::pin::pin!(pool.allocate()).poll(cx) {
            pool.free_blocking(grant.unwrap()).unwrap();
        }
        let grant = pool.allocate_blocking().unwrap();
        let _ = std::pin::pin!(pool.free(grant)).poll(cx);
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    while pool.node_status().unwrap().node.free < 256 {
        assert!(Instant::now() < deadline, "chunks are missing");
        thread::yield_now();
    }
    drop(pool);
    node.check_whole(256);
}

pub fn bad_access_does_not_disturb_other_operations(setup: &Setup) {
    let node = setup.node(8);
    let (pool, other) = (node.connect(), node.connect());
    let dead = dead_grant(&pool, setup);
    let stop = AtomicBool::new(false);
    let work = |pool: &Pool| {
        let grant = pool.allocate_in_blocking(GroupId(0)).unwrap();
        let mut rounds = 0u64;
        while !stop.load(Ordering::Relaxed) {
            assert_eq!(pool.fetch_and_add_blocking(&grant, 0, 1).unwrap(), rounds);
            rounds += 1;
            pool.write_blocking(&grant, 8, &rounds.to_le_bytes()).unwrap();
            assert_eq!(read(pool, &grant, 8, 8), rounds.to_le_bytes());
        }
        pool.free_blocking(grant).unwrap();
    };
    thread::scope(|s| {
        // On the same QP, on another QP, and by another client.
        let workers = [&pool, &other].map(|pool| s.spawn(|| work(pool)));
        for _ in 0..60 {
            assert!(is_refused(pool.read_blocking(&dead, 0, &mut [0; 8])));
            let grant = pool.allocate_in_blocking(GroupId(0)).unwrap();
            pool.free_blocking(grant).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        for worker in workers {
            worker.join().unwrap();
        }
    });
    drop((pool, other));
    node.check_whole(8);
}

pub fn departure_returns_all_chunks(setup: &Setup) {
    let node = setup.node(32);
    for _ in 0..3 {
        let pool = node.connect();
        let grants: Vec<Grant> =
            (0..32).map(|i| pool.allocate_in_blocking(GroupId(i % 2)).unwrap()).collect();
        for grant in &grants {
            pool.write_blocking(grant, 0, &[0xaa; CHUNK as usize]).unwrap();
        }
        // One QP is broken when the pool is dropped.
        let wrong = Grant::new(8, CHUNK, EntryId::new(0), GroupId(0), grants[0].keys());
        let buffer = pool.buffer(4096).unwrap();
        let t = Transfer { grant: &wrong, offset: 0, buffer_offset: 0, len: 8 };
        if setup.how.scheme.access == AccessKind::OneSided {
            drop(pool.read_into(&t, &buffer, Lane(1)).unwrap());
        }
        drop(pool);
        node.check_whole(32);
    }
    let pool = node.connect();
    for _ in 0..32 {
        let grant = pool.allocate_blocking().unwrap();
        let clear = read(&pool, &grant, 0, CHUNK as usize).iter().all(|b| *b == 0);
        assert!(clear || !setup.clears());
    }
    drop(pool);
    node.check_whole(32);
}

pub fn counters_match_the_operations(setup: &Setup) {
    let node = setup.node(4);
    let pool = node.connect();
    let before = pool.node_status().unwrap().node;
    let grants: Vec<Grant> = (0..4).map(|_| pool.allocate_blocking().unwrap()).collect();
    assert!(pool.allocate_blocking().is_err());
    for grant in &grants {
        pool.write_blocking(grant, 0, &[1; 200]).unwrap();
        pool.read_blocking(grant, 0, &mut [0; 100]).unwrap();
        pool.fetch_and_add_blocking(grant, 0, 1).unwrap();
    }
    let status = pool.node_status().unwrap();
    assert_eq!((status.node.free, status.node.clients), (0, 1));
    assert_eq!(status.node.scheme, setup.how.scheme.name);
    assert_eq!(status.donated_bytes, 4 * CHUNK);
    for grant in grants {
        pool.free_blocking(grant).unwrap();
    }
    let after = pool.node_status().unwrap().node;
    let allocations = after.allocations_cpu + after.allocations_nic
        - (before.allocations_cpu + before.allocations_nic);
    let frees = after.frees_cpu + after.frees_nic - (before.frees_cpu + before.frees_nic);
    assert_eq!((allocations, frees), (4, 4));
    let by_cpu = setup.how.scheme.needs_cpu();
    assert_eq!(after.allocations_cpu > 0, by_cpu);
    assert_eq!(after.allocations_nic > 0, !by_cpu);
    let stats = pool.stats();
    assert_eq!((stats.allocations, stats.frees, stats.empty), (4, 4, 1));
    assert_eq!((stats.reads, stats.writes, stats.atomics), (4, 4, 4));
    assert_eq!((stats.bytes_read, stats.bytes_written), (400, 800));
    drop(pool);
    node.check_whole(4);
}
