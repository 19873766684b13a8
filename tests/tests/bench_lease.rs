//! `granary bench lease` at its smallest size: every measurement runs at every place.

use std::process::Command;

use bench_report::record::{Record, Statistic};
use granary_tests::built;

/// Operations with the number in flight.
const OPERATIONS: [(&str, u64); 14] = [
    ("acquire, revoke", 1),
    ("acquire, revoke", 16),
    ("acquire, expire", 16),
    ("extend by CAS", 1),
    ("extend by RPC", 1),
    ("acquire, 8 extensions, revoke", 1),
    ("9 times acquire, revoke", 1),
    ("READ under a permission", 1),
    ("READ under a grant", 1),
    ("acquire, 3 READs, expire", 1),
    ("3 READs by RPC", 1),
    ("refused READ, READ", 1),
    ("allocate, free", 1),
    ("allocate, free", 16),
];

const RATIOS: [&str; 7] = [
    "pairs_over_rpc_ratio",
    "expiring_over_pairs_ratio",
    "cas_over_rpc_ratio",
    "extended_over_reacquired_ratio",
    "permission_over_grant_ratio",
    "reads_over_rpc_ratio",
    "spare_over_reset_ratio",
];

fn run(arguments: &[&str]) -> String {
    let mut command = Command::new(built::granary());
    let output = command.args(["bench", "lease", "--quick"]).args(arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    text
}

fn is(record: &Record, key: &str, value: &str) -> bool {
    record.setting.get(key).is_some_and(|own| own.to_string() == value)
}

#[test]
fn every_operation_has_records_at_every_place() {
    let text = run(&["--json"]);
    let records: Vec<Record> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for (nic, control) in [("inline", "polling"), ("inline", "event"), ("shm", "event")] {
        let place = format!("{nic} {control}: {text}");
        let here: Vec<&Record> =
            records.iter().filter(|r| is(r, "nic", nic) && is(r, "control", control)).collect();
        for (operation, in_flight) in OPERATIONS {
            let time = here.iter().find(|r| {
                r.metric == "time_us"
                    && is(r, "operation", operation)
                    && is(r, "in_flight", &in_flight.to_string())
            });
            assert!(time.is_some_and(|r| r.value > 0.0), "{operation}, {in_flight}, {place}");
        }
        for ratio in RATIOS {
            let found = here.iter().find(|r| r.metric == ratio);
            assert!(found.is_some_and(|r| r.value > 0.0), "{ratio}, {place}");
        }
        // At most a bind and an unbind for each permission.
        let windows = here.iter().filter(|r| r.metric == "window_operations");
        assert_eq!(windows.clone().count(), 2, "{place}");
        assert!(windows.clone().all(|r| r.value > 0.5 && r.value < 2.1), "{place}");
        let p99 = |metric| here.iter().any(|r| r.metric == metric && r.statistic == Statistic::P99);
        assert!(p99("expiry_lateness_us"), "{place}");
        // On the inline NIC all compute nodes are in one process.
        assert_eq!(p99("killed_holder_us"), nic == "shm", "{place}");
        let asleep = here.iter().any(|r| r.metric == "asleep_wakeups");
        assert_eq!(asleep, control == "event", "{place}");
    }
}

#[test]
fn targets_stand_beside_ratios() {
    let text = run(&["--nic", "inline"]);
    for part in ["beside their targets", "≥ 1.3", "≤ 1.1", "extend by CAS: rate, 1 in flight"] {
        assert!(text.contains(part), "{part:?} is missing: {text}");
    }
    assert!(!text.contains("shm"), "{text}");
}
