//! `granary quickstart`: a demonstration with programs and files of this machine.
//!
//! Runs each program twice on text files of this machine: directly, and under `granary run` with a
//! quarter of its peak memory local. The two outputs must be identical byte for byte.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use bench::alloc;
use bench_report::progress::Bar;
use bench_report::record::{Record, Setting, Statistic, Unit};
use bench_report::report::Report;
use bench_report::table::{Cell, Table};
use pager::uffd::{Features, Uffd};
use pool::{Options, Pool, Settings};
use units::Size;
use units::number::thousands;

use crate::child::{self, Finished};
use crate::corpus::{self, Corpus};
use crate::node::{CpuTimes, NodeProcess};
use crate::options::{Output, PoolAddress};
use crate::summary::RunSummary;

/// Demonstrate paging: programs of this machine with three quarters of their memory in a pool
///
/// Starts a memory node and runs unmodified programs of this machine on this machine's text files,
/// first directly, then with a quarter of their peak memory local. Compares the two outputs byte
/// for byte and prints times, page counts and CPU time. Needs userfaultfd: root, or the permission
/// that the error message names.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Quickstart {
    /// Amount of input text
    #[arg(long, value_name = "SIZE", default_value = "128MiB")]
    text: Size,

    /// Directory that keeps the text and the outputs [default: a temporary directory, removed at
    /// the end]
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,

    #[command(flatten)]
    output: Output,
}

const EXAMPLES: &str = "\
Examples:
  granary quickstart
  granary quickstart --text 16MiB --json";

/// Name of the experiment in records.
const EXPERIMENT: &str = "quickstart";
/// Bytes that the memory node donates: more than any of the programs needs. Unused parts take no
/// memory.
const DONATED_BYTES: u64 = 2 << 30;
/// Duration of the measurement of allocations.
const ALLOCATION_DURATION: Duration = Duration::from_millis(300);
/// Smallest local memory: a program and its libraries need this much to run at all.
const LOCAL_BYTES_MIN: u64 = 16 << 20;

/// A program to run.
struct Workload {
    program: &'static str,
    /// Verb phrase for the output: "sorts lines".
    does: &'static str,
    /// Divisor of the text size: the program gets this fraction of the text.
    share: u64,
    arguments: fn(text: &Path) -> Vec<String>,
}

const WORKLOADS: [Workload; 2] = [
    Workload {
        program: "sort",
        does: "sorts lines",
        share: 1,
        arguments: |text| {
            // A large buffer keeps sort in memory; otherwise sort uses temporary files on
            // machines with little memory.
            vec!["--buffer-size=2G".into(), "--parallel=2".into(), text.display().to_string()]
        },
    },
    Workload {
        program: "python3",
        does: "compares each line's words with the next line's",
        share: 6,
        arguments: |text| vec!["-c".into(), COMPARE.into(), text.display().to_string()],
    },
];

/// Python program: parses all lines into records, then prints for each line the number of words
/// that it shares with the next line, and its checksum.
const COMPARE: &str = include_str!("quickstart.py");

/// Results of one program's two runs.
struct Comparison {
    workload: &'static Workload,
    corpus: Corpus,
    local: Size,
    plain: Finished,
    paged: Duration,
    summary: RunSummary,
    output: Size,
    difference: Option<corpus::Difference>,
}

impl Quickstart {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let (directory, _removed_at_the_end) = self.directory()?;
        // Check for a missing library or permission before minutes of work, not after.
        pager::run::find_library()?;
        drop(Uffd::open(Features::default())?);
        let mut report = self.output.report();
        let bar = self.output.progress().bar("quickstart", 3 * WORKLOADS.len() as u64 + 1);
        let settings = Settings { donate_bytes: DONATED_BYTES, ..Settings::default() };
        let node = NodeProcess::start(&settings)?;
        let mut comparisons = Vec::new();
        for workload in &WORKLOADS {
            let comparison = workload.compare(self.text, &directory, &node, &bar)?;
            report.extend(comparison.records())?;
            comparisons.push(comparison);
        }
        bar.say("allocate and free");
        let allocations = Allocations::measure(&node)?;
        report.extend(allocations.records(&settings))?;
        bar.step();
        drop(bar);
        conclude(&mut report, &comparisons, &allocations)
    }

    fn directory(&self) -> anyhow::Result<(PathBuf, Option<tempfile::TempDir>)> {
        match &self.keep {
            Some(directory) => {
                fs::create_dir_all(directory)
                    .with_context(|| format!("create {}", directory.display()))?;
                Ok((directory.clone(), None))
            }
            None => {
                let directory = tempfile::Builder::new()
                    .prefix("granary-quickstart-")
                    .tempdir()
                    .context("create a temporary directory; set TMPDIR, or use --keep")?;
                Ok((directory.path().to_owned(), Some(directory)))
            }
        }
    }
}

