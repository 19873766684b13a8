//! Seeded fault tests of all schemes.
//!
//! `GRANARY_TEST_FULL=1` runs a hundred times as many seeds. To trace a single seed: `granary sim
//! check --scheme S --seed N --trace`.

use pool::schemes;
use sim::Time;
use sim::check::{self, Case, EventCounts, Invariant, Scenario};

/// Number of seeds per case.
fn seeds() -> u64 {
    if std::env::var_os("GRANARY_TEST_FULL").is_some() { 20_000 } else { 200 }
}

fn named(name: &str) -> Case {
    name.parse().expect("a case")
}

fn check_seeds(case: Case) -> EventCounts {
    let mut counts = EventCounts::default();
    for seed in 0..seeds() {
        let outcome = check::run(case, seed, false);
        if let Some(why) = outcome.violation {
            panic!("{why}\n  granary sim check --scheme {case} --seed {seed} --trace");
        }
        counts.add(&outcome.counts);
    }
    println!("{case}: {counts:?}");
    // The faults and operations must actually have occurred.
    assert!(
        counts.grants[0] > seeds() && counts.frees[0] > seeds() && counts.accesses > 5 * seeds()
    );
    assert!(counts.empty > 0 && counts.deaths > 0 && counts.errors[0] > 0);
    counts
}

#[test]
fn onesidedmw() {
    check_seeds(Case::of(schemes::ONESIDEDMW));
}

#[test]
fn onesidedmw_without_separation() {
    check_seeds(named("onesidedmw-without-separation"));
}

#[test]
fn onesidedmw_without_grouping() {
    check_seeds(named("onesidedmw-without-grouping"));
}

#[test]
fn odrp() {
    check_seeds(Case::of(schemes::ODRP));
}

#[test]
fn tdmem() {
    check_seeds(Case::of(schemes::TDMEM));
}

#[test]
fn rpc_mw_2() {
    check_seeds(Case::of(schemes::RPC_MW_2));
}

#[test]
fn rpc_mw_1() {
    check_seeds(Case::of(schemes::RPC_MW_1));
}

#[test]
fn fine_mr() {
    check_seeds(Case::of(schemes::FINE_MR));
}

#[test]
fn static_mr() {
    check_seeds(Case::of(schemes::STATIC_MR));
}

#[test]
fn finemem() {
    let counts = check_seeds(Case::of(schemes::FINEMEM));
    assert!(counts.aborts > seeds() / 4, "too few aborts of the memory node's background work");
}

/// Blocks of one chunk up to several sections. Aborts of the memory node's work and deaths of
/// clients also occur while sections are allocated, returned after a failed allocation, or
/// released.
#[test]
fn finemem_sizes() {
    let mut counts = EventCounts::default();
    // A world takes about as long as twenty worlds with one block size.
    for seed in 0..seeds() / 5 {
        let outcome = check::run(Case::SIZES, seed, false);
        if let Some(why) = outcome.violation {
            panic!("{why}\n  granary sim check --scheme finemem-sizes --seed {seed} --trace");
        }
        counts.add(&outcome.counts);
    }
    println!("finemem-sizes: {counts:?}");
    assert!(
        counts.grants[0] > seeds() && counts.empty > 0 && counts.deaths > 0 && counts.aborts > 0
    );
}

/// Seed 2509: the oracle's access rights were from before the last release. A defect of the oracle.
#[test]
fn access_rights_are_checked_at_the_end() {
    assert_eq!(check::run(Case::SIZES, 2509, false).violation, None);
}

/// Seed 1976 of `finemem` and seed 2245 of `finemem-paper`: the state after an abort was repaired
/// only when the next scan was due, and departed clients were reclaimed too late.
#[test]
fn aborted_work_is_repaired_at_once() {
    for (scheme, seed) in [(schemes::FINEMEM, 1976), (schemes::FINEMEM_PAPER, 2245)] {
        let outcome = check::run(Case::of(scheme), seed, false);
        assert_eq!(outcome.violation, None);
        assert!(outcome.counts.aborts > 0);
    }
}

#[test]
fn finemem_paper() {
    check_seeds(Case::of(schemes::FINEMEM_PAPER));
}

