//! `granary quickstart`: see it work.
//!
//! Runs real programs of this machine on real files of this machine, twice each: plainly, and
//! as `granary run` with a quarter of their peak memory local. Their outputs must be the same,
//! byte for byte.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use bench::alloc;
use bench::progress::Bar;
use bench::record::{Record, Setting, Statistic, Unit};
use bench::report::Report;
use bench::size::Size;
use bench::table::{Cell, Table, thousands};
use pager::uffd::{Features, Uffd};
use pool::{Options, Pool, Settings};

use crate::child::{self, Finished};
use crate::corpus::{self, Corpus};
use crate::node::{CpuTimes, NodeProcess};
use crate::options::{Output, PoolAddress};
use crate::summary::RunSummary;

/// See it work: real programs, three quarters of their memory in a pool
///
/// Starts a memory node, runs unmodified programs of this machine on its own files with a
/// quarter of their peak memory local, compares their output with a plain run byte for byte,
/// and prints what it took. Needs userfaultfd, so root or a permission that it names.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Quickstart {
    /// Text that the programs work on
    #[arg(long, value_name = "SIZE", default_value = "128MiB")]
    text: Size,

    /// Where to put it and the outputs [default: a temporary directory, removed at the end]
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
/// What the memory node donates: more than any of the programs needs. What nobody uses of it
/// takes no memory.
const DONATED_BYTES: u64 = 2 << 30;
/// For how long allocations are measured.
const ALLOCATE: Duration = Duration::from_millis(300);
/// The least that is kept local: what a program and its libraries need to run at all.
const LOCAL_BYTES_MIN: u64 = 16 << 20;

/// A program to run.
struct Workload {
    program: &'static str,
    /// What it does, for people.
    does: &'static str,
    /// It works on one nth of the text.
    share: u64,
    arguments: fn(text: &Path) -> Vec<String>,
}

