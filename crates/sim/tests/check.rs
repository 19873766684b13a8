//! Faults by seed: what must hold whatever goes wrong.
//!
//! `GRANARY_TEST_FULL=1` takes a hundred times as many seeds. One seed, step by step:
//! `granary sim check --scheme S --seed N --trace`.

use pool::SchemeKind;
use sim::check::{self, Seen};

/// Seeds of each scheme.
fn seeds() -> u64 {
    if std::env::var_os("GRANARY_TEST_FULL").is_some() { 20_000 } else { 200 }
}

fn check_seeds(scheme: SchemeKind) {
    let mut seen = Seen::default();
    for seed in 0..seeds() {
        let outcome = check::run(scheme, seed, false);
        if let Some(why) = outcome.violation {
            panic!("{why}\n  granary sim check --scheme {scheme} --seed {seed} --trace");
        }
        seen.add(&outcome.seen);
    }
    println!("{scheme}: {seen:?}");
    // What is not brought about is not checked.
    assert!(seen.grants[0] > seeds() && seen.frees[0] > seeds() && seen.accesses > 5 * seeds());
    assert!(seen.empty > 0 && seen.deaths > 0 && seen.errors[0] > 0);
}

#[test]
fn onesidedmw() {
    check_seeds(SchemeKind::OneSidedMw);
}

#[test]
fn rpc_mw_2() {
    check_seeds(SchemeKind::RpcMw2);
}

#[test]
fn rpc_mw_1() {
    check_seeds(SchemeKind::RpcMw1);
}

#[test]
fn fine_mr() {
    check_seeds(SchemeKind::FineMr);
}

#[test]
fn static_mr() {
    check_seeds(SchemeKind::StaticMr);
}

/// Seeds that found something, and what.
#[test]
fn what_was_found_stays_mended() {
    let found = [
        // A bulletin that was written before its client had connected broke the access QP.
        (SchemeKind::OneSidedMw, 1404),
        // A grant whose answer was lost stayed its owner's when that had re-established its connection.
        (SchemeKind::RpcMw2, 91),
        (SchemeKind::RpcMw2, 97),
        // Bulletins to a client that did not answer for a while left no room for its replies.
        (SchemeKind::RpcMw2, 1091),
        (SchemeKind::FineMr, 2557),
        // Who had taken in more than was to be seen never stood still.
        (SchemeKind::OneSidedMw, 0),
    ];
    for (scheme, seed) in found {
        assert_eq!(check::run(scheme, seed, false).violation, None, "{scheme}, seed {seed}");
    }
}

#[test]
fn a_seed_decides_every_step() {
    for scheme in check::SCHEMES {
        for seed in 0..10 {
            let run = || check::run(*scheme, seed, true).trace.expect("a trace was wanted");
            let first = run();
            assert!(first.lines().count() > 10, "{first}");
            assert!(first == run(), "{scheme}, seed {seed}: two runs differ");
        }
    }
}
