//! Messages between two processes: two-sided SEND and one-sided READ.
//!
//! ```text
//!  one in flight                                 more in flight
//!  initiator ──SEND──> responder                 initiator ══SEND, SEND, …══> responder
//!            <──SEND──                             each completion: post another SEND
//! ```
//!
//! The method is that of other messaging libraries' benchmarks, so that the results are comparable:
//!
//! - With one message in flight, latency is half of a round trip. Each side sends when the other
//!   side's message has arrived. It does not wait for its own send completions, except that at most
//!   `OWN_OUTSTANDING` may be outstanding. Messages that fit into a WQE are posted inline.
//! - With more in flight, rate and bandwidth count the initiator's completions. A completion means
//!   that the message is in the receiver's memory.
//! - All messages use one buffer on each side, and receives are posted before the first message.
//! - READ is one-sided: the responder's program sleeps. Latency is from the post to the completion.
//!   With more in flight, a list of READs has one completion, as is usual in rate measurements.
//! - A waiting side polls and offers its CPU to the NIC; after the time of [`Backoff`] it sleeps.
//!
//! | metric | definition |
//! | --- | --- |
//! | `send_latency_us`, `read_latency_us` | latency of one operation |
//! | `send_rate_per_s`, `read_rate_per_s` | operations per second |
//! | `send_bandwidth_gb_per_s`, `read_bandwidth_gb_per_s` | bytes of these operations per second |

use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::time::Duration;

use rnic::nic::{SoftCq, SoftMr, SoftNic, SoftPd, SoftQp};
use serde::{Deserialize, Serialize};
use verbs::{
    Access, Backoff, Completion, CompletionKind, CompletionQueue, CqAttr, Data, Key, MemoryRegion,
    Nic, Op, PairSecret, PathMtu, PeerAddress, QpAttr, QpChange, Qpn, QueuePair, Receive,
    ReceiveAttr, ReceiveRequest, Remote, RemotePeer, SecretSide as End, Sge, Status, WorkRequest,
};

use crate::Error;
use crate::access::{Meter, Outcome};
use bench_report::record::{Record, Setting, Statistic};
use bench_report::table::{Pivot, Table};

/// Name of the experiment.
pub const EXPERIMENT: &str = "pingpong";

/// Sizes in bytes that are measured by default.
pub const SIZES: [usize; 3] = [64, 4 << 10, 1 << 20];

/// Operations in flight that are measured by default: one, and the default of `ucx_perftest`.
pub const IN_FLIGHT: [usize; 2] = [1, 32];

/// Receives that are posted in addition to one per message in flight. An acknowledged message lets
/// the initiator send the next one before the receiver has processed the completion and posted a
/// new receive.
const RECEIVES_AHEAD: usize = 128;
/// Limit of a side's own uncompleted messages when it sends the next one.
const OWN_OUTSTANDING: u32 = 8;
/// Limit of work requests posted with one doorbell.
const LIST: usize = 16;
/// The longest message that is posted inline.
const INLINE_MAX: usize = 64;
/// Immediate data of the message that ends a measurement.
const END: u32 = 0x656e_6421;
/// Time without a completion after which the peer is considered gone.
const SILENCE: Duration = Duration::from_secs(10);

/// Measured operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// Two-sided.
    Send,
    /// One-sided.
    Read,
}

impl Operation {
    /// Both operations.
    pub const ALL: [Self; 2] = [Self::Send, Self::Read];

    /// Prefix of the metrics of this operation.
    pub fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Read => "read",
        }
    }
}

/// Parameters of one measurement.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Task {
    /// Measured operation.
    pub operation: Operation,
    /// Bytes of each message, above zero.
    pub size: usize,
    /// Operations in flight, above zero.
    pub in_flight: usize,
    /// Duration without the warm-up.
    pub duration: Duration,
    /// Packets between NICs carry authentication tags, as between a memory node and its compute
    /// nodes.
    pub authenticated: bool,
}

impl Task {
    /// The setting of the measurement's records.
    pub fn setting(&self, nic: &str) -> Setting {
        Setting::new().nic(nic).size(self.size as u64).in_flight(self.in_flight as u64)
    }

    /// The records of the measurement.
    pub fn records(&self, outcome: &Outcome, nic: &str) -> Vec<Record> {
        outcome.records_of(EXPERIMENT, self.operation.name(), self.size, &self.setting(nic))
    }
}

/// Connection data that a side sends to its peer.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct PeerInfo {
    /// UDP address of the side's NIC. `None`: both sides use the same NIC.
    address: Option<SocketAddr>,
    qpn: u32,
    memory: u64,
    rkey: u32,
}

/// The NIC of a process and its protection domain.
pub struct NicContext {
    nic: SoftNic,
    pd: SoftPd,
    /// UDP address at which other NICs reach this NIC.
    address: Option<SocketAddr>,
}

