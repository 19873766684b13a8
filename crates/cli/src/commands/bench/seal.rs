//! `granary bench seal`: time of sealing and opening a page.

use std::process::ExitCode;

use bench::seal::{self, Bench, Spec};
use bench_report::claims::Claims;

use super::{BenchOutput, Rounds};

/// Measure sealing and opening of pages, beside a copy of a page
///
/// Seals and opens pages of 4 KiB by AES-GCM with keys of 128 and 256 bits, in one thread, and
/// copies pages by memcpy in the same run. "Warm" uses the same two pages each time, "cold" uses
/// 256MiB of pages. "Shared" pages may be changed by other processes during the call, so they are
/// copied once more. Each time is the median of the rounds. The paper is TDMEM (figure 14), on an
/// Intel Xeon E5-2630 v4 without VAES.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Seal {
    #[command(flatten)]
    output: BenchOutput<Rounds, ()>,
}

const EXAMPLES: &str = "\
Examples:
  granary bench seal
  granary bench seal --rounds 9 --seconds 3
  granary bench seal --json > seal.jsonl
  OPENSSL_ia32cap='~0:~0x60000000000' granary bench seal    without VAES";

impl Seal {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let mut report = self.output.begin()?;
        let specs = Spec::all();
        let rounds = self.output.rounds();
        let bar = self.output.progress().bar("seal", u64::from(rounds));
        let mut bench = Bench::new()?;
        let mut times = vec![Vec::new(); specs.len()];
        for _ in 0..rounds {
            for (spec, times) in specs.iter().zip(&mut times) {
                times.push(bench.measure(*spec, self.output.round_duration())?);
            }
            bar.step();
        }
        drop(bar);
        for (spec, times) in specs.iter().zip(&mut times) {
            report.extend(spec.records(times))?;
        }
        report.say(seal::instructions())?;
        for (title, table) in seal::tables(report.records()) {
            report.table(&title, &table)?;
        }
        let paper = |id| Claims::builtin().get(id).map_or(0.0, |claim| claim.value);
        report.say(format_args!(
            "\nThe paper's FPGA, as the paper estimates it (table 2): {} us to seal a page, {} us \
             to open it",
            paper("tdmem.seal.fpga"),
            paper("tdmem.open.fpga")
        ))?;
        Ok(ExitCode::SUCCESS)
    }
}
