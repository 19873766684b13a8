//! `granary bench paper tdmem`: measures sealing, and starts the programs of the experiments on
//! each system.

use std::path::Path;
use std::process::{Command, ExitCode};

use bench::paper::Extent;
use bench::paper::programs::memcached::Load;
use bench::paper::programs::{Job, Measured};
use bench::paper::results::Results;
use bench::paper::tdmem::{self, Machine, Part, Plan, System, crypt};
use units::Size;

use super::BenchOutput;
use super::programs::{Programs, Shown, show};

/// Prefix of file names.
const FILES: &str = "paper-tdmem";

const NOTE: &str = "\
All numbers are measured with a clock; none is simulated or fitted. Times are those of the \
computation, as medians of the rounds, and each quotient has its two numbers from the same \
round.

fastswap is granary run --paths fastswap over scheme onesidedmw, not sealed. tdmem-plain and \
tdmem-crypt (aes-128-gcm, as in the paper) are scheme tdmem with --paths two; the paper has \
Linux's swap there. So their difference to fastswap is that of two whole systems, as in the \
paper. tdmem-crypt (fastswap's paths) differs from fastswap in the scheme and the seals only. \
All of them reach their memory node through the software NIC. The private systems copy their \
pages themselves, as the paper's donee-HBM is reached without a network.

Limits: a software NIC on a core of this machine takes the place of the FPGA and of the network, \
and on a machine with two cores competes with the program. The memory node donates memory of \
this same machine, so that the latency and the bandwidth of a network are missing. HBM and DRAM \
of the donor are both DRAM here: there is one row for the two. The paper's workloads have other \
sizes, and up to 8 threads; ours have one. k-means, quicksort and PageRank (for graph-analytics) \
are its programs that are here. The text does not say over which local shares its geometric mean \
of fastswap is; ours is over all shares of this run.";

/// Runs the parts with these names, or all of them, and prints their tables.
pub fn run(
    parts: &[Part],
    quick: bool,
    memory: Option<Size>,
    output: &BenchOutput<()>,
) -> anyhow::Result<ExitCode> {
    let extent = if quick { Extent::Quick } else { Extent::Full };
    let plan = Plan::new(parts, extent, memory.map(|memory| memory.bytes()));
    let report = output.begin()?;
    let rounds = if parts.contains(&Part::Crypt) { crypt::rounds(extent) } else { 0 };
    let bar = output.progress().bar(tdmem::NAME, u64::from(rounds) + plan.steps() as u64);
    let crypt = (rounds > 0).then(|| crypt::measure(rounds, &bar)).transpose()?;
    let outcomes = plan.measure(&Systems(Programs::new(Load::EVEN)?), &bar);
    drop(bar);
    let mut compared = crypt.as_ref().map_or_else(Results::default, crypt::Crypt::results);
    compared.rows.extend(outcomes.claims().rows);
    let mut tables: Vec<_> = crypt.iter().map(crypt::Crypt::table).collect();
    tables.extend(outcomes.tables());
    tables.push(("The paper's numbers without a counterpart".into(), tdmem::not_reproduced()));
    let shown = Shown {
        tables,
        results: &outcomes.results(),
        compared: ("The paper's numbers - measured, this machine", &compared),
        missing: outcomes.missing(),
        has_wrong_result: outcomes.has_wrong_result(),
        note: NOTE,
        files: FILES,
    };
    let draw = |directory: &Path| outcomes.draw("measured, this machine", directory, FILES);
    show(report, output, &shown, draw)
}

/// Runs programs on the systems of this machine.
struct Systems(Programs);

impl Machine for Systems {
    fn run(&self, job: Job, system: System) -> Result<Measured, String> {
        let program = self.0.path(job.program)?;
        let command = match system.options() {
            None => Command::new(program),
            Some(options) => {
                let mut command = self.0.paged(job);
                command.args(options).args(["--memory", &job.backing_bytes().to_string(), "--"]);
                command.arg(program);
                command
            }
        };
        self.0.start(job, command, "program")?.finish()
    }
}