impl Workload {
    /// Runs the program directly and paged, and compares the outputs.
    fn compare(
        &'static self,
        text: Size,
        directory: &Path,
        node: &NodeProcess,
        bar: &Bar,
    ) -> anyhow::Result<Comparison> {
        let Self { program, .. } = *self;
        bar.say(&format!("collect text for {program}"));
        let input = directory.join(format!("{program}.text"));
        let corpus = corpus::write(&input, text.bytes() / self.share)?;
        bar.step();

        let [plain_output, paged_output] =
            ["plain", "paged"].map(|form| directory.join(format!("{program}.{form}")));

        bar.say(&format!("{program}, plain"));
        let mut command = Command::new(program);
        command.args((self.arguments)(&input));
        let plain = run(&mut command, &plain_output).with_context(|| {
            format!("run {program} directly; is it installed? (Debian: apt-get install {program})")
        })?;
        bar.step();

        let local = Size((plain.peak_bytes / 4).max(LOCAL_BYTES_MIN).next_multiple_of(1 << 20));
        bar.say(&format!("{program}, {local} local"));
        let stats = directory.join(format!("{program}.stats.json"));
        let granary = std::env::current_exe().context("find the path of this program")?;
        let mut command = Command::new(granary);
        command.arg("run").arg("--local").arg(local.to_string());
        command.arg("--pool").arg(PoolAddress::Node(node.address()).to_string());
        command.arg("--stats-json").arg(&stats);
        command.arg("--").arg(program).args((self.arguments)(&input));
        let paged = run(&mut command, &paged_output)
            .with_context(|| format!("run {program} with {local} of its memory local"))?;
        bar.step();

        let summary =
            units::files::read(&stats).with_context(|| format!("read {}", stats.display()))?;
        let summary = serde_json::from_slice(&summary)
            .with_context(|| format!("parse the statistics in {}", stats.display()))?;
        let output = Size(fs::metadata(&plain_output)?.len());
        let difference = corpus::compare(&plain_output, &paged_output)?;
        Ok(Comparison {
            workload: self,
            corpus,
            local,
            plain,
            paged: paged.elapsed,
            summary,
            output,
            difference,
        })
    }
}

/// Runs a program with its output redirected to a file, in the C locale, which sorts by bytes.
fn run(command: &mut Command, output: &Path) -> anyhow::Result<Finished> {
    let file =
        units::files::create(output).with_context(|| format!("write {}", output.display()))?;
    command.stdin(Stdio::null()).stdout(file).env("LC_ALL", "C").env("PYTHONHASHSEED", "0");
    let finished = child::run_to_completion(command)?;
    if !finished.status.success() {
        bail!("the program ended with {}; see its messages above", finished.status);
    }
    Ok(finished)
}

impl Comparison {
    fn records(&self) -> Vec<Record> {
        let summary = &self.summary;
        let setting =
            |mode: &str| Setting::new().with("program", self.workload.program).with("mode", mode);
        let paged =
            setting("paged").scheme("onesidedmw").nic("shm").with("local", self.local.bytes());
        let record = |setting: &Setting, metric: &str, unit, value| {
            Record::of(EXPERIMENT, setting, metric, unit).mean(value)
        };
        let count = |metric: &str, value: u64| record(&paged, metric, Unit::Count, value as f64);
        let plain = setting("plain");
        let mut records = vec![
            record(&plain, "time_s", Unit::Seconds, self.plain.elapsed.as_secs_f64()),
            record(&plain, "peak_bytes", Unit::Bytes, self.plain.peak_bytes as f64),
            record(&paged, "time_s", Unit::Seconds, self.paged.as_secs_f64()),
            record(&paged, "peak_bytes", Unit::Bytes, summary.local_peak_bytes as f64),
            count("output_differs", u64::from(self.difference.is_some())),
            count("faults", summary.faults),
            count("pages_in", summary.pages_in),
            count("pages_out", summary.pages_out),
            count("chunks_peak", summary.chunks_peak),
            count("allocations_by_nic", summary.allocations_by_nic),
            count("allocations_by_cpu", summary.allocations_by_cpu),
        ];
        for (metric, statistic, value) in [
            ("fault_latency_us", Statistic::Mean, summary.fault_mean_us),
            ("fault_latency_us", Statistic::P99, summary.fault_p99_us),
        ] {
            let builder = Record::of(EXPERIMENT, &paged, metric, Unit::Us);
            records.extend(value.map(|value| builder.value(statistic, value)));
        }
        records
    }
}

