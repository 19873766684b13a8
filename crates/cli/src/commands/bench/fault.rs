//! `granary bench fault`: what a page fault costs.

use std::process::ExitCode;
use std::time::Duration;

use bench::size::Size;

use super::super::not_in_this_build;
use crate::options::{Output, Pictures, seconds};

/// Measure page faults on remote pages, ours and bare userfaultfd's
///
/// Random faults one page at a time, and sequential ones as the pager batches them; beside
/// them userfaultfd with nothing behind it: its handler on the faulting thread's own core,
/// and 64 pages per UFFDIO_COPY with MADV_DONTNEED.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Fault {
    /// Memory that the faults go over
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    memory: Size,

    /// How much of it is local
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    local: Size,

    /// Seconds for each measurement
    #[arg(long, default_value = "1", value_parser = seconds)]
    seconds: Duration,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    pictures: Pictures,
}

const EXAMPLES: &str = "\
Examples:
  granary bench fault
  granary bench fault --memory 1GiB --local 128MiB --seconds 5
  granary bench fault --json > fault.jsonl";

impl Fault {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let pictures = self.pictures.directory(&self.output);
        let attempted = format!(
            "measure faults over {} with {} local for {:?} {pictures:?}",
            self.memory, self.local, self.seconds
        );
        Err(not_in_this_build(&attempted, "the pager"))
    }
}
