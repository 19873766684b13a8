//! The papers' experiments, with the papers' numbers beside ours.
//!
//! ```text
//!   onesidedmw.rs, finemem/, patronus/   the lists of experiments (experiment.rs) and their claims
//!      │ loads                  (latency.rs, chain_queues.rs, registration.rs, ...)
//!      ▼
//!   Testbed ── simulated.rs: a model of the paper's cluster under virtual time
//!       └── testbed.rs: this machine, with threads and a memory node's process
//!      │ results                (results.rs: a record, its description, its provenance)
//!      ▼
//!   tables and the summary of claims (results.rs), pictures (picture.rs)
//! ```
//!
//! [`sams`] and [`tdmem`] are papers of their own kind: their programs ([`programs`]) run in
//! processes, on several systems. So do those of OneSidedMW's experiment [`swap`], over several
//! schemes.
//!
//! Each other experiment is one function that is generic over the testbed: the same loops run under
//! virtual time and on a clock. Simulated and measured numbers never share a table.

pub mod barrier;
pub mod chain_queues;
pub mod churn;
pub mod experiment;
pub mod finemem;
pub mod latency;
pub mod load;
pub mod measure;
pub mod onesidedmw;
pub mod patronus;
pub mod picture;
pub mod programs;
pub mod registration;
pub mod results;
pub mod sams;
pub mod scalability;
pub mod simulated;
pub mod store;
pub mod swap;
pub mod tdmem;
pub mod testbed;
pub mod traces;
pub mod verb_times;

#[cfg(test)]
mod tests;

use crate::Error;
use bench_report::histogram::Latencies;
use bench_report::progress::Bar;
use bench_report::record::Statistic;
use testbed::Testbed;

/// Extent of an experiment's run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// All of the paper's points.
    Full,
    /// Fewer points and fewer rounds: enough to see the shape of the results.
    Quick,
}

impl Extent {
    /// Rounds of a loop; a quick run makes a tenth of them.
    fn rounds(self, full: u32) -> u32 {
        match self {
            Self::Full => full,
            Self::Quick => (full / 10).max(full.min(2)),
        }
    }
}

/// Context of an experiment's run.
pub struct Run<'a> {
    /// The testbed that the experiment runs on.
    pub testbed: &'a dyn Testbed,
    /// Full or quick.
    pub extent: Extent,
    /// Progress bar.
    pub bar: &'a Bar,
}

impl Run<'_> {
    /// Runs one measurement and advances the progress bar.
    fn load(&self, what: &str, load: &load::Load) -> Result<measure::Outcome, Error> {
        self.bar.say(what);
        let failed = |why| Error::Point { point: what.into(), why: Box::new(why) };
        let outcome = self.testbed.run(load).map_err(failed)?;
        self.bar.step();
        Ok(outcome)
    }

    /// Rounds of a loop. A measured loop needs more rounds, because of scheduling delays.
    fn rounds(&self, full: u32) -> u32 {
        self.extent.rounds(if self.testbed.simulated() { full } else { 3 * full })
    }

    /// Reduces latencies to one number: the mean under virtual time, as in the papers; the median
    /// on a clock, because a single scheduling delay outweighs a thousand requests in a mean.
    fn typical(&self, latencies: &Latencies) -> (Statistic, f64) {
        match typical_statistic(self.testbed.simulated()) {
            Statistic::P50 => (Statistic::P50, latencies.quantile_us(0.5)),
            _ => (Statistic::Mean, latencies.mean_us()),
        }
    }

    /// The common part of all settings of this run.
    fn setting(&self, scheme: &str) -> bench_report::record::Setting {
        bench_report::record::Setting::new().scheme(scheme).nic(self.testbed.nic())
    }
}

/// The statistic of [`Run::typical`].
fn typical_statistic(simulated: bool) -> Statistic {
    if simulated { Statistic::Mean } else { Statistic::P50 }
}

/// `1 thread`, `24 threads`.
fn count(n: u32, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}
