//! Explores every state of the small configurations; with `GRANARY_TEST_FULL=1` also up to 200,000
//! states of each larger one.
//!
//! The allocator of the arenas is per thread, so tests may run in parallel.

use model::config::{self, Config};
use model::{Report, explore, prepare};

/// States after which a configuration of the full run counts as bounded: half a minute on one core.
const LIMIT: u64 = 200_000;

/// Returns `GRANARY_MODEL_STATES` or [`LIMIT`]. A state takes 16 bytes and about 0.1 ms.
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

/// Explores the selected configurations.
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
fn honest_clients_share_a_pool() {
    check_all(|c| c.crash.is_none() && !lies(c));
}

#[test]
fn client_may_crash_at_any_moment() {
    check_all(|c| c.crash.is_some());
}

#[test]
fn client_may_send_invalid_requests() {
    check_all(|c| c.crash.is_none() && lies(c));
}

/// Exploring commuting actions alone does not lose a final state.
#[test]
fn reduction_preserves_final_states() {
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
        // If the unreduced configuration is too large to exhaust, each final state that was seen is
        // compared.
        assert!(whole.outcomes.is_subset(&reduced.outcomes), "an end is lost");
        assert!(!whole.exhausted || whole.outcomes == reduced.outcomes);
        assert!(reduced.states < whole.states, "it reduces nothing");
    }
}
