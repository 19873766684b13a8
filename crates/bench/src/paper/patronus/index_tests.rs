//! Quick simulated runs of RACE over permissions.

use super::{PAPER, hash, resize};
use crate::paper::results::Results;
use crate::paper::tests::simulated;
use bench_report::record::{Setting, Statistic};

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