/// Cost of allocations on the memory node that the programs used. After the programs have ended,
/// a single client allocates and frees one chunk at a time, so no paging traffic affects the times.
struct Allocations {
    outcome: alloc::Outcome,
    cpu: CpuTimes,
}

impl Allocations {
    fn measure(node: &NodeProcess) -> anyhow::Result<Self> {
        let options = Options { groups: Some(1), ..Options::default() };
        let pool = Pool::connect(node.path(), options)?;
        alloc::warm_up(&pool)?;
        let before = node.status()?;
        let outcome = alloc::client(&pool, ALLOCATION_DURATION, None)?;
        let cpu = CpuTimes::between(&before, &node.status()?);
        Ok(Self { outcome, cpu })
    }

    /// CPU time in microseconds per allocation with its free.
    fn each_us(&self, time: Duration) -> f64 {
        time.as_secs_f64() * 1e6 / self.outcome.allocate.count().max(1) as f64
    }

    fn records(&self, settings: &Settings) -> Vec<Record> {
        let setting = Setting::new().scheme(settings.scheme.name).nic("shm").clients(1);
        let setting = setting.size(settings.chunk_bytes).in_flight(1);
        let record = |metric: &str| Record::of(EXPERIMENT, &setting, metric, Unit::Us);
        let mut records = self.outcome.allocate.records(&record("alloc_latency_us"));
        records.extend(self.outcome.free.records(&record("free_latency_us")));
        records.push(record("alloc_nic_cpu_us").mean(self.each_us(self.cpu.nic)));
        records.push(record("alloc_control_cpu_us").mean(self.each_us(self.cpu.control)));
        records
    }
}

/// Prints the tables, and fails if the outputs of a program differ.
fn conclude(
    report: &mut Report,
    comparisons: &[Comparison],
    allocations: &Allocations,
) -> anyhow::Result<ExitCode> {
    let mut table = Table::new([
        "program",
        "peak\nmemory",
        "local\nlimit",
        "plain\ns",
        "paged\ns",
        "pages\nin",
        "pages\nout",
        "chunks",
        "by\nNIC",
        "by\nCPU",
        "MN CPU\ns",
        "NIC\ns",
        "output",
    ]);
    for comparison in comparisons {
        let Comparison { workload, plain, summary, .. } = comparison;
        table.row([
            Cell::text(workload.program),
            Cell::size(plain.peak_bytes),
            Cell::size(comparison.local.bytes()),
            Cell::number(plain.elapsed.as_secs_f64()),
            Cell::number(comparison.paged.as_secs_f64()),
            Cell::count(summary.pages_in),
            Cell::count(summary.pages_out),
            Cell::count(summary.chunks_peak),
            Cell::count(summary.allocations_by_nic),
            Cell::count(summary.allocations_by_cpu),
            Cell::number(summary.control_cpu_s),
            Cell::number(summary.nic_cpu_s),
            Cell::text(match comparison.difference {
                None => "same".to_owned(),
                Some(difference) => format!("DIFFERS at byte {}", difference.offset),
            }),
        ]);
    }
    report.table("Unmodified programs, three quarters of their memory in the pool", &table)?;

    let mut table = Table::new([
        "allocate\nmedian us",
        "P99 us",
        "free\nmedian us",
        "P99 us",
        "MN CPU\nus",
        "NIC\nus",
    ]);
    let alloc::Outcome { allocate, free, .. } = &allocations.outcome;
    table.row(
        [
            allocate.quantile_us(0.5),
            allocate.quantile_us(0.99),
            free.quantile_us(0.5),
            free.quantile_us(0.99),
            allocations.each_us(allocations.cpu.control),
            allocations.each_us(allocations.cpu.nic),
        ]
        .map(Cell::number),
    );
    let count = thousands(allocate.count());
    report.table(&format!("Allocation and free of one chunk ({count} repetitions)"), &table)?;

    report.say("")?;
    for Comparison { workload, corpus, output, .. } in comparisons {
        report.say(format_args!(
            "{} {}: input {} of text from {} files of this machine, output {}",
            workload.program,
            workload.does,
            Size(corpus.bytes).rounded(),
            thousands(corpus.files),
            output.rounded(),
        ))?;
    }
    report.say(
        "MN CPU: time of the memory node's control threads. NIC: time of the thread that stands \
         in for the memory node's RDMA NIC. It moved all pages of the programs, and it clears the \
         1MiB chunk at each free.",
    )?;
    match comparisons.iter().find(|comparison| comparison.difference.is_some()) {
        Some(comparison) => {
            let program = comparison.workload.program;
            bail!(
                "compare the outputs of {program}: the paged run's output differs; this is a bug, \
                 please report it"
            )
        }
        None => Ok(ExitCode::SUCCESS),
    }
}
