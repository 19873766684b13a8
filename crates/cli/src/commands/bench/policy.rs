//! `granary bench policy`: replacement policies on fault traces.

use std::path::PathBuf;
use std::process::ExitCode;

use bench::policy::{self, PERCENTS, replay::Costs};
use pager::policy::Name;
use pager::trace::Trace;

use super::BenchOutput;

/// Replay fault traces over the pager's replacement policies
///
/// Prints the cost of an access for each trace, each policy, and limits of 25, 50, 70 and 90
/// percent of the trace's pages. Faults and pages read ahead have fixed costs, so the result does
/// not depend on this machine. Column "min" is Belady's MIN, which knows the future. The second
/// table has the sum of each policy's costs, and its largest ratio to the best policy of a case.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Policy {
    /// Traces that granary run --trace has recorded
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,

    /// Policies to replay, separated by commas [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    policies: Vec<Name>,

    /// Replay only the first faults of each trace
    #[arg(long, value_name = "NUMBER")]
    first: Option<usize>,

    /// Do not read streams ahead: each fault brings one page
    #[arg(long)]
    no_streams: bool,

    #[command(flatten)]
    output: BenchOutput<(), ()>,
}

const EXAMPLES: &str = "\
Examples:
  granary run --local 4MiB --trace sort.trace -- sort big.txt -o sorted.txt
  granary bench policy sort.trace
  granary bench policy *.trace --policies random,duel --json > policy.jsonl";

impl Policy {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let mut report = self.output.report();
        let mut traces = Vec::new();
        for path in &self.traces {
            let name = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy();
            let mut trace = Trace::read(path)?;
            trace.events.truncate(self.first.unwrap_or(usize::MAX));
            traces.push((name.into_owned(), trace));
        }
        let policies = if self.policies.is_empty() { &Name::ALL[..] } else { &self.policies };
        let costs = Costs { streams: !self.no_streams, ..Costs::default() };
        let bar = self.output.progress().bar("policy", (traces.len() * PERCENTS.len()) as u64);
        let cases = policy::run(&traces, policies, &costs, |name| {
            bar.say(name);
            bar.step();
        });
        drop(bar);
        report.extend(policy::records(&cases))?;
        for (title, table) in policy::tables(&cases) {
            report.table(&title, &table)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
