//! A memory node and compute nodes run the pool's code in virtual time.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pool::{DomainToken, Lane, LeaseTerms, Options, Others, Scheme, Settings, Step, schemes};
use scheme::info::AccessKind;
use scheme::{GroupId, NodeScheme};
use sim::{Clock, Cluster, ClusterSpec, NodeId, Params, Time, VerbStall, fiber};
use verbs::executor::Tasks;
use verbs::{CompletionQueue, CqAttr, Nic};

fn finemem<'a>(
    scheme: &'a mut (dyn NodeScheme + 'static),
) -> &'a mut schemes::finemem::Node<sim::SimNic> {
    let any: &mut dyn std::any::Any = scheme;
    any.downcast_mut().expect("it is finemem")
}

fn spec(scheme: Scheme, clients: u32, cores: u32) -> ClusterSpec {
    let settings = Settings {
        donate_bytes: 4 << 20,
        chunk_bytes: 4096,
        group_size: 2,
        credits: 2,
        groups_max: 1,
        clients_max: clients,
        scheme,
        ..Settings::default()
    };
    let settings = if cores > 1 { settings.with("cores", cores) } else { settings };
    ClusterSpec {
        params: Arc::new(Params::connectx5()),
        seed: 1,
        shuffled: false,
        compute_nodes: 1,
        memory_nodes: 1,
        settings,
    }
}

/// Returns the mean latencies of allocate, read and free of `clients` that loop, in virtual
/// microseconds, and the trace if requested.
fn loop_of(
    scheme: Scheme,
    clients: u32,
    cores: u32,
    rounds: u32,
    trace: bool,
) -> ([f64; 3], String) {
    loop_in(&spec(scheme, clients, cores), clients, rounds, trace)
}

/// The same in a cluster of this form.
fn loop_in(spec: &ClusterSpec, clients: u32, rounds: u32, trace: bool) -> ([f64; 3], String) {
    let scheme = spec.settings.scheme;
    let mut cluster = Cluster::new(spec).expect("a cluster");
    let options = Options { groups: Some(1), ..Options::default() };
    let processes: Vec<_> = (0..clients)
        .map(|_| cluster.connect(NodeId(1), options.clone()).expect("a process"))
        .collect();
    cluster.start();
    if trace {
        cluster.sim.start_trace();
    }
    let sums = Arc::new(Mutex::new([Time::ZERO; 3]));
    let fibers: Vec<_> = processes
        .iter()
        .enumerate()
        .map(|(i, p)| {
            let (pool, hooks, sums) = (p.pool.clone(), p.hooks.clone(), sums.clone());
            cluster.sim.spawn(format!("client {i}"), Time::us(1), move || {
                let mut page = vec![0; 4096];
                for _ in 0..rounds {
                    let start = hooks.now();
                    let grant = fiber::block_on(pool.allocate_in(GroupId(0))).expect("a chunk");
                    let granted = hooks.now();
                    fiber::block_on(pool.read(&grant, 0, &mut page)).expect("it is readable");
                    // The published schemes do not clear.
                    assert!(!scheme.clears() || page.iter().all(|b| *b == 0), "old contents");
                    let read = hooks.now();
                    fiber::block_on(pool.write(&grant, 0, &[7; 4096])).expect("it is writable");
                    let written = hooks.now();
                    fiber::block_on(pool.free(grant)).expect("it is freed");
                    let freed = hooks.now();
                    let mut sums = sums.lock();
                    sums[0] += granted.since(start);
                    sums[1] += read.since(granted);
                    sums[2] += freed.since(written);
                }
            })
        })
        .collect();
    cluster.sim.run_to_end(&fibers).expect("they end");
    assert_eq!(cluster.failure(), None);
    cluster.with_scheme(|s| s.audit().expect("a consistent pool")).expect("the CPU becomes idle");
    let all = (clients * rounds) as f64;
    let trace = cluster.sim.take_trace();
    let sums = *sums.lock();
    (sums.map(|s| s.as_us() / all), trace)
}

