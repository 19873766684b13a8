//! `granary sim`: runs the pool's own code under virtual time.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use bench_report::progress::Progress;
use sim::check::{self, Case};

use crate::UsageError;
use crate::options::seconds;

/// Run the pool's own code under virtual time
#[derive(clap::Subcommand, Debug)]
#[command(after_help = EXAMPLES)]
pub enum Sim {
    Check(Check),
}

const EXAMPLES: &str = "\
Examples:
  granary sim check --seeds 0..1000    a thousand simulated runs with faults and attacks";

/// Check the pool under crashes, packet loss and attacks
///
/// Runs the memory node and its clients, the same code that runs on a real NIC, in one simulated
/// world per seed. The seed decides the size of the world and its faults: clients crash, pause and
/// resume at any step; packets are lost or delayed; nodes cannot reach each other; the memory
/// node's CPU is slow; hostile clients replay requests, guess keys and send wrong arguments. After
/// every step the scheme's invariants must hold: no chunk has two owners; no access takes effect
/// outside its owner's chunk or after the chunk's release; a free chunk is cleared, and free only
/// once; chunks of crashed clients become free in bounded time; every request completes.
///
/// The cases "kv-alone" and "kv-shared" check the key-value index over a model of remote memory:
/// clients crash, stall and lose round trips, and the history of each key must be linearizable.
///
/// A seed determines the whole run: it gives the same steps on any machine. A failing seed is
/// printed with the command that repeats it and prints every step.
#[derive(clap::Args, Debug)]
#[command(after_help = CHECK_EXAMPLES)]
pub struct Check {
    /// Case to check: a scheme, "onesidedmw-without-separation", "onesidedmw-without-grouping",
    /// "onesidedmw-paper", "rpc-mw-1-guessed", "shared-region-abused", "unprotected-abused" or
    /// "patronus-paper-guessed" (unsafe by design; an unknown name lists all cases),
    /// "kv-alone" or "kv-shared", or "all": every case that must hold
    #[arg(long, value_name = "SCHEME", default_value = "all")]
    scheme: String,

    /// Seeds to run: from A to B, excluding B
    #[arg(long, value_name = "A..B", default_value = "0..1000", conflicts_with = "seed")]
    seeds: Seeds,

    /// Run a single seed
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// Print every step to standard output
    #[arg(long)]
    trace: bool,

    /// Stop after this many minutes, even if seeds are left
    #[arg(long, value_name = "MINUTES", value_parser = minutes)]
    minutes: Option<Duration>,

    /// Continue after a failing seed
    #[arg(long)]
    keep_going: bool,
}

const CHECK_EXAMPLES: &str = "\
Examples:
  granary sim check                                          a thousand seeds of each scheme
  granary sim check --scheme onesidedmw --seeds 0..100000    many seeds of one scheme
  granary sim check --scheme rpc-mw-2 --seed 17 --trace      one seed, every step printed
  granary sim check --scheme kv-shared --seeds 0..100000     several clients of one index
  granary sim check --seeds 0..1000000 --minutes 10          as many seeds as fit in ten minutes

Exit codes: 0 no violation, 1 at least one violation, 2 wrong command line.";

/// A range of seeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seeds {
    from: u64,
    to: u64,
}

impl std::str::FromStr for Seeds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not a range of seeds; write e.g. 0..1000");
        let (from, to) = text.split_once("..").ok_or_else(wrong)?;
        let from = from.parse().map_err(|_| wrong())?;
        let to = to.parse().map_err(|_| wrong())?;
        if from < to { Ok(Self { from, to }) } else { Err(wrong()) }
    }
}

fn minutes(text: &str) -> Result<Duration, String> {
    let minutes: f64 = text.parse().map_err(|_| "write minutes, e.g. 10".to_owned())?;
    seconds(&(minutes * 60.0).to_string())
}

impl Sim {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Check(check) => check.run(),
        }
    }
}

impl Check {
    fn run(self) -> anyhow::Result<ExitCode> {
        let index = self.index_cases();
        let cases = if self.scheme != "all" && !index.is_empty() { vec![] } else { self.cases()? };
        let seeds = match self.seed {
            Some(seed) => Seeds { from: seed, to: seed.saturating_add(1) },
            None => self.seeds,
        };
        let deadline = self.minutes.map(|m| Instant::now() + m);
        let mut failed = false;
        for case in cases {
            failed |= self.check(case, seeds, deadline);
            if failed && !self.keep_going {
                break;
            }
        }
        for case in index {
            if failed && !self.keep_going {
                break;
            }
            failed |= self.check_index(case, seeds, deadline);
        }
        Ok(ExitCode::from(failed as u8))
    }

