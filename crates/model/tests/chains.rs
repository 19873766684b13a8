//! Every state of the small configurations; with `GRANARY_TEST_FULL=1` 200,000 of the larger ones too.
//!
//! The allocator that makes this possible is per thread, so the tests may run side by side.

use model::config::{self, Config};
use model::{Report, explore, prepare};

/// States after which a configuration of the full run is called bounded: half a minute of each on one core.
const LIMIT: u64 = 200_000;

/// [`LIMIT`], or what `GRANARY_MODEL_STATES` says. A state takes 16 bytes, and some 0.1 ms.
fn limit() -> u64 {
    let given = std::env::var("GRANARY_MODEL_STATES").ok();
    given.map_or(LIMIT, |n| n.parse().expect("GRANARY_MODEL_STATES is a number"))
}

fn full() -> bool {
    std::env::var_os("GRANARY_TEST_FULL").is_some_and(|v| v == "1")
}

fn check(config: &Config) -> Report {
    match explore(config, if full() { limit() } else { config.quick }) {
        Ok(report) => {
            println!(
                "{}: {} states, {} actions, {} ends, longest run {}, {:.1} s, {}",
                config.name,
                report.states,
                report.actions,
                report.ends,
                report.depth,
                report.time.as_secs_f64(),
                if report.exhausted { "exhausted" } else { "bounded" }
            );
            assert!(report.ends > 0, "{}: nothing ever ends", config.name);
            report
        }
        Err(violation) => panic!("{}:\n{violation}", config.name),
    }
}

/// Explores the configurations that are picked, and says that there are some.
fn check_all(pick: impl Fn(&Config) -> bool) {
    prepare();
    let picked: Vec<Config> =
        config::all().into_iter().filter(|c| (c.quick > 0 || full()) && pick(c)).collect();
    if picked.is_empty() {
        println!("all of these are for full runs: GRANARY_TEST_FULL=1");
    }
    for config in &picked {
        let report = check(config);
        let whole = config.quick == u64::MAX;
        assert!(report.exhausted || !whole, "{} is too large for every run", config.name);
    }
}

fn lies(c: &Config) -> bool {
    c.clients.iter().flatten().any(|op| !op.is_honest())
}

#[test]
fn friends_share_a_pool() {
    check_all(|c| c.crash.is_none() && !lies(c));
}

#[test]
fn a_client_crashes_at_any_moment() {
    check_all(|c| c.crash.is_some());
}

#[test]
fn a_client_lies() {
    check_all(|c| c.crash.is_none() && lies(c));
}

/// What may be taken alone, may: without that reduction, runs end in the same ways.
#[test]
fn the_reduction_loses_no_end() {
    prepare();
    let all = config::all();
    let pairs: Vec<(&Config, &Config)> = all
        .iter()
        .filter_map(|whole| {
            let name = whole.name.strip_suffix(", unreduced")?;
            Some((whole, all.iter().find(|c| c.name == name).expect("its reduced twin")))
        })
        .filter(|(whole, _)| whole.quick > 0 || full())
        .collect();
    assert!(pairs.len() >= 2);
    for (whole, reduced) in pairs {
        assert!(!whole.reduce && reduced.reduce);
        let (whole, reduced) = (check(whole), check(reduced));
        assert!(reduced.exhausted, "too large to be exhausted, and to be compared");
        // Of what is too large to be exhausted, each end that was seen.
        assert!(whole.outcomes.is_subset(&reduced.outcomes), "an end is lost");
        assert!(!whole.exhausted || whole.outcomes == reduced.outcomes);
        assert!(reduced.states < whole.states, "it reduces nothing");
    }
}