#[test]
fn clients_allocate_read_and_free_in_virtual_time() {
    for scheme in schemes::ALL.iter().chain(schemes::NONCONFORMING).copied() {
        let (one, _) = loop_of(scheme, 1, 1, 50, false);
        let (many, _) = loop_of(scheme, 24, 1, 50, false);
        println!("{scheme}: 1 client {one:.3?} us, 24 clients {many:.3?} us");
        // An allocation alone may be faster beside frees that are slower.
        let all = |times: &[f64; 3]| times.iter().sum::<f64>();
        assert!(all(&one) <= all(&many), "more clients must not be faster");
        // A scheme with access by pages assigns a page number without a request.
        let asks = scheme.access != AccessKind::Pages;
        assert!((!asks || one[0] > 2.0) && many[0] < 1000.0, "{one:?} {many:?}");
    }
}

/// Permissions that three compute nodes acquire, extend, use and revoke; `patronus-paper` and
/// `unprotected` run on the same cluster. Returns the mean latency of an acquisition and of an
/// extension, in virtual microseconds.
fn lifecycles(scheme: Scheme) -> [f64; 2] {
    const CLIENTS: u32 = 12;
    const ROUNDS: u32 = 50;
    let mut spec = spec(scheme, CLIENTS, 4);
    (spec.compute_nodes, spec.settings.credits) = (3, 4);
    let mut cluster = Cluster::new(&spec).expect("a cluster");
    let domain = Some(DomainToken([1; 32]));
    let options = Options { groups: Some(1), domain, ..Options::default() };
    let processes: Vec<_> = (0..CLIENTS)
        .map(|i| cluster.connect(NodeId(1 + (i % 3) as u16), options.clone()).expect("a process"))
        .collect();
    cluster.start();
    let sums = Arc::new(Mutex::new([Time::ZERO; 2]));
    let fibers: Vec<_> = processes
        .iter()
        .map(|process| {
            let (pool, hooks, sums) = (process.pool.clone(), process.hooks.clone(), sums.clone());
            cluster.sim.spawn("client", Time::us(1), move || {
                let lease = Duration::from_millis(1);
                let terms = LeaseTerms::shared_write(lease);
                let allocated = fiber::block_on(pool.allocate_object(64, Others::Own, &terms));
                let (object, first) = allocated.expect("an object");
                fiber::block_on(pool.revoke(&first)).expect("it is revoked");
                for round in 1..=ROUNDS {
                    let start = hooks.now();
                    let held = fiber::block_on(pool.acquire(&object, &terms)).expect("a holder");
                    let acquired = hooks.now();
                    fiber::block_on(pool.extend(&held, 2 * lease)).expect("it is extended");
                    let extended = hooks.now();
                    let added = fiber::block_on(pool.fetch_and_add(&held, 0, 1));
                    assert_eq!(added.expect("it is writable"), u64::from(round - 1));
                    fiber::block_on(pool.revoke(&held)).expect("it is revoked");
                    let mut sums = sums.lock();
                    sums[0] += acquired.since(start);
                    sums[1] += extended.since(acquired);
                }
                fiber::block_on(pool.free_object(&object)).expect("it is freed");
            })
        })
        .collect();
    cluster.sim.run_to_end(&fibers).expect("they end");
    assert_eq!(cluster.failure(), None);
    cluster.with_scheme(|s| s.audit().expect("a consistent pool")).expect("the CPU becomes idle");
    let sums = *sums.lock();
    sums.map(|sum| sum.as_us() / f64::from(CLIENTS * ROUNDS))
}

#[test]
fn schemes_with_leases_run_in_virtual_time() {
    let [ours, published, unprotected] =
        [schemes::PATRONUS, schemes::PATRONUS_PAPER, schemes::UNPROTECTED].map(lifecycles);
    println!("patronus {ours:.2?} us, patronus-paper {published:.2?}, unprotected {unprotected:?}");
    assert!(ours.iter().chain(&published).all(|us| *us > 1.0), "{ours:?} {published:?}");
    assert_eq!(unprotected, [0.0; 2], "an acquisition is a call of a function");
}

