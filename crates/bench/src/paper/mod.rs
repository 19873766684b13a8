//! The papers' experiments, with their numbers beside ours.
//!
//! ```text
//!   onesidedmw.rs, finemem   which experiments there are (experiment.rs), and which claims they cover
//!      │ loads                      (latency.rs, chain_queues.rs, registration.rs, scalability.rs, ...)
//!      ▼
//!   Place ── simulated.rs: a paper's cluster, under virtual time
//!       └── place.rs: this machine, threads and a memory node's process
//!      │ findings                   (finding.rs: a record, what it is in words, how it came about)
//!      ▼
//!   tables and the tally (finding.rs), pictures (picture.rs)
//! ```
//!
//! Each experiment is one function, generic over the place: the same loops run under virtual time and
//! on a clock. What is simulated and what is measured never stand in one table.

pub mod chain_queues;
pub mod churn;
pub mod experiment;
pub mod finding;
pub mod finemem;
pub mod latency;
pub mod load;
pub mod meeting;
pub mod onesidedmw;
pub mod picture;
pub mod place;
pub mod registration;
pub mod scalability;
pub mod simulated;
pub mod traces;
pub mod verbs;

#[cfg(test)]
mod tests;

use crate::Error;
use crate::histogram::Latencies;
use crate::progress::Bar;
use crate::record::Statistic;
use place::Place;

/// How much of an experiment is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// All of the paper's points.
    Full,
    /// Its form: fewer points, fewer rounds.
    Quick,
}

impl Extent {
    /// Rounds of a loop, of which a quick run makes a tenth.
    fn rounds(self, full: u32) -> u32 {
        match self {
            Self::Full => full,
            Self::Quick => (full / 10).max(full.min(2)),
        }
    }
}

/// What an experiment runs with.
pub struct Run<'a> {
    /// Where.
    pub place: &'a dyn Place,
    /// How much.
    pub extent: Extent,
    /// Says how far it is.
    pub bar: &'a Bar,
}

impl Run<'_> {
    /// Runs one measurement, and says so.
    fn load(&self, what: &str, load: &load::Load) -> Result<load::Outcome, Error> {
        self.bar.say(what);
        let outcome = self.place.run(load)?;
        self.bar.step();
        Ok(outcome)
    }

    /// Rounds of a loop: a clock sees a scheduler besides, and needs more of them.
    fn rounds(&self, full: u32) -> u32 {
        self.extent.rounds(if self.place.simulated() { full } else { 3 * full })
    }

    /// A latency as one number, with what it is: the mean, as the papers have it; on a clock the median,
    /// since one turn of the scheduler outweighs a thousand requests.
    fn typical(&self, all: &Latencies) -> (Statistic, f64) {
        match typical_of(self.place.simulated()) {
            Statistic::P50 => (Statistic::P50, all.quantile_us(0.5)),
            _ => (Statistic::Mean, all.mean_us()),
        }
    }

    /// The first part of all its settings.
    fn setting(&self, scheme: &str) -> crate::record::Setting {
        crate::record::Setting::new().scheme(scheme).nic(self.place.nic())
    }
}

/// See [`Run::typical`].
fn typical_of(simulated: bool) -> Statistic {
    if simulated { Statistic::Mean } else { Statistic::P50 }
}

/// `1 thread`, `24 threads`.
fn count(n: u32, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}
