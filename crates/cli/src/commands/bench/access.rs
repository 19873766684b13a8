//! `granary bench access`: what READ and WRITE cost.

use std::process::ExitCode;
use std::time::Duration;

use bench::access::{self, Direction, Spec};
use bench::bare;
use bench::size::Size;

use super::conclude;
use crate::UsageError;
use crate::options::{Output, Pictures, seconds};

/// Measure READ and WRITE over sizes and depths
///
/// Latency with one operation in flight, rate and bandwidth with many; beside them the bare
/// hand-off between two threads (scheme bare): a doorbell, a memcpy and a completion with
/// nothing around them, which is what bounds a software NIC.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Access {
    /// Sizes of one operation
    #[arg(long, value_name = "SIZES", value_delimiter = ',',
          default_values_t = access::SIZES.map(|bytes| Size(bytes as u64)))]
    sizes: Vec<Size>,

    /// Operations in flight
    #[arg(long, value_name = "DEPTHS", value_delimiter = ',',
          default_values_t = access::IN_FLIGHT.map(|depth| depth as u32))]
    in_flight: Vec<u32>,

    /// Seconds for each measurement
    #[arg(long, default_value = "0.25", value_parser = seconds)]
    seconds: Duration,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    pictures: Pictures,
}

const EXAMPLES: &str = "\
Examples:
  granary bench access
  granary bench access --sizes 8,4KiB,1MiB --in-flight 1,16,64 --seconds 1
  granary bench access --json --out pictures > access.jsonl";

/// Bytes that the operations of one measurement go round over, if they are no larger: more
/// than a core's own caches, less than the last one that all share.
const REGION_BYTES: usize = 8 << 20;
/// The largest operation that makes sense here.
const SIZE_BYTES_MAX: u64 = 1 << 30;
/// The deepest queue that makes sense here.
const IN_FLIGHT_MAX: u32 = 4096;

impl Access {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let specs = self.specs()?;
        let mut report = self.output.report();
        let bar = self.output.progress().bar("access", specs.len() as u64);
        for spec in specs {
            let (direction, size) = (spec.direction.name(), Size(spec.size as u64));
            bar.say(&format!("{direction} {size}, {} in flight", spec.in_flight));
            let outcome = bare::measure(&spec);
            report.extend(outcome.records(&spec, &spec.setting(bare::SCHEME, bare::NIC)))?;
            bar.step();
        }
        drop(bar);
        let tables = access::tables(report.records());
        let pictures = self.pictures.directory(&self.output);
        conclude(&mut report, tables, pictures.as_deref(), |report, directory| {
            access::pictures(report.records(), directory)
        })
    }

    /// The measurements, in the order of the options.
    fn specs(&self) -> Result<Vec<Spec>, UsageError> {
        let usage = |text| UsageError(text, "bench access");
        let mut specs = Vec::new();
        for direction in Direction::ALL {
            for &in_flight in &self.in_flight {
                if in_flight == 0 || in_flight > IN_FLIGHT_MAX {
                    let text = format!("--in-flight {in_flight}: take 1 to {IN_FLIGHT_MAX}");
                    return Err(usage(text));
                }
                for &size in &self.sizes {
                    if size.bytes() == 0 || size.bytes() > SIZE_BYTES_MAX {
                        let text = format!("--sizes {size}: take 1 to {}", Size(SIZE_BYTES_MAX));
                        return Err(usage(text));
                    }
                    let bytes = size.bytes() as usize;
                    let mut spec = Spec {
                        direction,
                        size: bytes,
                        in_flight: in_flight as usize,
                        region: 0,
                        duration: self.seconds,
                    };
                    spec.region = REGION_BYTES.max(spec.stride());
                    specs.push(spec);
                }
            }
        }
        Ok(specs)
    }
}
