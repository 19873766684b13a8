//! Checks of event loops: tasks on one thread, which polls and parks.

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pool::{Error, GroupId, Lane, Pool, Step};
use verbs::executor::{Tasks, thread_waker};

use crate::Setup;
use crate::place::{How, Node, Place};

/// Runs tasks to their end on this thread, and returns their results.
fn run_all<F: Future>(pool: &Pool, tasks: &mut Tasks<F>) -> Vec<F::Output> {
    let mut results = Vec::new();
    loop {
        pool.poll();
        tasks.run(|_, result| results.push(result));
        if tasks.is_empty() {
            return results;
        }
        tasks.sleep(|| pool.park(Duration::from_secs(10)));
    }
}

/// Tasks allocate, run ordered lists, and free; each group is used by one task of two.
pub fn tasks_allocate_use_and_free(setup: &Setup) {
    const TASKS: u64 = 8;
    // More than are in quarantine at a time.
    const CHUNKS: u64 = 256;
    let node = setup.node_of(4096, CHUNKS);
    let pool = node.connect();
    let mut tasks = Tasks::new(thread_waker());
    for task in 0..TASKS {
        let pool = &pool;
        tasks.spawn(async move {
            for round in 0..20u64 {
                let grant = &pool.allocate_in(GroupId((task % 2) as u16)).await?;
                let mark = (task << 32 | round).to_be_bytes();
                let (mut old, mut back) = (1, [0; 8]);
                let mut steps = [
                    Step::Write { grant, offset: 0, from: &mark },
                    Step::FetchAndAdd { grant, offset: 0, add: 1, old: &mut old },
                    Step::Read { grant, offset: 0, into: &mut back },
                ];
                pool.run(Lane(0), &mut steps).await?;
                assert_eq!(old.to_be_bytes(), mark);
                assert_eq!(u64::from_be_bytes(back), old + 1);
                pool.free(*grant).await?;
            }
            Ok::<_, Error>(task)
        });
    }
    let mut ended: Vec<_> = run_all(&pool, &mut tasks).into_iter().map(Result::unwrap).collect();
    ended.sort_unstable();
    assert_eq!(ended, Vec::from_iter(0..TASKS));
    drop(tasks);
    drop(pool);
    node.check_whole(CHUNKS);
}

/// Two loops wait for completions of the same QPs: each polls completions of the other.
pub fn loops_of_two_threads_share_a_group(setup: &Setup) {
    const TASKS: u64 = 5;
    const ROUNDS: u64 = 200;
    let node = setup.node_of(4096, 2);
    let pool = &node.connect();
    let grant = &pool.allocate_in_blocking(GroupId(0)).unwrap();
    pool.write_blocking(grant, 0, &[0; 8]).unwrap();
    let seen = &AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(move || {
                let mut tasks = Tasks::new(thread_waker());
                for _ in 0..TASKS {
                    tasks.spawn(async move {
                        for _ in 0..ROUNDS {
                            let old = pool.fetch_and_add(grant, 0, 1).await?;
                            seen.fetch_add(old, Ordering::Relaxed);
                        }
                        Ok::<_, Error>(())
                    });
                }
                run_all(pool, &mut tasks).into_iter().for_each(Result::unwrap);
            });
        }
    });
    let total = 2 * TASKS * ROUNDS;
    assert_eq!(pool.fetch_and_add_blocking(grant, 0, 0).unwrap(), total);
    let sum: u64 = (0..total).sum();
    assert_eq!(seen.load(Ordering::Relaxed), sum, "each old value exactly once");
    pool.free_blocking(*grant).unwrap();
}

/// A loop that waits for a memory node notices its end.
pub fn tasks_end_when_the_node_dies(how: How) {
    let mut node = Node::start(Place::OtherProcess, how, 4096, 4);
    let pool = node.connect();
    let grant = &pool.allocate_blocking().unwrap();
    let mut tasks = Tasks::new(thread_waker());
    for lane in [Lane(0), Lane(1), Lane(0)] {
        let pool = &pool;
        tasks.spawn(async move {
            loop {
                let mut into = [0; 64];
                let mut steps = [Step::Read { grant, offset: 0, into: &mut into }];
                if let Err(e) = pool.run(lane, &mut steps).await {
                    return e;
                }
            }
        });
    }
    for _ in 0..100 {
        pool.park(Duration::from_millis(1));
        tasks.run(|_, e| panic!("{e}"));
    }
    let Node::OtherProcess(server) = &mut node else { unreachable!() };
    server.kill();
    for error in run_all(&pool, &mut tasks) {
        assert!(matches!(error, Error::Gone { .. }), "{error}");
    }
}