impl NicContext {
    /// Opens a NIC of this process, with a UDP socket on the loopback interface.
    ///
    /// # Errors
    /// Errors of the NIC.
    pub fn roce() -> Result<Self, Error> {
        let system = |source| Error::System { what: "open a UDP socket", source };
        let socket = UdpSocket::bind("127.0.0.1:0").map_err(system)?;
        let address = socket.local_addr().map_err(system)?;
        let nic = SoftNic::over(socket)?;
        Ok(Self { pd: nic.alloc_pd()?, nic, address: Some(address) })
    }

    /// Attaches to the NIC of another process, which serves the socket at `path`.
    ///
    /// # Errors
    /// Errors of the NIC.
    pub fn shm(path: &Path) -> Result<Self, Error> {
        Self::shared(SoftNic::attach(path)?)
    }

    /// Uses a NIC that the peer process uses as well.
    ///
    /// # Errors
    /// Errors of the NIC.
    pub fn shared(nic: SoftNic) -> Result<Self, Error> {
        Ok(Self { pd: nic.alloc_pd()?, nic, address: None })
    }

    /// Creates the QP and the buffers of one measurement, not connected yet.
    ///
    /// # Errors
    /// Errors of the NIC.
    pub fn side(&self, task: &Task) -> Result<Side, Error> {
        let receives = task.in_flight + RECEIVES_AHEAD;
        let entries = (2 * receives) as u32;
        let cq = self.nic.create_cq(CqAttr { entries, ignore_overrun: false })?;
        let attr = QpAttr {
            send_cq: &cq,
            recv_cq: &cq,
            send_blocks: (4 * task.in_flight).next_power_of_two().max(64) as u32,
            receive: Receive::Own(ReceiveAttr { entries: receives as u32, max_sges: 1 }),
            access: Access::REMOTE_ALL,
        };
        let qp = self.nic.create_qp(&self.pd, attr)?;
        let memory = self.nic.alloc_dma(2 * task.size)?;
        memory.write(0, &vec![0x5a; 2 * task.size]);
        let mr = self.nic.reg_mr(&self.pd, &memory, Access::LOCAL_ALL | Access::REMOTE_ALL)?;
        let unknown = Remote { addr: 0, rkey: Key(0) };
        // The NIC limits a SEND between two of its own QPs; to another NIC a SEND may be as long
        // as a WRITE.
        let local_max = self.nic.query_device()?.send_bytes as usize;
        let sends_max = if self.address.is_some() { usize::MAX } else { local_max };
        Ok(Side { task: *task, address: self.address, cq, qp, mr, peer: unknown, sends_max })
    }
}

/// The key of the packets' authentication tags. A fixed key costs as much time as a secret one; it
/// protects nothing here.
fn secret(asks: bool) -> PairSecret {
    let side = if asks { End::Asking } else { End::Asked };
    PairSecret { bytes: [0x5e; 32], side, authenticated: true }
}

/// One side of a measurement.
pub struct Side {
    task: Task,
    address: Option<SocketAddr>,
    cq: SoftCq,
    qp: SoftQp,
    /// Two halves of the message size: the source of SENDs and READs, then their destination.
    mr: SoftMr,
    /// The peer's memory.
    peer: Remote,
    /// Length limit of a SEND. A longer message is a WRITE with immediate data, which is two-sided
    /// as well.
    sends_max: usize,
}

impl Side {
    /// The connection data for the peer.
    pub fn info(&self) -> PeerInfo {
        let memory = self.mr.remote(0);
        let (qpn, rkey) = (self.qp.qpn().raw(), memory.rkey.0);
        PeerInfo { address: self.address, qpn, memory: memory.addr, rkey }
    }

    /// Connects to the peer and posts receives. Messages may be sent when both sides have done so.
    ///
    /// # Errors
    /// Errors of the NIC.
    pub fn connect(&mut self, to: &PeerInfo) -> Result<(), Error> {
        let qpn = Qpn::new(to.qpn);
        let peer = match (self.address, to.address) {
            (Some(local), Some(remote)) => PeerAddress::Remote(RemotePeer {
                // The loopback interface has an MTU of 64 KiB.
                mtu: PathMtu::Mtu4096,
                fixed_port: true,
                secret: self.task.authenticated.then(|| secret(local < remote)),
                ..RemotePeer::new(remote, local.ip(), qpn)
            }),
            _ => PeerAddress::Local(qpn),
        };
        self.qp.modify(QpChange::Init)?;
        self.qp.modify(QpChange::ReadyToReceive { peer })?;
        self.qp.modify(QpChange::ReadyToSend)?;
        self.peer = Remote { addr: to.memory, rkey: Key(to.rkey) };
        (0..self.task.in_flight + RECEIVES_AHEAD).try_for_each(|_| self.receive())
    }

