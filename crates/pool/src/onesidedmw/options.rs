//! Settings of scheme `onesidedmw`, and the terms that it tells its clients.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::budget::Budget;
use crate::protocol::NodeHello;
use crate::settings::{Settings, require};

/// Settings of the scheme.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Options {
    /// Allocation has QPs of its own (OneSidedMW §4.2). If false, each access QP carries the chain
    /// that allocates for it; only for comparison.
    pub separation: bool,
    /// Limits of each client.
    pub budget: Budget,
}

impl Default for Options {
    fn default() -> Self {
        Self { separation: true, budget: Budget::default() }
    }
}

impl Options {
    /// The options in `settings`, checked.
    pub fn of(settings: &Settings) -> Result<Self, Error> {
        let own: Self = settings.options.parse()?;
        let budget = &own.budget;
        require(
            own.separation || !budget.is_set(),
            "separation",
            own.separation,
            "budgets need management QPs of their own",
        )?;
        for (name, limit) in
            [("budget_requests_per_s", budget.requests_per_s), ("budget_chunks", budget.chunks)]
        {
            require(limit != Some(0), name, 0, "must be at least 1")?;
        }
        require(
            !budget.is_set()
                || (Duration::from_millis(1)..=Duration::from_secs(60)).contains(&budget.interval),
            "budget_interval_ms",
            budget.interval.as_millis(),
            "must be 1 ms to 60 s",
        )?;
        Ok(own)
    }
}

/// Terms that the memory node tells its clients.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// See [`Options::separation`].
    #[serde(default = "yes")]
    pub separation: bool,
    /// Maximum number of chunks that a client may hold, if limited.
    #[serde(default)]
    pub budget_chunks: Option<u64>,
}

impl Terms {
    /// The terms of a memory node.
    pub fn of(hello: &NodeHello) -> Result<Self, Error> {
        crate::options::parse_terms(&hello.terms)
    }
}

fn yes() -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_setting() {
        let budget = |requests_per_s, interval| {
            let budget = Budget { requests_per_s, interval, ..Budget::default() };
            Settings::default().with("budget", budget)
        };
        let fine = Duration::from_millis(50);
        for (name, settings) in [
            ("budget_requests_per_s", budget(Some(0), fine)),
            ("budget_interval_ms", budget(Some(1), Duration::ZERO)),
            ("separation", budget(Some(1), fine).with("separation", false)),
        ] {
            match Options::of(&settings) {
                Err(Error::Setting { setting, .. }) => assert_eq!(setting, name),
                other => panic!("{name}: {other:?}"),
            }
        }
    }
}
