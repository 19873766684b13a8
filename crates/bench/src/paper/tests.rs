//! Quick versions of all experiments: their form, and the order that the paper states.

use pool::{Endpoint, Options, Pool, Service, Settings};

use super::experiment::{Experiment, Paper};
use super::finding::{Findings, Kind, Tally};
use super::onesidedmw::{ACCESS, ALLOCATION, CHAIN_QUEUES, PAPER, SCALABILITY};
use super::place::{Machine, Node, Place, inline};
use super::simulated::Simulated;
use super::{Extent, Run, finemem, registration};
use crate::Error;
use crate::progress::Progress;
use crate::record::{Setting, Statistic};

const PAPERS: [&Paper; 2] = [&PAPER, &finemem::PAPER];

fn quick(place: &dyn Place, params: Option<&sim::Params>, experiment: &Experiment) -> Findings {
    let bar = Progress::Silent.bar("paper", 1);
    let run = Run { place, extent: Extent::Quick, bar: &bar };
    experiment.run(&run, params).expect("it runs")
}

fn simulated(paper: &Paper, experiment: &Experiment) -> Findings {
    let place = Simulated::new((paper.params)(), 1);
    quick(&place, Some(place.params()), experiment)
}

fn is(scheme: &str, key: &str, value: f64) -> impl Fn(&Setting) -> bool {
    move |s| {
        s.get("scheme").is_some_and(|x| x.to_string() == scheme) && s.number(key) == Some(value)
    }
}

#[test]
fn allocation_by_chains_bears_a_crowd_better_than_by_rpc() {
    let findings = simulated(&PAPER, &ALLOCATION);
    let of = |scheme: &str, threads: f64| {
        findings.find("alloc_latency_us", Statistic::Mean, is(scheme, "threads", threads)).unwrap()
    };
    for rpc in ["rpc-mw-1", "rpc-mw-2"] {
        assert!(of(rpc, 24.0) > 4.0 * of("onesidedmw", 24.0), "{rpc} in a crowd");
        assert!(of(rpc, 1.0) < 2.0 * of("onesidedmw", 1.0), "{rpc} alone is reasonable");
    }
    assert!(of("onesidedmw", 24.0) < 4.0 * of("onesidedmw", 1.0), "it rises modestly");
    assert!(of("fine-mr 4 MB", 1.0) > of("fine-mr 1 MB", 1.0));
    assert!(of("fine-mr 1 MB", 1.0) > 5.0 * of("rpc-mw-2", 1.0), "registration is slow");
}

#[test]
fn separation_lowers_the_latency_of_access() {
    let findings = simulated(&PAPER, &ACCESS);
    let of = |scheme: &str, threads: f64| {
        let at = is(scheme, "threads", threads);
        findings.find("access_latency_us", Statistic::Mean, at).unwrap()
    };
    assert!(of("onesidedmw", 24.0) > of("onesidedmw (+Sep)", 24.0));
    let as_without = of("onesidedmw (+Sep)", 24.0) / of("one-sided", 24.0);
    assert!((0.98..1.02).contains(&as_without), "{as_without}");
    assert!(of("odrp", 24.0) > 1.5 * of("one-sided", 24.0), "every access is a chain");
}

#[test]
fn chains_slow_plain_reads_evenly() {
    let findings = simulated(&PAPER, &CHAIN_QUEUES);
    let of = |queues: f64| {
        let at = |s: &Setting| s.number("chain_queues") == Some(queues);
        findings.find("read_latency_us", Statistic::Mean, at).unwrap()
    };
    let (half, whole) = (of(48.0) - of(0.0), of(96.0) - of(0.0));
    assert!(half > 0.0 && (whole / half - 2.0).abs() < 0.05, "{half} {whole}");
}

