//! `granary bench paper`: the papers' experiments, their numbers beside ours.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use bench::claims::Claims;
use bench::paper::experiment::{self, Experiment};
use bench::paper::finding::{Findings, Tally};
use bench::paper::place::{Machine, Node, Place};
use bench::paper::simulated::Simulated;
use bench::paper::{Extent, Run, finemem, onesidedmw};
use bench::record::Record;
use bench::report::Report;
use bench::table::{Cell, Table};
use clap::ValueEnum as _;
use pool::{Options, Pool, Settings};

use super::begin;
use crate::UsageError;
use crate::node::NodeProcess;
use crate::options::{Output, Pictures};

/// Run a paper's experiments: its numbers beside ours, simulated and measured
///
/// Each experiment runs twice: simulated, on the paper's cluster under virtual time (the same protocol code as
/// everywhere, on NICs with a timing model), and measured, on this machine over shared memory. Each way has tables of its own: what
/// it is, the number that the paper states, ours, their ratio, and how ours came about:
///
///   predicted   the timing model knows nothing of the paper's number
///   fitted      a parameter was chosen to meet it: no evidence
///   arithmetic  it follows from the workload alone: no evidence
///   measured    on a clock, on other hardware than the paper's
///   no claim    no text states it
///
/// Simulated latencies are means, as the papers have them, measured ones medians.
///
/// Behind the simulated tables stands how many predicted claims are within 10% and 20%, and a note for each that is off
/// by more than 10%. The parameters and their sources: docs/simulator.md.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Paper {
    /// The paper
    #[arg(value_enum, required_unless_present = "list")]
    paper: Option<PaperName>,

    /// Name the papers, their experiments and the claims that each covers; run nothing
    #[arg(long)]
    list: bool,

    /// Only this experiment; may be given several times
    #[arg(long, value_name = "NAME")]
    experiment: Vec<String>,

    /// Only under virtual time
    #[arg(long, conflicts_with = "real_only")]
    simulated_only: bool,

    /// Only on this machine
    #[arg(long)]
    real_only: bool,

    /// Fewer points and a tenth of the rounds: the form, in seconds
    #[arg(long)]
    quick: bool,

    /// What decides all that is left to chance; the same seed gives the same simulated tables
    #[arg(long, default_value_t = 1)]
    seed: u64,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    pictures: Pictures,
}

/// A paper with experiments.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum PaperName {
    /// OneSidedMW (NSDI'26): allocation and access
    Onesidedmw,
    /// FineMem (OSDI'25): allocation by compute nodes themselves
    Finemem,
}

impl PaperName {
    fn paper(self) -> &'static experiment::Paper {
        match self {
            Self::Onesidedmw => &onesidedmw::PAPER,
            Self::Finemem => &finemem::PAPER,
        }
    }
}

const EXAMPLES: &str = "\
Examples:
  granary bench paper --list
  granary bench paper onesidedmw
  granary bench paper onesidedmw --simulated-only --experiment allocation
  granary bench paper onesidedmw --real-only --out results
  granary bench paper onesidedmw --simulated-only --json > onesidedmw.jsonl
  granary bench paper finemem --quick

In the directory for pictures stand the records, too: paper-onesidedmw-simulated.jsonl and
paper-onesidedmw-measured.jsonl, one JSON object a line.";

/// One way to run the experiments.
struct Way {
    paper: &'static experiment::Paper,
    /// In names of files.
    name: &'static str,
    /// Above tables and under pictures' titles.
    head: String,
}

impl Way {
    fn simulated(paper: &'static experiment::Paper) -> Self {
        Self { paper, name: "simulated", head: format!("simulated: {}", paper.cluster) }
    }

    fn measured(paper: &'static experiment::Paper) -> Self {
        Self { paper, name: "measured", head: "measured on shm, this machine".into() }
    }
}

impl Paper {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        if self.list {
            return self.print_list();
        }
        let paper = self.paper.expect("clap asks for it").paper();
        self.experiments(paper)?;
        let mut report = begin_for(&self)?;
        let directory = self.pictures.directory(&self.output);
        if !self.real_only {
            let place = Simulated::new((paper.params)(), self.seed);
            let way = Way::simulated(paper);
            let all = self.run_at(&place, Some(place.params()), &way, &mut report)?;
            self.finish(&all, &way, directory.as_deref(), &mut report)?;
            report.say("")?;
            for line in Tally::of(all.iter().map(|(_, f)| f)).lines(paper.note) {
                report.say(line)?;
            }
        }
        if !self.simulated_only {
            let place = Machine::new("shm", self.seed, |settings: &Settings| {
                let node = NodeProcess::start(settings);
                let node = node.map_err(|e| bench::Error::Node(format!("{e:#}")))?;
                Ok(Box::new(Shm(node)) as Box<dyn Node>)
            });
            let way = Way::measured(paper);
            let all = self.run_at(&place, None, &way, &mut report)?;
            self.finish(&all, &way, directory.as_deref(), &mut report)?;
            report.say(format_args!("\n{}", paper.measured))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// The experiments that were asked for.
    fn experiments(
        &self,
        paper: &'static experiment::Paper,
    ) -> Result<Vec<&'static Experiment>, UsageError> {
        if self.experiment.is_empty() {
            return Ok(paper.experiments.iter().collect());
        }
        let named = self.experiment.iter().map(|name| paper.experiment(name));
        named.collect::<Result<_, _>>().map_err(|why| UsageError(why, "bench paper"))
    }

