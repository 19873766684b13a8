//! The checks of schemes with access by pages.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pool::{Error, Grant, GroupId, Lane, Pool, Step, Transfer};
use verbs::executor::block_on;

use crate::Setup;
use crate::place::{How, Node, Place};

const PAGE: usize = 4096;
type Page = [u8; PAGE];

fn start(setup: &Setup, pages: u64) -> Node {
    Node::start(setup.place, setup.how, PAGE as u64, pages)
}

fn read(pool: &Pool, grant: &Grant) -> Page {
    let mut page = [0xee; PAGE];
    pool.read_blocking(grant, 0, &mut page).unwrap();
    page
}

fn free(pool: &Pool) -> u64 {
    pool.node_status().unwrap().node.free
}

pub fn page_is_zero_and_keeps_written_data(setup: &Setup) {
    let node = start(setup, 8);
    let (pool, other) = (node.connect(), node.connect());
    for round in 1..6u8 {
        for pool in [&pool, &other] {
            let grants: Vec<Grant> = (0..4).map(|_| pool.allocate_blocking().unwrap()).collect();
            for (i, grant) in (0..).zip(&grants) {
                assert_eq!((grant.len, grant.keys().len()), (PAGE as u64, 0));
                assert!(read(pool, grant) == [0; PAGE]);
                pool.write_blocking(grant, 0, &[round + i; PAGE]).unwrap();
            }
            block_on(async {
                for (i, grant) in (0..).zip(&grants) {
                    let mut page = [0; PAGE];
                    pool.read(grant, 0, &mut page).await.unwrap();
                    assert!(page == [round + i; PAGE]);
                    pool.write(grant, 0, &[9; PAGE]).await.unwrap();
                    pool.read(grant, 0, &mut page).await.unwrap();
                    assert!(page == [9; PAGE]);
                    pool.free(*grant).await.unwrap();
                }
            });
        }
    }
    let stats = pool.stats();
    assert_eq!((stats.reads, stats.writes, stats.bytes_read), (60, 40, 60 * PAGE as u64));
    drop((pool, other));
    node.check_whole(8);
}

pub fn memory_is_allocated_by_the_first_write(setup: &Setup) {
    let node = start(setup, 4);
    let pool = node.connect();
    let grants: Vec<Grant> = (0..4).map(|_| pool.allocate_blocking().unwrap()).collect();
    assert!(matches!(pool.allocate_blocking(), Err(Error::OutOfMemory { .. })));
    assert_eq!(free(&pool), 4);
    for (i, grant) in (1..).zip(&grants) {
        pool.write_blocking(grant, 0, &[1; PAGE]).unwrap();
        pool.write_blocking(grant, 0, &[2; PAGE]).unwrap();
        assert_eq!(free(&pool), 4 - i);
    }
    // A scheme may allocate at each write of a page.
    let status = pool.node_status().unwrap().node;
    assert_eq!((status.allocations_nic - status.frees_nic, status.allocations_cpu), (4, 0));
    for grant in grants {
        pool.free_blocking(grant).unwrap();
    }
    assert_eq!(free(&pool), 4);
    drop(pool);
    node.check_whole(4);
}

/// A write of a page that has memory needs no free page.
pub fn full_pool_keeps_pages_writable(setup: &Setup) {
    let node = start(setup, 4);
    let (pool, other) = (node.connect(), node.connect());
    let grants: Vec<Grant> = (0..4).map(|_| pool.allocate_blocking().unwrap()).collect();
    let waits = other.allocate_blocking().unwrap();
    for round in 0..5u8 {
        for (i, grant) in (0..).zip(&grants) {
            pool.write_blocking(grant, 0, &[10 * round + i; PAGE]).unwrap();
        }
        let empty = other.write_blocking(&waits, 0, &[0xff; PAGE]);
        assert!(matches!(empty, Err(Error::OutOfMemory { .. })), "{empty:?}");
        for (i, grant) in (0..).zip(&grants) {
            assert!(read(&pool, grant) == [10 * round + i; PAGE]);
        }
    }
    drop((pool, other));
    node.check_whole(4);
}

