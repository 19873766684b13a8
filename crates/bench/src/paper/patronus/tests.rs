//! Quick simulated runs: the order of the lines, the counts of table 4, and the list of claims.

use super::work::{Cycle, LeaseWork};
use super::{PAPER, access, acquire, extend, slow, spare};
use crate::paper::load::{Load, Work};
use crate::paper::results::Results;
use crate::paper::tests::simulated;
use bench_report::claims::Claims;
use bench_report::record::{Setting, Statistic};

/// Claims that no experiment of [`PAPER`] covers, with the reason.
const WITHOUT_EXPERIMENT: &[(&str, &str)] = &[
    ("patronus.header.share", "it follows from sizes that the paper states"),
    ("patronus.fault.notify", "the client tells the memory node by TCP, not by an RPC over RDMA"),
];

fn mean(results: &Results, metric: &str, scheme: &str, key: (&str, f64)) -> f64 {
    let at = |s: &Setting| {
        s.get("scheme").is_some_and(|x| x.to_string() == scheme) && s.number(key.0) == Some(key.1)
    };
    results.find(metric, Statistic::Mean, at).expect("a measured point")
}

#[test]
fn each_claim_has_one_experiment_or_a_reason() {
    let claims = Claims::builtin().iter().filter(|claim| claim.paper == PAPER.name);
    for id in claims.map(|claim| claim.id.as_str()) {
        let named = PAPER.experiments.iter().filter(|e| e.claims.contains(&id)).count();
        let excused = WITHOUT_EXPERIMENT.iter().filter(|(other, _)| *other == id).count();
        assert_eq!(named + excused, 1, "{id}");
    }
}

/// `granary serve` refuses other sizes, so that no experiment ran on the NIC of another process.
#[test]
fn donated_memory_is_whole_chunks() {
    let work = LeaseWork { cycle: Cycle::Request, clients: 1, bytes: 64, lease_us: 100 };
    for threads in 1..40 {
        let load = Load::new(pool::schemes::PATRONUS, Work::Lease(work), 1);
        let chunk_bytes = LeaseWork::CHUNK_BYTES;
        let settings = Load { chunk_bytes, threads, ..load }.settings();
        assert_eq!(settings.donate_bytes % settings.chunk_bytes, 0, "{threads} threads");
    }
}

#[test]
fn windows_outperform_regions_and_a_lease_saves_a_request() {
    let results = simulated(&PAPER, &access::EXPERIMENT);
    let clients = ("clients", 32.0);
    let rate = |scheme: &str| mean(&results, "access_rate_per_s", scheme, clients);
    assert!(rate("patronus") > 4.0 * rate("patronus-mr"), "a registration takes 20 us");
    assert!(rate("patronus, expiring") > 1.2 * rate("patronus"));
    assert!(rate("unprotected") > rate("patronus, expiring"));
}

#[test]
fn counts_of_table_4() {
    let results = simulated(&PAPER, &acquire::EXPERIMENT);
    let clients = ("clients", 16.0);
    let count = |metric: &str, scheme: &str| mean(&results, metric, scheme, clients);
    for (scheme, windows, requests) in [
        ("patronus-paper, baseline", 3.99..4.01, 2.0),
        ("patronus-paper, + delay", 2.99..3.01, 2.0),
        ("patronus-paper, + contiguity", 1.99..2.2, 2.0),
        // A handover replaces a bind and an unbind at probability.
        ("patronus-paper, + handover", 1.0..1.9, 2.0),
        ("patronus-paper, + expiry", 1.0..1.9, 1.0),
        ("patronus", 1.0..2.0, 2.0),
        ("patronus, expiring", 1.0..2.0, 1.0),
        ("patronus-2", 1.99..2.01, 2.0),
        ("patronus-mr", 1.99..2.01, 2.0),
    ] {
        let each = count("windows", scheme);
        assert!(windows.contains(&each), "{scheme}: {each} window operations");
        let each = count("requests", scheme);
        assert!((each - requests).abs() < 0.03, "{scheme}: {each} requests");
    }
}

#[test]
fn extensions_by_cas_need_no_cpu_of_the_memory_node() {
    let results = simulated(&PAPER, &extend::EXPERIMENT);
    for scheme in ["patronus-paper", "patronus"] {
        let rate = |line: &str| {
            let line = format!("{scheme}, {line}");
            mean(&results, "cycle_rate_per_s", &line, ("clients", 32.0))
        };
        assert!(rate("by CAS") > 2.0 * rate("by RPC"), "{scheme}");
        assert!(rate("by RPC") > rate("re-acquire"), "{scheme}: one request instead of two");
    }
}

#[test]
fn leases_bound_the_delay_by_clients_that_hang() {
    let results = simulated(&PAPER, &slow::EXPERIMENT);
    let rate = |line: &str| mean(&results, "permission_rate_per_s", line, ("hang_us", 500.0));
    assert!(rate("lease") > 2.0 * rate("polling"));
}

#[test]
fn spare_qps_conceal_what_re_establishing_takes() {
    let results = simulated(&PAPER, &spare::EXPERIMENT);
    let us = |metric: &str, case: &str| {
        let is = |s: &Setting| s.get("case").is_some_and(|x| x.to_string() == case);
        results.find(metric, Statistic::Mean, is).expect("a measured case")
    };
    for metric in ["interruption_us", "neighbour_us"] {
        let (with, without) = (us(metric, "with a spare QP"), us(metric, "without a spare QP"));
        assert!(without - with > 800.0, "{metric}: {with} and {without}; QP changes take 0.8 ms");
    }
    assert!(us("interruption_us", "with a spare QP") < 10.0);
}
