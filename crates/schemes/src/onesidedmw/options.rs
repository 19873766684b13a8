//! NodeSettings of scheme `onesidedmw`, and the terms that it tells its clients.

use std::time::Duration;

use scheme::{Error, NodeSettings, Offer, require};
use serde::{Deserialize, Serialize};

/// NodeSettings of the scheme.
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
    pub fn of(settings: &NodeSettings) -> Result<Self, Error> {
        let own: Self = settings.options.parse()?;
        require(
            own.separation || settings.scheme != super::ONESIDEDMW_PAPER,
            "separation",
            own.separation,
            "the chain of onesidedmw-paper needs an Alloc QP of its own",
        )?;
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

/// Limits of each compute node. Without a limit, the counters are not read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Budget {
    /// Allocations and frees per second, averaged over one second.
    pub requests_per_s: Option<u64>,
    /// Chunks held.
    pub chunks: Option<u64>,
    /// Interval at which the counters are read.
    pub interval: Duration,
    /// Time for which a closed management connection stays closed, the first time.
    pub suspension: Duration,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            requests_per_s: None,
            chunks: None,
            interval: Duration::from_millis(50),
            suspension: Duration::from_secs(1),
        }
    }
}

impl Budget {
    /// True if a limit is set.
    pub fn is_set(&self) -> bool {
        self.requests_per_s.is_some() || self.chunks.is_some()
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
    pub fn of(offer: &Offer) -> Result<Self, Error> {
        scheme::options::parse_terms(&offer.terms)
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
            NodeSettings::new(crate::ONESIDEDMW, 8, 4096).with("budget", budget)
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
