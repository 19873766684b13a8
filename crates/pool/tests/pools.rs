//! Tests with several memory nodes in processes of their own; one is killed while compute nodes
//! work.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pool::{
    Address, Endpoint, Error, MultiPool, NodeIndex, Options, PlacedGrant, Placement, Scheme,
    Service, Settings, schemes,
};

const CHUNK: u64 = 4096;
const SERVES: &str = "GRANARY_TEST_SERVES";
const SCHEME: &str = "GRANARY_TEST_SCHEME";

fn settings(scheme: Scheme) -> Settings {
    Settings {
        donate_bytes: 256 * CHUNK,
        chunk_bytes: CHUNK,
        scheme,
        clients_max: 8,
        ..Settings::default()
    }
}

/// Helper, not a test: a memory node that serves until it is killed, if the environment variable is
/// set.
#[test]
fn serve_until_killed() {
    let Some(path) = std::env::var_os(SERVES) else { return };
    let scheme = schemes::find(&std::env::var(SCHEME).unwrap()).unwrap();
    let _service = Service::start(&settings(scheme), &Endpoint::At(PathBuf::from(path))).unwrap();
    println!("\nready");
    loop {
        thread::park();
    }
}

/// A memory node in a process of its own; killed on drop.
struct Node(Child);

impl Node {
    fn start(path: &Path, scheme: Scheme) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "serve_until_killed", "--nocapture"])
            .env(SERVES, path)
            .env(SCHEME, scheme.name)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        lines.map(Result::unwrap).find(|line| line == "ready").expect("a memory node that serves");
        Self(child)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A mark that is unique to a thread and write, so that another thread's data is detected.
fn mark(who: u64, number: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&who.to_le_bytes());
    bytes[8..].copy_from_slice(&(number + 1).to_le_bytes());
    bytes
}

fn check(pools: &MultiPool, placed: &PlacedGrant, mark: [u8; 16]) -> Result<(), Error> {
    let mut bytes = [0; 16];
    pools.read_blocking(placed, 0, &mut bytes)?;
    assert_eq!(bytes, mark, "at {placed:?}");
    Ok(())
}

/// Allocates, writes, reads and frees until `stop` is set. Errors are allowed at the failing memory
/// node only.
fn work(pools: &MultiPool, who: u64, failing: NodeIndex, stop: &AtomicBool, done: &AtomicU64) {
    let mut held: Vec<(PlacedGrant, [u8; 16])> = Vec::new();
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) {
        if held.len() < 20 {
            let placed = match pools.allocate_blocking() {
                Ok(placed) => placed,
                Err(e) => panic!("thread {who} cannot allocate: {e}"),
            };
            number += 1;
            let mark = mark(who, number);
            match pools.write_blocking(&placed, 0, &mark) {
                Ok(()) => held.push((placed, mark)),
                Err(e) => assert_eq!(placed.node, failing, "{e}"),
            }
        } else {
            let (placed, mark) = held.swap_remove(number as usize % held.len());
            if let Err(e) = check(pools, &placed, mark) {
                assert_eq!(placed.node, failing, "{e}");
            }
            if let Err(e) = pools.free_blocking(placed) {
                assert_eq!(placed.node, failing, "{e}");
            }
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
    for (placed, mark) in held {
        if placed.node != failing {
            check(pools, &placed, mark).unwrap();
            pools.free_blocking(placed).unwrap();
        }
    }
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

fn one_is_killed(scheme: Scheme) {
    let directory = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = (0..3).map(|i| directory.path().join(format!("{i}.sock"))).collect();
    let mut nodes: Vec<Option<Node>> =
        paths.iter().map(|path| Some(Node::start(path, scheme))).collect();
    let addresses: Vec<Address> = paths.iter().map(|path| Address::Shm(path.clone())).collect();
    let options = Options { groups: Some(1), ..Options::default() };
    let pools = MultiPool::connect(&addresses, options, Placement::RoundRobin).unwrap();
    let failing = NodeIndex(1);
    let before: Vec<PlacedGrant> = (0..3).map(|_| pools.allocate_blocking().unwrap()).collect();
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|s| {
        for who in 1..=2 {
            let (pools, stop, done) = (&pools, &stop, &done);
            s.spawn(move || work(pools, who, failing, stop, done));
        }
        let count = || done.load(Ordering::Relaxed);
        wait_for("no thread works", || count() > 200);
        nodes[failing.0 as usize] = None;
        let at = count();
        wait_for("no thread continues", || count() > at + 500);
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(pools.alive().collect::<Vec<_>>(), [NodeIndex(0), NodeIndex(2)]);
    let lost = *before.iter().find(|placed| placed.node == failing).unwrap();
    let e = pools.write_blocking(&lost, 0, b"lost").unwrap_err();
    println!("{scheme}: {e}");
    // Free memory of the remaining memory nodes is still allocated.
    let some: Vec<PlacedGrant> = (0..100).map(|_| pools.allocate_blocking().unwrap()).collect();
    assert!(some.iter().all(|placed| placed.node != failing));
    some.into_iter().for_each(|placed| pools.free_blocking(placed).unwrap());

    // The restarted memory node is empty; its earlier grants are invalid.
    assert_eq!(pools.rejoin(), 0);
    nodes[failing.0 as usize] = Some(Node::start(&paths[failing.0 as usize], scheme));
    assert_eq!(pools.rejoin(), 1);
    assert!(matches!(pools.write_blocking(&lost, 0, b"lost"), Err(Error::Stale { .. })));
    pools.free_blocking(lost).unwrap();
    let some: Vec<PlacedGrant> = (0..3).map(|_| pools.allocate_blocking().unwrap()).collect();
    assert!(some.iter().any(|placed| placed.node == failing));
    for placed in before.into_iter().filter(|placed| placed.node != failing).chain(some) {
        pools.write_blocking(&placed, 0, b"here").unwrap();
        pools.free_blocking(placed).unwrap();
    }
    for node in pools.alive() {
        let pool = pools.node(node);
        wait_for("not all chunks are free", || {
            let status = pool.node_status().unwrap().node;
            status.free == status.chunks
        });
        pool.audit().unwrap();
    }
}

#[test]
fn other_nodes_continue_after_a_kill_finemem() {
    one_is_killed(schemes::FINEMEM);
}

#[test]
fn other_nodes_continue_after_a_kill_onesidedmw() {
    one_is_killed(schemes::ONESIDEDMW);
}