pub fn foreign_chunk_is_not_freed(setup: &Setup) {
    let node = start(setup, 8);
    let (a, b) = (node.connect(), node.connect());
    for _ in 0..20 {
        let grant = a.allocate_blocking().unwrap();
        a.write_blocking(&grant, 0, &[5; PAGE]).unwrap();
        let by_hand = Grant::new(grant.addr, grant.len, grant.entry, GroupId(0), &[]);
        let refused = |result: Result<(), Error>| {
            assert!(matches!(result, Err(Error::NotYours { .. })), "{result:?}");
        };
        refused(b.free_blocking(by_hand));
        refused(b.read_blocking(&by_hand, 0, &mut [0; PAGE]));
        let stale = b.free_blocking(grant);
        assert!(matches!(stale, Err(Error::Stale { .. })), "{stale:?}");
        assert!(read(&a, &grant) == [5; PAGE]);
        a.free_blocking(grant).unwrap();
        refused(a.free_blocking(grant));
        refused(a.read_blocking(&grant, 0, &mut [0; PAGE]));
        let again = a.allocate_blocking().unwrap();
        a.free_blocking(again).unwrap();
    }
    drop((a, b));
    node.check_whole(8);
}

pub fn empty_pool_wait_ends_when_a_chunk_is_freed(setup: &Setup) {
    let node = start(setup, 4);
    let (a, b) = (node.connect(), node.connect());
    let mut held: Vec<Grant> = (0..4).map(|_| a.allocate_blocking().unwrap()).collect();
    for grant in &held {
        a.write_blocking(grant, 0, &[1; PAGE]).unwrap();
    }
    let wanted = b.allocate_blocking().unwrap();
    let empty = b.write_blocking(&wanted, 0, &[2; PAGE]);
    assert!(matches!(empty, Err(Error::OutOfMemory { .. })), "{empty:?}");
    assert!(!b.wait_for_memory_blocking(Duration::from_millis(30)).unwrap());
    thread::scope(|s| {
        let waiter = s.spawn(|| {
            loop {
                assert!(b.wait_for_memory_blocking(Duration::from_secs(20)).unwrap());
                match b.write_blocking(&wanted, 0, &[2; PAGE]) {
                    Ok(()) => return,
                    Err(Error::OutOfMemory { .. }) => {}
                    Err(e) => panic!("{e}"),
                }
            }
        });
        thread::sleep(Duration::from_millis(30));
        a.free_blocking(held.pop().unwrap()).unwrap();
        waiter.join().unwrap();
    });
    assert!(read(&b, &wanted) == [2; PAGE]);
    drop((a, b));
    node.check_whole(4);
}

/// Clients on a nearly empty pool: each owner reads back its own page completely.
pub fn page_has_one_owner_at_a_time(setup: &Setup) {
    const CLIENTS: u8 = 3;
    const ROUNDS: u32 = 300;
    let node = start(setup, 4);
    let empty = AtomicU64::new(0);
    thread::scope(|s| {
        for client in 1..=CLIENTS {
            let (node, empty) = (&node, &empty);
            s.spawn(move || {
                let pool = node.connect();
                let mut held: Vec<(Grant, u8)> = Vec::new();
                for round in 0..ROUNDS {
                    let mark = client << 6 | (round % 61) as u8;
                    let grant = pool.allocate_blocking().unwrap();
                    assert!(read(&pool, &grant) == [0; PAGE]);
                    match pool.write_blocking(&grant, 0, &[mark; PAGE]) {
                        Ok(()) => held.push((grant, mark)),
                        Err(Error::OutOfMemory { .. }) => {
                            empty.fetch_add(1, Ordering::Relaxed);
                            pool.free_blocking(grant).unwrap();
                        }
                        Err(e) => panic!("{e}"),
                    }
                    if held.len() == 2 || round % 3 == 0 {
                        for (grant, mark) in held.drain(..) {
                            assert!(
                                read(&pool, &grant) == [mark; PAGE],
                                "the page of another owner"
                            );
                            pool.free_blocking(grant).unwrap();
                        }
                    }
                }
            });
        }
    });
    node.check_whole(4);
}