    /// Runs the measurement as the initiator.
    ///
    /// # Errors
    /// [`Error::Verb`] if an operation fails, [`Error::System`] if the peer is silent, or errors of
    /// the NIC.
    pub fn measure(&self) -> Result<Outcome, Error> {
        match (self.task.operation, self.task.in_flight) {
            (Operation::Send, 1) => self.ping(),
            _ => self.stream(),
        }
    }

    /// Acts as the responder until the initiator has ended the measurement.
    ///
    /// # Errors
    /// As [`Side::measure`].
    pub fn respond(&self) -> Result<(), Error> {
        match (self.task.operation, self.task.in_flight) {
            (Operation::Send, 1) => self.pong(),
            (Operation::Send, _) => self.sink(),
            (Operation::Read, _) => Ok(()),
        }
    }

    fn ping(&self) -> Result<Outcome, Error> {
        let mut alternation = Alternation::default();
        let mut meter = Meter::start(self.task.duration);
        let mut since = meter.started();
        for trip in 1.. {
            self.send(None)?;
            alternation.outstanding += 1;
            alternation.wait(self)?;
            match meter.completed_each(since, 2 * trip, 2) {
                Some(now) => since = now,
                None => break,
            }
        }
        self.send(Some(END))?;
        alternation.outstanding += 1;
        alternation.drain(self)?;
        Ok(meter.outcome())
    }

    fn pong(&self) -> Result<(), Error> {
        let mut alternation = Alternation::default();
        while alternation.wait(self)? {
            self.send(None)?;
            alternation.outstanding += 1;
        }
        Ok(())
    }

    fn stream(&self) -> Result<Outcome, Error> {
        let mut meter = Meter::start(self.task.duration);
        let (mut posted, mut done) = (0, 0);
        let (mut sampled, mut since) = (0, meter.started());
        let mut batch = [Completion::EMPTY; LIST];
        let depth = self.task.in_flight as u64;
        let mut over = false;
        while !over || done < posted {
            while !over && posted < done + depth {
                let count = (done + depth - posted).min(LIST as u64);
                posted += count;
                self.post(count as usize, posted)?;
            }
            let count = self.next(&mut batch)?;
            done = match self.task.operation {
                Operation::Send => done + count as u64,
                Operation::Read => batch[count - 1].id,
            };
            if !over && done > sampled {
                match meter.completed(since, done) {
                    Some(now) => (sampled, since) = (posted, now),
                    None => over = true,
                }
            }
        }
        if self.task.operation == Operation::Send {
            self.send(Some(END))?;
            self.next(&mut batch[..1])?;
        }
        Ok(meter.outcome())
    }

    fn sink(&self) -> Result<(), Error> {
        let mut batch = [Completion::EMPTY; LIST];
        loop {
            let count = self.next(&mut batch)?;
            if batch[..count].iter().any(|c| c.imm == Some(END)) {
                return Ok(());
            }
            (0..count).try_for_each(|_| self.receive())?;
        }
    }

    fn source(&self) -> Sge {
        self.mr.sge(0, self.task.size as u32)
    }

    fn destination(&self) -> Sge {
        self.mr.sge(self.task.size, self.task.size as u32)
    }

    fn receive(&self) -> Result<(), Error> {
        Ok(self.qp.post_recv(&ReceiveRequest { id: 0, to: &[self.destination()] })?)
    }

    /// Posts one message. The last message carries immediate data instead of a payload.
    fn send(&self, imm: Option<u32>) -> Result<(), Error> {
        let (from, mut inline) = ([self.source()], [0; INLINE_MAX]);
        let op = match imm {
            None if self.task.size <= INLINE_MAX => {
                let data = &mut inline[..self.task.size];
                self.mr.memory().read(0, data);
                Op::SendInline { data }
            }
            None => self.message(&from),
            Some(imm) => Op::SendImm { data: Data::Inline(&[]), imm },
        };
        Ok(self.qp.post_send(&[WorkRequest { id: 0, op, signaled: true }])?)
    }