/// Allocations per second of clients that only allocate, and the median latency in microseconds.
fn allocation_rate(scheme: Scheme, clients: u32) -> (f64, f64) {
    const ROUNDS: usize = 100;
    let mut spec = spec(scheme, clients, 1);
    spec.settings.donate_bytes = 64 << 20;
    let mut cluster = Cluster::new(&spec).expect("a cluster");
    let options = Options { groups: Some(1), ..Options::default() };
    let processes: Vec<_> = (0..clients)
        .map(|_| cluster.connect(NodeId(1), options.clone()).expect("a process"))
        .collect();
    cluster.start();
    let begin = Time::us(1);
    let times = Arc::new(Mutex::new(Vec::new()));
    let fibers: Vec<_> = processes
        .iter()
        .map(|process| {
            let (pool, hooks, times) = (process.pool.clone(), process.hooks.clone(), times.clone());
            cluster.sim.spawn("client", begin, move || {
                let mut grants = Vec::new();
                for _ in 0..ROUNDS {
                    let start = hooks.now();
                    grants.push(fiber::block_on(pool.allocate_in(GroupId(0))).expect("a chunk"));
                    times.lock().push((hooks.now(), hooks.now().since(start).as_us()));
                }
            })
        })
        .collect();
    cluster.sim.run_to_end(&fibers).expect("they end");
    let mut times = times.lock().clone();
    let end = times.iter().map(|(end, _)| *end).max().expect("allocations");
    times.sort_by(|(_, a), (_, b)| a.total_cmp(b));
    (times.len() as f64 * 1e6 / end.since(begin).as_us(), times[times.len() / 2].1)
}

/// The chain of figure 5 has 10 WQEs, the chain that re-arms itself 16.
#[test]
fn published_chain_allocates_faster_than_one_that_rearms_itself() {
    for clients in [1, 24, 128] {
        let [ours, paper] = [schemes::ONESIDEDMW, schemes::ONESIDEDMW_PAPER].map(|scheme| {
            let (rate, median) = allocation_rate(scheme, clients);
            println!("{scheme}, {clients} clients: {rate:.0} allocations/s, median {median:.1} us");
            rate
        });
        assert!((1.2..2.0).contains(&(paper / ours)), "{clients}: {paper} and {ours}");
    }
}

/// Event loops of several compute nodes, in virtual time: tasks run ordered lists and allocate, and
/// the loop sleeps on all CQs.
#[test]
fn event_loops_run_ordered_lists_in_virtual_time() {
    let mut spec = spec(schemes::ONESIDEDMW, 3, 1);
    spec.settings.groups_max = 2;
    let mut cluster = Cluster::new(&spec).expect("a cluster");
    let options = Options { groups: Some(2), ..Options::default() };
    let processes: Vec<_> =
        (0..3).map(|_| cluster.connect(NodeId(1), options.clone()).expect("a process")).collect();
    cluster.start();
    let program = |process: &sim::Process| {
        let (pool, hooks) = (process.pool.clone(), process.hooks.clone());
        move || {
            let mut tasks = Tasks::new(fiber::waker());
            for task in 0..4u16 {
                let (pool, hooks) = (&pool, &hooks);
                tasks.spawn(async move {
                    let grant = &pool.allocate_in(GroupId(task % 2)).await.expect("a chunk");
                    for round in 0..10u64 {
                        let (mut old, mut back) = (0, [0; 8]);
                        let mut steps = [
                            Step::Write { grant, offset: 8, from: &round.to_be_bytes() },
                            Step::FetchAndAdd { grant, offset: 0, add: 1, old: &mut old },
                            Step::Read { grant, offset: 8, into: &mut back },
                        ];
                        let start = hooks.now();
                        pool.run(Lane(0), &mut steps).await.expect("a list");
                        let took = hooks.now().since(start);
                        assert_eq!((old, u64::from_be_bytes(back)), (round, round));
                        assert!(Time::us(2) < took && took < Time::us(20), "{took:?}");
                    }
                    pool.free(*grant).await.expect("it is freed");
                });
            }
            loop {
                tasks.run(|_, ()| ());
                if tasks.is_empty() {
                    break;
                }
                tasks.sleep(|| pool.park(Duration::from_millis(1)));
            }
        }
    };
    let fibers: Vec<_> = processes
        .iter()
        .map(|p| cluster.sim.spawn("loop".to_string(), Time::us(1), program(p)))
        .collect();
    cluster.sim.run_to_end(&fibers).expect("they end");
    assert_eq!(cluster.failure(), None);
}

/// Several cores of the memory node serve many clients faster than one core.
#[test]
fn more_cores_serve_requests_in_parallel() {
    for scheme in [schemes::RPC_MW_1, schemes::RPC_MW_2] {
        let (one, _) = loop_of(scheme, 12, 1, 30, false);
        let (many, _) = loop_of(scheme, 12, 12, 30, false);
        println!("{scheme}: 12 clients, 1 core {one:.3?} us, 12 cores {many:.3?} us");
        assert!(2.0 * many[0] < one[0], "{one:?} {many:?}");
    }
}