    fn cases(&self) -> Result<Vec<Case>, UsageError> {
        if self.scheme == "all" {
            return Ok(Case::ALL.to_vec());
        }
        let case = self.scheme.parse().map(|case| vec![case]);
        case.map_err(|why| UsageError(format!("--scheme: {why}, or \"all\""), "sim check"))
    }

    /// The cases of the key-value index among those that the command names.
    fn index_cases(&self) -> Vec<kv::check::Case> {
        let all = kv::check::Case::ALL.into_iter();
        all.filter(|case| self.scheme == "all" || self.scheme == case.name()).collect()
    }

    /// Runs the seeds of one case of the key-value index; true if a rule was violated.
    fn check_index(&self, case: kv::check::Case, seeds: Seeds, deadline: Option<Instant>) -> bool {
        let mut counts = kv::check::Counts::default();
        let ran = self.run_seeds(&case.to_string(), "", seeds, deadline, |seed| {
            let outcome = kv::check::run(case, seed);
            counts.add(&outcome.counts);
            outcome.violation
        });
        println!(
            "{case}: {ran}; {} operations, {} verbs, {} splits, {} clients crashed, {} round trips \
             lost, {} stalls",
            counts.operations,
            counts.verbs,
            counts.splits,
            counts.crashes,
            counts.lost,
            counts.stalls,
        );
        ran.failures > 0
    }

    /// Runs the seeds of one case; true if an invariant was violated.
    fn check(&self, case: Case, seeds: Seeds, deadline: Option<Instant>) -> bool {
        if let Some(why) = case.unsafe_by_design {
            println!("{case}: unsafe by design: {why}; a violation is expected");
        }
        let mut counts = check::EventCounts::default();
        let ran = self.run_seeds(&case.to_string(), " --trace", seeds, deadline, |seed| {
            let outcome = check::run(case, seed, self.trace);
            if let Some(trace) = &outcome.trace {
                print!("{trace}");
            }
            counts.add(&outcome.counts);
            outcome.violation
        });
        println!(
            "{case}: {ran}; {} NIC steps, {} chunks granted, {} accesses, {} processes killed, {} \
             requests refused or failed",
            counts.steps,
            counts.grants.iter().sum::<u64>(),
            counts.accesses,
            counts.deaths,
            counts.errors.iter().sum::<u64>(),
        );
        ran.failures > 0
    }

    /// Calls `run` with each seed until the deadline, or until the first violation without
    /// `--keep-going`. Prints each violation, with the command that repeats it: `options` are its
    /// options besides case and seed.
    fn run_seeds<V: std::fmt::Display>(
        &self,
        case: &str,
        options: &str,
        seeds: Seeds,
        deadline: Option<Instant>,
        mut run: impl FnMut(u64) -> Option<V>,
    ) -> Ran {
        let bar = Progress::new(self.trace).bar(&format!("check {case}"), seeds.to - seeds.from);
        let (start, mut ran) = (Instant::now(), Ran::default());
        for seed in seeds.from..seeds.to {
            if deadline.is_some_and(|d| Instant::now() >= d) {
                break;
            }
            let violation = run(seed);
            ran.seeds += 1;
            bar.step();
            if let Some(why) = violation {
                ran.failures += 1;
                println!("\n{case}: seed {seed}: {why}");
                println!("  granary sim check --scheme {case} --seed {seed}{options}");
                if !self.keep_going {
                    break;
                }
            }
        }
        ran.time = start.elapsed();
        ran
    }
}

/// What [`Check::run_seeds`] ran.
#[derive(Default)]
struct Ran {
    seeds: u64,
    failures: u64,
    time: Duration,
}

impl std::fmt::Display for Ran {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { seeds, failures, time } = self;
        write!(f, "{seeds} seeds, {failures} with a violation, in {:.1} s", time.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_parse_as_a_range() {
        assert_eq!("3..17".parse(), Ok(Seeds { from: 3, to: 17 }));
        for wrong in ["", "3", "3..", "..3", "5..5", "6..5", "a..b"] {
            assert!(wrong.parse::<Seeds>().is_err(), "{wrong}");
        }
        assert_eq!(minutes("0.5"), Ok(Duration::from_secs(30)));
    }
}
