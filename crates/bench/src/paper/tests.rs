//! Quick runs of all experiments: the shape of the results and the paper's order of the schemes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

use pool::{Endpoint, Options, Pool, Service, Settings};

use super::experiment::{Experiment, Paper};
use super::onesidedmw::{ACCESS, ALLOCATION, CHAIN_QUEUES, PAPER, SCALABILITY};
use super::results::{ClaimSummary, Provenance, ResultRow, Results};
use super::simulated::SimulatedCluster;
use super::store::{scale, sizes};
use super::testbed::{Machine, Node, Testbed, inline};
use super::{Extent, Run, finemem, patronus, registration};
use crate::Error;
use bench_report::progress::Progress;
use bench_report::record::{Setting, Statistic};

const PAPERS: [&Paper; 3] = [&PAPER, &finemem::PAPER, &patronus::PAPER];

fn quick(testbed: &dyn Testbed, params: Option<&sim::Params>, experiment: &Experiment) -> Results {
    let bar = Progress::Silent.bar("paper", 1);
    let run = Run { testbed, extent: Extent::Quick, bar: &bar };
    experiment.run(&run, params).expect("the experiment runs")
}

/// Results by paper and experiment.
type Known = BTreeMap<(&'static str, &'static str), Arc<OnceLock<Results>>>;

/// Results of a quick run on the paper's simulated cluster. Tests of one process share the run,
/// whose results depend on nothing else.
pub fn simulated(paper: &Paper, experiment: &Experiment) -> Results {
    static KNOWN: Mutex<Known> = Mutex::new(BTreeMap::new());
    let results = {
        let mut known = KNOWN.lock().expect("no test panics with the lock");
        known.entry((paper.name, experiment.name)).or_default().clone()
    };
    let run = || {
        let testbed = SimulatedCluster::new((paper.params)(), 1);
        quick(&testbed, Some(testbed.params()), experiment)
    };
    results.get_or_init(run).clone()
}

fn is(scheme: &str, key: &str, value: f64) -> impl Fn(&Setting) -> bool {
    move |s| {
        s.get("scheme").is_some_and(|x| x.to_string() == scheme) && s.number(key) == Some(value)
    }
}

#[test]
fn chain_allocation_scales_better_than_rpc() {
    let results = simulated(&PAPER, &ALLOCATION);
    let us = |scheme: &str, threads: f64| {
        results.find("alloc_latency_us", Statistic::Mean, is(scheme, "threads", threads)).unwrap()
    };
    for rpc in ["rpc-mw-1", "rpc-mw-2"] {
        assert!(us(rpc, 24.0) > 4.0 * us("onesidedmw", 24.0), "{rpc} with 24 threads");
        assert!(us(rpc, 1.0) < 2.0 * us("onesidedmw", 1.0), "{rpc} with one thread");
    }
    assert!(us("onesidedmw", 24.0) < 4.0 * us("onesidedmw", 1.0), "the latency rises modestly");
    assert!(us("fine-mr 4 MB", 1.0) > us("fine-mr 1 MB", 1.0));
    assert!(us("fine-mr 1 MB", 1.0) > 5.0 * us("rpc-mw-2", 1.0), "registration is slow");
}

#[test]
fn separation_lowers_the_latency_of_access() {
    let results = simulated(&PAPER, &ACCESS);
    let us = |scheme: &str, threads: f64| {
        let at = is(scheme, "threads", threads);
        results.find("access_latency_us", Statistic::Mean, at).unwrap()
    };
    assert!(us("onesidedmw", 24.0) > us("onesidedmw (+Sep)", 24.0));
    let over_one_sided = us("onesidedmw (+Sep)", 24.0) / us("one-sided", 24.0);
    assert!((0.98..1.02).contains(&over_one_sided), "{over_one_sided}");
    assert!(us("odrp", 24.0) > 1.5 * us("one-sided", 24.0), "every access is a chain");
}

#[test]
fn read_latency_grows_linearly_with_chain_queues() {
    let results = simulated(&PAPER, &CHAIN_QUEUES);
    let us = |queues: f64| {
        let at = |s: &Setting| s.number("chain_queues") == Some(queues);
        results.find("read_latency_us", Statistic::Mean, at).unwrap()
    };
    let (half, whole) = (us(48.0) - us(0.0), us(96.0) - us(0.0));
    assert!(half > 0.0 && (whole / half - 2.0).abs() < 0.05, "{half} {whole}");
}

