//! `granary bench pingpong`: latency, rate and bandwidth of messages between two processes.

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::Context;
use bench::access::Outcome;
use bench::pingpong::{self, Operation, PeerInfo, Task};
use pool::Settings;
use units::Size;

use super::{BenchOutput, Rounds};
use crate::UsageError;
use crate::commands::worker::PingpongStep;
use crate::node::NodeProcess;
use crate::options::NicName;
use crate::worker_process::WorkerProcess;

/// Measure messages between two processes: two-sided SEND and one-sided READ
///
/// With one message in flight, two processes send to each other alternately, and latency is half of
/// a round trip. With more in flight, one process sends to the other. On roce each process has its
/// own software NIC, and the NICs exchange RoCEv2 packets over the loopback interface. On shm the
/// receiver runs the NIC and the sender attaches to it; with --owner third both attach to the NIC
/// of a third process, as clients of a memory node do. ucx_perftest and fi_pingpong measure the
/// same for other libraries; bench/peers prints them side by side.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Pingpong {
    /// NICs to measure, separated by commas
    #[arg(long, value_name = "NICS", value_enum, value_delimiter = ',',
          default_values_t = [NicName::Roce, NicName::Shm])]
    nic: Vec<NicName>,

    /// On shm: the process that runs the NIC
    #[arg(long, value_name = "OWNER", value_enum, default_value_t = Owner::Peer)]
    owner: Owner,

    /// On roce: plain RoCEv2 packets, or packets with authentication tags as between a memory node
    /// and its compute nodes
    #[arg(long, value_name = "PACKETS", value_enum, value_delimiter = ',',
          default_values_t = [Packets::Plain])]
    packets: Vec<Packets>,

    /// Operations to measure, separated by commas
    #[arg(long, value_name = "OPERATIONS", value_enum, value_delimiter = ',',
          default_values_t = [OperationName::Send, OperationName::Read])]
    operations: Vec<OperationName>,

    /// Bytes of one message: one measurement per size, separated by commas
    #[arg(long, value_name = "SIZES", value_delimiter = ',',
          default_values_t = pingpong::SIZES.map(|bytes| Size(bytes as u64)))]
    sizes: Vec<Size>,

    /// Messages in flight: one measurement per depth, separated by commas
    #[arg(long, value_name = "DEPTHS", value_delimiter = ',',
          default_values_t = pingpong::IN_FLIGHT.map(|depth| depth as u32))]
    in_flight: Vec<u32>,

    #[command(flatten)]
    output: BenchOutput<Rounds, ()>,
}

const EXAMPLES: &str = "\
Examples:
  granary bench pingpong
  granary bench pingpong --nic roce --sizes 64,4KiB,1MiB --in-flight 1,32 --seconds 1
  granary bench pingpong --nic roce --packets plain,authenticated
  granary bench pingpong --nic shm --operations send --sizes 4KiB --json";

/// Name of the command in usage errors.
const COMMAND: &str = "bench pingpong";
/// Largest accepted message in bytes.
const SIZE_BYTES_MAX: u64 = 64 << 20;
/// Largest accepted number of messages in flight.
const IN_FLIGHT_MAX: u32 = 1024;

/// Measured operation.
#[derive(clap::ValueEnum, Clone, Copy, Debug)]
enum OperationName {
    Send,
    Read,
}

impl OperationName {
    fn operation(self) -> Operation {
        match self {
            Self::Send => Operation::Send,
            Self::Read => Operation::Read,
        }
    }
}

/// How a NIC checks the origin of a packet.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Packets {
    /// By sender address and PSN.
    Plain,
    /// By an authentication tag.
    Authenticated,
}

/// Two worker processes that exchange messages.
struct ProcessPair {
    nic: NicName,
    packets: Packets,
    initiator: WorkerProcess,
    responder: WorkerProcess,
    /// Third process that runs the NIC of both, if neither of the two runs it.
    _third: Option<NodeProcess>,
}

/// Process that runs the NIC which two workers on shm share.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Owner {
    /// The responder; it runs the NIC while it waits for a message.
    Peer,
    /// A third process.
    Third,
}

impl ProcessPair {
    fn start(nic: NicName, packets: Packets, owner: Owner) -> anyhow::Result<Self> {
        let third = (nic == NicName::Shm && owner == Owner::Third)
            .then(|| NodeProcess::start(&Settings { donate_bytes: 1 << 20, ..Settings::default() }))
            .transpose()?;
        let serves = nic == NicName::Shm && owner == Owner::Peer;
        let mut socket = third.as_ref().map(|third| third.path().to_owned());
        let mut responder = start_worker(socket.as_deref(), serves)?;
        responder.wait_ready()?;
        if serves {
            socket = Some(responder.receive()?);
        }
        let mut initiator = start_worker(socket.as_deref(), false)?;
        initiator.wait_ready()?;
        Ok(Self { nic, packets, initiator, responder, _third: third })
    }