/// Each function of the memory node's NIC has a third of the chunks' windows. Hostile clients use
/// their own and foreign keys over QPs of all functions.
#[test]
fn finemem_over_functions() {
    check_seeds(named("finemem-over-functions"));
}

#[test]
fn finemem_paper_over_functions() {
    check_seeds(named("finemem-paper-over-functions"));
}

#[test]
fn premmap_onesided() {
    check_seeds(Case::of(schemes::PREMMAP_ONESIDED));
}

#[test]
fn premmap_rpc() {
    check_seeds(Case::of(schemes::PREMMAP_RPC));
}

#[test]
fn ondemand_rpc() {
    check_seeds(Case::of(schemes::ONDEMAND_RPC));
}

/// Clocks differ, and clients and the memory node's CPU stand still for several leases.
#[test]
fn patronus() {
    let counts = check_seeds(Case::of(schemes::PATRONUS));
    assert!(counts.extensions > seeds() && counts.waits > seeds() && counts.expiries > seeds());
    // With clocks beyond the assumed bound, honest clients use leases that have ended.
    assert!(counts.refusals[0] > 0);
    assert!(counts.refusals[1] > seeds(), "too few forged accesses");
    assert!(counts.unopened > seeds() / 5, "too few window operations fail");
}

#[test]
fn patronus_2() {
    let counts = check_seeds(Case::of(schemes::PATRONUS_2));
    assert!(counts.unopened > seeds() / 5, "too few window operations fail");
}

#[test]
fn patronus_mr() {
    check_seeds(Case::of(schemes::PATRONUS_MR));
}

/// Only the rates of clocks matter: when a clock began to count changes no step.
#[test]
fn offsets_of_clocks_change_nothing() {
    let steps = |scenario: &Scenario, seed| {
        let trace = check::run_scenario(scenario, seed, true).trace.expect("a trace was wanted");
        // The first line has the clocks.
        trace.split_once('\n').expect("more than a line").1.to_owned()
    };
    for seed in 0..20 {
        let mut scenario = Scenario::draw(Case::of(schemes::PATRONUS), seed);
        let usual = steps(&scenario, seed);
        let plan = scenario.leases.take().expect("a scheme with leases");
        scenario.leases = Some(plan.with_offsets(Time::us(20_000_000_000)));
        assert!(steps(&scenario, seed) == usual, "seed {seed}");
    }
}

/// Without hostile clients, because nothing protects from them.
#[test]
fn shared_region() {
    check_seeds(Case::of(schemes::SHARED_REGION));
}

/// In `shared-region` a hostile client changes the chunk of another client by its own key.
#[test]
fn one_key_for_all_opens_every_chunk() {
    let abused = Case::ONE_KEY;
    assert!(abused.unsafe_by_design.is_some() && !Case::ALL.contains(&abused));
    // In other worlds the oracle first sees that a free chunk was written.
    let stolen = |seed| {
        let violation = check::run(abused, seed, false).violation?;
        (violation.invariant == Invariant::Accesses).then_some((seed, violation))
    };
    let (seed, violation) = (0..1000).find_map(stolen).expect("a hostile client uses the key");
    println!("{abused}, seed {seed}: {violation}");
}

/// In `rpc-mw-1` a key is guessed within a few worlds and opens another client's chunk. With type-2
/// windows the same guesses in the same worlds open nothing.
#[test]
fn guessed_key_opens_type_1_but_not_type_2_windows() {
    let guessed = Case::GUESSED;
    assert!(guessed.unsafe_by_design.is_some() && !Case::ALL.contains(&guessed));
    let worlds = 1000;
    let run = |seed| (seed, check::run(guessed, seed, false).violation);
    let found = (0..worlds).map(run).find_map(|(seed, v)| Some((seed, v?)));
    let (seed, violation) = found.expect("a key is guessed");
    println!("{guessed}, seed {seed}: {violation}");
    assert_eq!(violation.invariant, Invariant::Accesses, "{violation}");

    let mut guesses = 0;
    for seed in 0..seed + 200 {
        let outcome = check::run(Case::of(schemes::RPC_MW_2), seed, false);
        assert_eq!(outcome.violation, None, "rpc-mw-2, seed {seed}");
        guesses += outcome.counts.guesses;
    }
    println!("rpc-mw-2: {guesses} guesses opened nothing");
    assert!(guesses > 100);
}