#[test]
fn window_bind_takes_a_hundredth_of_a_registration() {
    let results = simulated(&PAPER, &registration::EXPERIMENT);
    let bind = results.find("bind_us", Statistic::Mean, |_| true).unwrap();
    let four = |s: &Setting| s.number("size") == Some((4 << 20) as f64);
    let register = results.find("register_us", Statistic::Mean, four).unwrap();
    assert!(register > 100.0 * bind, "{register} {bind}");
}

#[test]
fn rpc_rate_is_bound_by_the_memory_nodes_cores() {
    let results = simulated(&PAPER, &SCALABILITY);
    let rate = |scheme: &str, clients: f64| {
        results.find("alloc_rate_per_s", Statistic::Mean, is(scheme, "clients", clients)).unwrap()
    };
    assert!(rate("rpc-mw-2", 96.0) < 1.2 * rate("rpc-mw-2", 24.0), "one core is saturated");
    assert!(rate("rpc-mw-2, 24 cores", 96.0) > 2.0 * rate("rpc-mw-2", 96.0));
    assert!(rate("onesidedmw", 96.0) > 2.0 * rate("rpc-mw-2", 96.0));
}

#[test]
fn stores_over_small_chunks_are_fast_without_the_memory_nodes_cpu() {
    let results = simulated(&PAPER, &sizes::EXPERIMENT);
    let find = |metric: &str, statistic, scheme: &str, workload: &str, chunk: u64| {
        let at = |s: &Setting| {
            let is = |key: &str, value: &str| s.get(key).is_some_and(|x| x.to_string() == value);
            is("scheme", scheme)
                && is("workload", workload)
                && s.number("chunk") == Some(chunk as f64)
        };
        results.find(metric, statistic, at).unwrap()
    };
    for workload in ["fillsync", "mixed"] {
        let rate = |scheme, chunk| find("rate_per_s", Statistic::Mean, scheme, workload, chunk);
        let ours = rate("onesidedmw", 2048);
        assert!(ours > 1.5 * rate("rpc-mw-2", 2048), "{workload}: one core is saturated");
        assert!(ours < rate("onesidedmw", 8192), "{workload}: half of the inserts allocate");
        assert!(rate("onesidedmw", 8192) < rate("static-mr", 16 << 20), "{workload}");
    }
    let cpu = |scheme, chunk| find("node_cpu_ratio", Statistic::Mean, scheme, "fillsync", chunk);
    assert!(cpu("onesidedmw", 2048) < 0.02 && cpu("rpc-mw-2", 2048) > 0.9);
    let p99 = |scheme, chunk| find("latency_us", Statistic::P99, scheme, "fillsync", chunk);
    assert!(p99("rpc-mw-2", 2048) > 2.0 * p99("onesidedmw", 2048));
    // A chunk of n blocks is empty after 90 % of the keys are deleted with probability 0.9^n.
    for (chunk, blocks) in [(2048, 2), (4096, 4), (8192, 8)] {
        for scheme in ["onesidedmw", "rpc-mw-1", "rpc-mw-2"] {
            let share = find("returned_ratio", Statistic::Mean, scheme, "fillsync", chunk);
            let expected = 0.9_f64.powi(blocks);
            assert!((share - expected).abs() < 0.03, "{scheme}, {chunk}: {share}, not {expected}");
        }
    }
}

#[test]
fn stores_of_many_threads_are_bound_by_the_memory_nodes_core() {
    let results = simulated(&PAPER, &scale::EXPERIMENT);
    let find = |metric: &str, statistic, scheme: &str, chunk: u64, threads: f64| {
        let at = |s: &Setting| {
            s.get("scheme").is_some_and(|x| x.to_string() == scheme)
                && s.number("chunk") == Some(chunk as f64)
                && s.number("threads") == Some(threads)
        };
        results.find(metric, statistic, at).unwrap()
    };
    let rate = |scheme, threads| find("rate_per_s", Statistic::Mean, scheme, 4096, threads);
    assert!(rate("rpc-mw-2", 288.0) < 1.2 * rate("rpc-mw-2", 24.0), "one core is saturated");
    assert!(rate("onesidedmw", 288.0) > 4.0 * rate("rpc-mw-2", 288.0));
    assert!(rate("rpc-mw-2, 24 cores", 288.0) > 2.0 * rate("rpc-mw-2", 288.0));
    let p99 = |scheme| find("latency_us", Statistic::P99, scheme, 4096, 288.0);
    assert!(p99("rpc-mw-2") > 5.0 * p99("onesidedmw"));
    // The chain of figure 5 has 10 WQEs, the chain that re-arms itself 16.
    assert!(rate("onesidedmw-paper", 288.0) > 1.2 * rate("onesidedmw", 288.0));
    assert!(p99("onesidedmw-paper") < p99("onesidedmw"));
}

