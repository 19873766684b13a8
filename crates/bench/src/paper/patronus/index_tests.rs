//! Quick simulated runs of RACE over permissions.

use super::contenders::{COMPUTE_NODES, CORES, PATRONUS};
use super::{IndexWork, PAPER, Task, hash, resize};
use crate::paper::load::{Load, Work};
use crate::paper::results::Results;
use crate::paper::simulated::SimulatedCluster;
use crate::paper::testbed::Testbed;
use crate::paper::tests::simulated;
use ::kv::SplitLock;
use bench_report::record::{Setting, Statistic};
use sim::Params;

fn find(results: &Results, metric: &str, matches: impl Fn(&Setting) -> bool) -> f64 {
    results.find(metric, Statistic::Mean, matches).expect("a measured point")
}

fn is(setting: &Setting, key: &str, value: &str) -> bool {
    setting.get(key).is_some_and(|found| found.to_string() == value)
}

#[test]
fn crash_in_a_split_blocks_the_vanilla_index_only() {
    let results = simulated(&PAPER, &resize::EXPERIMENT);
    let load = |name: &str, epoch: f64| {
        let at = |s: &Setting| is(s, "scheme", name) && s.number("epoch") == Some(epoch);
        find(&results, "load_ratio", at)
    };
    for name in ["vanilla", "patronus"] {
        assert!((0.6..0.7).contains(&load(name, 240.0)), "{name}: two thirds before the crash");
        let crashes = |s: &Setting| is(s, "scheme", name) && s.get("crash").is_none();
        assert_eq!(find(&results, "crashes", crashes), 1.0, "{name}");
    }
    assert!(load("vanilla", 480.0) < 0.95, "{}", load("vanilla", 480.0));
    assert_eq!(load("vanilla", 480.0), load("vanilla", 440.0), "no client goes on");
    assert_eq!(load("patronus", 480.0), 1.0);
    let each = |s: &Setting| is(s, "crash", "each verb");
    assert_eq!(find(&results, "least_load_ratio", each), 1.0);
    assert!(find(&results, "crashes", each) > 4.0);
}

#[test]
fn regions_are_slower_than_windows_for_an_index() {
    let results = simulated(&PAPER, &hash::EXPERIMENT);
    for workload in ["read-only", "mixed", "write-only"] {
        let rate = |name: &str| {
            let at = |s: &Setting| {
                is(s, "scheme", name)
                    && is(s, "workload", workload)
                    && s.number("clients") == Some(8.0)
            };
            find(&results, "rate_per_s", at)
        };
        assert!(rate("patronus") > 2.0 * rate("patronus-mr"), "{workload}");
    }
}

/// The time of an allocation of windows does not matter if none is allocated during the operations.
#[test]
fn windows_are_allocated_before_the_operations_of_the_index() {
    let contender = PATRONUS.expiring(PATRONUS.name);
    let rate = |alloc_window_ns: f64| {
        let work = IndexWork {
            task: Task::Operate { read_percent: 100 },
            keys: 500,
            block_bytes: 4096,
            groups: 85,
            entry_unit: hash::entry_unit(&contender),
            lease_us: 200,
            revokes: false,
            lock: SplitLock::Exclusive,
            split_lease_us: 20_000,
        };
        let load = Load {
            chunk_bytes: hash::CHUNK_BYTES,
            cores: CORES,
            compute_nodes: COMPUTE_NODES,
            threads: 12 * u32::from(COMPUTE_NODES),
            node_options: contender.options(),
            ..Load::new(contender.scheme, Work::Index(work), 60)
        };
        let params = Params::patronus().with("node_cpu.alloc_window", alloc_window_ns);
        let cluster = SimulatedCluster::new(params.expect("a parameter of the file"), 1);
        cluster.run(&load).expect("the operations end").rate_per_s
    };
    // Each client has a dozen of permissions open at once, far fewer than windows.
    let (slow, free) = (rate(100_000.0), rate(0.0));
    assert!(slow > 0.9 * free, "{slow} operations a second, {free} with windows that take no time");
}
