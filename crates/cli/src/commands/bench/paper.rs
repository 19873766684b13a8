//! `granary bench paper`: the papers' experiments, with the papers' numbers beside ours.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use bench::paper::experiment::{self, Experiment};
use bench::paper::results::{ClaimSummary, Results};
use bench::paper::simulated::SimulatedCluster;
use bench::paper::tdmem::Part;
use bench::paper::testbed::{Machine, Node, Testbed};
use bench::paper::{
    Extent, Run, finemem, onesidedmw, patronus, sams as sams_paper, swap as swap_paper,
    tdmem as tdmem_paper,
};
use bench_report::claims::Claims;
use bench_report::record::Record;
use bench_report::report::Report;
use bench_report::table::{Cell, Table};
use clap::ValueEnum as _;
use pool::{Options, Pool, Settings};
use units::Size;

use super::{BenchOutput, programs, sams, say_pictures, swap, tdmem};
use crate::UsageError;
use crate::node::NodeProcess;

/// Run a paper's experiments, simulated and measured, with the paper's numbers beside ours
///
/// Each experiment runs twice: simulated, on a model of the paper's cluster under virtual time (the
/// same protocol code as everywhere, on NICs with a timing model), and measured, on this machine
/// over shared memory. Simulated and measured results have separate tables. A row names the
/// quantity, the paper's number, our number, their ratio, and the origin of our number:
///
///   predicted   simulated; no parameter of the timing model was fitted to the paper's number
///   fitted      simulated; a parameter was chosen to match the paper's number: no evidence
///   arithmetic  follows from the workload alone: no evidence
///   measured    with a clock, on other hardware than the paper's
///   no claim    the paper states no number
///
/// Simulated latencies are means, as in the papers; measured latencies are medians.
///
/// A summary after the simulated tables counts the predicted claims that are within 10% and 20% of
/// the paper, with a note on each claim that is off by more than 10%. The parameters and their
/// sources: docs/internals/simulator.md.
///
/// The paper sams has one experiment, which is measured only: Linpack, quicksort, memcached,
/// k-means and STREAM with 100 to 25% of their memory local, on the kernel's swap (zram and a file,
/// which need root), with granary run --paths linux, fastswap and two, and with two and --assist
/// process.
///
/// The paper tdmem is measured only. Experiment crypt seals and opens pages; sequential loads pages
/// in order, sealed and plain; stream runs STREAM's triad with 90, 70 and 50% of its memory local;
/// programs runs seven programs with 100 to 40%. The last two run on granary run --paths fastswap
/// and over scheme tdmem, plain and sealed. A table names the paper's numbers that cannot be
/// reproduced here, with the reasons.
///
/// The experiment swap of onesidedmw is measured only, and runs only if it is named, because it
/// takes half an hour: k-means, memcached, PageRank and betweenness centrality with 50 and 25% of
/// their memory local, each over a fresh memory node of each scheme, and 1 to 8 tasks of k-means
/// over one memory node.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Paper {
    /// Paper to reproduce
    #[arg(value_enum, required_unless_present = "list")]
    paper: Option<PaperName>,

    /// List the papers, their experiments and the claims that each covers, and exit
    #[arg(long)]
    list: bool,

    /// Run this experiment only; may be given several times
    #[arg(long, value_name = "NAME")]
    experiment: Vec<String>,

    /// Simulate only
    #[arg(long, conflicts_with = "real_only")]
    simulated_only: bool,

    /// Measure on this machine only
    #[arg(long)]
    real_only: bool,

    /// Measure fewer points with a tenth of the rounds, to see the shape of the results in seconds
    #[arg(long)]
    quick: bool,

    /// Seed of all random choices; the same seed gives the same simulated tables
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Data of each program of sams, tdmem and swap; Linpack has an eighth, a task of swap has the
    /// half, and sequential loads of tdmem have four times as much [default: 512MiB for sams,
    /// 256MiB for tdmem and swap, with --quick 64MiB]
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,

    #[command(flatten)]
    output: BenchOutput<()>,
}

/// A paper with experiments.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum PaperName {
    /// OneSidedMW (NSDI'26): allocation, access and swap
    Onesidedmw,
    /// FineMem (OSDI'25): allocation by the compute nodes with one-sided operations
    Finemem,
    /// Patronus (FAST'23): permissions with leases
    Patronus,
    /// SAMS: programs on far memory, by the paths of a page fault
    Sams,
    /// TDMEM: sealed pages, and a memory node that checks every page
    Tdmem,
}

