//! `granary bench pingpong`: what messages between two programs cost.

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::Context;
use bench::access::Outcome;
use bench::pingpong::{self, Operation, Place, Task};
use bench::size::Size;
use pool::Settings;

use super::{Rounds, begin, conclude};
use crate::UsageError;
use crate::commands::worker::PingpongStep;
use crate::node::NodeProcess;
use crate::options::{NicName, Output};
use crate::team::Member;

/// Measure messages between two programs: SEND to a receiver that waits, and READ beside it
///
/// Two processes. One in flight: they send to each other by turns, and latency is half of a round trip. More
/// in flight: one sends to the other one. Over roce each has a software NIC of its own, and there are RoCEv2
/// packets between them on the loopback interface; on shm the receiver has the NIC and the other one is attached
/// to it, or both are attached to that of a third process (--owner third), as clients of a memory node are. This is what ucx_perftest and fi_pingpong measure of other libraries; bench/peers puts them side by side.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Pingpong {
    /// NICs
    #[arg(long, value_name = "NICS", value_enum, value_delimiter = ',',
          default_values_t = [NicName::Roce, NicName::Shm])]
    nic: Vec<NicName>,

    /// On shm: the process that has the NIC
    #[arg(long, value_name = "OWNER", value_enum, default_value_t = Owner::Peer)]
    owner: Owner,

    /// On roce: packets that are plain, as other NICs send them, or authenticated, as a memory node
    /// and its compute nodes send them
    #[arg(long, value_name = "PACKETS", value_enum, value_delimiter = ',',
          default_values_t = [Packets::Plain])]
    packets: Vec<Packets>,

    /// Operations
    #[arg(long, value_name = "OPERATIONS", value_enum, value_delimiter = ',',
          default_values_t = [OperationName::Send, OperationName::Read])]
    operations: Vec<OperationName>,

    /// Sizes of one message
    #[arg(long, value_name = "SIZES", value_delimiter = ',',
          default_values_t = pingpong::SIZES.map(|bytes| Size(bytes as u64)))]
    sizes: Vec<Size>,

    /// Messages in flight
    #[arg(long, value_name = "DEPTHS", value_delimiter = ',',
          default_values_t = pingpong::IN_FLIGHT.map(|depth| depth as u32))]
    in_flight: Vec<u32>,

    #[command(flatten)]
    rounds: Rounds,

    #[command(flatten)]
    output: Output,
}

const EXAMPLES: &str = "\
Examples:
  granary bench pingpong
  granary bench pingpong --nic roce --sizes 64,4KiB,1MiB --in-flight 1,32 --seconds 1
  granary bench pingpong --nic roce --packets plain,authenticated
  granary bench pingpong --nic shm --operations send --sizes 4KiB --json";

/// What usage errors name.
const COMMAND: &str = "bench pingpong";
/// The longest message that makes sense here.
const SIZE_BYTES_MAX: u64 = 64 << 20;
/// The most messages in flight that make sense here.
const IN_FLIGHT_MAX: u32 = 1024;

/// What is measured.
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

/// How packets between NICs are told from others.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Packets {
    /// By address and PSN.
    Plain,
    /// By a tag.
    Authenticated,
}

/// Two programs that can reach each other.
struct Programs {
    nic: NicName,
    packets: Packets,
    initiator: Member,
    responder: Member,
    /// Whose NIC both are on, if it is neither's.
    _third: Option<NodeProcess>,
}

/// Which process has the NIC that two programs on shm share.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Owner {
    /// The one that answers: while it waits for a message it runs the NIC.
    Peer,
    /// A third one.
    Third,
}

impl Programs {
    fn start(nic: NicName, packets: Packets, owner: Owner) -> anyhow::Result<Self> {
        let third = (nic == NicName::Shm && owner == Owner::Third)
            .then(|| NodeProcess::start(&Settings { donate_bytes: 1 << 20, ..Settings::default() }))
            .transpose()?;
        let serves = nic == NicName::Shm && owner == Owner::Peer;
        let mut socket = third.as_ref().map(|third| third.path().to_owned());
        let mut responder = program(socket.as_deref(), serves)?;
        responder.wait_ready()?;
        if serves {
            socket = Some(responder.result()?);
        }
        let mut initiator = program(socket.as_deref(), false)?;
        initiator.wait_ready()?;
        Ok(Self { nic, packets, initiator, responder, _third: third })
    }