/// In `onesidedmw-paper` a key is granted twice, or a chunk is lost, within a few worlds. In the
/// same worlds `onesidedmw` keeps all invariants.
#[test]
fn published_chain_grants_keys_again_and_loses_chunks() {
    let published = Case::PUBLISHED_CHAIN;
    assert!(published.unsafe_by_design.is_some() && !Case::ALL.contains(&published));
    let found: Vec<_> = (0..64)
        .filter_map(|seed| Some((seed, check::run(published, seed, false).violation?)))
        .collect();
    for (seed, violation) in &found {
        println!("{published}, seed {seed}: {violation}");
    }
    let has = |invariant| found.iter().any(|(_, found)| found.invariant == invariant);
    assert!(has(Invariant::Keys) && has(Invariant::Forgotten), "{found:?}");
    for seed in 0..64 {
        let outcome = check::run(Case::of(schemes::ONESIDEDMW), seed, false);
        assert_eq!(outcome.violation, None, "onesidedmw, seed {seed}");
    }
}

/// In `finemem-paper` a key that was used after its free changes the next owner's chunk. In
/// `finemem` the same clients, which also guess and steal keys, access nothing.
#[test]
fn late_key_opens_freed_but_not_quarantined_blocks() {
    let late = Case::LATE_KEYS;
    assert!(late.unsafe_by_design.is_some() && !Case::ALL.contains(&late));
    let run = |seed| (seed, check::run(late, seed, false).violation);
    let found = (0..1000).map(run).find_map(|(seed, v)| Some((seed, v?)));
    let (seed, violation) = found.expect("a late key is used");
    println!("{late}, seed {seed}: {violation}");
    assert_eq!(violation.invariant, Invariant::Accesses, "{violation}");

    let mut guesses = 0;
    for seed in 0..seed + 200 {
        let outcome = check::run(Case::of(schemes::FINEMEM), seed, false);
        assert_eq!(outcome.violation, None, "finemem, seed {seed}");
        guesses += outcome.counts.guesses;
    }
    println!("finemem: {guesses} guesses opened nothing");
    assert!(guesses > 100);
}

/// Regression test: seeds that once found a defect.
#[test]
fn fixed_defects_stay_fixed() {
    let found = [
        // A bulletin that was written before its client had connected broke the access QP.
        (schemes::ONESIDEDMW, 1404),
        // A chunk whose grant was lost stayed allocated after its owner had re-established the
        // connection.
        (schemes::RPC_MW_2, 91),
        (schemes::RPC_MW_2, 97),
        // Bulletins to a client that did not answer for a while left no room for its replies.
        (schemes::RPC_MW_2, 1091),
        (schemes::FINE_MR, 2557),
        // A free of a chunk whose window an allocation took over in the same quantum released the
        // chunk twice.
        (schemes::RPC_MW_1, 1361),
        // A free that waited for a read continued when its owner was notified, after the page had
        // been taken from it.
        (schemes::ODRP, 2890),
        // The oracle took a QP's planned operation for the executed one, after the QP was
        // reconnected in between.
        (schemes::ODRP, 2315),
        // A fiber that had polled beyond the visible completions never waited.
        (schemes::ONESIDEDMW, 0),
        // The wait of one request for its connection consumed the wake-up of another request: a
        // defect of the simulator.
        (schemes::FINEMEM, 4301),
        // A client that searched for lost grants freed again a block that it had already freed,
        // while the block got its new key.
        (schemes::FINEMEM, 6921),
        // The memory node took the time of arrival of a request before its poll for requests, so
        // that the compute node believed in its lease for too long after a stall in between.
        (schemes::PATRONUS, 21),
    ];
    for (scheme, seed) in found {
        assert_eq!(
            check::run(Case::of(scheme), seed, false).violation,
            None,
            "{scheme}, seed {seed}"
        );
    }
}

#[test]
fn seed_determines_every_step() {
    for case in Case::ALL {
        for seed in 0..10 {
            let run = || check::run(*case, seed, true).trace.expect("a trace was wanted");
            let first = run();
            assert!(first.lines().count() > 10, "{first}");
            assert!(first == run(), "{case}, seed {seed}: two runs differ");
        }
    }
}