    fn message<'a>(&self, from: &'a [Sge]) -> Op<'a> {
        if self.task.size > self.sends_max {
            let to = Remote { addr: self.peer.addr + self.task.size as u64, ..self.peer };
            return Op::WriteImm { to, data: Data::Gather(from), imm: 0 };
        }
        Op::Send { from }
    }

    /// Posts `count` operations with one doorbell; `posted` is the total afterwards. A list of
    /// READs has one completion, with id `posted`: a queue executes in order, so the completion of
    /// the last READ implies all READs before it.
    fn post(&self, count: usize, posted: u64) -> Result<(), Error> {
        let (from, to) = ([self.source()], [self.destination()]);
        let (op, signaled) = match self.task.operation {
            Operation::Send => (self.message(&from), true),
            Operation::Read => (Op::Read { from: self.peer, to: &to }, false),
        };
        let mut list = [WorkRequest { id: 0, op, signaled }; LIST];
        list[count - 1] = WorkRequest { id: posted, op, signaled: true };
        Ok(self.qp.post_send(&list[..count])?)
    }

    /// Waits for at least one completion. Fails if one of the completions is an error.
    fn next(&self, out: &mut [Completion]) -> Result<usize, Error> {
        let mut backoff = Backoff::on::<SoftCq>();
        let mut count = self.cq.poll(out);
        while count == 0 {
            if self.cq.offer_cpu() {
                count = self.cq.poll(out);
            }
            if count == 0 && !backoff.snooze() && !self.cq.wait(SILENCE)? {
                let source = std::io::ErrorKind::TimedOut.into();
                return Err(Error::System { what: "receive from the peer", source });
            }
            if count == 0 {
                count = self.cq.poll(out);
            }
        }
        match out[..count].iter().find(|c| c.status != Status::Success) {
            None => Ok(count),
            Some(c) => Err(Error::Verb { what: "move a message", status: c.status }),
        }
    }
}

/// State of one side of a ping-pong: a side sends when a message has arrived and fewer than
/// `OWN_OUTSTANDING` of its own messages are outstanding.
#[derive(Default)]
struct Alternation {
    outstanding: u32,
    received: bool,
    ended: bool,
}

impl Alternation {
    /// Waits until this side may send; false if the peer has ended the measurement.
    fn wait(&mut self, side: &Side) -> Result<bool, Error> {
        while !(self.ended || self.received && self.outstanding < OWN_OUTSTANDING) {
            self.process_completions(side)?;
        }
        self.received = false;
        Ok(!self.ended)
    }

    /// Waits until no message is outstanding.
    fn drain(&mut self, side: &Side) -> Result<(), Error> {
        while self.outstanding > 0 {
            self.process_completions(side)?;
        }
        Ok(())
    }

    fn process_completions(&mut self, side: &Side) -> Result<(), Error> {
        let mut batch = [Completion::EMPTY; 4];
        let count = side.next(&mut batch)?;
        for completion in &batch[..count] {
            match completion.kind {
                CompletionKind::Send => self.outstanding -= 1,
                CompletionKind::Receive => {
                    (self.received, self.ended) = (true, completion.imm == Some(END));
                    side.receive()?;
                }
            }
        }
        Ok(())
    }
}

/// The tables of a run.
pub fn tables(records: &[Record]) -> Vec<(String, Table)> {
    Operation::ALL
        .iter()
        .map(|operation| {
            let metric = |what: &str| format!("{}_{what}", operation.name());
            let pivot = Pivot::rows(["nic", "size", "in_flight"])
                .column(&metric("latency_us"), Statistic::P50)
                .column(&metric("latency_us"), Statistic::P99)
                .column(&metric("rate_per_s"), Statistic::Mean)
                .column(&metric("bandwidth_gb_per_s"), Statistic::Mean);
            (operation.name().to_uppercase(), pivot.table(records))
        })
        .filter(|(_, table)| !table.is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(nics: [NicContext; 2], task: Task) -> Outcome {
        let [mut initiator, mut responder] = nics.each_ref().map(|nic| nic.side(&task).unwrap());
        initiator.connect(&responder.info()).unwrap();
        responder.connect(&initiator.info()).unwrap();
        std::thread::scope(|scope| {
            let responding = scope.spawn(|| responder.respond());
            let outcome = initiator.measure();
            responding.join().expect("no panic").unwrap();
            outcome.unwrap()
        })
    }

    #[test]
    fn every_operation_and_depth_over_udp() {
        for operation in Operation::ALL {
            for (size, in_flight) in [(64, 1), (64, 32), (5000, 1), (200_000, 4)] {
                let duration = Duration::from_millis(10);
                let task = Task { operation, size, in_flight, duration, authenticated: true };
                let nics = [NicContext::roce().unwrap(), NicContext::roce().unwrap()];
                let outcome = run(nics, task);
                assert!(outcome.operations > 0 && outcome.latencies.count() > 0, "{task:?}");
                let records = task.records(&outcome, "roce");
                assert!(records.iter().any(|r| r.metric.starts_with(operation.name())));
            }
        }
    }

    #[test]
    fn latency_is_half_of_a_round_trip() {
        let duration = Duration::from_millis(20);
        let task = Task {
            operation: Operation::Send,
            size: 64,
            in_flight: 1,
            duration,
            authenticated: true,
        };
        let outcome = run([NicContext::roce().unwrap(), NicContext::roce().unwrap()], task);
        let each_us = outcome.elapsed.as_secs_f64() * 1e6 / outcome.operations as f64;
        let off = outcome.latencies.mean_us() / each_us;
        assert!((0.9..1.1).contains(&off), "mean latency over time per message is {off}");
    }
}
