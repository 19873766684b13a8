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
    assert!(counts.empty > 0 && counts.deaths > 0);
    // Without separation, requests fail in one of 500 seeds.
    let fails = case.to_string() != "onesidedmw-without-separation";
    assert!(!fails || counts.errors[0] > 0);
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

/// Seed 52317 of `patronus`: a bind failed, no window was left for its repetition, and the
/// permission was granted with a key that opens nothing.
#[test]
fn permission_without_a_window_is_refused() {
    let outcome = check::run(Case::of(schemes::PATRONUS), 52_317, false);
    assert_eq!(outcome.violation, None);
    assert!(outcome.counts.unopened > 0);
}

#[test]
fn patronus_2() {
    let counts = check_seeds(Case::of(schemes::PATRONUS_2));
    assert!(counts.unopened > seeds() / 5, "too few window operations fail");
}

/// Seed 38242 of `patronus-2`: a hostile client broke its access QP while the memory node connected
/// it again for a window operation, and the memory node's CPU ended. Seed 52727: an access of a
/// hostile client broke a QP at the moment at which a window operation on it failed; the simulator
/// did not flush the operation, for which the memory node waited.
#[test]
fn memory_node_outlives_qps_that_break_while_it_binds() {
    for seed in [38_242, 52_727] {
        let outcome = check::run(Case::of(schemes::PATRONUS_2), seed, false);
        assert_eq!(outcome.violation, None, "seed {seed}");
    }
}

#[test]
fn patronus_mr() {
    check_seeds(Case::of(schemes::PATRONUS_MR));
}

/// Seed 57401 of `patronus-mr`: a mistake of the oracle. It blamed the NIC for a forbidden WQE that
/// had not been executed yet, because the hostile client had paused.
#[test]
fn pause_of_a_hostile_client_is_no_privilege() {
    let outcome = check::run(Case::of(schemes::PATRONUS_MR), 57_401, false);
    assert_eq!(outcome.violation, None);
}

/// Honest clients, none of whose accesses is late: none is refused then.
#[test]
fn patronus_paper() {
    let counts = check_seeds(Case::PUBLISHED_LEASES);
    assert!(counts.extensions > seeds() && counts.waits > seeds() && counts.expiries > seeds());
    assert_eq!(counts.refusals, [0, 0]);
}

/// A violation that an unsafe case must find: the invariant, and words of the description.
type Hole = (Invariant, [&'static str; 2]);

/// Checks that a case finds its holes in its first worlds.
fn finds(case: Case, worlds: u64, holes: &[Hole]) {
    assert!(case.unsafe_by_design.is_some() && !Case::ALL.contains(&case));
    let run = |seed| Some((seed, check::run(case, seed, false).violation?));
    let found: Vec<_> = (0..worlds).filter_map(run).collect();
    for (invariant, words) in holes {
        let is_it = |why: &str| words.iter().all(|word| why.contains(word));
        let hole = found.iter().find(|(_, v)| v.invariant == *invariant && is_it(&v.why));
        let Some((seed, violation)) = hole else {
            panic!("{case}: {invariant:?}, {words:?} is not in {found:?}");
        };
        println!("{case}, seed {seed}: {violation}");
    }
}

/// Checks that a case with one misuse finds its holes, and that the same clients find nothing in
/// `patronus`. `attempts` counts what they try there.
fn only_unsafe_form_has(name: &str, holes: &[Hole], attempts: fn(&EventCounts) -> u64) {
    let (case, worlds) = (named(name), 100);
    finds(case, worlds, holes);
    let mut counts = EventCounts::default();
    for seed in 0..worlds {
        let outcome = check::run(Case { scheme: schemes::PATRONUS, ..case }, seed, false);
        assert_eq!(outcome.violation, None, "{case} with patronus, seed {seed}");
        counts.add(&outcome.counts);
    }
    println!("{case} with patronus: {} attempts", attempts(&counts));
    assert!(attempts(&counts) > worlds / 10);
}

fn refused(counts: &EventCounts) -> u64 {
    counts.refusals[1]
}

/// In `patronus-paper` the key that follows from a dead one opens the next holder's object.
#[test]
fn next_key_opens_the_next_holders_object() {
    let exclusive = (Invariant::Exclusive, ["hostile", "without a permission"]);
    only_unsafe_form_has("patronus-paper-guessed", &[exclusive], refused);
}

/// In `patronus-paper` keys of a freed object and of a former header open memory.
#[test]
fn late_key_opens_a_freed_object_and_a_former_header() {
    let object = (Invariant::Dead, ["hostile", "8) by the key of an ended permission"]);
    let header = (Invariant::Dead, ["hostile", "a lifetime by the key of an ended permission"]);
    only_unsafe_form_has("patronus-paper-late-keys", &[object, header], refused);
}

/// In `patronus-paper` a permission for reading opens atomics, and a holder WRITEs its lifetime.
#[test]
fn holder_exceeds_its_permission() {
    let atomic = (Invariant::Permissions, ["hostile", "by an atomic without a permission"]);
    let lifetime = (Invariant::Permissions, ["hostile", "by a WRITE without a permission"]);
    only_unsafe_form_has("patronus-paper-exceeded", &[atomic, lifetime], refused);
}

/// In `patronus-paper` a client acquires and frees objects of another domain.
#[test]
fn foreign_object_is_acquired_and_freed() {
    let acquired = (Invariant::Permissions, ["hostile", "has a permission for a foreign object"]);
    let freed = (Invariant::Permissions, ["hostile", "frees a foreign object"]);
    // Some objects are of the client's own domain.
    let granted = |counts: &EventCounts| counts.grants[1];
    only_unsafe_form_has("patronus-paper-foreign", &[acquired, freed], granted);
}

/// In `unprotected` each client's key opens all objects, and no lease ends.
#[test]
fn unprotected_key_opens_every_object() {
    let key = (Invariant::Permissions, ["hostile", "without a permission"]);
    let lease = (Invariant::Bounded, ["client", "believes in"]);
    only_unsafe_form_has("unprotected-abused", &[key, lease], refused);
}

/// In `patronus-paper` an extension of an honest client that arrives late reaches a header that
/// may be that of another permission.
#[test]
fn late_extension_reaches_a_former_header() {
    let header = (Invariant::Dead, ["client", "a lifetime by the key of an ended permission"]);
    finds(Case::LATE_EXTENSIONS, 100, &[header]);
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
