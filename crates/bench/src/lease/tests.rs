//! Tests of the loops against a memory node in this process, and of the ratios.

use std::sync::Arc;

use pool::{ControlMode, EmbeddedNode, Pool, PoolStats};
use scheme::LeaseStatus;

use super::ratios::median;
use super::*;
use bench_report::record::Statistic;

const PLACE: Place = Place { nic: "inline", control: ControlMode::Event };

fn start(kind: NodeKind) -> Arc<EmbeddedNode> {
    Arc::new(EmbeddedNode::start(&kind.settings(PLACE.control)).unwrap())
}

fn connect(node: &Arc<EmbeddedNode>, extension: Extension) -> Pool {
    Pool::embedded_in(node, options(extension)).unwrap()
}

/// Counters of a measure: at the memory node, and at the compute node.
fn run(measure: Measure) -> (LeaseStatus, u64, PoolStats) {
    let node = start(measure.node());
    let mut subject = Subject::new(connect(&node, measure.extension())).unwrap();
    let of = |subject: &Subject| {
        let status = subject.pool().node_status().unwrap().node;
        (status.lease.unwrap_or_default(), status.allocations_cpu, subject.pool().stats())
    };
    let (before, allocations, own) = of(&subject);
    let seconds = subject.run(measure, Duration::from_millis(3)).unwrap();
    assert!(seconds > 0.0 && seconds < 1.0, "{measure:?}: {seconds}");
    let (after, answered, stats) = of(&subject);
    let lease = LeaseStatus {
        grants: after.grants - before.grants,
        revocations: after.revocations - before.revocations,
        expiries: after.expiries - before.expiries,
        qp_resets: after.qp_resets - before.qp_resets,
        extensions_rpc: after.extensions_rpc - before.extensions_rpc,
        ..after
    };
    let stats = PoolStats {
        reads: stats.reads - own.reads,
        acquisitions: stats.acquisitions - own.acquisitions,
        frees: stats.frees - own.frees,
        ..stats
    };
    (lease, answered - allocations, stats)
}

#[test]
fn pairs_revoke_what_they_acquire() {
    for measure in [Measure::Pair, Measure::Pairs, Measure::Reacquired] {
        let (lease, ..) = run(measure);
        assert!(lease.grants > 0, "{measure:?}");
        assert_eq!((lease.revocations, lease.expiries), (lease.grants, 0), "{measure:?}");
    }
}

#[test]
fn leases_of_the_other_loops_end_by_themselves() {
    for measure in [Measure::Expiring, Measure::ThreeReads] {
        let (lease, _, stats) = run(measure);
        assert_eq!(lease.revocations, 0, "{measure:?}");
        assert!(lease.expiries > 0 && lease.grants >= lease.expiries, "{measure:?}: {lease:?}");
        assert_eq!(stats.acquisitions, lease.grants, "{measure:?}");
        if measure == Measure::ThreeReads {
            assert!(stats.reads > 2 * stats.acquisitions, "{stats:?}");
        }
    }
}

#[test]
fn only_extension_by_rpc_asks_the_memory_node() {
    let (lease, _, stats) = run(Measure::ExtendByCas);
    assert_eq!((lease.grants, lease.extensions_rpc), (0, 0));
    assert!(stats.extensions > 0);
    let (lease, _, stats) = run(Measure::ExtendByRpc);
    assert_eq!(lease.grants, 0);
    assert!(stats.extensions > 0);
    assert_eq!(lease.extensions_rpc, stats.extensions);
    let (lease, allocations, stats) = run(Measure::Extended);
    assert!(lease.grants > 0);
    assert_eq!((allocations, lease.extensions_rpc), (lease.grants, 0));
    assert_eq!(stats.extensions, 8 * lease.grants);
}

#[test]
fn reads_by_rpc_are_executed_by_the_memory_node() {
    let (lease, _, stats) = run(Measure::ThreeReadsByRpc);
    assert_eq!((lease.grants, stats.acquisitions), (0, 0));
    assert!(stats.reads > 0 && stats.reads.is_multiple_of(3), "{stats:?}");
}

#[test]
fn refused_reads_use_a_spare_or_a_reset() {
    let (lease, _, stats) = run(Measure::RefusedWithSpare);
    assert!(stats.promotions > 0, "{stats:?} {lease:?}");
    let (lease, _, stats) = run(Measure::RefusedWithout);
    assert_eq!(stats.promotions, 0);
    assert!(lease.qp_resets > 0, "{lease:?}");
}

#[test]
fn reads_and_the_baseline_take_no_permission() {
    for measure in [Measure::ReadPermission, Measure::ReadGrant] {
        let (lease, _, stats) = run(measure);
        assert!(lease.grants == 0 && stats.reads > 0, "{measure:?}");
    }
    for measure in [Measure::AllocatePair, Measure::AllocatePairs] {
        let (_, answered, stats) = run(measure);
        assert!(answered > 0 && answered == stats.frees, "{measure:?}: {answered} {stats:?}");
    }
}