pub fn abandoned_page_requests_have_no_side_effect(setup: &Setup) {
    use std::future::Future;
    let node = start(setup, 8);
    let pool = node.connect();
    let cx = &mut std::task::Context::from_waker(std::task::Waker::noop());
    let (kept, lost) = (pool.allocate_blocking().unwrap(), pool.allocate_blocking().unwrap());
    for round in 0..50u8 {
        let _ = std::pin::pin!(pool.write(&lost, 0, &[round; PAGE])).poll(cx);
        let _ = std::pin::pin!(pool.read(&lost, 0, &mut [0; PAGE])).poll(cx);
        pool.write_blocking(&kept, 0, &[round; PAGE]).unwrap();
        assert!(read(&pool, &kept) == [round; PAGE]);
    }
    drop(pool);
    node.check_whole(8);
}

pub fn departure_returns_all_chunks(setup: &Setup) {
    let node = start(setup, 32);
    for _ in 0..3 {
        let pool = node.connect();
        for _ in 0..32 {
            let grant = pool.allocate_blocking().unwrap();
            pool.write_blocking(&grant, 0, &[0xaa; PAGE]).unwrap();
        }
        assert_eq!(free(&pool), 0);
        drop(pool);
        node.check_whole(32);
    }
}

pub fn access_that_is_not_a_whole_page_is_refused(setup: &Setup) {
    let node = start(setup, 4);
    let pool = node.connect();
    assert_eq!(pool.first_chunk(), None, "a page has no place of its own");
    let grant = pool.allocate_blocking().unwrap();
    pool.write_blocking(&grant, 0, &[3; PAGE]).unwrap();
    let buffer = pool.buffer(PAGE).unwrap();
    let whole = Transfer { grant: &grant, offset: 0, buffer_offset: 0, len: PAGE as u32 };
    for result in [
        pool.read_blocking(&grant, 0, &mut [0; 100]),
        pool.read_blocking(&grant, 8, &mut [0; 100]),
        pool.write_blocking(&grant, 4000, &[0; 96]),
        pool.fetch_and_add_blocking(&grant, 0, 1).map(drop),
        pool.read_into(&whole, &buffer, Lane(0)).map(drop),
        pool.write_batch_blocking(&[whole], &buffer, Lane(0)),
        pool.run_blocking(Lane(0), &mut [Step::WriteFrom(whole, &buffer)]),
        pool.run_blocking(
            Lane(0),
            &mut [Step::Read { grant: &grant, offset: 0, into: &mut [0; PAGE] }],
        ),
    ] {
        assert!(matches!(result, Err(Error::Setting { .. })), "{result:?}");
    }
    assert!(read(&pool, &grant) == [3; PAGE]);
    drop(pool);
    node.check_whole(4);
}

/// Operations in flight and later ones all end with [`Error::Gone`].
pub fn operations_end_when_the_node_dies(how: How) {
    let mut node = start(&Setup { how, place: Place::OtherProcess }, 4);
    let pool = node.connect();
    let grant = pool.allocate_blocking().unwrap();
    pool.write_blocking(&grant, 0, &[1; PAGE]).unwrap();
    thread::scope(|s| {
        let pool = &pool;
        let workers = [true, false].map(|writes| {
            s.spawn(move || {
                loop {
                    let result = match writes {
                        true => pool.write_blocking(&grant, 0, &[2; PAGE]),
                        false => pool.read_blocking(&grant, 0, &mut [0; PAGE]),
                    };
                    if let Err(e) = result {
                        return (Instant::now(), e);
                    }
                }
            })
        });
        thread::sleep(Duration::from_millis(50));
        let Node::OtherProcess(server) = &mut node else { unreachable!() };
        server.kill();
        let killed = Instant::now();
        for worker in workers {
            let (when, error) = worker.join().unwrap();
            assert!(matches!(error, Error::Gone { .. }), "{error}");
            let late = when.saturating_duration_since(killed);
            assert!(late < Duration::from_secs(1), "noticed after {late:?}: {error}");
        }
    });
    assert!(matches!(pool.free_blocking(grant), Err(Error::Gone { .. })));
}