/// Cores that share a lock serve requests at most at the rate of the lock, and one core never waits
/// for its own lock.
#[test]
fn cores_wait_for_the_lock_that_they_share() {
    let clients = 12;
    let taken_us = |cores, lock_ns| {
        let params = Params::connectx5().with("node_cpu.lock", lock_ns).expect("a parameter");
        let spec =
            ClusterSpec { params: Arc::new(params), ..spec(schemes::RPC_MW_2, clients, cores) };
        let ([allocate, _, free], _) = loop_in(&spec, clients, 30, false);
        allocate + free
    };
    let (without, with) = (taken_us(clients, 0.0), taken_us(clients, 5_000.0));
    println!("12 cores, an allocation and its free: {without:.1} us, with a lock {with:.1} us");
    // Each client waits for the two requests of all clients, but for its READ and its WRITE.
    assert!(without < 40.0 && with > 100.0, "{without} {with}");
    assert_eq!(taken_us(1, 0.0), taken_us(1, 5_000.0));
}

/// Several memory nodes have separate CPUs, NICs and pools. A compute node that is connected to all
/// of them is served by each independently, and gets different memory from each.
#[test]
fn memory_nodes_serve_side_by_side() {
    /// Returns the microseconds that `clients` take to allocate 30 chunks each, alternating over
    /// the memory nodes, and to free them.
    fn time(scheme: Scheme, memory_nodes: u16, clients: u32) -> f64 {
        let spec = ClusterSpec { memory_nodes, ..spec(scheme, clients, 1) };
        let mut cluster = Cluster::new(&spec).expect("a cluster");
        let options = Options { groups: Some(1), ..Options::default() };
        let connect = |_| cluster.connect_to_all(NodeId(1), options.clone()).expect("a process");
        let all: Vec<Vec<_>> = (0..clients).map(connect).collect();
        cluster.start();
        let began = cluster.sim.now();
        let program = |processes: &Vec<sim::Process>| {
            let pools: Vec<_> = processes.iter().map(|p| p.pool.clone()).collect();
            move || {
                let mut held = Vec::new();
                for (round, pool) in (0u8..30).zip(pools.iter().cycle()) {
                    let grant = fiber::block_on(pool.allocate_in(GroupId(0))).expect("a chunk");
                    fiber::block_on(pool.write(&grant, 0, &[round; 64])).expect("it is writable");
                    held.push((pool, grant));
                }
                for (round, (pool, grant)) in (0u8..).zip(held) {
                    let mut bytes = [0; 64];
                    fiber::block_on(pool.read(&grant, 0, &mut bytes)).expect("it is readable");
                    assert_eq!(bytes, [round; 64]);
                    fiber::block_on(pool.free(grant)).expect("it is freed");
                }
            }
        };
        let fibers: Vec<_> =
            all.iter().map(|p| cluster.sim.spawn("client", Time::us(1), program(p))).collect();
        cluster.sim.run_to_end(&fibers).expect("they end");
        assert_eq!(cluster.failure(), None);
        cluster.sim.now().since(began).as_us()
    }
    for scheme in [schemes::FINEMEM, schemes::PREMMAP_ONESIDED, schemes::PREMMAP_RPC] {
        let (one, three) = (time(scheme, 1, 24), time(scheme, 3, 24));
        println!("{scheme}: 24 clients, 1 memory node {one:.1} us, 3 memory nodes {three:.1} us");
        assert!(three < one, "{scheme}: {one} and {three}");
    }
    // The scheme waits for the memory node's CPU, of which three memory nodes have three.
    let (one, three) = (time(schemes::PREMMAP_RPC, 1, 24), time(schemes::PREMMAP_RPC, 3, 24));
    assert!(2.0 * three < one, "{one} and {three}");
}

