//! `granary worker`: what benchmarks start in other processes. Not for people; see
//! [`crate::team`].

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use bench::fault::Pattern;
use bench::paged_fault::Memory;
use bench::size::Size;
use pool::{Address, Options};
use serde::{Deserialize, Serialize};

use crate::team;

/// Take part in a benchmark
#[derive(clap::Subcommand, Debug)]
pub enum Worker {
    /// Allocate and free
    Alloc {
        /// The memory node
        #[arg(long)]
        pool: Address,
    },
    /// Touch memory page by page
    Fault {
        /// How much
        #[arg(long)]
        memory: Size,
    },
}

/// Allocate and free for this long.
#[derive(Serialize, Deserialize)]
pub struct AllocTask {
    pub duration: Duration,
}

/// Touch pages in this order for this long.
#[derive(Serialize, Deserialize)]
pub struct FaultTask {
    pub pattern: Pattern,
    pub duration: Duration,
}

impl Worker {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Alloc { pool } => alloc(&pool),
            Self::Fault { memory } => fault(memory),
        }?;
        Ok(ExitCode::SUCCESS)
    }
}

fn alloc(node: &Address) -> anyhow::Result<()> {
    let options = Options { groups: Some(1), ..Options::default() };
    let pool = node.connect(options)?;
    bench::alloc::warm_up(&pool)?;
    team::say_ready()?;
    while let Some(AllocTask { duration }) = team::next_task()? {
        team::say(&bench::alloc::client(&pool, duration)?)?;
    }
    Ok(())
}

fn fault(memory: Size) -> anyhow::Result<()> {
    let bytes = usize::try_from(memory.bytes()).context("this much memory has no addresses")?;
    if bytes == 0 {
        bail!("touch no memory: take some");
    }
    let mut memory = Memory::new(bytes);
    team::say_ready()?;
    while let Some(FaultTask { pattern, duration }) = team::next_task()? {
        team::say(&memory.touch(pattern, duration)?)?;
    }
    Ok(())
}
