//! `granary worker`: the processes that benchmarks start. Hidden from users; see
//! [`crate::worker_process`] for the protocol.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use bench::fault::Pattern;
use bench::paged_fault::Memory;
use bench::paper::programs::Program;
use bench::pingpong::{NicContext, PeerInfo, Side, Task};
use pool::schemes::patronus::Extension;
use pool::{Address, NicService, Options};
use serde::{Deserialize, Serialize};
use units::Size;

use super::bench::programs;
use crate::kernel_swap::KernelSwap;
use crate::worker_process::{next_task, send_ready, send_result};

/// Run tasks of a benchmark in this process
#[derive(clap::Subcommand, Debug)]
pub enum Worker {
    /// Allocate and free
    Alloc {
        /// Address of the memory node
        #[arg(long)]
        pool: Address,
    },
    /// Acquire objects, and hold them until their leases end or this process is killed
    Hold {
        /// Address of the memory node
        #[arg(long)]
        pool: Address,
    },
    /// Exchange messages with another worker
    Pingpong {
        /// Socket of a NIC to attach to; without it, this process has its own NIC with a UDP socket
        #[arg(long)]
        socket: Option<PathBuf>,
        /// Let the other worker attach to this process's NIC, and print its socket
        #[arg(long, conflicts_with = "socket")]
        serve: bool,
    },
    /// Touch memory page by page
    Fault {
        /// Amount of memory
        #[arg(long)]
        memory: Size,
    },
    /// Run a program of `bench paper`, and print its times
    Program {
        /// Name of the program
        program: Program,
        /// Amount of its data
        #[arg(long)]
        memory: Size,
    },
    /// Set up a memory limit with the kernel's swap until the standard input ends
    Swap(KernelSwap),
}

/// Task of `bench alloc`: allocate and free for `duration`.
#[derive(Serialize, Deserialize)]
pub struct AllocTask {
    pub duration: Duration,
    /// Bytes of each allocation; one chunk if `None`.
    pub bytes: Option<u64>,
}

/// One step of a worker of `bench pingpong`.
#[derive(Serialize, Deserialize)]
pub enum PingpongStep {
    /// Create a QP for this measurement; the worker answers with its [`PeerInfo`].
    Prepare(Task),
    /// Connect the QP to this peer; the worker answers that it is ready.
    Connect(PeerInfo),
    /// Act as the initiator; the worker answers with the outcome.
    Measure,
    /// Act as the responder; the worker answers when the initiator has finished.
    Respond,
}

/// Task of `bench fault`: touch pages in the order of `pattern` for `duration`.
#[derive(Serialize, Deserialize)]
pub struct FaultTask {
    pub pattern: Pattern,
    pub duration: Duration,
}

impl Worker {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Alloc { pool } => alloc(&pool),
            Self::Hold { pool } => hold(&pool),
            Self::Pingpong { socket, serve } => pingpong(socket.as_deref(), serve),
            Self::Fault { memory } => fault(memory),
            Self::Program { program, memory } => send_result(&programs::work(program, memory)?),
            Self::Swap(swap) => swap.run(),
        }?;
        Ok(ExitCode::SUCCESS)
    }
}

fn alloc(node: &Address) -> anyhow::Result<()> {
    let options = Options { groups: Some(1), ..Options::default() };
    let pool = node.connect(options)?;
    bench::alloc::warm_up(&pool)?;
    send_ready()?;
    while let Some(AllocTask { duration, bytes }) = next_task()? {
        send_result(&bench::alloc::client(&pool, duration, bytes)?)?;
    }
    Ok(())
}

fn hold(node: &Address) -> anyhow::Result<()> {
    let pool = node.connect(bench::lease::options(Extension::Cas))?;
    send_ready()?;
    while let Some(task) = next_task()? {
        bench::lease::hold(&pool, &task)?;
        send_ready()?;
    }
    Ok(())
}

fn pingpong(socket: Option<&Path>, serve: bool) -> anyhow::Result<()> {
    let served = serve.then(NicService::start_own).transpose()?;
    let context = match (socket, &served) {
        (Some(socket), _) => NicContext::shm(socket)?,
        (None, Some((nic, _))) => NicContext::shared(nic.clone())?,
        (None, None) => NicContext::roce()?,
    };
    send_ready()?;
    if let Some((_, service)) = &served {
        send_result(&service.path())?;
    }
    let mut side: Option<Side> = None;
    while let Some(step) = next_task()? {
        if let PingpongStep::Prepare(task) = step {
            let prepared = side.insert(context.side(&task)?);
            send_result(&prepared.info())?;
            continue;
        }
        let side = side.as_mut().context("run a step of a measurement that was not prepared")?;
        match step {
            PingpongStep::Connect(peer) => {
                side.connect(&peer)?;
                send_ready()?;
            }
            PingpongStep::Measure => send_result(&side.measure()?)?,
            PingpongStep::Respond => {
                side.respond()?;
                send_ready()?;
            }
            PingpongStep::Prepare(_) => unreachable!("handled above"),
        }
    }
    Ok(())
}

fn fault(memory: Size) -> anyhow::Result<()> {
    let bytes = usize::try_from(memory.bytes()).context("--memory exceeds the address space")?;
    if bytes == 0 {
        bail!("--memory 0: must be at least one page");
    }
    let mut memory = Memory::new(bytes);
    send_ready()?;
    while let Some(FaultTask { pattern, duration }) = next_task()? {
        send_result(&memory.touch(pattern, duration)?)?;
    }
    Ok(())
}
