//! Runs of a store by seed, with faults, whose histories are checked for linearizability.
//!
//! A seed decides the number of clients and keys, the operations, their order, and the faults:
//! stalls, lost round trips, crashes at any verb. Subtables have two groups, so that they split.

mod allocator;
mod alone;
pub mod linear;
mod shared;
mod values;

use std::panic::{AssertUnwindSafe, catch_unwind};

/// The subject of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// Tasks of one owner, and its successor after a crash.
    Alone,
    /// Several clients of one index.
    Shared,
}

impl Case {
    /// All cases.
    pub const ALL: [Self; 2] = [Self::Alone, Self::Shared];

    /// The name on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Alone => "kv-alone",
            Self::Shared => "kv-shared",
        }
    }
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// What happened in a run, or in several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Operations whose results were checked.
    pub operations: u64,
    /// Verbs.
    pub verbs: u64,
    /// Splits of subtables.
    pub splits: u64,
    /// Compute nodes that crashed.
    pub crashes: u64,
    /// Round trips lost.
    pub lost: u64,
    /// Stalls of a compute node.
    pub stalls: u64,
}

impl Counts {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        self.operations += other.operations;
        self.verbs += other.verbs;
        self.splits += other.splits;
        self.crashes += other.crashes;
        self.lost += other.lost;
        self.stalls += other.stalls;
    }
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What happened.
    pub counts: Counts,
    /// The rule that was violated.
    pub violation: Option<String>,
}

/// Runs one seed. The same seed gives the same run on any machine.
pub fn run(case: Case, seed: u64) -> Outcome {
    let mut counts = Counts::default();
    // A panic of the code under test is a violation too.
    let ran = catch_unwind(AssertUnwindSafe(|| match case {
        Case::Alone => alone::run(seed, &mut counts),
        Case::Shared => shared::run(seed, &mut counts),
    }));
    let violation = match ran {
        Ok(result) => result.err(),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied());
            Some(format!("panic: {}", text.unwrap_or("without a text")))
        }
    };
    Outcome { counts, violation }
}