#[test]
fn a_window_takes_a_hundredth_of_a_region() {
    let findings = simulated(&PAPER, &registration::EXPERIMENT);
    let bind = findings.find("bind_us", Statistic::Mean, |_| true).unwrap();
    let four = |s: &Setting| s.number("size") == Some((4 << 20) as f64);
    let register = findings.find("register_us", Statistic::Mean, four).unwrap();
    assert!(register > 100.0 * bind, "{register} {bind}");
}

#[test]
fn rpc_is_bound_by_the_memory_nodes_core() {
    let findings = simulated(&PAPER, &SCALABILITY);
    let of = |scheme: &str, clients: f64| {
        findings.find("alloc_rate_per_s", Statistic::Mean, is(scheme, "clients", clients)).unwrap()
    };
    assert!(of("rpc-mw-2", 96.0) < 1.2 * of("rpc-mw-2", 24.0), "one core is one core");
    assert!(of("rpc-mw-2, 24 cores", 96.0) > 2.0 * of("rpc-mw-2", 96.0));
    assert!(of("onesidedmw", 96.0) > 2.0 * of("rpc-mw-2", 96.0));
}

#[test]
fn every_claim_of_an_experiment_is_there_once_and_fitted_ones_are_met() {
    for paper in PAPERS {
        let mut all = Vec::new();
        for experiment in paper.experiments {
            let findings = simulated(paper, experiment);
            let claims: Vec<_> = findings.records().filter_map(|r| r.claim.clone()).collect();
            for claim in &claims {
                assert!(experiment.claims.contains(&claim.as_str()), "{claim} is not announced");
            }
            for finding in findings.all.iter().filter(|f| f.kind == Kind::Fitted) {
                // A quick run has a tenth of the rounds.
                assert!(finding.off().unwrap() < 0.03, "fit anew: {finding:?}");
            }
            all.push(findings);
        }
        let tally = Tally::of(&all);
        assert!(
            3 * tally.within(0.1) >= 2 * tally.predicted.len(),
            "{:#?}",
            tally.lines(paper.note)
        );
        for far in tally.predicted.iter().filter(|f| !f.is_within(0.2)) {
            let id = far.record.claim.as_deref().expect("it has a claim");
            assert!((paper.note)(id).is_some(), "it says why: {far:?}");
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_table() {
    let table = |seed| {
        let place = Simulated::new((PAPER.params)(), seed);
        quick(&place, Some(place.params()), &ACCESS).table().to_string()
    };
    assert_eq!(table(7), table(7));
    assert_ne!(table(7), table(8));
}

#[test]
fn all_of_it_runs_on_this_machine_too() {
    let place = inline(1);
    for experiment in PAPERS.iter().flat_map(|paper| paper.experiments) {
        let findings = quick(&place, None, experiment);
        assert!(!findings.all.is_empty());
        assert!(findings.records().all(|r| !r.simulated));
        assert!(findings.all.iter().all(|f| matches!(f.kind, Kind::Measured | Kind::NoClaim)));
        let directory = tempfile::tempdir().unwrap();
        let files = experiment.draw(&findings, "measured", directory.path(), "paper").unwrap();
        assert!(!files.is_empty(), "{experiment:?}");
    }
}

/// A memory node with a thread for its NIC, whose compute nodes have as many keys as any client.
struct Served(Service);

impl Node for Served {
    fn connect(&self, options: Options) -> Result<Pool, Error> {
        Ok(Pool::connect(self.0.path(), options)?)
    }
}

#[test]
fn windows_are_timed_in_full_with_the_keys_of_a_client() {
    let place = Machine::new("shm", 1, |settings: &Settings| {
        Ok(Box::new(Served(Service::start(settings, &Endpoint::Fresh)?)) as Box<dyn Node>)
    });
    // As many rounds as `granary bench paper` has on this machine: the pass is over 25,600 windows.
    let times = place.verbs(&[4 << 10], 300).expect("it runs");
    assert_eq!((times.pass.count(), times.bind.count()), (1, 300));
}