    /// Name of the NIC in records.
    fn name(&self) -> String {
        match self.packets {
            Packets::Plain => self.nic.name().into(),
            Packets::Authenticated => format!("{}, authenticated", self.nic.name()),
        }
    }

    fn measure(&mut self, task: &Task) -> anyhow::Result<Outcome> {
        let task = Task { authenticated: self.packets == Packets::Authenticated, ..*task };
        let both = [&mut self.initiator, &mut self.responder];
        for worker in both {
            worker.send_task(&PingpongStep::Prepare(task))?;
        }
        let initiator: PeerInfo = self.initiator.receive()?;
        let responder: PeerInfo = self.responder.receive()?;
        self.initiator.send_task(&PingpongStep::Connect(responder))?;
        self.responder.send_task(&PingpongStep::Connect(initiator))?;
        self.initiator.wait_ready()?;
        self.responder.wait_ready()?;
        self.responder.send_task(&PingpongStep::Respond)?;
        self.initiator.send_task(&PingpongStep::Measure)?;
        let outcome = self.initiator.receive()?;
        self.responder.wait_ready()?;
        Ok(outcome)
    }
}

/// Starts a worker that attaches to the NIC at `socket`. Without a socket the worker has its own
/// NIC and, if `serves`, lets another process attach to it.
fn start_worker(socket: Option<&Path>, serves: bool) -> anyhow::Result<WorkerProcess> {
    let granary = std::env::current_exe().context("find the path of this program")?;
    let mut command = Command::new(granary);
    command.args(["worker", "pingpong"]);
    if serves {
        command.arg("--serve");
    } else if let Some(socket) = socket {
        command.arg("--socket").arg(socket);
    }
    WorkerProcess::start(&mut command)
}

impl Pingpong {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let tasks = self.tasks()?;
        let mut report = self.output.begin()?;
        let mut pairs = Vec::new();
        for &nic in &self.nic {
            // The shm NIC exchanges no packets, so --packets does not apply.
            let packets = if nic == NicName::Roce { &self.packets[..] } else { &[Packets::Plain] };
            for &packets in packets {
                pairs.push(ProcessPair::start(nic, packets, self.owner)?);
            }
        }
        let rounds = self.output.rounds();
        let bar = self.output.progress().bar("pingpong", tasks.len() as u64 * u64::from(rounds));
        for task in tasks {
            let (operation, size) = (task.operation.name(), Size(task.size as u64));
            bar.say(&format!("{operation} {size}, {} in flight", task.in_flight));
            let mut outcomes = vec![Outcome::default(); pairs.len()];
            for _ in 0..rounds {
                for (pair, outcome) in pairs.iter_mut().zip(&mut outcomes) {
                    let round = pair.measure(&task).with_context(|| {
                        let nic = pair.name();
                        format!(
                            "measure {operation} {size}, {} in flight, on {nic}",
                            task.in_flight
                        )
                    });
                    outcome.merge(&round?);
                }
                bar.step();
            }
            for (pair, outcome) in pairs.iter().zip(&outcomes) {
                report.extend(task.records(outcome, &pair.name()))?;
            }
        }
        drop(bar);
        for (title, table) in pingpong::tables(report.records()) {
            report.table(&title, &table)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// All measurements, in the order of the options.
    fn tasks(&self) -> Result<Vec<Task>, UsageError> {
        let usage = |text| UsageError(text, COMMAND);
        if self.nic.contains(&NicName::Inline) {
            let text = "--nic inline: this NIC serves a single process; use roce or shm";
            return Err(usage(text.into()));
        }
        let mut tasks = Vec::new();
        for operation in &self.operations {
            for &in_flight in &self.in_flight {
                if in_flight == 0 || in_flight > IN_FLIGHT_MAX {
                    let text = format!("--in-flight {in_flight}: must be 1 to {IN_FLIGHT_MAX}");
                    return Err(usage(text));
                }
                for &size in &self.sizes {
                    if size.bytes() == 0 || size.bytes() > SIZE_BYTES_MAX {
                        let text = format!("--sizes {size}: must be 1 to {}", Size(SIZE_BYTES_MAX));
                        return Err(usage(text));
                    }
                    tasks.push(Task {
                        operation: operation.operation(),
                        size: size.bytes() as usize,
                        in_flight: in_flight as usize,
                        duration: self.output.round_duration(),
                        authenticated: false,
                    });
                }
            }
        }
        Ok(tasks)
    }
}