impl PaperName {
    /// The paper. `None` if its programs run in processes ([`sams`], [`tdmem`]).
    fn paper(self) -> Option<&'static experiment::Paper> {
        match self {
            Self::Onesidedmw => Some(&onesidedmw::PAPER),
            Self::Finemem => Some(&finemem::PAPER),
            Self::Patronus => Some(&patronus::PAPER),
            Self::Sams | Self::Tdmem => None,
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
  granary bench paper patronus --simulated-only --experiment extend
  granary bench paper sams --quick
  granary bench paper tdmem --quick
  granary bench paper tdmem --experiment crypt --experiment stream
  granary bench paper onesidedmw --experiment swap --quick

The directory of the pictures also receives the records, one JSON object per line:
paper-onesidedmw-simulated.jsonl and paper-onesidedmw-measured.jsonl.";

/// How a paper's experiments run: simulated or measured.
struct Mode {
    paper: &'static experiment::Paper,
    /// Part of file names.
    name: &'static str,
    /// Title of tables and subtitle of pictures.
    title: String,
}

impl Mode {
    fn simulated(paper: &'static experiment::Paper) -> Self {
        Self { paper, name: "simulated", title: format!("simulated: {}", paper.cluster) }
    }

    fn measured(paper: &'static experiment::Paper) -> Self {
        Self { paper, name: "measured", title: "measured on shm, this machine".into() }
    }
}

impl Paper {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        if self.list {
            return self.print_list();
        }
        let name = self.paper.expect("clap requires a paper without --list");
        let Some(paper) = name.paper() else { return self.run_programs(name) };
        let experiments = self.experiments(paper)?;
        let has_swap = self.experiment.iter().any(|name| name == swap_paper::EXPERIMENT.name);
        self.check_programs(has_swap)?;
        if !experiments.is_empty() {
            self.run_testbeds(paper)?;
        }
        match has_swap {
            true => swap::run(self.quick, self.memory, &self.output),
            false => Ok(ExitCode::SUCCESS),
        }
    }

    /// Checks the options that concern programs in processes.
    fn check_programs(&self, has_programs: bool) -> Result<(), UsageError> {
        let refuse = |why: &str| Err(UsageError(why.to_owned(), "bench paper"));
        match self.memory {
            Some(_) if !has_programs => {
                return refuse("--memory: only the programs of sams, tdmem and swap have a size");
            }
            Some(memory) if memory.bytes() < programs::MEMORY_MIN => {
                return refuse("--memory: must be at least 8MiB");
            }
            _ => {}
        }
        if self.simulated_only && has_programs {
            return refuse(
                "--simulated-only: sams, tdmem and swap are measured only; leave it out",
            );
        }
        Ok(())
    }

    /// Runs the experiments that have testbeds: simulated, and on this machine.
    fn run_testbeds(&self, paper: &'static experiment::Paper) -> anyhow::Result<()> {
        // Only measurements on this machine need the warning about its load.
        let mut report =
            if self.simulated_only { self.output.report() } else { self.output.begin()? };
        let directory = self.output.directory();
        if !self.real_only {
            let testbed = SimulatedCluster::new((paper.params)(), self.seed);
            let mode = Mode::simulated(paper);
            let all = self.run_on(&testbed, Some(testbed.params()), &mode, &mut report)?;
            self.write_files(&all, &mode, directory.as_deref(), &mut report)?;
            report.say("")?;
            for line in ClaimSummary::of(all.iter().map(|(_, r)| r)).lines(paper.note) {
                report.say(line)?;
            }
        }
        if !self.simulated_only {
            let testbed = Machine::new("shm", self.seed, |settings: &Settings| {
                let node = NodeProcess::start(settings);
                let node = node.map_err(|e| bench::Error::Node(format!("{e:#}")))?;
                Ok(Box::new(Shm(node)) as Box<dyn Node>)
            });
            let mode = Mode::measured(paper);
            let all = self.run_on(&testbed, None, &mode, &mut report)?;
            self.write_files(&all, &mode, directory.as_deref(), &mut report)?;
            report.say(format_args!("\n{}", paper.measured))?;
        }
        Ok(())
    }

    /// Runs a paper whose programs run in processes.
    fn run_programs(&self, name: PaperName) -> anyhow::Result<ExitCode> {
        self.check_programs(true)?;
        if name == PaperName::Tdmem {
            return tdmem::run(&self.parts()?, self.quick, self.memory, &self.output);
        }
        if self.experiment.iter().any(|name| name != sams_paper::NAME) {
            let why = "--experiment: the only experiment of sams is sams".to_owned();
            return Err(UsageError(why, "bench paper").into());
        }
        sams::run(self.quick, self.memory, &self.output)
    }

    /// The parts of tdmem that `--experiment` selects, in their order; all of them without it.
    fn parts(&self) -> Result<Vec<Part>, UsageError> {
        if self.experiment.is_empty() {
            return Ok(Part::ALL.into());
        }
        let named = self.experiment.iter().map(|name| Part::find(name));
        let named = named.collect::<Result<Vec<_>, _>>();
        let named = named.map_err(|why| UsageError(why, "bench paper"))?;
        Ok(Part::ALL.into_iter().filter(|part| named.contains(part)).collect())
    }

    /// The experiments with testbeds that `--experiment` selects; all of them without it.
    fn experiments(
        &self,
        paper: &'static experiment::Paper,
    ) -> Result<Vec<&'static Experiment>, UsageError> {
        if self.experiment.is_empty() {
            return Ok(paper.experiments.iter().collect());
        }
        let named = self.experiment.iter().map(|name| paper.experiment(name));
        let found = named.collect::<Result<Vec<_>, _>>();
        let found = found.map_err(|why| UsageError(why, "bench paper"))?;
        Ok(found.into_iter().flatten().collect())
    }