/// The waiter is granted the object when the lease has ended, and not before.
#[test]
fn expiries_are_waited_for() {
    let node = start(NodeKind::Patronus { spares: 1 });
    let (holder, waiter) = (connect(&node, Extension::Cas), connect(&node, Extension::Cas));
    let (lease, trials) = (Duration::from_millis(4), 3);
    let since = std::time::Instant::now();
    let lateness = expiries(&holder, &waiter, lease, trials).unwrap();
    assert_eq!(lateness.count(), 3);
    assert!(since.elapsed() >= trials * lease);
    let status = waiter.node_status().unwrap().node.lease.unwrap();
    assert_eq!((status.expiries, status.busy, status.objects), (3, 0, 0));
}

#[test]
fn wakeups_of_the_question_itself_do_not_count() {
    for woken in [0, 7] {
        let mut counter = 100;
        let mut calls = 0;
        let count = || -> Result<u64, ()> {
            calls += 1;
            counter += if calls == 7 { 2 + woken } else { 2 };
            Ok(counter)
        };
        assert_eq!(wakeups(count, Duration::ZERO), Ok(woken));
    }
}

#[test]
fn window_operations_are_those_between_two_states() {
    let before = WindowOperations { operations: 10, permissions: 5 };
    let after = WindowOperations { operations: 21, permissions: 15 };
    assert_eq!(after.each_since(&before), 1.1);
}

/// Turns of 1 us, in which a measure takes as long as its place in the list.
fn results() -> Results {
    let mut results = Results::new(PLACE);
    for turn in [1.0, 100.0, 10.0] {
        for (at, measure) in Measure::ALL.into_iter().enumerate() {
            results.add(measure, turn * (at + 1) as f64 * 1e-6);
        }
    }
    results.add_windows(Measure::Pairs, 1.25);
    results.lateness.record(Duration::from_micros(1500));
    results.asleep = Some(0);
    results
}

#[test]
fn ratios_above_one_mean_faster_or_longer() {
    let results = results();
    let close = |ratio, expected: f64| {
        let value = results.ratio(ratio).unwrap();
        assert!((value - expected).abs() < 1e-9, "{ratio:?}: {value}");
    };
    close(Ratio::Pair, 2.0); // 1 us against 2 us: faster
    close(Ratio::Extend, 7.0 / 6.0);
    close(Ratio::Read, 10.0 / 11.0); // a quotient of times
    close(Ratio::Reads, 13.0 / 12.0);
    close(Ratio::Refused, 14.0 / 15.0);
    assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
}

#[test]
fn records_have_times_ratios_and_counts() {
    let records = results().records();
    let value = |metric: &str, operation: &str| {
        let found = records.iter().find(|r| {
            r.metric == metric
                && r.statistic == Statistic::P50
                && r.setting.get("operation").is_none_or(|own| own.to_string() == operation)
        });
        found.unwrap_or_else(|| panic!("{metric} of {operation}")).value
    };
    assert!((value("time_us", "extend by CAS") - 60.0).abs() < 1e-9);
    assert!((value("rate_per_s", "extend by CAS") - 1e6 / 60.0).abs() < 1e-6);
    assert_eq!(value("window_operations", "acquire, revoke"), 1.25);
    assert!((1499.0..1502.0).contains(&value("expiry_lateness_us", "")));
    for ratio in Ratio::ALL {
        assert!(records.iter().any(|r| r.metric == ratio.metric()), "{ratio:?}");
    }
    assert!(records.iter().any(|r| r.metric == "permission_bytes" && r.value <= 128.0));
    assert!(records.iter().any(|r| r.metric == "asleep_wakeups" && r.value == 0.0));
    assert!(!records.iter().any(|r| r.metric == "killed_holder_us"), "none was killed");
}

#[test]
fn tables_mark_missed_targets() {
    let mut shm = Results::new(Place { nic: "shm", ..PLACE });
    shm.asleep = Some(2);
    let tables = tables(&[results(), shm]);
    let text = tables[0].1.to_string();
    let row = |start: &str| text.lines().find(|line| line.starts_with(start)).unwrap();
    assert!(row("wake-ups").contains("2.00 !") || row("wake-ups").contains("2 !"), "{text}");
    assert!(row("window operations").contains("1.25 !"), "{text}");
    assert!(row("lateness").contains("≤ 2000") && !row("lateness").contains('!'), "{text}");
    // 16 in flight: 3 us against 4 us are 1.33 times the rate.
    assert!(row("acquire, revoke: rate, 16").contains("≥ 1.3"), "{text}");
    assert!(!row("acquire, revoke: rate, 16").contains('!'), "{text}");
    assert!(row("READ under a permission: time").contains("0.909"), "{text}");
    assert!(tables[1].1.to_string().contains("60.0"), "{}", tables[1].1);
    assert_eq!(tables[2].1.to_string().lines().filter(|l| l.contains("lateness")).count(), 1);
}