#[test]
fn experiments_report_announced_claims_and_meet_fitted_ones() {
    for paper in PAPERS {
        let (mut all_results, mut without_stores) = (Vec::new(), Vec::new());
        for experiment in paper.experiments {
            let results = simulated(paper, experiment);
            let claims: Vec<_> = results.records().filter_map(|r| r.claim.clone()).collect();
            for claim in &claims {
                assert!(experiment.claims.contains(&claim.as_str()), "{claim} is not announced");
            }
            for row in results.rows.iter().filter(|row| row.kind == Provenance::Fitted) {
                // 3% allow for the fewer rounds of a quick run.
                assert!(row.off().unwrap() < 0.03, "fit the model again: {row:?}");
            }
            if !experiment.name.starts_with("kv") {
                without_stores.push(results.clone());
            }
            all_results.push(results);
        }
        let summary = ClaimSummary::of(&all_results);
        let lines = summary.lines(paper.note);
        // Few of Patronus's numbers are of a workload that it states in full: notes explain them.
        if paper.name != patronus::PAPER.name {
            // A store adds an index, splits and a client to the model, so its claims are met less
            // well.
            assert!(3 * summary.within(0.1) >= summary.predicted.len(), "{lines:#?}");
            assert!(2 * summary.within(0.2) >= summary.predicted.len(), "{lines:#?}");
            let summary = ClaimSummary::of(&without_stores);
            let lines = summary.lines(paper.note);
            assert!(5 * summary.within(0.2) >= 4 * summary.predicted.len(), "{lines:#?}");
        }
        for row in summary.missed(0.2) {
            let id = row.record.claim.as_deref().expect("a predicted row has a claim");
            assert!((paper.note)(id).is_some(), "the paper's notes must explain: {row:?}");
        }
    }
}

#[test]
fn same_seed_gives_the_same_table() {
    let table = |seed| {
        let testbed = SimulatedCluster::new((PAPER.params)(), seed);
        quick(&testbed, Some(testbed.params()), &ACCESS).table().to_string()
    };
    assert_eq!(table(7), table(7));
    assert_ne!(table(7), table(8));
}

#[test]
fn all_experiments_run_on_this_machine() {
    let testbed = inline(1);
    for experiment in PAPERS.iter().flat_map(|paper| paper.experiments) {
        let results = quick(&testbed, None, experiment);
        assert!(!results.rows.is_empty());
        assert!(results.records().all(|r| !r.simulated));
        let measured =
            |row: &ResultRow| matches!(row.kind, Provenance::Measured | Provenance::NoClaim);
        assert!(results.rows.iter().all(measured));
        let directory = tempfile::tempdir().unwrap();
        let files = experiment.draw(&results, "measured", directory.path(), "paper").unwrap();
        assert!(!files.is_empty(), "{experiment:?}");
    }
}

/// A memory node with a NIC thread; its clients have the usual limit of keys.
struct Served(Service);

impl Node for Served {
    fn connect(&self, options: Options) -> Result<Pool, Error> {
        Ok(Pool::connect(self.0.path(), options)?)
    }
}

#[test]
fn windows_are_timed_within_a_clients_key_limit() {
    let testbed = Machine::new("shm", 1, |settings: &Settings| {
        Ok(Box::new(Served(Service::start(settings, &Endpoint::Fresh)?)) as Box<dyn Node>)
    });
    // The rounds of `granary bench paper` on this machine: the pass is over 25,600 windows.
    let times = testbed.verbs(&[4 << 10], 300).expect("the verbs succeed");
    assert_eq!((times.pass.count(), times.bind.count()), (1, 300));
}