    /// What records call its NIC.
    fn name(&self) -> String {
        match self.packets {
            Packets::Plain => self.nic.name().into(),
            Packets::Authenticated => format!("{}, authenticated", self.nic.name()),
        }
    }

    fn measure(&mut self, task: &Task) -> anyhow::Result<Outcome> {
        let task = Task { authenticated: self.packets == Packets::Authenticated, ..*task };
        let both = [&mut self.initiator, &mut self.responder];
        for member in both {
            member.give(&PingpongStep::Prepare(task))?;
        }
        let (one, other) = (self.initiator.result::<Place>()?, self.responder.result::<Place>()?);
        self.initiator.give(&PingpongStep::Connect(other))?;
        self.responder.give(&PingpongStep::Connect(one))?;
        self.initiator.wait_ready()?;
        self.responder.wait_ready()?;
        self.responder.give(&PingpongStep::Answer)?;
        self.initiator.give(&PingpongStep::Measure)?;
        let outcome = self.initiator.result()?;
        self.responder.wait_ready()?;
        Ok(outcome)
    }
}

/// One of the two, on the NIC at `socket` or on one of its own, which it serves or not.
fn program(socket: Option<&Path>, serves: bool) -> anyhow::Result<Member> {
    let granary = std::env::current_exe().context("find this program's own file")?;
    let mut command = Command::new(granary);
    command.args(["worker", "pingpong"]);
    if serves {
        command.arg("--serve");
    } else if let Some(socket) = socket {
        command.arg("--socket").arg(socket);
    }
    Member::start(&mut command)
}

impl Pingpong {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let tasks = self.tasks()?;
        let mut report = begin(&self.output)?;
        let mut programs = Vec::new();
        for &nic in &self.nic {
            // On shm there are none.
            let packets = if nic == NicName::Roce { &self.packets[..] } else { &[Packets::Plain] };
            for &packets in packets {
                programs.push(Programs::start(nic, packets, self.owner)?);
            }
        }
        let rounds = self.rounds.rounds;
        let bar = self.output.progress().bar("pingpong", tasks.len() as u64 * u64::from(rounds));
        for task in tasks {
            let (operation, size) = (task.operation.name(), Size(task.size as u64));
            bar.say(&format!("{operation} {size}, {} in flight", task.in_flight));
            let mut outcomes = vec![Outcome::default(); programs.len()];
            for _ in 0..rounds {
                for (programs, outcome) in programs.iter_mut().zip(&mut outcomes) {
                    let round = programs.measure(&task).with_context(|| {
                        let nic = programs.name();
                        format!(
                            "measure {operation} {size}, {} in flight, on {nic}",
                            task.in_flight
                        )
                    });
                    outcome.merge(&round?);
                }
                bar.step();
            }
            for (programs, outcome) in programs.iter().zip(&outcomes) {
                report.extend(task.records(outcome, &programs.name()))?;
            }
        }
        drop(bar);
        let tables = pingpong::tables(report.records());
        conclude(&mut report, tables, None, |_, _| Ok(Vec::new()))
    }

    /// The measurements, in the order of the options.
    fn tasks(&self) -> Result<Vec<Task>, UsageError> {
        let usage = |text| UsageError(text, COMMAND);
        if self.nic.contains(&NicName::Inline) {
            return Err(usage("--nic inline: it has one process only; take roce or shm".into()));
        }
        let mut tasks = Vec::new();
        for operation in &self.operations {
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
                    tasks.push(Task {
                        operation: operation.operation(),
                        size: size.bytes() as usize,
                        in_flight: in_flight as usize,
                        duration: self.rounds.each(),
                        authenticated: false,
                    });
                }
            }
        }
        Ok(tasks)
    }
}
