//! `granary bench alloc`: what an allocation costs.

use std::process::ExitCode;
use std::time::Duration;

use super::super::not_in_this_build;
use crate::UsageError;
use crate::options::{Donation, NicName, Output, Pictures, seconds};

/// Measure allocation and free: the NIC's chains against an RPC to the memory node's CPU
///
/// Latency and rate of scheme onesidedmw and, in the same run on the same NIC, of an RPC that
/// does the same binding on the memory node's CPU (rpc-mw-2), with a control thread that
/// sleeps between requests (event) and with one that has a core (polling). Whose time each
/// took is told apart: the NIC thread's, which plays the hardware, and the control CPU's.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Alloc {
    /// NIC
    #[arg(long, value_enum, default_value = "shm")]
    nic: NicName,

    /// Clients at once, one measurement for each number
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', default_values_t = [1, 2, 4, 8])]
    clients: Vec<u32>,

    #[command(flatten)]
    donation: Donation,

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
  granary bench alloc --nic shm
  granary bench alloc --nic inline --clients 1 --chunk 4KiB --memory 64MiB
  granary bench alloc --nic shm --clients 1,8 --json > alloc.jsonl";

/// The most clients that make sense here.
const CLIENTS_MAX: u32 = 1024;

impl Alloc {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.donation.check("bench alloc")?;
        if let Some(clients) = self.clients.iter().find(|n| !(1..=CLIENTS_MAX).contains(*n)) {
            let text = format!("--clients {clients}: take 1 to {CLIENTS_MAX}");
            return Err(UsageError(text, "bench alloc").into());
        }
        let pictures = self.pictures.directory(&self.output);
        let attempted = format!("measure {:?} for {:?} {pictures:?}", self.nic, self.seconds);
        Err(not_in_this_build(&attempted, "the allocation scheme"))
    }
}