    fn run_at(
        &self,
        place: &dyn Place,
        params: Option<&sim::Params>,
        way: &Way,
        report: &mut Report,
    ) -> anyhow::Result<Vec<(&'static Experiment, Findings)>> {
        let extent = if self.quick { Extent::Quick } else { Extent::Full };
        let run_one = |experiment: &Experiment| {
            let silent = bench::progress::Progress::Silent.bar("", 0);
            let steps = (experiment.steps)(&Run { place, extent, bar: &silent });
            let bar = self.output.progress().bar(experiment.name, steps as u64);
            let findings = experiment.run(&Run { place, extent, bar: &bar }, params);
            findings.with_context(|| format!("run experiment {}, {}", experiment.name, way.name))
        };
        let mut all = Vec::new();
        for experiment in self.experiments(way.paper)? {
            let findings = run_one(experiment)?;
            report.extend(findings.records().cloned())?;
            let title = format!("{} - {}", experiment.title, way.head);
            report.table(&title, &findings.table())?;
            all.push((experiment, findings));
        }
        Ok(all)
    }

    /// Writes pictures and records.
    fn finish(
        &self,
        all: &[(&Experiment, Findings)],
        way: &Way,
        directory: Option<&Path>,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let Some(directory) = directory else { return Ok(()) };
        let prefix = format!("paper-{}-{}", way.paper.name, way.name);
        let mut files: Vec<PathBuf> = Vec::new();
        for (experiment, findings) in all {
            files.extend(experiment.draw(findings, &way.head, directory, &prefix)?);
        }
        let path = directory.join(format!("{prefix}.jsonl"));
        let lines: Vec<String> =
            all.iter().flat_map(|(_, f)| f.records()).map(Record::to_json).collect();
        fs::write(&path, lines.join("\n") + "\n")
            .with_context(|| format!("write {}; choose another --out", path.display()))?;
        let svgs = files.iter().filter(|file| file.extension().is_some_and(|e| e == "svg"));
        let names: Vec<String> = svgs.map(|file| file.display().to_string()).collect();
        report.say(format_args!("\nPictures (and as PNG): {}", names.join(" ")))?;
        report.say(format_args!("Records: {}", path.display()))?;
        Ok(())
    }

    fn print_list(&self) -> anyhow::Result<ExitCode> {
        if self.output.json {
            return Err(
                UsageError("--list is for people: leave --json out".into(), "bench paper").into()
            );
        }
        let papers = match self.paper {
            Some(name) => vec![name.paper()],
            None => PaperName::value_variants().iter().map(|name| name.paper()).collect(),
        };
        let mut report = self.output.report();
        for paper in papers {
            let title = format!("{}: {}", paper.name, paper.title);
            report.table(&title, &claims_of(&self.experiments(paper)?))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Experiments with the claims that each covers.
fn claims_of(experiments: &[&Experiment]) -> Table {
    let mut table = Table::new(["experiment", "claim", "paper", "unit", "setting"]);
    for experiment in experiments {
        let name = || Cell::text(experiment.name);
        if experiment.claims.is_empty() {
            let title = Cell::text(experiment.title);
            table.row([name(), Cell::None, Cell::None, Cell::None, title]);
        }
        for id in experiment.claims {
            let claim = Claims::builtin().get(id).expect("experiments name claims that are");
            let setting = format!("{} {}: {}", claim.paper, claim.section, claim.setting);
            let number = Cell::number(claim.value);
            table.row([
                name(),
                Cell::text(*id),
                number,
                Cell::text(&claim.unit),
                Cell::text(setting),
            ]);
        }
    }
    table
}

/// Begins; the load of this machine matters only to what is measured on it.
fn begin_for(paper: &Paper) -> Result<Report, bench::Error> {
    if paper.simulated_only { Ok(paper.output.report()) } else { begin(&paper.output) }
}

/// A memory node's process.
struct Shm(NodeProcess);

impl Node for Shm {
    fn connect(&self, options: Options) -> Result<Pool, bench::Error> {
        Ok(Pool::connect(self.0.path(), options)?)
    }
}