const WORKLOADS: [Workload; 2] = [
    Workload {
        program: "sort",
        does: "sorts lines",
        share: 1,
        arguments: |text| {
            // All in memory: sort would otherwise use files if this machine has little.
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

/// Parses all lines into records, and then walks over these: how many words a line shares with
/// the next one, and its checksum.
const COMPARE: &str = "\
import sys, zlib
records = []
with open(sys.argv[1], encoding='utf-8', newline='\\n') as lines:
    for line in lines:
        records.append((line.split(), zlib.crc32(line.encode())))
for number, (this, following) in enumerate(zip(records, records[1:])):
    print(number, len(set(this[0]) & set(following[0])), this[1])
";

/// What one program's two runs gave.
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
        // Before minutes of work: what would keep a paged program from starting.
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
    /// Runs the program plainly and paged.
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
            format!("run {program} plainly (Debian: apt-get install {program})")
        })?;
        bar.step();

        let local = Size((plain.peak_bytes / 4).max(LOCAL_BYTES_MIN).next_multiple_of(1 << 20));
        bar.say(&format!("{program}, {local} local"));
        let stats = directory.join(format!("{program}.stats.json"));
        let granary = std::env::current_exe().context("find this program's own file")?;
        let mut command = Command::new(granary);
        command.arg("run").arg("--local").arg(local.to_string());
        command.arg("--pool").arg(PoolAddress::Node(node.address()).to_string());
        command.arg("--stats-json").arg(&stats);
        command.arg("--").arg(program).args((self.arguments)(&input));
        let paged = run(&mut command, &paged_output)
            .with_context(|| format!("run {program} with {local} of its memory local"))?;
        bar.step();

        let summary = fs::read(&stats).with_context(|| format!("read {}", stats.display()))?;
        let summary = serde_json::from_slice(&summary)
            .with_context(|| format!("read {} as a summary", stats.display()))?;
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

/// Runs a program whose output goes to a file, in the locale that sorts by bytes.
fn run(command: &mut Command, output: &Path) -> anyhow::Result<Finished> {
    let file = File::create(output).with_context(|| format!("write {}", output.display()))?;
    command.stdin(Stdio::null()).stdout(file).env("LC_ALL", "C").env("PYTHONHASHSEED", "0");
    let finished = child::finish(command)?;
    if !finished.status.success() {
        bail!("it ended with {}; what it said stands above", finished.status);
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
        let of = |setting: &Setting, metric: &str, unit, value| {
            Record::of(EXPERIMENT, setting, metric, unit).mean(value)
        };
        let plain = setting("plain");
        let mut records = vec![
            of(&plain, "time_s", Unit::Seconds, self.plain.elapsed.as_secs_f64()),
            of(&plain, "peak_bytes", Unit::Bytes, self.plain.peak_bytes as f64),
            of(&paged, "time_s", Unit::Seconds, self.paged.as_secs_f64()),
            of(&paged, "peak_bytes", Unit::Bytes, summary.local_peak_bytes as f64),
            of(&paged, "output_differs", Unit::Count, f64::from(self.difference.is_some())),
            of(&paged, "faults", Unit::Count, summary.faults as f64),
            of(&paged, "pages_in", Unit::Count, summary.pages_in as f64),
            of(&paged, "pages_out", Unit::Count, summary.pages_out as f64),
            of(&paged, "chunks_peak", Unit::Count, summary.chunks_peak as f64),
            of(&paged, "allocations_by_nic", Unit::Count, summary.allocations_by_nic as f64),
            of(&paged, "allocations_by_cpu", Unit::Count, summary.allocations_by_cpu as f64),
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

/// What allocations cost on the memory node that the programs used: a client of its own
/// allocates and frees, one chunk at a time, so that nothing else is in these times.
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
        let outcome = alloc::client(&pool, ALLOCATE, None)?;
        let cpu = CpuTimes::between(&before, &node.status()?);
        Ok(Self { outcome, cpu })
    }

    /// A time for each allocation with its free.
    fn each_us(&self, time: Duration) -> f64 {
        time.as_secs_f64() * 1e6 / self.outcome.allocate.count().max(1) as f64
    }

    fn records(&self, settings: &Settings) -> Vec<Record> {
        let setting = Setting::new().scheme(settings.scheme.name()).nic("shm").clients(1);
        let setting = setting.size(settings.chunk_bytes).in_flight(1);
        let of = |metric: &str| Record::of(EXPERIMENT, &setting, metric, Unit::Us);
        let mut records = self.outcome.allocate.records(&of("alloc_latency_us"));
        records.extend(self.outcome.free.records(&of("free_latency_us")));
        records.push(of("alloc_nic_cpu_us").mean(self.each_us(self.cpu.nic)));
        records.push(of("alloc_control_cpu_us").mean(self.each_us(self.cpu.control)));
        records
    }
}

/// Prints the table and the verdict.
fn conclude(
    report: &mut Report,
    comparisons: &[Comparison],
    allocations: &Allocations,
) -> anyhow::Result<ExitCode> {
    let mut table = Table::new([
        "program",
        "peak\nmemory",
        "kept\nlocal",
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
    report
        .table(&format!("One allocation with its free, of {count} after the programs"), &table)?;

    report.say("")?;
    for Comparison { workload, corpus, output, .. } in comparisons {
        report.say(format_args!(
            "{} {}: {} of text out of {} files of this machine; its output has {}",
            workload.program,
            workload.does,
            Size(corpus.bytes).rounded(),
            thousands(corpus.files),
            output.rounded(),
        ))?;
    }
    report.say(
        "MN CPU is the memory node's control threads. NIC is the thread that plays its RNIC: with \
         the programs it moved all their pages, and a free clears its chunk of 1MiB.",
    )?;
    match comparisons.iter().find(|comparison| comparison.difference.is_some()) {
        Some(comparison) => {
            let program = comparison.workload.program;
            bail!("compare {program}'s outputs: they differ; this is a bug, please report it")
        }
        None => Ok(ExitCode::SUCCESS),
    }
}
