//! `granary worker`: what benchmarks start in other processes. Not for people; see
//! [`crate::team`].

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use bench::fault::Pattern;
use bench::paged_fault::Memory;
use bench::pingpong::{Place, Side, Station, Task};
use bench::size::Size;
use pool::{Address, NicService, Options};
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
    /// Exchange messages with another worker
    Pingpong {
        /// The socket of the NIC that both are on; without, each has its own, with a UDP socket
        #[arg(long)]
        socket: Option<PathBuf>,
        /// Serve the NIC to the other one, and say where
        #[arg(long, conflicts_with = "socket")]
        serve: bool,
    },
    /// Touch memory page by page
    Fault {
        /// How much
        #[arg(long)]
        memory: Size,
    },
}

/// Allocate and free for this long, a chunk at a time or so many bytes.
#[derive(Serialize, Deserialize)]
pub struct AllocTask {
    pub duration: Duration,
    pub bytes: Option<u64>,
}

/// What a worker of `bench pingpong` does next.
#[derive(Serialize, Deserialize)]
pub enum PingpongStep {
    /// Make a QP for this; its place is the answer.
    Prepare(Task),
    /// Connect it to this; the answer says that it is ready.
    Connect(Place),
    /// Be the initiator; what was measured is the answer.
    Measure,
    /// Be the responder; the answer comes when the initiator has ended.
    Answer,
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
            Self::Pingpong { socket, serve } => pingpong(socket.as_deref(), serve),
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
    while let Some(AllocTask { duration, bytes }) = team::next_task()? {
        team::say(&bench::alloc::client(&pool, duration, bytes)?)?;
    }
    Ok(())
}

fn pingpong(socket: Option<&Path>, serve: bool) -> anyhow::Result<()> {
    let served = serve.then(NicService::start_own).transpose()?;
    let station = match (socket, &served) {
        (Some(socket), _) => Station::shm(socket)?,
        (None, Some((nic, _))) => Station::on(nic.clone())?,
        (None, None) => Station::roce()?,
    };
    team::say_ready()?;
    if let Some((_, service)) = &served {
        team::say(&service.path())?;
    }
    let mut side: Option<Side> = None;
    while let Some(step) = team::next_task()? {
        if let PingpongStep::Prepare(task) = step {
            let made = side.insert(station.side(&task)?);
            team::say(&made.place())?;
            continue;
        }
        let side = side.as_mut().context("take part in a measurement that was not prepared")?;
        match step {
            PingpongStep::Connect(place) => {
                side.connect(&place)?;
                team::say_ready()?;
            }
            PingpongStep::Measure => team::say(&side.measure()?)?,
            PingpongStep::Answer => {
                side.answer()?;
                team::say_ready()?;
            }
            PingpongStep::Prepare(_) => unreachable!("handled above"),
        }
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