/// Every client eventually gets a large block, although blocks leave quarantine at the same time
/// and faster clients take them first. The pool has twice as many blocks as the clients hold.
#[test]
fn slow_client_eventually_gets_a_large_block() {
    const HELD: u32 = 2;
    const BLOCK: u64 = 2 << 20;
    let clients = 32;
    let mut spec = spec(schemes::FINEMEM, clients, 1);
    spec.settings.donate_bytes = 2 * u64::from(clients * HELD) * BLOCK;
    let mut cluster = Cluster::new(&spec).expect("a cluster");
    let options = Options { groups: Some(1), ..Options::default() };
    let connect = |_| cluster.connect(NodeId(1), options.clone()).expect("a process");
    let processes: Vec<_> = (0..clients).map(connect).collect();
    cluster.start();
    let program = |process: &sim::Process| {
        let pool = process.pool.clone();
        move || {
            let mut held = std::collections::VecDeque::new();
            for round in 0..40 {
                if held.len() as u32 == HELD {
                    fiber::block_on(pool.free(held.pop_front().unwrap())).expect("it is freed");
                }
                let grant = fiber::block_on(pool.allocate_bytes_in(GroupId(0), BLOCK));
                held.push_back(grant.unwrap_or_else(|e| panic!("round {round}: {e}")));
            }
        }
    };
    let fibers: Vec<_> =
        processes.iter().map(|p| cluster.sim.spawn("client", Time::us(1), program(p))).collect();
    cluster.sim.run_to_end(&fibers).expect("they end");
    assert_eq!(cluster.failure(), None);
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let first = loop_of(schemes::ONESIDEDMW, 3, 1, 4, true).1;
    let second = loop_of(schemes::ONESIDEDMW, 3, 1, 4, true).1;
    assert!(first.lines().count() > 200, "{first}");
    assert_eq!(first, second);
}

/// The blocks of a departed client are reclaimed even if the memory node's background work is
/// aborted after any one step, and so are those of a second client that dies at the abort. The
/// third client keeps its blocks.
#[test]
fn recovery_completes_after_abort_in_any_step() {
    let orders = [0u32, 3, 5, 9, 10];
    let mut steps = 0;
    loop {
        steps += 1;
        let mut spec = spec(schemes::FINEMEM, 4, 1);
        spec.settings.donate_bytes = 6144 * 512;
        spec.settings.chunk_bytes = 512;
        let mut cluster = Cluster::new(&spec).expect("a cluster");
        let options = Options { groups: Some(1), ..Options::default() };
        let processes: Vec<_> = (0..3)
            .map(|_| cluster.connect(NodeId(1), options.clone()).expect("a process"))
            .collect();
        cluster.start();
        let fibers: Vec<_> = processes
            .iter()
            .enumerate()
            .map(|(i, p)| {
                let pool = p.pool.clone();
                cluster.sim.spawn(format!("client {i}"), Time::us(1), move || {
                    // The other clients have chunks between those of the first; one freed block is
                    // in quarantine.
                    let some = if i == 0 { &orders } else { &orders[..2] };
                    for order in some {
                        let block = pool.allocate_bytes_in(GroupId(0), 512 << order);
                        fiber::block_on(block).expect("a block");
                    }
                    if i == 0 {
                        let freed = fiber::block_on(pool.allocate_bytes_in(GroupId(0), 512 << 4));
                        fiber::block_on(pool.free(freed.expect("a block"))).expect("it is freed");
                    }
                    // The clients stay connected.
                    fiber::block_on(std::future::pending::<()>());
                })
            })
            .collect();
        let settled = cluster.sim.now() + Time::us(1500);
        cluster.sim.run_until(|sim| sim.now() >= settled).expect("they allocate");
        let arm = |cluster: &mut Cluster| {
            cluster.with_scheme(|scheme| finemem(scheme).abort_after(steps)).expect("a turn ends");
        };
        let broken = |cluster: &mut Cluster| {
            cluster.with_scheme(|scheme| finemem(scheme).aborts()).expect("a turn ends")
        };
        arm(&mut cluster);
        cluster.crash(fibers[0], &processes[0].function, processes[0].client);
        let (first, second) = (processes[0].client, processes[1].client);
        let by = cluster.sim.now() + Time::us(200_000);
        let mut second_died = false;
        while !cluster.with_scheme(|s| s.is_retired(first)).expect("a turn ends")
            || second_died && !cluster.with_scheme(|s| s.is_retired(second)).expect("a turn ends")
        {
            assert!(cluster.sim.now() < by, "no recovery after an abort in step {steps}");
            cluster.sim.step();
            if !second_died && broken(&mut cluster) == 1 {
                second_died = true;
                cluster.crash(fibers[1], &processes[1].function, second);
            }
        }
        assert_eq!(cluster.failure(), None);
        let (audit, status) =
            cluster.with_scheme(|s| (s.audit(), s.status())).expect("a turn ends");
        audit.unwrap_or_else(|e| panic!("aborted in step {steps}: {e}"));
        let status = status.expect("a status");
        let left = if second_died { 9 } else { 18 };
        assert_eq!(status.free, status.chunks - left, "aborted in step {steps}");
        if !second_died {
            println!("a recovery has {} steps", steps - 1);
            break;
        }
    }
    assert!(steps > 30);
}

