//! Tests of `Pool::poll` and `Pool::park` over each NIC: an event loop needs no other thread.

mod common;

use std::process::Command;
use std::time::Duration;

use common::{CHUNK, settings};
use pool::{Endpoint, Lane, Listen, MultiPool, Options, Placement, Pool, Service, Step, schemes};
use rustix::thread::{CpuSet, sched_setaffinity};
use verbs::executor::{Tasks, park, thread_waker};

fn one_group() -> Options {
    Options { groups: Some(1), ..Options::default() }
}

/// Pools over the inline NIC, shared memory and RoCEv2, and what serves them.
fn pools() -> (Vec<Pool>, Service) {
    let listen = Listen::to_all("127.0.0.1:0".parse().unwrap());
    let settings = settings(schemes::ONESIDEDMW, 8);
    let service = Service::start_with(&settings, &Endpoint::Fresh, Some(&listen)).unwrap();
    let remote = pool::Remote { to: service.address().unwrap().into(), token: None, nic: None };
    let pools = vec![
        Pool::embedded(settings).unwrap(),
        Pool::connect(service.path(), one_group()).unwrap(),
        Pool::connect_remote(&remote, one_group()).unwrap(),
    ];
    (pools, service)
}

/// True if a driver thread of a completer runs in this process.
fn has_driver_thread() -> bool {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("comm"));
    threads.filter_map(|thread| name(thread.ok()?).ok()).any(|name| name.trim() == "granary-cq")
}

/// Runs 32 tasks, each with ordered lists and single operations, on this thread.
fn run_tasks(pool: &Pool) {
    let grant = &pool.allocate_blocking().unwrap();
    let mut tasks = Tasks::new(thread_waker());
    for task in 0..32u64 {
        tasks.spawn(async move {
            for round in 0..50u64 {
                let (offset, mark) = (64 + task * 64, (task << 8 | round).to_be_bytes());
                let (mut old, mut back) = (0, [0; 8]);
                let mut steps = [
                    Step::Write { grant, offset, from: &mark },
                    Step::FetchAndAdd { grant, offset: 0, add: 1, old: &mut old },
                ];
                pool.run(Lane(0), &mut steps).await.unwrap();
                pool.read(grant, offset, &mut back).await.unwrap();
                assert_eq!(back, mark);
            }
        });
    }
    let mut completions = 0;
    loop {
        completions += pool.poll();
        tasks.run(|_, ()| ());
        if tasks.is_empty() {
            break;
        }
        completions += tasks.sleep(|| pool.park(Duration::from_secs(10))).unwrap_or(0);
    }
    assert!(completions <= 32 * 50 * 2, "one completion for each list and each read");
    assert_eq!(pool.fetch_and_add_blocking(grant, 0, 0).unwrap(), 32 * 50);
    assert!(!has_driver_thread());
    pool.free_blocking(*grant).unwrap();
}

fn run_everything() {
    let (pools, _service) = pools();
    pools.iter().for_each(run_tasks);
    // A waker of another thread, called during the sleep or before.
    let waker = thread_waker();
    for pool in &pools {
        for delay in [0, 20] {
            let waker = waker.clone();
            let other = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(delay));
                waker.wake();
            });
            while pool.park(Duration::MAX) > 0 {}
            other.join().unwrap();
        }
        while pool.park(Duration::from_millis(2)) > 0 {}
        assert_eq!(pool.park(Duration::ZERO), 0);
    }
    while park(Duration::from_millis(1), || 0) > 0 {}
    run_over_several_nodes(pools);
}

/// Tasks over several memory nodes, so that the loop waits for several CQs.
fn run_over_several_nodes(pools: Vec<Pool>) {
    let pools = &MultiPool::over(pools, Placement::RoundRobin).unwrap();
    let mut tasks = Tasks::new(thread_waker());
    for task in 0..6u8 {
        tasks.spawn(async move {
            let placed = pools.allocate().await.unwrap();
            for round in 0..50 {
                let mut back = [0; CHUNK as usize];
                pools.write(&placed, 0, &[task ^ round; CHUNK as usize]).await.unwrap();
                pools.read(&placed, 0, &mut back).await.unwrap();
                assert_eq!(back, [task ^ round; CHUNK as usize]);
            }
            pools.free(placed).await.unwrap();
        });
    }
    loop {
        pools.poll();
        tasks.run(|_, ()| ());
        if tasks.is_empty() {
            break;
        }
        tasks.sleep(|| pools.park(Duration::from_secs(10)));
    }
}

const CHILD: &str = "GRANARY_TEST_ONE_CORE";

/// In a process of its own each time, because driver threads of other tests would be seen, and
/// because a process counts its CPUs once.
#[test]
fn event_loop_runs_on_all_cores_and_on_one() {
    if let Some(is_one) = std::env::var_os(CHILD) {
        if is_one == "1" {
            let mut first = CpuSet::new();
            first.set(0);
            sched_setaffinity(None, &first).unwrap();
        }
        return run_everything();
    }
    for is_one in ["0", "1"] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "event_loop_runs_on_all_cores_and_on_one"]).env(CHILD, is_one);
        assert!(child.status().unwrap().success(), "one core: {is_one}");
    }
}