    fn run_on(
        &self,
        testbed: &dyn Testbed,
        params: Option<&sim::Params>,
        mode: &Mode,
        report: &mut Report,
    ) -> anyhow::Result<Vec<(&'static Experiment, Results)>> {
        let extent = if self.quick { Extent::Quick } else { Extent::Full };
        let run_one = |experiment: &Experiment| {
            let silent = bench_report::progress::Progress::Silent.bar("", 0);
            let steps = (experiment.steps)(&Run { testbed, extent, bar: &silent });
            let bar = self.output.progress().bar(experiment.name, steps as u64);
            let results = experiment.run(&Run { testbed, extent, bar: &bar }, params);
            results.with_context(|| format!("run experiment {}, {}", experiment.name, mode.name))
        };
        let mut all = Vec::new();
        for experiment in self.experiments(mode.paper)? {
            let results = run_one(experiment)?;
            report.extend(results.records().cloned())?;
            let title = format!("{} - {}", experiment.title, mode.title);
            report.table(&title, &results.table())?;
            all.push((experiment, results));
        }
        Ok(all)
    }

    /// Writes the pictures and the records, and prints their paths.
    fn write_files(
        &self,
        all: &[(&Experiment, Results)],
        mode: &Mode,
        directory: Option<&Path>,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let Some(directory) = directory else { return Ok(()) };
        let prefix = format!("paper-{}-{}", mode.paper.name, mode.name);
        let mut files: Vec<PathBuf> = Vec::new();
        for (experiment, results) in all {
            files.extend(experiment.draw(results, &mode.title, directory, &prefix)?);
        }
        let path = directory.join(format!("{prefix}.jsonl"));
        let lines: Vec<String> =
            all.iter().flat_map(|(_, r)| r.records()).map(Record::to_json).collect();
        units::files::write(&path, (lines.join("\n") + "\n").as_bytes())
            .with_context(|| format!("write {}; choose another --out", path.display()))?;
        say_pictures(report, &files)?;
        report.say(format_args!("Records: {}", path.display()))?;
        Ok(())
    }

    fn print_list(&self) -> anyhow::Result<ExitCode> {
        if self.output.output.json {
            return Err(UsageError(
                "--list has no JSON form: leave out --json".into(),
                "bench paper",
            )
            .into());
        }
        let names = match &self.paper {
            Some(name) => std::slice::from_ref(name),
            None => PaperName::value_variants(),
        };
        let mut report = self.output.report();
        for name in names {
            let Some(paper) = name.paper() else {
                let (title, table) = self.list_programs(*name)?;
                report.table(&title, &table)?;
                continue;
            };
            let title = format!("{}: {}", paper.name, paper.title);
            let mut table = claims_of(&self.experiments(paper)?);
            for experiment in paper.programs {
                let named = |name: &String| name == experiment.name;
                if self.experiment.is_empty() || self.experiment.iter().any(named) {
                    add_claims(&mut table, experiment.name, experiment.claims);
                }
            }
            report.table(&title, &table)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Title and table of a paper whose programs run in processes.
    fn list_programs(&self, name: PaperName) -> Result<(String, Table), UsageError> {
        let mut table = claims_table();
        if name == PaperName::Tdmem {
            for experiment in self.parts()?.into_iter().map(Part::experiment) {
                add_claims(&mut table, experiment.name, experiment.claims);
            }
            return Ok((format!("{}: {}", tdmem_paper::NAME, tdmem_paper::TITLE), table));
        }
        add_claims(&mut table, sams_paper::NAME, &sams_paper::CLAIMS);
        Ok((format!("{}: {}", sams_paper::NAME, sams_paper::TITLE), table))
    }
}

/// Table of experiments and the claims that each covers.
fn claims_of(experiments: &[&Experiment]) -> Table {
    let mut table = claims_table();
    for experiment in experiments {
        if experiment.claims.is_empty() {
            let title = Cell::text(experiment.title);
            table.row([Cell::text(experiment.name), Cell::None, Cell::None, Cell::None, title]);
        }
        add_claims(&mut table, experiment.name, experiment.claims);
    }
    table
}

fn claims_table() -> Table {
    Table::new(["experiment", "claim", "paper", "unit", "setting"])
}

fn add_claims(table: &mut Table, experiment: &str, ids: &[&str]) {
    for id in ids {
        let claim = Claims::builtin().get(id).expect("experiments name existing claims");
        let setting = format!("{} {}: {}", claim.paper, claim.section, claim.setting);
        table.row([
            Cell::text(experiment),
            Cell::text(*id),
            Cell::number(claim.value),
            Cell::text(&claim.unit),
            Cell::text(setting),
        ]);
    }
}

/// A memory node in a separate process, reached over shared memory.
struct Shm(NodeProcess);

impl Node for Shm {
    fn connect(&self, options: Options) -> Result<Pool, bench::Error> {
        Ok(Pool::connect(self.0.path(), options)?)
    }
}