/// A program reads the clock of its node. Timers, and the work of the NIC, use virtual time.
#[test]
fn each_node_has_a_clock_of_its_own() {
    let hour = Time::us(3_600_000_000);
    let read_clock = |clock: Clock| {
        let mut cluster = Cluster::new(&spec(schemes::RPC_MW_2, 1, 1)).expect("a cluster");
        let process = cluster.connect(NodeId(1), Options::default()).expect("a process");
        cluster.start();
        cluster.sim.set_clock(NodeId(1), clock);
        let shown = Arc::new(Mutex::new((Time::ZERO, Duration::ZERO)));
        let (from, all) = (cluster.sim.now(), shown.clone());
        let fiber = cluster.sim.spawn("client", Time::ZERO, move || {
            let nic = process.pool.nic();
            let before = nic.now();
            fiber::sleep(Time::us(100));
            let grant = fiber::block_on(process.pool.allocate()).expect("a chunk");
            fiber::block_on(process.pool.free(grant)).expect("it is freed");
            *all.lock() = (process.hooks.now(), nic.now() - before);
        });
        cluster.sim.run_to_end(&[fiber]).expect("it ends");
        let (end, shown) = *shown.lock();
        (end.since(from), shown.as_nanos() as f64)
    };
    let (took, shown) = read_clock(Clock::default());
    assert!(took > Time::us(105), "{took}");
    assert!((shown - took.as_ns() as f64).abs() <= 1.0);
    for (drift, rate) in [(10_000, 1.01), (-10_000, 0.99)] {
        let (same, shown) = read_clock(Clock::new(drift, hour));
        assert_eq!(same, took, "a clock changes no event");
        assert!((shown - rate * took.as_ns() as f64).abs() <= 2.0, "{shown} ns in {took}");
    }
}

/// A stall at a verb begins between two verbs of a program that does not wait there, and stops the
/// clock of the node in one of its two forms.
#[test]
fn fiber_stands_still_at_a_verb() {
    let allocate = |stall: Option<VerbStall>| {
        let mut cluster = Cluster::new(&spec(schemes::RPC_MW_2, 1, 1)).expect("a cluster");
        let process = cluster.connect(NodeId(1), Options::default()).expect("a process");
        cluster.start();
        let times = Arc::new(Mutex::new((Time::ZERO, Duration::ZERO)));
        let ends = times.clone();
        let fiber = cluster.sim.spawn("client", Time::us(1), move || {
            let (nic, from) = (process.pool.nic(), process.hooks.now());
            let before = nic.now();
            fiber::block_on(process.pool.allocate()).expect("a chunk");
            *ends.lock() = (process.hooks.now().since(from), nic.now() - before);
        });
        if let Some(stall) = stall {
            cluster.sim.stall_at_verb(fiber, stall);
        }
        cluster.sim.run_to_end(&[fiber]).expect("it ends");
        *times.lock()
    };
    let (usual, _) = allocate(None);
    assert!(usual < Time::us(50), "{usual}");
    let time = Time::us(300);
    for passes in 0..4 {
        for stops_clock in [false, true] {
            let (took, shown) = allocate(Some(VerbStall { passes, time, stops_clock }));
            assert!(took >= time && took < usual + time + Time::us(10), "{passes}: {took}");
            let counted = Time::from(shown);
            assert_eq!(counted < time, stops_clock, "{passes}: {counted} of {took}");
        }
    }
}

#[test]
fn wait_of_the_set_up_ends_at_its_virtual_limit() {
    let cluster = Cluster::new(&spec(schemes::STATIC_MR, 1, 1)).expect("a cluster");
    let nic = cluster.nic();
    let cq = nic.create_cq(CqAttr { entries: 16, ignore_overrun: false }).expect("a CQ");
    let begin = nic.now();
    assert!(!cq.wait(Duration::from_secs(5)).expect("a wait"), "nothing completes");
    assert_eq!(nic.now() - begin, Duration::from_secs(5), "the wait takes its virtual time");
    let error = cq.wait(Duration::MAX).expect_err("nothing can ever complete");
    assert!(error.to_string().contains("no event left"), "{error}");
}
